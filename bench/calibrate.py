"""Measure edit methods, and skills that were compiled apart, on a model: the figures of docs/trust.md and composing.md.

    python -m bench.calibrate [--model FILE] [-n CASES] [--pairs N] [--seed N]

Each of 40 decisions (battery.yaml) is made after one field of its text has got another value, by each edit method,
directly and after a chain of thought. What counts is whether it is right, not whether it agrees with a recompute: where
a model overlooks a field in a long text, a recompute is wrong itself. Then 48 pairs of made-up skills, each with a
question that one of them answers and one that needs both, read together, spliced, and in each way that might repair
what splicing loses. The control leaves one skill out: if a model does no better with both, it cannot answer such
questions.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from bench import methods
from bench.battery import PAIRS, SEED, Case, Pair, better, cases, format_count, pairs
from bench.marked import grid
from notes_cli.config import shipped_model
from notes_cli.editing.methods import ERRATUM, METHODS, RECOMPUTE
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import UnsupportedError
from notes_cli.measure.verify import verify_system
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import ReplyGenerator, decide, decide_after_reasoning
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import joined

THINK = 256  # tokens of reasoning
SEAM = 16  # tokens of the longer seam
TOGETHER, SPLICED = "read together", "spliced"


@dataclass(frozen=True)
class Decided:
    """A decision: right, equal to that of a full recompute, and the tokens of its prompt that were decoded."""

    right: bool
    same: bool
    decoded: int


Table = dict[tuple[str, str], list[Decided]]  # by way of making a decision, and kind of question


def decision(workspace: Workspace, sequence: KVSequence, choices: Sequence[str], think: bool) -> tuple[str, int]:
    """The preferred choice at the end of a prompt, which is closed, and the tokens decoded before it."""
    with sequence:
        sequence.logits()
        decoded = sequence.decoded
        if not think:
            return decide(sequence, choices).choice, decoded
        thought = run(ReplyGenerator(workspace, max_think=THINK).reason(sequence))
        return run(decide_after_reasoning(workspace, sequence, choices, thought)).choice, decoded


def edits(workspace: Workspace, found: Sequence[Case]) -> Table:
    """The decisions by each method that this model supports, directly and after a thought."""
    table: Table = defaultdict(list)
    for case in found:
        whole, blocks = (compile_skill(workspace, case.skill, blocks=count) for count in (1, 2))
        for kind in ("directly", "after a thought"):
            think = kind != "directly"
            prompt = Prompt(
                case.question, [whole], system=verify_system(), fields={case.field: case.value}, think=think
            )
            reference, reading = "", [RECOMPUTE, *(method for method in METHODS.values() if method != RECOMPUTE)]
            for method in reading:
                asked = replace(prompt, method=method, segments=[blocks if method.name == "block" else whole])
                try:
                    sequence = assemble(workspace, asked, splice=method != RECOMPUTE, room=THINK * think)
                except UnsupportedError:
                    continue
                choice, decoded = decision(workspace, sequence, case.choices, think)
                reference = reference or choice
                table[method.name, kind].append(Decided(choice == case.right[1], choice == reference, decoded))
    return table


def composed(workspace: Workspace, found: Sequence[Pair]) -> Table:
    """The decisions about each pair in each way, by the number of skills that the question needs."""
    table: Table = defaultdict(list)
    for pair in found:
        first, second = (compile_skill(workspace, skill) for skill in (pair.first, pair.second))
        both = compile_skill(workspace, joined([pair.first, pair.second], "both"))
        for asked in pair.asked:
            prompt = Prompt(asked.question, [first, second], system=verify_system())
            ways = {
                TOGETHER: (prompt, {"splice": False}),
                SPLICED: (prompt, {}),
                "reversed": (replace(prompt, segments=[second, first]), {}),
                f"seam@{SEAM}": (prompt, {"seam": SEAM}),
                "together": (replace(prompt, segments=[both]), {}),
                "suffix": (replace(prompt, decoded=frozenset({second.name})), {}),
            }
            if asked.needs == 2:
                for way, left in (("without the first", second), ("without the second", first)):
                    ways[way] = (replace(prompt, segments=[left]), {"splice": False})
            reference = ""
            for way, (put, how) in ways.items():
                choice, decoded = decision(workspace, assemble(workspace, put, **how), asked.choices, False)
                reference = reference or choice
                table[way, str(asked.needs)].append(Decided(choice == asked.right, choice == reference, decoded))
    return table


def report(table: Table, kinds: Sequence[str], baseline: str) -> str:
    """A row a way: tokens decoded, right decisions with an exact interval, those of a recompute, and whether it is
    proven better or worse than the baseline."""
    rows = []
    for way in dict.fromkeys(way for way, _ in table):
        cells = []
        for kind in kinds:
            made, usual = table.get((way, kind), []), table.get((baseline, kind), [])
            right, other = [each.right for each in made], [each.right for each in usual]
            if len(made) < len(usual):  # not asked so, or not possible in all cases
                cells += ["", "", ""]
                continue
            proven = "better" if better(right, other) else "worse" if better(other, right) else ""
            cells += [format_count(sum(right), len(right)), str(sum(each.same for each in made)), proven]
        decoded = fmean(each.decoded for kind in kinds for each in table.get((way, kind), []))
        rows.append((way, f"{decoded:.0f}", *cells))
    columns = [f"{kind}: {word}" for kind in kinds for word in ("right", "as a recompute", f"than {baseline}")]
    return grid(" | ".join(["way", "decoded", *columns]), [" | ".join(row) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("-n", type=int, default=None, help="decisions, by default all 40")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--seed", type=int, default=SEED, help="of the pairs")
    given = parser.parse_args()
    methods.add()
    with Workspace(given.model, ContextOptions(n_ctx=4096)) as workspace:
        print(f"# {workspace.name}\n")
        print(report(edits(workspace, cases()[: given.n]), ("directly", "after a thought"), ERRATUM.name))
        if given.pairs and workspace.context.supports("splice") is None:
            print()
            print(report(composed(workspace, pairs(given.pairs, given.seed)), ("1", "2"), SPLICED))


if __name__ == "__main__":
    main()
