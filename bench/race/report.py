"""docs/race.md: its tables are between two marks, all else is written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from bench.marked import put_between
from bench.race.cells import GRID, MODELS, Cell, Kept, cells
from bench.race.peers import PEERS, Run
from bench.race.workloads import TITLES

BEGIN, END = "<!-- make race: begin -->", "<!-- make race: end -->"
LEAST = 5  # runs that a median is of; fewer are marked
# Baselines of each kind: for processes that are started, and for running ones.
UNITS = {False: ("notes",), True: ("notes-serve", "notes-serve-erratum", "notes-session")}


def sentence(runs: Sequence[Run]) -> str:
    """A cell, for people who wait."""
    first, whole = ([getattr(run, name) for run in runs] for name in ("first", "whole"))
    times = f"first token {_spread(first)} s, whole {_spread(whole)} s"
    return f"{len(runs)} asked; {times}; {_processor(runs):.2f} s of processor"


def write(folder: Path, found: Kept) -> None:
    """Put the tables into the page."""
    parts = [part for model in GRID for part in _model(model, found)]
    put_between(folder / "race.md", BEGIN, END, "\n\n".join(["", *parts, ""]))


def _model(model: str, found: Kept) -> Iterator[str]:
    mine = [cell for cell in cells([model]) if cell.name in found]
    if not mine:
        return
    yield f"## {MODELS[model][0]}"
    for work, sizes in GRID[model].items():
        for size in sizes:
            those = [cell for cell in mine if (cell.work, cell.size) == (work, size)]
            if those:
                yield f"**{TITLES[work][0].upper()}{TITLES[work][1:]}, {size}**"
                yield "\n".join(_table(those, found))
    if missing := [_missing(model, work, size, found) for work, sizes in GRID[model].items() for size in sizes]:
        yield f"Not measured yet: {'; '.join(filter(None, missing)) or 'nothing'}."


def _missing(model: str, work: str, size: str, found: Kept) -> str:
    """The peers that a workload was not given to."""
    every = cells([f"{model}/{work}-{size}"])
    names = [cell.peer.name for cell in every if cell.name not in found]
    if len(names) == len(every):
        return f"{work}-{size}"
    return f"of {work}-{size} {', '.join(names)}" if names else ""


def _table(those: Sequence[Cell], found: Kept) -> Iterator[str]:
    yield "| | asked | first token, s | whole, s | processor, s | times ours | resident, MB | as recomputed |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for running in (False, True):
        unit = next((cell for name in UNITS[running] for cell in those if cell.peer.name == name), None)
        for cell in those:
            if cell.peer.running == running:
                yield _row(cell, found, found[unit.name] if unit else None)


def _row(cell: Cell, found: Kept, unit: Sequence[Run] | None) -> str:
    runs = found[cell.name]
    times = f"{_processor(runs) / _processor(unit):.1f}" if unit else ""
    own = cell.peer.as_whose == cell.peer.name
    memory = max(run.memory for run in runs) / 1e6
    same = (
        "" if own else same_as(runs, found.get(Cell(cell.model, cell.work, cell.size, PEERS[cell.peer.as_whose]).name))
    )
    title = f"{cell.peer.title}{' (running)' if cell.peer.running else ''}{', all decoded' if own else ''}"
    first, whole = (_spread([getattr(run, name) for run in runs]) for name in ("first", "whole"))
    asked = f"{len(runs)}{'*' if len(runs) < LEAST else ''}"
    return f"| {title} | {asked} | {first} | {whole} | {_processor(runs):.2f} | {times} | {memory:.0f} | {same} |"


def same_as(runs: Sequence[Run], recomputed: Sequence[Run] | None) -> str:
    """How many of the answers are those of the same library that has decoded all tokens. One may be a token shorter:
    llama-completion at times ends before it has printed its last."""
    both = list(zip(runs, recomputed or (), strict=False))
    return f"{sum(_same(mine.text, its.text) for mine, its in both)} of {len(both)}" if both else "?"


def _same(mine: str, its: str) -> bool:
    shorter, longer = sorted((mine, its), key=len)
    return longer.startswith(shorter) and 2 * len(shorter) >= len(longer)


def _processor(runs: Sequence[Run]) -> float:
    return median(run.processor for run in runs)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
