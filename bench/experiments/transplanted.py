"""Editing inside a transplanted skill: after a system text and other skills, its rows rotated to where it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure

from bench.experiments.cases import SYSTEM, WAYS, segments_of, with_influence
from bench.experiments.frame import Bar, Summary, grid, share
from bench.experiments.methods import ALL, draw_methods, hoisted, measure_methods
from bench.experiments.table import Row, Table
from bench.experiments.texts import Texts
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

TITLE = "Editing inside a transplanted skill"
CASES = 300


def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
    for number, case in texts.cases("edits", cases):
        segments = segments_of(workspace, case.skills)
        mine = segments[case.target]
        segments[case.target] = with_influence(workspace, mine, case.field)
        lifted = list(segments)
        lifted[case.target] = compile_skill(workspace, hoisted(mine.text, mine.name, case.field, case.old))
        prompt, other = (Prompt(case.question, found, system=SYSTEM) for found in (segments, lifted))
        for row in measure_methods(workspace, case, prompt, other):
            yield {"case": number, "kind": case.kind, **row}


def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
    ordinary = others.get("landscape", Table([]))
    rows, gaps = [], {}
    for name in ALL:
        cells = []
        for way in WAYS:
            here = table.where(method=name).mean(f"{way}_same")
            there = ordinary.where(method=name).mean(f"{way}_same") if len(ordinary) else float("nan")
            cells += [share(here), share(there) if len(ordinary) else "not run"]
            if here == here and there == there:
                gaps[f"{name}, {way}"] = abs(here - there)
        near = share(table.where(method=name).mean("cosine"), 4)
        rows.append(" | ".join((name, near, *cells)))
    head = "method | cosine | direct: transplanted | ordinary | reasoned: transplanted | ordinary"
    worst = max(gaps, key=lambda name: gaps[name], default="")
    bars = [
        Bar(f"{name} decides as the recompute, direct", table.where(method=name).mean("direct_same"), ">=", 0.98)
        for name in ("erratum", "field+erratum")
    ]
    shows = [
        "In the paper a field inside a transplanted skill behaves as one in an ordinary cache, for every method. "
        + (f"So it does here: the largest difference is {gaps[worst]:.3f} ({worst})." if worst else "")
    ]
    shows.append(
        "`suffix` is no recompute of the whole prompt here: what precedes the field is spliced, and other skills are."
    )
    return Summary(
        "The same cases, but every skill follows a system text and the skills before it, with its rows "
        "rotated to where it is and one token of seam repair. Shares that decide as a full recompute of the "
        "corrected text, next to those of the landscape.",
        (grid(head, rows),),
        tuple(bars),
        tuple(shows),
    )


def draw(table: Table, figure: Figure) -> None:
    draw_methods(table, figure)
