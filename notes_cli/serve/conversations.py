"""Remembers each conversation's skills, and where its errata are, so that later turns have the same prefix.

A client sends all messages at each turn, without the global errata that were added to them. Their places are remembered
by the messages: a later turn has them in the same places, and new ones right before its question, so that earlier
tokens stay the same. A conversation keeps its segments even when others compile its skills again.

Messages do not identify a client, so a client's own errata never reach a client that does not send them, too: only
their places are remembered.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from notes_cli.engine.segment import Segment
from notes_cli.library.global_errata import GlobalErratum
from notes_cli.serve.parsing import ChatRequest
from notes_cli.text.erratum import Erratum, known_fields, read_errata, word
from notes_cli.text.messages import ImagePart, Message

MOST = 4096  # conversations that are remembered, the latest
ALIKE = 16  # turns with the same messages, but other answers or errata
NO_MESSAGE = -1  # number of the message of a copy that is in none


class Copy(NamedTuple):
    """A place of a skill: its text may be in several messages, and several times in a message."""

    name: str
    message: int = NO_MESSAGE
    nth: int = 0  # copy of that skill in that message


@dataclass(frozen=True, slots=True)
class ConversationState:
    """The skills and errata of a conversation after a turn. Messages are numbered as the client sends them."""

    skills: dict[str, Segment] = field(default_factory=dict)
    copies: frozenset[Copy] = frozenset()  # in its prompt
    # Errata directly after a copy of a skill, in the message of a question or a later one.
    after_copy: dict[Copy, tuple[str, ...]] = field(default_factory=dict)
    after_named: tuple[str, ...] = ()  # errata after the skills of the first turn, of fields with values in place
    in_place: dict[tuple[str, str], str] = field(default_factory=dict)  # these values, by skill and field
    before: dict[int, tuple[str, ...]] = field(default_factory=dict)  # errata at the beginning of a message
    client_errata: tuple[str, ...] = ()  # in order; the client sends them at each turn
    values: dict[tuple[str, str], str] = field(default_factory=dict)  # by skill and field, of the latest errata
    n_global: int = 0  # global errata that existed

    def without(self, name: str) -> ConversationState:
        """Forget a skill. Errata directly after its copies leave the prompt with them, also those of other skills: then
        the next turn places all errata anew."""
        state = replace(
            self,
            skills={skill: segment for skill, segment in self.skills.items() if skill != name},
            copies=frozenset(copy for copy in self.copies if copy.name != name),
            values={key: value for key, value in self.values.items() if key[0] != name},
        )
        if any(copy.name == name for copy in self.after_copy) or any(skill == name for skill, _ in self.in_place):
            anew = replace(state, copies=frozenset(), after_copy={}, before={}, client_errata=())
            return replace(anew, after_named=(), in_place={})
        return state


@dataclass(slots=True)
class _Turn:
    state: ConversationState
    answers: tuple[str, ...] = ()  # one for each choice
    last: bool = True  # no later turn of its conversation was answered


class Conversations:
    """The answered conversations, by digests of their messages. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: OrderedDict[bytes, list[_Turn]] = OrderedDict()

    def find(
        self, request: ChatRequest, digests: Sequence[bytes]
    ) -> tuple[ConversationState | None, dict[str, Segment]]:
        """Return the state of the conversation that this request continues, and its skills. The state is None for a new
        one, or if the client does not send the errata that the conversation has. `digests`: `prefix_digests`."""
        with self._lock:
            turn, skills = self._find(request, digests)
        return (turn.state if turn else None), skills

    def _find(self, request: ChatRequest, digests: Sequence[bytes]) -> tuple[_Turn | None, dict[str, Segment]]:
        sent = request.notes.errata
        skills: dict[str, Segment] = {}
        for turns in self._earlier_turns(request, digests):
            skills = skills or turns[-1].state.skills
            same = [turn for turn in turns if sent[: len(turn.state.client_errata)] == turn.state.client_errata]
            if same:
                turn = max(reversed(same), key=lambda turn: len(turn.state.client_errata))
                return turn, {**turn.state.skills, **skills}
        return None, skills

    def _earlier_turns(self, request: ChatRequest, digests: Sequence[bytes]) -> Iterator[list[_Turn]]:
        """Yield the turns with the messages and answers of this conversation, those of its latest answer first."""
        for number in range(len(digests) - 1, 0, -1):
            message = request.messages[number]
            turns = self._turns.get(digests[number - 1], ()) if message.role == "assistant" else ()
            if matching := [turn for turn in turns if _is_answer(message, turn.answers)]:
                yield matching

    def keep(
        self, request: ChatRequest, digests: Sequence[bytes], state: ConversationState, answers: Sequence[str]
    ) -> None:
        """Remember an answered turn. `answers`: the texts that the client got."""
        key = tuple(answers), state.client_errata
        with self._lock:
            before, _ = self._find(request, digests)
            if before:
                before.last = False
            turns = self._turns.setdefault(digests[-1], [])
            turns[:] = [turn for turn in turns if (turn.answers, turn.state.client_errata) != key][1 - ALIKE :]
            turns.append(_Turn(state, tuple(answers)))
            self._turns.move_to_end(digests[-1])
            while len(self._turns) > MOST:
                self._turns.popitem(last=False)

    def count_outdated(self, skill: str, name: str, value: str) -> int:
        """Count the conversations that have a skill with another value of a field."""
        with self._lock:
            turns = (turn for turns in self._turns.values() for turn in turns if turn.last)
            states = [turn.state for turn in turns if skill in turn.state.skills]
        return sum(state.values.get((skill, name), value_of(state.skills[skill], name)) != value for state in states)


def _is_answer(message: Message, answers: Sequence[str]) -> bool:
    """Return True if a message of a client may be one of these answers: clients may cut it off, and write tool calls in
    their own format."""
    text = message.text.strip()
    if message.tool_calls:
        return True
    return any(answer.strip() == text or (text and answer.strip().startswith(text)) for answer in answers)


def value_of(segment: Segment, name: str) -> str | None:
    return next((span.value for span in segment.fields if span.name == name), None)


def prefix_digests(request: ChatRequest) -> list[bytes]:
    """Return for each message a digest of the messages up to it, with the model, skills, tools and salt."""
    shared = [request.salt, request.model, request.notes.splice, request.tools]
    digest = hashlib.sha256(json.dumps(shared, default=dict).encode())
    digests = []
    for message in request.messages:
        calls = [[call.id, call.name, dict(call.arguments)] for call in message.tool_calls]
        parts = [part.picture.text if isinstance(part, ImagePart) else asdict(part) for part in message.parts]
        plain = json.dumps([message.role, parts, calls, message.tool_call_id])
        digest.update(b"\0" + plain.encode())
        digests.append(digest.digest())
    return digests


def place_errata(
    state: ConversationState | None,
    skills: dict[str, Segment],
    copies: Sequence[Copy],
    global_errata: Sequence[GlobalErratum],
    client_errata: Sequence[str],
    question: int,
    wording: str | None,
    result: int | None = None,
    editable: Collection[str] = (),
) -> ConversationState:
    """Add errata at the next turn of a conversation: new global ones, and new ones of the client. The client's are
    repeated if a global one has overruled them, or if their skill has a new copy.

    `copies`: places of skills in the order of the prompt. `question`: number of the user's last message. `result`:
    number of the last message if it is a result of a tool call. `wording`: template of errata. `editable`: skills of
    the first turn whose K/V can get new values in place.

    Errata come at the beginning of the question's message, where models follow them most often; or after the last new
    copy of a skill in that message or a later one. A new copy would overrule the errata before it, so all errata of its
    skill are repeated. While the question is answered by tool calls, global errata wait for the next question, unless
    the client has new errata, which come with the result. New values of skills that come with the first turn are put in
    place, too, and their errata follow the skills, as in `notes ask`. Those of later turns are not: what was decoded
    since depends on the text, and would have to be decoded again.

    Raises SkillError for an erratum of a field that no skill has.
    """
    first, state = state is None, state or ConversationState()
    latest_last = [*dict.fromkeys(copy.name for copy in reversed(copies))][::-1]
    segments = [skills[name] for name in latest_last]  # so that the erratum of the latest comes last
    known = known_fields(*segments)
    new_copies = {copy for copy in copies if copy not in state.copies}
    new_skills = {copy.name for copy in new_copies if not skills[copy.name].is_image}
    wait = result is not None and not first and len(client_errata) == len(state.client_errata)
    parsed = [(at, erratum) for at, text in enumerate(client_errata) for erratum in read_errata([text], known)]
    fields_of = [known.find(erratum.key) if erratum.field and erratum.value else [] for _, erratum in parsed]
    client_fields = {(field.skill, field.field) for fields in fields_of for field in fields}
    values, after_copy = dict(state.values), dict(state.after_copy)
    sentences: list[str] = []
    in_place, after_named = dict(state.in_place), list(state.after_named)
    edited = {name for name in editable if Copy(name) in new_copies}
    last_of = {field: at for (at, _), fields in zip(parsed, fields_of, strict=True) for field in fields}

    def state_errata(texts: Iterable[str], skills: Collection[str]) -> None:
        after = skills and {*skills} <= edited and question <= 1  # else answers with the old value would follow
        (after_named if after else sentences).extend(texts)

    overruled: set[tuple[str, str]] = set()  # fields with a new global erratum

    def sentence(skill: str, name: str) -> str:
        (reference,) = [field for field in known.find(f"{skill}.{name}") if field.skill == skill][:1]
        return word(Erratum(name, values[skill, name], "", skill if reference.shared else ""), wording)

    last_copies = {copy.name: copy for copy in copies}
    for name, segment in zip(latest_last, segments, strict=True):
        is_known = name in state.skills
        latest: dict[str, GlobalErratum] = {}
        # Errata since the last turn may be about the skill's older text, too. (A shorter file was repaired.)
        start = state.n_global if is_known and state.n_global <= len(global_errata) else 0
        for erratum in global_errata[start:] if not (is_known and wait) else ():
            if erratum.skill == name and (is_known or value_of(segment, erratum.field) == erratum.was):
                latest[erratum.field] = erratum
        new = {
            (name, field): erratum.value
            for field, erratum in latest.items()
            if values.get((name, field), value_of(segment, field)) != erratum.value
        }
        values |= new
        if last_copies[name] in new_copies:
            keys = [key for key in values if key[0] == name and key not in client_fields]
            state_errata((sentence(*key) for key in keys), [name])
        else:
            sentences += [sentence(*key) for key in new]
            overruled |= set(new)
    for (at, client_erratum), fields in zip(parsed, fields_of, strict=True):
        repeat = any((field.skill, field.field) in overruled or field.skill in new_skills for field in fields)
        if at < len(state.client_errata) and not repeat and (fields or not new_skills):
            continue
        values |= {(field.skill, field.field): client_erratum.value or "" for field in fields}
        if not fields or any(last_of[field] == at for field in fields):  # else a later one of this turn supersedes it
            state_errata([word(client_erratum, wording)], {field.skill for field in fields})
    in_place |= {key: value for key, value in values.items() if key[0] in edited}
    before = dict(state.before)
    after = next((copy for copy in reversed(copies) if copy in new_copies and copy.message >= question), None)
    if sentences and after:
        after_copy[after] = (*after_copy.get(after, ()), *sentences)
    elif sentences:
        number = question if first or result is None else result
        before[number] = (*before.get(number, ()), *sentences)
    return replace(
        state,
        skills=dict(skills),
        copies=frozenset(copies),
        after_copy=after_copy,
        after_named=tuple(after_named),
        in_place=in_place,
        before=before,
        client_errata=tuple(client_errata),
        values=values,
        n_global=state.n_global if wait else len(global_errata),
    )
