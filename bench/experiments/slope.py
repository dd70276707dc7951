"""Is there a downward trend? A line by least squares, and the 95% interval of its slope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np


class Slope(NamedTuple):
    """Change a step, and its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def falls(self) -> bool:
        """Whether all of the interval is below 0."""
        return self.high < 0


def slope(values: Sequence[float]) -> Slope:
    """Of values at 1, 2, 3, ...; raise ValueError for fewer than three."""
    n = len(values)
    if n < 3:
        raise ValueError(f"a slope and its error take three values, not {n}")
    x, y = np.arange(n) - (n - 1) / 2, np.asarray(values, float)
    spread = float(x @ x)
    value = round(float(x @ y) / spread, 12) + 0.0  # a level line is level
    rest = y - y.mean() - value * x
    half = round(student(n - 2) * math.sqrt(float(rest @ rest) / (n - 2) / spread), 12)
    return Slope(value, value - half, value + half)


@cache
def student(freedom: int) -> float:
    """What Student's t stays below, up and down, with probability 0.95."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    t = np.linspace(0, 20, 200_001)
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(t * t / freedom))
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * (t[1] - t[0]))])
    return float(np.interp(0.475, area, t))
