"""Whether keys rotate as native/notes_graph.cpp says: measured on the model and the context at hand.

The table there was made by reading llama.cpp's graphs and measuring random models of each architecture. A file that
says something else of itself, or a llama.cpp whose graph has changed, would make every splice silently wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.context import Context
from notes_cli.engine.segment import Tokens

TOKENS = 8
TEXT = "On 2026-06-01 the rule was: 14 days, paid in euros."
ROUNDING = 5e-5  # of rows in f16, squared and relative: 1e-7, and room for what a steep model makes of it in K alone
AMPLIFIED = 4.0  # what rounding grows to in a layer shows in its V, which is not rotated; in K it is up to twice that
FLOATS = 8 / 2**24  # radians a position by which llama.cpp's angles, floats, may be off


@dataclass(frozen=True, slots=True)
class RotationCheck:
    """The layer whose keys are farthest off: computed at position 0, and `distance` positions on and rotated back."""

    distance: int
    layer: int
    error: float  # the squared difference, relative to the squares of the keys
    bound: float  # what rounding can explain

    @property
    def right(self) -> bool:
        return self.error <= self.bound  # NaN is not

    @property
    def reason(self) -> str:
        """Why no rows may be moved."""
        return (
            f"its keys do not rotate as notes expects: those of layer {self.layer} are off by {self.error:.2g} after "
            f"{self.distance} positions, where rounding explains {self.bound:.2g}. "
            "Skills can still be put back where they were compiled, at the start of a prompt"
        )


def measure_rotation(context: Context, seq_id: int) -> RotationCheck | None:
    """Decode a few tokens at the start and near the middle of the context, rotate the latter back, and compare.

    The sequence is empty before and afterwards. None where the context moves no rows anyway, or has no room to move
    them in.
    """
    distance = _distance(context)
    if context.supports("splice") is not None or not distance:
        return None
    tokens = _tokens(context)
    try:
        context.decode_at(seq_id, 0, tokens)
        here = context.read(seq_id, 0, TOKENS, base=0, dtype="f32")
        context.truncate(seq_id, 0)
        context.decode_at(seq_id, distance, tokens)
        there = context.read(seq_id, distance, TOKENS, base=0, dtype="f32")
    finally:
        context.truncate(seq_id, 0)
    floats = (FLOATS * distance) ** 2
    found = []
    for one, other in zip(here, there, strict=True):
        bound = ROUNDING + floats + AMPLIFIED * _difference(one.v, other.v)
        found.append(RotationCheck(distance, one.layer, _difference(one.k, other.k), bound))
    return max(found, key=lambda check: check.error / check.bound if check.bound > 0 else np.inf)


def _distance(context: Context) -> int:
    """Half of the context, or as far as this model lets rows go; 0 if nowhere."""
    distance = context.n_ctx // 2
    while distance >= TOKENS and context.can_move(0, distance, TOKENS) is not None:
        distance //= 2
    return distance if distance >= TOKENS else 0


def _tokens(context: Context) -> Tokens:
    """Some of a text, as a tokenizer may be of any kind; of the first ones if it has too few."""
    tokens = context.model.tokenize(TEXT)[:TOKENS]
    return tokens if len(tokens) == TOKENS else np.arange(TOKENS, dtype=np.int32) % context.model.n_vocab


def _difference(here: NDArray[np.floating], there: NDArray[np.floating]) -> float:
    one, other = here.astype(np.float64), there.astype(np.float64)
    squares = float((one**2).sum())
    if not squares:
        return float((other**2).sum() > 0)
    return float(((one - other) ** 2).sum() / squares)
