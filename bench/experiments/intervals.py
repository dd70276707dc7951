"""Figures with their 95% intervals, by resampling memories: what is asked of one memory is one cluster.

A figure is a sum of means, each with a weight: a share, a difference of two shares, a slope; or a ratio of two sums.
All its parts are resampled together, so a difference is that of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from bench.experiments.table import Table, Value

RESAMPLES = 10_000
DIGITS = 12  # a level line is level
Z = {0.95: 1.959964, 0.90: 1.644854}


@dataclass(frozen=True)
class Part:
    """The mean of a column of some rows, and how much it weighs. Empty cells are left out."""

    rows: Table
    column: str
    weight: float = 1.0


@dataclass(frozen=True)
class Figure:
    """A value with its interval: NaN where there was nothing to measure. `n`: the fewest observations of a part."""

    value: float
    low: float
    high: float
    n: int
    clusters: int


NOTHING = Figure(math.nan, math.nan, math.nan, 0, 0)


def figure(parts: Sequence[Part], *, level: float = 0.95, shares: bool = True) -> Figure:
    """`shares`: observations are 0 or 1, so one without any variation gets Wilson's interval over its clusters."""
    found = _gathered(parts)
    if found is None:
        return NOTHING
    sums, counts = found
    weights = np.array([part.weight for part in parts])
    value = round(float((sums.sum(0) / counts.sum(0)) @ weights), DIGITS) + 0.0
    drawn = _resampled(sums, counts) @ weights
    tail = 50 * (1 - level)
    low, high = (round(float(found), DIGITS) + 0.0 for found in np.percentile(drawn, (tail, 100 - tail)))
    if low == high and shares:  # as many clusters may still hide some that differ
        z = Z[level]
        rest = z * z / (len(sums) + z * z) * math.sqrt(len(parts))
        least, most = (math.fsum(f(weight, 0.0) for weight in weights) for f in (min, max))
        low, high = max(least, value - rest), min(most, value + rest)
    return Figure(value, low, high, int(counts.sum(0).min()), len(sums))


def ratio(over: Part, under: Part) -> Figure:
    """A sum over another one: what one way of doing it took in all, of what the other took; a part of a whole."""
    found = _gathered([over, under])
    if found is None or not found[0][:, 1].sum():
        return NOTHING
    sums, counts = found
    above, below = (_draws(len(sums), 0) @ sums).T
    low, high = np.percentile(above[below > 0] / below[below > 0], (2.5, 97.5))
    value = sums[:, 0].sum() / sums[:, 1].sum()
    low, value, high = (round(float(each), DIGITS) for each in (low, value, high))
    return Figure(value, low, high, int(counts.sum(0).min()), len(sums))


def _gathered(parts: Sequence[Part]) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Sums and counts of each part's cells by cluster, [clusters, parts]; None where one has none."""
    pairs = [[(row["case"], float(row[part.column])) for row in part.rows if row[part.column] != ""] for part in parts]
    if not all(pairs):
        return None
    names: dict[Value, int] = {}
    for case, _ in (pair for each in pairs for pair in each):
        names.setdefault(case, len(names))
    sums, counts = np.zeros((2, len(names), len(parts)))
    for index, each in enumerate(pairs):
        for case, value in each:
            sums[names[case], index] += value
            counts[names[case], index] += 1
    return sums, counts


def _resampled(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The means of each resample, [RESAMPLES, parts]; one that misses all of a part's clusters is drawn again."""
    found: list[NDArray[np.float64]] = []
    for batch in count():
        drawn = _draws(len(sums), batch)
        total, of = drawn @ sums, drawn @ counts
        there = (of > 0).all(1)
        found.append(total[there] / of[there])
        if sum(map(len, found)) >= RESAMPLES:
            break
    return np.concatenate(found)[:RESAMPLES]


@lru_cache(maxsize=4)
def _draws(clusters: int, batch: int) -> NDArray[np.float64]:
    """How often each cluster is in each resample, [RESAMPLES, clusters]: so many of them, with replacement."""
    rng = np.random.default_rng(batch)
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), RESAMPLES).astype(np.float64)


def equivalent(parts: Sequence[Part], margin: float) -> bool:
    """Two one-sided tests at 5%: whether the 90% interval is within the margin of 0, on either side."""
    found = figure(parts, level=0.90)
    return -margin < found.low and found.high < margin


def slope(tables: Iterable[Table], column: str) -> Figure:
    """Change a step of the mean of each table, by least squares."""
    rows = list(tables)
    steps = np.arange(len(rows)) - (len(rows) - 1) / 2
    weights = steps / max(float(steps @ steps), 1e-300)
    return figure([Part(each, column, float(w)) for each, w in zip(rows, weights, strict=True)], shares=False)
