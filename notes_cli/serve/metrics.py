"""Counts the server's tokens, request outcomes and latencies."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # upper, in seconds


@dataclass(slots=True)
class Histogram:
    """Durations counted by bucket; the last bucket has no upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


@dataclass(slots=True)
class Metrics:
    """Counters that the decode thread writes, except `outcomes`; in front of another server the event loop."""

    decoded: int = 0  # prompt tokens
    spliced: int = 0  # prompt tokens
    live: int = 0  # prompt tokens found in the prefix cache
    unreported: int = 0  # prompt tokens of another server that does not report how many were cached
    generated: int = 0  # tokens
    steps: int = 0
    preempted: int = 0  # answers
    outcomes: Counter[str] = field(default_factory=Counter)  # answered, failed, gone, refused
    first_token: Histogram = field(default_factory=Histogram)  # from arrival
    queued: Histogram = field(default_factory=Histogram)
