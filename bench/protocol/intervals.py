"""Figures with their 95% intervals, by resampling memories: what is asked of one memory is one cluster.

A figure is a sum of means, each with a weight: a share, a difference of two shares, a slope. All its means are
resampled together, so a difference is that of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    weights = np.array([part.weight for part in parts])
    found = _figure(parts, lambda means: means @ weights, level)
    if found.low == found.high and shares:  # as many clusters may still hide some that differ
        z = Z[level]
        rest = z * z / (found.clusters + z * z) * math.sqrt(len(parts))
        least, most = (math.fsum(f(weight, 0.0) for weight in weights) for f in (min, max))
        return replace(found, low=max(least, found.value - rest), high=min(most, found.value + rest))
    return found


def ratio(part: Part, whole: Part, *, level: float = 0.95) -> Figure:
    """The mean of a part divided by that of the whole, both resampled together."""
    return _figure([part, whole], lambda means: means[..., 0] / means[..., 1], level)


def _figure(parts: Sequence[Part], made: Callable[[NDArray[np.float64]], NDArray[np.float64]], level: float) -> Figure:
    """What is `made` of the means of all parts (..., parts), with its interval."""
    names: dict[Value, int] = {}
    columns = [[(row["case"], row[part.column]) for row in part.rows if row[part.column] != ""] for part in parts]
    if not all(columns):
        return NOTHING
    for case, _ in (pair for column in columns for pair in column):
        names.setdefault(case, len(names))
    sums, counts = np.zeros((2, len(names), len(parts)))
    for index, column in enumerate(columns):
        for case, value in column:
            sums[names[case], index] += float(value)
            counts[names[case], index] += 1
    value = round(float(made(sums.sum(0) / counts.sum(0))), DIGITS) + 0.0
    drawn = made(_resampled(sums, counts))
    tail = 50 * (1 - level)
    low, high = (round(float(found), DIGITS) + 0.0 for found in np.percentile(drawn, (tail, 100 - tail)))
    return Figure(value, low, high, min(map(len, columns)), len(names))


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
