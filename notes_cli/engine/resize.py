"""Saves and restores the K/V of all sequences while a context is recreated with more capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.segment import LayerRows, Tokens
from notes_cli.engine.seq_pool import Pool
from notes_cli.errors import EngineError, UnsupportedError

if TYPE_CHECKING:
    from notes_cli.engine.context import Context


@dataclass(frozen=True, slots=True)
class SavedEntries:
    """Entries of a sequence from position `first` on, one per token: their K/V, or the id of the sequence that they are
    shared with. Images are stored for each sequence."""

    seq_id: int
    first: int
    tokens: Tokens
    rows: tuple[LayerRows, ...] | int
    axes: NDArray[np.int32] | None = None  # positions of all rows, where images share them


def save_sequences(context: Context, pool: Pool) -> list[SavedEntries]:
    """Read the K/V of every sequence; entries that several share are read once."""
    result: list[SavedEntries] = []
    shared: dict[object, int] = {}  # cell, or tuple of all cells -> id of a sequence
    for seq_id in range(pool.size):
        count = context.length(seq_id)
        if not count:
            continue
        cells = context.cells_of(seq_id)
        images = len(cells) > count  # rows that share positions (M-RoPE)
        tokens = np.array(pool.tokens(seq_id)[: max(count, len(cells))], np.int32)
        reason = context.supports("read") or context.supports("restore")
        if reason is None and len(tokens) < max(count, len(cells)):
            reason = "it has rows of unknown tokens"
        try:
            if reason is None and not images:
                try:
                    result += _read_runs(context, seq_id, tokens[:count], shared)
                except EngineError:
                    images = context.several_axes and len(cells) == count  # a one-row image: as many positions as rows
                    if not images:
                        raise
            if reason is None and images:
                rows, axes = context.read_axes(seq_id, 0, len(cells), base=0, dtype=context.lossless_type)
                result.append(SavedEntries(seq_id, 0, tokens, rows, axes))
        except EngineError as error:
            reason = error.what
        if reason:
            raise UnsupportedError(f"the context cannot be made larger while sequence {seq_id} has rows: {reason}")
    needed = sum(len(entry.tokens) for entry in result if not isinstance(entry.rows, int))
    # With recurrent state, sequences that shared a prefix each need their own cells.
    if context.unified and context.used and needed > context.cells:
        raise UnsupportedError(
            f"the context cannot be made larger: its sequences share rows, without which they need {needed} cells, "
            f"and it has {context.cells}"
        )
    return result


def restore_sequences(context: Context, saved_entries: Iterable[SavedEntries]) -> None:
    """Write saved entries into the same sequences, which are empty."""
    for entry in saved_entries:
        if isinstance(entry.rows, int):
            last = -1 if context.model.recurrent else entry.first + len(entry.tokens)
            context.copy(entry.rows, entry.seq_id, entry.first, last)
        else:
            context.splice(entry.seq_id, entry.first, entry.tokens, entry.rows, entry.first, axes=entry.axes)


def _read_runs(context: Context, seq_id: int, tokens: Tokens, shared: dict[object, int]) -> list[SavedEntries]:
    """Read the K/V of a sequence in runs, with references for shared ones."""
    result = []
    for first, last, owner in _runs(context, seq_id, len(tokens), shared):
        rows: tuple[LayerRows, ...] | int | None = owner
        if rows is None:
            rows = context.read(seq_id, first, last - first, base=first, dtype=context.lossless_type)
        result.append(SavedEntries(seq_id, first, tokens[first:last], rows))
    return result


def _runs(
    context: Context, seq_id: int, count: int, shared: dict[object, int]
) -> Iterator[tuple[int, int, int | None]]:
    """Yield runs (first, last, id of an earlier sequence with the same cells or None), and add the cells to
    `shared`."""
    cells = context.cells_of(seq_id)
    # Several rows per position, or a state that belongs to all of them: shared as a whole.
    if len(cells) != count or context.model.recurrent:
        whole = tuple(cells)
        yield 0, count, shared.get(whole) if cells else None
        shared.setdefault(whole, seq_id)
        return
    first = 0
    for owner, run in groupby(cells, shared.get):
        last = first + len(list(run))
        yield first, last, owner
        first = last
    for cell in cells:
        shared.setdefault(cell, seq_id)
