"""Make segments with broken K/V and valid checksums: one layer or all, broken in one way.

Which changes count: a row must differ from the intact one by more than what its type rounds (LEAST). Keys of a layer
without positions do not change where they are rotated by one, nor does a state of one row where rows are shifted; such
a draw is no mutant, and another way is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.segment import BLOCK, Q8_0, LayerRows, Segment, quantized, to_float32
from notes_cli.errors import NotesError
from notes_cli.library.container import small
from notes_cli.runtime.check_rows import NAMES
from notes_cli.runtime.workspace import Workspace

Rows = NDArray[np.float32]
Break = Callable[[Rows, np.random.Generator, int, int], Rows]
LEAST = {False: 2**-9, True: 0.02}  # of a row's length: rounding of f16, and of q8_0


def _swapped(rows: Rows, heads: int) -> Rows:
    """Reverse the heads of each row, or swap its halves with a single head."""
    parts = heads if heads > 1 and rows.shape[1] % heads == 0 else 2
    if rows.shape[1] % parts:
        return rows
    return rows.reshape(len(rows), parts, -1)[:, ::-1].reshape(rows.shape)


def _random(rows: Rows, chance: np.random.Generator) -> Rows:
    """As large as the rows are in the mean."""
    return (chance.standard_normal(rows.shape) * np.sqrt((rows**2).mean())).astype(np.float32)


def _noisy(rows: Rows, chance: np.random.Generator) -> Rows:
    size = np.sqrt((rows**2).mean(axis=1, keepdims=True))
    return rows + 0.05 * size * chance.standard_normal(rows.shape).astype(np.float32)


def _one(rows: Rows, chance: np.random.Generator, row: int) -> Rows:
    """One row that is random, empty, another one's, or negated."""
    out = rows.copy()
    wrecks = (_random(rows[row : row + 1], chance)[0], 0.0, rows[row - 1], -rows[row])
    out[row] = wrecks[chance.integers(len(wrecks))]
    return out


def _part(rows: Rows, row: int) -> Rows:
    """From one row on all are shifted by one."""
    return np.concatenate([rows[:row], np.roll(rows[row:], 1, axis=0)])


def _two_heads(rows: Rows, heads: int) -> Rows:
    """Swap the first two heads, or the first two eighths of a single head."""
    parts = heads if heads > 1 else 8
    if rows.shape[1] % parts:
        return rows
    order = [1, 0, *range(2, parts)]
    return rows.reshape(len(rows), parts, -1)[:, order].reshape(rows.shape)


def _two_rows(rows: Rows, row: int) -> Rows:
    """Swap a row with the first."""
    out = rows.copy()
    out[[0, row]] = out[[row, 0]]
    return out


def _mean(rows: Rows, row: int) -> Rows:
    """One row is the mean of itself and the one before."""
    out = rows.copy()
    out[row] = (rows[row] + rows[row - 1]) / 2
    return out


def _scaled(rows: Rows, chance: np.random.Generator) -> Rows:
    """One channel 10% larger: one of those that are not much smaller than the others."""
    sizes = np.sqrt((rows**2).mean(axis=0))
    out = rows.copy()
    out[:, chance.choice(np.flatnonzero(sizes >= np.median(sizes)))] *= 1.1
    return out


def _quantized(rows: Rows) -> Rows:
    """Rounded to multiples of a scale, from -7 to 7 times, of which each block of 32 numbers has one, as in q4."""
    if rows.shape[1] % BLOCK:
        return rows
    blocks = rows.reshape(len(rows), -1, BLOCK)
    scale = (np.abs(blocks).max(axis=2, keepdims=True) / 7).astype(np.float16).astype(np.float32)
    rounded: Rows = (np.rint(blocks / np.maximum(scale, 1e-20)) * scale).reshape(rows.shape)
    return rounded


def _faint(rows: Rows, chance: np.random.Generator) -> Rows:
    return (rows + (_noisy(rows, chance) - rows) / 5).astype(np.float32)


NOISE, FAINT = "noise of 5%", "noise of 1%"
CHANNEL = "one channel 10% larger"  # found in 16 tokens and more
BREAKS: dict[str, Break] = {
    "rows shifted by one token": lambda rows, chance, heads, row: np.roll(rows, 1, axis=0),
    "rows shifted from a token on": lambda rows, chance, heads, row: _part(rows, row),
    "heads swapped": lambda rows, chance, heads, row: _swapped(rows, heads),
    "zeros": lambda rows, chance, heads, row: np.zeros_like(rows),
    "random rows": lambda rows, chance, heads, row: _random(rows, chance),
    "one row wrecked": lambda rows, chance, heads, row: _one(rows, chance, row),
    NOISE: lambda rows, chance, heads, row: _noisy(rows, chance),
    "two heads swapped": lambda rows, chance, heads, row: _two_heads(rows, heads),
    "two rows swapped": lambda rows, chance, heads, row: _two_rows(rows, row),
    "a mean of two rows": lambda rows, chance, heads, row: _mean(rows, row),
    "signs flipped": lambda rows, chance, heads, row: -rows,
    CHANNEL: lambda rows, chance, heads, row: _scaled(rows, chance),
    "all rows 5% larger": lambda rows, chance, heads, row: rows * 1.05,
    "rounded to 4 bits": lambda rows, chance, heads, row: _quantized(rows),
    FAINT: lambda rows, chance, heads, row: _faint(rows, chance),
}
TURNED, SWAPPED, NEIGHBOUR = "keys one position off", "K and V swapped", "rows of the layer before"
OTHER_WORD, STALE, OTHER_LEFT = "rows of another word", "stale rows behind another word", "after another left context"
WHOLE = (OTHER_WORD, STALE, OTHER_LEFT)  # rows of a prefill of other tokens
KINDS = (TURNED, SWAPPED, NEIGHBOUR, *WHOLE, *BREAKS)
PLACES = ("first", "middle", "last", "all")
# Where all rows are wrong, these show in some tensors only: in others they move rows by less than a check's bar.
SOME = (NOISE, *WHOLE, CHANNEL, "rounded to 4 bits", "all rows 5% larger", "a mean of two rows")
# Smallest change of a row, in f16 and in q8_0, that a check must find where no other row shows it.
TOLD = {False: 0.03, True: 0.05}


@dataclass(frozen=True)
class Mutant:
    """A segment with wrong rows. `tensors`: layer and name, as a check has them, of all that were changed; `change`:
    the largest change of a row in the tensor where that is smallest, relative to the row's length."""

    segment: Segment
    kind: str
    place: str
    tensors: frozenset[tuple[int, str]]
    change: float

    def __str__(self) -> str:
        names = sorted({name for _, name in self.tensors})
        return f"{self.kind}, {' and '.join(names)}, {self.place} layer(s), changed by {self.change:.2g}"


def mutant(workspace: Workspace, segment: Segment, kind: str, place: str, which: str, seed: int) -> Mutant | None:
    """Return the segment with broken K, V or both (`which`) in some layers; None if nothing changes. The rest is
    unchanged."""
    chance, count = np.random.default_rng(seed), len(segment.layers)
    chosen = range(count) if place == "all" else [{"first": 0, "middle": count // 2, "last": count - 1}[place]]
    donor: Sequence[LayerRows] | None = None
    if kind == TURNED:
        donor = _turned(workspace, segment) if which == "K" else None
    elif kind == SWAPPED:
        donor = [replace(rows, k=rows.v, v=rows.k) for rows in segment.layers]
    elif kind == NEIGHBOUR:
        donor = [segment.layers[-1], *segment.layers[:-1]]
    elif kind in WHOLE:
        donor = _recomputed(workspace, segment, kind, chance)
    if (donor is None and kind not in BREAKS) or (kind == FAINT and not _shows(segment, place, which)):
        return None
    model = workspace.model
    heads = int(model.metadata(f"{model.architecture}.attention.head_count_kv") or 1)
    before, row = segment.base - segment.first, int(chance.integers(len(segment)))
    layers, changed, changes, q8_0 = list(segment.layers), set(), [], any(quantized(segment.kv))
    told = (kind == CHANNEL and len(segment) >= 16) or _shows(segment, place, which)
    for index in chosen:
        rows, new = layers[index], {}
        for name, part, label in zip("kv", (rows.k, rows.v), NAMES[rows.part], strict=True):
            old = to_float32(part)
            if name.upper() not in which or not old.size:
                continue
            at = before + row if len(old) > 1 else 0
            broken = to_float32(getattr(donor[index], name)) if donor else BREAKS[kind](old, chance, heads, at)
            if broken.shape != old.shape or (donor and donor[index].part != rows.part):
                continue
            kept = _stored(segment, rows, name, broken.astype(np.float32))
            lengths = np.maximum(np.linalg.norm(old, axis=1), 1e-9)
            change = float((np.linalg.norm(to_float32(kept) - old, axis=1) / lengths).max())
            if change > (LEAST if told and rows.part != "state" else TOLD)[q8_0]:
                new[name] = kept
                changed.add((rows.layer, label))
                changes.append(change)
        layers[index] = replace(rows, **new)
    if not changed:
        return None
    return Mutant(replace(segment, layers=tuple(layers)), kind, place, frozenset(changed), min(changes))


def _turned(workspace: Workspace, segment: Segment) -> tuple[LayerRows, ...] | None:
    """The rows with their keys one position on; None where this model's cannot be rotated."""
    if segment.prefix_only:
        return None
    context, base = workspace.context, segment.base
    try:
        with context.lease() as lease:
            context.splice(lease.id, base, segment.tokens, tuple(segment.layers), base)
            return context.read(lease.id, base, len(segment), base=base + 1, dtype=segment.row_type)
    except NotesError:
        return None


def _shows(segment: Segment, place: str, which: str) -> bool:
    """True if the rows of the last layer show that those of the first were computed here."""
    attention = [rows.part == "attention" for rows in segment.layers]
    return place == "first" and len(attention) > 1 and attention[0] and attention[-1]


def _recomputed(
    workspace: Workspace, segment: Segment, kind: str, chance: np.random.Generator
) -> Sequence[LayerRows] | None:
    """The rows of a prefill of other tokens: one of the text is another, in all rows or only in those behind it, or one
    of the left context."""
    if segment.blocks or segment.media or segment.carry or (kind == OTHER_LEFT and not segment.base):
        return None
    tokens = np.concatenate([segment.context, segment.tokens])
    at = int(chance.integers(segment.base)) if kind == OTHER_LEFT else segment.base + len(segment) // 3
    tokens[at] = tokens[at - 1] if tokens[at - 1] != tokens[at] else tokens[at - 2]
    with workspace.scratch(len(tokens)) as sequence:
        for part in (tokens[: segment.base], tokens[segment.base :]):
            sequence.append(part)
            sequence.flush()
        first, count = segment.first, len(tokens) - segment.first
        rows = sequence.context.read(sequence.seq_id, first, count, base=first, dtype=segment.row_type)
    if kind != STALE:
        return rows
    end = at + 1 - segment.first
    return [
        other
        if other.part == "state"
        else replace(
            other,
            k=np.concatenate([to_float32(own.k)[:end], to_float32(other.k)[end:]]),
            v=np.concatenate([to_float32(own.v)[:end], to_float32(other.v)[end:]]),
        )
        for own, other in zip(segment.layers, rows, strict=True)
    ]


def _stored(segment: Segment, rows: LayerRows, name: str, values: Rows) -> NDArray[np.floating]:
    """Broken rows as the file of the segment keeps them."""
    part = getattr(rows, name)
    plain = values.astype(np.float16 if part.dtype == Q8_0 else part.dtype)
    bare = replace(segment, layers=(replace(rows, **{name: plain}),))
    found: NDArray[np.floating] = getattr(small(bare).layers[0], name)
    return found
