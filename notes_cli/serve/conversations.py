"""Conversations that come again with every turn: what each has been told, and with which skills it began.

A client sends all messages each time, and knows nothing of errata that everybody is told. So it is remembered which of
them were said before which message: a later turn has them in the same place, and only what is new is said, right before
the new question. What was read before stays as it is. The skills are remembered, too: a conversation goes on with those
that it has when others compile them again.

Messages do not tell two clients apart. So nothing that one has corrected is said to whoever does not say it, too: what
is remembered of a client's own errata is where they were said, never that they were.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from notes_cli.engine.segment import Segment
from notes_cli.library.standing import Standing
from notes_cli.runtime.assembling import known_fields, parse_errata
from notes_cli.serve.parsing import Asked
from notes_cli.text.erratum import Erratum, word
from notes_cli.text.messages import ImagePart, Message

MOST = 4096  # conversations that are remembered, the latest
ALIKE = 16  # of the same messages, that differ in answers or errata


@dataclass(frozen=True, slots=True)
class Talk:
    """What is remembered of a conversation after one of its turns. Messages are counted as the client sends them."""

    skills: dict[str, Segment] = field(default_factory=dict)
    with_skill: dict[str, tuple[str, ...]] = field(default_factory=dict)  # said right after a skill, when it came
    early: tuple[str, ...] = ()  # said after the skills that the first turn names
    before: dict[int, tuple[str, ...]] = field(default_factory=dict)  # said before a message
    own: tuple[str, ...] = ()  # errata of the client that were said, in order: each turn has to give them again
    values: dict[tuple[str, str], str] = field(default_factory=dict)  # of skills' fields, as they were said last
    heard: int = 0  # standing errata that were there


@dataclass(slots=True)
class _Turn:
    talk: Talk
    answers: tuple[str, ...] = ()  # of the model, one for each choice
    last: bool = True  # none of its later turns has come yet


class Conversations:
    """Those that were answered, by their messages."""

    def __init__(self) -> None:
        self._turns: OrderedDict[bytes, list[_Turn]] = OrderedDict()

    def find(self, asked: Asked) -> tuple[Talk | None, dict[str, Segment]]:
        """What is remembered of the conversation that this goes on with, and the skills that it has. None for a new
        one, and for one that was told what the client does not say: of that it has the skills."""
        turn, skills = self._find(asked)
        return (turn.talk if turn else None), skills

    def _find(self, asked: Asked) -> tuple[_Turn | None, dict[str, Segment]]:
        own = asked.notes.errata
        skills: dict[str, Segment] = {}
        for turns in self._before(asked):
            skills = skills or turns[-1].talk.skills
            same = [one for one in turns if own[: len(one.talk.own)] == one.talk.own]
            if same:
                turn = max(reversed(same), key=lambda one: len(one.talk.own))
                return turn, {**turn.talk.skills, **skills}
        return None, skills

    def _before(self, asked: Asked) -> Iterator[list[_Turn]]:
        """The turns that ended as this conversation has it, those of its latest answer first."""
        keys = _keys(asked)
        for number in range(len(keys) - 1, 0, -1):
            message = asked.messages[number]
            turns = self._turns.get(keys[number - 1], ()) if message.role == "assistant" else ()
            if said := [one for one in turns if _is_answer(message, one.answers)]:
                yield said

    def keep(self, asked: Asked, talk: Talk, answers: Sequence[str]) -> None:
        """A turn was answered; of an answer that was stopped what the client has heard."""
        before, _ = self._find(asked)
        if before:
            before.last = False
        key = _keys(asked)[-1]
        turns = self._turns.setdefault(key, [])
        turns[:] = [one for one in turns if (one.answers, one.talk.own) != (tuple(answers), talk.own)][1 - ALIKE :]
        turns.append(_Turn(talk, tuple(answers)))
        self._turns.move_to_end(key)
        while len(self._turns) > MOST:
            self._turns.popitem(last=False)

    def having(self, skill: str, name: str, value: str) -> int:
        """How many conversations have a skill whose field was not said to have this value."""
        count = 0
        for turns in self._turns.values():
            for one in turns:
                segment = one.talk.skills.get(skill) if one.last else None
                if segment and one.talk.values.get((skill, name), value_of(segment, name)) != value:
                    count += 1
        return count


def _is_answer(message: Message, answers: Sequence[str]) -> bool:
    """Whether a client may have made this message of one of these answers: it may have cut it off, and sends calls of
    tools in a form of its own."""
    text = message.text.strip()
    if message.tool_calls:
        return True
    return any(one.strip() == text or (text and one.strip().startswith(text)) for one in answers)


def value_of(segment: Segment, name: str) -> str | None:
    """What the text of a skill says of a field."""
    return next((span.value for span in segment.fields if span.name == name), None)


def _keys(asked: Asked) -> list[bytes]:
    """A digest of the messages up to each of them."""
    whose = [asked.notes.cache_salt, asked.model, asked.notes.splice, asked.tools]
    digest = hashlib.sha256(json.dumps(whose, default=dict).encode())
    keys = []
    for message in asked.messages:
        digest.update(b"\0" + json.dumps(_plain(message)).encode())
        keys.append(digest.digest())
    return keys


def _plain(message: Message) -> list[object]:
    calls = [[call.id, call.name, dict(call.arguments)] for call in message.tool_calls]
    parts = [part.picture.text if isinstance(part, ImagePart) else asdict(part) for part in message.parts]
    return [message.role, parts, calls, message.tool_call_id]


def told(
    talk: Talk | None,
    skills: dict[str, Segment],
    named: Collection[str],
    errata: Sequence[Standing],
    own: Sequence[str],
    question: int,
    wording: str | None,
    result: int | None = None,
) -> Talk:
    """What a conversation is told at its next turn, of which `question` is the last message of the user: standing
    errata that it has not heard, and the client's own, said again where a standing one has said another value since, or
    a skill comes that they are of, too.

    `named`: the skills that are in no message. What is about one of a message of this turn is said right after it: the
    skill would overrule a sentence before it. `result`: the question was answered by calls of tools already, and this
    message is the last result. Then what everybody is told waits for the next question, unless the client has something
    to say of its own, which comes after it, with the result.

    Raise SkillError for one of a field that no skill has.
    """
    first, talk = talk is None, talk or Talk()
    segments = list(skills.values())
    known = known_fields(*segments)
    fresh = [name for name in skills if name not in named and name not in talk.skills]  # they come with this turn
    new = own[len(talk.own) :]
    waits = result is not None and not first and not new
    values, with_skill = dict(talk.values), dict(talk.with_skill)
    said: list[str] = []
    overruled: set[tuple[str, str]] = set()  # by a standing one that is said now

    def sentence(one: Standing) -> str:
        (reference,) = [found for found in known.find(f"{one.skill}.{one.field}") if found.skill == one.skill][:1]
        shown = one.skill if reference.shared else ""
        return word(Erratum(one.field, one.value, "", shown), wording)

    for name, segment in skills.items():
        there = name in talk.skills
        latest: dict[str, Standing] = {}
        # What was given since its last turn is about its older text, too. (A file that has become shorter was mended.)
        for one in errata[talk.heard if there and talk.heard <= len(errata) else 0 :] if not (there and waits) else ():
            if one.skill == name and (there or value_of(segment, one.field) == one.was):
                latest[one.field] = one
        for one in latest.values():
            if values.get((name, one.field), one.was) != one.value:
                values[name, one.field] = one.value
                if there:
                    said.append(sentence(one))
                    overruled.add((name, one.field))
                else:
                    with_skill[name] = (*with_skill.get(name, ()), sentence(one))
    given = [(at, erratum) for at, text in enumerate(own) for erratum in parse_errata([text], segments)]
    for at, erratum in given:
        of = known.find(erratum.key) if erratum.field and erratum.value else ()
        again = any((its.skill, its.field) in overruled or its.skill in fresh for its in of)
        if at < len(talk.own) and not again:
            continue
        after = [name for name in fresh if not of or name in {its.skill for its in of}]
        if after:
            with_skill[after[-1]] = (*with_skill.get(after[-1], ()), word(erratum, wording))
        else:
            said.append(word(erratum, wording))
        for its in of:
            values[its.skill, its.field] = erratum.value or ""
    before = dict(talk.before)
    if said and not first:
        place = question if result is None else result
        before[place] = (*before.get(place, ()), *said)
    return replace(
        talk,
        skills=dict(skills),
        with_skill=with_skill,
        early=tuple(said) if first else talk.early,
        before=before,
        own=tuple(own),
        values=values,
        heard=talk.heard if waits else len(errata),
    )
