"""Edits fields of a session, removes superseded errata, converts skills to and from segments, parses part names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from notes_cli.editing.methods import (
    ERRATUM,
    FIELD,
    FIELD_ERRATUM,
    METHODS,
    SUFFIX,
    Change,
    Method,
    amend,
    change,
    check,
    decode_from,
    free_cells,
    instead,
    refusal,
    same,
)
from notes_cli.engine.positions import Patch, Range, merge_ranges
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Remedy, SessionError, SkillError, UnsupportedError
from notes_cli.library.global_errata import now
from notes_cli.runtime.resolve import NEAR, defaults
from notes_cli.sessions.session_kv import SessionKV
from notes_cli.sessions.state import MARKS, Entry, Line, Origin, SkillText, State, as_line, keys_of, number_of
from notes_cli.text.erratum import Erratum, Reference, word
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import listed
from notes_cli.text.messages import BETWEEN

FORMS = "a turn (3), turns (3-5), a chain of thought (thought:3) or the results of tools (tool:3)"
_NAME = re.compile(r"(?:(turn|thought|tool):)?([0-9]{1,9})(?:-([0-9]{1,9}))?")
_WHAT = {"thought": "chain of thought", "tool": "result of a tool"}


@dataclass(frozen=True, slots=True)
class Parts:
    """Turn numbers: of whole turns, and of turns of which only the reasoning or the tool results are meant."""

    turns: tuple[int, ...] = ()
    thoughts: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Descriptions for display."""
        return (
            *([f"turn{'s' * (len(self.turns) > 1)} {spans(self.turns)}"] if self.turns else []),
            *([f"the chain of thought of turn {spans(self.thoughts)}"] if self.thoughts else []),
            *([f"the results of tools of turn {spans(self.results)}"] if self.results else []),
        )


def parts_of(names: Sequence[str], state: State, session: str) -> Parts:
    """Parse names of parts, such as "3-5" or "thought:3". Raises SessionError for invalid names and missing parts."""
    numbers: dict[str, set[int]] = {"turn": set(), "thought": set(), "tool": set()}
    see = Help.SHOW_SESSION(name=session)
    for name in names:
        match = _NAME.fullmatch(name.strip())
        if match is None:
            raise SessionError(f"{name!r} names no part of a session", f"Name {FORMS}")
        kind, first, last = match[1] or "turn", int(match[2]), int(match[3] or match[2])
        if first > last:
            raise SessionError(f"{name!r} ends before it begins", f"Name {FORMS}")
        if not 1 <= first <= last <= state.turns:
            has = f"has {state.turns} turn{'s' * (state.turns != 1)}"
            raise SessionError(f"there is no turn {first if first < 1 else last}: session {session} {has}", see)
        present = {
            number for number in range(first, last + 1) if kind == "turn" or any(pieces_of_kind(state, number, kind))
        }
        if not present:
            where = spans(range(first, last + 1))
            raise SessionError(f"there is no {_WHAT[kind]} in turn {where} of session {session}", see)
        numbers[kind] |= present
    turns = numbers["turn"]
    return Parts(*(tuple(sorted(part)) for part in (turns, numbers["thought"] - turns, numbers["tool"] - turns)))


def pieces_of_kind(state: State, turn: int, kind: str) -> Iterator[Entry]:
    """Return the pieces of a turn that are reasoning (`kind` "thought"), else those that are tool results."""
    of_turn = (entry for entry in state.entries if entry.turn == turn)
    return (entry for entry in of_turn if (entry.thought if kind == "thought" else entry.kind == "result"))


def spans(numbers: Sequence[int]) -> str:
    """Format ascending numbers as "1, 3-5"."""
    return ", ".join(
        str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in merge_ranges(numbers)
    )


def from_segment(segment: Segment, changed: Change | None, sequence: KVSequence) -> SkillText:
    """Return the ledger entry of a skill just added to the sequence, with its new values."""
    position = next(p.position for p in sequence.pieces if p.kind == "splice" and p.name == segment.name)
    skill = SkillText(segment.name, position, segment.text, len(segment), segment.fields)
    return amended(skill, changed) if changed else skill


def amended(skill: SkillText, changed: Change) -> SkillText:
    """Return the skill with its new values."""
    return SkillText(skill.name, skill.position, changed.text, len(changed.tokens), changed.spans)


def as_segment(kv: SessionKV, skill: SkillText) -> Segment:
    """Return the skill as a segment without K/V at its position. Raises SessionError if its text is not there."""
    first, last = skill.position, skill.position + skill.tokens
    actual, text = kv.text_bytes(first, last), skill.text.encode()
    if actual not in (text, b" " + text):  # SentencePiece adds a leading space
        name = kv.stored.name
        raise SessionError(
            f"the ledger of session {name} is damaged: {skill.name} is not at its position", Help.UNDO(name=name)
        )
    tokens, context = (np.array(kv.state.tokens[slice(*span)], np.int32) for span in ((first, last), (0, first)))
    return Segment(skill.name, "", skill.text, tokens, first, context, skill.fields, kv.workspace.identity, ())


# Edits in place that may move K/V, by cache type: each rotates the keys, which rounds them to the type once more (error
# in docs/LOG.md). f32 has no limit.
MOVES = {"f16": 64, "bf16": 8, "q8_0": 4}
FEW_MOVES = 2  # for any other type


@dataclass(frozen=True, slots=True)
class Edited:
    field: str
    value: str
    method: str
    chosen: str  # reason for the method; empty if the user named it
    origin: Origin  # effects of the edit

    def __repr__(self) -> str:
        return f"Edited({self.field!r}, {self.value!r}, by {self.method})"

    @property
    def rows(self) -> int:
        """Number of KV entries computed."""
        return self.origin.rewritten


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of a compaction; all empty if no erratum was superseded, and nothing was cut before."""

    fields: tuple[str, ...] = ()  # of each removed erratum
    removed: int = 0  # tokens removed
    decoded: int = 0  # tokens decoded again


MEMORY_METHODS = FIELD_ERRATUM, FIELD, ERRATUM  # for a memory, of which each turn places a new copy


class _Changed(NamedTuple):
    """A skill of the session, and the changes that a new value makes in it."""

    skill: SkillText
    segment: Segment
    change: Change

    @property
    def patches(self) -> list[Patch]:
        """Patches at positions of the sequence."""
        return [patch.offset(self.skill.position) for patch in self.change.patches]


@dataclass(frozen=True, slots=True)
class Correction:
    """Changes of the sequence before the next turn: new values in place, and superseded errata cut out."""

    patches: tuple[Patch, ...] = ()
    skills: tuple[SkillText, ...] = ()  # with their new values
    memory: int | None = None  # position of a memory that is cut out

    @property
    def cells(self) -> int:
        """Number of cells that the changes need, also temporarily."""
        return sum(len(patch.tokens) + max(0, patch.grows) for patch in self.patches)


class Editor:
    def __init__(self, kv: SessionKV, read_at: str | None = None) -> None:
        """Edit an open session. `read_at`: time at which the global errata were read; None: the time of the edit."""
        self._kv = kv
        self._read_at = read_at
        self._state = kv.state
        self._workspace = kv.workspace

    def targets(self, name: str, value: str) -> list[str]:
        """Return the keys of the fields that `name` refers to; `*.field`: in all skills with another value. Raises
        SkillError for an unknown field, and an ambiguous name."""
        keys = [reference.key for reference in self._resolve(name)]
        others = [key for key in keys if self._state.fields[key] != clean_value(key, value)]
        return others or keys

    def check(self, name: str, value: str, method: Method | None = None) -> str:
        """Return the value normalized. Raises NotesError if the edit is not possible."""
        key = self._reference(name).key
        value = clean_value(key, value)
        if self._state.fields[key] == value:
            how = self._in_place_method(key)
            if not how:
                raise SkillError(f"{key} is {value} already. Nothing was changed")
            if not (method and (method.appends_erratum or method.reaches_end)):
                message = f"{key} is {value} already, by {how}, which leaves what was noted of the old value"
                raise SkillError(message, Help.OTHER_METHOD(method=f"{ERRATUM} or {SUFFIX}"))
        if method and not method.in_session:
            known = ", ".join(method.name for method in METHODS.values() if method.in_session)
            raise NotesError(f"the edit method {method.name} is not for a session", f"Choose among {known}")
        return value

    def edit(self, name: str, value: str, method: Method | None = None) -> Edited:
        """Set a field, by default with the method of the model. Raises NotesError if that is not possible."""
        value, target = self.check(name, value, method), self._reference(name)
        if self._state.memory and target.skill == self._state.memory.name:
            return self._edit_memory(target, value, method)
        if method is not None:
            return self._edit(target, value, method, "")
        method, chosen = self._choose_method(target, value)
        try:
            return self._edit(target, value, method, chosen)
        except UnsupportedError as error:  # for this model, or at this position
            return self._edit(target, value, ERRATUM, f"{chosen}; {ERRATUM} instead: {error.what}")

    def _edit_memory(self, target: Reference, value: str, method: Method | None) -> Edited:
        """Edit a field of the memory: the next turn places a new copy with the value. Raises UnsupportedError for a
        method that would compute what that turn moves or drops."""
        named = method or FIELD_ERRATUM
        if named not in MEMORY_METHODS:
            message = f"{target.skill} is the memory of session {self._kv.stored.name}, not to be edited by {named}"
            raise UnsupportedError(message, Help.OTHER_METHOD(method=" or ".join(map(str, MEMORY_METHODS))))
        chosen = "" if method is named else f"{named}: each turn places a new copy of the memory"
        return self._commit(target, value, named, chosen)

    def _resolve(self, name: str) -> list[Reference]:
        return self._state.known.resolve(name, f"no skill of session {self._kv.stored.name} has")

    def _reference(self, name: str) -> Reference:
        """Return the single field that the name refers to. Raises SkillError for none or several."""
        matches = self._resolve(name)
        if len(matches) > 1:
            keys = listed([match.key for match in matches])
            raise SkillError(f"{name} names several fields ({keys}): edit one at a time")
        return matches[0]

    def _skill(self, target: Reference) -> SkillText:
        return next(skill for skill in self._state.skills if skill.name == target.skill)

    def _change(self, target: Reference, value: str, *, again: bool = False) -> _Changed | None:
        """Return the change that the value makes in the text, None if the text has it already. `again`: in that case
        replace the value by itself if the K/V after it may depend on an earlier value."""
        skill = self._skill(target)
        segment = as_segment(self._kv, skill)
        changes = change(self._workspace.model, segment, {target.field: value})
        if changes is None and again and self._in_place_method(target.key):
            changes = same(segment, target.field)
        return _Changed(skill, segment, changes) if changes else None

    def _in_place_method(self, key: str) -> str:
        """Return the method that set the field if it left the K/V after the field as it was; else an empty string."""
        known = self._state.known
        for entry in reversed(self._state.entries):
            if entry.kind in ("erratum", "edit") and key in keys_of(known, entry.name):
                method = METHODS.get(entry.how) if entry.kind == "edit" else None
                return entry.how if method and method.in_place and not method.appends_erratum else ""
        return ""

    def _has_image(self, skill: SkillText) -> bool:
        first, last = skill.position, skill.position + skill.tokens
        return any(first <= image.first < last for image in self._state.images)

    def _choose_method(self, target: Reference, value: str) -> tuple[Method, str]:
        """Return the method for this model and sequence, and the reason."""
        if self._has_image(self._skill(target)):
            return ERRATUM, f"{ERRATUM}: {target.skill} has an image, and no rows of such a skill are edited"
        changed, default = self._change(target, value), defaults(self._workspace)
        if changed is None:
            return ERRATUM, f"{ERRATUM}: the text has {target.key}={value} already, and an erratum gives another value"
        if target.key in self._state.stated and not default.method.appends_erratum:
            return FIELD_ERRATUM, f"{FIELD_ERRATUM}: an earlier erratum of {target.key} follows the text"
        following = len(self._state.tokens) - changed.patches[0].first
        if following <= NEAR and target.key not in self._state.stated and not self._workspace.model.recurrent:
            return SUFFIX, f"{SUFFIX}: no more than {NEAR} tokens follow the change, and all of them are decoded"
        if default.method.reaches_end:
            return SUFFIX, default.why
        if not default.method.in_session:
            return ERRATUM, f"{default.why}; {ERRATUM} instead: it is not for a session"
        return default.method, default.why

    def _edit(self, target: Reference, value: str, method: Method, chosen: str) -> Edited:
        if method.edits_rows and self._has_image(self._skill(target)):
            message = f"{target.skill} has an image, and its fields cannot be edited by {method.name}"
            raise UnsupportedError(message, Help.OTHER_METHOD(method=ERRATUM))
        changed = self._change(target, value, again=method.reaches_end) if method.edits_rows else None
        if method.edits_rows and not method.appends_erratum and not changed:
            message = f"the text has {target.key}={value} already, and an erratum gives another value"
            raise SkillError(message, Help.OTHER_METHOD(method=ERRATUM))
        places = self._amend(changed, method) if changed else ()
        return self._commit(target, value, method, chosen, changed, places)

    def queue(self, name: str, value: str) -> Edited:
        """Set a field by an erratum and, where the default method does, in place: both with the next turn
        (`correction`), without any work on K/V until then. Raises NotesError as `edit` does."""
        value, target = self.check(name, value), self._reference(name)
        in_place = self.edits_in_place and not self._has_image(self._skill(target))
        return self._commit(target, value, FIELD_ERRATUM if in_place else ERRATUM, "")

    @property
    def edits_in_place(self) -> bool:
        """True if the default for this model computes the K/V of new values in place."""
        edits = defaults(self._workspace).method.edits_rows
        return edits and refusal(self._workspace.context, FIELD_ERRATUM, session=True) is None

    def _commit(
        self,
        target: Reference,
        value: str,
        method: Method,
        chosen: str,
        changed: _Changed | None = None,
        places: Sequence[Range] = (),
    ) -> Edited:
        """Write an edit to the ledger."""
        origin = Origin(
            rewritten=_count(places),
            erratum=method.appends_erratum,
            contradicted=not method.appends_erratum and target.key in self._state.stated and not self._can_cut(),
        )
        line = {
            "op": "edit",
            "field": target.key,
            "value": value,
            "method": str(method),
            "read_at": self._read_at or now(),
            **as_line(origin),
            "pending": erratum_text(self._kv, target, value) if method.appends_erratum else "",
            "patches": as_lines(changed.patches if changed else ()),
            "skills": [asdict(amended(changed.skill, changed.change))] if changed else [],
        }
        self._kv.commit(line, places)
        return Edited(target.key, value, str(method), chosen, origin)

    def _amend(self, changed: _Changed, method: Method) -> Sequence[Range]:
        """Apply the change to the sequence. Returns the positions whose K/V changed."""
        segment, changes = changed.segment, changed.change
        check(self._workspace.context, method, session=True)
        if method.in_place and any(patch.grows for patch in changes.patches):
            check_moves(self._kv, f"the edit method {method} is not possible", instead(session=True))
        grown = max(0, len(changes.tokens) - len(segment))
        cells = len(self._state.tokens) + grown + free_cells(segment, changes, method)
        self._workspace.make_room(cells, held=self._kv.loaded)
        with self._kv.changing() as sequence:
            places = amend(sequence, segment, changes, method)
            sequence.flush()
        return places

    def correction(
        self, values: Iterable[tuple[Reference, str]], stated: Iterable[str], *, memory: bool = False
    ) -> Correction:
        """Return the changes before a turn that gives fields of the session these values. `stated`: keys of the fields
        whose errata the turn states. `memory`: cut the memory out. New values of which the K/V cannot be computed in
        place are left to their errata, and an erratum that cannot be cut out stays."""
        known = self._state.known
        due = {key for key in self._state.pending if self._waits(key)}
        new = {key: (reference, self._state.values[key]) for key in due for reference in known.find(key)[:1]}
        new |= {known.key(reference.skill, reference.field): (reference, value) for reference, value in values}
        changed = self._changes(new.values())
        entries, kept = self._state.entries, self._state.memory if memory else None
        copies = [entry for entry in entries if kept and (entry.kind, entry.name) == ("splice", kept.name)]
        errata = self._state.superseded(stated) if self._can_cut() else []
        cuts = self._cuts([*errata, *copies])
        patches = sorted([*cuts, *(patch for one in changed for patch in one.patches)], key=lambda patch: patch.first)
        position = copies[0].position if copies else None
        return Correction(tuple(patches), tuple(amended(one.skill, one.change) for one in changed), position)

    def _waits(self, key: str) -> bool:
        """Return True if the last edit of the field changes its K/V, and was queued."""
        known = self._state.known
        edits = (entry for entry in reversed(self._state.entries) if entry.kind == "edit")
        last = next((entry for entry in edits if key in keys_of(known, entry.name)), None)
        method = METHODS.get(last.how) if last else None
        return method is not None and method.edits_rows

    def _changes(self, values: Iterable[tuple[Reference, str]]) -> list[_Changed]:
        """Return the changes in place that new values make in the skills, by position; none if not possible."""
        by_skill: dict[str, dict[str, str]] = {}
        for reference, value in values:
            by_skill.setdefault(reference.skill, {})[reference.field] = value
        found = []
        memory = self._state.memory
        for skill in self._state.skills:
            if memory and skill.name == memory.name:
                continue  # its next copy has them
            if skill.name in by_skill and not self._has_image(skill):
                segment = as_segment(self._kv, skill)
                if changes := change(self._workspace.model, segment, by_skill[skill.name]):
                    found.append(_Changed(skill, segment, changes))
        if refusal(self._workspace.context, FIELD_ERRATUM, session=True, changes=[one.change for one in found]):
            return []
        movable = self._moves_left()
        return [one for one in found if movable or not any(patch.grows for patch in one.patches)]

    def _can_cut(self) -> bool:
        """Return True if the K/V after an erratum can be moved to its place."""
        return self._workspace.context.supports("splice") is None and self._moves_left()

    def _moves_left(self) -> bool:
        try:
            check_moves(self._kv, "", Help.OTHER_METHOD(method=ERRATUM))
        except UnsupportedError:
            return False
        return True

    def compact(self) -> Compacted:
        """Remove superseded errata and decode everything after the first of them again, and after earlier cuts, so that
        the K/V from there on equals that of a prefill of the remaining tokens."""
        superseded, traces = self._state.superseded(), self._state.traces
        if not superseded and not traces:
            return Compacted()
        patches = self._cuts(superseded)
        first = min([entry.position for entry in traces] + [patch.first for patch in patches])
        self._workspace.make_room(len(self._state.tokens), held=self._kv.loaded)
        with self._kv.changing() as sequence:
            places = decode_from(sequence, [Patch(first, first, ()), *patches])
        fields = tuple(entry.name for entry in superseded)
        self._kv.commit({"op": "compact", "fields": fields, "patches": as_lines(patches)}, places)
        return Compacted(fields, sum(patch.last - patch.first for patch in patches), _count(places))

    def _cuts(self, removed: Sequence[Entry]) -> list[Patch]:
        """Return patches that remove errata and the memory. After one that opened its message, and after the memory,
        the empty line before the next part is removed, too."""
        patches: list[Patch] = []
        opened_message = after_cut = False
        for entry in self._state.entries:
            first, last = entry.position, entry.position + entry.tokens
            if entry in removed:
                if not after_cut:
                    opened_message = not self._kv.text_bytes(first, last).startswith(BETWEEN.encode())
                patches.append(Patch(first, last, ()))
            elif after_cut and opened_message:
                ends = range(first + 1, min(last, first + len(BETWEEN) + 1))
                gap = [end for end in ends if self._kv.text_bytes(first, end) == BETWEEN.encode()]
                patches += [Patch(first, end, ()) for end in gap[:1]]
            after_cut = entry in removed or (after_cut and entry.kind in MARKS)
        return patches


def check_moves(kv: SessionKV, message: str, remedy: Remedy, *, memory: bool = False) -> None:
    """Raise UnsupportedError, which begins with `message`, if K/V was moved as often as the cache type allows.
    `memory`: for the move after the memory is cut out, which each row sees once."""
    kind = kv.workspace.context.options.type_k
    done = sum(map(moves, kv.state.live)) + (kv.state.memory is not None and not memory)
    if kind != "f32" and done >= MOVES.get(kind, FEW_MOVES):
        why = f"rows after a value of another length, or after what was cut, were moved {done} times"
        raise UnsupportedError(f"{message}: {why}, and each time rounds the keys of a {kind} cache", remedy)


def as_lines(patches: Sequence[Patch]) -> list[Line]:
    return [{"first": patch.first, "last": patch.last, "tokens": list(patch.tokens)} for patch in patches]


def moves(line: Line) -> int:
    """Return how often a line moved K/V in place: by an edit that changed the number of tokens, or by cuts."""
    if line["op"] == "forget":
        return number_of(line, "moves")
    method = METHODS.get(line["method"]) if line["op"] == "edit" else None
    in_place = line["op"] == "edit" and (method is None or method.in_place)  # None: a method of another version
    in_place = in_place or (line["op"] == "turn" and "patches" in line)
    if not in_place:
        return 0
    moving = [part["first"] for part in line["patches"] if len(part["tokens"]) != part["last"] - part["first"]]
    cut = number_of(line, "cut") if "cut" in line else None  # the rows after it are moved once, as its turn ends
    return int(bool(moving) and (cut is None or moving[0] < cut))


def erratum_text(kv: SessionKV, target: Reference, value: str) -> str:
    """Return the wording of an erratum that gives the field this value."""
    erratum = Erratum(target.field, value, "", target.skill if target.shared else "")
    return word(erratum, defaults(kv.workspace).wording)


def _count(places: Sequence[Range]) -> int:
    return sum(last - first for first, last in places)
