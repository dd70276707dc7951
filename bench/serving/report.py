"""docs/serving.md and docs/results/serving.json: the tables are between two marks, all else is written by hand."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bench.marked import put_between
from bench.serving.load import Figures, Seen, times
from bench.serving.phases import RACES, RATES, SYSTEMS, TENTHS, Phase, Race

BEGIN, END = "<!-- make serving: begin -->", "<!-- make serving: end -->"
KEPT = "results/serving.json"
NOISE = ("random",)  # models whose words mean nothing, so that rounding decides which they are
OURS, UNEDITED = SYSTEMS["ours"], SYSTEMS["unedited"]
Measured = dict[Phase, tuple[list[Seen], Figures]]


def sentence(phase: Phase, found: Figures) -> str:
    """One phase for people who wait."""
    answered = f"{found.answered} of {found.sent} answered, {found.failed} failed"
    waits = f"first token p50 {found.p50} s, p90 {found.p90} s"
    return f"{phase.name:<22} {answered}; {_share(found.reused)} reused; {found.answers:.2f} answers/s; {waits}"


def write(folder: Path, done: Measured) -> None:
    """Both files."""
    lines = ",\n".join(map(json.dumps, _records(done)))
    (folder / KEPT).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    put_between(folder / "serving.md", BEGIN, END, f"\n\n{tables(done)}\n\n")


def _records(done: Measured) -> Iterator[dict[str, object]]:
    for phase, (seen, found) in done.items():
        names = {"model": phase.race.name, "system": phase.system.name, "rate": phase.rate}
        same, both = _equal(done, phase)
        waits = [f"{'>' if one.cut else ''}{one.waited:.3f}" for one in seen if not one.failed]
        yield {**names, **asdict(found), "as_ours": same, "by_both": both, "first_tokens": waits}


def tables(done: Measured) -> str:
    """A model after the other."""
    return "\n\n".join(_model(race, done) for race in RACES.values() if any(one.race == race for one in done))


def _model(race: Race, done: Measured) -> str:
    mine = {phase: figures for phase, (_, figures) in done.items() if phase.race == race}
    loads = " | ".join("all at once" if rate is None else str(rate) for rate in RATES)
    title = (
        f"**{race.title}**: {race.count} requests at each load, of which those are left out that would come after"
        f" {race.arriving:.0f} seconds; answers of {race.tokens} tokens at most; all is cut off after {race.limit:.0f}"
        " seconds."
    )
    if unit := mine.get(Phase(race, UNEDITED, None)):
        title += f" A load of {TENTHS} is {unit.answers:.2f} requests a second."
    lines = [textwrap.fill(title, 120), "", f"| | {loads} |", f"| --- |{' --- |' * len(RATES)}"]
    compared = [f"| p90 of the first token, times ours | {loads} |", f"| --- |{' ---: |' * len(RATES)}"]
    for system in SYSTEMS.values():
        row = [Phase(race, system, rate) for rate in RATES]
        if not any(phase in mine for phase in row):
            continue
        cells = (_cell(phase, mine[phase], _equal(done, phase)) if phase in mine else "" for phase in row)
        lines.append(f"| {system.title} | {' | '.join(cells)} |")
        if system != OURS:
            pairs = [(mine.get(phase), mine.get(Phase(race, OURS, phase.rate))) for phase in row]
            ratios = [times(other.p90, own.p90) if other and own else None for other, own in pairs]
            compared.append(f"| {system.title} | {' | '.join(str(ratio or '') for ratio in ratios)} |")
    return "\n".join([*lines, "", *compared])


def _cell(phase: Phase, found: Figures, equal: tuple[int, int]) -> str:
    """Waits, answers a second, the share of the prompt that was reused, answers, and those that are as ours."""
    cells = [f"{found.p50} s", f"{found.p90} s", f"{found.answers:.2f}", _share(found.reused)]
    cells += [f"{found.answered} of {found.sent}"]
    if phase.system != OURS and phase.race.name not in NOISE:
        cells += [f"{equal[0]} of {equal[1]}"]
    return ", ".join(cells)


def _equal(done: Measured, phase: Phase) -> tuple[int, int]:
    """Answers that are those of ours to the same questions, and how many of them both have."""
    ours, _ = done.get(Phase(phase.race, OURS, phase.rate), ([], None))
    both = [(a.text, b.text) for a, b in zip(done[phase][0], ours, strict=False) if a.done and b.done]
    return sum(a == b for a, b in both), len(both)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
