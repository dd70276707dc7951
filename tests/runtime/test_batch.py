"""Tests jobs and questions that run together: each has the results of each alone, in order, and spoils no other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import SAMPLES

from notes_cli.editing.methods import ERRATUM, Method
from notes_cli.engine.context import Context
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.sequence import KVSequence, Task, TokenGenerator, run
from notes_cli.errors import EngineError, NotesError
from notes_cli.runtime.answering import IDLE, WAITING, ask, ask_many
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.request import UNLIMITED, Answer, Request
from notes_cli.runtime.scheduler import Job, Scheduler
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, load_skill, parse_skill

from ..conftest import MakeWorkspace

QUESTIONS = ["Why?", "And how many of them, if any?", "Où ça, 日本?", "When", "What is the tier of this one here?"]


def comparable(answer: Answer | NotesError) -> Any:
    """Return the part of an answer that must not depend on the batch."""
    if isinstance(answer, NotesError):
        return str(answer)
    counts, probabilities = replace(answer.counts, shared=0), {}
    if answer.decision:
        probabilities = {name: pytest.approx(one, abs=2e-2) for name, one in answer.decision.probabilities.items()}
    thought = answer.thought.text if answer.thought else None
    pieces = [(piece.kind, piece.name, piece.position, piece.tokens, piece.how) for piece in answer.pieces]
    return answer.text, answer.choice, answer.tokens, answer.stopped, thought, counts, pieces, probabilities


def alone(workspace: Workspace, requests: Sequence[Request]) -> list[Any]:
    found = []
    for request in requests:
        try:
            found.append(comparable(ask(workspace, request)))
        except NotesError as error:
            found.append(str(error))
    return found


def together(workspace: Workspace, requests: Sequence[Request | NotesError], parallel: int = 8) -> list[Any]:
    """Return the outcomes, after checking their order and that the context is empty."""
    used, held = workspace.context.used, workspace.context.n_leased
    outcomes = list(ask_many(workspace, requests, parallel))
    assert [number for number, _ in outcomes] == list(range(len(requests)))
    assert (workspace.context.used, workspace.context.n_leased) == (used, held)
    return [comparable(outcome) for _, outcome in outcomes]


@pytest.mark.parametrize(
    ("kind", "cache", "parallel"),
    [
        *(("llama", "f16", parallel) for parallel in (1, 3, 64)),
        *(("qwen3", "q8_0", 3), ("gemma3", "f32", 64), ("phi3", "f16", 64)),
        *(("lfm2", "f16", 3), ("mamba", "f16", 64), ("gpt2", "f16", 3)),
    ],
)
def test_answered_as_alone(make_workspace: MakeWorkspace, skill: Skill, kind: str, cache: str, parallel: int) -> None:
    """Spliced, restored or recurrent, greedy and sampled, generated and chosen, with too few cells at first."""
    workspace = make_workspace(kind, n_ctx=512, cache=cache, name="tiny")  # llama.cpp knows "phi3" in a name
    spliced = [compile_skill(workspace, skill)]
    drawn = SamplerOptions(temperature=1.0, seed=7)
    requests = [
        Request(question, spliced, max_tokens=5 + number, sampling=drawn if number % 3 == 2 else SamplerOptions())
        for number, question in enumerate(QUESTIONS)
    ]
    requests += [Request(question, spliced, choices=["yes", "no", "not sure"]) for question in QUESTIONS]
    assert alone(workspace, requests) == together(workspace, requests, parallel)


def test_a_short_skill_that_is_decoded_is_shared(workspace: Workspace) -> None:
    """Also where so few tokens are pending that alone the question would be decoded with them."""
    segment = compile_skill(workspace, parse_skill("tier: gold\ndate: today", source="-", default="short"))
    for method in ("recompute", "suffix"):
        asked = Request("Why?", [segment], fields={"tier": "basic"}, method=Method.parse(method), max_tokens=4)
        requests = [replace(asked, question=question) for question in QUESTIONS]
        assert alone(workspace, requests) == together(workspace, requests)


def test_a_prefix_within_a_decoded_text(workspace: Workspace) -> None:
    """The second prompt begins with the first one's prefix, and has few more tokens before its question."""
    returns = compile_skill(workspace, load_skill(SAMPLES / "returns"))
    asked = Request("May I return this?", [returns], decode=["returns"], place="late", max_tokens=4)
    corrected = {"date": "2026-07-01", "amount": "130"}
    requests = [asked, replace(asked, fields=corrected, method=ERRATUM)]
    assert alone(workspace, requests) == together(workspace, requests, 1)


def test_nothing_is_decoded_twice(
    workspace: Workspace, skill: Skill, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The left context and the skill exist once, and the rest is decoded with each question; peak cells match."""
    segment = compile_skill(workspace, skill)
    requests = [Request(f"Why {number:02}?", [segment], system="Be kind.", max_tokens=1) for number in range(20)]
    single = ask(workspace, requests[0])
    placed, peak = [], []
    decoded.clear()
    splice, used = Context.splice, Context.used
    monkeypatch.setattr(Context, "splice", lambda *given, **more: (placed.append(1), splice(*given, **more)))
    append = Context.append

    def watched(self: Context, *given: Any) -> None:
        append(self, *given)
        peak.append(used.fget(self))  # type: ignore[attr-defined]

    monkeypatch.setattr(Context, "append", watched)
    answers = [answer for _, answer in ask_many(workspace, requests, 20)]
    [skill_at] = [piece for piece in single.pieces if piece.how == "spliced"]
    shared = skill_at.position + skill_at.tokens
    question = single.counts.total - shared
    assert all(isinstance(one, Answer) and one.counts.shared == shared for one in answers)
    assert all(isinstance(one, Answer) and one.counts.spliced == len(segment) - 1 for one in answers)
    assert placed == [1]
    # A limit of one token: it is chosen from the logits of the question and not decoded, unless it ends there.
    asked = sum(one.tokens for one in answers if isinstance(one, Answer))
    assert sum(decoded) - (shared - single.counts.spliced) - 20 * question in range(asked + 1)
    assert max(peak) in range(shared + 20 * question, shared + 20 * (question + 1) + 1)


def test_a_small_context_takes_fewer_at_once(make_workspace: MakeWorkspace, skill: Skill) -> None:
    """With a fixed size nothing fails that would not alone, and the size does not change."""
    workspace = make_workspace(n_ctx=256, fixed_size=True)
    spliced = [compile_skill(workspace, skill)]
    requests = [
        replace(Request(question, spliced, max_tokens=6), choices=["yes", "no"] if number % 2 else None, system=system)
        for number, question in enumerate(QUESTIONS)
        for system in (None, "Be kind.")
    ]
    assert alone(workspace, requests) == together(workspace, requests, 16)
    assert workspace.context.options.n_ctx == 256


def test_endless_answers_end_with_their_room(make_workspace: MakeWorkspace) -> None:
    """Without a limit no answer takes another's cells, or exceeds the trained context."""
    workspace = make_workspace(n_ctx=256, trained=300)
    requests = [Request(question, max_tokens=UNLIMITED) for question in QUESTIONS[:4]]
    answers = [answer for _, answer in ask_many(workspace, requests, 3)]
    for answer in answers:
        assert isinstance(answer, Answer)
        assert answer.stopped == "end" or answer.counts.total + answer.tokens == 300


def test_a_larger_context_that_rotates_otherwise_is_left_alone(make_workspace: MakeWorkspace, skill: Skill) -> None:
    """LongRoPE: below the limit there are not enough cells for all, so that fewer run at once."""
    workspace = make_workspace("phi3", n_ctx=4096, name="tiny")
    spliced = [compile_skill(workspace, skill)]
    requests = [Request(one, spliced, max_tokens=1800, grammar='root ::= "yes"') for one in QUESTIONS[:3]]
    identity = workspace.identity
    answers = [answer for _, answer in ask_many(workspace, requests, 16)]
    assert all(isinstance(answer, Answer) for answer in answers)
    assert workspace.identity == identity


def test_prefixes_are_few(workspace: Workspace, skill: Skill) -> None:
    """Each system text leaves one, until there are as many as are kept."""
    segment = compile_skill(workspace, skill)
    kept: list[int] = []

    def requests() -> Iterator[Request]:
        for number in range(IDLE + 2):
            kept.append(workspace.context.n_leased)
            yield Request("Why?", [segment], system=f"Be {number}.", max_tokens=1)

    workspace.reserve(0, 2 * IDLE)  # sequences, for want of which prefixes are evicted, too
    assert all(isinstance(answer, Answer) for _, answer in ask_many(workspace, requests(), 1))
    assert kept == [*range(IDLE + 1), IDLE]


def test_input_is_read_as_it_is_needed(workspace: Workspace) -> None:
    """No more requests are read than run at a time, and a slow one holds back only so many."""
    read: list[int] = []

    def requests() -> Iterator[Request]:
        for number in range(1000):
            read.append(number)
            yield Request("Why?", max_tokens=200 if number == 0 else 1)

    outcomes = ask_many(workspace, requests(), 2)
    assert read == []
    assert next(outcomes)[0] == 0
    assert len(read) <= 2 * WAITING + 2
    outcomes.close()  # type: ignore[attr-defined]
    assert workspace.context.n_leased == 0


SKILL_TOKENS = list(range(30, 90))
QUESTION_TOKENS = [[number, 5, 3 + number] * (1 + number % 4) for number in range(7)]

Made = list[np.ndarray]


def prefilled_skill(workspace: Workspace) -> KVSequence:
    seq = workspace.sequence()
    seq.append(SKILL_TOKENS)
    seq.flush()
    return seq


def writing(base: KVSequence, question: Sequence[int], limit: int = 9) -> Task[tuple[list[int], Made]]:
    """An answer to a question after a skill: its tokens, and the logits that they were chosen from."""
    with base.share() as seq:
        seq.append(question)
        generator = TokenGenerator(seq, Sampler(SamplerOptions(temperature=0.0)), limit)
        made = []
        while generator.active:
            made.append((yield from seq.next_logits()))
            generator.choose(made[-1])
        return seq.tokens.tolist()[len(SKILL_TOKENS) :], made


def results_of(workspace: Workspace, tasks: Iterable[Task[Any]], width: int) -> list[Any]:
    jobs: list[Job[Any]] = [Job(lambda job, task=task: task, own=True) for task in tasks]  # type: ignore[misc]
    with Scheduler(workspace, width) as scheduler:
        for job in jobs:
            scheduler.submit(job)
        while not all(job.ended for job in jobs):
            assert len(scheduler.running) <= width
            scheduler.step()
    return [job.outcome for job in jobs]


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_one_that_fails_spoils_no_other(make_workspace: MakeWorkspace, kind: str) -> None:
    """An error before, between or after a task's requests, or a lack of cells, is its outcome alone."""
    workspace = make_workspace(kind, n_ctx=256, fixed_size=True)

    def failing(base: KVSequence, when: int) -> Task[Any]:
        with base.share() as seq:
            for step in range(3):
                if step == when:
                    raise NotesError(f"on purpose at {when}")
                seq.append([step])
                yield [seq]
            return None

    def large(base: KVSequence) -> Task[Any]:
        with base.share() as seq:
            seq.append([1] * 400)
            return (yield from seq.next_logits())

    with prefilled_skill(workspace) as base:
        alone = [run(writing(base, question))[0] for question in QUESTION_TOKENS]
        tasks: list[Task[Any]] = [writing(base, question) for question in QUESTION_TOKENS]
        tasks[1:1] = [failing(base, 0), large(base)]
        tasks[5:5] = [failing(base, 1), failing(base, 2)]
        found = results_of(workspace, tasks, 5)
        errors = {number: str(one) for number, one in enumerate(found) if isinstance(one, NotesError)}
        assert sorted(errors) == [1, 2, 5, 6]
        assert "do not fit" in errors[2] and errors[5] == "on purpose at 1"
        assert [one[0] for one in found if not isinstance(one, NotesError)] == alone
        assert workspace.context.n_leased == 1


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_cells_that_run_out(make_workspace: MakeWorkspace, kind: str) -> None:
    """Each fits, all together do not: some fail with that error, the others complete, and no sequence is left."""
    workspace = make_workspace(kind, n_ctx=256, fixed_size=True)
    workspace.reserve(0, 6)

    def long(base: KVSequence, number: int) -> Task[int]:
        with base.share() as seq:
            seq.append([number] * 60)
            for step in range(10):
                yield from seq.next_logits()
                seq.append([step])
            return len(seq)

    with prefilled_skill(workspace) as base:
        found = results_of(workspace, [long(base, number) for number in range(5)], 5)
        done = [one for one in found if not isinstance(one, NotesError)]
        assert done and all(one == len(SKILL_TOKENS) + 70 for one in done) and len(done) < 5
        assert workspace.context.used == len(SKILL_TOKENS) and workspace.context.n_leased == 1


@pytest.mark.parametrize(
    ("kind", "where"), [("llama", "first"), ("llama", "ahead"), ("lfm2", "last"), ("mamba", "ahead")]
)
def test_nan_logits(make_workspace: MakeWorkspace, kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of them, at each of its steps: it fails, once; the others are as without it, and none waits for ever."""
    workspace = make_workspace(kind)
    damaged = [99, 98, 97]

    def spoilt(base: KVSequence) -> Task[Any]:
        with base.share() as seq:
            if where == "ahead":
                return (yield from seq.lookahead_task(damaged))
            seq.append(damaged)
            return (yield from seq.next_logits())

    logits, append = Context.logits, Context.append
    order: list[int] = []

    def remembering(self: Context, tokens: Any, output: Any = "last") -> None:
        append(self, tokens, output)
        wanted = {one: output if isinstance(output, str) else output[one] for one in tokens}
        order[:] = [
            -1 if list(part) == damaged else one
            for one, part in tokens.items()
            for _ in range({"none": 0, "last": 1, "all": len(part)}[wanted[one]])
        ]

    def failing(self: Context, index: int = -1) -> Any:
        if order[index] == -1:
            raise EngineError("logits that are not numbers")
        return logits(self, index)

    with prefilled_skill(workspace) as base:
        alone = [run(writing(base, question))[0] for question in QUESTION_TOKENS[:4]]
        monkeypatch.setattr(Context, "append", remembering)
        monkeypatch.setattr(Context, "logits", failing)
        tasks: list[Task[Any]] = [writing(base, question) for question in QUESTION_TOKENS[:4]]
        place = {"first": 0, "last": 4, "ahead": 2}[where]
        tasks.insert(place, spoilt(base))
        found = results_of(workspace, tasks, 5)
        assert str(found.pop(place)) == "logits that are not numbers"
        assert [tokens for tokens, _ in found] == alone
        assert workspace.context.n_leased == 1


def test_an_error_is_raised_in_the_task(workspace: Workspace) -> None:
    """At its yield; the task may raise another or return, but not continue."""

    def catching(base: KVSequence, then: str) -> Task[str]:
        spliced = base.context.read(base.seq_id, 0, 3, base=0)
        with KVSequence(base.context) as seq:
            seq.append([1])
            seq.context.splice(seq.seq_id, 0, np.arange(3, dtype=np.int32), spliced, 0)
            try:
                yield [seq]  # it has rows that it knows nothing of
            except EngineError as error:
                if then == "return":
                    return f"caught: {error}"
                if then == "raise":
                    raise NotesError("another") from error
                yield [base]
        return "went on"

    with prefilled_skill(workspace) as base:
        caught = run(catching(base, "return"))
        assert caught.startswith("caught: ")
        for then, wanted in (("raise", "another"), ("go on", "a task went on after an error")):
            with pytest.raises(NotesError, match=wanted):
                run(catching(base, then))
        found = results_of(workspace, [catching(base, then) for then in ("return", "raise", "go on")], 3)
        assert [str(one) for one in found] == [caught, "another", "a task went on after an error"]
        assert workspace.context.n_leased == 1


def test_closed_early(workspace: Workspace) -> None:
    """No task runs on, and no sequence stays leased; an internal error is the outcome of its job alone."""
    with prefilled_skill(workspace) as base:
        with Scheduler(workspace, 4) as scheduler:
            for question in QUESTION_TOKENS:
                scheduler.submit(Job(lambda job, question=question: writing(base, question), own=True))  # type: ignore[misc]
            scheduler.step()
            assert workspace.context.n_leased > 2
        assert workspace.context.n_leased == 1 and workspace.context.used == len(SKILL_TOKENS)

        def broken() -> Task[Any]:
            with base.share() as seq:
                seq.append([1])
                yield [seq]
                raise ValueError("a bug")

        found = results_of(
            workspace, [writing(base, QUESTION_TOKENS[0]), broken(), writing(base, QUESTION_TOKENS[1])], 3
        )
        assert [type(one) for one in found] == [tuple, ValueError, tuple]
        assert workspace.context.n_leased == 1


@pytest.mark.parametrize(("kind", "when"), [("llama", "before"), ("llama", "after"), ("lfm2", "before")])
def test_an_interrupt(make_workspace: MakeWorkspace, kind: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, sequences in use have the decoded rows, and continue to the same answers."""
    workspace = make_workspace(kind)
    with prefilled_skill(workspace) as base:
        alone = [run(writing(base, question))[0] for question in QUESTION_TOKENS[:3]]
        seqs = [base.share() for _ in range(3)]

        def held(seq: KVSequence, question: Sequence[int]) -> Task[list[int]]:
            if len(seq) == len(SKILL_TOKENS):
                seq.append(question)
            generator = TokenGenerator(
                seq, Sampler(SamplerOptions(temperature=0.0)), 9 - (len(seq) - len(SKILL_TOKENS) - len(question))
            )
            while generator.active:
                generator.choose((yield from seq.next_logits()))
            return seq.tokens.tolist()[len(SKILL_TOKENS) :]

        append = Context.append
        calls = iter(range(5))

        def interrupted(self: Context, *arguments: Any) -> None:
            last = next(calls, None) is None
            if not last or when == "after":
                append(self, *arguments)
            if last:
                raise KeyboardInterrupt

        monkeypatch.setattr(Context, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            results_of(
                workspace, [held(seq, question) for seq, question in zip(seqs, QUESTION_TOKENS, strict=False)], 3
            )
        monkeypatch.setattr(Context, "append", append)
        assert all(seq.intact and len(seq) > len(SKILL_TOKENS) for seq in seqs)
        tasks = [held(seq, question) for seq, question in zip(seqs, QUESTION_TOKENS, strict=False)]
        together = results_of(workspace, tasks, 3)
        assert [tokens[: len(wanted)] for tokens, wanted in zip(together, alone, strict=True)] == alone
        for seq in seqs:
            seq.close()
        assert workspace.context.n_leased == 1
