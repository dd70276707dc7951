"""Fidelity of splices, and corrections of fields: one row of figures for each way to make the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from bench.real.run import Outcome, answers
from bench.real.tasks import SKILLS, Correction, Fact, Question, Tasks, contains
from notes_cli.api import Model
from notes_cli.editing.methods import Method
from notes_cli.engine.segment import Segment
from notes_cli.measure.verify import cosine, divergence
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import parse_skill

SYSTEM = "You answer questions about the texts that follow. Answer briefly."
CORRECTIONS = ("nothing", "erratum", "field", "field+erratum", "suffix")  # suffix: the entries of a full prefill
RUNS = 7  # answers that are timed
Progress = Callable[[str], object]


@dataclass
class Fidelity:
    """Answers of one way compared with those of a prefill of the same tokens."""

    way: str
    asked: int = 0
    right: int = 0
    reference_right: int = 0
    same_verdict: int = 0
    same_text: int = 0
    cosines: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)

    def add(self, questions: Iterable[Question], found: Sequence[Outcome], reference: Sequence[Outcome]) -> None:
        for question, one, other in zip(questions, found, reference, strict=True):
            right, wanted = question.right(one.text), question.right(other.text)
            self.asked += 1
            self.right += right
            self.reference_right += wanted
            self.same_verdict += right == wanted
            self.same_text += one.text == other.text
            self.cosines.append(cosine(one.logits, other.logits))
            self.divergences.append(divergence(one.logits, other.logits))

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        cosines, divergences = found.pop("cosines"), found.pop("divergences")
        means = {"cosine": fmean(cosines), "lowest_cosine": min(cosines), "kl": fmean(divergences)}
        return found | {name: round(mean, 5) for name, mean in means.items()}


@dataclass
class Corrected:
    """Answers after a correction: how many have the new value and how many the old one."""

    method: str
    asked: int = 0
    new: int = 0
    old: int = 0
    follows_asked: int = 0
    follows_new: int = 0
    follows_old: int = 0
    other_asked: int = 0
    other_same_verdict: int = 0
    other_same_text: int = 0

    def add(self, correction: Correction, found: Sequence[Outcome], before: Sequence[Outcome]) -> bool:
        """Count the answers to `questions_of` the correction; `before`: those without it. Return whether the new value
        is in the first one."""
        texts = [one.text for one in found]
        new, old = marks(correction, texts[0])
        self.asked += 1
        self.new += new
        self.old += old
        if correction.follows:
            follows = marks(correction.follows, texts[1])
            self.follows_asked += 1
            self.follows_new += follows[0]
            self.follows_old += follows[1]
        if correction.other:
            self.other_asked += 1
            self.other_same_verdict += correction.other.right(texts[-1]) == correction.other.right(before[-1].text)
            self.other_same_text += texts[-1] == before[-1].text
        return new


def marks(correction: Correction, answer: str) -> tuple[bool, bool]:
    """Two flags of an answer: it has the new value and not the old one; it has the old one."""
    old = contains(answer, correction.old)
    return contains(answer, correction.new) and not old, old


def questions_of(correction: Correction) -> list[str]:
    """Return questions after a correction: about the field, about a consequence, about something else."""
    more = (correction.follows, correction.other)
    return [correction.ask, *(one.ask for one in more if one)]


def speed(model: Model, tasks: Sequence[Tasks], progress: Progress) -> list[dict[str, Any]]:
    """Seconds to the first token of an answer about each skill, prefilled and spliced; medians of several questions."""
    rows = []
    for one in tasks:
        progress(f"{one.skill}: time to the first token")
        segment = model.compile(SKILLS / one.skill)
        asked = [question.ask for question in one.questions[:RUNS]]
        prefilled = [model.ask(ask, system=segment.text, max_tokens=1).first_token for ask in asked[:3]]
        spliced = [model.ask(ask, splice=[segment], max_tokens=1).first_token for ask in asked]
        times = {"prefill": round(median(prefilled), 3), "spliced": round(median(spliced), 3)}
        rows.append({"skill": one.skill, "tokens": len(segment), "bytes": segment.nbytes, **times})
    return rows


def fidelity(model: Model, tasks: Sequence[Tasks], progress: Progress) -> list[dict[str, Any]]:
    """Ask the questions of each skill, by each way to put a skill into a prompt."""
    workspace = model.workspace
    ways = ("compiled", "exact", "q8_0", "system", "another")
    rows = {way: Fidelity(way) for way in ways}
    segments = [model.compile(SKILLS / one.skill) for one in tasks]
    for number, one in enumerate(tasks):
        segment, before = segments[number], segments[number - 1]
        asked = [question.ask for question in one.questions]
        progress(f"{one.skill}: {len(asked)} questions")
        plain = answers(workspace, [Prompt(ask, system=segment.text) for ask in asked])
        alone = [Prompt(ask, [segment]) for ask in asked]
        small = model.compile(SKILLS / one.skill, name=f"{one.skill}-q8_0", kv="q8_0")
        rows["compiled"].add(one.questions, answers(workspace, alone), plain)
        rows["exact"].add(one.questions, answers(workspace, alone, exact=True), plain)
        rows["q8_0"].add(one.questions, answers(workspace, [Prompt(ask, [small]) for ask in asked]), plain)
        for way, skills in (("system", [segment]), ("another", [before, segment])):
            prompts = [Prompt(ask, skills, system=SYSTEM) for ask in asked]
            full = answers(workspace, prompts, exact=True)
            rows[way].add(one.questions, answers(workspace, prompts), full)
    return [one.as_dict() for one in rows.values()]


def facts(workspace: Workspace, given: Sequence[Fact], progress: Progress) -> list[dict[str, Any]]:
    """The author's facts: each passage where it was compiled, after a system text, and after another passage."""
    rows = {way: Fidelity(way) for way in ("compiled", "system", "another")}
    compiled: list[Segment] = []
    for number, fact in enumerate(given):
        if number % 20 == 0:
            progress(f"facts: {number} of {len(given)}")
        name = f"passage-{number}"
        compiled.append(compile_skill(workspace, parse_skill(fact.passage, source=name, default=name)))
        ways = (
            ("compiled", compiled[-1:], None),
            ("system", compiled[-1:], SYSTEM),
            ("another", compiled[-2:], SYSTEM),
        )
        for way, skills, system in ways:
            prompt = [Prompt(fact.question.ask, skills, system=system)]
            full = answers(workspace, prompt, splice=False)
            rows[way].add([fact.question], answers(workspace, prompt), full)
    return [one.as_dict() for one in rows.values()]


def corrections(model: Model, tasks: Sequence[Tasks], progress: Progress) -> dict[str, Any]:
    """Each correction by each method, after nothing else and with the default wording."""
    workspace = model.workspace
    rows = {method: Corrected(method) for method in CORRECTIONS}
    possible, held = 0, 0
    before: dict[tuple[str, str], Outcome] = {}  # answers without a correction, by skill and question
    for segment, correction in _each(model, tasks, progress):
        asked = questions_of(correction)
        missing = [ask for ask in asked if (segment.name, ask) not in before]
        if missing:
            plain = answers(workspace, [Prompt(ask, [segment]) for ask in missing])
            before |= {(segment.name, ask): one for ask, one in zip(missing, plain, strict=True)}
        found = {"nothing": [before[segment.name, ask] for ask in asked]}
        for name in CORRECTIONS[1:]:
            values, method = {correction.field: correction.value}, Method.parse(name)
            found[name] = answers(workspace, [Prompt(ask, [segment], fields=values, method=method) for ask in asked])
        new = {name: rows[name].add(correction, found[name], found["nothing"]) for name in CORRECTIONS}
        possible += new["suffix"] or new["field+erratum"]
        held += new["field+erratum"]
    return {"methods": [asdict(one) for one in rows.values()], "possible": possible, "default_of_possible": held}


def _each(model: Model, tasks: Sequence[Tasks], progress: Progress) -> Iterator[tuple[Segment, Correction]]:
    for one in tasks:
        segment = model.compile(SKILLS / one.skill)
        for number, correction in enumerate(one.corrections):
            if number % 5 == 0:
                progress(f"{one.skill}: correction {number} of {len(one.corrections)}")
            yield segment, correction


def interval(part: int, whole: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    if not whole:
        return (0.0, 1.0)
    z, share = 1.959964, part / whole
    middle, spread = share + z * z / (2 * whole), z * math.sqrt(share * (1 - share) / whole + z * z / (4 * whole**2))
    return (middle - spread) / (1 + z * z / whole), (middle + spread) / (1 + z * z / whole)
