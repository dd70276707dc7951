"""The unified agent: a memory of skills compiled once, composed by splicing, edited as the conversation goes on.

Ten domains, each a memory of several skills; ten instances of each: a decision, a field changes, a decision, it changes
again, a decision. All in one growing session. The baseline prefills everything at every turn: the corrected text and
the conversation so far. A prefix cache reads the same, and computes what follows the first token that is another one.
In half of the instances the skill that is edited is the first of the memory, in half the last.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.experiments import figures, intervals
from bench.experiments.calibration import profile_of
from bench.experiments.cases import SYSTEM, near_tie, reread, segments_of
from bench.experiments.frame import Bar, Summary, grid, interval, ratio
from bench.experiments.table import Row, Table
from bench.experiments.texts import Draft, Rule, Size, Texts
from notes_cli.editing.methods import ERRATUM, SUFFIX, Method
from notes_cli.engine.decision import Decision, decide
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import Segment
from notes_cli.errors import UnsupportedError
from notes_cli.measure.compare import cosine, divergence
from notes_cli.measure.verify import corrected_segment
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session

TITLE = "The unified agent"
CASES = 10  # domains
INSTANCES = 10
DECISIONS = 3
MEMORY = Size(skills=(4, 4), rules=(3, 3), rows=(5, 6), spare=(0, 2), fillers=(4, 6))
PLACES = ("early", "late")  # where the skill that is edited is in the memory: the first, or the last
DEFAULT = "erratum"  # what notes does on a model that was not calibrated
METHODS = (DEFAULT, "field+erratum", "field")  # and what a calibration chooses, if it is another
CHOSEN = "field"  # it agreed best on the reversed model in 690 decisions of other seeds (1, 2 and 3)
BASELINE = "prefill every turn"
PREFIX = "prefix cache"


@dataclass(frozen=True)
class Instance:
    """What is asked, and the values that the field has at each question."""

    rule: Rule
    questions: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """What a turn came to: its decision, tokens decoded for it, and seconds to the first token."""

    decoded: int
    seconds: float
    decision: Decision
    logits: NDArray[np.float32]


def measure(workspace: Workspace, cases: int, texts: Texts) -> Iterator[Row]:
    calibrated = by_calibration(workspace)
    for domain, rng in texts.rngs("agent", cases):
        drafts = texts.memory(rng, MEMORY)
        started = time.perf_counter()
        segments = segments_of(workspace, [draft.skill for draft in drafts])
        compiled = time.perf_counter() - started
        for number in range(1, INSTANCES + 1):
            for row in _instance(workspace, make_instance(texts, rng, drafts), segments, number, calibrated):
                yield {"case": domain, **row, "compiling": compiled}


def seconds(workspace: Workspace, texts: Texts) -> float:
    """About how long a domain takes: by one instance, of the agents that need no calibration."""
    ((_, rng),) = texts.rngs("agent", 1)
    drafts = texts.memory(rng, MEMORY)
    segments = segments_of(workspace, [draft.skill for draft in drafts])
    started = time.monotonic()
    for _ in _instance(workspace, make_instance(texts, rng, drafts), segments, 1, DEFAULT):
        pass
    return (time.monotonic() - started) * INSTANCES


def _instance(
    workspace: Workspace, instance: Instance, segments: Sequence[Segment], number: int, calibrated: str
) -> Iterator[Row]:
    """What each agent comes to at each question."""
    place = PLACES[(number - 1) % len(PLACES)]
    memory = placed(segments, instance.rule.field, place)
    baseline = prefilling(workspace, memory, instance)
    agents = {BASELINE: baseline, PREFIX: caching(workspace, memory, instance)}
    for name in dict.fromkeys((*METHODS, calibrated)):
        with suppress(UnsupportedError):
            agents[name] = _editing(workspace, memory, instance, name)
    for name, turns in agents.items():
        for turn, (found, reference) in enumerate(zip(turns, baseline, strict=True)):
            yield {
                "instance": number,
                "decision": turn + 1,
                "kind": instance.rule.kind,
                "place": place,
                "agent": name,
                "calibrated": calibrated,
                "memory": sum(map(len, segments)),
                "right": found.decision.choice == instance.rule.outcome(instance.values[turn]),
                "same": found.decision.choice == reference.decision.choice,
                "near": near_tie(reference.decision),
                "cosine": cosine(found.logits, reference.logits),
                "kl": divergence(found.logits, reference.logits),
                "margin": found.decision.margin,
                "decoded": found.decoded,
                "seconds": found.seconds,
            }


def by_calibration(workspace: Workspace) -> str:
    """The method that `notes calibrate` would choose for this model, as a session follows it."""
    method = Method.parse(profile_of(workspace).methods["direct"])
    if method.record.reaches_end:
        return str(SUFFIX)
    return str(method if method.record.in_session else ERRATUM)


def placed(segments: Sequence[Segment], field: str, place: str) -> list[Segment]:
    """The memory with the skill that has the field first, or last; the others as they were."""
    (edited,) = (segment for segment in segments if field in (span.name for span in segment.fields))
    others = [segment for segment in segments if segment is not edited]
    return [edited, *others] if place == "early" else [*others, edited]


def make_instance(texts: Texts, rng: random.Random, drafts: Sequence[Draft]) -> Instance:
    """A rule of the memory, and two changes of its field that each change the outcome."""
    while True:
        draft = rng.choice(drafts)
        rule = rng.choice(draft.rules)
        values = [draft.skill.fields[rule.field]]
        while len(values) < DECISIONS and (new := texts.flipped(rng, rule, values[-1])):
            values.append(new)
        if len(values) == DECISIONS:
            return Instance(rule, tuple(texts.ask(rng, rule) for _ in values), tuple(values))


Step = Callable[[Notebook, Prompt], tuple[Notebook, int]]


def prefilling(workspace: Workspace, memory: Sequence[Segment], instance: Instance) -> list[Turn]:
    """Everything is prefilled again at every turn."""

    def step(before: Notebook, prompt: Prompt) -> tuple[Notebook, int]:
        before.close()  # while its rows are there, llama.cpp's attention goes over them, too
        notebook = assemble(workspace, prompt, splice=False)
        return notebook, len(notebook)

    return _reading(workspace, memory, instance, step)


def caching(workspace: Workspace, memory: Sequence[Segment], instance: Instance) -> list[Turn]:
    """As servers cache prompts: of what was read last all is kept up to the first token that is another one. It is
    empty when an instance begins."""

    def step(before: Notebook, prompt: Prompt) -> tuple[Notebook, int]:
        return reread(workspace, before, assemble(workspace, prompt, splice=False, dry=True).tokens)

    return _reading(workspace, memory, instance, step)


def _reading(workspace: Workspace, memory: Sequence[Segment], instance: Instance, step: Step) -> list[Turn]:
    """The corrected text and the conversation so far at every turn. `step` makes a notebook of it from the one of the
    turn before, and counts the tokens decoded."""
    turns: list[Turn] = []
    notebook = workspace.notebook()
    try:
        for question, value in zip(instance.questions, instance.values, strict=True):
            text = [corrected_segment(segment, {instance.rule.field: value}, workspace) for segment in memory]
            said = [(asked, turn.decision.choice) for asked, turn in zip(instance.questions, turns, strict=False)]
            started = time.perf_counter()
            notebook, decoded = step(notebook, Prompt(question, text, system=SYSTEM, turns=said))
            logits = notebook.logits()
            seconds = time.perf_counter() - started
            turns.append(Turn(decoded, seconds, decide(notebook, instance.rule.choices), logits))
    finally:
        notebook.close()
    return turns


def _editing(workspace: Workspace, memory: Sequence[Segment], instance: Instance, method: str) -> list[Turn]:
    """One session: spliced once, then edits and questions after what is there."""
    turns: list[Turn] = []
    prompt = Prompt(instance.questions[0], memory, system=SYSTEM)
    with (
        TemporaryDirectory() as folder,
        Sessions(Path(folder)).locked("agent", new=True) as stored,
        Session(workspace, stored) as session,
    ):
        for number, (question, value) in enumerate(zip(instance.questions, instance.values, strict=True)):
            started = time.perf_counter()
            if number:
                before = _again(session)
                session.edit(instance.rule.field, value, Method.parse(method))
                edited = _again(session) - before
                before = len(session.notebook)
                notebook = session.follow(question)
                count = len(notebook) - before + edited
            else:
                notebook = assemble(workspace, prompt)
                count = notebook.decoded
            logits = notebook.logits()
            seconds = time.perf_counter() - started
            if not number:
                session.begin(prompt, notebook)
            turns.append(Turn(count, seconds, decide(notebook, instance.rule.choices), logits))
            session.keep(turns[-1].decision.choice)
    return turns


def _again(session: Session) -> int:
    """Tokens recomputed in place so far."""
    return sum(piece.rewritten for piece in session.notebook.pieces)


def summarise(table: Table, others: Mapping[str, Table]) -> Summary:
    base, agents = table.where(agent=BASELINE), editing(table)
    rows = []
    for name in (BASELINE, PREFIX, *agents):
        part = table.where(agent=name)
        if not len(part):
            rows.append(f"{name} | refused | | | | |")
            continue
        less = base.total("decoded") / part.total("decoded")
        faster = base.total("seconds") / part.total("seconds")
        cells = (f"{part.total('decoded'):.0f} | 1/{less:.1f}", f"{part.total('seconds'):.1f} s | {faster:.1f}")
        rows.append(" | ".join((name, interval(part, "same"), f"{part.mean('right'):.3f}", *cells)))
    name = next((name for name in (CHOSEN, *METHODS) if len(table.where(agent=name))), CHOSEN)
    chosen = table.where(agent=name)
    compiling = Table(row for row in base if row["instance"] == row["decision"] == 1).total("compiling")
    seconds, before = chosen.total("seconds"), base.total("seconds")
    alone = ratio(*(edits(part).total("seconds") for part in (base, chosen)))
    decoded = ratio(chosen.total("decoded"), base.total("decoded"))
    return Summary(
        f"{len(table.unique('case'))} domains, each a memory of four skills ({table.mean('memory'):.0f} tokens in the "
        f"mean) after a system text; {INSTANCES} instances of each: a question, a field changes, the question in "
        f"other words, it changes again, the question. {len(base)} decisions, each instance one growing session. The "
        "baseline prefills the corrected text and the conversation so far at every turn. The prefix cache reads the "
        "same text, keeps what it has up to the first token that is another one, and begins each instance empty. In "
        "half of the instances the edited skill is the first of the memory (early), in half the last (late). `right` "
        "is agreement with an oracle. Seconds are those to the first token, the edit and what a session writes for it "
        "included. (On the CPU flash attention would speed up the baseline a little and slow down the agents a lot: "
        "llama.cpp's kernel is slow on batches of a few tokens.)",
        (
            grid(
                "agent | as the baseline | right | tokens decoded | of the baseline's | to first tokens | times faster",
                rows,
            ),
            grid(
                "edited skill | agent | tokens decoded after an edit | of the prefix cache's | all questions | "
                "time to the first token after an edit, of the prefix cache's | all questions",
                [" | ".join(_beside_prefix(table, place, name)) for place in PLACES for name in (PREFIX, *agents)],
            ),
        ),
        (
            Bar(f"decides as the baseline ({name})", chosen.mean("same"), ">=", 0.98),
            Bar(f"tokens decoded, of the baseline's ({name})", decoded, "<=", 0.1),
        ),
        (
            f"Cumulative time to the first token is {ratio(before, seconds):.1f} times less than prefilling every turn "
            f"({alone:.1f} times after the first question of an instance); in the paper 2.3 to 4.3 times, and up to "
            f"14.9 times a decision. Compiling the memories took {compiling:.1f} s once: with it "
            f"{ratio(before, seconds + compiling):.1f} times, {INSTANCES} instances to a memory.",
            *_cheaper(table, DEFAULT),
            f"`{CHOSEN}` was chosen among the three by other texts than these. What holds on a model that was not "
            f"calibrated is `{DEFAULT}`, and `notes calibrate` chooses `{table.rows[0]['calibrated']}` for this one. "
            f"{_differing(table)}",
        ),
    )


def editing(table: Table) -> list[str]:
    """The agents that edit: all methods, and the one by calibration if it is another."""
    return list(dict.fromkeys((*METHODS, str(table.rows[0]["calibrated"])))) if len(table) else [*METHODS]


def edits(table: Table) -> Table:
    """The decisions after an edit: all but the first of each instance."""
    return Table(row for row in table if row["decision"] != 1)


def beside(table: Table, name: str, column: str, other: str = PREFIX) -> intervals.Figure:
    """What an agent took in all, of what another one did, with its interval by domain."""
    return intervals.ratio(*(intervals.Part(table.where(agent=each), column) for each in (name, other)))


def _beside_prefix(table: Table, place: str, name: str) -> Iterator[str]:
    """The cells of an agent, of instances with the edited skill in that place."""
    part = table.where(place=place)
    yield from (place, name, f"{edits(part).where(agent=name).total('decoded'):.0f}")
    for column in ("decoded", "seconds"):
        for rows in (edits(part), part):
            yield _figure(beside(rows, name, column)) if name != PREFIX else "1"


def _figure(found: intervals.Figure) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})" if found.n else "refused"


def _cheaper(table: Table, name: str) -> Iterator[str]:
    """Which one is cheaper, the agent or the prefix cache, where, and what the agent owes to an erratum alone."""
    if not len(table.where(agent=name)):
        return
    for place, where in zip(PLACES, ("first", "last"), strict=True):
        part = edits(table.where(place=place))
        tokens, seconds = (_compared(beside(part, name, column)) for column in ("decoded", "seconds"))
        yield (
            f"After an edit in the {where} skill of the memory the tokens that `{name}` decodes are {tokens}; its time "
            f"to the first token is {seconds}."
        )
    after = edits(table)
    cached, own = (after.where(agent=agent).numbers("decoded") for agent in (PREFIX, name))
    less = sum(a < b for a, b in zip(cached, own, strict=True))
    yield (
        "A prefix cache decodes what follows the value in the whole prompt, the conversation, too "
        f"({min(cached):.0f} to {max(cached):.0f} tokens here), `{name}` {min(own):.0f} to {max(own):.0f}, wherever "
        f"the value is: the prefix cache decodes fewer after {less} of {len(own)} edits."
    )
    if Method.parse(name) == ERRATUM:
        first = beside(table.where(decision=1), name, "decoded")
        yield (
            "An erratum changes no text: a prefix cache to whose prompt it is said, too, decodes after an edit what "
            f"the agent does. Then only the first question differs, for which the agent decodes {_figure(first)} of "
            "the tokens, as the skills are spliced."
        )


def _compared(found: intervals.Figure) -> str:
    """Of the prefix cache's, and whether that is cheaper by the whole interval."""
    said = "cheaper" if found.high < 1 else "dearer" if found.low > 1 else "neither cheaper nor dearer"
    return f"{_figure(found)} of the prefix cache's, **{said}**"


def _differing(table: Table) -> str:
    """Who is right where they differ."""
    right = {(row["case"], row["instance"], row["decision"]): row["right"] for row in table.where(agent=BASELINE)}
    said = []
    for name in table.unique("agent")[1:]:
        differ = table.where(agent=name, same=0)
        theirs = sum(int(right[row["case"], row["instance"], row["decision"]]) for row in differ)
        said.append(
            f"`{name}` differs in {len(differ)}, right in {differ.total('right'):.0f}, the baseline in {theirs}"
        )
    return f"Where an agent and the baseline differ: {'; '.join(said)}."


def draw(table: Table, figure: Figure) -> None:
    figure.set_size_inches(8, 6.4)
    turns = range(1, DECISIONS + 1)
    names = [str(name) for name in table.unique("agent") if name != "field+erratum"]  # the curve of `erratum`, or near
    shown = ("decoded", "tokens decoded, mean"), ("seconds", "seconds to the first token, mean")
    panels = figure.subplots(len(shown), len(PLACES), sharex=True, sharey="row", squeeze=False)
    for row, (column, label) in zip(panels, shown, strict=True):
        for axes, place in zip(row, PLACES, strict=True):
            part, last = table.where(place=place), row is panels[-1]
            lines = {
                name: [part.where(agent=name, decision=turn).mean(column) for turn in turns]
                for name in names
                if len(part.where(agent=name))
            }
            figures.curves(axes, turns, lines)
            title = "" if last else f"edited skill {place} in the memory"
            y = label if place == PLACES[0] else ""
            figures.plain(axes, x="decision of an instance" if last else "", y=y, title=title)
            axes.set_xticks(turns)
            figures.logarithmic(axes)
    for axes in panels.flat[1:]:
        axes.get_legend().remove()
