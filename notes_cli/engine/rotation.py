"""Verifies by measurement that this model's keys rotate as native/notes_graph.cpp declares.

That table was made from llama.cpp's graphs and random models of each architecture. A file with unusual metadata, or a
changed llama.cpp graph, would make every splice silently wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.context import Context
from notes_cli.engine.segment import Tokens

TOKENS = 8
TEXT = "On 2026-06-01 the rule was: 14 days, paid in euros."
# squared relative rounding of f16 rows: 1e-7, plus a margin for steep models, where it grows in K alone
ROUNDING = 5e-5
AMPLIFIED = 4.0  # V is not rotated and shows the rounding of a layer; K has up to twice that
FLOATS = 8 / 2**24  # radians per position by which llama.cpp's float angles may be off


@dataclass(frozen=True, slots=True)
class RotationCheck:
    """The layer with the largest error of its keys, computed `distance` positions on and rotated back to 0."""

    distance: int
    layer: int
    error: float  # squared difference, relative to the squared keys
    bound: float  # explained by rounding

    @property
    def right(self) -> bool:
        return self.error <= self.bound  # false for NaN

    @property
    def reason(self) -> str:
        """Why no K/V may be moved."""
        return (
            f"its keys do not rotate as notes expects: those of layer {self.layer} are off by {self.error:.2g} after "
            f"{self.distance} positions, where rounding explains {self.bound:.2g}. "
            "Skills can still be put back where they were compiled, at the start of a prompt"
        )


def measure_rotation(context: Context, seq_id: int) -> RotationCheck | None:
    """Decode a few tokens at the start and near the middle of the context, rotate the latter back, and compare. The
    sequence is empty before and after. Returns None where the context cannot move K/V, or has no room to."""
    distance = _distance(context)
    if context.supports("splice") is not None or not distance:
        return None
    tokens = _tokens(context)
    try:
        context.decode_at(seq_id, 0, tokens)
        at_start = context.read(seq_id, 0, TOKENS, base=0, dtype="f32")
        context.truncate(seq_id, 0)
        context.decode_at(seq_id, distance, tokens)
        moved = context.read(seq_id, distance, TOKENS, base=0, dtype="f32")
    finally:
        context.truncate(seq_id, 0)
    floats = (FLOATS * distance) ** 2
    checks = []
    for layer, moved_layer in zip(at_start, moved, strict=True):
        bound = ROUNDING + floats + AMPLIFIED * _difference(layer.v, moved_layer.v)
        checks.append(RotationCheck(distance, layer.layer, _difference(layer.k, moved_layer.k), bound))
    return max(checks, key=lambda check: check.error / check.bound if check.bound > 0 else np.inf)


def _distance(context: Context) -> int:
    """Return half of the context or the largest distance that this model allows; 0 if none."""
    distance = context.n_ctx // 2
    while distance >= TOKENS and context.can_move(0, distance, TOKENS) is not None:
        distance //= 2
    return distance if distance >= TOKENS else 0


def _tokens(context: Context) -> Tokens:
    """Return tokens of a sample text, or the first ids of a vocabulary in which it has too few."""
    tokens = context.model.tokenize(TEXT)[:TOKENS]
    return tokens if len(tokens) == TOKENS else np.arange(TOKENS, dtype=np.int32) % context.model.n_vocab


def _difference(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    a, b = first.astype(np.float64), second.astype(np.float64)
    squares = float((a**2).sum())
    if not squares:
        return float((b**2).sum() > 0)
    return float(((a - b) ** 2).sum() / squares)
