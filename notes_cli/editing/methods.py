"""Defines and applies the edit methods, which update the K/V of a skill for new field values.

They are named as in the paper (arXiv:2606.17107, Operation 1); the reference is `recompute`. KV entries that a method
does not recompute still depend on the old value. To add a method, add a record to METHODS, and a function if it
edits in a new way. A function edits a skill that is in the sequence already, as in a session, or appends it, as in a
prompt being assembled: K/V that the edit would discard is not spliced then.

Selective methods recompute the later tokens whose K/V depends most on the value. The effect of a field's value is
measured by replacing it: later tokens whose V (K in layers without V) differs depend on it. V has no positional
encoding, so a value of another length does not matter. At compile time the new value is not known, and a counterfactual
one is used.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.pieces import Reason
from notes_cli.engine.positions import Patch, Range, apply_patches, changed_ranges, position_map, removed_images
from notes_cli.engine.segment import FieldSpan, LayerRows, Segment, Tokens, to_float32
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Progress, Remedy, UnsupportedError
from notes_cli.text.fields import Field, Hole, clean_value, fill, token_spans


@dataclass(frozen=True, slots=True)
class Change:
    """New values for fields of a segment. Positions count from the segment's first token."""

    fields: tuple[str, ...]
    text: str  # the corrected text
    tokens: Tokens  # of the corrected text, as a compile of it would have them
    patches: tuple[Patch, ...]  # from the segment's tokens to these
    spans: tuple[FieldSpan, ...]  # of all fields in the corrected text

    @property
    def inside(self) -> frozenset[int]:
        """Positions of the segment's tokens that are replaced."""
        return frozenset(position for patch in self.patches for position in range(patch.first, patch.last))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Adjacent changed blocks of a segment: tokens [first, last) become `tokens`."""

    blocks: range  # their numbers, from 1
    first: int
    last: int
    start: int  # position in the corrected text
    tokens: Tokens


def stretches(segment: Segment, change: Change) -> list[Stretch]:
    """Return the blocks with changes, in order. A patch across a block boundary merges both blocks."""
    spans, shift = segment.spans, position_map(change.patches)
    begins = [first for first, _ in spans]
    runs: list[tuple[int, int]] = []
    for patch in change.patches:
        first, last = (bisect_right(begins, position) - 1 for position in (patch.first, patch.last - 1))
        if runs and runs[-1][1] >= first:
            first = runs.pop()[0]
        runs.append((first, last))
    changed = []
    for first, last in runs:
        begin, end = spans[first][0], spans[last][1]
        tokens = change.tokens[shift(begin) : shift(end)]
        changed.append(Stretch(range(first + 1, last + 2), begin, end, shift(begin), tokens))
    return changed


def change(model: Model, segment: Segment, values: Mapping[str, str]) -> Change | None:
    """Return the change that new values make in this segment, None if none. Ignores fields that it does not have.
    Raises UnsupportedError for a segment with images."""
    current = {span.name: span.value for span in segment.fields}
    clean = {name: clean_value(name, value) for name, value in values.items() if name in current}
    changed = {name: value for name, value in clean.items() if value != current[name]}
    if not changed:
        return None
    if segment.media:
        message = f"{segment.name} has an image, and its text cannot be edited"
        raise UnsupportedError(message, "Correct it by an erratum")
    holes = [Hole(span.start, span.end, span.name) for span in segment.fields]
    text, fields = fill(segment.text, holes, current | changed)
    tokens = model.tokenize(text)
    spans = field_spans(model, text, fields, tokens)
    patches = _patches(segment.tokens, tokens, segment.fields, spans, changed)
    return Change(tuple(changed), text, tokens, patches, spans)


def same(segment: Segment, name: str) -> Change:
    """Return a change that replaces a field's value by itself, to recompute the K/V after it."""
    span = next(span for span in segment.fields if span.name == name)
    patch = Patch(span.first, span.last, tuple(segment.tokens[span.first : span.last].tolist()))
    return Change((name,), segment.text, segment.tokens, (patch,), segment.fields)


def field_spans(model: Model, text: str, fields: Sequence[Field], tokens: Tokens) -> tuple[FieldSpan, ...]:
    """Return each field with the tokens that hold its value. Raises SkillError if the tokens do not spell the text."""
    pieces = [model.token_bytes(int(token)) for token in tokens]
    places = token_spans(text, pieces, [(field.start, field.end) for field in fields])
    return tuple(FieldSpan(*field, *place) for field, place in zip(fields, places, strict=True))


def _patches(
    old: Tokens, new: Tokens, fields: Sequence[FieldSpan], spans: Sequence[FieldSpan], changed: Mapping[str, str]
) -> tuple[Patch, ...]:
    """Return a patch per changed field if all tokens between are equal; else a single one that covers them all."""
    patches, old_at, new_at = [], 0, 0
    for field, span in zip(fields, spans, strict=True):
        first, last = span.first, span.last
        ascends = old_at <= field.first and new_at <= first  # adjacent fields may share a token
        if not ascends or old[old_at : field.first].tolist() != new[new_at:first].tolist():
            break
        if field.name in changed:
            patches.append(Patch(field.first, field.last, tuple(new[first:last].tolist())))
        elif old[field.first : field.last].tolist() != new[first:last].tolist():
            break
        old_at, new_at = field.last, last
    else:
        if old[old_at:].tolist() == new[new_at:].tolist():
            return tuple(patch for patch in patches if tuple(old[patch.first : patch.last].tolist()) != patch.tokens)
    return (_difference(old.tolist(), new.tolist()),)


def _difference(old: Sequence[int], new: Sequence[int]) -> Patch:
    """Return a patch from the first token that differs to the last, for a value that changes the tokens around it."""
    shorter = min(len(old) - 1, len(new))  # a patch replaces at least one token
    first = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    same = next((i for i in range(shorter - first) if old[-1 - i] != new[-1 - i]), shorter - first)
    return Patch(first, len(old) - same, tuple(new[first : len(new) - same]))


# Opens an empty sequence with capacity for so many tokens, in addition to those in use, and frees it afterwards.
Scratch = Callable[[int], AbstractContextManager[KVSequence]]


def prefill(
    sequence: KVSequence, left: Tokens, parts: Sequence[Tokens], dtype: str, progress: Progress | None = None
) -> Iterator[tuple[LayerRows, ...]]:
    """Yield the K/V of each part, decoded after `left` alone, in a scratch sequence, which is cleared. `progress`
    counts the tokens of all parts. Several parts need a context that can truncate."""
    total, done = sum(map(len, parts)), 0

    def update(count: int, _: int) -> None:
        if progress:
            progress(done + count, total)

    sequence.truncate(0)
    sequence.append(left)
    sequence.flush()
    for number, tokens in enumerate(parts):
        if number:
            sequence.truncate(len(left))
        sequence.append(tokens)
        sequence.flush(update)
        done += len(tokens)
        # The whole sequence: a recurrent state cannot be read for a part of it.
        rows = sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype=dtype)
        yield tuple(layer if layer.part == "state" else layer.cut(slice(len(left), None)) for layer in rows)


def counterfactual(value: str) -> str:
    """Return a different value of the same kind and length: other numbers (2026-06-01: 2021-01-05), or another word."""
    other = re.sub(r"\d+", lambda number: _other_number(number[0]), value)
    return other if other != value else ("other" if value != "other" else "another")


def _other_number(number: str) -> str:
    """Return the number minus 5, or plus 4 if that would not be a month or day; with as many digits."""
    other = int(number) - 5 if int(number) > 5 else int(number) + 4
    if len(number) > 2 and len(str(other)) < len(str(int(number))):
        other = int(number) + 5  # 100 becomes 105, not 095
    return f"{other:0{len(number)}d}"


def influence(sequence: KVSequence, segment: Segment, name: str) -> NDArray[np.float32]:
    """Return the `deviation` for a counterfactual value of the field, [n_tokens]. Clears the scratch sequence."""
    value = next(span.value for span in segment.fields if span.name == name)
    other = change(sequence.context.model, segment, {name: counterfactual(value)})
    return np.zeros(len(segment), np.float32) if other is None else deviation(sequence, segment, other)


def deviation(sequence: KVSequence, segment: Segment, change: Change, layers: int | None = None) -> NDArray[np.float32]:
    """Return the relative change of each token's V (or K) from the segment to the corrected text, [n_tokens]: the mean
    over the attention layers, or the first `layers` of them. 0 for replaced tokens, those before the change, and
    unchanged blocks. Decodes the corrected text, or its changed blocks, in the scratch sequence, which is cleared."""
    effect = np.zeros(len(segment), np.float32)
    left, shift, inside = segment.base - segment.first, position_map(change.patches), change.inside
    parts = stretches(segment, change)
    passes = prefill(sequence, segment.context, [part.tokens for part in parts], "f32")
    for part, rows in zip(parts, passes, strict=True):
        first = next(patch.first for patch in change.patches if patch.first >= part.first)
        kept = np.array([position for position in range(first, part.last) if position not in inside], int)
        moved = np.array([shift(int(position)) for position in kept], int) - part.start
        pairs = [pair for pair in zip(segment.layers, rows, strict=True) if pair[0].part == "attention"][:layers]
        for old, new in pairs:
            a, b = (old.v, new.v) if old.v.shape[1] else (old.k, new.k)
            before, after = to_float32(a[left + kept]), to_float32(b[moved])
            change_norm = np.linalg.norm(after - before, axis=1)
            effect[kept] += change_norm / (np.linalg.norm(before, axis=1) + 1e-6) / len(pairs)
    return effect


@dataclass(frozen=True, slots=True)
class Selection:
    """How a method selects tokens: by the compiled influence of fields, if allowed, else by the deviation in a pass
    over the corrected text."""

    influence: bool = False
    layers: int | None = None  # number of first layers compared in the pass; None: all

    def needs_pass(self, segment: Segment) -> bool:
        """Return True if the corrected text must be decoded to select tokens."""
        return not (self.influence and segment.influence)


def most_influenced(segment: Segment, change: Change, k: int) -> tuple[int, ...]:
    """Return the positions of the `k` tokens after the first change with the highest compiled influence. Raises
    NotesError if influence was not compiled."""
    if not segment.influence:
        why = f"{segment.name} was compiled without the influence of its fields, by which selective chooses"
        raise NotesError(why, Help.COMPILE_OTHERWISE(name=segment.name, options={"influence": True}))
    return _highest(segment, change, np.sum([segment.influence[name] for name in change.fields], axis=0), k)


def _highest(segment: Segment, change: Change, effect: NDArray[np.float32], k: int) -> tuple[int, ...]:
    """Return the positions of the `k` tokens after the first change with the highest effect."""
    first, inside = change.patches[0].first, change.inside
    candidates = [position for position in range(first, len(segment)) if position not in inside]
    return tuple(sorted(sorted(candidates, key=lambda position: -float(effect[position]))[:k]))


Placer = Callable[[KVSequence, Segment], None]  # appends a segment to a sequence, as it was compiled


@dataclass(frozen=True, slots=True)
class Prepared:
    """Computed for an edit before the sequence is changed."""

    also: tuple[int, ...] = ()  # selected positions of the segment, after the change, ascending
    blocks: tuple[tuple[Stretch, Segment], ...] = ()  # changed blocks, compiled from the corrected text
    passed: int = 0  # tokens decoded for that in a scratch sequence


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a skill in a sequence."""

    sequence: KVSequence
    segment: Segment
    change: Change
    method: str  # name, recorded in pieces
    prepared: Prepared
    placer: Placer | None  # appends the skill; None: it is in the sequence, at its base

    def place(self) -> int:
        """Append the skill as compiled unless it is in the sequence, and return its start."""
        if self.placer is None:
            return self.segment.base
        start = len(self.sequence)
        self.placer(self.sequence, self.segment)
        if self.prepared.passed:
            last = self.sequence.pieces[-1]
            self.sequence.pieces[-1] = replace(last, passed=self.prepared.passed, selected=self.method)
        return start


EditOperation = Callable[[Edit], Sequence[Range]]  # returns the positions whose K/V changed; () for a skill it appends


def unchanged(edit: Edit) -> Sequence[Range]:
    """Change no K/V."""
    edit.place()
    return ()


def in_place(edit: Edit) -> Sequence[Range]:
    """Recompute the K/V of the new value and the selected tokens in place, and move that after a value of another
    length."""
    start, sequence = edit.place(), edit.sequence
    patches = [patch.offset(start) for patch in edit.change.patches]
    also = [start + position for position in edit.prepared.also]
    length = len(sequence)
    sequence.replace(patches, also)
    return () if edit.placer else changed_ranges(patches, length, also)


def from_change_on(edit: Edit) -> Sequence[Range]:
    """Decode everything from the first change on, which equals a recompute."""
    if edit.placer is None:
        return decode_from(edit.sequence, [patch.offset(edit.segment.base) for patch in edit.change.patches])
    first = edit.change.patches[0].first
    if first:
        edit.placer(edit.sequence, edit.segment.slice(0, first))
    edit.sequence.append(edit.change.tokens[first:], "splice", edit.segment.name, reason=Reason.FROM_CHANGE)
    return ()


def corrected_text(edit: Edit) -> Sequence[Range]:
    """Decode the corrected text."""
    assert edit.placer is not None  # in a session, from_change_on has the same result
    edit.sequence.append(edit.change.tokens, "splice", edit.segment.name, reason=Reason.NEW_VALUE)
    return ()


def by_blocks(edit: Edit) -> Sequence[Range]:
    """Splice the skill with recompiled blocks in place of the changed ones."""
    sequence, segment, done = edit.sequence, edit.segment, 0
    for part, block in edit.prepared.blocks:
        _place_part(edit, segment.slice(done, part.first), done)
        before = len(sequence.pieces)
        _place_part(edit, block, part.first)
        for index, piece in enumerate(sequence.pieces[before:], before):
            if piece.how == "spliced":
                sequence.pieces[index] = replace(
                    piece,
                    reason=Reason.BLOCK,
                    detail=" and ".join(map(str, part.blocks)),
                    blocks=len(segment.blocks),
                    passed=edit.prepared.passed,
                    rewritten=piece.tokens,
                )
        done = part.last
    _place_part(edit, segment.slice(done, len(segment)), done)
    return ()


def _place_part(edit: Edit, part: Segment, first: int) -> None:
    """Append a part of a segment. Only the first has a seam: blocks after it were compiled alone, too."""
    assert edit.placer is not None  # not for sessions, whose text has no blocks
    if len(part):
        edit.placer(edit.sequence, replace(part, context=edit.sequence.tokens) if first else part)


def decode_from(sequence: KVSequence, patches: Sequence[Patch]) -> list[Range]:
    """Patch the sequence and decode everything from the first patch on; all tokens if the model is recurrent. Raises
    UnsupportedError if an image follows."""
    first, tokens = patches[0].first, apply_patches(sequence.tokens.tolist(), patches)
    if sequence.context.model.recurrent:
        first = 0
    removed = removed_images(sequence.images, [patch.span for patch in patches])
    if any(image.last > first and image not in removed for image in sequence.images):
        raise UnsupportedError("an image follows the change, and its rows are not decoded again as tokens")
    sequence.truncate(first)
    sequence.append(tokens[first:], reason=Reason.AGAIN)
    sequence.flush()
    return [(first, len(tokens))]


Needs = tuple[Literal["rewrite", "splice"], ...]  # operations that a context must support


class Edits(Enum):
    """The KV entries that are recomputed."""

    NOTHING = "nothing"
    FIELD = "the field's own"
    SELECTED = "the field's own, and selected ones after it"
    BLOCK = "those of the blocks that the field is in"
    FROM_CHANGE = "everything from the field on"
    ALL = "everything"


class Cost(IntEnum):
    """The number of tokens decoded, fewest first."""

    FEW = 1  # independent of the length of the skill
    AFTER = 2  # all after the field
    ALL = 3


@dataclass(frozen=True, slots=True)
class Record:
    """Definition of an edit method."""

    name: str
    edits: Edits
    edit: EditOperation
    cost: Cost
    appends_erratum: bool = False  # a sentence with the correction follows the skill
    selects: Selection | None = None  # selects more tokens to recompute with the field
    needs: Needs = ()  # to splice a skill with a change
    session_needs: Needs | None = None  # to edit a skill in a session; None: not for sessions
    needs_blocks: bool = False  # the skill must be compiled in blocks
    safety: int = 0  # rank among the methods that calibration chooses from, safest highest; 0: not among them

    @property
    def in_session(self) -> bool:
        """True if it can edit a skill in a session."""
        return self.session_needs is not None

    @property
    def edits_rows(self) -> bool:
        """True if the text of the skill gets its new values."""
        return self.edits is not Edits.NOTHING

    @property
    def in_place(self) -> bool:
        """True if K/V is recomputed in place, and later KV entries still depend on the old value."""
        return self.edits in (Edits.FIELD, Edits.SELECTED)

    @property
    def exact(self) -> bool:
        """True if all K/V equals that of a prefill of the resulting text."""
        return self.edits in (Edits.NOTHING, Edits.FROM_CHANGE, Edits.ALL)

    @property
    def reaches_end(self) -> bool:
        """True if no KV entry depends on the old value."""
        return self.edits in (Edits.FROM_CHANGE, Edits.ALL)


_REWRITE: Needs = ("rewrite",)
_RECORDS = (
    # Unchanged: the control.
    Record("stale", Edits.NOTHING, unchanged, Cost.FEW),
    # Recomputes the field's tokens in place. All later KV entries still depend on the old value.
    Record("field", Edits.FIELD, in_place, Cost.FEW, needs=_REWRITE, session_needs=_REWRITE, safety=1),
    # Also recomputes the K later tokens that depend most on the field.
    Record(
        *("selective", Edits.SELECTED, in_place, Cost.FEW),
        selects=Selection(influence=True),
        needs=_REWRITE,
        session_needs=_REWRITE,
        safety=2,
    ),
    # Also recomputes the K later tokens whose K/V deviates most in the first two layers, as CacheBlend does (in the
    # first layer, no token has attended to others yet). llama.cpp cannot stop after two, so it costs a full pass.
    Record(
        *("blend", Edits.SELECTED, in_place, Cost.FEW),
        selects=Selection(layers=2),
        needs=_REWRITE,
        session_needs=_REWRITE,
    ),
    # Adds a sentence after the skill. All K/V stays, so the model reads old text and correction, and undo is exact.
    Record("erratum", Edits.NOTHING, unchanged, Cost.FEW, appends_erratum=True, session_needs=(), safety=4),
    # Both: later KV entries depend on the old value, but the erratum states the new one.
    Record(
        *("field+erratum", Edits.FIELD, in_place, Cost.FEW),
        appends_erratum=True,
        needs=_REWRITE,
        session_needs=_REWRITE,
        safety=3,
    ),
    # Decodes everything from the field on, which equals a recompute. In a prompt the K/V before the field must be
    # usable without the rest; in a session everything is decoded if it is not.
    Record("suffix", Edits.FROM_CHANGE, from_change_on, Cost.AFTER, needs=_REWRITE, session_needs=(), safety=5),
    # Compiles the block with the field alone and replaces the old one. Equals compiling the corrected text in blocks.
    Record("block", Edits.BLOCK, by_blocks, Cost.FEW, needs=("splice",), needs_blocks=True),
    # Decodes the corrected text. In a session `suffix` has the same result.
    Record("recompute", Edits.ALL, corrected_text, Cost.ALL, safety=6),
)
METHODS = {record.name: record for record in _RECORDS}
DEFAULT_K = 16
_COUNT = re.compile("[1-9][0-9]{0,8}")  # of tokens


@dataclass(frozen=True, slots=True)
class Method:
    """An edit method by name; `k`: number of later tokens to recompute, if it selects any."""

    name: str = "erratum"
    k: int = DEFAULT_K

    @classmethod
    def parse(cls, text: str, *, also: Sequence[str] = ()) -> Method:
        """Parse `selective@32`, `erratum`, ... Raises NotesError for an unknown method, naming those known and the
        caller's other values, `also`."""
        name, at, k = text.partition("@")
        record = METHODS.get(name)
        if record is None or (at and not (record.selects and _COUNT.fullmatch(k))):
            counted = ", ".join(f"{each.name}@K" for each in METHODS.values() if each.selects)
            known = f"{', '.join([*METHODS, *also])} ({counted})"
            raise NotesError(f"no edit method {text!r}", Help.KNOWN_METHOD(known=known))
        return cls(name, int(k) if at else DEFAULT_K)

    def __str__(self) -> str:
        return f"{self.name}@{self.k}" if self.record.selects else self.name

    @property
    def record(self) -> Record:
        return METHODS["field+erratum" if self == AUTO else self.name]


# Methods that code refers to: the control, the field alone, the erratum (possible on every model), both, the exact
# one, and the reference.
STALE, FIELD, ERRATUM, FIELD_ERRATUM = Method("stale"), Method("field"), Method(), Method("field+erratum")
SUFFIX, RECOMPUTE = Method("suffix"), Method("recompute")
# Not a method of its own: chooses between the field alone and both for each edit (runtime/answering.py).
AUTO = Method("auto")


def record_of(text: str) -> Record | None:
    """Return the record of a method by its name in a session or piece, None if unknown to this version."""
    return METHODS.get(text.partition("@")[0])


def calibrated() -> list[Method]:
    """Return the methods that calibration chooses from, safest first."""
    records = sorted(METHODS.values(), key=lambda record: -record.safety)
    return [Method(record.name) for record in records if record.safety]


# Applying a method.


def prepare(
    scratch: Scratch, segment: Segment, change: Change, method: Method, *, session: bool = False, dry: bool = False
) -> Prepared:
    """Select tokens, or compute blocks, in a scratch sequence. `session`: the skill is in a session. `dry`: compute
    nothing; the number of selected tokens is right, but not their positions. Raises UnsupportedError if the method is
    not possible, NotesError if it needs blocks and the segment has none."""
    record = method.record
    if record.needs_blocks and not segment.prefix_only and not segment.blocks:
        why = f"{segment.name} was compiled in one piece, so there is no block to compute again"
        raise NotesError(why, Help.COMPILE_OTHERWISE(name=segment.name, options={"blocks": 8}))
    if record.selects and not record.selects.needs_pass(segment):
        return Prepared(most_influenced(segment, change, method.k))
    if not record.selects and not record.needs_blocks:
        return Prepared()
    parts = stretches(segment, change)
    passed = len(segment.context) + sum(len(part.tokens) for part in parts)
    with nullcontext() if dry else scratch(passed) as sequence:
        if sequence is not None:
            check(sequence.context, method, session=session)
        blocks = _compute_blocks(segment, parts, sequence) if record.needs_blocks else ()
        also: tuple[int, ...] = ()
        if record.selects:
            effect = np.zeros(len(segment), np.float32)
            if sequence is not None:
                effect = deviation(sequence, segment, change, record.selects.layers)
            also = _highest(segment, change, effect, method.k)
    return Prepared(also, blocks, passed)


def amend(
    sequence: KVSequence,
    segment: Segment,
    change: Change,
    method: Method,
    prepared: Prepared,
    placer: Placer | None = None,
) -> Sequence[Range]:
    """Apply a prepared change to the sequence by the method. `placer` appends a segment to the sequence, if the skill
    is not in it yet; without it the skill is at the segment's base, and the positions whose K/V changed are returned.
    Raises UnsupportedError if the method is not possible on this model."""
    check(sequence.context, method, session=placer is None)
    return method.record.edit(Edit(sequence, segment, change, method.name, prepared, placer))


def refusal(context: Context, method: Method, *, session: bool = False, changes: Sequence[Change] = ()) -> str | None:
    """Return why the method is not possible in this context, None if it is. `session`: the skill is in a session.
    `changes`: also check that the K/V after these can be moved."""
    record = method.record
    reasons = [*map(context.supports, (record.session_needs if session else record.needs) or ())]
    reasons += [context.drops] if record.in_place else []
    if record.in_place and not any(reasons):
        for patches in (change.patches for change in changes):
            ends = ((patch.last, position_map(patches)(patch.last)) for patch in patches)
            reasons += [context.can_move(at, to, 1) for at, to in ends if at != to]
    return next((reason for reason in reasons if reason), None)


def check(context: Context, method: Method, *, session: bool = False) -> None:
    """Raise UnsupportedError, naming methods that are always possible, if this one is not."""
    reason = refusal(context, method, session=session)
    if reason:
        raise UnsupportedError(f"the edit method {method.name} is not possible: {reason}", instead(session=session))


def instead(*, session: bool = False) -> Remedy:
    """Return the remedy for a method that is not possible: the methods that always are."""
    records = [record for record in METHODS.values() if record.edits_rows or record.appends_erratum]
    always = [record.name for record in records if (record.session_needs if session else record.needs) == ()]
    return Help.OTHER_METHOD(method=" or ".join(always))


def free_cells(segment: Segment, change: Change, method: Method) -> int:
    """Return the number of free cells that the method needs temporarily: one per token recomputed in place."""
    record = method.record
    if not record.in_place:
        return 0
    field = sum(len(patch.tokens) for patch in change.patches)
    return min(len(segment), field + (method.k if record.selects else 0))


def _compute_blocks(
    segment: Segment, parts: Sequence[Stretch], sequence: KVSequence | None
) -> tuple[tuple[Stretch, Segment], ...]:
    """Return each stretch with its segment, compiled after the left context only; without K/V if `sequence` is None."""
    tokens = [part.tokens for part in parts]
    rows: Sequence[tuple[LayerRows, ...]] = [()] * len(parts)
    if sequence is not None:
        rows = list(prefill(sequence, segment.context, tokens, segment.row_type))
    plain = replace(segment, text="", base=len(segment.context), fields=(), influence={}, blocks=())
    return tuple(
        (part, replace(plain, tokens=part.tokens, layers=layers)) for part, layers in zip(parts, rows, strict=True)
    )
