"""Compares logits case by case, and makes the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.marked import grid
from bench.reference.ours import Logits

DISTANCE = 1e-7  # 1 - cosine of two logits that count as equal. 1e-4 would not tell a stale cache from an edited one.


@dataclass(frozen=True)
class Compared:
    """Our logits and the author's for one state of one case."""

    case: str
    state: str
    distance: float  # 1 - cosine
    from_stale: float  # of the author's from those of a stale cache, for scale
    same: bool  # the same decision

    @property
    def conforms(self) -> bool:
        return self.same and self.distance <= DISTANCE


def distance(one: Logits, other: Logits) -> float:
    """1 - cosine, in float64."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(1 - a @ b / np.sqrt((a @ a) * (b @ b)))


def decision(logits: Logits, answers: Sequence[int]) -> tuple[int, int]:
    """The most likely token of all, and the place of the most likely of the answers' first tokens."""
    return int(logits.argmax()), int(logits[list(answers)].argmax()) if answers else 0


def compare(
    case: str, ours: Mapping[str, Logits], author: Mapping[str, Logits], answers: Sequence[int]
) -> list[Compared]:
    """Compare all states of a case. Raises ValueError unless both have the same ones."""
    if ours.keys() != author.keys():
        raise ValueError(f"{case}: {sorted(ours)} cannot be compared with {sorted(author)}")
    found = []
    for state, logits in author.items():
        same = decision(ours[state], answers) == decision(logits, answers)
        found.append(Compared(case, state, distance(ours[state], logits), distance(logits, author["stale"]), same))
    return found


def table(found: Sequence[Compared]) -> str:
    """A row for each state."""
    rows = []
    for state in dict.fromkeys(one.state for one in found):
        some = [one for one in found if one.state == state]
        same, scale = sum(one.same for one in some), median(one.from_stale for one in some)
        largest = max(one.distance for one in some)
        rows.append(f"{state} | {len(some)} | {largest:.0e} | {same} of {len(some)} | {scale:.0e}")
    return grid("state | cases | 1 - cosine at most | same decision | 1 - cosine from stale", rows)


def failures(found: Sequence[Compared]) -> list[str]:
    """A line for each comparison that fails."""
    failed = [one for one in found if not one.conforms]
    return [f"{one.case}, {one.state}: 1 - cosine {one.distance:.1e}, same decision: {one.same}" for one in failed]
