"""Changes earlier turns of a session: edits fields, applies global errata, compacts, forgets turns and results.

Each changes the conversation, and the sequence follows the difference (session_kv.py). `cut` moves the K/V after it,
which was computed with the removed text and may still depend on it; with recurrent layers it decodes that again.
`suffix` always does, and keeps nothing of the text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from notes_cli.editing.methods import (
    ERRATUM,
    FIELD_ERRATUM,
    METHODS,
    SUFFIX,
    Change,
    Method,
    change,
    instead,
    refusal,
    same,
)
from notes_cli.engine.positions import merge_ranges
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, Notice, Say, SessionError, SkillError, UnsupportedError
from notes_cli.library.global_errata import marks_of, now
from notes_cli.runtime.place import skill_of, without_superseded
from notes_cli.runtime.resolve import choose, default_method
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.session_kv import Planned, SessionKV, dependent
from notes_cli.sessions.state import Entry, Part, SkillText, State, Turn, messages_of, with_messages
from notes_cli.text.erratum import Reference, describe_wildcards, unique_values
from notes_cli.text.fields import clean_value
from notes_cli.text.messages import ErratumPart, TextPart


def from_segment(segment: Segment, changed: Change | None) -> SkillText:
    """Return the skill that the conversation gets with a segment, with its new values."""
    compiled = {span.name: span.value for span in segment.fields}
    marks = marks_of(segment.source, segment.text)
    skill = SkillText(segment.name, segment.text, segment.fields, compiled, marks)
    return replace(skill, text=changed.text, fields=changed.spans) if changed else skill


def as_segment(kv: SessionKV, name: str) -> Segment:
    """Return a skill as a segment without K/V at its position. Raises SessionError if its text is not there."""
    skill = next(skill for skill in kv.state.skills if skill.name == name)
    first, last = kv.state.span(name)
    actual = b"".join(map(kv.workspace.model.token_bytes, kv.state.tokens[first:last]))
    if actual not in (skill.text.encode(), b" " + skill.text.encode()):  # SentencePiece adds a leading space
        session = kv.stored.name
        raise SessionError(f"session {session} is damaged: {name} is not at its position", Help.UNDO(name=session))
    tokens, context = (np.array(kv.state.tokens[slice(*span)], np.int32) for span in ((first, last), (0, first)))
    return Segment(name, "", skill.text, tokens, first, context, skill.fields, kv.workspace.identity, ())


def has_image(state: State, name: str) -> bool:
    first, last = state.span(name)
    return any(first <= image.first < last for image in state.images)


def edits_in_place(kv: SessionKV) -> bool:
    """Return True if the default for this model computes the K/V of new values in place."""
    edits = default_method(kv.workspace)[0].edits_rows
    return edits and refusal(kv.workspace.context, FIELD_ERRATUM, session=True) is None


def can_cut(kv: SessionKV) -> bool:
    """Return True if the K/V after an erratum can be moved to its place."""
    return not (kv.workspace.context.supports("splice") or kv.exhausted(kv.state.moves + 1))


def amended(state: State, changes: Mapping[str, Change], *, in_place: bool = False) -> State:
    """Return the state whose skills have their new values. `in_place`: by a turn."""

    def new(skill: SkillText) -> SkillText:
        changed = changes.get(skill.name)
        if changed is None:
            return skill
        return replace(skill, text=changed.text, fields=changed.spans, in_place=in_place or skill.in_place)

    return replace(state, skills=tuple(map(new, state.skills)))


def edits(kv: SessionKV, values: Mapping[str, str], method: Method | None, say: Say) -> Iterator[Entry]:
    """Edit several fields, `*.field` in each skill that has it with another value, yielding each edit when done; by
    default with the method of the model. Raises NotesError, before any edit, if one is not possible, or a field gets
    two values."""
    known, current = kv.state.known, kv.state.fields
    for text in describe_wildcards(values, known):
        say(Notice(text))
    pairs = list[tuple[Reference, str]]()
    for field, value in values.items():
        found = known.resolve(field, f"no skill of session {kv.stored.name} has")
        others = [target for target in found if current[target.key] != clean_value(target.key, value)]
        pairs += [(target, value) for target in others or found]
    targets = unique_values(pairs, lambda target: target.key)
    for target, value in targets.items():
        _check(kv.state, target, clean_value(target.key, value), method)
    for target, value in targets.items():
        yield _edit(kv, target, clean_value(target.key, value), method)


def _check(state: State, target: Reference, value: str, method: Method | None) -> None:
    """Raise NotesError if the edit is not possible."""
    if state.fields[target.key] == value:
        how = _in_place_method(state, target)
        if not how:
            raise SkillError(f"{target.key} is {value} already. Nothing was changed")
        if not (method and (method.appends_erratum or method.reaches_end)):
            message = f"{target.key} is {value} already, by {how}, which leaves what was noted of the old value"
            raise SkillError(message, Help.OTHER_METHOD(method="erratum or suffix"))
    if method and not method.in_session:
        known = ", ".join(method.name for method in METHODS.values() if method.in_session)
        raise NotesError(f"the edit method {method.name} is not for a session", f"Choose among {known}")


def _in_place_method(state: State, target: Reference) -> str:
    """Return the method that set the field if it left the K/V after the field as it was; else an empty string."""
    for entry in reversed([*state.log]):
        if entry.kind in ("erratum", "edit") and entry.name == f"{target.skill}.{target.field}":
            method = METHODS.get(entry.how) if entry.kind == "edit" else None
            return entry.how if method and method.in_place and not method.appends_erratum else ""
    return ""


def _edit(kv: SessionKV, target: Reference, value: str, method: Method | None) -> Entry:
    """Give a field a value. Returns the edit, whose `detail` is the reason for a method that was not named."""
    state, key, chosen = kv.state, f"{target.skill}.{target.field}", ""
    memory, image = bool(state.memory and state.memory.name == target.skill), has_image(state, target.skill)
    segment = None if memory or image else as_segment(kv, target.skill)
    changed = change(kv.workspace.model, segment, {target.field: value}) if segment else None
    already = f"the text has {target.key}={value} already, and an erratum gives another value"
    if method is not None:
        if memory and method.reaches_end:
            message = f"{target.skill} is the memory of session {kv.stored.name}, not to be edited by {method}"
            raise UnsupportedError(message, Help.OTHER_METHOD(method="field+erratum, field or erratum"))
        if image and method.edits_rows:
            message = f"{target.skill} has an image, and its fields cannot be edited by {method.name}"
            raise UnsupportedError(message, Help.OTHER_METHOD(method=ERRATUM))
        if segment and changed is None and method.reaches_end and _in_place_method(state, target):
            changed = same(segment, target.field)
        if changed is None and method.edits_rows and not method.appends_erratum and not memory:
            raise SkillError(already, Help.OTHER_METHOD(method=ERRATUM))
    elif memory:
        method, chosen = FIELD_ERRATUM, f"{FIELD_ERRATUM}: each turn places a new copy of the memory"
    elif changed is None:
        why = f"{target.skill} has an image, and no rows of such a skill are edited" if image else already
        method, chosen = ERRATUM, f"{ERRATUM}: {why}"
    else:
        patches, after = kv.plan(amended(state, {target.skill: changed}), changes={target.skill: changed})
        followed = replace(changed, tokens=np.array(after.tokens, np.int32), patches=tuple(patches))
        method, chosen = choose(kv.workspace, [followed], stated=key in state.corrections.stated)
        if not method.in_session:
            other = f"{chosen}; {ERRATUM} instead: it is not for a session"
            method, chosen = (SUFFIX, chosen) if method.reaches_end else (ERRATUM, other)
    planned: Planned = [], state
    again = method.reaches_end
    if changed and method.edits_rows:
        planned = kv.plan(amended(state, {target.skill: changed}), changes={target.skill: changed}, again=again)
        reason = refusal(kv.workspace.context, method, session=True) or kv.obstacle(planned, again=again)
        if reason and not chosen:
            raise UnsupportedError(f"the edit method {method} is not possible: {reason}", instead(session=True))
        if reason:
            method, chosen, planned = ERRATUM, f"{chosen}; {ERRATUM} instead: {reason}", ([], state)
    patches, after = planned
    changed_rows = sum(last - first for first, last in kv.places(planned, again=again)) if patches else 0
    computed = changed_rows if again else sum(len(patch.tokens) for patch in patches)
    after = after.given(
        *(key, value),
        in_place=method.edits_rows,
        states=method.appends_erratum,
        method=str(method),
        read_at=now(),
        position=patches[0].first if patches else len(state.tokens),
        rewritten=computed,
        moved=changed_rows - computed,
        contradicted=not method.appends_erratum and key in state.corrections.stated and not can_cut(kv),
        detail=chosen,
    )
    entry = after.edits_and_cuts[-1]
    kv.apply("edit", entry.text, (patches, after), again=again and bool(patches))
    return replace(entry, name=target.key)


def correct(kv: SessionKV, values: Mapping[str, str], read_at: str) -> None:
    """Give fields other values with the next turn: by errata and, where the default method does, in place. No K/V
    is computed until then. `values` by `skill.field`; `read_at`: when the global errata were read."""
    state, in_place = kv.state, edits_in_place(kv)
    for name, value in values.items():
        edited = in_place and not has_image(state, skill_of(name))
        method = str(FIELD_ERRATUM if edited else ERRATUM)
        state = state.given(name, value, in_place=edited, states=True, method=method, read_at=read_at)
    kv.commit("correct", ", ".join(entry.text for entry in state.edits_and_cuts[-len(values) :]), state, [])


def cut_errata(before: State, after: State) -> list[str]:
    """Return the `skill.field` of each erratum that is only in the messages before."""
    one, other = (Counter(part for turn in state.conversation for part in turn.errata) for state in (before, after))
    return [part.key for part in (one - other).elements()]


CUT, FOR_GOOD = WAYS = "cut", "suffix"  # of forgetting
FORMS = "a turn (3), turns (3-5), a chain of thought (thought:3) or the results of tools (tool:3)"
_NAME = re.compile(r"(?:(turn|thought|tool):)?([0-9]{1,9})(?:-([0-9]{1,9}))?")
_WHAT = {"thought": "chain of thought", "tool": "result of a tool"}
Parts = Mapping[str, Sequence[int]]  # ascending turn numbers: of whole turns ("turn"), of a "thought", of a "tool"


@dataclass(frozen=True, slots=True)
class Removed:
    """The effect of forgetting or of a compaction, done or planned. Numbers are of tokens."""

    names: tuple[str, ...] = ()  # of the parts; of a compaction the fields of the errata
    removed: int = 0
    moved: int = 0
    decoded: int = 0
    remembering: int = 0  # left, and computed with the removed ones
    tokens: int = 0  # left
    repeated: tuple[str, ...] = ()  # fields whose erratum was removed: repeated before the next question
    skills: tuple[str, ...] = ()  # removed with their turns


def _effect(kv: SessionKV, planned: Planned, names: Sequence[str], *, again: bool) -> Removed:
    (patches, after), left = planned, len(planned[1].tokens)
    removed = Removed(tuple(names), removed=len(kv.state.tokens) - left, tokens=left)
    if again:
        return replace(removed, decoded=sum(last - first for first, last in kv.places(planned, again=True)))
    first, new = min((patch.first for patch in patches), default=left), sum(len(patch.tokens) for patch in patches)
    return replace(removed, moved=left - first - new, decoded=new, remembering=dependent(after, patches))


def compact(kv: SessionKV) -> Removed:
    """Remove superseded errata and decode everything after the first of them again, and after earlier cuts, so that
    the K/V from there on equals that of a prefill of the remaining tokens. Nothing is named if there is none."""
    state = kv.state
    messages = without_superseded(messages_of(state.conversation), state.corrections)
    rest = state.with_turns(with_messages(state.conversation, messages))
    fields = [state.key(key) for key in cut_errata(state, rest)]
    if not fields and not state.traces:
        return Removed(tokens=len(state.tokens))
    planned = kv.plan(rest, again=True, traces=True)
    if reason := kv.obstacle(planned, again=True):
        raise UnsupportedError(f"session {kv.stored.name} cannot be compacted: {reason}")
    removed = _effect(kv, planned, fields, again=True)
    kv.apply("compact", ", ".join(dict.fromkeys(fields)), planned, again=True)
    return removed


def forget(kv: SessionKV, names: Sequence[str], method: str = CUT, *, dry: bool = False) -> Removed:
    """Remove the named parts. `dry`: change nothing. `suffix` without names makes earlier cuts final. Raises
    NotesError, without changing anything, if that is not possible."""
    state, name, for_good = kv.state, kv.stored.name, method == FOR_GOOD
    again = for_good or kv.workspace.model.recurrent
    if method not in WAYS:
        raise NotesError(f"no method {method!r} of forgetting", f"Choose {' or '.join(WAYS)}")
    if not names and not (for_good and state.traces):
        raise SessionError(f"nothing is named that session {name} is to forget", "Name a part of it")
    parts = parts_named(names, state, name)
    _check_turns(state, parts["turn"], name)
    kept = [number for number in range(state.turns) if number + 1 not in parts["turn"]]
    rest, repeated, gone = remaining(kv.workspace, state, parts, kept, name)
    described = descriptions(parts)
    planned = kv.plan(rest, kept, again=again, traces=again, removed="; ".join(described))
    if names and not any(patch.first < patch.last or patch.tokens for patch in planned[0]):
        raise SessionError(f"{', '.join(described)}: nothing of it is left in session {name}")
    if reason := kv.obstacle(planned, again=again):
        remedy = Help.OTHER_METHOD(method=CUT if again else FOR_GOOD)
        raise UnsupportedError(f"{', '.join(described)} cannot be forgotten by {method}: {reason}", remedy)
    removed = replace(_effect(kv, planned, described, again=again), repeated=repeated, skills=gone)
    if not dry:
        kv.apply("forget", ", ".join(described), planned, again=again, for_good=for_good)
    return removed


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
    return {kind: sorted(found - (numbers["turn"] if kind != "turn" else set())) for kind, found in numbers.items()}


def _has(turn: Turn, kind: str) -> bool:
    return bool(turn.results) if kind == "tool" else any(part.thought for part in turn.answer)


def descriptions(parts: Parts) -> list[str]:
    """Describe parts for display."""
    texts = {
        "turn": f"turn{'s' * (len(parts['turn']) > 1)}",
        "thought": "the chain of thought of turn",
        "tool": "the results of tools of turn",
    }
    return [f"{text} {spans(parts[kind])}" for kind, text in texts.items() if parts[kind]]


def spans(numbers: Sequence[int]) -> str:
    """Format ascending numbers as "1, 3-5"."""
    return ", ".join(
        str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in merge_ranges(numbers)
    )


def _check_turns(state: State, gone: Sequence[int], name: str) -> None:
    """Raise SessionError if nothing, or a tool call without its result, would be left."""
    if len(gone) == state.turns:
        raise SessionError(f"nothing would be left of session {name}", Help.REMOVE_WHOLE_SESSION(name=name))
    for number, turn in enumerate(state.conversation[1:], 2):
        if turn.results and (number in gone) != (number - 1 in gone):
            raise SessionError(
                f"turn {number} has the results of the tools that turn {number - 1} called, so both go or none",
                f"Name {number - 1}-{number}, or tool:{number} for the results alone",
            )


def remaining(
    workspace: Workspace, state: State, parts: Parts, kept: Sequence[int], name: str
) -> tuple[State, tuple[str, ...], tuple[str, ...]]:
    """Return the remaining conversation, not rendered, the fields whose errata are repeated, and the removed skills.
    Raises SessionError if a turn that stays corrects one of those."""
    turns = []
    for number in kept:
        turn = state.conversation[number]
        if number + 1 in parts["thought"]:
            turn = _without_reasoning(workspace, turn, number + 1, name)
        if number + 1 in parts["tool"]:
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
    rest = rest.with_turns(turns)
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
        rest = [Part(tuple(int(token) for token in model.tokenize(split[1].strip())))]
    reasoning = turn.reasoning if turn.reasoning == "none" else "removed"
    return replace(turn, answer=tuple(rest), reasoning=reasoning)
