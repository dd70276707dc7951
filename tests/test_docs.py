"""Documents say only what is so: figures are those that programs have left, the package is typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FINDINGS = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
REVERSED = (ROOT / "docs" / "results-reversed.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "training" / "tiny" / "measured.txt").read_text(encoding="utf-8")
NOTES = "## On the tiny model"
LOOKS_UP = "## Training decides it"
KINDS = ("table", "date", "amount")
WORDS = ("known", "held-out")
# What a row of the table of findings.md is called, and what the figure is called that `training.tiny.measure` prints.
ROWS = {
    "right, asked directly": "plain, direct",
    "right after a chain of thought": "plain, reasoned",
    "right after an erratum": "erratum, direct",
    "spliced: same decision as recomputed": "spliced as recomputed",
    "**only the field's own rows are new**: decides by the new value": "fields above: field",
    "**only the rows after the field are new**: decides by the new value": "fields above: follow",
    "only the field's own rows are new, after a chain of thought": "fields above, thinking: field",
    "only the value's own rows are new, in a field below its rules": "fields below: field",
    "spliced after an older version of the policy: same decision as recomputed": "two versions: rotated as recomputed",
    "the same, without rotating the keys": "two versions: not rotated as recomputed",
}
# What a row of the table of failures is called, and what the page of results calls its figure: of several the lowest.
ASKED = {
    "right, asked directly": ("H1 H2", "right, direct"),
    "right after a chain of thought": ("H1 H2", "right, reasoned"),
    "right after an erratum": ("H1 H2", "right after an erratum"),
    "spliced after other text decides as recomputed": ("H3", "decides as recomputed"),
    "right, spliced less recomputed": ("H3", "right, spliced less recomputed (90%)"),
    "fields below the rules: note index": ("H7", "note index"),
    "after a chain of thought the field's rows alone bring the new value": (
        "H9",
        "field's rows fresh: acts on the new value",
    ),
    "two versions of a policy: as the recompute, rotated less not rotated": (
        "H11",
        "as the recompute, rotated less not rotated",
    ),
    "an erratum decides as a prefill of the corrected text": ("H13", "as a prefill of the corrected text"),
    "a field toggled in 28 turns, by errata: lowest cosine to a prefill": ("H15", "errata: lowest cosine of all turns"),
    "the same, compacted before every question": ("H15", "compacted: lowest cosine of all turns"),
    "an edit in a spliced skill less the same in an ordinary cache: `blend` with 15% of the tokens": (
        "H16",
        "blend 15%: transplanted less ordinary, direct",
    ),
    "`suffix`, the field at the end": ("H16", "suffix, field hoisted: transplanted less ordinary, direct"),
    "facts together in one of 2, 4, 8 or 16 blocks decide as the recompute: the lowest": (
        "H17",
        r"together, S = \d+: as the recompute",
    ),
    "an agent that corrects by errata decides as one that prefills every turn": ("H18", "erratum: as the baseline"),
    "right after 30 sessions, spliced less recomputed": ("R5", "30 sessions: right, spliced less recomputed (90%)"),
}


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a text."""
    found = re.search(r"(?:^\|.*\n)+", text[text.index(heading) :], re.M)
    assert found
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()[2:]]


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The first table after a text: cells by what their row is called."""
    return {row[0]: row[1:] for row in table(text, heading)}


def measured(kind: str, words: str, figure: str) -> float:
    """A figure as it was printed."""
    line = re.search(rf"^{re.escape(f'{kind}, {words} words, {figure}')} +([\d.]+)  of \d+$", MEASURED, re.M)
    assert line, figure
    return float(line[1])


@pytest.mark.parametrize("name", ROWS)
def test_the_finding_has_the_figures_that_were_measured(name: str) -> None:
    found = [" / ".join(f"{measured(kind, words, ROWS[name]):.2f}" for words in WORDS) for kind in KINDS]
    assert rows(FINDINGS, NOTES)[name] == found


def test_the_finding_is_whole() -> None:
    assert list(rows(FINDINGS, NOTES)) == list(ROWS)


def found_of(seed: int, hypotheses: str, words: str, figure: str) -> str:
    """A figure of the page of results, in bold where it misses its bar."""
    page = RESULTS[RESULTS.index(f"## Training seed {seed}") :]
    name = figure if "\\" in figure else re.escape(figure)
    found = []
    for hypothesis in hypotheses.split():
        section = re.search(rf"^### {hypothesis}: [^\n]*, {words} words.*?(?=^##|\Z)", page, re.M | re.S)
        for value, met in re.findall(
            rf"^\| {name} \| (\S+)[^|]*\|[^|]*\|[^|]*\|[^|]*\| (met|\*\*missed\*\*) \|$",
            section[0] if section else "",
            re.M,
        ):
            found.append((float(value), value if met == "met" else f"**{value}**"))
    assert found, (seed, hypotheses, words, figure)
    return min(found)[1]


@pytest.mark.parametrize("name", ASKED)
def test_a_failure_that_is_told_has_the_figures_that_were_measured(name: str) -> None:
    hypotheses, figure = ASKED[name]
    told = {cells[1]: cells[3:] for cells in table(FINDINGS, "## What fails")}
    for words, cell in zip(("held-out", "known"), told[name], strict=True):
        single = re.sub(r"\*\*(.*?)\*\*", lambda bold: ", ".join(f"**{one}**" for one in bold[1].split(", ")), cell)
        assert single.split(", ") == [found_of(seed, hypotheses, words, figure) for seed in (1, 2, 3)]


def test_no_failure_is_left_out() -> None:
    """Whatever fails by the page of results is in the table."""
    failed = set(re.findall(r"^\| ([HR]\d+) \|.*\| \*\*fails\*\* \|$", RESULTS, re.M))
    assert failed == set(" ".join(hypotheses for hypotheses, _ in ASKED.values()).split())
    assert [cells[1] for cells in table(FINDINGS, "## What fails")] == list(ASKED)


def test_what_the_findings_say_of_the_reversed_model() -> None:
    """Its own rows recover all, those after them nothing, by each of the ways that the paper has it otherwise."""
    said = FINDINGS[FINDINGS.index(LOOKS_UP) :]
    ordinary = rows(REVERSED, "## The editing landscape")
    stale, field, erratum = (ordinary[method][3] for method in ("stale", "field", "erratum"))
    text = f"the corrected text in {field} of 300 decisions, an erratum in {erratum}, nothing done in {stale}"
    assert text in " ".join(said.split())


def test_the_package_says_that_it_is_typed() -> None:
    """Without the marker type checkers take everything of it for Any."""
    assert (ROOT / "notes_cli" / "py.typed").is_file()
