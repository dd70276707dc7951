"""Tests of the scheduler: jobs that run together give the results of each alone, and do not affect each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from notes_cli.engine.context import Context
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.sequence import KVSequence, Task, TokenGenerator, run
from notes_cli.errors import EngineError, NotesError
from notes_cli.runtime.scheduler import Job, Scheduler
from notes_cli.runtime.workspace import Workspace

SKILL = list(range(30, 90))
QUESTIONS = [[number, 5, 3 + number] * (1 + number % 4) for number in range(7)]
KINDS = ["llama", "gemma3", "lfm2", "mamba"]
WORDS = ["accepted", "refused", "it depends"]

MakeWorkspace = Callable[..., Workspace]
Made = list[np.ndarray]


def skill(workspace: Workspace) -> KVSequence:
    seq = workspace.sequence()
    seq.append(SKILL)
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
        return seq.tokens.tolist()[len(SKILL) :], made


def results(workspace: Workspace, tasks: Iterable[Task[Any]], width: int) -> list[Any]:
    jobs: list[Job[Any]] = [Job(lambda job, task=task: task, own=True) for task in tasks]  # type: ignore[misc]
    with Scheduler(workspace, width) as scheduler:
        for job in jobs:
            scheduler.submit(job)
        while not all(job.ended for job in jobs):
            assert len(scheduler.running) <= width
            scheduler.step()
    return [job.outcome for job in jobs]


@pytest.mark.parametrize("kind", KINDS)
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

    with skill(workspace) as base:
        alone = [run(writing(base, question))[0] for question in QUESTIONS]
        tasks: list[Task[Any]] = [writing(base, question) for question in QUESTIONS]
        tasks[1:1] = [failing(base, 0), large(base)]
        tasks[5:5] = [failing(base, 1), failing(base, 2)]
        found = results(workspace, tasks, 5)
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

    with skill(workspace) as base:
        found = results(workspace, [long(base, number) for number in range(5)], 5)
        done = [one for one in found if not isinstance(one, NotesError)]
        assert done and all(one == len(SKILL) + 70 for one in done) and len(done) < 5
        assert workspace.context.used == len(SKILL) and workspace.context.n_leased == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["first", "last", "ahead"])
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

    with skill(workspace) as base:
        alone = [run(writing(base, question))[0] for question in QUESTIONS[:4]]
        monkeypatch.setattr(Context, "append", remembering)
        monkeypatch.setattr(Context, "logits", failing)
        tasks: list[Task[Any]] = [writing(base, question) for question in QUESTIONS[:4]]
        place = {"first": 0, "last": 4, "ahead": 2}[where]
        tasks.insert(place, spoilt(base))
        found = results(workspace, tasks, 5)
        assert str(found.pop(place)) == "logits that are not numbers"
        assert [tokens for tokens, _ in found] == alone
        assert workspace.context.n_leased == 1


def test_an_error_is_raised_in_the_task(make_workspace: MakeWorkspace) -> None:
    """At its yield; the task may raise another or return, but not continue."""
    workspace = make_workspace()

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

    with skill(workspace) as base:
        caught = run(catching(base, "return"))
        assert caught.startswith("caught: ")
        for then, wanted in (("raise", "another"), ("go on", "a task went on after an error")):
            with pytest.raises(NotesError, match=wanted):
                run(catching(base, then))
        found = results(workspace, [catching(base, then) for then in ("return", "raise", "go on")], 3)
        assert [str(one) for one in found] == [caught, "another", "a task went on after an error"]
        assert workspace.context.n_leased == 1


def test_closed_early(make_workspace: MakeWorkspace) -> None:
    """No task runs on, and no sequence stays leased; an internal error is the outcome of its job alone."""
    workspace = make_workspace()
    with skill(workspace) as base:
        with Scheduler(workspace, 4) as scheduler:
            for question in QUESTIONS:
                scheduler.submit(Job(lambda job, question=question: writing(base, question), own=True))  # type: ignore[misc]
            scheduler.step()
            assert workspace.context.n_leased > 2
        assert workspace.context.n_leased == 1 and workspace.context.used == len(SKILL)

        def broken() -> Task[Any]:
            with base.share() as seq:
                seq.append([1])
                yield [seq]
                raise ValueError("a bug")

        found = results(workspace, [writing(base, QUESTIONS[0]), broken(), writing(base, QUESTIONS[1])], 3)
        assert [type(one) for one in found] == [tuple, ValueError, tuple]
        assert workspace.context.n_leased == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt(make_workspace: MakeWorkspace, kind: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, sequences in use have the decoded rows, and continue to the same answers."""
    workspace = make_workspace(kind)
    with skill(workspace) as base:
        alone = [run(writing(base, question))[0] for question in QUESTIONS[:3]]
        seqs = [base.share() for _ in range(3)]

        def held(seq: KVSequence, question: Sequence[int]) -> Task[list[int]]:
            if len(seq) == len(SKILL):
                seq.append(question)
            generator = TokenGenerator(
                seq, Sampler(SamplerOptions(temperature=0.0)), 9 - (len(seq) - len(SKILL) - len(question))
            )
            while generator.active:
                generator.choose((yield from seq.next_logits()))
            return seq.tokens.tolist()[len(SKILL) :]

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
            results(workspace, [held(seq, question) for seq, question in zip(seqs, QUESTIONS, strict=False)], 3)
        monkeypatch.setattr(Context, "append", append)
        assert all(seq.intact and len(seq) > len(SKILL) for seq in seqs)
        tasks = [held(seq, question) for seq, question in zip(seqs, QUESTIONS, strict=False)]
        together = results(workspace, tasks, 3)
        assert [tokens[: len(wanted)] for tokens, wanted in zip(together, alone, strict=True)] == alone
        for seq in seqs:
            seq.close()
        assert workspace.context.n_leased == 1
