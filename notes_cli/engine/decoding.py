"""Decoding: one call of llama.cpp over what is pending in one or many notebooks of a context."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from notes_cli.errors import EngineError

if TYPE_CHECKING:
    from notes_cli.engine.context import Output
    from notes_cli.engine.notebook import Notebook

Logits = NDArray[np.float32]


def decode(
    notebooks: Sequence[Notebook], limit: int | None = None, every: Collection[int] = ()
) -> dict[int, list[Logits] | EngineError]:
    """Decode as much of what is pending as goes into one batch, at most `limit` tokens, of each notebook some; where
    that is all, the notebook has its logits afterwards. Of the sequences in `every` return the logits after each token,
    or why there are none.

    Logits that are not numbers are an error of one notebook, which raises it when it is asked for them. Interrupted or
    failed, each keeps what of it was decoded, and the rest is still pending.
    """
    context = notebooks[0].context
    for notebook in notebooks:
        notebook.check_intact()
    size = min(context.stride, limit or context.stride)
    shares = fair([notebook.batch for notebook in notebooks], size)
    parts = [(notebook, count) for notebook, count in zip(notebooks, shares, strict=True) if count]
    outputs: dict[int, Output] = {}
    for notebook, count in parts:
        complete = count == len(notebook.pending)
        outputs[notebook.sequence] = "all" if notebook.sequence in every else "last" if complete else "none"
    started = time.perf_counter()
    try:
        context.append({book.sequence: np.array(book.pending[:count], np.int32) for book, count in parts}, outputs)
    except BaseException:
        done = [context.length(book.sequence) == book.length(book.rows + count) for book, count in parts]
        if all(done):  # an interrupt comes after the call that it waited for
            _advance(parts, outputs, every)
        else:
            for notebook in notebooks:
                notebook.failed()
        raise
    finally:
        for notebook in notebooks:
            notebook.seconds["decode"] += time.perf_counter() - started
    return _advance(parts, outputs, every)


def _advance(
    parts: Sequence[tuple[Notebook, int]], outputs: Mapping[int, Output], every: Collection[int]
) -> dict[int, list[Logits] | EngineError]:
    """Tell the notebooks how many of their tokens were decoded, and what came of it."""
    wanted = [{"none": 0, "last": 1, "all": count}[outputs[book.sequence]] for book, count in parts]
    found: dict[int, list[Logits] | EngineError] = {}
    index = -sum(wanted)
    for (notebook, count), number in zip(parts, wanted, strict=True):
        notebook.advance(count)
        try:
            logits = [notebook.context.logits(index + place) for place in range(number)]
        except EngineError as error:
            notebook.advance(0, error)
            found[notebook.sequence] = error
        else:
            if logits and not notebook.pending:
                notebook.advance(0, logits[-1])
            if notebook.sequence in every:
                found[notebook.sequence] = logits
        index += number
    return found


def fair(wanted: Sequence[int], size: int) -> list[int]:
    """So many of each that all fit into `size`: the small ones whole, of the large ones the same."""
    left, given = size, [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for place, index in enumerate(order):
        given[index] = min(wanted[index], left // (len(order) - place))
        left -= given[index]
    return given
