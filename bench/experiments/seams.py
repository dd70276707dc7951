"""Seam repair and the rotation: how near are spliced rows to a recompute, with how many first tokens decoded again?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure

from bench.experiments import figures
from bench.experiments.cases import SYSTEM, segments_of
from bench.experiments.frame import Summary, grid, interval, ratio, share
from bench.experiments.table import Row, Table
from bench.experiments.texts import Texts
from notes_cli.engine.decision import decide
from notes_cli.measure.compare import cosine
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

TITLE = "Seams and the rotation"
CASES = 108
SEAMS = (0, 1, 2, 4, 8)


def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
    for number, case in texts.cases("seams", cases):
        prompt = Prompt(case.question, segments_of(workspace, case.skills), system=SYSTEM)
        reference = assemble(workspace, prompt, splice=False)
        wanted, chosen = reference.logits(), decide(reference, case.choices).choice
        for rotate in (True, False):
            for seam in SEAMS:
                notebook = assemble(workspace, prompt, seam=seam, rotate=rotate)
                yield {
                    "case": number,
                    "skills": len(case.skills),
                    "rotated": rotate,
                    "seam": seam,
                    "cosine": cosine(notebook.logits(), wanted),
                    "same": decide(notebook, case.choices).choice == chosen,
                }


def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
    rows = []
    for rotated in (1, 0):
        for seam in SEAMS:
            part = table.where(rotated=rotated, seam=seam)
            low = min(part.numbers("cosine"))
            rows.append(
                f"{'yes' if rotated else 'no'} | {seam} | {part.mean('cosine'):.5f} | {low:.4f} | "
                f"{interval(part, 'same')}"
            )
    gap = [1 - table.where(rotated=1, seam=seam).mean("cosine") for seam in (0, 1, 8)]
    closed = [1 - ratio(rest, gap[0]) for rest in gap[1:]]
    return Summary(
        "Skills after a system text, spliced with so many of their first tokens decoded again, with their keys rotated "
        "and without (the control).",
        (grid("rotated | seam | mean logit cosine | lowest | decides as recomputed", rows),),
        (),
        (
            "In the paper the cosine is 0.90 to 0.999, one token of seam repair closes the gap at the start of a "
            "skill, and without the rotation all collapses.",
            f"Here one token closes {share(closed[0], 2)} of the distance (1 - cosine), eight {share(closed[1], 2)}.",
        ),
    )


def draw(table: Table, figure: Figure) -> None:
    axes = figure.subplots()
    lines = {
        name: [1 - table.where(rotated=rotated, seam=seam).mean("cosine") for seam in SEAMS]
        for rotated, name in ((1, "rotated"), (0, "not rotated"))
    }
    figures.curves(axes, SEAMS, lines)
    figures.plain(axes, x="tokens decoded again at the seam", y="1 - cosine of logits, mean")
    figures.logarithmic(axes)
    axes.set_xticks(SEAMS)
