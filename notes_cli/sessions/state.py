"""Reads and writes a session's ledger, and computes the state from it: tokens, places of their K/V, skills, values.

A ledger is a JSONL log (docs/format.md): each turn, edit, compaction, cut and undo appends a line; forgetting for good
replaces all lines by one. Each line ends with a checksum over itself and the previous line's checksum, which detects
lines that were changed, moved, removed or copied from another ledger. The head, a file with the number of lines and the
last checksum, detects truncation. The values of each line are checked. Also finds the global errata that a session has
not applied yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from hashlib import sha256
from typing import Any, NamedTuple

from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.positions import Image, Patch, Range, apply_patches, is_ascending, position_map, removed_images
from notes_cli.engine.segment import FieldSpan, Identity
from notes_cli.errors import EngineError
from notes_cli.library.global_errata import GlobalErratum
from notes_cli.text.erratum import Known, known_fields

ROWS = re.compile(r"[0-9]{4,9}\.gguf")  # names of K/V files

Line = Mapping[str, Any]


def text_of(data: Line, key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def number_of(data: Line, key: str) -> int:
    value = data[key]
    if type(value) is not int:
        raise TypeError(key)
    return value


def rows_of(line: Line) -> str:
    """Return the name of the line's K/V file, empty without one. Raises ValueError if the checksum is missing."""
    name = text_of(line, "rows")
    if name and not (ROWS.fullmatch(name) and text_of(line, "rows_checksum")):
        raise ValueError("rows")
    return name


def ids_of(tokens: Iterable[int]) -> list[int]:
    ids = list(tokens)
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError("tokens")
    return ids


def ranges_of(pairs: Iterable[Sequence[int]], length: int) -> list[Range]:
    """Return the pairs as ranges. Raises ValueError unless they ascend within a sequence of `length` tokens."""
    ranges = [(first, last) for first, last in pairs]
    if not all(type(position) is int for span in ranges for position in span) or not is_ascending(ranges, length):
        raise ValueError("range")
    return ranges


def patches_of(line: Line, length: int) -> list[Patch]:
    """Return the token patches of a line, for a sequence of `length` tokens."""
    spans = ranges_of([(part["first"], part["last"]) for part in line["patches"]], length)
    return [Patch(*span, ids_of(part["tokens"])) for span, part in zip(spans, line["patches"], strict=True)]


@dataclass(frozen=True, slots=True)
class Origin:
    """Provenance of a piece, as in engine/pieces.Piece; of an edit, its effects."""

    reason: Reason = Reason.PLAIN
    detail: str = ""
    moved: int = 0
    rewritten: int = 0  # of an edit: KV entries that it computed
    blocks: int = 0
    kept: str = ""
    nbytes: int = 0
    erratum: bool = False  # of an edit: it adds an erratum before the next question
    contradicted: bool = False  # of an edit of the text: an earlier erratum comes after it

    @classmethod
    def of(cls, piece: Piece) -> Origin:
        return cls(**{key: getattr(piece, key) for key in ("reason", *_TEXTS, *_NUMBERS)})


_TEXTS, _NUMBERS = ("detail", "kept"), ("moved", "rewritten", "blocks", "nbytes")


def as_line(origin: Origin) -> Line:
    """Return its keys for a ledger line, without defaults."""
    keys = ("reason", *_TEXTS, *_NUMBERS, "contradicted")
    return {key: value for key, value in asdict(origin).items() if key in keys and value}


def origin_of(line: Line) -> Origin:
    """Parse the output of `as_line`. Raises KeyError, TypeError or ValueError for anything else."""
    values: dict[str, Any] = {key: text_of(line, key) for key in _TEXTS if key in line}
    values |= {key: number_of(line, key) for key in _NUMBERS if key in line}
    reason = text_of(line, "reason") if "reason" in line else ""
    if reason in _REASONS:  # a newer version may have others
        values["reason"] = Reason(reason)
    return Origin(**values, contradicted=line.get("contradicted") is True)


_REASONS = {reason.value for reason in Reason}


TRACE = "forgotten"  # kind of an entry that marks a cut
MARKS = ("edit", TRACE)  # kinds of entries without tokens
FROM_CHANGE = ("suffix",)  # edit methods that recompute all K/V after the edit


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece of the sequence, or an edit or a cut (`how` is its method)."""

    kind: str
    name: str  # of a skill; of the field of an erratum or edit
    text: str
    position: int
    tokens: int
    how: str
    origin: Origin
    turn: int = 0  # from 1: the turn of a piece, the turn before an edit or a cut

    @property
    def end(self) -> int:
        return self.position + self.tokens

    @property
    def thought(self) -> bool:
        """True for reasoning, and for the tokens that end it."""
        return self.kind == "answer" and self.origin.reason in (Reason.THOUGHT, Reason.THOUGHT_END)

    @classmethod
    def from_dict(cls, data: Line) -> Entry:
        """Parse the output of `entry_line`. Raises KeyError, TypeError or ValueError if it is invalid."""
        kind, name, text, how = (text_of(data, key) for key in ("kind", "name", "text", "how"))
        position, tokens, turn = (number_of(data, key) for key in ("position", "tokens", "turn"))
        if min(position, tokens, turn) < 0:
            raise ValueError("piece")
        origin = replace(origin_of(data), erratum=data.get("erratum") is True)
        return cls(kind, name, text, position, tokens, how, origin, turn)


@dataclass(frozen=True, slots=True)
class SkillText:
    """A spliced skill with its current text and position. Field spans count from its first token."""

    name: str
    position: int
    text: str
    tokens: int
    fields: tuple[FieldSpan, ...]

    @classmethod
    def from_dict(cls, data: Line) -> SkillText:
        """Parse a skill of a ledger line. Raises KeyError, TypeError or ValueError if it is invalid."""
        spans = tuple(FieldSpan(**{**span, "name": text_of(span, "name")}) for span in data["fields"])
        skill = cls(**{**data, "fields": spans, "name": text_of(data, "name"), "text": text_of(data, "text")})
        numbers = [skill.position, skill.tokens]
        numbers += [number for span in spans for number in (span.start, span.end, span.first, span.last)]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("skills")
        inside = all(span.first < span.last <= skill.tokens for span in spans)
        if not inside or any(skill.text[span.start : span.end] != span.value for span in spans):
            raise ValueError("fields")
        return skill


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a session: the skill that each turn moves to just before its question."""

    name: str  # of the skill
    reference: str  # to open it again: a path, or the name of a compiled skill

    @classmethod
    def from_dict(cls, data: Line) -> Memory:
        """Parse the `memory` of a ledger line. Raises KeyError or TypeError if it is invalid."""
        return cls(text_of(data, "name"), text_of(data, "reference"))


@dataclass(slots=True)
class State:
    """The result of applying a ledger's lines, without undone ones."""

    live: list[Line] = field(default_factory=list)  # lines that were not undone
    system: str = ""  # the system text, as given
    questions: list[str] = field(default_factory=list)  # by turn
    tokens: list[int] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)  # by position: K/V file, and row in it
    images: list[Image] = field(default_factory=list)  # their rows hold embeddings, not tokens
    entries: list[Entry] = field(default_factory=list)  # in order of arrival
    skills: list[SkillText] = field(default_factory=list)
    memory: Memory | None = None
    # By field key (text/keys.py), which depends on the current skills.
    values: dict[str, str] = field(default_factory=dict)  # changed by errata or edits
    pending: dict[str, str] = field(default_factory=dict)  # errata to add before the next question
    stated: set[str] = field(default_factory=set)  # fields with an erratum in the sequence
    # To find global errata that are not applied yet. By `skill.field`.
    marks: dict[str, list[str]] = field(default_factory=dict)  # by skill: its identity in library/global_errata.py
    first: dict[str, str] = field(default_factory=dict)  # value in the text of the skill when it was added
    read_at: dict[str, str] = field(default_factory=dict)  # of changed fields: when global errata were last read
    undone: list[tuple[str, str, str]] = field(default_factory=list)  # undone edits: field, value, and such a time

    @property
    def known(self) -> Known:
        """Fields of the skills."""
        return known_fields(*self.skills)

    @property
    def fields(self) -> dict[str, str]:
        known = self.known
        spans = {known.key(skill.name, span.name): span.value for skill in self.skills for span in skill.fields}
        return spans | self.values

    @property
    def turns(self) -> int:
        return len(self.questions)

    @property
    def edits(self) -> int:
        return sum(entry.kind == "edit" for entry in self.entries)

    @property
    def checksums(self) -> dict[str, str]:
        """Checksums of the K/V files, by name."""
        return {str(line["rows"]): str(line["rows_checksum"]) for line in self.live if line["rows"]}

    @property
    def traces(self) -> list[Entry]:
        """Cuts that later K/V may still depend on."""
        return [entry for entry in self.entries if entry.kind == TRACE]

    def superseded(self, keys: Iterable[str] = ()) -> list[Entry]:
        """Return the errata in the sequence, by position, whose fields all got a later value: by an erratum, also a
        pending one or one of these fields, or in the text. Errata of no field are never superseded."""
        superseded: list[Entry] = []
        known, later = self.known, {*self.pending, *keys}
        for entry in reversed(self.entries):
            keys = keys_of(known, entry.name) if entry.kind in ("erratum", "edit") and entry.name else set()
            if entry.kind == "erratum" and keys and keys <= later:
                superseded.append(entry)
            later |= keys
        return sorted(superseded, key=lambda entry: entry.position)

    def outdated(self, compiled: Mapping[str, str]) -> list[str]:
        """Return the keys of the fields of the memory whose value in its text is not the one of `compiled`, by
        `skill.field`: those of another memory, or of a changed text. Their edits end with the old text."""
        known, memory = self.known, self.memory
        return [
            known.key(skill.name, span.name)
            for skill in self.skills
            for span in skill.fields
            if memory and skill.name == memory.name
            if compiled.get(f"{skill.name}.{span.name}") != self.first.get(f"{skill.name}.{span.name}")
        ]

    def apply(self, line: Line) -> None:
        """Apply a line. Raises KeyError, TypeError or ValueError if it is invalid."""
        operations = {
            "turn": self._apply_turn,
            "edit": self._apply_edit,
            "compact": self._apply_compaction,
            "forget": self._apply_forget,
        }
        operations[line["op"]](line)
        if any(skill.position + skill.tokens > len(self.tokens) for skill in self.skills):
            raise ValueError("skills")
        self.live.append(line)

    def _apply_turn(self, line: Line) -> None:
        done = self._apply_correction(line) if "patches" in line else 0
        start = len(self.tokens)
        self.questions.append(text_of(line, "question"))
        if "system" in line:  # in the first turn
            self.system = text_of(line, "system")
        skills = [SkillText.from_dict(skill) for skill in line["skills"]]
        if "memory" in line:
            self._replace_memory(line, skills)
        self.set_skills([*self.skills, *skills])
        for piece in line["pieces"]:
            kind, name, text, how = (text_of(piece, key) for key in ("kind", "name", "text", "how"))
            ids = ids_of(piece["tokens"])
            origin = origin_of(piece)
            self.entries.append(Entry(kind, name, text, len(self.tokens), len(ids), how, origin, self.turns))
            self.tokens += ids
        self.rows += [(line["rows"], done + row) for row in range(len(self.tokens) - start)]
        for image in line.get("images", ()):
            self.images.append(_parse_image(image, self._images_end(start), len(self.tokens)))
        fields = self.known
        self._record_compiled(line, skills)
        self._record_time(line, line["errata"])
        errata = {key: text_of(line["errata"], name) for name in line["errata"] for key in keys_of(fields, name)}
        self.values |= errata
        if not any(piece["kind"] == "result" for piece in line["pieces"]):  # tool results leave errata pending
            self.stated |= {*errata, *self.pending}
            self.pending = {}

    def _apply_correction(self, line: Line) -> int:
        """Apply the changes that a turn makes before its own pieces: new values in place, and errata cut out. Returns
        the number of their rows in the turn's K/V file."""
        known, places = self.known, line["changed"][:-1]
        self._replace({**line, "changed": places})
        amended = {part["name"]: SkillText.from_dict(part) for part in line["amended"]}
        self.skills = [
            replace(amended[skill.name], position=skill.position) if skill.name in amended else skill
            for skill in self.skills
        ]
        for number, entry in enumerate(self.entries):
            if entry.kind in ("erratum", "splice") and not entry.tokens:
                what = f"an erratum of {entry.name}" if entry.kind == "erratum" else f"the memory {entry.name}"
                self.entries[number] = replace(entry, kind=TRACE, name="", text=what)
        whole = {(entry.text, entry.position) for entry in self.entries if entry.kind == TRACE and entry.how != "seam"}
        self.entries = [
            entry
            for entry in self.entries  # the rest of the memory has a trace
            if entry.kind != TRACE or entry.how != "seam" or (entry.text, entry.position) not in whole
        ]
        errata = (entry for entry in self.entries if entry.kind == "erratum" and entry.name)
        self.stated = set().union(*(keys_of(known, entry.name) for entry in errata))
        return sum(last - first for first, last in places)

    def _replace_memory(self, line: Line, skills: Sequence[SkillText]) -> None:
        """Replace the old copy of the memory by the one among `skills`, and drop its outdated values."""
        memory, before = Memory.from_dict(line["memory"]), self.memory
        if "cut" in line:
            number_of(line, "cut")
        if memory.name not in [skill.name for skill in skills]:
            raise ValueError("memory")
        compiled = {f"{skill.name}.{span.name}": span.value for skill in skills for span in skill.fields}
        compiled |= {key: text_of(line["first"], key) for key in line.get("first", {})}
        for key in self.outdated(compiled):
            self.values.pop(key, None)
            self.pending.pop(key, None)
        self.skills = [skill for skill in self.skills if before is None or skill.name != before.name]
        self.memory = memory

    def _images_end(self, start: int) -> int:
        return max([start, *(image.last for image in self.images)])

    def _record_compiled(self, line: Line, skills: Sequence[SkillText]) -> None:
        """Record marks and field values of new skills as compiled."""
        marks = line.get("marks", {})
        self.marks |= {name: [text_of({"": mark}, "") for mark in marks[name]] for name in marks}
        self.first |= {f"{skill.name}.{span.name}": span.value for skill in skills for span in skill.fields}
        self.first |= {key: text_of(line["first"], key) for key in line.get("first", {})}

    def _record_time(self, line: Line, names: Iterable[str]) -> None:
        """Record for these fields up to when global errata were read."""
        time = text_of(line, "read_at")
        self.read_at |= {key: time for name in names for key in _full_keys(self, name)}

    def set_skills(self, skills: Sequence[SkillText]) -> None:
        """Replace the skills, and rename fields to their keys among the new ones."""
        before = self.known
        self.skills = [*skills]
        now = self.known

        def renamed(name: str) -> str:
            matches = before.find(name)
            if len(matches) != 1 or f"{matches[0].skill}.{matches[0].field}" not in now:
                return name
            return now.key(matches[0].skill, matches[0].field)

        self.values = {renamed(name): value for name, value in self.values.items()}
        self.pending = {renamed(name): erratum for name, erratum in self.pending.items()}
        self.stated = set(map(renamed, self.stated))
        self.entries = [
            replace(entry, name=renamed(entry.name)) if entry.kind in ("erratum", "edit") else entry
            for entry in self.entries
        ]

    def _apply_edit(self, line: Line) -> None:
        name, value = text_of(line, "field"), text_of(line, "value")
        place = self._replace(line)
        origin = replace(origin_of(line), erratum=bool(text_of(line, "pending")))
        method = text_of(line, "method")
        self.entries.append(Entry("edit", name, f"{name}={value}", place, 0, method, origin, self.turns))
        if method in FROM_CHANGE:
            self._drop_traces(place)
        amended = {part["name"]: SkillText.from_dict(part) for part in line["skills"]}
        self.skills = [amended.get(skill.name) or skill for skill in self.skills]
        keys = keys_of(self.known, name)
        self._record_time(line, [name])
        for key in keys:
            self.values[key] = value
            self.pending.pop(key, None)
        if line["pending"]:
            self.pending[min(keys)] = line["pending"]

    def _apply_compaction(self, line: Line) -> None:
        known = self.known
        removed = [keys_of(known, text_of({"name": name}, "name")) for name in line["fields"]]
        place = self._replace(line)
        self.entries = [entry for entry in self.entries if entry.tokens or entry.kind in MARKS]
        self._drop_traces(place)
        left = [keys_of(known, entry.name) for entry in self.entries if entry.kind == "erratum" and entry.name]
        self.stated = self.stated.difference(*removed).union(*left)

    def _apply_forget(self, line: Line) -> None:
        """Apply a cut. The line has the complete remaining state, so that it can be the first of a ledger."""
        text_of(line, "method")
        number_of(line, "moves")
        self._replace(line)
        rest = line["rest"]
        self.system = text_of(rest, "system")
        self.questions = [text_of({"": question}, "") for question in rest["questions"]]
        self.entries = [Entry.from_dict(piece) for piece in rest["pieces"]]
        if any(entry.end > len(self.tokens) or entry.turn > self.turns for entry in self.entries):
            raise ValueError("pieces")
        for image in line.get("images", ()):  # if it is the first line
            self.images.append(_parse_image(image, self._images_end(0), len(self.tokens)))
        self.skills = [SkillText.from_dict(skill) for skill in rest["skills"]]
        self.values = {key: text_of(rest["values"], key) for key in rest["values"]}
        self.pending = {key: text_of(rest["pending"], key) for key in rest["pending"]}
        self.stated = {text_of({"": key}, "") for key in rest["stated"]}
        self.memory = Memory.from_dict(rest["memory"]) if "memory" in rest else None
        self.first = {}
        self._record_compiled(rest, self.skills)
        self.read_at = {key: text_of(rest["read_at"], key) for key in rest["read_at"]}

    def _drop_traces(self, place: int) -> None:
        """Drop traces of cuts from this position on: everything there was decoded again."""
        self.entries = [entry for entry in self.entries if entry.kind != TRACE or entry.position < place]

    def _replace(self, line: Line) -> int:
        """Apply the patches of a line to tokens, K/V locations, entries, images and skills. Returns the first position
        with recomputed K/V."""
        patches = patches_of(line, len(self.tokens))
        shift = position_map(patches)
        self.tokens = apply_patches(self.tokens, patches)
        self.rows = [*self.rows, *[("", 0)] * len(self.tokens)][: len(self.tokens)]
        changed = [place for span in ranges_of(line["changed"], len(self.tokens)) for place in range(*span)]
        for row, place in enumerate(changed):
            self.rows[place] = line["rows"], row
        self.entries = [
            replace(entry, position=shift(entry.position), tokens=shift(entry.end) - shift(entry.position))
            for entry in self.entries
        ]
        try:
            removed = removed_images(self.images, [patch.span for patch in patches])
        except EngineError as error:
            raise ValueError("images") from error
        moved = [(image, shift(image.first) - image.first) for image in self.images if image not in removed]
        self.images = [replace(image, first=image.first + by, last=image.last + by) for image, by in moved]
        self.skills = [replace(skill, position=shift(skill.position)) for skill in self.skills]
        return changed[0] if changed else len(self.tokens)


def _parse_image(data: Line, start: int, end: int) -> Image:
    """Return an image within positions [start, end). Raises KeyError, TypeError or ValueError if it is invalid."""
    first, last, positions = (number_of(data, key) for key in ("first", "last", "positions"))
    grid = data["grid"]
    if grid is not None:
        rows, columns = grid
        if (
            type(rows) is not int
            or type(columns) is not int
            or min(rows, columns) < 1
            or rows * columns != last - first
        ):
            raise ValueError("grid")
        grid = rows, columns
    if not (start <= first < last <= end and 0 < positions <= last - first):
        raise ValueError("images")
    if positions != (last - first if grid is None else max(grid)):
        raise ValueError("positions")
    return Image(first, last, positions, grid)


def keys_of(known: Known, name: str) -> set[str]:
    """Return the keys of the fields with this name in a ledger; older ledgers may mean those of several skills."""
    return {reference.key for reference in known.find(name)} or {name}


def entry_line(entry: Entry) -> Line:
    """Return the entry as JSON for the line of a cut."""
    keys = ("kind", "name", "text", "position", "tokens", "how", "turn")
    erratum = {"erratum": True} if entry.origin.erratum else {}
    return {**{key: getattr(entry, key) for key in keys}, **as_line(entry.origin), **erratum}


def fold(lines: Sequence[Line]) -> State:
    """Return the state after these lines. Raises KeyError, TypeError, ValueError or the like if one is invalid."""
    live: list[Line] = []
    undone: list[Line] = []
    for line in lines:
        if line["op"] == "undo":
            undone.append(live.pop())
            if not live and lines[0]["op"] == "forget":  # nothing is left from before it
                raise ValueError("undo")
        else:
            rows_of(line)  # of undone lines, too: next_rows avoids their file names
            live.append(line)
    edits = (line for line in undone if line["op"] == "edit")
    state = State(undone=[(text_of(line, "field"), text_of(line, "value"), text_of(line, "read_at")) for line in edits])
    for line in live:
        state.apply(line)
    return state


def unapplied(state: State, errata: Sequence[GlobalErratum]) -> dict[str, str]:
    """Return the values, by `skill.field`, of global errata (oldest first) that the session has not applied. An erratum
    applies to the same skill by its marks, whose field has or had the value that the erratum replaces."""
    known, fields, values = state.known, state.fields, dict[str, str]()
    for skill in state.skills:
        marks = state.marks.get(skill.name, ())
        of_skill = [erratum for erratum in errata if erratum.skill == skill.name and erratum.is_of(marks)]
        for name in dict.fromkeys(span.name for span in skill.fields):
            key, now = f"{skill.name}.{name}", fields[known.key(skill.name, name)]
            old = now, state.first.get(key)
            of_field = [erratum for erratum in of_skill if erratum.field == name and erratum.was in old]
            if of_field and of_field[-1].value != now and not _is_applied(state, of_field[-1]):
                values[key] = of_field[-1].value
    return values


def _is_applied(state: State, erratum: GlobalErratum) -> bool:
    """Return True if the session applied the erratum, even if that was undone, or set the field itself later."""
    key = f"{erratum.skill}.{erratum.field}"
    undone = (time for name, value, time in state.undone if value == erratum.value and key in _full_keys(state, name))
    return any(time >= erratum.time for time in (state.read_at.get(key, ""), *undone))


def _full_keys(state: State, name: str) -> list[str]:
    return [f"{reference.skill}.{reference.field}" for reference in state.known.find(name)]


FORMAT = 8  # changes when an older version would read a newer ledger wrongly
TIME = "%Y-%m-%dT%H:%M:%SZ"  # UTC
DIGITS = 16  # of a checksum
SEAL = len(', "checksum": ""}') + DIGITS  # bytes that end a line
HEAD_LINE = re.compile(r"([1-9][0-9]{0,8}) ([0-9a-f]{16})\n")


@dataclass(frozen=True, slots=True)
class Header:
    """Settings that are fixed when a session begins."""

    identity: Identity
    cache: str  # types of K and V in the cache, "q8_0/f16"
    prefix_only: bool  # K/V cannot be moved, so each turn stores that of the whole sequence
    model: str  # path of the model file, for display


class Head(NamedTuple):
    """The end of a ledger: its number of lines, and the checksum of the last."""

    lines: int
    checksum: str

    def __str__(self) -> str:
        return f"{self.lines} {self.checksum}\n"

    @classmethod
    def read(cls, text: str) -> Head | None:
        """Parse the output of `str`; return None for anything else."""
        match = HEAD_LINE.fullmatch(text)
        return cls(int(match[1]), match[2]) if match else None


class Ledger(NamedTuple):
    """A parsed ledger. `end`: bytes in complete lines."""

    header: Header
    lines: list[Line]
    state: State
    end: int
    head: Head

    @property
    def kept(self) -> list[str]:
        """The K/V files still needed. Of a prefix-only model the last two, enough for one undo."""
        names = [str(line["rows"]) for line in self.state.live if line["rows"]]
        return names[-2:] if self.header.prefix_only else names


class LedgerError(ValueError):
    """The reason why bytes are not a ledger."""


class CutError(LedgerError):
    """A ledger of valid lines that does not match its head: truncated, or replaced by another."""


class FormatError(LedgerError):
    """A ledger in a format that this version does not read; the message is its number."""


def read_ledger(data: bytes, head: Head | None = None) -> Ledger:
    """Parse a ledger, skipping bytes after the last complete line: an interrupted write. Without `head`, truncation at
    a line is not detected. Raises LedgerError if it is damaged, CutError if its valid lines do not match `head`."""
    end = data.rfind(b"\n") + 1
    whole = data[:end].split(b"\n")[:-1]
    _check_format(data.partition(b"\n")[0])
    lines: list[Line] = []
    checksums: list[str] = []
    for number, written in enumerate(whole, 1):
        content, checksum = _parse_line(written, checksums[-1] if checksums else "", number)
        lines.append(content)
        checksums.append(checksum)
    if len(lines) < 2:  # a session begins with two
        raise LedgerError(_missing(len(lines), end < len(data)) if data else "it is empty")
    try:
        for line in lines:
            datetime.strptime(text_of(line, "time"), TIME)
        first = lines[0]
        identity = Identity.from_dict({key: text_of(first["identity"], key) for key in first["identity"]})
        header = Header(identity, text_of(first, "cache"), first["whole"] is True, text_of(first, "model"))
        replaced = text_of(first, "replaces") if "replaces" in first else ""
        ledger = Ledger(header, lines, fold(lines[1:]), end, Head(len(lines), checksums[-1]))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise LedgerError("its lines contradict each other") from error
    if head and head.checksum != replaced and head.checksum not in checksums:
        if len(lines) < head.lines:
            raise CutError(f"{_missing(len(lines), end < len(data))} of {head.lines}")
        raise CutError("its lines are not those that were written last")
    return ledger


def _check_format(line: bytes) -> None:
    """Raise FormatError if the first line has another format number."""
    try:
        number = json.loads(line)["format"]
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        return  # reported when it is parsed
    if type(number) is int and number != FORMAT:
        raise FormatError(str(number))


def _missing(lines: int, torn: bool) -> str:
    return f"it ends within line {lines + 1}" if torn else f"it ends after line {lines}"


def _parse_line(line: bytes, before: str, number: int) -> tuple[Line, str]:
    """Return a line without its checksum, and the checksum. Raises LedgerError if either is invalid."""
    body = line[:-SEAL] + b"}"
    checksum = _checksum(before, body)
    if not line.endswith(_seal(checksum)):
        raise LedgerError(f"line {number} is not as it was written")
    try:
        content = json.loads(body)
    except (ArithmeticError, RecursionError, ValueError) as error:
        raise LedgerError(f"line {number} is not JSON") from error
    if not isinstance(content, dict):
        raise LedgerError(f"line {number} is not a JSON object")
    return content, checksum


def _checksum(before: str, line: bytes) -> str:
    return sha256(before.encode() + line).hexdigest()[:DIGITS]


def _seal(checksum: str) -> bytes:
    return f', "checksum": "{checksum}"}}'.encode()


def serialize(lines: Iterable[Line], before: str = "") -> bytes:
    """Serialize lines that follow one with the checksum `before`."""
    return chain((json.dumps(line, ensure_ascii=False).encode() for line in lines), before)


def chain(objects: Iterable[bytes], before: str = "") -> bytes:
    """As `serialize`, for lines that are JSON already."""
    written = []
    for body in objects:
        before = _checksum(before, body)
        written.append(body[:-1] + _seal(before) + b"\n")
    return b"".join(written)


def first_line(header: Header) -> Line:
    """Return the first line of a ledger."""
    return {
        "op": "open",
        "format": FORMAT,
        "identity": header.identity.as_dict(),
        "cache": header.cache,
        "whole": header.prefix_only,
        "model": header.model,
    }


def with_time(line: Line) -> Line:
    """Return the line with the current time."""
    return {**line, "time": datetime.now(timezone.utc).strftime(TIME)}
