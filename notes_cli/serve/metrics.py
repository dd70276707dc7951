"""Counters of the server: tokens, outcomes and times. The decode thread writes them, but for the outcomes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


@dataclass(slots=True)
class Times:
    """Durations, by the first bound that they do not exceed; the last is for all others."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


@dataclass(slots=True)
class Metrics:
    """Tokens of prompts by how they came about, tokens of answers, and how requests ended."""

    decoded: int = 0
    spliced: int = 0
    live: int = 0
    written: int = 0
    steps: int = 0
    preempted: int = 0  # answers that made room for others
    outcomes: Counter[str] = field(default_factory=Counter)  # answered, failed, gone, refused
    first: Times = field(default_factory=Times)  # until the first token could be chosen
    queued: Times = field(default_factory=Times)
