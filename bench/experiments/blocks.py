"""A memory in S blocks, compiled apart: what does an edit cost, and what is lost?

Sixteen sections, twelve with a rule and its field, four with a field that nothing asks for. `together`: each section
holds its field and its rule, and cuts fall between sections. `split`: all fields are in the first section, apart
from the rules that refer to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from bench.experiments import figures
from bench.experiments.cases import near_tie, skill_of
from bench.experiments.frame import Summary, explained, grid, interval, share
from bench.experiments.table import Row, Table
from bench.experiments.texts import Rule, Size, Texts
from notes_cli.editing.change import stretches
from notes_cli.editing.methods import Method
from notes_cli.engine.decision import decide
from notes_cli.measure.compare import cosine, divergence
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt, changes_of
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, with_values
from training.world import FILLERS

TITLE = "Memory in blocks"
CASES = 20
DECISIONS = 3  # a case
SIZES = (1, 2, 4, 8, 16)
LAYOUTS = ("together", "split")
RULES = Size(skills=(12, 12), rules=(1, 1), rows=(2, 3), spare=(0, 0), fillers=(0, 0))


def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
    for number, rng in texts.rngs("blocks", cases):
        drafts = texts.memory(rng, RULES)
        asked: list[tuple[Rule, str, str]] = []
        while len(asked) < DECISIONS:
            draft = rng.choice(drafts)
            rule = draft.rules[0]
            new = texts.flipped(rng, rule, draft.skill.fields[rule.field])
            if new:
                asked.append((rule, texts.ask(rng, rule), new))
        sections = [_section(texts, rng, draft.skill.fields, draft.rules) for draft in drafts]
        for field, value in texts.spare(rng, drafts):
            sections.append(_section(texts, rng, {field: value}, ()))
        rng.shuffle(sections)
        for layout in LAYOUTS:
            skill = skill_of(_text(sections, layout), "memory")
            for row in _edited(workspace, skill, asked):
                yield {"case": number, "layout": layout, **row}


Section = tuple[str, Mapping[str, str], list[str]]  # heading, fields, lines


def _section(texts: Texts, rng: random.Random, fields: Mapping[str, str], rules: Sequence[Rule]) -> Section:
    heading = texts.heading(rng, rules)  # before its lines: both are drawn
    return heading, fields, [line for rule in rules for line in rule.lines()] or [f"- {rng.choice(FILLERS)}"]


def _text(sections: Sequence[Section], layout: str) -> str:
    """A paragraph a section, so that a cut falls between sections."""
    paragraphs = []
    for heading, fields, lines in sections:
        keys = [f"{name}: {value}" for name, value in fields.items()]
        paragraphs.append([heading, *(keys if layout == "together" else ()), *lines])
    if layout == "split":
        keys = [f"{name}: {value}" for _, fields, _ in sections for name, value in fields.items()]
        paragraphs[0] = [*keys, *paragraphs[0]]
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def _edited(workspace: Workspace, skill: Skill, asked: Sequence[tuple[Rule, str, str]]) -> Iterator[Row]:
    """One edit and its question after the other, each of the text as it was, in as many blocks as are asked for."""
    whole = compile_skill(workspace, skill)
    references = []
    for rule, question, new in asked:
        prompt = Prompt(question, [whole], fields={rule.field: new}, method=Method("recompute"))
        notebook = assemble(workspace, prompt, splice=False)
        references.append((notebook.logits(), decide(notebook, rule.choices)))
    for size in SIZES:
        segment = compile_skill(workspace, skill, blocks=size) if size > 1 else whole
        for number, (rule, question, new) in enumerate(asked, 1):
            prompt = Prompt(question, [segment], fields={rule.field: new}, method=Method("block"))
            if size > 1:
                changes = changes_of(workspace, prompt)
                parts = stretches(segment, changes[segment.name])
                recompiled = sum(len(part.tokens) for part in parts)
            else:
                corrected = compile_skill(workspace, with_values(skill, {rule.field: new}))
                prompt, recompiled = replace(prompt, segments=[corrected], fields={}), len(corrected)
            notebook = assemble(workspace, prompt)
            wanted, chosen = references[number - 1]
            decision = decide(notebook, rule.choices)
            choice, logits = decision.choice, notebook.logits()
            yield {
                "decision": number,
                "blocks": len(segment.spans),
                "asked_for": size,
                "tokens": len(segment),
                "recompiled": recompiled,
                "right": choice == rule.outcome(new),
                "recompute_right": chosen.choice == rule.outcome(new),
                "same": choice == chosen.choice,
                "near": near_tie(chosen),
                "cosine": cosine(logits, wanted),
                "kl": divergence(logits, wanted),
                "margin": decision.margin,
            }


def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
    rows = []
    for size in SIZES:
        parts = {layout: table.where(layout=layout, asked_for=size) for layout in LAYOUTS}
        recompiled = parts["together"].mean("recompiled")
        times = parts["together"].mean("tokens") / recompiled
        cells = [
            f"{interval(part, 'same')} | {share(part.mean('right'))} | {part.mean('cosine'):.4f}"
            for part in parts.values()
        ]
        rows.append(" | ".join((str(size), f"{recompiled:.0f}", f"{times:.1f}", *cells)))
    head = "S | tokens recompiled | times less" + "".join(
        f" | {layout}: as recompute | right | cosine" for layout in LAYOUTS
    )
    most = table.where(asked_for=SIZES[-1])
    together, split = (most.where(layout=layout).mean("same") for layout in LAYOUTS)
    right = table.where(asked_for=1)
    shows = [
        "In the paper an edit is S times cheaper and lossless for the decision to S = 16, if facts that refer to each "
        f"other stay in one block. Here, at S = {SIZES[-1]}, {together:.3f} decide as the recompute with such facts "
        f"together, {split:.3f} with them split."
    ]
    if explained(table) and split >= together - 0.02:
        shows.append(
            "This model brings a rule and its field together only when it is asked, so it does not mind. The "
            "warning of `notes compile --blocks` is for models that do so while they read."
        )
    return Summary(
        "One field of a memory of sixteen sections changes, and only its block is compiled again (method `block`). "
        "Against the recompute of the corrected text as one, of which "
        f"{share(right.where(layout='together').mean('recompute_right'))} (together) and "
        f"{share(right.where(layout='split').mean('recompute_right'))} (split) are right.",
        (grid(head, rows),),
        (),
        tuple(shows),
    )


def draw(table: Table, figure: Figure) -> None:
    shares, costs = figure.subplots(1, 2)
    x = range(len(SIZES))
    lines = {layout: [table.where(layout=layout, asked_for=size).mean("same") for size in SIZES] for layout in LAYOUTS}
    figures.curves(shares, x, lines)
    figures.plain(shares, x="blocks", y="decides as a recompute of the whole")
    shares.set_ylim(0, 1.05)
    cost = [table.where(layout="together", asked_for=size).mean("recompiled") for size in SIZES]
    figures.curves(costs, x, {"together": cost})
    figures.plain(costs, x="blocks", y="tokens recompiled an edit")
    for axes in (shares, costs):
        axes.set_xticks(x, [str(size) for size in SIZES])
