"""Figures in the documents are those that programs have stored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FINDINGS = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "training" / "tiny" / "measured.txt").read_text(encoding="utf-8")
NOTES = "## On the tiny model"
KINDS = ("table", "date", "amount")
WORDS = ("known", "held-out")
# Row of the table in findings.md -> name of the figure that `training.tiny.measure` prints.
ROWS = {
    "right, asked directly": "plain, direct",
    "right after an erratum": "erratum, direct",
    "spliced: same decision as recomputed": "spliced as recomputed",
    "**only the field's own rows are new**: decides by the new value": "fields above: field",
    "**only the rows after the field are new**: decides by the new value": "fields above: follow",
    "only the field's own rows are new, after a chain of thought": "fields above, thinking: field",
}


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The first table after a heading: the other cells of each row by its first."""
    found = re.search(r"(?:^\|.*\n)+", text[text.index(heading) :], re.M)
    assert found
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()[2:]]
    return {row[0]: row[1:] for row in cells}


def measured(kind: str, words: str, figure: str) -> float:
    """A figure as it was printed."""
    line = re.search(rf"^{re.escape(f'{kind}, {words} words, {figure}')} +([\d.]+)  of \d+$", MEASURED, re.M)
    assert line, figure
    return float(line[1])


@pytest.mark.parametrize("name", ROWS)
def test_the_finding_has_the_figures_that_were_measured(name: str) -> None:
    found = [" / ".join(f"{measured(kind, words, ROWS[name]):.2f}" for words in WORDS) for kind in KINDS]
    shown = rows(FINDINGS, NOTES)
    assert list(shown) == list(ROWS) and shown[name] == found
