"""Rows of the sequences of a context, taken out and put back: one that is made again with more room keeps them."""

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
    """Rows of a sequence from position `first` on, one for each of the tokens: as they were read, or the number of the
    sequence that it shares them with. Those of images are not shared again."""

    seq_id: int
    first: int
    tokens: Tokens
    rows: tuple[LayerRows, ...] | int
    axes: NDArray[np.int32] | None = None  # of all rows, where images share positions


def save_sequences(context: Context, pool: Pool) -> list[SavedEntries]:
    """The rows of every sequence that has some, those that several share once."""
    kept: list[SavedEntries] = []
    shared: dict[object, int] = {}  # what of a sequence others may have, too, and its number
    for number in range(pool.size):
        count = context.length(number)
        if not count:
            continue
        cells = context.cells_of(number)
        images = len(cells) > count  # rows that share positions (M-RoPE)
        tokens = np.array(pool.tokens(number)[: max(count, len(cells))], np.int32)
        reason = context.supports("read") or context.supports("restore")
        if reason is None and len(tokens) < max(count, len(cells)):
            reason = "it has rows of unknown tokens"
        try:
            if reason is None and not images:
                try:
                    kept += _read_runs(context, number, tokens[:count], shared)
                except EngineError:
                    images = context.several_axes and len(cells) == count  # in one line: as many positions as rows
                    if not images:
                        raise
            if reason is None and images:
                found, axes = context.read_axes(number, 0, len(cells), base=0, dtype=context.lossless_type)
                kept.append(SavedEntries(number, 0, tokens, found, axes))
        except EngineError as error:
            reason = error.what
        if reason:
            raise UnsupportedError(f"the context cannot be made larger while sequence {number} has rows: {reason}")
    needed = sum(len(one.tokens) for one in kept if not isinstance(one.rows, int))
    # With a state, what goes on from one text needs its own.
    if context.unified and context.used and needed > context.cells:
        raise UnsupportedError(
            f"the context cannot be made larger: its sequences share rows, without which they need {needed} cells, "
            f"and it has {context.cells}"
        )
    return kept


def restore_sequences(context: Context, kept: Iterable[SavedEntries]) -> None:
    """Put them into the same sequences, which are empty."""
    for one in kept:
        if isinstance(one.rows, int):
            last = -1 if context.model.recurrent else one.first + len(one.tokens)
            context.copy(one.rows, one.seq_id, one.first, last)
        else:
            context.splice(one.seq_id, one.first, one.tokens, one.rows, one.first, axes=one.axes)


def _read_runs(context: Context, number: int, tokens: Tokens, shared: dict[object, int]) -> list[SavedEntries]:
    """The rows of a sequence, one a position, those that it shares with another by the number of that one."""
    found = []
    for first, last, other in _runs(context, number, len(tokens), shared):
        rows: tuple[LayerRows, ...] | int | None = other
        if rows is None:
            rows = context.read(number, first, last - first, base=first, dtype=context.lossless_type)
        found.append(SavedEntries(number, first, tokens[first:last], rows))
    return found


def _runs(
    context: Context, number: int, count: int, shared: dict[object, int]
) -> Iterator[tuple[int, int, int | None]]:
    """Stretches of the positions of a sequence, and the sequence before it that has the same rows, if one has.
    `shared`: of the sequences before; of this one, too, when all have been taken."""
    cells = context.cells_of(number)
    # Not one a position; or with a state, which belongs to them all.
    if len(cells) != count or context.model.recurrent:
        whole = tuple(cells)
        yield 0, count, shared.get(whole) if cells else None
        shared.setdefault(whole, number)
        return
    first = 0
    for other, run in groupby(cells, shared.get):
        last = first + len(list(run))
        yield first, last, other
        first = last
    for cell in cells:
        shared.setdefault(cell, number)
