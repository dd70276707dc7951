"""The paper's table, row by row, beside the figures of the hypotheses that measure them, and what is found in short."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.experiments.frame import grid
from bench.protocol.elsewhere import SOURCES, Source
from bench.protocol.hypotheses import ADDED
from bench.protocol.rows import ROWS, Row

Found = Mapping[str, Any]  # a verdict as plain data
Verdicts = Mapping[int, Mapping[tuple[str, str], Found]]  # of each training seed, by hypothesis and words


def to(page: str, at: str) -> str:
    """The path of a page of docs/ from the page `at`, both relative to docs/."""
    return os.path.relpath(page, os.path.dirname(at) or ".").replace(os.sep, "/")


def table(verdicts: Verdicts, overall: Mapping[str, str], at: str, docs: Path) -> str:
    """Every row, by section. `overall`: what is said of each hypothesis in all; `at`: where the page will be; `docs`:
    the folder in which other benches have stored theirs."""
    parts = [
        "## The paper's table\n\nA row for each of the paper's. Figures are of words that training never saw, with 95% "
        "intervals; those of known words are after `known`, with their intervals in the sections below. What holds or "
        "fails is the hypothesis, by its bar, for every training seed and both sorts of words; what has no bar is "
        "reported.",
        "What other benches have measured, most of it of other subjects, has tables of its own: each figure is read "
        "from what the command beside it has stored, and what its brackets are is said with the subject.",
    ]
    seeds = list(verdicts)
    head = " | ".join(("the paper's row", "it found", *(f"ours, seed {seed}" for seed in seeds), "so"))
    for section, group in groupby(ROWS, key=lambda row: row.section):
        rows = list(group)
        own = [row for row in rows if not row.sources or row.shown]
        cells = [
            " | ".join((row.what, row.found, *(_cell(row, verdicts[seed]) for seed in seeds), _so(row, overall)))
            for row in own
        ]
        parts += [f"### {section}", *([grid(head, cells)] if cells else [])]
        others = [line for row in rows if row.sources for line in _others(row, at, docs)]
        if others:
            parts.append(grid("the paper's row | it found | subject | ours | measured by", others))
    return "\n\n".join(parts)


def _others(row: Row, at: str, docs: Path) -> Iterator[str]:
    """A line for each other subject."""
    for number, source in enumerate(SOURCES[row.sources]):
        name, found = (row.what, row.found) if not number else ("", "")
        spread = f"; in brackets {source.spread}" if source.spread else ""
        by = f"`{source.by}`, stored in [{Path(source.file).name}]({to(source.file, at)})"
        by += f"; [more]({to(source.page, at)})" if source.page != source.file else ""
        yield " | ".join((name, found, f"{source.subject}{spread}", _told(source, docs), by))


def _told(source: Source, docs: Path) -> str:
    figures = source.figures(docs)
    if figures is None:
        return f"not measured: there is no {source.file}"
    return "<br>".join(map(str, figures))


def _cell(row: Row, found: Mapping[tuple[str, str], Found]) -> str:
    told = [
        f"{label}: {_both(found, shown.hypothesis, what)}"
        for shown in row.shown
        for label, what in shown.checks.items()
        if shown.hypothesis not in ADDED or _has(found, shown.hypothesis)
    ]
    left = [
        f"{shown.hypothesis} not measured: {ADDED[shown.hypothesis]}"
        for shown in row.shown
        if shown.hypothesis in ADDED and not _has(found, shown.hypothesis)
    ]
    return "<br>".join((*told, *left)) or "not measured"


def _has(found: Mapping[tuple[str, str], Found], hypothesis: str) -> bool:
    return any(name == hypothesis for name, _ in found)


def _so(row: Row, overall: Mapping[str, str]) -> str:
    said = []
    for shown in row.shown:
        verdict = overall[shown.hypothesis] if shown.barred else "reported, no bar"
        said.append(f"{shown.hypothesis} {verdict}")
    return "; ".join(dict.fromkeys(said))


def _both(found: Mapping[tuple[str, str], Found], hypothesis: str, what: str) -> str:
    unseen, known = (check_of(found.get((hypothesis, words)), what) for words in ("held-out", "known"))
    told = [number(unseen)] if unseen else []
    if known:
        told.append(f"known {short(known['value'])}" if unseen else f"known {number(known)}")
    return ", ".join(told) or "not measured"


def check_of(found: Found | None, what: str) -> Found | None:
    """The check of that name, if it has a figure."""
    checks = [check for check in found["checks"] if check["what"] == what] if found else []
    return checks[0] if checks and checks[0]["value"] is not None else None


def number(check: Found) -> str:
    """A figure with its interval."""
    if check["value"] is None:
        return "not measured"
    between = "" if check["low"] is None else f" ({short(check['low'])} to {short(check['high'])})"
    return short(check["value"]) + between


def short(value: float) -> str:
    """Three digits after the point; of what would be 0 that way, three that count."""
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value + 0.0:.3f}"


def finding(verdicts: Verdicts) -> str:
    """Two or three sentences, which say what the figures do; of words that training never saw, a figure a seed."""

    def checks(name: str) -> list[Found]:
        every = [check_of(verdicts[seed].get((name, "held-out")), HEADLINE[name]) for seed in verdicts]
        return [check for check in every if check]

    field, after, above, below, thought = (checks(name) for name in ("H4", "H5", "H6", "H7", "H9"))
    told = []
    if field and after and above:
        rests = {1: "what was written after the field", -1: "the field's own rows", 0: "neither of them for sure"}
        told.append(
            f"Fields above the rules: with only the field's rows fresh the new value decides in {_all(field)}, with "
            f"only what follows fresh in {_all(after)}: note index {_all(above)}. So a decision rests more on "
            f"{rests[_sign(above)]}{_against(_sign(above))}."
        )
    if below:
        turned = {
            -1: "negative, as it must be where no rule is after the field to note at",
            1: "positive: its sign has not turned, so the control fails",
            0: "of no sure sign, so the control has not come out",
        }
        told.append(f"Fields below the rules: note index {_all(below)}, {turned[_sign(below)]}.")
    if thought:
        told.append(f"After a chain of thought the field's rows alone bring the new value in {_all(thought)}.")
    of = "With words that training never saw, a figure for each training seed:\n\n"
    return of + " ".join(told) if told else "Where a decision rests has not been measured yet."


HEADLINE = {
    "H4": "field's rows fresh: acts on the new value",
    "H5": "rows after it fresh: acts on the new value",
    "H6": "note index",
    "H7": "note index",
    "H9": "field's rows fresh: acts on the new value",
}


def _all(checks: list[Found]) -> str:
    return ", ".join(map(number, checks))


def _sign(checks: list[Found]) -> int:
    """Of a figure: 1 or -1 if every seed's whole interval is on that side of 0, else 0."""
    if all(check["low"] is not None and check["low"] > 0 for check in checks):
        return 1
    return -1 if all(check["high"] is not None and check["high"] < 0 for check in checks) else 0


def _against(sign: int) -> str:
    return {1: ", as the paper says", -1: ", the reverse of what the paper says", 0: ""}[sign]
