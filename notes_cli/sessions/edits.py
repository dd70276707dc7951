"""Edits of a session: a field gets another value by an edit method; errata that later ones supersede are taken out.

Also the skills of a session, and its parts by the number of their turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

from notes_cli.editing.amend import amend, check, free_cells, instead, prepare
from notes_cli.editing.change import Change, change, same
from notes_cli.editing.methods import ERRATUM, METHODS, SUFFIX, Method, record_of
from notes_cli.editing.operations import Prepared, decode_from, offset
from notes_cli.engine.patches import Patch, Range, align, merge_ranges
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Remedy, SessionError, SkillError, UnsupportedError
from notes_cli.library.standing import now
from notes_cli.runtime.settings import NEAR, defaults
from notes_cli.sessions.lines import Line, Origin, as_line, number_of
from notes_cli.sessions.session_kv import SessionKV
from notes_cli.sessions.state import MARKS, Entry, SkillText, State, keys_of
from notes_cli.text.erratum import Erratum, word
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import Reference, listed
from notes_cli.text.messages import BETWEEN

FORMS = "a turn (3), turns (3-5), a chain of thought (thought:3) or the results of tools (tool:3)"
_NAME = re.compile(r"(?:(turn|thought|tool):)?([0-9]{1,9})(?:-([0-9]{1,9}))?")
_WHAT = {"thought": "chain of thought", "tool": "result of a tool"}


@dataclass(frozen=True, slots=True)
class Parts:
    """Numbers of turns: those that are meant as a whole, those of which the chain of thought or the results are."""

    turns: tuple[int, ...] = ()
    thoughts: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What is meant, for people."""
        return (
            *([f"turn{'s' * (len(self.turns) > 1)} {spans(self.turns)}"] if self.turns else []),
            *([f"the chain of thought of turn {spans(self.thoughts)}"] if self.thoughts else []),
            *([f"the results of tools of turn {spans(self.results)}"] if self.results else []),
        )


def parts_of(names: Sequence[str], state: State, session: str) -> Parts:
    """The parts that are meant. Raise SessionError for a name that is none, and for what the session does not have."""
    found: dict[str, set[int]] = {"turn": set(), "thought": set(), "tool": set()}
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
        there = {number for number in range(first, last + 1) if kind == "turn" or any(of(state, number, kind))}
        if not there:
            where = spans(range(first, last + 1))
            raise SessionError(f"there is no {_WHAT[kind]} in turn {where} of session {session}", see)
        found[kind] |= there
    turns = found["turn"]
    return Parts(*(tuple(sorted(one)) for one in (turns, found["thought"] - turns, found["tool"] - turns)))


def of(state: State, turn: int, kind: str) -> Iterator[Entry]:
    """The pieces of a turn that are of a chain of thought, or results of tools."""
    of_turn = (entry for entry in state.entries if entry.turn == turn)
    return (entry for entry in of_turn if (entry.thought if kind == "thought" else entry.kind == "result"))


def spans(numbers: Sequence[int]) -> str:
    """Numbers for people: 1, 3-5."""
    return ", ".join(
        str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in merge_ranges(numbers)
    )


def from_segment(segment: Segment, changed: Change | None, sequence: KVSequence) -> SkillText:
    """A skill that has come into the sequence, with its new values."""
    position = next(p.position for p in sequence.pieces if p.kind == "splice" and p.name == segment.name)
    influence = {name: [round(float(part), 6) for part in row] for name, row in segment.influence.items()}
    skill = SkillText(segment.name, position, segment.text, len(segment), segment.fields, influence)
    return amended(skill, changed) if changed else skill


def amended(skill: SkillText, changed: Change) -> SkillText:
    """The skill with its new values. Of other tokens in the place of old ones no influence is known."""
    influence = {}
    for name, row in skill.influence.items():
        moved = [0.0] * len(changed.tokens)
        for part in align(changed.patches, len(row)):
            if not part.patch:
                moved[slice(*part.after)] = row[slice(*part.before)]
        influence[name] = moved
    return SkillText(skill.name, skill.position, changed.text, len(changed.tokens), changed.spans, influence)


def as_segment(kv: SessionKV, skill: SkillText) -> Segment:
    """The skill as a segment without rows, compiled where it is: what a change is found in.

    Raise SessionError where the sequence has another text there.
    """
    first, last = skill.position, skill.position + skill.tokens
    spelt, text = kv.spelt(first, last), skill.text.encode()
    if spelt not in (text, b" " + text):  # SentencePiece puts a blank before it
        name = kv.stored.name
        raise SessionError(
            f"the ledger of session {name} is damaged: {skill.name} is not at its position", Help.UNDO(name=name)
        )
    tokens, context = (np.array(kv.state.tokens[slice(*span)], np.int32) for span in ((first, last), (0, first)))
    influence = {name: np.array(row, np.float32) for name, row in skill.influence.items()}
    return Segment(
        *(skill.name, "", skill.text, tokens, first, context, skill.fields, kv.workspace.identity, ()),
        influence=influence,
    )


# Edits in place that may move rows: each rounds the keys to the cache's type once more (docs/LOG.md has what that comes
# to). f32 takes any number.
MOVES = {"f16": 64, "bf16": 8, "q8_0": 4}
FEW_MOVES = 2  # of any other type


@dataclass(frozen=True, slots=True)
class Edited:
    """An edit that was made."""

    field: str
    value: str
    method: str
    chosen: str  # why by this method; empty if it was named
    origin: Origin  # what was done

    def __repr__(self) -> str:
        return f"Edited({self.field!r}, {self.value!r}, by {self.method})"

    @property
    def rows(self) -> int:
        """How many were computed."""
        return self.origin.rewritten


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction took out; nothing, if no erratum was superseded."""

    fields: tuple[str, ...] = ()  # of each erratum that was taken out
    removed: int = 0  # tokens that were taken out
    decoded: int = 0  # tokens that were decoded again


class _Changed(NamedTuple):
    """A skill of the session, and what a new value changes in it."""

    skill: SkillText
    segment: Segment
    change: Change

    @property
    def patches(self) -> list[Patch]:
        """Of the sequence."""
        return offset(self.change.patches, self.skill.position)


class Editor:
    """Edits a session."""

    def __init__(self, kv: SessionKV, heard: str | None = None) -> None:
        """`heard`: until when what everybody is told was looked at; None: until the edit."""
        self._kv = kv
        self._heard = heard
        self._state = kv.state
        self._workspace = kv.workspace

    def targets(self, name: str, value: str) -> list[str]:
        """The keys of the fields that an edit is for: one, or for `*.field` those of all skills whose value is another.

        Raise SkillError where there is none, and for a name without a skill that several skills have.
        """
        keys = [one.key for one in self._resolved(name)]
        others = [key for key in keys if self._state.fields[key] != clean_value(key, value)]
        return others or keys

    def check(self, name: str, value: str, method: Method | None = None) -> str:
        """The value as it will be written. Raise NotesError where an edit cannot be."""
        key = self._reference(name).key
        value = clean_value(key, value)
        if self._state.fields[key] == value:
            how = self._in_place(key)
            if not how:
                raise SkillError(f"{key} is {value} already. Nothing was changed")
            if not (method and (method.record.appends_erratum or method.record.reaches_end)):
                what = f"{key} is {value} already, by {how}, which leaves what was noted of the old value"
                raise SkillError(what, Help.OTHER_METHOD(method=f"{ERRATUM} or {SUFFIX}"))
        if method and not method.record.in_session:
            known = ", ".join(record.name for record in METHODS.values() if record.in_session)
            raise NotesError(f"the edit method {method.name} is not for a session", f"Choose among {known}")
        return value

    def edit(self, name: str, value: str, method: Method | None = None) -> Edited:
        """Give a field another value, by the method that this model's profile has if none is named.

        Raise NotesError where that cannot be.
        """
        value, one = self.check(name, value, method), self._reference(name)
        if method is not None:
            return self._edit(one, value, method, "")
        method, chosen = self._choose(one, value)
        try:
            return self._edit(one, value, method, chosen)
        except UnsupportedError as error:  # on this model, or in this place
            return self._edit(one, value, ERRATUM, f"{chosen}; {ERRATUM} instead: {error.what}")

    def _resolved(self, name: str) -> list[Reference]:
        return self._state.known.resolve(name, f"no skill of session {self._kv.stored.name} has")

    def _reference(self, name: str) -> Reference:
        """The one field that the name is for. Raise SkillError where that is none, or several."""
        found = self._resolved(name)
        if len(found) > 1:
            raise SkillError(f"{name} names several fields ({listed([one.key for one in found])}): edit one at a time")
        return found[0]

    def _changed(self, one: Reference, value: str, *, again: bool = False) -> _Changed | None:
        """What the value changes in the text, None if the text has it already; `again`: then it is itself what changes,
        if what follows it may have seen another."""
        skill = next(skill for skill in self._state.skills if skill.name == one.skill)
        segment = as_segment(self._kv, skill)
        found = change(self._workspace.model, segment, {one.field: value})
        if found is None and again and self._in_place(one.key):
            found = same(segment, one.field)
        return _Changed(skill, segment, found) if found else None

    def _in_place(self, key: str) -> str:
        """The method by which the field got its value, if that left what follows it as it was; else empty."""
        known = self._state.known
        for entry in reversed(self._state.entries):
            if entry.kind in ("erratum", "edit") and key in keys_of(known, entry.name):
                record = record_of(entry.how) if entry.kind == "edit" else None
                return entry.how if record and record.in_place and not record.appends_erratum else ""
        return ""

    def _pictured(self, one: Reference) -> bool:
        """Whether the skill of a field has images among its rows."""
        skill = next(skill for skill in self._state.skills if skill.name == one.skill)
        first, last = skill.position, skill.position + skill.tokens
        return any(first <= image.first < last for image in self._state.images)

    def _choose(self, one: Reference, value: str) -> tuple[Method, str]:
        """The method that holds for this model and this sequence, and why."""
        if one.key in self._state.stated:  # in the text a new value would precede it, and be contradicted
            return ERRATUM, f"{ERRATUM}: an earlier erratum of {one.key} follows the text"
        if self._pictured(one):
            return ERRATUM, f"{ERRATUM}: {one.skill} has an image, and no rows of such a skill are edited"
        changed, found = self._changed(one, value), defaults(self._workspace)
        if changed is None:
            return ERRATUM, f"{ERRATUM}: the text has {one.key}={value} already, and an erratum gives another value"
        following = len(self._state.tokens) - changed.patches[0].first
        if following <= NEAR and not self._workspace.model.recurrent:
            return SUFFIX, f"{SUFFIX}: no more than {NEAR} tokens follow the change, and all of them are decoded"
        if found.method.record.reaches_end:
            return SUFFIX, found.why
        if not found.method.record.in_session:
            return ERRATUM, f"{found.why}; {ERRATUM} instead: it is not for a session"
        return found.method, found.why

    def _edit(self, one: Reference, value: str, method: Method, chosen: str) -> Edited:
        record = method.record
        if record.edits_rows and self._pictured(one):
            what = f"{one.skill} has an image, and its fields cannot be edited by {method.name}"
            raise UnsupportedError(what, Help.OTHER_METHOD(method=ERRATUM))
        changed = self._changed(one, value, again=record.reaches_end) if record.edits_rows else None
        if record.edits_rows and not record.appends_erratum and not changed:
            what = f"the text has {one.key}={value} already, and an erratum gives another value"
            raise SkillError(what, Help.OTHER_METHOD(method=ERRATUM))
        places, prepared = self._amend(changed, method) if changed else ((), Prepared())
        origin = Origin(
            rewritten=_count(places),
            passed=prepared.passed,
            selected=method.name if prepared.passed else "",
            erratum=record.appends_erratum,
            contradicted=not record.appends_erratum and one.key in self._state.stated,
        )
        line = {
            "op": "edit",
            "field": one.key,
            "value": value,
            "method": str(method),
            "heard": self._heard or now(),
            **as_line(origin),
            "says": sentence(self._kv, one, value) if record.appends_erratum else "",
            "patches": as_lines(changed.patches if changed else ()),
            "skills": [asdict(amended(changed.skill, changed.change))] if changed else [],
        }
        self._kv.commit(line, places)
        return Edited(one.key, value, str(method), chosen, origin)

    def _amend(self, changed: _Changed, method: Method) -> tuple[Sequence[Range], Prepared]:
        """Bring the change into the sequence; the positions of rows that are others now, and what it took to know."""
        segment, found, selects = changed.segment, changed.change, method.record.selects
        if self._state.images and selects and selects.needs_pass(segment):
            what = f"the edit method {method} goes over rows by where they are, and the session has images"
            raise UnsupportedError(what, instead(session=True))
        check(self._workspace.context, method, session=True)
        if method.record.in_place and any(patch.grows for patch in found.patches):
            check_moves(self._kv, f"the edit method {method} is not possible", instead(session=True))
        grown = max(0, len(found.tokens) - len(segment))
        cells = len(self._state.tokens) + grown + free_cells(segment, found, method)
        self._workspace.make_room(cells, held=self._kv.at_hand)
        if selects and selects.needs_pass(segment):
            segment = self._with_rows(segment)
        prepared = prepare(self._workspace.scratch, segment, found, method, session=True)
        with self._kv.changing() as sequence:
            places = amend(sequence, segment, found, method, prepared)
            sequence.flush()
        return places, prepared

    def _with_rows(self, segment: Segment) -> Segment:
        """The segment with its rows as they are in the sequence."""
        seq, first = self._kv.sequence, segment.base
        rows, _ = seq.read(first, first + len(segment), seq.context.lossless_type)
        return replace(segment, layers=rows)

    def compact(self) -> Compacted:
        """Take out the errata that later ones supersede, and decode again what follows the first of them.

        Then the rows from there on are those of a prefill of the tokens that are left.
        """
        out = self._state.superseded
        if not out:
            return Compacted()
        patches = self._cuts(out)
        self._workspace.make_room(len(self._state.tokens), held=self._kv.at_hand)
        with self._kv.changing() as sequence:
            places = decode_from(sequence, patches)
        fields = tuple(entry.name for entry in out)
        self._kv.commit({"op": "compact", "fields": fields, "patches": as_lines(patches)}, places)
        return Compacted(fields, sum(patch.last - patch.first for patch in patches), _count(places))

    def _cuts(self, out: Sequence[Entry]) -> list[Patch]:
        """Patches that take the errata out. Where one was at the head of its message, what comes next is now: the empty
        line before that goes, too."""
        patches: list[Patch] = []
        head = taking = False
        for entry in self._state.entries:
            first, last = entry.position, entry.position + entry.tokens
            if entry in out:
                head = head if taking else not self._kv.spelt(first, last).startswith(BETWEEN.encode())
                patches.append(Patch(first, last, ()))
            elif taking and head and (gap := self._gap(first, last)):
                patches.append(Patch(first, first + gap, ()))
            taking = entry in out or (taking and entry.kind in MARKS)
        return patches

    def _gap(self, first: int, last: int) -> int:
        """How many of these tokens are the empty line before a part of a message; 0 if it has none of its own."""
        ends = range(first + 1, min(last, first + len(BETWEEN) + 1))
        return next((end for end in ends if self._kv.spelt(first, end) == BETWEEN.encode()), first) - first


def check_moves(kv: SessionKV, what: str, remedy: Remedy) -> None:
    """Raise UnsupportedError, saying `what` cannot be, where rows have been moved as often as their type allows."""
    kind = kv.workspace.context.options.type_k
    done = sum(map(moves, kv.state.live))
    if kind != "f32" and done >= MOVES.get(kind, FEW_MOVES):
        why = f"rows after a value of another length, or after what was cut, were moved {done} times"
        raise UnsupportedError(f"{what}: {why}, and each time rounds the keys of a {kind} cache", remedy)


def as_lines(patches: Sequence[Patch]) -> list[Line]:
    """Patches as ledgers have them."""
    return [{"first": patch.first, "last": patch.last, "tokens": list(patch.tokens)} for patch in patches]


def moves(line: Line) -> int:
    """How often rows were moved in place: by an edit that put tokens in the place of more or fewer, by what was cut."""
    if line["op"] == "forget":
        return number_of(line, "moves")
    record = record_of(line["method"]) if line["op"] == "edit" else None
    in_place = line["op"] == "edit" and (record is None or record.in_place)  # None: another version's, who knows
    return int(in_place and any(len(part["tokens"]) != part["last"] - part["first"] for part in line["patches"]))


def sentence(kv: SessionKV, one: Reference, value: str) -> str:
    """The erratum that says a field's value."""
    erratum = Erratum(one.field, value, "", one.skill if one.shared else "")
    return word(erratum, defaults(kv.workspace).wording)


def _count(places: Sequence[Range]) -> int:
    return sum(last - first for first, last in places)
