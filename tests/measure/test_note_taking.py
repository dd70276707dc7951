"""Note taking: findings from synthetic profiles, and the report in Markdown."""

from __future__ import annotations

import pytest

from notes_cli.engine.segment import Identity
from notes_cli.library.profiles import Measured, Profile
from notes_cli.measure.calibrate import ROW, finding, is_page, page, row

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
