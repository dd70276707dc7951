"""Choices by paired correctness, and findings on note taking, from synthetic tables."""

from __future__ import annotations

import math

import pytest
from notes_cli.library.profiles import Measured, Profile
from notes_cli.measure.battery import LEAST, as_good, better, choose, interval
from notes_cli.measure.calibrate import CLASSES, ROW, SAFEST, finding, is_page, page, row

from notes_cli.engine.segment import Identity


def right(count: int, of: int = 52) -> list[bool]:
    """The first cases right, the others wrong."""
    return [number < count for number in range(of)]


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
    assert not better(right(30), right(30)[::-1])  # each wins where the other loses
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
    assert choose(enough, "erratum", CLASSES, SAFEST).name == "field"


IDENTITY = Identity("some|model", "llama", "Q8_0", "f" * 64, "r", "norm base 10000", "f16/f16", "")


def made(stale: int, field: int, suffix: int, cases: int = 40, methods: tuple[str, ...] = ()) -> Profile:
    """A profile with so many decisions equal to the recompute's, by method."""
    same = {"stale": stale, "field": field, "suffix": suffix, "erratum": suffix, "recompute": cases}
    measured = [
        Measured("method", name, way, cases, count, count, 0.9, 10, 1.0)
        for name, count in same.items()
        if name in (methods or same)
        for way in ("direct", "reasoned")
    ]
    methods_used = {"direct": "erratum", "reasoned": "suffix"}
    return Profile(IDENTITY, "f16/f16", cases, {"direct": 1, "reasoned": 1}, methods_used, "now", 1, "early", measured)


@pytest.mark.parametrize(
    ("stale", "field", "suffix", "cases", "kind"),
    [
        (0, 0, 40, 40, "takes notes"),
        (2, 9, 40, 40, "takes notes"),  # the field changes 7 of 38
        (0, 20, 40, 40, "partly"),
        (0, 38, 40, 40, "looks up"),
        (27, 39, 40, 40, "looks up"),  # the field changes 12 of 13: that is proof, of however many wrong decisions
        (34, 40, 40, 40, "looks up"),  # six of six
        (35, 40, 40, 40, "unable"),  # five of five prove nothing
        (23, 25, 25, 40, "unable"),  # not even recomputing all after the field changes them
        (40, 40, 40, 40, "unable"),  # none is changed
        (10, 8, 40, 40, "takes notes"),  # fewer than stale counts as none
        (0, 0, 23, 23, "open"),
    ],
)
def test_what_is_found(stale: int, field: int, suffix: int, cases: int, kind: str) -> None:
    """Only decisions that the new value changes count."""
    found = finding(made(stale, field, suffix, cases))
    assert found is not None and found.kind == kind
    assert "decisions" in found.why


def test_without_correction_in_place_nothing_is_found() -> None:
    """For a model whose K/V cannot be recomputed in place the report says so, and the row has all columns."""
    profile = made(0, 0, 40, methods=("erratum", "recompute"))
    assert finding(profile) is None and "cannot be corrected in place" in page(profile, "now")
    assert len(row(profile)) == len(ROW) and row(profile)[-1] == ""


def test_a_page() -> None:
    """It begins with the finding, has every method, and ends with the row, whose cells are escaped."""
    profile = made(0, 0, 40)
    text = page(profile, "notes 9, 2026-01-01")
    assert is_page(text.encode()) and not is_page(b"# Mine\n") and not is_page(b"")
    assert (
        "Measured by notes 9, 2026-01-01, over 40 decisions" in text
        and f"**Takes notes**: {finding(profile).why}." in text
    )  # type: ignore[union-attr]
    for name in ("stale", "field", "suffix", "recompute"):
        assert f"\n| {name} | 10 | 0.9000 |" in text
    head, marks, cells = text.splitlines()[-3:]
    assert head.count("|") == marks.count("|") == cells.count("|") == len(ROW) + 1
    assert cells == (
        "| some/model (llama) | Q8_0 | f16/f16 | 40 of 40 | 0 of 40 | 0 of 40 | 40 of 40 | 40 of 40 |  |  | "
        "erratum / suffix | takes notes |"
    )
    assert "several skills: not measured" in text
