"""Early or late: spliced skills in the system message, or in the user message right before the question?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure

from bench.experiments import figures
from bench.experiments.cases import SYSTEM, near_tie, segments_of
from bench.experiments.frame import Summary, explained, grid, interval, share
from bench.experiments.table import Row, Table
from bench.experiments.texts import Texts
from notes_cli.engine.decision import decide
from notes_cli.measure.compare import cosine, divergence
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from training import world

TITLE = "Early or late"
CASES = 216
PLACES = ("early", "late")
TURNS = (0, 2, 8)  # of conversation before the question


def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
    pairs = zip(texts.cases("placement", cases), texts.rngs("placement", cases), strict=True)
    for (number, case), (_, rng) in pairs:
        segments = segments_of(workspace, case.skills)
        talk = [small_talk(rng) for _ in range(max(TURNS))]
        for turns in TURNS:
            for place in PLACES:
                prompt = Prompt(case.question, segments, system=SYSTEM, turns=talk[:turns], place=place)
                reference = assemble(workspace, prompt, splice=False)
                wanted, chosen = reference.logits(), decide(reference, case.choices)
                notebook = assemble(workspace, prompt)
                decision, logits = decide(notebook, case.choices), notebook.logits()
                choice = decision.choice
                yield {
                    "case": number,
                    "skills": len(case.skills),
                    "turns": turns,
                    "place": place,
                    "recompute_right": chosen.choice == case.answer,
                    "right": choice == case.answer,
                    "same": choice == chosen.choice,
                    "near": near_tie(chosen),
                    "cosine": cosine(logits, wanted),
                    "kl": divergence(logits, wanted),
                    "margin": decision.margin,
                }


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A question that needs no skill, and its answer."""
    limit = world.make_amount(rng)
    rule = world.Rule("amount", "", "", limit=limit)
    value = world.other_value(rng, "amount", "", "", rule)
    return f"Is {value} over {limit}?", "yes" if rule.holds(value) else "no"


def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
    rows = []
    groups = [({"turns": turns}, f"{turns} turns before") for turns in TURNS]
    groups += [({"skills": count}, "1 skill" if count == 1 else f"{count} skills") for count in (1, 2, 3)]
    for wanted, name in (*groups, ({}, "all")):
        part = table.where(**wanted)
        cells = [name]
        for place in PLACES:
            here = part.where(place=place)
            cells += [share(here.mean("recompute_right")), share(here.mean("right")), share(here.mean("same"))]
        rows.append(" | ".join(cells))
    head = (
        "| early: recompute right | spliced right | as recompute | late: recompute right | spliced right | as recompute"
    )
    early, late = (table.where(place=place) for place in PLACES)
    better = "late" if late.mean("right") > early.mean("right") else "early"
    shows = (
        f"In the paper late placement of transplanted memory is better (0.93 against 0.83). Here spliced skills are "
        f"read right in {interval(early, 'right')} early and {interval(late, 'right')} late. "
    )
    if better == "early" and explained(table):
        shows += (
            "This model was trained with skills in the system message only, so this is no fair trial of the "
            "late place; `early` is its default."
        )
    return Summary(
        "Skills are in the system message, or in the user message right before the question, after so many turns "
        "of conversation that need no skill (`Is 120 over 500?`). Each against the recompute of the same tokens.",
        (grid(head, rows),),
        (),
        (shows,),
    )


def draw(table: Table, figure: Figure) -> None:
    axes = figure.subplots()
    lines = {
        f"{place}, {name}": [table.where(place=place, turns=turns).mean(column) for turns in TURNS]
        for place in PLACES
        for name, column in (("spliced", "right"), ("recompute", "recompute_right"))
    }
    figures.curves(axes, TURNS, lines)
    figures.plain(axes, x="turns of conversation before the question", y="right")
    axes.set_xticks(TURNS)
    axes.set_ylim(min(0.8, *(value for line in lines.values() for value in line)) - 0.01, 1.01)
