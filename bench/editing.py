"""The editing landscape: which edit method decides as a full recompute of the corrected text does, and at what cost?

    python -m bench.editing [--cases 300] [--model FILE] [--threads N] [--write docs/editing.md]

Every case is a held-out text of training/world.py behind a system text, with one field changed so that the answer
changes. Each method of notes_cli/editing amends the spliced skill; decisions are read directly, and after a line of
reasoning that the model writes itself. Exits 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.decisions import REASONING, SYSTEM, Tally, direct, reasoned
from notes_cli import config
from notes_cli.editing.methods import Method
from notes_cli.engine.context import ContextOptions
from notes_cli.measure.compare import cosine
from notes_cli.text.skill import parse_skill
from notes_cli.work.compiling import compile_skill
from notes_cli.work.prompting import Prompt, lay
from notes_cli.work.workspace import Workspace
from training import world

METHODS = (
    "stale",
    "field",
    "selective@4",
    "selective@16",
    "selective@64",
    "erratum",
    "field+erratum",
    "suffix",
    "recompute",
)
# What the paper found on models of 1.7B to 32B parameters (arXiv:2606.17107).
PAPER = {
    "stale": "acts on the old value",
    "field": "ignored; with reasoning it recovers",
    "selective@16": "depends on the model",
    "erratum": "robust",
    "field+erratum": "as a recompute",
    "suffix": "as a recompute",
}
BARS = {"erratum": 0.98, "field+erratum": 0.98, "suffix": 1.0}  # of decisions as the recompute's, direct
NOTES = (
    "`suffix` is a recompute only where a skill stands behind the text it was compiled behind. Here every skill stands "
    "elsewhere, so what precedes the field is spliced.",
    "",
    "The paper's finding that the field alone is ignored does not show on the model that ships: it looks a field up "
    "when it is asked and writes little down while it reads (decisions are made from the field's own rows). The models "
    "of the paper have 1.7B parameters and more; measure yours: `python -m bench.editing --model FILE`.",
)


def measure(workspace: Workspace, case: world.Case, tally: Tally) -> None:
    """One case, all methods. Names in the tally: METHOD/HOW/WHAT."""
    segments = [
        compile_skill(
            workspace,
            parse_skill(skill.text, source=skill.name, default=f"s{number}-{skill.name}"),
            measure=lambda done, of: None,
        )
        for number, skill in enumerate(case.skills)
    ]

    def prompt(question: str, method: str) -> Prompt:
        return Prompt(question, segments, (), SYSTEM, values={case.field: case.new}, method=Method.parse(method))

    question = case.question + world.REASON_CUE
    reference = lay(workspace, prompt(case.question, "recompute"), splice=False)
    wanted, chosen = reference.logits(), direct(reference, case)[0]
    said = reasoned(lay(workspace, prompt(question, "recompute"), splice=False, room=REASONING), case)
    for method in METHODS:
        notebook = lay(workspace, prompt(case.question, method))
        tally.add(f"{method}/cosine", cosine(notebook.logits(), wanted))
        reused = sum(piece.tokens - piece.rewritten for piece in notebook.pieces if piece.how == "spliced")
        tally.add(f"{method}/decoded", len(notebook) - reused)
        found = direct(notebook, case)[0]
        tally.add(f"{method}/direct/right", found == case.answer_new)
        tally.add(f"{method}/direct/same", found == chosen)
        found_reasoned = reasoned(lay(workspace, prompt(question, method), room=REASONING), case)
        tally.add(f"{method}/reasoned/right", found_reasoned == case.answer_new)
        tally.add(f"{method}/reasoned/same", found_reasoned == said)


def report(tally: Tally, cases: int, model: str) -> str:
    lines = [
        f"{cases} held-out decisions with one field changed, on {model}, f16 K/V. `as recompute`: the same decision as "
        "a full recompute of the corrected text; `cosine`: mean of the logits against it; `decoded`: tokens a prompt.",
        "",
        "| method | decoded | cosine | direct: right | as recompute | reasoned: right | as recompute | in the paper |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for method in METHODS:
        shares = " | ".join(
            f"{tally[f'{method}/{how}/{what}']:.3f}" for how in ("direct", "reasoned") for what in ("right", "same")
        )
        cost = f"{tally[f'{method}/decoded']:.0f} | {tally[f'{method}/cosine']:.4f}"
        lines.append(f"| {method} | {cost} | {shares} | {PAPER.get(method, '')} |")
    lines += ["", "| bar: decides as the recompute, direct | measured | |", "| --- | ---: | --- |"]
    for method, bar in BARS.items():
        value = tally[f"{method}/direct/same"]
        lines.append(f"| {method} >= {bar:.2f} | {value:.3f} | {'met' if value >= bar else '**missed**'} |")
    lines += ["", *NOTES]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="held-out decisions (default 300)")
    parser.add_argument("--model", type=Path, default=None, help="GGUF to measure (default: the one that ships)")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--write", type=Path, help="write the table into this Markdown file, too")
    given = parser.parse_args()

    tally = Tally()
    with Workspace(
        given.model or config.shipped_model(), ContextOptions(n_ctx=4096, n_threads=given.threads)
    ) as workspace:
        name = f"{workspace.model.name} {workspace.model.quantization}"
        for number, case in enumerate(world.held_out(given.cases), 1):
            measure(workspace, case, tally)
            if number % 10 == 0 and sys.stderr.isatty():
                sys.stderr.write(f"\r{number} of {given.cases}")
    text = report(tally, given.cases, name)
    print(text)
    if given.write:
        head = "# Edit methods\n\nWritten by `make edits` (bench/editing.py); do not edit.\n\n"
        given.write.write_text(head + text + "\n", encoding="utf-8")
    return 0 if all(tally[f"{method}/direct/same"] >= bar for method, bar in BARS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
