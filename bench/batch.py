"""Many questions on one splice, asked together against one after the other: tokens, cells, time and answers.

    python -m bench.batch [--model shipped random] [--questions 100] [--parallel 16] [--threads N] [--rounds N]

Both ways run in one process, by turns, with the model loaded and the skill in the library: a single question opens its
segment, places it, reads the rest of its prompt and writes its answer. Times and their ratio are medians of the rounds,
five with the model that ships, which takes a second, and one with the random one. What llama.cpp decodes is counted
where it is called, in the first round.

The model that ships reads the questions, and its answers must be equal. `random` has the shape of Qwen3-0.6B and random
weights, whose logits are so close to each other that rounding, which goes by who is decoded together, may turn an
answer: the equal ones are counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.random_model import random_model
from notes_cli.config import Paths, shipped_model
from notes_cli.engine.context import Context
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import NotesError
from notes_cli.runtime.asking import Answer, Request, ask
from notes_cli.runtime.batch import PARALLEL, ask_many
from notes_cli.runtime.keeping import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import load_skill, parse_skill
from tests.samples import SAMPLES

ASKED = ("May I return this?", "What is the shipping?", "May I return the lamp?", "What is the shipping of a book?")
RULE = "Goods that were bought at the fair may be brought back until the {}th day, with the slip numbered {}.\n"


@dataclass(frozen=True)
class Result:
    """One model. Times in seconds, of all questions, medians of the rounds."""

    model: str
    questions: int
    parallel: int
    skill: int  # tokens
    written: int  # tokens of all answers
    single: float
    together: float
    ratio: float  # of together to single
    lowest: float
    highest: float
    decoded_single: int
    decoded_together: int
    spliced_single: int
    spliced_together: int
    cells_single: int  # at the peak, of one question
    cells_together: int
    equal: int  # answers

    def lines(self) -> Iterator[str]:
        one, all_of_them, apart = self.cells_single, self.cells_together, self.parallel * self.cells_single
        yield f"{self.model}: {self.questions} questions, {self.parallel} at a time, on a skill of {self.skill} tokens"
        yield f"  time      {self.single:9.2f} s one by one, {self.together:9.2f} s together: {self.ratio:.2f} of it"
        if self.lowest < self.highest:
            yield f"            {self.lowest:.2f} to {self.highest:.2f} of it, by round"
        yield f"  decoded   {self.decoded_single:9,} tokens, {self.decoded_together:9,}; written {self.written:,}"
        yield f"  spliced   {self.spliced_single:9,} tokens, {self.spliced_together:9,}"
        yield f"  cells     {one:9,} for one, {all_of_them:9,} for {self.parallel}; apart {apart:,}"
        yield f"  equal     {self.equal} of {self.questions} answers"


class Counted:
    """What llama.cpp is given to do while this is watched."""

    def __init__(self) -> None:
        self.decoded = self.spliced = self.cells = 0

    @contextmanager
    def watched(self) -> Iterator[Counted]:
        append, splice = Context.append, Context.splice

        def appended(context: Context, tokens: Any, *given: Any) -> None:
            append(context, tokens, *given)
            self.decoded += sum(map(len, tokens.values()))
            self.cells = max(self.cells, context.used)

        def spliced(context: Context, sequence: int, position: int, tokens: Any, *given: Any, **more: Any) -> None:
            splice(context, sequence, position, tokens, *given, **more)
            self.spliced += len(tokens)

        Context.append, Context.splice = appended, spliced  # type: ignore[method-assign, assignment]
        try:
            yield self
        finally:
            Context.append, Context.splice = append, splice  # type: ignore[method-assign]


def questions(count: int) -> list[str]:
    """Such as the model that ships can read."""
    return [ASKED[number % len(ASKED)] for number in range(count)]


def timed(work: Callable[[], list[Answer | NotesError]]) -> tuple[float, list[Answer | NotesError]]:
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def measure(workspace: Workspace, name: str, skill: int, requests: list[Request], parallel: int, rounds: int) -> Result:
    def many(asked: list[Request]) -> list[Answer | NotesError]:
        return [answer for _, answer in ask_many(workspace, asked, parallel)]

    def singly() -> tuple[float, list[Answer | NotesError]]:
        return timed(lambda: [ask(workspace, request) for request in requests])

    def jointly() -> tuple[float, list[Answer | NotesError]]:
        return timed(lambda: many(requests))

    ask(workspace, requests[0])
    many(requests[:2])  # the context is as large as it will be
    with Counted().watched() as one:
        single, alone = singly()
    with Counted().watched() as all_of_them:
        together, answers = jointly()
    pairs = [(a, b) for a, b in zip(alone, answers, strict=True) if isinstance(a, Answer) and isinstance(b, Answer)]
    assert len(pairs) == len(requests), [str(one) for one in answers if isinstance(one, NotesError)]
    times = [(single, together), *((singly()[0], jointly()[0]) for _ in range(rounds - 1))]
    ratios = sorted(together / single for single, together in times)
    return Result(
        model=name,
        questions=len(requests),
        parallel=parallel,
        skill=skill,
        written=sum(b.tokens for _, b in pairs),
        single=median(single for single, _ in times),
        together=median(together for _, together in times),
        ratio=median(ratios),
        lowest=ratios[0],
        highest=ratios[-1],
        decoded_single=one.decoded,
        decoded_together=all_of_them.decoded,
        spliced_single=one.spliced,
        spliced_together=all_of_them.spliced,
        cells_single=one.cells,
        cells_together=all_of_them.cells,
        equal=sum((a.text, a.tokens, a.choice) == (b.text, b.tokens, b.choice) for a, b in pairs),
    )


def run(
    which: str, count: int, parallel: int, options: ContextOptions, home: Path, rounds: int | None
) -> Iterator[Result]:
    shipped = which == "shipped"
    rounds = rounds or (5 if shipped else 1)
    path = shipped_model() if shipped else random_model()
    with Workspace(path, options, paths=Paths.under(home)) as workspace:
        if shipped:
            skill = load_skill(SAMPLES / "returns")
        else:
            text = "".join(RULE.format(number, number * 7) for number in range(10))
            skill = parse_skill(text, source="fair.txt", default="fair")
        segment = workspace.open(compile_to_library(workspace, skill).path)
        asked = [Request(question, [skill.name], max_tokens=256 if shipped else 16) for question in questions(count)]
        yield measure(workspace, which, len(segment), asked, parallel, rounds)
        if shipped:
            choosing = [replace(one, choices=["accepted", "refused"]) for one in asked]
            yield measure(workspace, f"{which}, choosing", len(segment), choosing, parallel, rounds)
            thinking = [replace(one, think=True) for one in asked]
            yield measure(workspace, f"{which}, reasoning", len(segment), thinking, parallel, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=["shipped", "random"], default=["shipped", "random"])
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=PARALLEL)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--flash", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = ContextOptions(n_threads=given.threads, flash_attention=given.flash)
    with tempfile.TemporaryDirectory() as home:
        for which in given.model:
            for result in run(which, given.questions, given.parallel, options, Path(home), given.rounds):
                print(json.dumps(asdict(result)) if given.json else "\n".join(result.lines()), flush=True)


if __name__ == "__main__":
    main()
