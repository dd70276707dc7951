"""Remembers each conversation's skills, and where its errata are, so that later turns have the same prefix.

Skills are segments, or texts for another server (skill_texts.py).

A client sends all messages at each turn, without the errata that were added to them. These are remembered by the
messages: a later turn has them in the same places, and new ones right before its question, so that earlier tokens stay
the same. A conversation keeps its segments even when others compile its skills again.

Messages do not identify a client, so a client's own errata never reach a client that does not send them, too.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Generic, TypeVar

from notes_cli.library.global_errata import GlobalErratum, Text, holding
from notes_cli.runtime.place import Corrections, Policy, erratum_of, key_of, place, skill_of, values_in, with_errata
from notes_cli.serve.parsing import ChatRequest
from notes_cli.text.erratum import Erratum, known_fields, read_errata
from notes_cli.text.messages import ErratumPart, ImagePart, Message, SkillPart

MOST = 4096  # conversations that are remembered, the latest
ALIKE = 16  # turns with the same messages, but other answers or errata

S = TypeVar("S", bound=Text)


@dataclass(frozen=True, slots=True)
class ConversationState(Generic[S]):
    """The skills and corrections of a conversation after a turn."""

    skills: dict[str, S] = field(default_factory=dict)
    corrections: Corrections = field(default_factory=Corrections)
    in_place: Mapping[str, str] = field(default_factory=dict)  # values of the first turn in texts, by `skill.field`
    # By number of the client's message; -1: of a system message before it.
    errata: Mapping[int, tuple[ErratumPart, ...]] = field(default_factory=dict)
    n_messages: int = 0
    n_global: int = 0  # global errata that existed
    client_errata: tuple[str, ...] = ()  # in order; the client sends them at each turn

    def without(self, name: str) -> ConversationState[S]:
        """Forget a skill, with its errata."""
        errata = {
            number: tuple(part for part in parts if skill_of(part.key) != name) for number, parts in self.errata.items()
        }
        return replace(
            self,
            skills={skill: segment for skill, segment in self.skills.items() if skill != name},
            corrections=self.corrections.without([key for key in self.corrections.values if skill_of(key) == name]),
            in_place={key: value for key, value in self.in_place.items() if skill_of(key) != name},
            errata=errata,
        )

    def value(self, skill: str, name: str) -> str | None:
        """Return the value of a field: the latest, else that of the text."""
        text = next((span.value for span in self.skills[skill].fields if span.name == name), None)
        return self.corrections.values.get(f"{skill}.{name}", text)


@dataclass(slots=True)
class _Turn(Generic[S]):
    state: ConversationState[S]
    answers: tuple[str, ...]  # one for each choice; empty: any
    last: bool = True  # no later turn of its conversation was answered


class Conversations(Generic[S]):
    """The answered conversations, by digests of their messages. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: OrderedDict[bytes, list[_Turn[S]]] = OrderedDict()

    def find(self, request: ChatRequest, digests: Sequence[bytes]) -> tuple[ConversationState[S] | None, dict[str, S]]:
        """Return the state of the conversation that this request continues, and its skills. The state is None for a new
        one, or if the client does not send the errata that the conversation has. `digests`: `prefix_digests`."""
        with self._lock:
            turn, skills = self._find(request, digests)
        return (turn.state if turn else None), skills

    def _find(self, request: ChatRequest, digests: Sequence[bytes]) -> tuple[_Turn[S] | None, dict[str, S]]:
        sent = request.notes.errata
        skills: dict[str, S] = {}
        for turns in self._earlier_turns(request, digests):
            skills = skills or turns[-1].state.skills
            same = [turn for turn in turns if sent[: len(turn.state.client_errata)] == turn.state.client_errata]
            if same:
                turn = max(reversed(same), key=lambda turn: len(turn.state.client_errata))
                return turn, {**turn.state.skills, **skills}
        return None, skills

    def _earlier_turns(self, request: ChatRequest, digests: Sequence[bytes]) -> Iterator[list[_Turn[S]]]:
        """Yield the turns with the messages and answers of this conversation, those of its latest answer first."""
        for number in range(len(digests) - 1, 0, -1):
            message = request.messages[number]
            turns = self._turns.get(digests[number - 1], ()) if message.role == "assistant" else ()
            if matching := [turn for turn in turns if _is_answer(message, turn.answers)]:
                yield matching

    def keep(
        self, request: ChatRequest, digests: Sequence[bytes], state: ConversationState[S], answers: Sequence[str]
    ) -> None:
        """Remember a turn. `answers`: the texts that the client got; none: it may get any."""
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
        return sum(state.value(skill, name) != value for state in states)


def _is_answer(message: Message, answers: Sequence[str]) -> bool:
    """Return True if a message of a client may be one of these answers: clients may cut it off, and write tool calls in
    their own format."""
    text = message.text.strip()
    if message.tool_calls or not answers:
        return True
    return any(answer.strip() == text or (text and answer.strip().startswith(text)) for answer in answers)


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


def add_errata(
    state: ConversationState[S] | None,
    messages: Sequence[Message],
    skills: dict[str, S],
    global_errata: Sequence[GlobalErratum],
    client_errata: Sequence[str],
    wording: str | None,
    *,
    head: bool = False,
    editable: Collection[str] = (),
) -> tuple[list[Message], ConversationState[S]]:
    """Return the messages of the next turn with all errata, and the state after it.

    `messages`: the client's with the parts of `skills`, but for images; `head`: after a system message that the client
    does not send. `editable`: skills that no message of the client has: if they are new, the text gets their values.

    New errata are of new skills, of skills with a new copy, which would overrule earlier ones, and the client's own, by
    which it overrules global ones. They come with the question, or with a later message that has a new copy. While the
    question is answered by tool calls, new global errata of earlier skills wait for the next one, and new ones of the
    client come with the last result. Raises SkillError for an erratum of a field that no skill has.
    """
    first = state is None
    before: ConversationState[S] = state or ConversationState()
    for name, old in before.skills.items():
        if name not in skills or skills[name].text != old.text:
            before = before.without(name)
    corrections = before.corrections
    offset = int(head)
    messages = [with_errata(message, before.errata.get(number - offset, ())) for number, message in enumerate(messages)]
    start = before.n_messages + offset if not first else 0
    named = [
        {part.name for part in message.parts if isinstance(part, SkillPart)} & skills.keys() for message in messages
    ]
    added = {name for name in skills if name not in before.skills}
    copied = {name for names in named[start:] for name in names} | added

    known = known_fields(*skills.values())
    texts = values_in(skills.values()) | dict(before.in_place)
    client = [(at, erratum) for at, text in enumerate(client_errata) for erratum in read_errata([text], known)]
    keys = [key_of(known, erratum) for _, erratum in client]
    errata: list[Erratum] = []
    for name, skill in skills.items():
        seen = before.n_global if name in before.skills and before.n_global <= len(global_errata) else None
        for field_name, value in holding(global_errata, skill, seen, any_text=True).items():
            key = f"{name}.{field_name}"
            if key in keys or key not in texts or corrections.values.get(key, texts[key]) == value:
                continue
            if name in added:
                errata.append(erratum_of(known, key, value))
            else:
                corrections = corrections.given(key, value, in_place=False, states=True)
    for key, value in corrections.values.items():
        if skill_of(key) in copied and key in corrections.stated and key not in keys and value != texts[key]:
            errata.append(erratum_of(known, key, value))
    for (at, erratum), key in zip(client, keys, strict=True):
        again = bool(copied) if not key else skill_of(key) in copied or key not in corrections.values
        if at >= len(before.client_errata) or again:
            errata.append(erratum)

    question = _question(messages)
    answering = any(message.role == "assistant" for message in messages[question:])
    copies = [number for number in range(max(start, question), len(messages)) if named[number]]
    last = copies[-1] if copies else len(messages) - 1 if answering and not first else question
    policy = Policy([name for name in editable if name in added], wording=wording)
    placed, corrections = place(messages[: last + 1], [*skills.values()], errata, corrections, policy, known)
    messages = [*placed, *messages[last + 1 :]]
    parts = [tuple(part for part in message.parts if isinstance(part, ErratumPart)) for message in messages]
    in_place = {key: corrections.values[key] for key in corrections.in_place}
    return messages, ConversationState(
        skills=skills,
        corrections=corrections,
        in_place={**before.in_place, **{key: value for key, value in in_place.items() if skill_of(key) in added}},
        errata={number - offset: errata for number, errata in enumerate(parts) if errata},
        n_messages=len(messages) - offset,
        n_global=len(global_errata),
        client_errata=tuple(client_errata),
    )


def _question(messages: Sequence[Message]) -> int:
    """Return the number of the message that begins the turn: the user's last one, or a system message in its place,
    after an answer."""
    for number, message in reversed([*enumerate(messages)]):
        before = messages[number - 1] if number else None
        answered = before is not None and before.role == "assistant" and not before.tool_calls
        if message.role == "user" or (message.role == "system" and answered):
            return number
    return len(messages) - 1
