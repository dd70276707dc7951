"""Documents say only what is so: figures are those that programs have left, the package is typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
REVERSED = (ROOT / "docs" / "results-reversed.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "training" / "tiny" / "measured.txt").read_text(encoding="utf-8")
NOTES = "**Where does a decision rest?**"
LOOKS_UP = "**Training decides it.**"
KINDS = ("table", "date", "amount")
WORDS = ("known", "held-out")
# What a row of the table in the README is called, and what the figure is called that `training.tiny.measure` prints.
ROWS = {
    "right, asked directly": "plain, direct",
    "right after a chain of thought": "plain, reasoned",
    "right after an erratum": "erratum, direct",
    "spliced decides as recomputed": "spliced as recomputed",
    "**only the field's own rows are new**: acts on the new value": "fields above: field",
    "**only the rows after the field are new**: acts on the new value": "fields above: follow",
    "after a chain of thought, only the field's own rows are new": "fields above, thinking: field",
    "fields below their rules: only the value's own rows are new": "fields below: field",
    "after an older version of the same policy: spliced decides as recomputed": "two versions: rotated as recomputed",
    "the same without the rotation": "two versions: not rotated as recomputed",
}


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The first table after a text whose header has more than two columns: cells by what their row is called."""
    table = re.search(r"(?:^\|.*\n)+", text[text.index(heading) :], re.M)
    assert table
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return {row[0]: row[1:] for row in cells[2:]}


def measured(kind: str, words: str, figure: str) -> float:
    """A figure as it was printed."""
    line = re.search(rf"^{re.escape(f'{kind}, {words} words, {figure}')} +([\d.]+)  of \d+$", MEASURED, re.M)
    assert line, figure
    return float(line[1])


@pytest.mark.parametrize("name", ROWS)
def test_the_finding_in_the_readme_has_the_figures_that_were_measured(name: str) -> None:
    found = [" / ".join(f"{measured(kind, words, ROWS[name]):.2f}" for words in WORDS) for kind in KINDS]
    assert rows(README, NOTES)[name] == found


def test_the_finding_in_the_readme_is_whole() -> None:
    assert list(rows(README, NOTES)) == list(ROWS)


def test_what_the_readme_says_of_the_reversed_model() -> None:
    """Its own rows recover all, those after them nothing, by each of the ways that the paper has it otherwise."""
    said = README[README.index(LOOKS_UP) :]
    ordinary = rows(REVERSED, "## The editing landscape")
    stale, field, erratum = (ordinary[method][3] for method in ("stale", "field", "erratum"))
    text = f"the corrected text in {field} of 300 decisions, an erratum in {erratum}, nothing done in {stale}"
    assert text in " ".join(said.split())


def test_the_package_says_that_it_is_typed() -> None:
    """Without the marker type checkers take everything of it for Any."""
    assert (ROOT / "notes_cli" / "py.typed").is_file()
