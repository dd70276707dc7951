"""Does a model with recurrent layers decide by a skill that its state was carried through as by one that is decoded?

    python -m bench.carried [--model FILE] [--questions N] [--out FILE]

Held-out questions (training/hybrid/cases.py) to the hybrid that is trained in training/hybrid, each about one of two
policies of which the second is carried: after a text that holds the first (`text`), after the first as a skill that is
carried as well (`skill`), and that with an erratum at the end (`erratum`). Every one is also asked with all decoded,
with the second policy left out, and with three states that are wrong: the one before the skill dropped (S <- B), the
skill's own part left out (S <- S), and nothing forgotten (S <- S + B). Rows of attention are placed in all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from notes_cli import config
from notes_cli.engine.decision import decide
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import Carry, Segment, Transition
from notes_cli.measure.compare import cosine, divergence
from notes_cli.measure.proof import interval
from notes_cli.runtime import compiling
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import Erratum
from notes_cli.text.skill import parse_skill
from training.hybrid.cases import ABOUT, Case, held_out

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]
import test_carry as ours  # type: ignore[import-not-found]  # noqa: E402

MODEL = ROOT / "training" / "hybrid" / "notes-hybrid-q8_0.gguf"
SITUATIONS = ("text", "skill", "erratum")
SEAMS = (4, 32)  # besides that of a compile: 16, of a short skill a quarter
READ, CARRIED, WITHOUT = "decoded", "carried", "left out"


WRONG: dict[str, Callable[[Transition], Transition]] = dict(
    zip(("S <- B", "S <- S", "S <- S + B"), ours.CONTROLS.values(), strict=True)
)


@dataclass(frozen=True)
class Found:
    """What was decided at the end of a prompt, and how clearly."""

    choice: str
    margin: float  # probability of the choice less that of the next
    logits: NDArray[np.float32]


@contextmanager
def seam_of(tokens: int) -> Iterator[None]:
    """Compiles in this block have a seam of so many tokens, of short skills of all but one."""
    before = compiling._ends
    compiling._ends = lambda context, length: (min(tokens, length - 1), length - context.margins[1])
    try:
        yield
    finally:
        compiling._ends = before


class Asker:
    """Asks one workspace about two policies."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def compiled(self, text: str, name: str) -> Segment:
        return compiling.compile_skill(self.workspace, parse_skill(text, source="-", default=name))

    def prompt(self, case: Case, situation: str) -> Prompt:
        """With the segments that there are: the second policy, and the first one if that is a skill, too."""
        errata = [Erratum(*case.erratum, "=".join(case.erratum))] if case.erratum else []
        segments, system = [self.compiled(case.second, "second")], case.opening
        if situation == "text":
            system += f"\n\n{case.first}"
        else:
            segments.insert(0, self.compiled(case.first, "first"))
        return Prompt(case.question, segments, errata, system)

    def ask(self, case: Case, prompt: Prompt, *, splice: bool = True) -> Found:
        with assemble(self.workspace, prompt, splice=splice) as notebook:
            if splice and notebook.count("spliced") == 0:
                raise RuntimeError("nothing was carried")
            decision = decide(notebook, case.choices)
            return Found(decision.choice, decision.margin, notebook.logits())

    def wrong(self, prompt: Prompt, change: Callable[[Transition], Transition], layer: int | None = None) -> Prompt:
        """With a wrong state after the second policy, in one layer or in all."""
        *others, last = prompt.segments
        assert last.carry is not None
        parts = [change(one) if layer in (None, one.layer) else one for one in last.carry.load()]
        return replace(
            prompt, segments=[*others, replace(last, carry=Carry.of(last.carry.seam, last.carry.tail, parts))]
        )

    def ways(self, case: Case, situation: str, seams: Sequence[int] = SEAMS) -> dict[str, Found]:
        """The question in every way; the wrong ones with the smallest of `seams`, too."""
        prompt = self.prompt(case, situation)
        left = replace(prompt, segments=prompt.segments[:-1])
        found = {
            READ: self.ask(case, prompt, splice=False),
            CARRIED: self.ask(case, prompt),
            WITHOUT: self.ask(case, left, splice=False),
        }
        found |= {name: self.ask(case, self.wrong(prompt, change)) for name, change in WRONG.items()}
        for seam in seams:
            with seam_of(seam):
                other = self.prompt(case, situation)
            found[f"{CARRIED}, seam {seam}"] = self.ask(case, other)
            if seam == min(seams):
                for name, change in WRONG.items():
                    found[f"{name}, seam {seam}"] = self.ask(case, self.wrong(other, change))
        return found

    def alone(self, case: Case, situation: str) -> dict[str, Found]:
        """With the state before the skill dropped in one layer alone: which of them the answer is in."""
        prompt = self.prompt(case, situation)
        carry = prompt.segments[-1].carry
        assert carry is not None
        forget = WRONG["S <- B"]
        layers = [one.layer for one in carry.load()]
        return {f"S <- B in layer {layer}": self.ask(case, self.wrong(prompt, forget, layer)) for layer in layers}


def summed(cases: list[Case], found: list[dict[str, Found]], way: str) -> dict[str, float | int]:
    """How often a way decides as reading does, how often right, and how near its logits are."""
    pairs = [(case, one[way], one[READ]) for case, one in zip(cases, found, strict=True)]
    return {
        "questions": len(pairs),
        "same": sum(mine.choice == read.choice for _, mine, read in pairs),
        "right": sum(mine.choice == case.answer for case, mine, _ in pairs),
        "cosine": round(fmean(cosine(mine.logits, read.logits) for _, mine, read in pairs), 5),
        "kl": round(fmean(divergence(mine.logits, read.logits) for _, mine, read in pairs), 5),
        "margin": round(fmean(mine.margin for _, mine, _ in pairs), 4),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.carried", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--questions", type=int, default=300, help="of each situation (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    given = parser.parse_args()
    numbers: dict[str, dict[str, dict[str, dict[str, float | int]]]] = {}
    with TemporaryDirectory() as folder:
        paths, options = config.Paths.under(Path(folder)), ContextOptions(n_ctx=1024, n_threads=1)
        with Workspace(given.model, options, paths=paths, carry=True) as workspace:
            asker = Asker(workspace)
            for situation in SITUATIONS:
                cases = held_out(given.questions, corrected=situation == "erratum")
                found = [asker.ways(case, situation) | asker.alone(case, situation) for case in cases]
                numbers[situation] = {}
                for about in ("all", *ABOUT):
                    chosen = [number for number, case in enumerate(cases) if about in ("all", case.about)]
                    some, theirs = [cases[number] for number in chosen], [found[number] for number in chosen]
                    numbers[situation][about] = {way: summed(some, theirs, way) for way in found[0]}
    for situation, by in numbers.items():
        print(f"\n{situation}: same as {READ} / right, cosine, KL, margin; then same / right by what is asked about")
        for way, all_ in by["all"].items():
            parts = [f"{about} {by[about][way]['same']} / {by[about][way]['right']}" for about in ABOUT]
            low, high = interval(int(all_["same"]), int(all_["questions"]))
            print(
                f"{way:<20} {all_['same']} / {all_['right']} of {all_['questions']} ({low:.3f} to {high:.3f}) "
                f"{all_['cosine']:.4f} {all_['kl']:.4f} {all_['margin']:.3f}  {', '.join(parts)}"
            )
    if given.out:
        given.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
