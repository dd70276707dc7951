"""Compares logits case by case, and writes the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.marked import grid
from bench.reference.ours import Logits

COSINE = 0.9999  # of ours and the author's logits, at least


@dataclass(frozen=True)
class Compared:
    """One state of one case: our logits and the author's, and for scale how far his are from those of a stale cache."""

    group: str
    case: str
    state: str
    distance: float  # 1 - cosine
    from_stale: float
    same: bool  # the same decision

    @property
    def conforms(self) -> bool:
        return self.same and self.distance <= 1 - COSINE


def distance(one: Logits, other: Logits) -> float:
    """1 - cosine, in float64."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(1 - a @ b / np.sqrt((a @ a) * (b @ b)))


def decision(logits: Logits, answers: Sequence[int]) -> tuple[int, int]:
    """The most likely token of all, and that of the answers."""
    return int(logits.argmax()), int(logits[list(answers)].argmax()) if answers else 0


def compare(
    group: str,
    case: str,
    ours: Mapping[str, Logits],
    author: Mapping[str, Logits],
    answers: Sequence[int],
    stale: Logits,
) -> list[Compared]:
    """Compare all states of a case. `answers`: first tokens of the answers; `stale`: the author's logits without an
    edit. Raises ValueError unless both have the same states."""
    if ours.keys() != author.keys():
        raise ValueError(f"{case}: {sorted(ours)} cannot be compared with {sorted(author)}")
    return [
        Compared(
            group,
            case,
            state,
            distance(ours[state], author[state]),
            distance(author[state], stale),
            decision(ours[state], answers) == decision(author[state], answers),
        )
        for state in author
    ]


def table(found: Sequence[Compared]) -> str:
    """A row for each state."""
    rows = []
    for state in dict.fromkeys(one.state for one in found):
        some = [one for one in found if one.state == state]
        same, far = sum(one.same for one in some), median(one.from_stale for one in some)
        cells = [state, str(len(some)), f"{max(one.distance for one in some):.0e}", f"{same} of {len(some)}"]
        rows.append(" | ".join([*cells, "" if state == "stale" else f"{far:.0e}"]))
    return grid("state | cases | 1 - cosine at most | same decision | author's from his stale, median", rows)


def failures(found: Sequence[Compared]) -> list[str]:
    """A line for each comparison that fails."""
    return [
        f"{one.group}, {one.case}, {one.state}: 1 - cosine {one.distance:.1e}, same decision: {one.same}"
        for one in found
        if not one.conforms
    ]
