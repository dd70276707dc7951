"""Rows that say nothing of the skill in place of its own: another skill's, and random ones. All else stays."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench.experiments.cases import SYSTEM, near_tie, segments_of, skill_of
from bench.experiments.table import Row
from bench.experiments.texts import Size
from bench.protocol.measures.beside import beside
from bench.protocol.seeds import rng_of
from bench.protocol.texts import Next
from notes_cli.engine.decision import decide
from notes_cli.engine.segment import LayerRows, RowArray, Segment, floats
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace

OTHER = Size(skills=(1, 1), rules=(3, 3), rows=(2, 5), spare=(0, 2), fillers=(0, 2))


def measure(workspace: Workspace, cases: int, texts: Next) -> Iterator[Row]:
    for number, case in texts.policies("controls", cases, skills=(1,)):
        (own,) = segments_of(workspace, case.skills)
        rng = rng_of(texts.commit, "controls, other", number)
        rows = {
            "own": own.layers,
            "other": _other(workspace, texts, rng, len(own)).layers,
            "random": random_rows(own.layers, np.random.default_rng(rng.getrandbits(64))),
        }
        prompt = Prompt(case.question, [own], system=SYSTEM)
        with assemble(workspace, prompt, splice=False) as notebook:
            wanted, reference = notebook.logits(), decide(notebook, case.choices)
        row: Row = {"case": number, "kind": case.kind, "near": near_tie(reference)}
        for name, layers in rows.items():
            with assemble(workspace, replace(prompt, segments=[replace(own, layers=layers)])) as notebook:
                logits, decision = notebook.logits(), decide(notebook, case.choices)
                row[name] = decision.choice == reference.choice
                row |= beside(logits, wanted, decision, f"{name}_")
        yield row


def _other(workspace: Workspace, texts: Next, rng: random.Random, tokens: int) -> Segment:
    """The first tokens of other skills, so many."""
    parts: list[str] = []
    while True:
        parts += [draft.skill.text for draft in texts.memory(rng, OTHER)]
        text = "\n\n".join(parts)
        if len(workspace.model.tokenize(text)) >= tokens:
            return compile_skill(workspace, skill_of(text, "other")).slice(0, tokens)


def random_rows(layers: Sequence[LayerRows], rng: np.random.Generator) -> tuple[LayerRows, ...]:
    """Rows with the mean and the spread that each number of the layer's own rows has."""

    def drawn(rows: RowArray) -> RowArray:
        found = floats(rows)
        made = rng.normal(found.mean(0), found.std(0), found.shape)
        return made.astype(np.float32) if rows.dtype == np.float32 else made.astype(np.float16)

    return tuple(replace(layer, k=drawn(layer.k), v=drawn(layer.v)) for layer in layers)
