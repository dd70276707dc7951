"""make reference: differences fail it, and its table has the worst of each state; PyTorch is not needed."""

from __future__ import annotations

import numpy as np
import pytest

from bench.reference import __main__ as command
from bench.reference import ours, report


def logits(*values: float) -> ours.Logits:
    return np.array(values, np.float32)


def test_differences_fail() -> None:
    """Another direction, another likeliest token, another order of the answers; scale alone does not."""
    stale = {"stale": logits(1, 2, 3)}
    assert report.failures(report.compare("a", {"stale": logits(2, 4, 6)}, stale, [0, 1])) == []
    (line,) = report.failures(report.compare("a", {"stale": logits(1, 2, 3.01)}, stale, [0, 1]))
    assert line.startswith("a, stale: 1 - cosine ") and line.endswith("same decision: True")
    near = {"stale": logits(1, 2, np.nextafter(np.float32(2), 3))}
    (line,) = report.failures(report.compare("a", {"stale": logits(1, 2, 2)}, near, []))
    assert line.endswith("same decision: False")
    assert report.decision(logits(1, 2, 9), [0, 1]) != report.decision(logits(2, 1, 9), [0, 1])
    with pytest.raises(ValueError, match=r"a: .* cannot be compared with"):
        report.compare("a", {}, stale, [])


def test_the_table_has_the_worst_of_each_state() -> None:
    """With the number of decisions that agree, and how far the state is from a stale cache."""
    found = [
        report.Compared("a", "erratum", 1e-9, 0.25, True),
        report.Compared("b", "erratum", 4e-9, 0.75, False),
        report.Compared("a", "stale", 0.0, 0.0, True),
    ]
    assert report.table({"m": found}).split("\n")[2:] == [
        "| erratum | 4e-09 | 1 of 2 | 5e-01 |",
        "| stale | 0e+00 | 1 of 1 | 0e+00 |",
    ]


def test_the_page_shows_that_every_case_conforms() -> None:
    """Two models, every state."""
    page = command.PAGE.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.split("\n") if line.startswith("| ") and " of " in line]
    states = [*ours.EDITS, ours.FULL, *(ours.TRANSPLANTED + state for state in ours.EDITS), ours.OTHER_LENGTH]
    assert [row[0] for row in rows] == states
    for row in rows:
        for furthest, same in ((row[1], row[2]), (row[4], row[5])):
            agreed, cases = same.split(" of ")
            assert agreed == cases != "0" and float(furthest) <= report.DISTANCE
