"""Conversations that come again with every turn: what each has been told, and with which skills it began.

A client sends all messages each time, and knows nothing of errata that others gave. So it is remembered which of them
were said before which message: a later turn has them in the same place, and only what is new is said, right before the
new question. What was read before stays as it is. The skills are remembered, too: a conversation goes on with those
that it has when others compile them again.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from notes_cli.engine.segment import Segment
from notes_cli.library.standing import Standing
from notes_cli.runtime.assembling import known_fields, parse_errata
from notes_cli.serve.parsing import Asked
from notes_cli.text.erratum import Erratum, word
from notes_cli.text.messages import ImagePart, Message

MOST = 4096  # conversations that are remembered, the latest


@dataclass(frozen=True, slots=True)
class Talk:
    """What is remembered of a conversation after one of its turns. Messages are counted as the client sends them."""

    skills: dict[str, Segment] = field(default_factory=dict)
    with_skill: dict[str, tuple[str, ...]] = field(default_factory=dict)  # said right after a skill, when it came
    early: tuple[str, ...] = ()  # said after the skills of the first turn
    before: dict[int, tuple[str, ...]] = field(default_factory=dict)  # said before a message
    own: frozenset[str] = frozenset()  # errata that the client gave: one that it gives once more is said again
    values: dict[tuple[str, str], str] = field(default_factory=dict)  # of skills' fields, as they were said last
    heard: int = 0  # standing errata that were there


@dataclass(slots=True)
class _Turn:
    talk: Talk
    answer: str | None = None  # of the model
    last: bool = True  # none of its later turns has come yet


class Conversations:
    """Those that were answered, by their messages."""

    def __init__(self) -> None:
        self._turns: OrderedDict[bytes, list[_Turn]] = OrderedDict()

    def find(self, asked: Asked) -> Talk | None:
        """What is remembered of the conversation that this goes on with; None for a new one."""
        turn = self._find(asked)
        return turn.talk if turn else None

    def _find(self, asked: Asked) -> _Turn | None:
        keys = _keys(asked)
        for number in range(len(keys) - 1, 0, -1):
            message = asked.messages[number]
            turns = self._turns.get(keys[number - 1]) if message.role == "assistant" else None
            if turns:
                text = message.text.strip()
                said = [one for one in turns if one.answer is not None and one.answer.strip() == text]
                said = said or [one for one in turns if text and one.answer and one.answer.strip().startswith(text)]
                own = frozenset(asked.notes.errata)
                return max(reversed(said or turns), key=lambda one: (one.talk.own == own, not one.talk.own))
        return None

    def keep(self, asked: Asked, talk: Talk, answer: str | None) -> None:
        """A turn was answered."""
        before = self._find(asked)
        if before:
            before.last = False
        key = _keys(asked)[-1]
        turns = self._turns.setdefault(key, [])
        turns[:] = [one for one in turns if (one.answer, one.talk.own) != (answer, talk.own)][-3:]
        turns.append(_Turn(talk, answer))
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
    errata: Sequence[Standing],
    own: Sequence[str],
    question: int,
    wording: str | None,
    result: int | None = None,
) -> Talk:
    """What a conversation is told at its next turn, of which `question` is the last message of the user: standing
    errata that it has not heard, and the client's own. `result`: the question was answered by calls of tools already,
    and this message is the last result. Then what everybody is told waits for the next question, unless the client
    has something to say of its own, which comes after it, with the result.

    Raise SkillError for one of a field that no skill has.
    """
    first, talk = talk is None, talk or Talk()
    new = [text for text in own if text not in talk.own]
    waits = result is not None and not first and not new
    segments = list(skills.values())
    known = known_fields(*segments)
    values, with_skill = dict(talk.values), dict(talk.with_skill)
    said: list[str] = []

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
                else:
                    with_skill[name] = (*with_skill.get(name, ()), sentence(one))
    for erratum in parse_errata(new, segments):
        said.append(word(erratum, wording))
        for found in known.find(erratum.key) if erratum.field and erratum.value else ():
            values[found.skill, found.field] = erratum.value or ""
    before = dict(talk.before)
    if said and not first:
        at = question if result is None else result
        before[at] = (*before.get(at, ()), *said)
    return replace(
        talk,
        skills=dict(skills),
        with_skill=with_skill,
        early=tuple(said) if first else talk.early,
        before=before,
        own=frozenset(own),
        values=values,
        heard=talk.heard if waits else len(errata),
    )
