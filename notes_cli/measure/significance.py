"""Choosing among ways of doing something by whether each was right, case by case: what is proven, and what is not.

All ways are tried on the same cases, so two are compared where they differ. Intervals are those of Clopper and Pearson
at 95%: exact, and wide for few cases. A way is proven better than another if, of the cases in which one of the two is
right and the other is wrong, it is right in more than half by the whole interval: six of six are, five of five are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
LEAST = 24  # cases: fewer prove nothing worth while
LOSS = 0.15  # a cheaper way is as good as the best one if it is proven to lose less than this share of the cases

Right = Sequence[bool]  # whether a way was right, of each case


@dataclass(frozen=True, slots=True)
class Choice:
    """The way to take. `proven`: better than the default; else it is the default, and `why` says what is missing."""

    name: str
    proven: bool
    why: str


def interval(count: int, of: int, level: float = LEVEL) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share; (0, 1) where nothing was counted."""
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else _share(lambda p: _at_least(count, of, p) >= tail)
    high = 1.0 if count == of else _share(lambda p: 1 - _at_least(count + 1, of, p) < tail)
    return low, high


def better(mine: Right, theirs: Right) -> bool:
    """Whether `mine` is proven to be right more often."""
    wins, losses = (sum(a and not b for a, b in zip(*pair, strict=True)) for pair in ((mine, theirs), (theirs, mine)))
    return interval(wins, wins + losses)[0] > 0.5


def as_good(mine: Right, best: Right) -> bool:
    """Whether `mine` is proven to lose hardly any of the cases that `best` wins."""
    losses = sum(b and not a for a, b in zip(mine, best, strict=True))
    return interval(losses, len(best))[1] <= LOSS


def choose(right: Mapping[str, Right], default: str, classes: Sequence[Sequence[str]], safest: Sequence[str]) -> Choice:
    """The default, unless others are proven better; then the cheapest of these that is as good as the best of them.

    `classes`: names by cost, the cheapest first; in one class, and where two are right equally often, the safer wins:
    `safest` has the safest first.
    """
    cases = len(right.get(default, ()))
    told = {name: count_of(ways) for name, ways in right.items()}
    if cases < LEAST:
        return Choice(default, False, f"{cases} cases prove nothing: {LEAST} at least are needed")
    rivals = [name for name in safest if name != default and name in right and better(right[name], right[default])]
    if not rivals:
        return Choice(default, False, f"nothing was proven better than {default}, which is right in {told[default]}")
    best = max(rivals, key=lambda name: sum(right[name]))  # the first, so the safest, of several
    good = [name for name in rivals if name == best or as_good(right[name], right[best])]
    name = next(name for names in classes for name in sorted(names, key=safest.index) if name in good)
    return Choice(name, True, f"{name} is right in {told[name]}, {default} in {told[default]}")


def count_of(right: Right) -> str:
    """How many were right, with the interval, for people."""
    return told_of(sum(right), len(right))


def told_of(count: int, of: int) -> str:
    """A count with the interval of its share, for people."""
    low, high = interval(count, of)
    return f"{count} of {of} ({low:.2f} to {high:.2f})"


def _at_least(count: int, of: int, share: float) -> float:
    """The probability of so many or more."""
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


def _share(true: Callable[[float], bool]) -> float:
    """Where between 0 and 1 a condition begins to hold that holds from there on."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if true(middle) else (middle, high)
    return high
