"""Applies new field values to a skill by an edit method: to its K/V in the sequence, or while it is spliced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from notes_cli.editing.change import Change, Stretch, stretches
from notes_cli.editing.methods import METHODS, Method, Needs, Record
from notes_cli.editing.operations import Edit, Placer, Prepared
from notes_cli.editing.select_tokens import Scratch, most_deviating, most_influenced, prefill
from notes_cli.engine.context import Context
from notes_cli.engine.patches import Range, position_map
from notes_cli.engine.segment import LayerRows, Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Remedy, UnsupportedError


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
        also = most_deviating(segment, change, method.k, record.selects.layers, sequence) if record.selects else ()
    return Prepared(also, blocks, passed)


def amend(
    sequence: KVSequence,
    segment: Segment,
    change: Change,
    method: Method,
    prepared: Prepared,
    placer: Placer | None = None,
) -> Sequence[Range]:
    """Apply a prepared change to the sequence by the method, and return the positions whose K/V changed. `placer`
    appends a segment to the sequence, if the skill is not in it yet; without it the skill is at the segment's base.
    Raises UnsupportedError if the method is not possible on this model."""
    check(sequence.context, method, session=placer is None)
    return method.record.edit(Edit(sequence, segment, change, method.name, prepared, placer))


def refusal(context: Context, method: Method, *, session: bool = False, changes: Sequence[Change] = ()) -> str | None:
    """Return why the method is not possible in this context, None if it is. `session`: the skill is in a session.
    `changes`: also check that the K/V after these can be moved."""
    reasons = list(map(context.supports, _needs(method.record, session) or ()))
    if method.record.in_place and not any(reasons):
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
    return Help.OTHER_METHOD(method=" or ".join(record.name for record in records if _needs(record, session) == ()))


def _needs(record: Record, session: bool) -> Needs | None:
    return record.session_needs if session else record.needs


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
