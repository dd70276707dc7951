"""Influence: on which tokens after it does the value of a field have an effect? Measured by giving it another one.

While it reads, a model writes what follows from a field onto later tokens. Their V rows (K where V is part of it) are
compared with those under another value; V carries no position, so a value of another length does not matter. Before
anybody knows the new value a counterfactual one is taken.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import Change, change, stretches
from notes_cli.editing.prefill import prefill
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.patches import shifted
from notes_cli.engine.segment import Segment, floats


def counterfactual(value: str) -> str:
    """Another value of the same kind and length: other numbers (2026-06-01: 2021-01-05), or another word."""
    other = re.sub(r"\d+", lambda number: _other(number[0]), value)
    return other if other != value else ("other" if value != "other" else "another")


def _other(number: str) -> str:
    """Five less, or four more where that would be no month and no day any more; as many digits."""
    found = int(number) - 5 if int(number) > 5 else int(number) + 4
    if len(number) > 2 and len(str(found)) < len(str(int(number))):
        found = int(number) + 5  # 100 becomes 105, not 095
    return f"{found:0{len(number)}d}"


def influence(notebook: Notebook, segment: Segment, name: str) -> NDArray[np.float32]:
    """What a counterfactual value of the field changes: its `deviation`, [n_tokens]. The notebook is a scratch one."""
    value = next(span.value for span in segment.fields if span.name == name)
    other = change(notebook.context.model, segment, {name: counterfactual(value)})
    return np.zeros(len(segment), np.float32) if other is None else deviation(notebook, segment, other)


def deviation(notebook: Notebook, segment: Segment, change: Change, layers: int | None = None) -> NDArray[np.float32]:
    """Relative change of each token's rows from the segment to the corrected text, [n_tokens].

    The mean over the attention layers, or over the first few of them. 0 for what gives way to other tokens, what
    precedes it, and blocks without a change. Costs a pass over the corrected text, or over its blocks with a change.

    The notebook is a scratch one: what it holds is dropped.
    """
    found = np.zeros(len(segment), np.float32)
    left, shift, inside = segment.base - segment.first, shifted(change.patches), change.inside
    parts = stretches(segment, change)
    passes = prefill(notebook, segment.context, [part.tokens for part in parts], "f32")
    for part, rows in zip(parts, passes, strict=True):
        first = next(patch.first for patch in change.patches if patch.first >= part.first)
        here = np.array([position for position in range(first, part.last) if position not in inside], int)
        there = np.array([shift(int(position)) for position in here], int) - part.start
        pairs = [pair for pair in zip(segment.layers, rows, strict=True) if pair[0].part == "attention"][:layers]
        for mine, theirs in pairs:
            a, b = (mine.v, theirs.v) if mine.v.shape[1] else (mine.k, theirs.k)
            was, now = floats(a[left + here]), floats(b[there])
            found[here] += np.linalg.norm(now - was, axis=1) / (np.linalg.norm(was, axis=1) + 1e-6) / len(pairs)
    return found
