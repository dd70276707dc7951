"""The editing landscape: which edit method decides as a full recompute of the corrected text, and at what cost?

In an ordinary cache: all skills of a case are one text that was prefilled once, in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure

from bench.experiments.cases import WAYS, joined, skill_of, with_influence
from bench.experiments.frame import Bar, Summary, explained, grid, share
from bench.experiments.methods import ALL, HALVES, PAPER, draw_methods, hoisted, measure_methods
from bench.experiments.table import Row, Table
from bench.experiments.texts import Texts
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

TITLE = "The editing landscape"
CASES = 300


def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
    for number, case in texts.cases("edits", cases):
        text = joined(case)
        whole = with_influence(workspace, compile_skill(workspace, skill_of(text, "memory")), case.field)
        lifted = compile_skill(workspace, hoisted(text, "memory", case.field, case.old))
        prompt, other = (Prompt(case.question, [segment]) for segment in (whole, lifted))
        for row in measure_methods(workspace, case, prompt, other):
            yield {"case": number, "kind": case.kind, **row}


def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
    of = {name: table.where(method=name) for name in ALL}
    rows = []
    for name in ALL:
        shares = [share(of[name].mean(f"{way}_{what}")) for way in WAYS for what in ("right", "same")]
        ranking = of[name].mean("ranking")
        cost = share(of[name].mean("decoded"), 0) + (f" + {ranking:.0f}" if ranking > 0 else "")
        near = share(of[name].mean("cosine"), 4)
        rows.append(" | ".join((name, cost, near, *shares, PAPER.get(name, ""))))
    head = "method | decoded | cosine | direct: right | as recompute | reasoned: right | as recompute | in the paper"
    bars = [
        Bar(f"{name} decides as the recompute, direct", of[name].mean("direct_same"), ">=", 0.98)
        for name in ("erratum", "field+erratum")
    ]
    exact, rounding = (max(of[name].numbers("error"), default=math.nan) for name in ("suffix", HALVES))
    bars += [
        Bar("suffix decides as the recompute, direct", of["suffix"].mean("direct_same"), ">=", 1.0),
        Bar("suffix: largest error of logits, or twice that of other batches", exact, "<=", max(1e-5, 2 * rounding)),
    ]
    shows = [
        f"Largest normalised squared error of logits: {exact:.1e} for `suffix`, {rounding:.1e} for a recompute in two "
        "halves, which differs from the recompute by its batches alone. Both are 0 on a CPU without flash attention; "
        "with it batches make 1e-4 on this model."
    ]
    if of["field"].mean("direct_same") < 0.5:
        shows.append("As in the paper, the field alone is ignored.")
    elif explained(table):
        shows.append(
            "In the paper the field alone is ignored, and partial recomputes fail with it. Here it decides as the "
            "recompute: this model looks a field up when it is asked, and writes little down while it reads. "
            "It has 3.8M parameters and one field a topic; the paper's effect was seen from 1.7B parameters on, which "
            "is the scale to look at: `python -m bench.experiments landscape --model FILE`."
        )
    return Summary(
        "One field changes so that the right answer changes. An ordinary cache: all skills of a case are one text, in "
        "front of the prompt, where it was prefilled. `as recompute`: the same decision as a full recompute of the "
        "corrected text; `cosine`: of the logits against it, mean; `decoded`: tokens computed a prompt, the question "
        "among them, and those of the pass that ranks tokens where there is one. A hoisted field is compared with the "
        "recompute of its own text.",
        (grid(head, rows),),
        tuple(bars),
        tuple(shows),
    )


def draw(table: Table, figure: Figure) -> None:
    draw_methods(table, figure)
