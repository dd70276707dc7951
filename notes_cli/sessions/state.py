"""The state of a session after the lines of its ledger: tokens, the rows of each, pieces, skills, values of fields.

Also which standing errata it has not had yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from notes_cli.engine.image_positions import Image, removed_images
from notes_cli.engine.patches import apply_patches, position_map
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import FieldSpan
from notes_cli.errors import EngineError
from notes_cli.library.global_errata import GlobalErratum
from notes_cli.sessions.lines import (
    Line,
    Origin,
    as_line,
    heard_of,
    ids_of,
    number_of,
    origin_of,
    patches_of,
    ranges_of,
    rows_of,
    text_of,
)
from notes_cli.text.keys import Known

TRACE = "forgotten"  # the kind of an entry that says where something was cut out
MARKS = ("edit", TRACE)  # kinds of entries that have no tokens
FROM_CHANGE = ("suffix",)  # edit methods after which no row is left that was computed before the edit


@dataclass(frozen=True, slots=True)
class Entry:
    """A piece of the sequence, or an edit or a cut (`how` is its method), as the ledger shows it."""

    kind: str
    name: str  # of a skill; of the field that an erratum or an edit is about
    text: str
    position: int
    tokens: int
    how: str
    origin: Origin
    turn: int = 0  # the turn that it belongs to, or after which an edit or a cut came, from 1 on

    @property
    def end(self) -> int:
        return self.position + self.tokens

    @property
    def thought(self) -> bool:
        """Whether it is of a chain of thought, or what closes one."""
        return self.kind == "answer" and self.origin.reason in (Reason.THOUGHT, Reason.THOUGHT_END)

    @classmethod
    def from_dict(cls, data: Line) -> Entry:
        """Read back what entry_line wrote. Raise KeyError, TypeError or ValueError where it is none."""
        kind, name, text, how = (text_of(data, key) for key in ("kind", "name", "text", "how"))
        position, tokens, turn = (number_of(data, key) for key in ("position", "tokens", "turn"))
        if min(position, tokens, turn) < 0:
            raise ValueError("piece")
        origin = replace(origin_of(data), erratum=data.get("erratum") is True)
        return cls(kind, name, text, position, tokens, how, origin, turn)


@dataclass(frozen=True, slots=True)
class SkillText:
    """A spliced skill as it is in the sequence now; spans of fields count from its first token."""

    name: str
    position: int
    text: str
    tokens: int
    fields: tuple[FieldSpan, ...]
    influence: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Line) -> SkillText:
        """Raise KeyError, TypeError or ValueError where the data is no skill."""
        spans = tuple(FieldSpan(**{**span, "name": text_of(span, "name")}) for span in data["fields"])
        skill = cls(**{**data, "fields": spans, "name": text_of(data, "name"), "text": text_of(data, "text")})
        numbers = [skill.position, skill.tokens]
        numbers += [number for span in spans for number in (span.start, span.end, span.first, span.last)]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("skills")
        inside = all(span.first < span.last <= skill.tokens for span in spans)
        if not inside or any(skill.text[span.start : span.end] != span.value for span in spans):
            raise ValueError("fields")
        for row in skill.influence.values():
            if len(row) != skill.tokens or not all(type(value) in (int, float) for value in row):
                raise ValueError("influence")
        return skill


@dataclass(slots=True)
class State:
    """What a ledger comes to: undone lines are gone, edits are applied."""

    live: list[Line] = field(default_factory=list)  # turns, edits, compactions and forgettings that were not undone
    system: str = ""  # the system text, as given
    questions: list[str] = field(default_factory=list)  # of each turn, as asked
    tokens: list[int] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)  # of each position: the file of its row, and which
    images: list[Image] = field(default_factory=list)  # whose rows are no tokens
    entries: list[Entry] = field(default_factory=list)  # in the order in which they came
    skills: list[SkillText] = field(default_factory=list)
    # Fields are called by their keys (text/keys.py), as they are among the skills that there are now.
    values: dict[str, str] = field(default_factory=dict)  # of fields, where an erratum or an edit gave another one
    pending: dict[str, str] = field(default_factory=dict)  # errata by field, to be said before the next question
    stated: set[str] = field(default_factory=set)  # fields of which an erratum has been said
    # What says which standing errata the session has heard of. Fields are called `skill.field` here.
    marks: dict[str, list[str]] = field(default_factory=dict)  # of skills, as library/global_errata.py has them
    first: dict[str, str] = field(default_factory=dict)  # what the text said of a field when it came
    heard: dict[str, str] = field(default_factory=dict)  # of fields that were given a value: when, of all that is told
    undone: list[tuple[str, str, str]] = field(default_factory=list)  # edits taken back: field, value, as `heard`

    @property
    def known(self) -> Known:
        """The fields of the skills."""
        return Known((skill.name, [span.name for span in skill.fields]) for skill in self.skills)

    @property
    def fields(self) -> dict[str, str]:
        """The value of every field as it holds now."""
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
    def based(self) -> bool:
        """Whether it begins with what was left when something was forgotten for good."""
        return bool(self.live) and self.live[0]["op"] == "forget"

    @property
    def checksums(self) -> dict[str, str]:
        """Of each file of rows that a line names, the checksum that it must have."""
        return {str(line["rows"]): str(line["rows_checksum"]) for line in self.live if line["rows"]}

    @property
    def traces(self) -> list[Entry]:
        """What was cut out, where what comes after it may still carry notes of it."""
        return [entry for entry in self.entries if entry.kind == TRACE]

    @property
    def superseded(self) -> list[Entry]:
        """Errata in the sequence whose field was given another value after them, by an erratum (said or waiting) or in
        the text, in the order of the sequence. Free words are never superseded, nor errata from before ledgers named
        their fields."""
        found: list[Entry] = []
        known, later = self.known, set(self.pending)
        for entry in reversed(self.entries):
            keys = keys_of(known, entry.name) if entry.kind in ("erratum", "edit") and entry.name else set()
            if entry.kind == "erratum" and keys and keys <= later:
                found.append(entry)
            later |= keys
        return sorted(found, key=lambda entry: entry.position)

    def apply(self, line: Line) -> None:
        """What the line says happens. Raise KeyError, TypeError or ValueError where it says nothing that can be."""
        {"turn": self._turn, "edit": self._edit, "compact": self._compact, "forget": self._forget}[line["op"]](line)
        if any(skill.position + skill.tokens > len(self.tokens) for skill in self.skills):
            raise ValueError("skills")
        self.live.append(line)

    def _turn(self, line: Line) -> None:
        """Pieces came at the end."""
        start = len(self.tokens)
        self.questions.append(text_of(line, "question"))
        if "system" in line:  # of the first turn
            self.system = text_of(line, "system")
        skills = [SkillText.from_dict(skill) for skill in line["skills"]]
        self._join(skills)
        for piece in line["pieces"]:
            kind, name, text, how = (text_of(piece, key) for key in ("kind", "name", "text", "how"))
            ids = ids_of(piece["tokens"])
            origin = origin_of(piece)
            self.entries.append(Entry(kind, name, text, len(self.tokens), len(ids), how, origin, self.turns))
            self.tokens += ids
        self.rows += [(line["rows"], row) for row in range(len(self.tokens) - start)]
        for image in line.get("images", ()):
            self.images.append(_image(image, max([start, *(one.last for one in self.images)]), len(self.tokens)))
        fields = self.known
        self._came(line, skills)
        self._hear(line, line["said"])
        said = {key: text_of(line["said"], name) for name in line["said"] for key in keys_of(fields, name)}
        self.values |= said
        if not any(piece["kind"] == "result" for piece in line["pieces"]):  # errata are said before a question
            self.stated |= {*said, *self.pending}
            self.pending = {}

    def _came(self, line: Line, skills: Sequence[SkillText]) -> None:
        """Skills are there as they were compiled."""
        marks = line.get("marks", {})
        self.marks |= {name: [text_of({"": mark}, "") for mark in marks[name]] for name in marks}
        self.first |= {f"{skill.name}.{span.name}": span.value for skill in skills for span in skill.fields}

    def _hear(self, line: Line, names: Iterable[str]) -> None:
        """Fields were given a value when what everybody was told was known up to then."""
        known, time = self.known, heard_of(line)
        self.heard |= {f"{one.skill}.{one.field}": time for name in names for one in known.find(name)}

    def _join(self, skills: Sequence[SkillText]) -> None:
        """Skills came: a field that one of them has, too, is called by its skill from now on."""
        self.has([*self.skills, *skills])

    def has(self, skills: Sequence[SkillText]) -> None:
        """These are the skills from now on: their fields are called by their keys among them."""
        before = self.known
        self.skills = [*skills]
        now = self.known

        def renamed(name: str) -> str:
            found = before.find(name)
            one = next((one for one in found if f"{one.skill}.{one.field}" in now), None) if len(found) == 1 else None
            return now.key(one.skill, one.field) if one else name

        self.values = {renamed(name): value for name, value in self.values.items()}
        self.pending = {renamed(name): said for name, said in self.pending.items()}
        self.stated = set(map(renamed, self.stated))
        self.entries = [
            replace(entry, name=renamed(entry.name)) if entry.kind in ("erratum", "edit") else entry
            for entry in self.entries
        ]

    def _edit(self, line: Line) -> None:
        """A field got another value: in the text, by an erratum that is still to be said, or both."""
        name, value = text_of(line, "field"), text_of(line, "value")
        place = self._replace(line)
        origin = replace(origin_of(line), erratum=bool(text_of(line, "says")))
        method = text_of(line, "method")
        self.entries.append(Entry("edit", name, f"{name}={value}", place, 0, method, origin, self.turns))
        if method in FROM_CHANGE:
            self._remember_nothing(place)
        amended = {part["name"]: SkillText.from_dict(part) for part in line["skills"]}
        self.skills = [amended.get(skill.name) or skill for skill in self.skills]
        keys = keys_of(self.known, name)
        self._hear(line, [name])
        for key in keys:
            self.values[key] = value
            self.pending.pop(key, None)
        if line["says"]:
            self.pending[min(keys)] = line["says"]

    def _compact(self, line: Line) -> None:
        """Errata were taken out, and what comes after them was computed again."""
        known = self.known
        taken = [keys_of(known, text_of({"name": name}, "name")) for name in line["fields"]]
        place = self._replace(line)
        self.entries = [entry for entry in self.entries if entry.tokens or entry.kind in MARKS]
        self._remember_nothing(place)
        left = [keys_of(known, entry.name) for entry in self.entries if entry.kind == "erratum" and entry.name]
        self.stated = self.stated.difference(*taken).union(*left)

    def _forget(self, line: Line) -> None:
        """Pieces were taken out. The line says all that is left, so that nothing that came before is needed to read it
        where it is the first."""
        text_of(line, "method")
        self._replace(line)
        rest = line["rest"]
        self.system = text_of(rest, "system")
        self.questions = [text_of({"": question}, "") for question in rest["questions"]]
        self.entries = [Entry.from_dict(piece) for piece in rest["pieces"]]
        if any(entry.end > len(self.tokens) or entry.turn > self.turns for entry in self.entries):
            raise ValueError("pieces")
        for image in line.get("images", ()):  # where it is the first
            self.images.append(_image(image, max([0, *(one.last for one in self.images)]), len(self.tokens)))
        self.skills = [SkillText.from_dict(skill) for skill in rest["skills"]]
        self.values = {key: text_of(rest["values"], key) for key in rest["values"]}
        self.pending = {key: text_of(rest["pending"], key) for key in rest["pending"]}
        self.stated = {text_of({"": key}, "") for key in rest["stated"]}
        self.first = {}
        self._came(rest, self.skills)
        self.first |= {key: text_of(rest["first"], key) for key in rest.get("first", {})}
        if "heard" in rest:
            self.heard = {key: text_of(rest["heard"], key) for key in rest["heard"]}
        else:  # of an older version
            self._hear(line, self.known)

    def _remember_nothing(self, place: int) -> None:
        """All was decoded again from a position on: nothing there has seen what was cut out after it."""
        self.entries = [entry for entry in self.entries if entry.kind != TRACE or entry.position < place]

    def _replace(self, line: Line) -> int:
        """Tokens gave way to others, what comes after them moved, and some rows were computed again. Return the first
        position of these."""
        patches = patches_of(line, len(self.tokens))
        shift = position_map(patches)
        self.tokens = apply_patches(self.tokens, patches)
        self.rows = [*self.rows, *[("", 0)] * len(self.tokens)][: len(self.tokens)]
        changed = [place for span in ranges_of(line["changed"], len(self.tokens)) for place in range(*span)]
        for row, place in enumerate(changed):
            self.rows[place] = line["rows"], row
        self.entries = [_shifted(entry, shift) for entry in self.entries]
        try:
            out = removed_images(self.images, [patch.span for patch in patches])
        except EngineError as error:
            raise ValueError("images") from error
        moved = [(image, shift(image.first) - image.first) for image in self.images if image not in out]
        self.images = [replace(image, first=image.first + by, last=image.last + by) for image, by in moved]
        self.skills = [replace(skill, position=shift(skill.position)) for skill in self.skills]
        return changed[0] if changed else len(self.tokens)


def _image(data: Line, start: int, end: int) -> Image:
    """An image among the rows [start, end). Raise KeyError, TypeError or ValueError where the data is none."""
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


def _shifted(entry: Entry, shift: Callable[[int], int]) -> Entry:
    start, end = shift(entry.position), shift(entry.position + entry.tokens)
    return replace(entry, position=start, tokens=end - start)


def keys_of(known: Known, name: str) -> set[str]:
    """The keys of the fields that a ledger means by a name. Older ledgers name those of several skills by one."""
    return {one.key for one in known.find(name)} or {name}


def entry_line(entry: Entry) -> Line:
    """An entry as a ledger keeps what was left."""
    keys = ("kind", "name", "text", "position", "tokens", "how", "turn")
    said = {"erratum": True} if entry.origin.erratum else {}
    return {**{key: getattr(entry, key) for key in keys}, **as_line(entry.origin), **said}


def fold(lines: Sequence[Line]) -> State:
    """What lines come to. Raise an error of Python's, such as KeyError, where they are none."""
    live: list[Line] = []
    undone: list[Line] = []
    for line in lines:
        if line["op"] == "undo":
            undone.append(live.pop())
            if not live and lines[0]["op"] == "forget":  # of what came before it there is nothing
                raise ValueError("undo")
        else:
            rows_of(line)  # also of what is undone: the names that are taken are read from all lines
            live.append(line)
    edits = (line for line in undone if line["op"] == "edit")
    state = State(undone=[(text_of(line, "field"), text_of(line, "value"), heard_of(line)) for line in edits])
    for line in live:
        state.apply(line)
    return state


def unheard(state: State, errata: Sequence[GlobalErratum]) -> dict[str, str]:
    """The values that fields, called `skill.field`, are to be given by these errata, the latest last. One is of a skill
    that is the same by its marks, and that says or has said of the field what its text did."""
    known, fields, found = state.known, state.fields, dict[str, str]()
    for skill in state.skills:
        marks = state.marks.get(skill.name, ())
        mine = [one for one in errata if one.skill == skill.name and one.is_of(marks)]
        for name in dict.fromkeys(span.name for span in skill.fields):
            key, now = f"{skill.name}.{name}", fields[known.key(skill.name, name)]
            about = [one for one in mine if one.field == name and one.was in (now, state.first.get(key))]
            if about and about[-1].value != now and not _heard(state, about[-1]):
                found[key] = about[-1].value
    return found


def _heard(state: State, one: GlobalErratum) -> bool:
    """Whether the session was given a value of its own after an erratum, or the erratum itself, if only to take it
    back."""
    key = f"{one.skill}.{one.field}"
    undone = (time for name, value, time in state.undone if value == one.value and key in _keys(state, name))
    return any(time >= one.time for time in (state.heard.get(key, ""), *undone))


def _keys(state: State, name: str) -> list[str]:
    return [f"{one.skill}.{one.field}" for one in state.known.find(name)]
