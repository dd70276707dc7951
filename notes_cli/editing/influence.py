"""Influence: on which tokens behind it does the value of a field have an effect? Measured by giving it another one.

While it reads, a model writes what follows from a field onto later tokens. Their V rows (K where V is part of it) are
compared with those under a counterfactual value; V carries no position, so a value of another length does not matter.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import change
from notes_cli.engine.context import Context
from notes_cli.engine.notebook import Notebook, shifted
from notes_cli.engine.segment import Segment


def counterfactual(value: str) -> str:
    """Another value of the same kind: the last digit of each number changed (2026-06-01: 2021-01-06), or a word."""
    other = re.sub(r"\d+", lambda number: number[0][:-1] + str((int(number[0][-1]) + 5) % 10), value)
    return other if other != value else ("other" if value != "other" else "another")


def influence(context: Context, segment: Segment, name: str) -> NDArray[np.float32]:
    """Relative change of each token's rows, mean over the layers, [n_tokens]; 0 for the field and what stands before.

    Uses sequence 0 of the context, which is empty before and after.
    """
    value = next(span.value for span in segment.fields if span.name == name)
    other = change(context.model, segment, {name: counterfactual(value)})
    found = np.zeros(len(segment), np.float32)
    if other is None:
        return found
    context.clear()
    notebook = Notebook(context)
    notebook.append(segment.context)
    notebook.flush()
    notebook.append(other.tokens)
    notebook.flush()
    base = segment.base if segment.first else 0
    rows = context.read(0, base, len(notebook) - base, base=base, dtype="f32")
    context.clear()

    shift = shifted(other.patches)
    own = {position for patch in other.patches for position in range(patch.first, patch.last)}
    here = np.array([position for position in range(other.patches[0].first, len(segment)) if position not in own], int)
    there = np.array([shift(int(position)) for position in here], int)
    left = segment.base - segment.first
    layers = [pair for pair in zip(segment.layers, rows, strict=True) if pair[0].part == "attention"]
    for mine, theirs in layers:
        a, b = (mine.v, theirs.v) if mine.v.shape[1] else (mine.k, theirs.k)
        was, now = (part.astype(np.float32) for part in (a[left + here], b[left + there]))
        found[here] += np.linalg.norm(now - was, axis=1) / (np.linalg.norm(was, axis=1) + 1e-6) / len(layers)
    return found
