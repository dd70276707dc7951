"""The paper's causal probes: on which rows after a field does a decision rest?

A text is compiled with the old value (stale) and with the new one (fresh), and rows are mixed of the two. Recovery is
0 where the model acts on the old value, 1 as after a full recompute (measure/probe.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import median

from matplotlib.figure import Figure

from bench.experiments import figures
from bench.experiments.cases import joined, skill_of
from bench.experiments.frame import Summary, grid, share
from bench.experiments.table import Row, Table
from bench.experiments.texts import Case, Texts
from notes_cli.editing.methods import Method
from notes_cli.engine.decision import decide
from notes_cli.measure.probe import AlikeError, Mixes
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum

TITLE = "Causal probes"
CASES = 150
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
AGAIN = "Please re-evaluate everything above."
# Wordings after a cache, with the field's rows as they were or recomputed: (method, said in free words).
SAID = {
    "stale, and `re-evaluate`": ("stale", AGAIN),
    "field alone": ("field", ""),
    "field, and `re-evaluate`": ("field", AGAIN),
    "field, and the value said again": ("field+erratum", ""),
}
PAPER = {
    "field rows fresh": "about 0",
    "all after it fresh": "",
    "field alone": "about 0",
    "field, and `re-evaluate`": "does not help",
    "field, and the value said again": "redundant once the value is present",
}


def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
    for number, case in texts.cases("probes", cases):
        segment = compile_skill(workspace, skill_of(joined(case), "memory"))
        row: Row = {"case": number, "kind": case.kind}
        try:
            mixes = Mixes(workspace, segment, case.field, case.new, question=case.question, choices=case.choices)
        except AlikeError:
            yield row | {"probe": "decides the same", "share": "", "recovery": "", "fresh": ""}
            continue
        for probe, part, recovery in _recoveries(workspace, mixes, case):
            yield row | {"probe": probe, "share": part, "recovery": recovery, "fresh": recovery > 0.5}


def _recoveries(workspace: Workspace, mixes: Mixes, case: Case) -> Iterator[tuple[str, float | str, float]]:
    yield "field rows fresh", "", mixes.field_only()
    yield "all after it fresh", "", mixes.after_only()
    parts: dict[str, Callable[[float], float]] = {"first": mixes.share_from_field, "last": mixes.share_from_end}
    for probe, patch in parts.items():
        for part in SHARES:
            yield probe, part, patch(part)
    for probe, (method, words) in SAID.items() if mixes.rewrites else ():
        errata = [Erratum(None, None, words)] if words else []
        values, asked = {case.field: case.new}, Method.parse(method)
        prompt = Prompt(case.question, [mixes.stale], errata, fields=values, method=asked)
        found = decide(assemble(workspace, prompt), mixes.decisions).probabilities
        old, new = (math.log(max(found[choice], 1e-300)) for choice in mixes.decisions)
        stale, fresh = mixes.scores
        yield probe, "", (new - old - stale) / (fresh - stale)


def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
    alike = len(table.where(probe="decides the same"))
    names = ("field rows fresh", "all after it fresh", *SAID)
    rows = [_line(name, table.where(probe=name), PAPER.get(name, "")) for name in names]
    shares = []
    for part in SHARES:
        first, last = (table.where(probe=probe, share=part) for probe in ("first", "last"))
        cells = [f"{share(_middle(found), 2)} | {share(found.mean('fresh'))}" for found in (first, last)]
        shares.append(" | ".join((f"{100 * part:.0f}%", *cells)))
    field, after = (table.where(probe=name).mean("fresh") for name in names[:2])
    shows = [
        f"Of {len(table.unique('case'))} cases {alike} decide alike with both values and are left out. Recovery is by "
        "log-probabilities, its median; `acts on the new value`: the share of cases beyond one half."
    ]
    if field > after:
        shows.append(
            "This is the reverse of the paper: the decision rests on the field's own rows, not on notes after it; the "
            "model looks the field up when it is asked. The first tenth of the suffix holds the field. The paper's "
            "effect was seen in models of 1.7B parameters and more."
        )
    else:
        shows.append("As in the paper, the decision rests on what follows the field, not on its own rows.")
    shows.append(
        "Read and write heads are not measured. The paper's figure (a few heads do 0.78 of the reading, writing is "
        "spread out) takes changing the output of single attention heads within a forward pass. Nothing here "
        "reaches into one: what is mixed are rows of K/V, all heads together. llama.cpp has a callback for each "
        "operation, through which it could be done."
    )
    return Summary(
        "A memory of one to three skills in an ordinary cache, its rows mixed of two compiles.",
        (
            grid("rows | recovery, median | acts on the new value | in the paper", rows),
            grid(
                "of the suffix fresh | from the field on: recovery | new value | from the end: recovery | new value",
                shares,
            ),
        ),
        (),
        tuple(shows),
    )


def _middle(table: Table) -> float:
    found = table.numbers("recovery")
    return median(found) if found else math.nan


def _line(name: str, table: Table, paper: str) -> str:
    return f"{name} | {share(_middle(table), 2)} | {share(table.mean('fresh'))} | {paper}"


def draw(table: Table, figure: Figure) -> None:
    axes = figure.subplots()
    lines = {
        name: [_middle(table.where(probe=probe, share=part)) for part in SHARES]
        for probe, name in (("first", "fresh from the field on"), ("last", "fresh from the end back"))
    }
    figures.curves(axes, [100 * part for part in SHARES], lines)
    field = _middle(table.where(probe="field rows fresh"))
    axes.axhline(field, color=figures.GREEN, linestyle=":", label="field's rows only")
    axes.legend(frameon=False, fontsize=9)
    figures.plain(axes, x="% of the suffix that is fresh", y="recovery, median")
    axes.set_ylim(-0.15, 1.15)
