"""Does all that can be done with rows, in one sequence of steps, for comparing caches and devices."""

from __future__ import annotations

import numpy as np

from notes_cli.engine.context import Context
from notes_cli.engine.segment import LayerRows

TEXT = np.random.default_rng(7).integers(0, 256, 64).astype(np.int32)

Done = tuple[list[np.ndarray], list[tuple[LayerRows, ...]]]


def all_operations(context: Context, base: int = 3) -> Done:
    """Append, rewrite, read, truncate, splice between rows of another sequence, and append to three sequences in one
    batch; return logits and rows, the first of each from before any splice. The context has three sequences. `base`:
    where the spliced rows were compiled, if not 3, wrongly."""

    def read(seq_id: int) -> tuple[LayerRows, ...]:
        return context.read(seq_id, 0, context.length(seq_id), base=0, dtype="f32")

    context.append({0: TEXT})
    logits, rows = [context.logits()], [read(0)]
    if context.supports("splice") is not None:  # recurrent: restored where it was
        context.clear()
        context.splice(0, 0, TEXT, rows[0], 0)
        context.append({0: TEXT[:3]})
        return [*logits, context.logits()], [*rows, read(0)]
    context.rewrite(0, [5, 6, 20, 33], TEXT[:4])
    moved = context.read(0, 8, 48, base=3)
    rows.append(read(0))
    for token in TEXT[:40]:  # cells of two sequences by turns, of which some become free
        context.append({1: [int(token)], 2: [int(token)]}, output="none")
    context.truncate(1, 0)
    context.splice(1, 0, TEXT[8:56], moved, base)
    context.rewrite(1, [1, 7, 30], TEXT[:3])
    context.truncate(0, 16)
    context.splice(0, 16, TEXT[8:24], [one.cut(slice(0, 16)) for one in moved], base)
    rows += [read(seq_id) for seq_id in range(3)]
    context.append(dict.fromkeys(range(3), TEXT[:3]))
    logits += [context.logits(-1 - seq_id) for seq_id in range(3)]
    return logits, rows
