"""docs/race.md: its tables are between two marks, all else is written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from bench.marked import put_between
from bench.race.cells import GRID, MODELS, Cell, Kept, cells
from bench.race.peers import PEERS, Run

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
    works = [(work, size) for work, sizes in GRID[model].items() for size in sizes]
    mine = {(cell.work, cell.size, cell.peer.name): cell for cell in cells([model]) if cell.name in found}
    if not mine:
        return
    yield f"## {MODELS[model][0]}"
    lines = [f"| | {' | '.join(f'*{work}*, {size}' for work, size in works)} |", f"| --- |{' --- |' * len(works)}"]
    for running in (False, True):
        for peer in PEERS.values():
            if peer.running == running and any(name == peer.name for _, _, name in mine):
                row = [_cell(mine.get((*work, peer.name)), found) for work in works]
                lines.append(f"| {peer.title}{' (running)' if running else ''} | {' | '.join(row)} |")
    yield "\n".join(lines)
    if missing := [*filter(None, (_missing(model, work, size, found) for work, size in works))]:
        yield f"Not measured yet: {'; '.join(missing)}."


def _missing(model: str, work: str, size: str, found: Kept) -> str:
    """The peers that a workload was not given to."""
    every = cells([f"{model}/{work}-{size}"])
    names = [cell.peer.name for cell in every if cell.name not in found]
    if len(names) == len(every):
        return f"{work}-{size}"
    return f"of {work}-{size} {', '.join(names)}" if names else ""


def _cell(cell: Cell | None, found: Kept) -> str:
    """First token, times ours, memory, answers as recomputed; empty if it was not measured."""
    if cell is None:
        return ""
    runs = found[cell.name]
    parts = [f"{median(run.first for run in runs):.2f} s{'*' if len(runs) < LEAST else ''}"]
    others = (_beside(cell, name) for name in UNITS[cell.peer.running])
    if unit := next((other for other in others if other in found), None):
        parts.append(f"{_processor(runs) / _processor(found[unit]):.1f}")
    parts.append(f"{max(run.memory for run in runs) / 1e6:.0f} MB")
    own = cell.peer.as_whose == cell.peer.name
    parts.append("all decoded" if own else same_as(runs, found.get(_beside(cell, cell.peer.as_whose))))
    return ", ".join(parts)


def _beside(cell: Cell, peer: str) -> str:
    """The name of the cell of another peer for the same workload."""
    return Cell(cell.model, cell.work, cell.size, PEERS[peer]).name


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
