"""The zoo: what fails it, what a control cannot show, and what the page marks as amplified."""

from __future__ import annotations

import pytest
from zoo import zoo_model

from bench import zoo
from bench import zoo_model as judge

LINE: zoo.Line = {
    "model": "m",
    "column": "f16 plain on one",
    **dict.fromkeys(zoo.OPERATIONS, "exact"),
    "why": "",
    "errors": {"splice": {"first": 0.0, "rows": 1e-6, "logits": 1e-6}, "no rotation": {}},
    "missed": [],
    "blind": [],
    "amplified": [],
}


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, False),
        ({"missed": ["no rotation"]}, True),
        ({"blind": ["no rotation"]}, False),
        ({"amplified": ["splice"]}, False),
        ({"restore": "wrong"}, True),
        ({"rewrite": "crash"}, True),
        ({"splice": "refused"}, False),
    ],
)
def test_what_fails(change: zoo.Line, fails: bool) -> None:
    """Also a control that was not called wrong: the comparison is worth nothing there."""
    assert zoo.failed({**LINE, **change}) is fails


def test_the_page_marks_what_was_amplified() -> None:
    """In the row of the model, by operation; controls that cannot show anything have a column of their own."""
    text = zoo.report([LINE, {**LINE, "model": "n", "amplified": ["splice"], "blind": ["no rotation"]}])
    assert "| m | exact | exact | exact | exact | 1e-06 | 1e-06 |  |" in text
    assert "| n | exact* | exact | exact | exact | 1e-06 | 1e-06 |  |" in text
    assert "| no rotation | f16 | 1 | 1: n | 0 |" in text


def test_models_of_the_same_results_share_a_row() -> None:
    """With the largest errors of any of them; one that has other results, or another reason, has its own."""
    worse = {"splice": {"first": 0.0, "rows": 1e-5, "logits": 1e-7}}
    lines = [LINE, {**LINE, "model": "n", "errors": worse}, {**LINE, "model": "o", "rewrite": "refused"}]
    text = zoo.report(lines)
    assert "| m, n | exact | exact | exact | exact | 1e-05 | 1e-06 |  |" in text
    assert "| o | exact | exact | refused | exact | 1e-06 | 1e-06 |  |" in text


@pytest.mark.parametrize(
    ("name", "column", "blind", "amplified"),
    [
        ("apertus-dense", "q4_0 linear on one", ("distance off by one",), ()),
        ("apertus-dense", "f16 linear on one", (), ()),
        ("hrm_text-dense", "f16 plain on one", (), ("splice",)),
    ],
)
def test_models_of_either_kind(name: str, column: str, blind: tuple[str, ...], amplified: tuple[str, ...]) -> None:
    """A quarter of a position is less than a 4-bit cache rounds; a stack of stacks blows roundings up."""
    (verdict,) = judge.measure(zoo_model(name), f"^{column}$")
    assert (verdict.splice, verdict.missed, verdict.blind, verdict.amplified) == ("exact", (), blind, amplified)
