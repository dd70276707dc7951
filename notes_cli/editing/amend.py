"""Amending a sequence: a skill gets new values by an edit method, where it is or while it is placed."""

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
    """Select tokens, or compute blocks, in a scratch sequence. `session`: for a skill that is in one.

    `dry`: compute nothing; which tokens would be selected is then not known, only how many. Raise UnsupportedError
    where the method is not possible, and NotesError where it needs blocks and the segment has none.
    """
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
        blocks = _computed(segment, parts, sequence) if record.needs_blocks else ()
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
    """Bring a change into the sequence by the method, for which it has been prepared. Return the positions of rows that
    are not what they were before.

    `placer` puts a segment at the sequence's end: the skill is not there yet. Without it the skill is, from the
    segment's base on. Raise UnsupportedError where the method is not possible on this model.
    """
    check(sequence.context, method, session=placer is None)
    return method.record.way(Edit(sequence, segment, change, method.name, prepared, placer))


def refusal(context: Context, method: Method, *, session: bool = False, changes: Sequence[Change] = ()) -> str | None:
    """Why the method is not possible in this context, None if it is. `session`: for a skill that is in one. `changes`:
    for these, which may move what follows them."""
    reasons = list(map(context.supports, _needs(method.record, session) or ()))
    if method.record.in_place and not any(reasons):
        for patches in (change.patches for change in changes):
            ends = ((patch.last, position_map(patches)(patch.last)) for patch in patches)
            reasons += [context.can_move(at, to, 1) for at, to in ends if at != to]
    return next((reason for reason in reasons if reason), None)


def check(context: Context, method: Method, *, session: bool = False) -> None:
    """Raise UnsupportedError where the method is not possible in this context, naming those that always are."""
    reason = refusal(context, method, session=session)
    if reason:
        raise UnsupportedError(f"the edit method {method.name} is not possible: {reason}", instead(session=session))


def instead(*, session: bool = False) -> Remedy:
    """What helps where a method is not possible: those that are possible everywhere."""
    helping = [record for record in METHODS.values() if record.edits_rows or record.appends_erratum]
    return Help.OTHER_METHOD(method=" or ".join(one.name for one in helping if _needs(one, session) == ()))


def _needs(record: Record, session: bool) -> Needs | None:
    return record.session_needs if session else record.needs


def free_cells(segment: Segment, change: Change, method: Method) -> int:
    """How many tokens the method computes again in place at most: they need as many free cells meanwhile."""
    record = method.record
    if not record.in_place:
        return 0
    field = sum(len(patch.tokens) for patch in change.patches)
    return min(len(segment), field + (method.k if record.selects else 0))


def _computed(
    segment: Segment, parts: Sequence[Stretch], sequence: KVSequence | None
) -> tuple[tuple[Stretch, Segment], ...]:
    """Each stretch as a segment, compiled after the left context alone; without rows if there is no sequence."""
    tokens = [part.tokens for part in parts]
    rows: Sequence[tuple[LayerRows, ...]] = [()] * len(parts)
    if sequence is not None:
        rows = list(prefill(sequence, segment.context, tokens, segment.row_type))
    plain = replace(segment, text="", base=len(segment.context), fields=(), influence={}, blocks=())
    return tuple(
        (part, replace(plain, tokens=part.tokens, layers=layers)) for part, layers in zip(parts, rows, strict=True)
    )
