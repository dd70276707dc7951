"""Make segments with broken K/V and valid checksums: one layer or all, broken in one way.

Which changes count: a row must differ from the intact one by more than what its type rounds (LEAST). Keys of a layer
without positions do not change where they are rotated by one, nor does a state of one row where rows are shifted; such
a draw is no mutant, and another way is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.segment import Q8_0, LayerRows, Segment, quantized, to_float32
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


NOISE = "noise of 5%"
BREAKS: dict[str, Break] = {
    "rows shifted by one token": lambda rows, chance, heads, row: np.roll(rows, 1, axis=0),
    "rows shifted from a token on": lambda rows, chance, heads, row: _part(rows, row),
    "heads swapped": lambda rows, chance, heads, row: _swapped(rows, heads),
    "zeros": lambda rows, chance, heads, row: np.zeros_like(rows),
    "random rows": lambda rows, chance, heads, row: _random(rows, chance),
    "one row wrecked": lambda rows, chance, heads, row: _one(rows, chance, row),
    NOISE: lambda rows, chance, heads, row: _noisy(rows, chance),
}
TURNED = "keys one position off"
KINDS = (TURNED, *BREAKS)
PLACES = ("first", "middle", "last", "all")


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
    turned = _turned(workspace, segment) if kind == TURNED else None
    if kind == TURNED and (turned is None or which != "K"):
        return None
    model = workspace.model
    heads = int(model.metadata(f"{model.architecture}.attention.head_count_kv") or 1)
    before, row = segment.base - segment.first, int(chance.integers(len(segment)))
    layers, changed, changes = list(segment.layers), set(), []
    for index in chosen:
        rows, new = layers[index], {}
        for name, part, label in zip("kv", (rows.k, rows.v), NAMES[rows.part], strict=True):
            old = to_float32(part)
            if name.upper() not in which or not old.size:
                continue
            at = before + row if len(old) > 1 else 0
            broken = to_float32(turned[index].k) if turned else BREAKS[kind](old, chance, heads, at)
            kept = _stored(segment, rows, name, broken.astype(np.float32))
            lengths = np.maximum(np.linalg.norm(old, axis=1), 1e-9)
            change = float((np.linalg.norm(to_float32(kept) - old, axis=1) / lengths).max())
            if change > LEAST[any(quantized(segment.kv))]:
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


def _stored(segment: Segment, rows: LayerRows, name: str, values: Rows) -> NDArray[np.floating]:
    """Broken rows as the file of the segment keeps them."""
    part = getattr(rows, name)
    plain = values.astype(np.float16 if part.dtype == Q8_0 else part.dtype)
    bare = replace(segment, layers=(replace(rows, **{name: plain}),))
    found: NDArray[np.floating] = getattr(small(bare).layers[0], name)
    return found
