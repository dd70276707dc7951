"""Tests of the loop: tasks that run together give the results of each alone, and do not affect each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.engine.context import Context
from notes_cli.engine.decision import Decision, decide, decide_task
from notes_cli.engine.loop import AHEAD, Lookahead, Task, run, serve
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.sequence import KVSequence, TokenGenerator, fair_shares
from notes_cli.errors import EngineError, NotesError

SKILL = list(range(30, 90))
QUESTIONS = [[number, 5, 3 + number] * (1 + number % 4) for number in range(7)]
KINDS = ["llama", "gemma3", "lfm2", "mamba"]
WORDS = ["accepted", "refused", "it depends"]

Load = Callable[..., Context]
Made = list[np.ndarray]


@pytest.fixture
def load(make_model: Callable[..., Path]) -> Iterator[Load]:
    """Contexts of tiny models in which sequences share cells, open as long as a test needs them."""
    opened: list[Any] = []

    def make(kind: str = "llama", **options: Any) -> Context:
        settings = {"n_ctx": 1024, "n_threads": 1, "n_sequences": 4, "unified": True, **options}
        opened.append(Model(make_model(kind)))
        opened.append(Context(opened[-1], ContextOptions(**settings)))
        return opened[-1]  # type: ignore[no-any-return]

    yield make
    for one in reversed(opened):
        one.close()


def skill(context: Context) -> KVSequence:
    seq = KVSequence(context)
    seq.append(SKILL)
    seq.flush()
    return seq


def writing(base: KVSequence, question: Sequence[int], limit: int = 9) -> Task[tuple[list[int], Made]]:
    """An answer to a question after a skill: its tokens, and the logits that they were chosen from."""
    with base.share() as seq:
        seq.append(question)
        writer = TokenGenerator(seq, Sampler(SamplerOptions(temperature=0.0)), limit)
        made = []
        while writer.active:
            (logits,) = yield [seq]
            made.append(logits)
            writer.choose(logits)
        return seq.tokens.tolist()[len(SKILL) :], made


def choosing(base: KVSequence, question: Sequence[int]) -> Task[Decision]:
    with base.share() as seq:
        seq.append(question)
        return (yield from decide_task(seq, WORDS))


def results(tasks: Any, width: int) -> list[Any]:
    """In order of the tasks."""
    found = dict(serve(tasks, width))
    assert sorted(found) == list(range(len(found)))
    return [found[number] for number in range(len(found))]


def near(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.allclose(found, wanted, atol=2e-2 * np.abs(wanted).max()))


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_served_as_alone(load: Load, kind: str, width: int) -> None:
    """Answers, token by token, and the logits that they were chosen from to rounding; all sequences are given back."""
    context = load(kind)
    with skill(context) as base:
        alone = [run(writing(base, question)) for question in QUESTIONS]
        used = context.used
        together = results((writing(base, question) for question in QUESTIONS), width)
        for (tokens, made), (wanted, expected) in zip(together, alone, strict=True):
            assert tokens == wanted and len(made) == len(expected)
            assert all(near(a, b) for a, b in zip(made, expected, strict=True))
        assert context.used == used and context._pool.held == [base.seq_id]
    assert len({tuple(tokens) for tokens, _ in alone}) == len(QUESTIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_decided_as_alone(load: Load, kind: str) -> None:
    """Looks ahead, of more tasks than may look at a time, give the probabilities that they give one by one."""
    context = load(kind)
    with skill(context) as base:
        alone = []
        for question in QUESTIONS:
            with base.share() as seq:
                seq.append(question)
                alone.append(decide(seq, WORDS))
        together = results((choosing(base, question) for question in QUESTIONS), len(QUESTIONS))
        for found, wanted in zip(together, alone, strict=True):
            close = [abs(found.probabilities[word] - wanted.probabilities[word]) < 0.02 for word in WORDS]
            assert all(close), (found, wanted)
        assert context._pool.held == [base.seq_id]
    assert len(QUESTIONS) * 2 * len(WORDS) > AHEAD


def test_a_skill_is_decoded_once_for_all(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tokens: the shared prefix once, and each task's own; in fewer calls than tasks have tokens."""
    context = load()
    calls: list[int] = []
    append = Context.append

    def counted(self: Context, tokens: Any, output: Any = "last") -> None:
        calls.append(sum(map(len, tokens.values())))
        append(self, tokens, output)

    monkeypatch.setattr(Context, "append", counted)
    with skill(context) as base:
        answers = results((writing(base, question) for question in QUESTIONS), len(QUESTIONS))
    assert sum(calls) == len(SKILL) + sum(len(tokens) for tokens, _ in answers)
    assert len(calls) <= 1 + max(len(made) for _, made in answers)


def test_the_small_ones_first() -> None:
    """Each task gets an equal share of a call; unused shares go to the others; never more than the whole."""
    assert fair_shares([5, 100, 7], 32) == [5, 20, 7]
    assert fair_shares([100, 100, 100], 32) == [10, 11, 11]
    assert fair_shares([1, 2], 32) == [1, 2]
    assert fair_shares([], 8) == []
    assert fair_shares([3, 0, 3], 2) == [1, 0, 1]
    for wanted in ([9] * 40, [1] * 50, [0, 1, 200]):
        given = fair_shares(wanted, 32)
        assert sum(given) == min(32, sum(wanted)) and all(a <= b for a, b in zip(given, wanted, strict=True))


def test_begun_when_there_is_a_place(load: Load) -> None:
    """Tasks are made and begun one after the other, never more than the width at a time."""
    context, alive, most = load(), set(), []

    def task(base: KVSequence, number: int) -> Task[list[int]]:
        alive.add(number)
        most.append(len(alive))
        tokens, _ = yield from writing(base, QUESTIONS[number % 7], limit=1 + number % 3)
        alive.remove(number)
        return tokens

    made: list[int] = []

    def tasks(base: KVSequence) -> Iterator[Task[list[int]]]:
        for number in range(12):
            made.append(number)
            yield task(base, number)

    with skill(context) as base:
        served = serve(tasks(base), 3)
        assert made == []
        next(served)
        assert len(made) <= 5
        rest = list(served)
    assert len(rest) == 11 and max(most) == 3 and not alive and context.used == 0


def test_no_tasks_and_tasks_that_wait_for_nothing(load: Load) -> None:
    """A result without a wish, None for a result, an empty wish, a look at no tokens."""

    def at_once() -> Task[None]:
        return
        yield []

    def empty(base: KVSequence) -> Task[tuple[Any, ...]]:
        nothing = yield []
        (rows,) = yield [Lookahead(base, [])]
        return nothing, rows.shape

    with skill(load()) as base:
        assert list(serve([], 4)) == []
        assert list(serve([at_once(), at_once()], 1)) == [(0, None), (1, None)] and run(at_once()) is None
        assert dict(serve([empty(base)], 2)) == {0: run(empty(base))} == {0: ([], (0, base.context.model.n_vocab))}


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_fails_spoils_no_other(load: Load, kind: str) -> None:
    """A task's error before, between or after its requests, or a lack of cells, is reported, and the others are
    unaffected."""
    context = load(kind, n_ctx=256)

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
            return (yield [seq])

    with skill(context) as base:
        alone = [run(writing(base, question))[0] for question in QUESTIONS]
        tasks = [writing(base, question) for question in QUESTIONS]
        tasks[1:1] = [failing(base, 0), large(base)]
        tasks[5:5] = [failing(base, 1), failing(base, 2)]
        found = results(tasks, 5)
        errors = {number: str(one) for number, one in enumerate(found) if isinstance(one, NotesError)}
        assert sorted(errors) == [1, 2, 5, 6]
        assert "do not fit" in errors[2] and errors[5] == "on purpose at 1"
        assert [one[0] for one in found if not isinstance(one, NotesError)] == alone
        assert context._pool.held == [base.seq_id]


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_cells_that_run_out(load: Load, kind: str) -> None:
    """Each fits, all together do not: some fail with that error, the others complete, and no sequence is left."""
    context = load(kind, n_ctx=256)

    def long(base: KVSequence, number: int) -> Task[int]:
        with base.share() as seq:
            seq.append([number] * 60)
            for step in range(10):
                yield [seq]
                seq.append([step])
            return len(seq)

    with skill(context) as base:
        found = results([long(base, number) for number in range(5)], 5)
        done = [one for one in found if not isinstance(one, NotesError)]
        assert done and all(one == len(SKILL) + 70 for one in done) and len(done) < 5
        assert context.used == len(SKILL) and context._pool.held == [base.seq_id]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["first", "last", "ahead"])
def test_logits_that_are_not_numbers(load: Load, kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of them, at each of its steps: it fails, once; the others are as without it, and none waits for ever."""
    context = load(kind)
    damaged = [99, 98, 97]

    def spoilt(base: KVSequence) -> Task[Any]:
        with base.share() as seq:
            seq.append(damaged)
            (found,) = yield [Lookahead(seq, damaged) if where == "ahead" else seq]
            return found

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

    with skill(context) as base:
        alone = [run(writing(base, question))[0] for question in QUESTIONS[:4]]
        monkeypatch.setattr(Context, "append", remembering)
        monkeypatch.setattr(Context, "logits", failing)
        tasks = [writing(base, question) for question in QUESTIONS[:4]]
        place = {"first": 0, "last": 4, "ahead": 2}[where]
        tasks.insert(place, spoilt(base))
        found = results(tasks, 5)
        assert str(found.pop(place)) == "logits that are not numbers"
        assert [tokens for tokens, _ in found] == alone
        assert context._pool.held == [base.seq_id]


def test_a_task_hears_of_what_fails(load: Load) -> None:
    """An error is raised at the task's yield; the task may raise another or return, but not continue."""

    def telling(base: KVSequence, what: str) -> Task[str]:
        spliced = base.context.read(base.seq_id, 0, 3, base=0)
        with KVSequence(base.context) as seq:
            seq.context.splice(seq.seq_id, 0, np.arange(3, dtype=np.int32), spliced, 0)
            try:
                yield [seq]  # it has rows that it knows nothing of
            except EngineError as error:
                if what == "ends":
                    return f"heard: {error}"
                if what == "another":
                    raise NotesError("another") from error
                yield [base]
        return "went on"

    with skill(load()) as base:
        heard = run(telling(base, "ends"))
        assert heard.startswith("heard: ")
        for what, wanted in (("another", "another"), ("goes on", "a task went on after an error")):
            with pytest.raises(NotesError, match=wanted):
                run(telling(base, what))
        found = results([telling(base, "ends"), telling(base, "another"), telling(base, "goes on")], 3)
        assert [str(one) for one in found] == [heard, "another", "a task went on after an error"]
        assert base.context._pool.held == [base.seq_id]


def test_closed_early(load: Load) -> None:
    """A caller that stops iterating leaves no task running and no sequence leased; nor does an internal error."""
    context = load()
    with skill(context) as base:
        served = serve(
            (writing(base, question, limit=2 + 5 * (number > 0)) for number, question in enumerate(QUESTIONS)), 4
        )
        next(served)
        assert len(context._pool.held) > 2
        served.close()
        assert context._pool.held == [base.seq_id] and context.used == len(SKILL)

        def broken() -> Task[Any]:
            yield [base]
            raise ValueError("a bug")

        with pytest.raises(ValueError, match="a bug"):
            list(serve([writing(base, QUESTIONS[0]), broken(), writing(base, QUESTIONS[1])], 3))
        assert context._pool.held == [base.seq_id] and context.used == len(SKILL)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2", "mamba"])
def test_an_interrupt_loses_no_rows(load: Load, kind: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, sequences in use have the decoded rows, and continue to the same answers."""
    context = load(kind)
    with skill(context) as base:
        alone = [run(writing(base, question))[0] for question in QUESTIONS[:3]]
        seqs = [base.share() for _ in range(3)]

        def held(seq: KVSequence, question: Sequence[int]) -> Task[list[int]]:
            if len(seq) == len(SKILL):
                seq.append(question)
            writer = TokenGenerator(
                seq, Sampler(SamplerOptions(temperature=0.0)), 9 - (len(seq) - len(SKILL) - len(question))
            )
            while writer.active:
                (logits,) = yield [seq]
                writer.choose(logits)
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
            list(serve((held(seq, question) for seq, question in zip(seqs, QUESTIONS, strict=False)), 3))
        monkeypatch.setattr(Context, "append", append)
        assert all(seq.intact and len(seq) > len(SKILL) for seq in seqs)
        together = results((held(seq, question) for seq, question in zip(seqs, QUESTIONS, strict=False)), 3)
        assert [tokens[: len(wanted)] for tokens, wanted in zip(together, alone, strict=True)] == alone
        for seq in seqs:
            seq.close()
        assert context._pool.held == [base.seq_id]
