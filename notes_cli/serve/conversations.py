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
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from notes_cli.engine.segment import Segment
from notes_cli.library.global_errata import GlobalErratum
from notes_cli.runtime.corrections import known_fields, parse_errata
from notes_cli.serve.parsing import ChatRequest
from notes_cli.text.erratum import Erratum, word
from notes_cli.text.messages import ImagePart, Message

MOST = 4096  # conversations that are remembered, the latest
ALIKE = 16  # of the same messages, that differ in answers or errata
NAMED = -1  # for the number of a message, of a skill that is in none


class Copy(NamedTuple):
    """A place that has a skill: its text may be in several messages, and several times in one."""

    name: str
    message: int = NAMED
    nth: int = 0  # of that skill in that message


@dataclass(frozen=True, slots=True)
class Talk:
    """What is remembered of a conversation after one of its turns. Messages are counted as the client sends them."""

    skills: dict[str, Segment] = field(default_factory=dict)
    copies: frozenset[Copy] = frozenset()  # of them, in its prompt
    # Errata directly after a copy of a skill that is in the message of a question, or in one after it.
    with_copy: dict[Copy, tuple[str, ...]] = field(default_factory=dict)
    before: dict[int, tuple[str, ...]] = field(default_factory=dict)  # errata at the beginning of a message
    own: tuple[str, ...] = ()  # errata of the client that were said, in order: each turn has to give them again
    values: dict[tuple[str, str], str] = field(default_factory=dict)  # of skills' fields, as they were said last
    heard: int = 0  # standing errata that were there

    def without(self, name: str) -> Talk:
        """The same without a skill, of which nothing is remembered. Errata of other skills may be directly after its
        copies, and leave the prompt with them: then the next turn repeats all errata that still hold, and places them
        anew."""
        rest = replace(
            self,
            skills={one: segment for one, segment in self.skills.items() if one != name},
            copies=frozenset(copy for copy in self.copies if copy.name != name),
            values={key: value for key, value in self.values.items() if key[0] != name},
        )
        if any(copy.name == name for copy in self.with_copy):
            return replace(rest, copies=frozenset(), with_copy={}, before={}, own=())
        return rest


@dataclass(slots=True)
class _Turn:
    talk: Talk
    answers: tuple[str, ...] = ()  # of the model, one for each choice
    last: bool = True  # none of its later turns has come yet


class Conversations:
    """Those that were answered, by their messages. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: OrderedDict[bytes, list[_Turn]] = OrderedDict()

    def find(self, request: ChatRequest, keys: Sequence[bytes]) -> tuple[Talk | None, dict[str, Segment]]:
        """What is remembered of the conversation that this goes on with, and the skills that it has. None for a new
        one, and for one that was told what the client does not say: of that it has the skills. `keys`: of its messages
        (`keys_of`)."""
        with self._lock:
            turn, skills = self._find(request, keys)
        return (turn.talk if turn else None), skills

    def _find(self, request: ChatRequest, keys: Sequence[bytes]) -> tuple[_Turn | None, dict[str, Segment]]:
        own = request.notes.errata
        skills: dict[str, Segment] = {}
        for turns in self._before(request, keys):
            skills = skills or turns[-1].talk.skills
            same = [one for one in turns if own[: len(one.talk.own)] == one.talk.own]
            if same:
                turn = max(reversed(same), key=lambda one: len(one.talk.own))
                return turn, {**turn.talk.skills, **skills}
        return None, skills

    def _before(self, request: ChatRequest, keys: Sequence[bytes]) -> Iterator[list[_Turn]]:
        """The turns that ended as this conversation has it, those of its latest answer first."""
        for number in range(len(keys) - 1, 0, -1):
            message = request.messages[number]
            turns = self._turns.get(keys[number - 1], ()) if message.role == "assistant" else ()
            if said := [one for one in turns if _is_answer(message, one.answers)]:
                yield said

    def keep(self, request: ChatRequest, keys: Sequence[bytes], talk: Talk, answers: Sequence[str]) -> None:
        """A turn was answered; of an answer that was stopped the text that its client got."""
        with self._lock:
            before, _ = self._find(request, keys)
            if before:
                before.last = False
            turns = self._turns.setdefault(keys[-1], [])
            turns[:] = [one for one in turns if (one.answers, one.talk.own) != (tuple(answers), talk.own)][1 - ALIKE :]
            turns.append(_Turn(talk, tuple(answers)))
            self._turns.move_to_end(keys[-1])
            while len(self._turns) > MOST:
                self._turns.popitem(last=False)

    def having(self, skill: str, name: str, value: str) -> int:
        """How many conversations have a skill whose field was not said to have this value."""
        with self._lock:
            last = [
                one.talk for turns in self._turns.values() for one in turns if one.last and skill in one.talk.skills
            ]
        return sum(talk.values.get((skill, name), value_of(talk.skills[skill], name)) != value for talk in last)


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


def keys_of(request: ChatRequest) -> list[bytes]:
    """A digest of the messages up to each of them."""
    whose = [request.notes.cache_salt, request.model, request.notes.splice, request.tools]
    digest = hashlib.sha256(json.dumps(whose, default=dict).encode())
    keys = []
    for message in request.messages:
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
    copies: Sequence[Copy],
    errata: Sequence[GlobalErratum],
    own: Sequence[str],
    question: int,
    wording: str | None,
    result: int | None = None,
) -> Talk:
    """What a conversation is told at its next turn, of which `question` is the last message of the user: standing
    errata that it has not heard, and the client's own, said again where a standing one has said another value since, or
    a skill comes that they are of, too.

    Errata come in the message with the question, directly before its words, where models follow them most often; where
    that message or a later one has a new copy of a skill, after the last one. `copies`: the places that have skills, in
    the order of the prompt. A copy that is new in this turn would overrule an erratum before it, so all that holds of
    its skill comes again. `result`: the question was answered by calls of tools already, and this message is the last
    result. Then global errata wait for the next question, unless the client has errata of its own, which come with the
    result.

    Raise SkillError for one of a field that no skill has.
    """
    first, talk = talk is None, talk or Talk()
    latest_last = [*dict.fromkeys(copy.name for copy in reversed(copies))][::-1]
    segments = [skills[name] for name in latest_last]  # so that the erratum of the latest comes last
    known = known_fields(*segments)
    fresh = {copy for copy in copies if copy not in talk.copies}
    came = {copy.name for copy in fresh if not skills[copy.name].is_image}
    waits = result is not None and not first and len(own) == len(talk.own)
    given = [(at, erratum) for at, text in enumerate(own) for erratum in parse_errata([text], segments)]
    meant = [known.find(one.key) if one.field and one.value else [] for _, one in given]
    owned = {(one.skill, one.field) for of in meant for one in of}
    values, with_copy = dict(talk.values), dict(talk.with_copy)
    said: list[str] = []
    overruled: set[tuple[str, str]] = set()  # by a standing one that is said now

    def sentence(skill: str, name: str) -> str:
        (reference,) = [found for found in known.find(f"{skill}.{name}") if found.skill == skill][:1]
        return word(Erratum(name, values[skill, name], "", skill if reference.shared else ""), wording)

    last = {copy.name: copy for copy in copies}
    for name, segment in zip(latest_last, segments, strict=True):
        there = name in talk.skills
        latest: dict[str, GlobalErratum] = {}
        # What was given since its last turn is about its older text, too. (A file that has become shorter was mended.)
        for one in errata[talk.heard if there and talk.heard <= len(errata) else 0 :] if not (there and waits) else ():
            if one.skill == name and (there or value_of(segment, one.field) == one.was):
                latest[one.field] = one
        new = {
            (name, field): one.value
            for field, one in latest.items()
            if values.get((name, field), value_of(segment, field)) != one.value
        }
        values |= new
        if last[name] in fresh:
            said += [sentence(*key) for key in values if key[0] == name and key not in owned]
        else:
            said += [sentence(*key) for key in new]
            overruled |= set(new)
    for (at, erratum), of in zip(given, meant, strict=True):
        again = any((one.skill, one.field) in overruled or one.skill in came for one in of) or bool(came and not of)
        if at < len(talk.own) and not again:
            continue
        said.append(word(erratum, wording))
        values |= {(its.skill, its.field): erratum.value or "" for its in of}
    before = dict(talk.before)
    after = next((copy for copy in reversed(copies) if copy in fresh and copy.message >= question), None)
    if said and after:
        with_copy[after] = (*with_copy.get(after, ()), *said)
    elif said:
        place = question if first or result is None else result
        before[place] = (*before.get(place, ()), *said)
    return replace(
        talk,
        skills=dict(skills),
        copies=frozenset(copies),
        with_copy=with_copy,
        before=before,
        own=tuple(own),
        values=values,
        heard=talk.heard if waits else len(errata),
    )
