"""Compares alternatives by paired correctness over the same cases, with exact Clopper-Pearson intervals (95%).

An alternative is proven better than another if, of the cases where exactly one of them is right, the interval of its
share lies above one half: 6 of 6 suffice, 5 of 5 do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
LEAST = 24  # cases needed for any conclusion
LOSS = 0.15  # as good as the best: proven to lose less than this share of the cases

Right = Sequence[bool]  # correctness by case


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen name. `proven`: better than the default; else it is the default. `why`: the reason, for display."""

    name: str
    proven: bool
    why: str


def interval(count: int, of: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of the share `count` / `of`; (0, 1) if `of` is 0."""
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else _find_threshold(lambda p: _probability_at_least(count, of, p) >= tail)
    high = 1.0 if count == of else _find_threshold(lambda p: 1 - _probability_at_least(count + 1, of, p) < tail)
    return low, high


def better(candidate: Right, reference: Right) -> bool:
    """Return True if `candidate` is proven to be right more often."""
    pairs = [*zip(candidate, reference, strict=True)]
    wins, losses = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return interval(wins, wins + losses)[0] > 0.5


def as_good(candidate: Right, best: Right) -> bool:
    """Return True if `candidate` is proven to lose less than LOSS of the cases to `best`."""
    losses = sum(b and not a for a, b in zip(candidate, best, strict=True))
    return interval(losses, len(best))[1] <= LOSS


def choose(right: Mapping[str, Right], default: str, classes: Sequence[Sequence[str]], safest: Sequence[str]) -> Choice:
    """Return the default unless others are proven better; of those, the cheapest that is as good as the best.
    `classes`: names by class of cost, cheapest first. `safest`: all names, safest first, to break ties."""
    cases = len(right.get(default, ()))
    counts = {name: count_of(by_case) for name, by_case in right.items()}
    if cases < LEAST:
        return Choice(default, False, f"{cases} cases prove nothing: {LEAST} at least are needed")
    rivals = [name for name in safest if name != default and name in right and better(right[name], right[default])]
    if not rivals:
        return Choice(default, False, f"nothing was proven better than {default}, which is right in {counts[default]}")
    best = max(rivals, key=lambda name: sum(right[name]))  # of several, the first: the safest
    good = [name for name in rivals if name == best or as_good(right[name], right[best])]
    name = next(name for names in classes for name in sorted(names, key=safest.index) if name in good)
    return Choice(name, True, f"{name} is right in {counts[name]}, {default} in {counts[default]}")


def count_of(right: Right) -> str:
    """Format the number of correct cases with its interval."""
    return format_count(sum(right), len(right))


def format_count(count: int, of: int) -> str:
    """Format a count with the interval of its share: "12 of 48 (0.14 to 0.40)"."""
    low, high = interval(count, of)
    return f"{count} of {of} ({low:.2f} to {high:.2f})"


def _probability_at_least(count: int, of: int, share: float) -> float:
    """Return the binomial probability of `count` or more successes out of `of`."""
    if count <= 0 or share >= 1:
        return 1.0
    if count > of or share <= 0:
        return 0.0
    logs = (
        math.lgamma(of + 1)
        - math.lgamma(k + 1)
        - math.lgamma(of - k + 1)
        + k * math.log(share)
        + (of - k) * math.log1p(-share)
        for k in range(count, of + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def _find_threshold(true: Callable[[float], bool]) -> float:
    """Return the value in [0, 1] from which a monotonic condition is true, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if true(middle) else (middle, high)
    return high
