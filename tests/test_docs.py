"""Documents say only what is so: figures are those that programs have left, the package is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
REVERSED = (ROOT / "docs" / "results-reversed.md").read_text(encoding="utf-8")
MEASURED = ROOT / "docs" / "results" / "protocol-seed-1.json"
NOTES = "**Where does a decision rest?**"
LOOKS_UP = "**Training decides it.**"
# What a row of the table in the README is called, and where the protocol has it: of known words, of held-out ones, and
# the name of the figure.
ROWS = {
    "right, asked directly": ("H1", "H2", "right, direct"),
    "right after a chain of thought": ("H1", "H2", "right, reasoned"),
    "right after an erratum": ("H1", "H2", "right after an erratum"),
    "spliced decides as recomputed": ("H3", "H3", "decides as recomputed"),
    "an erratum decides as a prefill of the corrected text": ("H13", "H13", "as a prefill of the corrected text"),
    "**only the field's own rows are new**: acts on the new value": (
        "H4",
        "H4",
        "field's rows fresh: acts on the new value",
    ),
    "**only the rows after the field are new**: acts on the new value": (
        "H5",
        "H5",
        "rows after it fresh: acts on the new value",
    ),
    "of these only the lines of the asked rule": ("H8", "H8", "asked rule's lines fresh: acts on the new value"),
    "of these only the lines of another rule": ("H8", "H8", "another rule's lines fresh"),
    "after a chain of thought, only the field's own rows are new": (
        "H9",
        "H9",
        "field's rows fresh: acts on the new value",
    ),
    "fields below their rules, where nothing follows them: note index by the field's line": (
        "H7",
        "H7",
        "note index, by the field's whole line",
    ),
    "the same by the rows of its value": ("H7", "H7", "note index"),
    "after an older version of the same policy: spliced decides as recomputed": (
        "H11",
        "H11",
        "as the recompute, rotated",
    ),
    "the same without the rotation": ("H11", "H11", "as the recompute, unrotated"),
}


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The first table after a text whose header has more than two columns: cells by what their row is called."""
    table = re.search(r"(?:^\|.*\n)+", text[text.index(heading) :], re.M)
    assert table
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return {row[0]: row[1:] for row in cells[2:]}


@pytest.mark.parametrize("name", ROWS)
def test_the_finding_in_the_readme_has_the_figures_of_the_protocol(name: str) -> None:
    """Of the training seed that ships, known words and held-out ones."""
    verdicts = {(one["hypothesis"], one["words"]): one for one in json.loads(MEASURED.read_text())["verdicts"]}
    *which, figure = ROWS[name]
    found = [
        next(check["value"] for check in verdicts[each, words]["checks"] if check["what"] == figure)
        for each, words in zip(which, ("known", "held-out"), strict=True)
    ]
    assert rows(README, NOTES)[name] == [f"{value:.3f}" for value in found]


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
