"""Choices by paired correctness, from synthetic tables."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from notes_cli.measure.battery import LEAST, as_good, better, choose, interval
from notes_cli.measure.calibrate import CLASSES, SAFEST


def right(count: int, of: int = 52) -> list[bool]:
    """The first cases right, the others wrong."""
    return [number < count for number in range(of)]


def last(count: int, of: int = 52) -> list[bool]:
    return right(count, of)[::-1]


def chosen(table: Mapping[str, list[bool]]) -> str:
    return choose(table, "erratum", CLASSES, SAFEST).name


def test_intervals_are_exact() -> None:
    """At each end the outcome has a probability of 1/40, also for thousands of cases."""
    for count, of in ((3, 7), (40, 52), (900, 1000), (7, 5000)):
        low, high = interval(count, of)

        def tail(first: int, end: int, share: float, of: int = of) -> float:
            logs = (
                math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
                + k * math.log(share) + (of - k) * math.log1p(-share)
                for k in range(first, end)
            )  # fmt: skip
            return sum(map(math.exp, logs))

        assert tail(count, of + 1, low) == pytest.approx(0.025, rel=1e-6)
        assert tail(0, count + 1, high) == pytest.approx(0.025, rel=1e-6)


def test_six_of_six_prove_it_and_five_do_not() -> None:
    """Cases where both are right or both wrong do not count."""
    assert better(right(40), right(34)) and not better(right(39), right(34))
    assert not better(right(34), right(40)) and not better(right(40), right(40))
    assert not better(right(30), last(30))  # each wins where the other loses
    assert as_good(right(52), right(52)) and not as_good(right(48), right(52)) and as_good(right(24, 24), right(24, 24))


@pytest.mark.parametrize(
    ("table", "name"),
    [
        # a recompute that ignores the field, as do the methods that edit K/V
        ({"erratum": 52, "field": 11, "selective@16": 11, "suffix": 11, "recompute": 11}, "erratum"),
        ({"erratum": 52, "field": 52, "field+erratum": 52, "suffix": 52, "recompute": 52}, "erratum"),  # a tie
        ({"erratum": 50, "field": 52, "suffix": 52, "recompute": 52}, "erratum"),  # two cases are chance
        ({"erratum": 26, "field": 26, "suffix": 26, "recompute": 26}, "erratum"),  # unknown
        ({"erratum": 0, "field": 0, "recompute": 0}, "erratum"),
        ({"erratum": 20, "field": 52, "suffix": 52, "recompute": 52}, "field"),  # as good, and cheaper
        ({"erratum": 20, "field": 52, "selective@16": 52, "suffix": 52, "recompute": 52}, "selective@16"),  # the safer
        ({"erratum": 20, "field": 44, "suffix": 52, "recompute": 52}, "suffix"),  # eight cases are too many to lose
        ({"erratum": 20, "field": 22, "suffix": 22, "recompute": 52}, "recompute"),
        ({"erratum": 20, "field+erratum": 52, "field": 52, "recompute": 52}, "field+erratum"),
        ({"erratum": 20, "recompute": 52}, "recompute"),  # a model that can do nothing else
    ],
)
def test_what_is_proven_is_taken_and_else_the_default(table: dict[str, int], name: str) -> None:
    """Correctness decides, the default stays unless another is proven better, and ties go by cost, then safety."""
    choice = choose({method: right(count) for method, count in table.items()}, "erratum", CLASSES, SAFEST)
    assert choice.name == name and choice.proven == (name != "erratum")
    assert f"{table[name]} of 52" in choice.why


@pytest.mark.parametrize("cases", [0, 1, 2, LEAST - 1])
def test_few_cases_prove_nothing(cases: int) -> None:
    """Even if all are right."""
    choice = choose({"erratum": right(0, cases), "field": right(cases, cases)}, "erratum", CLASSES, SAFEST)
    assert (choice.name, choice.proven) == ("erratum", False) and f"{LEAST} at least" in choice.why
    enough = {"erratum": right(0, LEAST), "field": right(LEAST, LEAST)}
    assert chosen(enough) == "field"
