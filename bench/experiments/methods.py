"""Edit methods on one case, each against the recompute of the corrected text: what two experiments share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.experiments import figures
from bench.experiments.cases import THINK, WAYS, decision_in, error, near_tie, skill_of
from bench.experiments.table import Row, Table
from bench.experiments.texts import Case
from notes_cli.editing.methods import Method
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import Tokens
from notes_cli.errors import UnsupportedError
from notes_cli.measure.compare import cosine, divergence
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt, changes_of
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill

BLEND = 0.15  # of the skill's tokens: CacheBlend recomputes 10 to 20%
LATE = ", ranked when edited"
METHODS = (
    "stale",
    "field",
    "selective@4",
    "selective@16",
    "selective@64",
    "selective@16" + LATE,
    "blend 15%",
    "erratum",
    "field+erratum",
    "suffix",
    "recompute",
)
HALVES = "recompute, in two halves"  # the same tokens in other batches: what rounding alone does
HOISTED = "suffix, field hoisted"
ALL = (*METHODS, HALVES, HOISTED)
COLUMNS = (
    *(f"{way}_{what}" for way in WAYS for what in ("right", "same")),
    *("cosine", "error", "decoded", "ranking", "near", "kl", "margin", "refused"),
)
# What the paper found on models of 1.7B to 32B parameters.
PAPER = {
    "stale": "acts on the old value",
    "field": "ignored; with reasoning it recovers",
    "selective@16": "depends on the model",
    "blend 15%": "fails",
    "erratum": "robust",
    "field+erratum": "as a recompute",
    "suffix": "as a recompute",
    "recompute": "the reference",
    HOISTED: "works",
}


def hoisted(text: str, name: str, field: str, value: str) -> Skill:
    """The text with one field kept at its end."""
    return skill_of(f"---\nfields:\n  {field}: {{value: {value}, hoist: true}}\n---\n{text}", name)


@dataclass(frozen=True)
class Reference:
    """A full recompute of the corrected text, asked in one of the ways."""

    prompt: Prompt
    tokens: Tokens
    logits: NDArray[np.float32]
    choice: str
    near: bool


def measure_methods(workspace: Workspace, case: Case, prompt: Prompt, lifted: Prompt) -> Iterator[Row]:
    """A row a method. `lifted`: the same prompt with the field hoisted, which has a recompute of its own."""
    for asked, names in ((prompt, (*METHODS, HALVES)), (lifted, (HOISTED,))):
        changed = replace(asked, fields={case.field: case.new})
        references = {way: _reference(workspace, case, replace(changed, think=way == "reasoned")) for way in WAYS}
        for name in names:
            row: Row = {"method": name, **dict.fromkeys(COLUMNS, "")}
            try:
                for way, reference in references.items():
                    row |= _measured(workspace, case, name, way, reference)
            except UnsupportedError as refusal:
                row["refused"] = str(refusal)
            yield row


def _reference(workspace: Workspace, case: Case, prompt: Prompt) -> Reference:
    notebook = assemble(workspace, replace(prompt, method=Method("recompute")), splice=False, room=THINK)
    tokens, logits = notebook.tokens, notebook.logits()
    decision = decision_in(workspace, notebook, prompt, case.choices)
    return Reference(prompt, tokens, logits, decision.choice, near_tie(decision))


def _measured(workspace: Workspace, case: Case, name: str, way: str, reference: Reference) -> Row:
    """Decisions of both ways; what the prompt costs, and its logits, of the direct one."""
    prompt, row = amended(workspace, reference.prompt, name), Row()
    notebook = _halves(workspace, reference.tokens) if name == HALVES else assemble(workspace, prompt, room=THINK)
    if way == "direct":
        logits = notebook.logits()
        row["cosine"], row["error"] = cosine(logits, reference.logits), error(logits, reference.logits)
        row["kl"] = divergence(logits, reference.logits)
        row["decoded"], row["near"] = notebook.decoded, reference.near
    decision = decision_in(workspace, notebook, prompt, case.choices)
    if way == "direct":
        row["margin"] = decision.margin
    choice = decision.choice
    row[f"{way}_right"], row[f"{way}_same"] = choice == case.answer_new, choice == reference.choice
    return row | {"ranking": _ranking(workspace, prompt)}


def _halves(workspace: Workspace, tokens: Tokens) -> Notebook:
    notebook = workspace.notebook()
    for half in np.array_split(tokens, 2):
        notebook.append(half)
        notebook.flush()
    return notebook


def amended(workspace: Workspace, prompt: Prompt, name: str) -> Prompt:
    """The prompt with a method by the name that it has here."""
    if name.endswith(LATE):
        bare = [replace(segment, influence={}) for segment in prompt.segments]
        return replace(prompt, segments=bare, method=Method.parse(name.removesuffix(LATE)))
    if name.startswith("blend"):
        skill = next(iter(changes_of(workspace, prompt)))
        tokens = next(len(segment) for segment in prompt.segments if segment.name == skill)
        return replace(prompt, method=Method("blend", max(1, round(BLEND * tokens))))
    return replace(prompt, method=Method.parse(name.partition(",")[0]))


def _ranking(workspace: Workspace, prompt: Prompt) -> int:
    """Tokens of the passes that choose which tokens are recomputed."""
    by_name = {segment.name: segment for segment in prompt.segments}
    return sum(
        len(by_name[name].context) + len(changed.tokens)
        for name, changed in changes_of(workspace, prompt).items()
        if (selects := prompt.method.record.selects) and selects.needs_pass(by_name[name])
    )


def draw_methods(table: Table, figure: Figure) -> None:
    figure.set_size_inches(8, 6.4)
    axes = figure.subplots()
    figures.bars(axes, ALL, {way: [table.where(method=name).mean(f"{way}_same") for name in ALL] for way in WAYS})
    figures.plain(axes, x="decides as a full recompute of the corrected text")
    axes.set_xlim(0, 1.1)
