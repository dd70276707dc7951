"""Documents say only what is so: figures are those of docs/results.md, the package is typed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The first table after a text whose header has more than two columns: cells by what their row is called."""
    table = re.search(r"(?:^\|.*\n)+", text[text.index(heading) :], re.M)
    assert table
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return {row[0]: row[1:] for row in cells[2:]}


def test_the_methods_of_the_readme_have_the_figures_of_the_results() -> None:
    shown = rows(README, "The share of decisions that are those of a recompute")
    ordinary = rows(RESULTS, "## The editing landscape")
    moved = rows(RESULTS, "## Editing inside a transplanted skill")
    for method, found in shown.items():
        decoded, _, _, direct, _, reasoned, _ = ordinary[method]
        assert found == [decoded, direct, reasoned, moved[method][1], moved[method][3]], method
    assert len(shown) == 6


def test_the_decisions_of_the_readme_have_the_figures_of_the_results() -> None:
    shown = rows(README, "**Does it decide as a full recompute?**")
    found = rows(RESULTS, "## Decisions: right, and as a full recompute")
    same = [found["spliced"][column].split()[0] for column in (1, 3)]
    assert shown["full recompute is right"] == [found["recompute"][0], found["recompute"][2]]
    assert shown["spliced decides as the full recompute"] == same
    assert shown["a field changed: erratum is right"] == [found["erratum"][0], found["erratum"][2]]
    flipped = [round(216 * (1 - float(found["unrotated"][column].split()[0]))) for column in (1, 3)]
    assert flipped == [0, 1]
    assert "of the 216 decisions no direct one flips and one after a chain of thought does" in README


def test_the_package_says_that_it_is_typed() -> None:
    """Without the marker type checkers take everything of it for Any."""
    assert (ROOT / "notes_cli" / "py.typed").is_file()
