"""Verifies a segment's K/V against a recompute: every layer, every token.

Checksums detect damage. Whether K/V is what this model computes only a prefill of the same tokens after the same left
context can show, in the same micro-batches. Each row is compared with its own bar, and each channel over all rows:

    bar = TOLERANCE + rounding of the stored type + SPREAD * scale * noise

On the same kind of machine rows are equal bit for bit. With the other flash attention setting, or on another device,
deep layers of a quantized model differ by more than TOLERANCE. So where a row exceeds its bar, a second prefill is made
with the other setting. `noise` is the distance of the two prefills in that layer and tensor; `scale` is the distance of
the token's rows from the nearer one in multiples of that, over the nearest tensors: 0 for a segment that one of the two
explains. One broken tensor, or half of them, does not raise it.

A row must be right within EXACT if a later one of the same token, which depends on it, is equal bit for bit.

K/V that is moved in a prompt is not compared: `Workspace.measure_rotation` compares moved keys once for each model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import recurrent
from notes_cli.engine.context import Context
from notes_cli.engine.segment import (
    BLOCK,
    Q8_0,
    LayerRows,
    MicroBatches,
    RowArray,
    Segment,
    Transition,
    to_float32,
)
from notes_cli.engine.sequence import KVSequence, decode
from notes_cli.errors import EngineError, Progress
from notes_cli.library.container import quantize
from notes_cli.runtime.compile import compile_blocks
from notes_cli.runtime.workspace import Workspace

TOLERANCE = 0.02  # of a row: twice the effect of batching on the models that ship (docs/reliability.md)
EXACT = 0.002  # of a row that should be equal bit for bit, but may have been moved, which rounds it up to eight times
SPREAD = 3.0  # allowed distance of a row, in multiples of its tensor's median
FARTHEST = 1.5  # maximum `scale`: two prefills in different ways are 1 apart
NEAREST = 0.25  # quantile of a token's rows for `scale`
FAINT = 0.00001  # noise below this does not show how a segment was computed
LEAST_ROWS = 16  # for comparing channels: of fewer rows, chance makes some channels far
LITTLE = 0.01  # floor of a channel's unit, relative to the mean size of all channels
SHORT = 0.1  # floor of a row's length, relative to the mean: little of a shorter row is exact
SMALL = 0.25  # floor of a channel's unit, relative to the median channel
STEPS = 16  # floor of a channel's unit, in quantization steps
OTHER_BATCH = 61  # micro-batch size of the second prefill where the segment's is not known
LARGEST = 8192  # tokens of a micro-batch that a check computes: a file may claim any number, and they take memory
TRANSITION = "transition"
NAMES = {  # names of K and V
    "attention": ("K", "V"),
    "indexer": ("K of the indexer", "V of the indexer"),
    "state": ("state of the convolution", "state of the recurrence"),
}


@dataclass(frozen=True, slots=True)
class WrongRows:
    """Rows of one tensor of one layer that differ from this model's. `tensor`: one of NAMES, or TRANSITION for the
    state transition of a recurrent layer. `first`, `last`: token range, end excluded; tokens of the left context are
    negative. `count`: number of wrong rows in it. `error`: the largest relative distance, and `bar`: the part that
    rounding explains. `channel`: the channel that is wrong in all of them, if it is one; `error` and `bar` are those of
    the channel."""

    layer: int
    tensor: str
    first: int
    last: int
    count: int
    error: float
    bar: float
    channel: int | None = None

    def __str__(self) -> str:
        tokens = f", token {self.first}" if self.count == 1 else f", tokens {self.first} to {self.last - 1}"
        if self.tensor in (TRANSITION, *NAMES["state"]):
            tokens = ""  # rows of the last token, or of all
        some = "" if self.count == self.last - self.first else f" ({self.count} of them)"
        some = some if self.channel is None else f", channel {self.channel}"
        far = f"off by {self.error:.2g}, where rounding explains {self.bar:.2g}"
        if not np.isfinite(self.error):
            far = "no numbers, or infinite"
        return f"layer {self.layer}, {self.tensor}{tokens}{some}: {far}"


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Result of a check: `tokens` were compared in `layers` layers; `farthest`: largest relative distance of a row in
    the file. `unchecked`: parts that could not be compared, with reasons."""

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
        """The wrong rows in one line; empty if there are none."""
        more = f", and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
        return f"{self.wrong[0]}{more}" if self.wrong else ""


def check_rows(workspace: Workspace, segment: Segment, progress: Progress | None = None) -> RowCheck:
    """Compare all K/V of a segment with a prefill of its tokens. The segment fits the workspace (`Workspace.check`).
    `progress` counts tokens of each prefill: one, and a second one if a row exceeds its bar. Raises SegmentError for
    damaged rows, EngineError where the tokens do not fit the context, UnsupportedError where K/V cannot be read."""
    workspace.make_room(segment.base + len(segment))
    unchecked = []
    with _first_sequence(workspace, segment) as sequence:
        computed = _prefill_segment(workspace, sequence, segment, progress)
    if segment.carry and not computed.transitions:
        unchecked.append("how the recurrent state goes on through it cannot be computed in this context")
    stored = _StoredRows(segment)
    wrong = stored.beyond(stored.tensors(computed))
    if wrong:
        with _second_sequence(workspace, segment) as sequence:
            second = _prefill_segment(workspace, sequence, segment, progress)
        wrong = stored.unexplained(computed, second)
    return RowCheck(len(segment), len(segment.layers), stored.farthest, tuple(wrong), tuple(unchecked))


@dataclass(frozen=True, slots=True)
class _Computed:
    """Result of a prefill: the expected K/V, and transitions if the segment has some."""

    layers: Sequence[LayerRows]
    transitions: Sequence[Transition] = ()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Relative distances of one tensor's rows, and of its channels over all rows, from the computed ones, and the part
    of them that the stored type explains. `exact`: rows that are stored as the computed ones would be."""

    layer: int
    name: str
    errors: NDArray[np.float64]  # [rows], as `rounding` and `exact`
    rounding: NDArray[np.float64]
    exact: NDArray[np.bool_]
    channels: NDArray[np.float64]  # [n_embd], as `channel_rounding`
    channel_rounding: NDArray[np.float64]

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def noise(self) -> NDArray[np.float64]:
        """Distance of each row between two prefills, at least the median."""
        return np.maximum(self.errors, self.median)

    @property
    def channel_noise(self) -> NDArray[np.float64]:
        return np.maximum(self.channels, np.median(self.channels))

    def wrong(self, bars: NDArray[np.float64], offset: int) -> WrongRows | None:
        """Return the rows beyond their bars; the first row is token -offset."""
        beyond = np.flatnonzero(~(self.errors <= bars))  # includes NaN
        if not len(beyond):
            return None
        worst = beyond[np.argmax(np.nan_to_num(self.errors[beyond], nan=np.inf))]
        tokens = int(beyond[0]) - offset, int(beyond[-1]) + 1 - offset, len(beyond)
        return WrongRows(self.layer, self.name, *tokens, float(self.errors[worst]), float(bars[worst]))

    def wrong_channel(self, bars: NDArray[np.float64], offset: int) -> WrongRows | None:
        """Return the channel farthest beyond its bar."""
        if len(self.errors) < LEAST_ROWS or not (self.channels > bars).any():
            return None
        worst = int(np.argmax(self.channels / bars))
        tokens = -offset, len(self.errors) - offset, len(self.errors)
        error, bar = float(self.channels[worst]), float(bars[worst])
        return WrongRows(self.layer, self.name, *tokens, error, bar, channel=worst)


class _StoredRows:
    """The segment's stored rows."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._transitions = segment.carry.load() if segment.carry else ()
        self.farthest = 0.0

    def tensors(self, computed: _Computed) -> list[_Tensor]:
        """Compare them with computed rows."""
        tensors = compare_layers(self._segment.layers, computed.layers)
        return [*tensors, *_compare_transitions(self._transitions, computed.transitions)]

    def beyond(
        self, tensors: Sequence[_Tensor], apart: Sequence[_Tensor] = (), others: Sequence[_Tensor] = ()
    ) -> list[WrongRows]:
        """Return the rows and channels that exceed their bars. `others`: distances from another prefill; `apart`: of
        the two."""
        self.farthest = float(np.max([tensor.errors.max() for tensor in tensors], initial=0.0))
        scales, result = _scales(tensors, apart), []
        for tensor, distance, other, strict in zip_longest(tensors, apart, others, _equal_later(tensors)):
            bars, channel_bars = np.full(len(tensor.errors), TOLERANCE), TOLERANCE + tensor.channel_rounding
            if distance:
                scale = scales if len(scales) == len(bars) else np.median(scales)
                bars += SPREAD * scale * distance.noise
                channel_bars = channel_bars + SPREAD * scales.max() * distance.channel_noise
            if other:  # with two experts almost tied, a row may match either prefill
                bars[other.errors <= TOLERANCE + other.rounding] = np.inf
            bars[strict] = EXACT
            wrong = tensor.wrong(bars + tensor.rounding, self._offset(tensor))
            wrong = wrong or tensor.wrong_channel(channel_bars, self._offset(tensor))
            result += [wrong] if wrong else []
        return result

    def unexplained(self, computed: _Computed, second: _Computed) -> list[WrongRows]:
        """Return the rows that neither of two prefills, nor their distance, explains."""
        apart = compare_layers(computed.layers, second.layers)
        apart += _compare_transitions(computed.transitions, second.transitions)
        tensors = self.tensors(computed), self.tensors(second)
        ways = []
        for nearer, farther in (tensors, tensors[::-1]):
            wrong = self.beyond(nearer, apart, farther)
            ways.append((float(_scales(nearer, apart).mean()), wrong, self.farthest))
        _, wrong, self.farthest = min(ways, key=lambda way: (way[0], sum(tensor.count for tensor in way[1])))
        return wrong

    def _offset(self, tensor: _Tensor) -> int:
        return len(tensor.errors) - len(self._segment) if len(tensor.errors) >= len(self._segment) else 0


def _scales(tensors: Sequence[_Tensor], apart: Sequence[_Tensor]) -> NDArray[np.float64]:
    """Return, for each token, the distance of the nearest tensors in multiples of the distance of two prefills; for
    tensors with a row per token, or for all if there are none."""
    rows = max((len(tensor.errors) for tensor in tensors), default=0)
    times = [
        tensor.errors / distance.noise
        for tensor, distance in zip(tensors, apart, strict=False)
        if len(tensor.errors) == rows and distance.median > FAINT
    ]
    if not times:
        return np.zeros(rows)
    nearest: NDArray[np.float64] = np.nan_to_num(np.quantile(times, NEAREST, axis=0, method="lower"))
    explained = nearest <= SPREAD * FARTHEST  # if not, noise is not why
    return np.where(explained, np.minimum(FARTHEST, nearest), 0.0)


def _equal_later(tensors: Sequence[_Tensor]) -> list[NDArray[np.bool_]]:
    """Return, for each tensor, the tokens that have exactly the computed row in a later layer, or in the other tensor
    of the same one. A later row is computed from what gives the earlier ones, so these must be right, too."""
    rows = max((len(tensor.errors) for tensor in tensors), default=0)
    later, result = np.zeros(rows, bool), []
    for _, group in groupby(reversed(tensors), key=lambda tensor: tensor.layer):
        for tensor in (layer := list(group)):
            if len(tensor.errors) == rows > 1:
                later = later | tensor.exact
        result += [later if len(tensor.errors) == rows else np.zeros(1, bool) for tensor in layer]
    return result[::-1]


def compare_layers(stored_layers: Sequence[LayerRows], computed: Sequence[LayerRows]) -> list[_Tensor]:
    """Compare each row of each tensor with the computed one. Raises EngineError for other shapes."""
    if [(layer.layer, layer.part) for layer in stored_layers] != [(layer.layer, layer.part) for layer in computed]:
        raise EngineError("the segment has rows of other layers than this model")
    tensors = []
    for stored, expected in zip(stored_layers, computed, strict=True):
        for name, rows, expected_rows in zip(
            NAMES[stored.part], (stored.k, stored.v), (expected.k, expected.v), strict=True
        ):
            a, b = to_float32(rows), to_float32(expected_rows)
            if a.shape != b.shape:
                raise EngineError(f"the segment has {name} of shape {a.shape} in layer {stored.layer}, not {b.shape}")
            if a.size:
                unit = _units(b, rows) if stored.part != "state" else np.ones(b.shape[1])
                length = _lengths(b / unit)
                apart, rounding = (a - b) / unit, _rounding(rows, unit)
                label = f"rows of layer {stored.layer}"
                same = a == (to_float32(quantize(expected_rows, label)) if rows.dtype == Q8_0 else b)
                tensors.append(
                    _Tensor(
                        *(stored.layer, name),
                        *(np.linalg.norm(apart, axis=1) / length, np.linalg.norm(rounding, axis=1) / length),
                        same.all(axis=1),
                        *(np.sqrt((both**2).mean(axis=0)) for both in (apart, rounding)),
                    )
                )
    return tensors


def _units(computed: NDArray[np.float32], stored: RowArray) -> NDArray[np.float64]:
    """Return the unit of each channel: its root mean square, so that a few channels of K that are a hundred times as
    large do not hide the others; at least the rounding, if `kept` is quantized."""
    sizes: NDArray[np.float64] = np.sqrt((computed.astype(np.float64) ** 2).mean(axis=0))
    least = max(SMALL * float(np.median(sizes)), LITTLE * float(np.sqrt((sizes**2).mean())), 1e-9)
    if stored.dtype == Q8_0:
        blocks: Any = stored
        steps = np.abs(blocks["scale"].astype(np.float64)).mean(axis=0)
        sizes = np.maximum(sizes, STEPS * np.repeat(steps, BLOCK))
    sizes[:] = np.maximum(sizes, least)
    return sizes


def _lengths(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the length of each row, at least a fraction of the mean."""
    length: NDArray[np.float64] = np.linalg.norm(rows.astype(np.float64), axis=1)
    length[:] = np.maximum(length, max(SHORT * float(np.sqrt((length**2).mean())), 1e-9))
    return length


def _rounding(rows: RowArray, unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1.5 times the distance by which quantizing moves each value in the mean; f16 is within TOLERANCE."""
    if rows.dtype != Q8_0:
        return np.zeros((len(rows), len(unit)))
    blocks: Any = rows
    steps: NDArray[np.float64] = (
        1.5 / np.sqrt(12) * np.repeat(np.abs(blocks["scale"].astype(np.float64)), BLOCK, 1) / unit
    )
    return steps


def _compare_transitions(stored_transitions: Sequence[Transition], computed: Sequence[Transition]) -> list[_Tensor]:
    """Compare transitions, each as one row; empty if either side has none."""
    pairs = zip(stored_transitions, computed, strict=True) if stored_transitions and computed else ()
    tensors = []
    for stored, expected in pairs:
        for a, b in ((stored.a, expected.a), (stored.b, expected.b), (stored.r, expected.r)):
            if a.shape != b.shape or stored.layer != expected.layer:
                raise EngineError(f"the segment has a transition of another shape in layer {stored.layer}")
            if a.size:
                distance = np.linalg.norm((a - b)[None].astype(np.float64), axis=1) / _lengths(b[None])
                none = np.zeros(1)
                tensors.append(_Tensor(stored.layer, TRANSITION, distance, none, none == 1, none, none))
    return tensors


def _prefill_segment(
    workspace: Workspace, sequence: KVSequence, segment: Segment, progress: Progress | None
) -> _Computed:
    """Prefill the segment's tokens in an empty sequence, as a compile does."""
    context, dtype = sequence.context, segment.row_type
    if segment.blocks:
        return _Computed(compile_blocks(sequence, segment, [None] * len(segment.blocks), progress))
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


class _Replay(KVSequence):
    """An empty sequence that decodes tokens in given micro-batches, and further ones as any other."""

    def __init__(self, context: Context, batches: Sequence[MicroBatches]) -> None:
        super().__init__(context)
        parts = [
            (min(batch.size, batch.rows - done), batch.size, min(batch.threads, 2 * (os.cpu_count() or 1)))
            for batch in batches
            for done in range(0, batch.rows, batch.size)
        ]
        self._parts = parts[::-1]

    def flush(self, progress: Progress | None = None) -> None:
        total, threads = len(self.pending), self.context.threads
        try:
            while self.pending and self._parts:
                rows, size, self.context.threads = self._parts.pop()
                self._decode_first(rows, size)
                if progress:
                    progress(total - len(self.pending), total)
        finally:
            self.context.threads = threads
        super().flush(progress)

    def _decode_first(self, rows: int, size: int) -> None:
        """Decode the next `rows` tokens in a micro-batch of `size`. What else is in it does not matter: no token sees a
        later one."""
        if rows == size or self.rows + size > self.context.n_ctx:
            decode([self], rows)
            return
        pending, end = list(self.pending), self.rows + rows
        self.truncate(self.rows)
        self.append([*pending, *pending[-1:] * size][:size])
        decode([self], size)
        self.truncate(end)
        self.append(pending[rows:])


@contextmanager
def _first_sequence(workspace: Workspace, segment: Segment) -> Iterator[KVSequence]:
    """Yield an empty sequence that computes in the segment's micro-batches, if they are known."""
    largest = max((batch.size for batch in segment.batches), default=0)
    if not workspace.context.n_ubatch < largest <= LARGEST:
        with workspace.scratch(segment.base + len(segment) + largest) as sequence:
            sequence.close()
            with _Replay(sequence.context, segment.batches) as replay:
                yield replay
        return
    options = replace(workspace.context.compile_options, n_sequences=1, unified=False, n_ubatch=largest)
    with Context(workspace.model, replace(options, n_batch=max(options.n_batch, largest))) as context:
        context.carries = workspace.context.carries
        yield _Replay(context, segment.batches)


@contextmanager
def _second_sequence(workspace: Workspace, segment: Segment) -> Iterator[KVSequence]:
    """Yield an empty sequence that computes with the other setting of flash attention, or in other micro-batches."""
    base_options = workspace.context.compile_options
    largest = max((batch.size for batch in segment.batches), default=0)
    options, batches = replace(base_options, n_sequences=1, unified=False), segment.batches
    if 0 < largest <= LARGEST:
        options = replace(options, n_ubatch=max(options.n_ubatch, largest), n_batch=max(options.n_batch, largest))
    elif not segment.media:  # which may need a single micro-batch
        options = replace(options, n_ubatch=OTHER_BATCH)
    flash = replace(options, flash_attention="auto" if base_options.flash_attention == "off" else "off")
    try:
        context = Context(workspace.model, flash)
    except EngineError:  # flash attention is required, or unavailable
        context = Context(workspace.model, options if segment.media else replace(options, n_ubatch=OTHER_BATCH))
        batches = ()
    with context:
        context.carries = workspace.context.carries
        yield _Replay(context, batches)
