"""A field toggled 28 turns: one evolving cache, stale and corrected by errata, against a full prefill of its tokens.

Both caches are sessions, in a skill that was spliced after a system text. The second one is compacted before every
question: errata that are superseded are dropped, and what follows them is decoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.experiments import figures
from bench.experiments.cases import SYSTEM, near_tie, reread, segments_of
from bench.experiments.frame import Bar, Summary, explained, grid
from bench.experiments.slope import Slope, slope
from bench.experiments.table import Row, Table
from bench.experiments.texts import Case, Texts
from notes_cli.editing.methods import Method
from notes_cli.engine.decision import decide
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import Tokens
from notes_cli.measure.compare import cosine, divergence
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session

TITLE = "A field toggled 28 turns"
CASES = 12
TURNS = 28
ROOM = 60 * TURNS  # tokens that the conversation may take
CACHES = ("errata", "compacted")
SHOWN = (1, 2, 4, 7, 14, 21, 28)


Prefill = Callable[[Workspace, Sequence[Tokens]], Iterator[Notebook]]


@dataclass(frozen=True)
class Asked:
    """A question as the session has it, and what came of it."""

    right: str
    tokens: Tokens
    logits: NDArray[np.float32]
    choice: str
    margin: float


def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
    return toggle(workspace, cases, texts, _prefilled)


def toggle(workspace: Workspace, cases: int, texts: Texts, prefill: Prefill) -> Iterator[Row]:
    """`prefill` computes what the caches are compared with: a notebook for each prompt of a conversation."""
    for number, case in texts.cases("toggles", cases):
        prompt = Prompt(case.question, segments_of(workspace, case.skills), system=SYSTEM)
        workspace.make_room(len(assemble(workspace, prompt, dry=True)) + ROOM)
        for cache in CACHES:
            with TemporaryDirectory() as folder:
                turns = _toggled(workspace, case, prompt, Path(folder), compact=cache == "compacted")
            references = prefill(workspace, [turn.tokens for turn in turns])
            for count, (turn, reference) in enumerate(zip(turns, references, strict=True), 1):
                wanted = decide(reference, case.choices)
                yield {
                    "case": number,
                    "kind": case.kind,
                    "cache": cache,
                    "turn": count,
                    "tokens": len(turn.tokens),
                    "right": turn.choice == turn.right,
                    "same": turn.choice == wanted.choice,
                    "near": near_tie(wanted),
                    "cosine": cosine(turn.logits, reference.logits()),
                    "kl": divergence(turn.logits, reference.logits()),
                    "margin": turn.margin,
                }


def _toggled(workspace: Workspace, case: Case, prompt: Prompt, folder: Path, *, compact: bool) -> list[Asked]:
    turns = []
    with Sessions(folder).locked("toggled", new=True) as stored:
        session = Session(workspace, stored)
        notebook = assemble(workspace, prompt)
        session.begin(prompt, notebook)
        session.keep(decide(notebook, case.choices).choice)
        for turn in range(1, TURNS + 1):
            value, right = ((case.old, case.answer), (case.new, case.answer_new))[turn % 2]
            session.edit(case.field, value, Method("erratum"))
            if compact:
                session.compact()
            notebook = session.follow(case.question)
            tokens, logits = notebook.tokens, notebook.logits()
            decision = decide(notebook, case.choices)
            turns.append(Asked(right, tokens, logits, decision.choice, decision.margin))
            session.keep(turns[-1].choice)
    return turns


def _prefilled(workspace: Workspace, prompts: Sequence[Tokens]) -> Iterator[Notebook]:
    """Each prompt prefilled; what it shares with the one before it is not computed twice."""
    notebook = workspace.notebook()
    for tokens in prompts:
        notebook, _ = reread(workspace, notebook, tokens)
        yield notebook


def by_turn(table: Table, cache: str, column: str) -> list[float]:
    """Means over the cases, turn by turn."""
    part = table.where(cache=cache)
    return [part.where(turn=turn).mean(column) for turn in part.unique("turn")]


def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
    rows, bars = [], []
    for cache in CACHES:
        for column in ("same", "cosine", "right", "tokens"):
            values = by_turn(table, cache, column)
            digits = {"cosine": 4, "tokens": 0}.get(column, 3)
            cells = [f"{values[turn - 1]:.{digits}f}" for turn in SHOWN if turn <= len(values)]
            name = {"same": "as a full prefill", "right": "right"}.get(column, column)
            told = _told(slope(values)) if column != "tokens" else ""
            rows.append(" | ".join((f"{cache}: {name}", *cells, told)))
        for column, name in (("same", "agreement"), ("cosine", "cosine")):
            trend = slope(by_turn(table, cache, column))
            bars.append(
                Bar(f"{cache}: {name} has no downward trend: upper end of its slope's interval", trend.high, ">=", 0.0)
            )
        low = min(table.where(cache=cache).numbers("cosine"))
        bars.append(Bar(f"{cache}: cosine throughout, lowest of all turns and cases", low, ">=", 0.99))
    shown = [str(turn) for turn in SHOWN if turn <= len(table.unique("turn"))]
    head = f"by turn | {' | '.join(shown)} | slope a turn (95%)"
    return Summary(
        f"{len(table.unique('case'))} cases; the field goes to and fro between two values, and the same question is "
        "asked after every change, in one session. `errata`: nothing is ever taken out. `compacted`: `notes session "
        "compact` before every question. Both against a full prefill of the very same tokens. Slopes are by least "
        "squares over the means of the 28 turns.",
        (grid(head, rows),),
        tuple(bars),
        (
            "In the paper agreement has no downward trend and the cosine stays at 0.99 and above. A trend is downward "
            "if the whole interval of its slope is below 0.",
            *_rightness(table),
        ),
    )


def _rightness(table: Table) -> Iterator[str]:
    """Whether right answers become rarer, and what that is due to."""
    falling = False
    for cache in CACHES:
        right, tokens = (by_turn(table, cache, column) for column in ("right", "tokens"))
        half = len(right) // 2
        falls = slope(right).falls
        halves = f"first half of the turns {fmean(right[:half]):.3f}, second {fmean(right[half:]):.3f}"
        said = "falls" if falls else "does not fall"
        yield f"`{cache}`: being right {said} ({halves}; {tokens[-1]:.0f} tokens in the end)."
        falling |= falls
    if falling:
        yield (
            "Where it falls the full prefill falls with it: no error grows in the cache, but the text becomes harder, "
            "with many errata of one field that contradict each other and earlier answers to the same question."
        )
    if falling and explained(table):
        yield "This model was trained on prompts of up to 700 tokens."


def _told(trend: Slope) -> str:
    return f"{trend.value:+.1e} ({trend.low:+.1e} to {trend.high:+.1e})"


def draw(table: Table, figure: Figure) -> None:
    figure.set_size_inches(8, 6)
    shares, cosines = figure.subplots(2, 1, sharex=True)
    turns = [float(turn) for turn in table.unique("turn")]
    figures.curves(
        shares,
        turns,
        {
            f"{cache}: {name}": by_turn(table, cache, column)
            for cache in CACHES
            for column, name in (("same", "as a full prefill"), ("right", "right"))
        },
    )
    figures.plain(shares, y="share of decisions")
    shares.set_ylim(-0.03, 1.05)
    figures.curves(cosines, turns, {cache: by_turn(table, cache, "cosine") for cache in CACHES})
    figures.plain(cosines, x="turn", y="logit cosine, mean")
    cosines.axhline(0.99, color=figures.GREY, linewidth=0.8)
