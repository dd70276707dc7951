"""The rows of a segment, compared with a recompute: K and V of every layer and every token.

Checksums find damage. Whether rows are those that this model computes only a prefill of the same tokens after the same
left context can tell, so that is what they are compared with, each row with its own bar:

    bar = TOLERANCE + rounding of the type that the row is kept as + SPREAD * scale * noise

A row that was computed on this machine differs by what the order of a batch changes, which is far below TOLERANCE. With
flash attention the other way, or on another device, deep layers of a quantized model differ by more. So where a row
exceeds its bar, a second prefill is made in another way (flash attention, size of the micro-batches). `noise` is how
far the two prefills of this machine are apart in that layer and tensor, and `scale` how many times that the segment is
away from the nearer one, in the tensors that are nearest: it is 0 for a segment that one of the two explains. One
broken tensor, or half of them, do not raise it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.selecting import prefill
from notes_cli.engine import interrupts, recurrent
from notes_cli.engine.context import Context
from notes_cli.engine.rotation import FLOATS
from notes_cli.engine.segment import BLOCK, Q8_0, LayerRows, RowArray, Segment, Tokens, Transition, to_float32
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, Progress
from notes_cli.runtime.workspace import Workspace

TOLERANCE = 0.02  # of a row: twice what other batches change on the models that ship (docs/reliability.md)
SPREAD = 3.0  # a row may be as many times as far away as half of the rows of its tensor are
FARTHEST = 1.5  # the greatest `scale`: two prefills in different ways are 1 apart
NEAREST = 0.25  # the part of the tensors that `scale` goes by
FAINT = 0.00001  # noise below it says nothing about how a segment was computed
LITTLE = 0.01  # of the size of all channels: what a smaller one is measured by
SHORT = 0.1  # a row shorter than this part of the others is compared with them: little of it is left to be exact
SMALL = 0.25  # and a channel that is smaller than this part of the median one is measured by that
STEPS = 16  # of a quantized number that a channel is measured by at least
OTHER_BATCH = 61  # tokens of a micro-batch of the second prefill
TRANSITION = "transition"
NAMES = {  # of K and V
    "attention": ("K", "V"),
    "indexer": ("K of the indexer", "V of the indexer"),
    "state": ("state of the convolution", "state of the recurrence"),
}


@dataclass(frozen=True, slots=True)
class WrongRows:
    """Rows of one tensor of one layer that are not what this model computes.

    `tensor` is one of NAMES, or TRANSITION for how a recurrent state goes on through the segment. `first`, `last`: from
    which token to which they are, the last one excluded; those of the left context are negative. `count`: how many of
    these are wrong. `error`: the farthest one's distance, relative to its length, and `bar`: how far rounding can move
    it. `position`: where the segment was placed; None for its rows as the file has them.
    """

    layer: int
    tensor: str
    first: int
    last: int
    count: int
    error: float
    bar: float
    position: int | None = None

    def __str__(self) -> str:
        tokens = f", token {self.first}" if self.count == 1 else f", tokens {self.first} to {self.last - 1}"
        if self.tensor in (TRANSITION, *NAMES["state"]):
            tokens = ""  # those of the last token, or of all
        some = "" if self.count == self.last - self.first else f" ({self.count} of them)"
        place = "" if self.position is None else f", placed at position {self.position:,}"
        far = f"off by {self.error:.2g}, where rounding explains {self.bar:.2g}"
        if not np.isfinite(self.error):
            far = "no numbers, or infinite"
        return f"layer {self.layer}, {self.tensor}{tokens}{some}{place}: {far}"


@dataclass(frozen=True, slots=True)
class RowCheck:
    """The result of comparing a segment's rows. `tokens` have been compared in `layers` layers; `farthest`:
    the largest relative distance of a row in the file. `unchecked`: what could not be compared, and why, in words."""

    tokens: int
    layers: int
    farthest: float
    wrong: tuple[WrongRows, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return not self.wrong

    @property
    def reason(self) -> str:
        """The wrong rows in one line; empty if all are right."""
        more = f", and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
        return f"{self.wrong[0]}{more}" if self.wrong else ""


def check_rows(
    workspace: Workspace, segment: Segment, places: Sequence[int] = (), progress: Progress | None = None
) -> RowCheck:
    """Compare all rows of a segment with a prefill of its tokens, and its rows spliced at other positions with tokens
    decoded there.

    The segment fits the workspace (`Workspace.check`). `places`: positions of its first token. `progress` counts tokens
    of each prefill: one, a second one where a row exceeds its bar, and one for each place. Raise SegmentError for rows
    that are damaged, EngineError where the tokens do not fit the context, UnsupportedError where rows cannot be read.
    """
    workspace.make_room(segment.base + len(segment))
    unchecked = []
    with workspace.scratch(segment.base + len(segment)) as sequence:
        computed = _computed(workspace, sequence, segment, progress)
    if segment.carry and not computed.transitions:
        unchecked.append("how the recurrent state goes on through it cannot be computed in this context")
    found = _Found(segment)
    wrong = found.beyond(found.tensors(computed))
    if wrong:
        with _another_way(workspace, segment) as sequence:
            other = _computed(workspace, sequence, segment, progress)
        wrong = found.unexplained(computed, other)
    for position in dict.fromkeys(places):
        reason = _unplaceable(workspace, segment, position)
        if reason:
            unchecked.append(f"position {position:,}: {reason}")
        else:
            wrong += _check_place(workspace, segment, computed, position, progress)
    return RowCheck(len(segment), len(segment.layers), found.farthest, tuple(wrong), tuple(unchecked))


@dataclass(frozen=True, slots=True)
class _Computed:
    """The result of a prefill: the rows that the segment should have, and its transitions if it has some."""

    layers: Sequence[LayerRows]
    transitions: Sequence[Transition] = ()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """How far the rows of one tensor are from those computed, relative to their length, and what of it the type of the
    file explains: [rows] each."""

    layer: int
    name: str
    errors: NDArray[np.float64]
    rounding: NDArray[np.float64]

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def noise(self) -> NDArray[np.float64]:
        """Of each row of two prefills: how far such rows are apart, at least as far as half of them."""
        return np.maximum(self.errors, self.median)

    def wrong(self, bars: NDArray[np.float64], offset: int, position: int | None = None) -> WrongRows | None:
        """The rows beyond their bars, the first row being token -offset."""
        beyond = np.flatnonzero(~(self.errors <= bars))  # NaN is not
        if not len(beyond):
            return None
        worst = beyond[np.argmax(np.nan_to_num(self.errors[beyond], nan=np.inf))]
        tokens = int(beyond[0]) - offset, int(beyond[-1]) + 1 - offset, len(beyond)
        return WrongRows(self.layer, self.name, *tokens, float(self.errors[worst]), float(bars[worst]), position)


class _Found:
    """The rows of a segment, as its file has them."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._transitions = segment.carry.load() if segment.carry else ()
        self.farthest = 0.0

    def tensors(self, computed: _Computed) -> list[_Tensor]:
        """Their distances from what was computed."""
        found = compare_layers(self._segment.layers, computed.layers)
        return [*found, *_compared_transitions(self._transitions, computed.transitions)]

    def beyond(self, tensors: Sequence[_Tensor], apart: Sequence[_Tensor] = (), scale: float = 0.0) -> list[WrongRows]:
        """The rows of these that exceed their bars. `apart`: how far two prefills are."""
        self.farthest = float(np.max([one.errors.max() for one in tensors], initial=0.0))
        found = []
        for one, far in zip_longest(tensors, apart):
            bars = TOLERANCE + one.rounding + (SPREAD * scale * far.noise if far else 0.0)
            wrong = one.wrong(bars, self._offset(one))
            found += [wrong] if wrong else []
        return found

    def unexplained(self, computed: _Computed, other: _Computed) -> list[WrongRows]:
        """The rows that neither of two prefills explains, nor what is between them."""
        apart = compare_layers(computed.layers, other.layers)
        apart += _compared_transitions(computed.transitions, other.transitions)
        ways = []
        for far, near in ((computed, other), (other, computed)):
            tensors, others = self.tensors(near), self.tensors(far)
            # Where two experts are almost tied, a row may be that of either prefill.
            either = [
                replace(one, errors=np.where(second.errors <= TOLERANCE + second.rounding, 0.0, one.errors))
                for one, second in zip(tensors, others, strict=True)
            ]
            scale = _scale(tensors, apart)
            ways.append((scale, self.beyond(either, apart, scale), self.farthest))
        _, wrong, self.farthest = min(ways, key=lambda way: (way[0], sum(one.count for one in way[1])))
        return wrong

    def _offset(self, tensor: _Tensor) -> int:
        return len(tensor.errors) - len(self._segment) if len(tensor.errors) >= len(self._segment) else 0


def _scale(tensors: Sequence[_Tensor], apart: Sequence[_Tensor]) -> float:
    """How many times as far as two prefills are apart the nearest of the tensors are away."""
    times = [one.median / far.median for one, far in zip(tensors, apart, strict=True) if far.median > FAINT]
    return min(FARTHEST, float(np.nan_to_num(np.quantile(times, NEAREST, method="lower")))) if times else 0.0


def compare_layers(found: Sequence[LayerRows], computed: Sequence[LayerRows]) -> list[_Tensor]:
    """The distance of each row of each tensor from the one computed. Raise EngineError for rows of other shapes."""
    if [(one.layer, one.part) for one in found] != [(one.layer, one.part) for one in computed]:
        raise EngineError("the segment has rows of other layers than this model")
    tensors = []
    for mine, right in zip(found, computed, strict=True):
        for name, rows, wanted in zip(NAMES[mine.part], (mine.k, mine.v), (right.k, right.v), strict=True):
            a, b = to_float32(rows), to_float32(wanted)
            if a.shape != b.shape:
                raise EngineError(f"the segment has {name} of shape {a.shape} in layer {mine.layer}, not {b.shape}")
            if a.size:
                unit = _units(b, rows) if mine.part != "state" else np.ones(b.shape[1])
                length = _lengths(b / unit)
                distance = np.linalg.norm((a - b) / unit, axis=1) / length
                tensors.append(_Tensor(mine.layer, name, distance, _rounding(rows, unit) / length))
    return tensors


def _units(computed: NDArray[np.float32], kept: RowArray) -> NDArray[np.float64]:
    """The unit of each channel: the mean size of its numbers, so that a few channels of K that are
    a hundred times as large, as some models have them, do not hide all others; but no less than rounding leaves of
    them, if rows are `kept` quantized."""
    sizes: NDArray[np.float64] = np.sqrt((computed.astype(np.float64) ** 2).mean(axis=0))
    least = max(SMALL * float(np.median(sizes)), LITTLE * float(np.sqrt((sizes**2).mean())), 1e-9)
    if kept.dtype == Q8_0:
        blocks: Any = kept
        steps = np.abs(blocks["scale"].astype(np.float64)).mean(axis=0)
        sizes = np.maximum(sizes, STEPS * np.repeat(steps, BLOCK))
    sizes[:] = np.maximum(sizes, least)
    return sizes


def _lengths(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """The length of each row, at least a part of what they have in the mean."""
    length: NDArray[np.float64] = np.linalg.norm(rows.astype(np.float64), axis=1)
    length[:] = np.maximum(length, max(SHORT * float(np.sqrt((length**2).mean())), 1e-9))
    return length


def _rounding(rows: RowArray, unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far quantizing has moved each row, and half as much again; f16 is within TOLERANCE."""
    if rows.dtype != Q8_0:
        return np.zeros(len(rows))
    blocks: Any = rows
    weight = (unit.reshape(-1, BLOCK) ** -2).sum(axis=1)
    moved: NDArray[np.float64] = np.sqrt((blocks["scale"].astype(np.float64) ** 2 * weight).sum(axis=1) / 12)
    return 1.5 * moved


def _compared_transitions(found: Sequence[Transition], computed: Sequence[Transition]) -> list[_Tensor]:
    """How far transitions are apart, each as one row; nothing where there are none to compare them with."""
    pairs = zip(found, computed, strict=True) if found and computed else ()
    tensors = []
    for mine, right in pairs:
        for a, b in ((mine.a, right.a), (mine.b, right.b), (mine.r, right.r)):
            if a.shape != b.shape or mine.layer != right.layer:
                raise EngineError(f"the segment has a transition of another shape in layer {mine.layer}")
            if a.size:
                distance = np.linalg.norm((a - b)[None].astype(np.float64), axis=1) / _lengths(b[None])
                tensors.append(_Tensor(mine.layer, TRANSITION, distance, np.zeros(1)))
    return tensors


def _computed(workspace: Workspace, sequence: KVSequence, segment: Segment, progress: Progress | None) -> _Computed:
    """A prefill of the segment's tokens in an empty sequence, as it is compiled."""
    context, dtype = sequence.context, segment.row_type
    if segment.blocks:
        _put_blocks(sequence, segment, progress)
        rows = context.read(sequence.seq_id, segment.base, len(segment), base=segment.base, dtype=dtype)
        return _Computed(rows)
    sequence.append(segment.context)
    sequence.flush()
    transitions: Sequence[Transition] = ()
    if segment.pictures:
        sequence.append_image(workspace.encode_images(segment))
    elif segment.carry and context.supports("carry") is None:
        seam, end = segment.carry.seam, len(segment) - segment.carry.tail
        sequence.append(segment.tokens[:seam])
        sequence.flush()
        with recurrent.capturing(context, sequence.seq_id) as captured:
            sequence.append(segment.tokens[seam:end])
            sequence.flush(progress)
            with suppress(EngineError):  # then they stay unchecked
                transitions = captured()
        sequence.append(segment.tokens[end:])
    else:
        sequence.append(segment.tokens)
    sequence.flush(progress)
    count = len(sequence) - segment.first
    if segment.axes is not None:
        rows, _ = context.read_axes(sequence.seq_id, segment.first, count, base=segment.first, dtype=dtype)
    else:
        rows = context.read(sequence.seq_id, segment.first, count, base=segment.first, dtype=dtype)
    return _Computed(rows, transitions)


def _put_blocks(sequence: KVSequence, segment: Segment, progress: Progress | None) -> None:
    """Prefill each block after the left context alone, and put them side by side, as a compile does."""
    parts = [segment.tokens[first:last] for first, last in segment.spans]
    rows = list(prefill(sequence, segment.context, parts, segment.row_type, progress))
    plain = replace(segment, fields=(), influence={}, blocks=(), moves=())
    sequence.truncate(0)
    sequence.append(segment.context)
    for tokens, layers in zip(parts, rows, strict=True):
        sequence.splice(replace(plain, tokens=tokens, layers=layers))


def _decoded_at(
    context: Context,
    seq_id: int,
    left: Tokens,
    tokens: Tokens,
    start: int,
    dtype: str,
    progress: Progress | None = None,
) -> tuple[LayerRows, ...]:
    """Rows of the tokens after the left context, whose first token is at position `start`, in an empty sequence."""
    both, step = np.concatenate([left, tokens]), min(context.n_ubatch, context.n_batch)
    try:
        for first in range(0, len(both), step):
            interrupts.check_stop()
            context.decode_at(seq_id, start + first, both[first : first + step])
            if progress:
                progress(min(first + step, len(both)), len(both))
        at = start + len(left)
        return context.read(seq_id, at, len(tokens), base=at, dtype=dtype)
    finally:
        context.truncate(seq_id, 0)


def _joined(parts: Sequence[Sequence[LayerRows]]) -> list[LayerRows]:
    return [
        replace(layers[0], k=np.concatenate([one.k for one in layers]), v=np.concatenate([one.v for one in layers]))
        for layers in zip(*parts, strict=True)
    ]


@contextmanager
def _another_way(workspace: Workspace, segment: Segment) -> Iterator[KVSequence]:
    """An empty sequence in a context that computes the same in another order."""
    own = workspace.context.compile_options
    options = replace(own, n_sequences=1, unified=False)
    if not segment.media:  # whose rows may have to be in one micro-batch
        options = replace(options, n_ubatch=OTHER_BATCH)
    flash = replace(options, flash_attention="auto" if own.flash_attention == "off" else "off")
    try:
        context = Context(workspace.model, flash)
    except EngineError:  # flash attention cannot be left out, or there is none
        context = Context(workspace.model, options)
    with context:
        context.carries = workspace.context.carries
        yield KVSequence(context)


def _unplaceable(workspace: Workspace, segment: Segment, position: int) -> str | None:
    """Why a splice at this position cannot be compared, in words."""
    context, base = workspace.context, segment.base
    if segment.prefix_only or segment.axes is not None or segment.media:
        return "its rows are compared where they were compiled only"
    if context.drops:
        return "the cache keeps no more rows than its sliding window has (swa_full keeps them all)"
    if position < base:
        return "the left context does not fit before it"
    if position + len(segment) > context.n_ctx:
        return f"it does not fit the context of {context.n_ctx:,} tokens"
    return context.can_move(base, position, len(segment))


def _check_place(
    workspace: Workspace, segment: Segment, computed: _Computed, position: int, progress: Progress | None
) -> list[WrongRows]:
    """The wrong rows of a splice at a position.

    Each row is read back, rotated to where it was compiled, and compared with the file's: is it there? And half of the
    keys of each layer must be as near to those of the same tokens decoded there as the file's are to the computed ones:
    all are rotated by the same distance. What that prefill differs by from the one at the segment's own position shows
    in V, which is not rotated. The type of the cache rounds rows by as much as it rounds the computed ones.
    """
    there = []
    with workspace.scratch(segment.base + len(segment)) as sequence:
        for first, last in segment.spans:
            start, tokens = position - segment.base + first, segment.tokens[first:last]
            where = sequence.context, sequence.seq_id, segment.context, tokens
            there.append(_decoded_at(*where, start, segment.row_type, progress))
    right = _joined(there)
    spliced, back = _placed(workspace, segment.tokens, segment.layers, segment.base, position)
    rounded, _ = _placed(workspace, segment.tokens, right, position, position)
    v_noise = {one.layer: one.median for one in compare_layers(right, computed.layers) if one.name == "V"}
    own = [replace(one, k=to_float32(one.k), v=to_float32(one.v)) for one in segment.layers]
    wrong = []
    kept = compare_layers(own, computed.layers)
    rows = zip(
        compare_layers(back, own), compare_layers(spliced, right), compare_layers(rounded, right), kept, strict=True
    )
    for one, turned, type_, before in rows:
        bar = TOLERANCE + FLOATS * (position + len(segment))
        found = one.wrong(bar + 2 * type_.noise, 0, position)
        if not found and turned.name.startswith("K"):
            bar += before.median + 2 * type_.median + SPREAD * v_noise.get(one.layer, TOLERANCE)
            middle = replace(turned, errors=np.full(len(segment), turned.median))
            found = middle.wrong(np.full(len(segment), bar), 0, position)
        wrong += [found] if found else []
    return wrong


def _placed(
    workspace: Workspace, tokens: Tokens, layers: Sequence[LayerRows], base: int, position: int
) -> tuple[tuple[LayerRows, ...], tuple[LayerRows, ...]]:
    """Rows as the cache has them at a position, and as they are when they are rotated back."""
    context = workspace.context
    with context.lease() as lease:
        context.splice(lease.id, position, tokens, layers, base)
        first, second = (context.read(lease.id, position, len(tokens), base=at, dtype="f32") for at in (position, base))
        return first, second
