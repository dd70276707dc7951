"""Stores the race's answers in docs/results/race.json, and writes the tables of docs/race.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from bench.marked import put_between
from bench.race.peers import PEERS, Run
from bench.race.workloads import ASKED, Work, works
from bench.real.tasks import ROOT

KEPT = ROOT / "docs" / "results" / "race.json"
BEGIN, END = "<!-- make race: begin -->", "<!-- make race: end -->"
FEW = 5  # answers, below which a median is marked
MB = 1_000_000

Found = dict[str, list[Run]]  # answers by WORK/PEER


def load(path: Path = KEPT) -> Found:
    """The answers that were measured last."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: [Run(first, whole, processor, memory * MB, right) for first, whole, processor, memory, right in runs]
        for name, runs in stored.items()
    }


def keep(found: Found, path: Path = KEPT) -> None:
    """Write the answers, a cell a line: [first, whole, processor, memory in MB, right]."""
    lines = []
    for name, runs in found.items():
        times = ([round(one, 3) for one in (run.first, run.whole, run.processor)] for run in runs)
        rows = [[*some, round(run.memory / MB), run.right] for some, run in zip(times, runs, strict=True)]
        lines.append(f"{json.dumps(name)}:{json.dumps(rows, separators=(',', ':'))}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def sentence(runs: Sequence[Run]) -> str:
    """One cell, for the terminal."""
    first, whole, processor = (median(getattr(run, name) for run in runs) for name in ("first", "whole", "processor"))
    right = sum(run.right for run in runs)
    return (
        f"{len(runs)} asked, {right} right; first token {first:.2f} s, whole {whole:.2f} s, processor {processor:.2f} s"
    )


def write(folder: Path, found: Found) -> None:
    """Put the tables into the page."""
    several = works()
    single = [work for work in several if not work.summed]
    parts = [
        "**Seconds to the first token** (median):",
        _table(single, found, lambda runs, _: _time([run.first for run in runs])),
        "**Seconds to the end of the answer** (median; of the last three workloads the sum of all answers):",
        _table(several, found, lambda runs, _: _sum_or_median(runs, "whole")),
        "**Seconds of processor time** (median, or sum), by which other work on the machine matters least:",
        _table(several, found, lambda runs, _: _sum_or_median(runs, "processor")),
        "**Right answers**, and those of our full prefill to the same questions:",
        _table(several, found, _right),
        "**Memory of the process with the model**, in MB:",
        _table(several, found, lambda runs, _: f"{max(run.memory for run in runs) / MB:.0f}"),
    ]
    put_between(folder / "race.md", BEGIN, END, "\n\n".join(["", *parts, ""]))


def _table(several: Sequence[Work], found: Found, figure: Callable[[list[Run], list[Run]], str]) -> str:
    """`figure` of the answers of a program, and of those of our full prefill."""
    lines = [f"| | {' | '.join(work.title for work in several)} |", f"| --- |{' ---: |' * len(several)}"]
    for peer in PEERS:
        cells = [found.get(f"{work.name}/{peer.name}") for work in several]
        if any(cells):
            prefills = [found.get(f"{work.name}/prefill", []) for work in several]
            figures = (figure(runs, prefill) if runs else "" for runs, prefill in zip(cells, prefills, strict=True))
            lines.append(f"| {peer.title}{' (running)' if peer.running else ''} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _right(runs: list[Run], prefill: list[Run]) -> str:
    both = list(zip(runs, prefill, strict=False))
    if not both:
        return f"{sum(run.right for run in runs)} of {len(runs)}"
    right, wanted = sum(run.right for run, _ in both), sum(run.right for _, run in both)
    return f"{right} / {wanted} of {len(both)}"


def _sum_or_median(runs: list[Run], name: str) -> str:
    values = [getattr(run, name) for run in runs]
    return f"{sum(values):.1f}" if len(runs) > ASKED else _time(values)


def _time(values: Sequence[float]) -> str:
    return f"{median(values):.2f}{'*' if len(values) < FEW else ''}"
