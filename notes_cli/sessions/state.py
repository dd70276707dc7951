"""The state of a session: its conversation with corrections, and beside it the tokens and the places of their K/V.

An operation changes the conversation and renders it (session_kv.py), and the K/V follows the difference of the tokens.

A snapshot has the whole state after an operation: one JSON object, and the SHA-256 of its line (docs/format.md). Its
values have the types of the dataclasses and must agree with each other: an imported one may be anyone's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any, Literal

from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.positions import Image, Patch, Range, apply_patches, is_ascending, position_map, removed_images
from notes_cli.engine.segment import FieldSpan, Identity
from notes_cli.library.global_errata import GlobalErratum, applying
from notes_cli.library.metadata import from_json, to_json
from notes_cli.runtime.place import Corrections, values_in
from notes_cli.text.erratum import Known, known_fields, word
from notes_cli.text.messages import ErratumPart, Message, SkillPart, TextPart

TRACE = "forgotten"  # kind of an entry that marks a cut


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of the sequence, as engine.Piece; or an edit or a cut, without tokens, whose method is `how`."""

    kind: str
    name: str  # of a skill or a tool; of the field of an erratum or edit, `skill.field`
    text: str
    position: int
    tokens: int
    how: str
    turn: int = 0  # from 1: the turn of a piece, the turn before an edit or a cut
    reason: Reason = Reason.PLAIN
    detail: str = ""
    moved: int = 0  # of an edit: KV entries that it moved
    rewritten: int = 0  # of an edit: those that it computed
    blocks: int = 0
    kept: str = ""
    nbytes: int = 0
    erratum: bool = False  # of an edit: it adds an erratum before the next question
    contradicted: bool = False  # of an edit of the text: an earlier erratum comes after it

    @classmethod
    def of(cls, piece: Piece, name: str, text: str, turn: int) -> Entry:
        values = {part.name: getattr(piece, part.name) for part in fields(Piece) if part.name in cls.__slots__}
        return cls(**{**values, "name": name, "text": text, "turn": turn})

    @property
    def end(self) -> int:
        return self.position + self.tokens

    @property
    def thought(self) -> bool:
        """True for reasoning, and for the tokens that end it."""
        return self.kind == "answer" and self.reason in (Reason.THOUGHT, Reason.THOUGHT_END)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a turn with its tokens: a chunk of the prompt, or of an answer as it was generated."""

    tokens: tuple[int, ...]
    kind: str = "answer"
    name: str = ""
    reason: Reason = Reason.PLAIN  # of an answer: reasoning, or chosen
    detail: str = ""

    @property
    def thought(self) -> bool:
        """True for reasoning, and for the tokens that end it."""
        return self.reason in (Reason.THOUGHT, Reason.THOUGHT_END)

    @property
    def key(self) -> object:
        """By which parts are compared: a skill's name, as its values may change and images may share tokens; else the
        tokens."""
        return self.name if self.kind == "splice" else self.tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message (the first after the system message, if any) or the results of tools, and the answer."""

    messages: tuple[Message, ...]
    answer: tuple[Part, ...] = ()
    reasoning: Literal["none", "requested", "removed"] = "none"  # which generation prompt the answer follows

    @property
    def results(self) -> list[tuple[str, str]]:
        """The name of each tool with its result; empty for a question."""
        return [(message.name, message.text) for message in self.messages if message.role == "tool"]

    @property
    def question(self) -> str:
        texts = [part.text for part in self.messages[-1].parts if isinstance(part, TextPart)]
        return ", ".join(f"{name}: {text}" for name, text in self.results) or "".join(texts[-1:])

    @property
    def skills(self) -> list[str]:
        return [part.name for message in self.messages for part in message.parts if isinstance(part, SkillPart)]

    @property
    def errata(self) -> list[ErratumPart]:
        return [part for message in self.messages for part in message.parts if isinstance(part, ErratumPart)]


@dataclass(frozen=True, slots=True)
class SkillText:
    """A spliced skill with its current text. Field spans count from its first token."""

    name: str
    text: str
    fields: tuple[FieldSpan, ...] = ()
    compiled: Mapping[str, str] = field(default_factory=dict)  # values of its fields when it was added
    marks: tuple[str, ...] = ()  # its identity in library/global_errata.py
    in_place: bool = False  # a turn's corrections were computed in place: K/V after them depends on the old values


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a session: the skill that each turn moves to just before its question."""

    name: str  # of the skill
    reference: str  # to open it again: a path, or the name of a compiled skill


@dataclass(frozen=True, slots=True)
class Rows:
    """The K/V of consecutive tokens: rows [first, first + count) of a file."""

    file: str
    first: int
    count: int


@dataclass(frozen=True)
class State:
    """A session after an operation."""

    conversation: tuple[Turn, ...] = ()
    skills: tuple[SkillText, ...] = ()
    corrections: Corrections = field(default_factory=Corrections)
    memory: Memory | None = None
    edits_and_cuts: tuple[Entry, ...] = ()
    moves: int = 0  # how often K/V was moved in place
    # By `skill.field` that was changed, the time up to which global errata were known.
    read_at: Mapping[str, str] = field(default_factory=dict)
    # Rendered.
    pieces: tuple[Entry, ...] = ()
    tokens: list[int] = field(default_factory=list)
    rows: tuple[Rows, ...] = ()
    images: tuple[Image, ...] = ()  # their rows hold embeddings, not tokens
    states: tuple[int, ...] = ()  # after how many tokens the files of rows have a recurrent state, ascending

    @property
    def turns(self) -> int:
        return len(self.conversation)

    @property
    def questions(self) -> list[str]:
        return [turn.question for turn in self.conversation]

    @property
    def system(self) -> str:
        """The system text, as given."""
        head = self.conversation[0].messages[0] if self.conversation else Message("user")
        return head.text if head.role == "system" else ""

    @property
    def edits(self) -> int:
        return sum(entry.kind == "edit" for entry in self.edits_and_cuts)

    @property
    def traces(self) -> list[Entry]:
        """Cuts that later K/V may still depend on."""
        return [entry for entry in self.edits_and_cuts if entry.kind == TRACE]

    @cached_property
    def known(self) -> Known:
        """Fields of the skills."""
        return known_fields(*self.skills)

    @property
    def current(self) -> dict[str, str]:
        """The current value of each field, by `skill.field`."""
        return values_in(self.skills) | dict(self.corrections.values)

    @property
    def fields(self) -> dict[str, str]:
        """The current value of each field, by its key (text/keys.py)."""
        return {self.key(name): value for name, value in self.current.items()}

    @property
    def pending(self) -> dict[str, str]:
        """The errata of the next question in the default wording, by the key of the field."""
        pending, skills = {}, {skill.name: skill for skill in self.skills}
        for name in self.corrections.pending:
            target = self.known.find(name)[0]
            pending[target.key] = word(target.erratum(self.corrections.values[name]), skill=skills[target.skill])
        return pending

    def key(self, name: str) -> str:
        """Return the key of `skill.field`."""
        found = self.known.find(name)
        return found[0].key if found else name

    @property
    def log(self) -> Iterator[Entry]:
        """Pieces, edits and cuts in order of arrival."""
        for turn in range(self.turns + 1):
            yield from (entry for entry in self.pieces if entry.turn == turn)
            yield from (entry for entry in self.edits_and_cuts if entry.turn == turn)

    @property
    def entries(self) -> list[Entry]:
        """As `log`, with the keys of fields."""
        return [
            replace(entry, name=self.key(entry.name)) if entry.kind in ("erratum", "edit") and entry.name else entry
            for entry in self.log
        ]

    def turn_pieces(self, turn: int) -> list[Entry]:
        return [entry for entry in self.pieces if entry.turn == turn]

    def span(self, name: str) -> Range:
        """Return the positions [first, last) of a skill."""
        pieces = [entry for entry in self.pieces if entry.kind == "splice" and entry.name == name]
        return (pieces[0].position, pieces[-1].end) if pieces else (0, 0)

    @property
    def by_position(self) -> list[tuple[str, int]]:
        """The K/V file of each token, and the row in it."""
        return [(rows.file, rows.first + row) for rows in self.rows for row in range(rows.count)]

    def patched(self, patches: Sequence[Patch]) -> State:
        """Return the state with these changes of the sequence: tokens, K/V (new rows have no file), images, and the
        positions of edits and cuts. The pieces are rendered. Raises EngineError for a cut within an image."""
        if not patches:
            return self
        shift, before, by_position = position_map(patches), self.by_position, list[tuple[str, int]]()
        done = 0
        for patch in patches:
            by_position += before[done : patch.first] + [("", 0)] * len(patch.tokens)
            done = patch.last
        removed = removed_images(self.images, [patch.span for patch in patches])
        moved = [(image, shift(image.first) - image.first) for image in self.images if image not in removed]
        return replace(
            self,
            tokens=apply_patches(self.tokens, patches),
            rows=packed([*by_position, *before[done:]]),
            images=tuple(replace(image, first=image.first + by, last=image.last + by) for image, by in moved),
            states=tuple(at for at in self.states if at <= patches[0].first),
            edits_and_cuts=tuple(replace(entry, position=shift(entry.position)) for entry in self.edits_and_cuts),
        )

    def with_turns(self, turns: Iterable[Turn]) -> State:
        """Return the state with changed turns, and the fields that their errata state."""
        conversation = tuple(turns)
        stated = frozenset(part.key for turn in conversation for part in turn.errata if part.key)
        return replace(self, conversation=conversation, corrections=replace(self.corrections, stated=stated))

    def with_rows(self, file: str, ranges: Sequence[Range]) -> State:
        """Return the state whose K/V at these positions is in a file, one range after the other."""
        by_position = (self.by_position + [("", 0)] * len(self.tokens))[: len(self.tokens)]
        for row, place in enumerate(place for span in ranges for place in range(*span)):
            by_position[place] = file, row
        return replace(self, rows=packed(by_position))

    def unapplied(self, errata: Sequence[GlobalErratum]) -> dict[str, str]:
        """Return the values, by `skill.field`, of global errata (oldest first) that the session has not applied. An
        erratum applies to the same skill by its marks, whose field has or had the value that it replaces."""
        found, current = dict[str, str](), self.current
        for skill in self.skills:
            fields = [f"{skill.name}.{span.name}" for span in skill.fields]
            values = {key.partition(".")[2]: current[key] for key in fields}
            known = {key.partition(".")[2]: self.read_at[key] for key in fields if key in self.read_at}
            new = applying(errata, skill.name, skill.marks, values, skill.compiled, known)
            found |= {f"{skill.name}.{name}": value for name, value in new.items()}
        return found

    def given(
        self, key: str, value: str, *, in_place: bool, states: bool, method: str, read_at: str, **more: Any
    ) -> State:
        """Return the state with a new value of a field, by `skill.field`, and an entry for that edit. `in_place`: the
        text gets it, `states`: the next question states it. `more`: of the entry, which is at the end by default."""
        entry = {
            "position": len(self.tokens),
            "tokens": 0,
            "how": method,
            "turn": self.turns,
            "erratum": states,
            **more,
        }
        return replace(
            self,
            corrections=self.corrections.given(key, value, in_place=in_place, states=states),
            read_at={**self.read_at, key: read_at},
            edits_and_cuts=(*self.edits_and_cuts, Entry("edit", key, f"{self.key(key)}={value}", **entry)),
        )


ANSWERED = Message("assistant")  # in place of an answer, whose text does not matter


def messages_of(turns: Iterable[Turn]) -> list[Message]:
    return [message for turn in turns for message in (*turn.messages, ANSWERED)]


def with_messages(turns: Sequence[Turn], messages: Iterable[Message]) -> tuple[Turn, ...]:
    """Return the turns with changed messages, of as many as `messages_of` has."""
    left = iter(messages)
    return tuple([replace(turn, messages=tuple([next(left) for _ in (*turn.messages, 0)][:-1])) for turn in turns])


def packed(by_position: Sequence[tuple[str, int]]) -> tuple[Rows, ...]:
    """Group consecutive rows of one file."""
    runs = groupby(enumerate(by_position), key=lambda item: (item[1][0], item[1][1] - item[0] if item[1][0] else 0))
    parts = [[place for _, place in group] for _, group in runs]
    return tuple(Rows(*part[0], len(part)) for part in parts)


FORMAT = 11  # changes when an older version would read a newer snapshot wrongly
ROWS = re.compile(r"(?:0[0-9]{3}|[1-9][0-9]{3,8})\.gguf")  # names of K/V files


@dataclass(frozen=True, slots=True)
class Header:
    """Settings that are fixed when a session begins."""

    identity: Identity
    cache: str  # types of K and V in the cache, "q8_0/f16"
    model: str  # path of the model file, for display
    rope_scaling: str | None = None  # as in ContextOptions, as are the next
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0


ROPE = ("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")
# "correct": by global errata, which stay away when it is undone.
Op = Literal["begin", "turn", "edit", "correct", "compact", "forget"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session after an operation. `what` describes that."""

    format: int
    header: Header
    op: Op
    what: str
    created: str  # UTC, as `time`
    time: str
    state: State
    files: Mapping[str, str] = field(default_factory=dict)  # checksums of the K/V files, by name
    first: bool = False  # nothing before it counts


class SnapshotError(ValueError):
    """The reason why bytes are not a snapshot."""


class OtherFormatError(SnapshotError):
    """A snapshot has a format that this version does not read."""

    def __init__(self, version: int) -> None:
        super().__init__(f"it has format {version}, this version of notes reads {FORMAT}")
        self.version = version


def serialize(snapshot: Snapshot) -> bytes:
    line = json.dumps(to_json(snapshot), ensure_ascii=False, separators=(",", ":")).encode()
    return line + b"\n" + sha256(line).hexdigest().encode() + b"\n"


def read_snapshot(data: bytes) -> Snapshot:
    """Parse a snapshot. Raises SnapshotError if it is damaged or contradicts itself."""
    line, _, rest = data.partition(b"\n")
    if rest != sha256(line).hexdigest().encode() + b"\n":
        raise SnapshotError("it is not as it was written" if data else "it is empty")
    try:
        content = json.loads(line)
        if type(content["format"]) is int and content["format"] != FORMAT:
            raise OtherFormatError(content["format"])
        snapshot: Snapshot = from_json(Snapshot, content)
        _check(snapshot)
    except SnapshotError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise SnapshotError("its values contradict each other") from error
    return snapshot


def _check(snapshot: Snapshot) -> None:
    """Raise ValueError where tokens, rows, pieces, skills, images and fields contradict each other."""
    state, count = snapshot.state, len(snapshot.state.tokens)
    require(all(0 <= token < 1 << 31 for token in state.tokens))
    require(all(ROWS.fullmatch(name) for name in snapshot.files))
    require(all(rows.count > 0 and rows.first >= 0 and rows.file in snapshot.files for rows in state.rows))
    require(sum(rows.count for rows in state.rows) == count)
    at, turn = 0, 1
    for entry in state.pieces:
        require(entry.position == at and entry.tokens > 0 and turn <= entry.turn <= state.turns)
        at, turn = entry.end, entry.turn
    require(at == count and {entry.turn for entry in state.pieces} == {*range(1, state.turns + 1)})
    require(all(0 <= entry.position <= count and 0 <= entry.turn <= state.turns for entry in state.edits_and_cuts))
    require(all(talk.messages and talk.messages[-1].role in ("user", "tool") for talk in state.conversation))
    for number, talk in enumerate(state.conversation, 1):
        answer = [entry for entry in state.turn_pieces(number) if entry.kind == "answer"]
        generated = [token for part in talk.answer for token in part.tokens]
        require([token for entry in answer for token in state.tokens[entry.position : entry.end]] == generated)
    names = [name for talk in state.conversation for name in talk.skills]
    require(sorted(names) == sorted(skill.name for skill in state.skills) and len({*names}) == len(names))
    for skill in state.skills:
        first, last = state.span(skill.name)
        require(
            last > first
            and sum(e.tokens for e in state.pieces if (e.kind, e.name) == ("splice", skill.name)) == last - first
        )
        for span in skill.fields:
            require(0 <= span.start <= span.end and skill.text[span.start : span.end] == span.value)
            require(0 <= span.first < span.last <= last - first)
    require(state.corrections.values.keys() <= values_in(state.skills).keys())
    require(all(key in state.corrections.values for key in state.corrections.pending))
    require(is_ascending([(at - 1, at) for at in state.states], count))
    require(is_ascending([(image.first, image.last) for image in state.images], count))
    require(all(map(_is_image, state.images)))


def require(holds: bool) -> None:
    if not holds:
        raise ValueError("contradiction")


def _is_image(image: Image) -> bool:
    rows = image.last - image.first
    if image.grid is None:
        return image.positions == rows > 0
    return min(image.grid) > 0 and image.grid[0] * image.grid[1] == rows and image.positions == max(image.grid)
