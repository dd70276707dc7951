"""Changes earlier turns of a session: edits fields, removes superseded errata, forgets turns, thoughts and results.

What is forgotten leaves as if it had never been there: the remaining conversation is rendered, and the sequence follows
the difference of the tokens. `cut` moves the K/V that follows: it was computed with the removed text and may
still depend on it. `suffix` decodes it again, and keeps nothing of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
from notes_cli.engine.pieces import Reason
from notes_cli.engine.positions import Patch, Range, changed_ranges, merge_ranges, removed_images
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, Remedy, SessionError, SkillError, UnsupportedError
from notes_cli.library.global_errata import marks_of, now
from notes_cli.runtime.place import skill_of, without_superseded
from notes_cli.runtime.resolve import NEAR, default_method
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.session_kv import SessionKV, follow
from notes_cli.sessions.state import TRACE, Entry, Generated, SkillText, State, Turn
from notes_cli.text.erratum import Reference
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import listed
from notes_cli.text.messages import ErratumPart, TextPart

# Changes that may move K/V, by cache type: each rotates the keys, which rounds them to the type once more (error in
# docs/LOG.md). f32 has no limit.
MOVES = {"f16": 64, "bf16": 8, "q8_0": 4}
FEW_MOVES = 2  # for any other type
MEMORY_METHODS = FIELD_ERRATUM, FIELD, ERRATUM  # for a memory, of which each turn places a new copy


@dataclass(frozen=True, slots=True)
class Edited:
    field: str
    value: str
    method: str
    chosen: str  # reason for the method; empty if the user named it
    entry: Entry  # effects of the edit

    def __repr__(self) -> str:
        return f"Edited({self.field!r}, {self.value!r}, by {self.method})"

    @property
    def rows(self) -> int:
        """Number of KV entries computed."""
        return self.entry.rewritten


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of a compaction; all empty if no erratum was superseded, and nothing was cut before."""

    fields: tuple[str, ...] = ()  # of each removed erratum
    removed: int = 0  # tokens removed
    decoded: int = 0  # tokens decoded again


def from_segment(segment: Segment, changed: Change | None) -> SkillText:
    """Return the skill that the conversation gets with a segment, with its new values."""
    compiled = {span.name: span.value for span in segment.fields}
    marks = marks_of(segment.source, segment.text) if segment.fields else ()
    skill = SkillText(segment.name, segment.text, segment.fields, compiled, marks)
    return replace(skill, text=changed.text, fields=changed.spans) if changed else skill


def as_segment(kv: SessionKV, skill: SkillText) -> Segment:
    """Return the skill as a segment without K/V at its position. Raises SessionError if its text is not there."""
    first, last = kv.state.span(skill.name)
    actual, text = kv.text_bytes(first, last), skill.text.encode()
    if actual not in (text, b" " + text):  # SentencePiece adds a leading space
        name = kv.stored.name
        raise SessionError(f"session {name} is damaged: {skill.name} is not at its position", Help.UNDO(name=name))
    tokens, context = (np.array(kv.state.tokens[slice(*span)], np.int32) for span in ((first, last), (0, first)))
    return Segment(skill.name, "", skill.text, tokens, first, context, skill.fields, kv.workspace.identity, ())


def has_image(state: State, name: str) -> bool:
    first, last = state.span(name)
    return any(first <= image.first < last for image in state.images)


def edits_in_place(kv: SessionKV) -> bool:
    """Return True if the default for this model computes the K/V of new values in place."""
    edits = default_method(kv.workspace)[0].edits_rows
    return edits and refusal(kv.workspace.context, FIELD_ERRATUM, session=True) is None


def check_moves(kv: SessionKV, message: str, remedy: Remedy, *, memory: bool = False) -> None:
    """Raise UnsupportedError, which begins with `message`, if K/V was moved as often as the cache type allows.
    `memory`: for the move after the memory is cut out, which each row sees once."""
    kind = kv.workspace.context.options.type_k
    done = kv.state.moves + (kv.state.memory is not None and not memory)
    if kind != "f32" and done >= MOVES.get(kind, FEW_MOVES):
        why = f"rows after a value of another length, or after what was cut, were moved {done} times"
        raise UnsupportedError(f"{message}: {why}, and each time rounds the keys of a {kind} cache", remedy)


def moves_left(kv: SessionKV) -> bool:
    try:
        check_moves(kv, "", Help.OTHER_METHOD(method=ERRATUM))
    except UnsupportedError:
        return False
    return True


def can_cut(kv: SessionKV) -> bool:
    """Return True if the K/V after an erratum can be moved to its place."""
    return kv.workspace.context.supports("splice") is None and moves_left(kv)


def changes_in(kv: SessionKV, values: Mapping[str, Mapping[str, str]]) -> dict[str, Change]:
    """Return the changes in place, by skill, that new values of fields make in skills of the session; those that are
    possible."""
    found = {}
    for skill in kv.state.skills:
        if skill.name in values and not has_image(kv.state, skill.name):
            changed = change(kv.workspace.model, as_segment(kv, skill), values[skill.name])
            if changed:
                found[skill.name] = changed
    if refusal(kv.workspace.context, FIELD_ERRATUM, session=True, changes=[*found.values()]):
        return {}
    movable = moves_left(kv)
    return {name: one for name, one in found.items() if movable or not any(patch.grows for patch in one.patches)}


def amended(state: State, changes: Mapping[str, Change], *, in_place: bool = False) -> State:
    """Return the state whose skills have their new values."""
    skills = tuple(
        replace(
            skill, text=changes[skill.name].text, fields=changes[skill.name].spans, in_place=in_place or skill.in_place
        )
        if skill.name in changes
        else skill
        for skill in state.skills
    )
    return replace(state, skills=skills)


def decode_again(kv: SessionKV, state: State, patches: Sequence[Patch], first: int) -> tuple[State, list[Range]]:
    """Patch the sequence and decode everything from `first` on. Return the state, and the positions decoded."""
    kv.workspace.make_room(max(len(kv.state.tokens), len(state.tokens)), held=kv.loaded)
    with kv.changing() as sequence:
        places = decode_from(sequence, [Patch(first, first, ()), *patches])
    return decoded_again(state, first), places


def decoded_again(state: State, first: int) -> State:
    """Return the state after everything from `first` on was decoded again: without traces of cuts there."""
    again = {"how": "decoded", "reason": Reason.AGAIN, "detail": "", "moved": 0, "rewritten": 0, "blocks": 0}
    pieces = [
        replace(entry, **again) if entry.position >= first and entry.how != "decoded" else entry  # type: ignore[arg-type]
        for entry in state.pieces
    ]
    marks = [entry for entry in state.edits_and_cuts if entry.kind != TRACE or entry.position < first]
    after = replace(state, pieces=tuple(pieces), edits_and_cuts=tuple(marks))
    skills = [replace(skill, in_place=False) if after.span(skill.name)[0] >= first else skill for skill in after.skills]
    return replace(after, skills=tuple(skills))


def with_turns(state: State, messages: Iterable[Turn]) -> State:
    """Return the state with changed turns, and the fields that their errata state."""
    turns = tuple(messages)
    stated = frozenset(part.key for turn in turns for part in turn.errata if part.key)
    return replace(state, conversation=turns, corrections=replace(state.corrections, stated=stated))


class Editor:
    """Edits an open session."""

    def __init__(self, kv: SessionKV) -> None:
        self._kv = kv
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
        target = self._reference(name)
        key, value = target.key, clean_value(target.key, value)
        if self._state.fields[key] == value:
            how = self._in_place_method(_full(target))
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
        return self._save(target, value, named, chosen, self._state, len(self._state.tokens), [])

    def _resolve(self, name: str) -> list[Reference]:
        return self._state.known.resolve(name, f"no skill of session {self._kv.stored.name} has")

    def _reference(self, name: str) -> Reference:
        """Return the single field that the name refers to. Raises SkillError for none or several."""
        matches = self._resolve(name)
        if len(matches) > 1:
            keys = listed([match.key for match in matches])
            raise SkillError(f"{name} names several fields ({keys}): edit one at a time")
        return matches[0]

    def _segment(self, target: Reference) -> Segment:
        return as_segment(self._kv, next(skill for skill in self._state.skills if skill.name == target.skill))

    def _in_place_method(self, name: str) -> str:
        """Return the method that set the field if it left the K/V after the field as it was; else an empty string."""
        for entry in reversed([*self._state.log]):
            if entry.kind in ("erratum", "edit") and entry.name == name:
                method = METHODS.get(entry.how) if entry.kind == "edit" else None
                return entry.how if method and method.in_place and not method.appends_erratum else ""
        return ""

    def _choose_method(self, target: Reference, value: str) -> tuple[Method, str]:
        """Return the method for this model and sequence, and the reason."""
        if has_image(self._state, target.skill):
            return ERRATUM, f"{ERRATUM}: {target.skill} has an image, and no rows of such a skill are edited"
        changed = change(self._workspace.model, self._segment(target), {target.field: value})
        default, why = default_method(self._workspace)
        stated = _full(target) in self._state.corrections.stated
        if changed is None:
            return ERRATUM, f"{ERRATUM}: the text has {target.key}={value} already, and an erratum gives another value"
        if stated and not default.appends_erratum:
            return FIELD_ERRATUM, f"{FIELD_ERRATUM}: an earlier erratum of {target.key} follows the text"
        following = len(self._state.tokens) - self._state.span(target.skill)[0] - changed.patches[0].first
        if following <= NEAR and not stated and not self._workspace.model.recurrent:
            return SUFFIX, f"{SUFFIX}: no more than {NEAR} tokens follow the change, and all of them are decoded"
        if default.reaches_end:
            return SUFFIX, why
        if not default.in_session:
            return ERRATUM, f"{why}; {ERRATUM} instead: it is not for a session"
        return default, why

    def _edit(self, target: Reference, value: str, method: Method, chosen: str) -> Edited:
        state, kv = self._state, self._kv
        if not method.edits_rows:
            return self._save(target, value, method, chosen, state, len(state.tokens), [])
        if has_image(state, target.skill):
            message = f"{target.skill} has an image, and its fields cannot be edited by {method.name}"
            raise UnsupportedError(message, Help.OTHER_METHOD(method=ERRATUM))
        segment = self._segment(target)
        changed = change(self._workspace.model, segment, {target.field: value})
        if changed is None and method.reaches_end and self._in_place_method(_full(target)):
            changed = same(segment, target.field)
        if changed is None:
            if method.appends_erratum:
                return self._save(target, value, method, chosen, state, len(state.tokens), [])
            message = f"the text has {target.key}={value} already, and an erratum gives another value"
            raise SkillError(message, Help.OTHER_METHOD(method=ERRATUM))
        check(self._workspace.context, method, session=True)
        grows = any(patch.grows for patch in changed.patches)
        if method.in_place and grows:
            check_moves(kv, f"the edit method {method} is not possible", instead(session=True))
        changes = {target.skill: changed}
        patches, after = follow(self._workspace, state, amended(state, changes), range(state.turns), changes)
        cells = max(len(state.tokens), len(after.tokens)) + free_cells(segment, changed, method)
        kv.workspace.make_room(cells, held=kv.loaded)
        with kv.changing() as sequence:
            places = amend(sequence, segment, changed, method)
            sequence.flush()
        if method.reaches_end:
            after = decoded_again(after, places[0][0])
        else:
            after = replace(after, moves=after.moves + (method.in_place and grows))
        return self._save(target, value, method, chosen, after, patches[0].first, places)

    def _save(
        self,
        target: Reference,
        value: str,
        method: Method,
        chosen: str,
        after: State,
        place: int,
        places: Sequence[Range],
    ) -> Edited:
        name, read_at = _full(target), now()
        contradicted = not method.appends_erratum and name in after.corrections.stated and not can_cut(self._kv)
        entry = Entry(
            *("edit", name, f"{target.key}={value}", place, 0, str(method), after.turns),
            rewritten=sum(last - first for first, last in places),
            erratum=method.appends_erratum,
            contradicted=contradicted,
        )
        given = after.corrections.given(name, value, in_place=method.edits_rows, states=method.appends_erratum)
        after = replace(after, corrections=given, read_at={**after.read_at, name: read_at})
        after = replace(after, edits_and_cuts=(*after.edits_and_cuts, entry))
        self._kv.commit("edit", entry.text, after, places)
        return Edited(target.key, value, str(method), chosen, entry)

    def queue(self, values: Mapping[str, str], read_at: str) -> None:
        """Give fields other values with the next turn: by errata and, where the default method does, in place. No K/V
        is computed until then. `values` by `skill.field`; `read_at`: when the global errata were read."""
        state, in_place, texts = self._state, edits_in_place(self._kv), []
        for name, value in values.items():
            edits = in_place and not has_image(state, name.partition(".")[0])
            method = FIELD_ERRATUM if edits else ERRATUM
            text = f"{state.key(name)}={value}"
            entry = Entry("edit", name, text, len(state.tokens), 0, str(method), state.turns, erratum=True)
            state = replace(
                state,
                corrections=state.corrections.given(name, value, in_place=edits, states=True),
                read_at={**state.read_at, name: read_at},
                edits_and_cuts=(*state.edits_and_cuts, entry),
            )
            texts.append(text)
        self._kv.commit("edit", ", ".join(texts), state, [])

    def compact(self) -> Compacted:
        """Remove superseded errata and decode everything after the first of them again, and after earlier cuts, so that
        the K/V from there on equals that of a prefill of the remaining tokens."""
        state = self._state
        fields = tuple(state.key(name) for name in state.superseded)
        if not fields and not state.traces:
            return Compacted()
        messages = [message for turn in state.conversation for message in turn.messages]
        left = iter(without_superseded(messages, state.corrections))
        turns = [replace(turn, messages=tuple(next(left) for _ in turn.messages)) for turn in state.conversation]
        patches, after = follow(self._workspace, state, with_turns(state, turns), range(state.turns), {})
        first = min([entry.position for entry in state.traces] + [patch.first for patch in patches])
        after, places = decode_again(self._kv, after, patches, first)
        self._kv.commit("compact", ", ".join(dict.fromkeys(fields)), after, places)
        removed = sum(patch.last - patch.first - len(patch.tokens) for patch in patches)
        return Compacted(fields, removed, sum(last - first for first, last in places))


def _full(target: Reference) -> str:
    return f"{target.skill}.{target.field}"


CUT, FOR_GOOD = WAYS = "cut", "suffix"  # of forgetting
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


def parts_named(names: Sequence[str], state: State, session: str) -> Parts:
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
        turns = {number: state.conversation[number - 1] for number in range(first, last + 1)}
        present = {number for number, turn in turns.items() if kind == "turn" or _has(turn, kind)}
        if not present:
            raise SessionError(f"there is no {_WHAT[kind]} in turn {spans([*turns])} of session {session}", see)
        numbers[kind] |= present
    whole = numbers["turn"]
    return Parts(*(tuple(sorted(part)) for part in (whole, numbers["thought"] - whole, numbers["tool"] - whole)))


def _has(turn: Turn, kind: str) -> bool:
    return bool(turn.results) if kind == "tool" else any(part.thought for part in turn.answer)


def spans(numbers: Sequence[int]) -> str:
    """Format ascending numbers as "1, 3-5"."""
    return ", ".join(
        str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in merge_ranges(numbers)
    )


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The effect of forgetting, done or planned."""

    parts: Parts
    method: str
    removed: int  # tokens removed
    moved: int  # tokens whose K/V was moved
    decoded: int  # tokens decoded
    remembering: int  # remaining tokens whose K/V was computed with the removed ones
    repeated: tuple[str, ...] = ()  # fields whose erratum was removed: repeated before the next question
    skills: tuple[str, ...] = ()  # skills removed with their turns
    tokens: int = 0  # tokens left


def forget(kv: SessionKV, names: Sequence[str], method: str = CUT, *, dry: bool = False) -> Forgotten:
    """Remove the named parts. `dry`: change nothing. `suffix` without names makes earlier cuts final. Raises
    NotesError, without changing anything, if that is not possible."""
    state, name, workspace = kv.state, kv.stored.name, kv.workspace
    if method not in WAYS:
        raise NotesError(f"no method {method!r} of forgetting", f"Choose {' or '.join(WAYS)}")
    if not names and (method == CUT or not state.traces):
        raise SessionError(f"nothing is named that session {name} is to forget", "Name a part of it")
    parts = parts_named(names, state, name)
    _check_turns(state, parts, name)
    kept = [number for number in range(state.turns) if number + 1 not in parts.turns]
    rest, repeated, gone = _remaining(workspace, state, parts, kept, name)
    patches, after = follow(workspace, state, rest, kept, {})
    if names and not patches:
        raise SessionError(f"{', '.join(parts.names)}: nothing of it is left in session {name}")
    traces = state.traces if method == FOR_GOOD else []  # earlier cuts become final, too
    first = min([patch.first for patch in patches] + [entry.position for entry in traces])
    if method == CUT:
        reason = workspace.context.supports("splice") or (
            workspace.context.supports("rewrite") if any(patch.tokens for patch in patches) else None
        )
        if reason:
            raise UnsupportedError(f"what follows cannot be moved: {reason}", Help.OTHER_METHOD(method=FOR_GOOD))
        check_moves(kv, "what follows cannot be moved", Help.OTHER_METHOD(method=FOR_GOOD))
    else:
        removed = removed_images(state.images, [patch.span for patch in patches])
        if any(image.last > first and image not in removed for image in state.images):
            message = f"an image of session {name} follows, and its rows are not decoded again as tokens"
            raise UnsupportedError(message, Help.OTHER_METHOD(method=CUT))
    new, remaining = sum(len(patch.tokens) for patch in patches), len(after.tokens)
    computed = (entry for entry in after.pieces if entry.how != "spliced")  # depends on earlier text
    following = sum(max(0, entry.end - max(first, entry.position)) for entry in computed)
    forgotten = Forgotten(
        parts,
        method,
        removed=sum(patch.last - patch.first for patch in patches),
        moved=remaining - first - new if method == CUT else 0,
        decoded=new if method == CUT else remaining - (0 if workspace.model.recurrent else first),
        remembering=following - new if method == CUT else 0,
        repeated=repeated,
        skills=gone,
        tokens=remaining,
    )
    if dry:
        return forgotten
    what = ", ".join(dict.fromkeys(parts.names))
    if method == FOR_GOOD:
        after, places = decode_again(kv, after, patches, first)
        kv.commit("forget", what, replace(after, undone=state.undone), places, for_good=True)
        return forgotten
    workspace.make_room(max(len(state.tokens), remaining) + new, held=kv.loaded)
    with kv.changing() as sequence:
        sequence.replace(patches)
        sequence.flush()
    if forgotten.remembering:
        turn = max((entry.turn for entry in after.pieces if entry.end <= first), default=0)
        trace = Entry(TRACE, "", "; ".join(parts.names), first, 0, CUT, turn)
        after = replace(after, edits_and_cuts=(*after.edits_and_cuts, trace))
    after = replace(after, moves=after.moves + (forgotten.moved > 0))
    kv.commit("forget", what, after, changed_ranges(patches, len(state.tokens)))
    return forgotten


def _check_turns(state: State, parts: Parts, name: str) -> None:
    """Raise SessionError if nothing, or a tool call without its result, would be left."""
    gone = set(parts.turns)
    if len(gone) == state.turns:
        raise SessionError(f"nothing would be left of session {name}", Help.REMOVE_WHOLE_SESSION(name=name))
    for number, turn in enumerate(state.conversation[1:], 2):
        if turn.results and (number in gone) != (number - 1 in gone):
            raise SessionError(
                f"turn {number} has the results of the tools that turn {number - 1} called, so both go or none",
                f"Name {number - 1}-{number}, or tool:{number} for the results alone",
            )


def _remaining(
    workspace: Workspace, state: State, parts: Parts, kept: Sequence[int], name: str
) -> tuple[State, tuple[str, ...], tuple[str, ...]]:
    """Return the remaining conversation, not rendered, the fields whose errata are repeated, and the removed skills.
    Raises SessionError if a turn that stays corrects one of those."""
    turns = []
    for number in kept:
        turn = state.conversation[number]
        if number + 1 in parts.thoughts:
            turn = _without_reasoning(workspace, turn, number + 1, name)
        if number + 1 in parts.results:
            emptied = tuple(replace(message, parts=(TextPart(""),)) for message in turn.messages)
            turn = replace(turn, messages=emptied)
        turns.append(turn)
    head = state.conversation[0].messages[0]
    if kept[0] > 0 and head.role == "system":  # stays, without the errata of the first turn
        words = replace(head, parts=tuple(part for part in head.parts if not isinstance(part, ErratumPart)))
        turns[0] = replace(turns[0], messages=(words, *turns[0].messages))
    with_skill = {skill for turn in turns for skill in turn.skills}
    gone = tuple(skill.name for skill in state.skills if skill.name not in with_skill)
    for number, turn in zip(kept, turns, strict=True):
        for part in turn.errata:
            if part.key and skill_of(part.key) in gone:
                raise SessionError(
                    f"turn {number + 1} corrects {state.key(part.key)} of a skill that would be gone "
                    f"({', '.join(gone)})",
                    "Name that turn, too",
                )
    lost = [key for key in state.current if skill_of(key) in gone]
    marks = [
        replace(entry, turn=sum(number < entry.turn for number in kept))
        for entry in state.edits_and_cuts
        if entry.name not in lost
    ]
    rest = replace(
        state,
        skills=tuple(skill for skill in state.skills if skill.name not in gone),
        corrections=state.corrections.without(lost),
        edits_and_cuts=tuple(marks),
        read_at={key: time for key, time in state.read_at.items() if key not in lost},
    )
    rest = with_turns(rest, turns)
    again = _repeated(state, rest)
    pending = (*rest.corrections.pending, *again)
    rest = replace(rest, corrections=replace(rest.corrections, pending=pending))
    return rest, tuple(rest.key(key) for key in again), gone


def _repeated(state: State, rest: State) -> list[str]:
    """Return the fields whose last value only a removed erratum stated."""
    last: dict[str, int] = {}
    for number, turn in enumerate(state.conversation, 1):
        for part in turn.errata:
            last.pop(part.key, None)
            last[part.key] = number
    left = {(part.key, part.value) for turn in rest.conversation for part in turn.errata}
    values, pending = rest.corrections.values, rest.corrections.pending
    edited = {(entry.name, entry.turn) for entry in state.edits_and_cuts if entry.kind == "edit"}
    return [
        key
        for key, number in last.items()
        if key in values
        and key not in pending
        and (key, values[key]) not in left
        and not any(name == key and turn >= number for name, turn in edited)
    ]


def _without_reasoning(workspace: Workspace, turn: Turn, number: int, name: str) -> Turn:
    """Return a turn as it would be without its reasoning."""
    model = workspace.model
    if workspace.reasoning.end:  # the markers around the answer would be left without the opening one
        message = f"{model.name} marks its answers after a chain of thought, so they go with it"
        raise SessionError(message, f"Name the turn: {number}")
    last = max(place for place, part in enumerate(turn.answer) if part.thought)
    rest = [*turn.answer[last + 1 :]]
    if rest:
        tokens = rest[0].tokens
        while len(tokens) > 1 and model.text(tokens[:1], special=True).isspace():
            tokens = tokens[1:]  # an empty line after the reasoning
        rest[0] = replace(rest[0], tokens=tokens)
    else:
        text = model.text((token for part in turn.answer for token in part.tokens), special=True)
        split = workspace.reasoning.found(text)
        if split is None or not split[1].strip():
            message = f"turn {number} of session {name} has nothing but a chain of thought"
            raise SessionError(message, f"Name the turn: {number}")
        rest = [Generated(tuple(int(token) for token in model.tokenize(split[1].strip())))]
    reasoning = turn.reasoning if turn.reasoning == "none" else "removed"
    return replace(turn, answer=tuple(rest), reasoning=reasoning)
