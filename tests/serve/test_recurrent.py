"""Tests that recurrent and hybrid models read nothing twice: prompts go on at the last kept state, to equal logits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from notes_cli.engine.context import Context, State
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.sequence import KVSequence
from notes_cli.library.container import peek
from notes_cli.serve.prepare import Options

from ..zoo import zoo_model
from .conftest import Json, Served, started

# Recurrent and hybrid models of the zoo of each kind of layer and memory; those with more experts or other sizes are
# alike (`make zoo`). DeepSeek V4's memory cannot be taken apart.
MODELS = [
    *("bailingmoe3-moe", "falcon-h1-dense", "glm5-next-moe", "jamba-dense", "kimi-k3-moe", "kimi-linear-moe"),
    *("lfm2-dense", "mamba-dense", "mamba2-dense", "minimax-01-moe", "qwen35-dense", "qwen4exp-moe"),
]
IN_BLOCKS = {"minimax-01-moe"}  # its attention is computed in blocks of a batch: other batches round otherwise


def said(role: str, text: str) -> Json:
    return {"role": role, "content": text}


SYSTEM = said("system", "You are a helpful assistant of a shop that sells many things. " * 4)
FIRST = [SYSTEM, said("user", "What is the tier of this shop, and why? " * 3)]
TALK = [*FIRST, said("assistant", "It is gold."), said("user", "And tomorrow?")]
LONGER = said("system", SYSTEM["content"] * 3)
STEPS = {  # a request, and the one before it
    "regenerated": (TALK, TALK),
    "next turn": (FIRST, TALK),
    "edited question": (TALK, [*TALK[:-1], said("user", "And yesterday, then?")]),
    "edited answer": (TALK, [*FIRST, said("assistant", "Something else entirely."), TALK[-1]]),
    "same system text": (FIRST, [SYSTEM, said("user", "Another question")]),
}


class Answered(NamedTuple):
    prompt: int  # tokens
    cached: int
    tokens: list[str]  # of the answer
    logprobs: list[list[float]]  # of the most likely ones in place of each
    notices: list[str]


def answered(served: Served, messages: list[Json], length: int = 4) -> Answered:
    how = {"temperature": 0, "logprobs": True, "top_logprobs": 5, "notes": {"explain": True}}
    reply = served.chat(messages, max_tokens=length, **how)
    usage, content = reply["usage"], reply["choices"][0]["logprobs"]["content"]
    logprobs = [[one["logprob"] for one in token["top_logprobs"]] for token in content]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens = [token["token"] for token in content]
    return Answered(usage["prompt_tokens"], cached, tokens, logprobs, reply["notes"]["notices"])


@contextmanager
def serving(
    home: Path, name: str, parallel: int = 2, cells: int = 1024, fixed: bool = True, swa_full: bool = True, **more: Any
) -> Iterator[Served]:
    """A server with a fixed number of cells, or as many at first."""
    context = ContextOptions(n_ctx=cells, n_threads=1, swa_full=swa_full)
    options = Options(parallel=parallel, **more)
    with started(home, options, context, zoo_model(name), fixed_size=fixed, beyond_trained=True) as found:
        yield found


def forget(served: Served) -> None:
    served.at_context(served.scheduler.prefixes.close)


def check_rows_of_states(sequence: KVSequence) -> None:
    """A state as llama.cpp serialises it, of which files keep the rows, has those that are read from the context."""
    found = sequence.context.state_rows(sequence.context.state(sequence.seq_id))
    rows, _ = sequence.read(0, len(sequence), "f32")
    for one, other in zip(found, (layer for layer in rows if layer.part == "state"), strict=True):
        assert one.layer == other.layer and np.array_equal(one.k, other.k) and np.array_equal(one.v, other.v)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_read_twice(tmp_path: Path, name: str) -> None:
    """The logits are those of the same prompt with nothing cached, bit for bit."""
    cached, read = dict[str, int](), dict[str, int]()
    with serving(tmp_path, name) as served:
        for step, (before, messages) in STEPS.items():
            forget(served)
            first = answered(served, before)
            warm = answered(served, messages)
            forget(served)
            cold = answered(served, messages)
            assert first.cached == cold.cached == 0 and cold.tokens == warm.tokens, step
            bound = 0.01 if name in IN_BLOCKS else 0
            assert np.allclose(cold.logprobs, warm.logprobs, rtol=0, atol=bound), step
            cached[step], read[step] = warm.cached, warm.prompt - warm.cached
            where = f"differs, the last state before it was kept after {warm.cached}"
            assert [where in notice for notice in warm.notices] == [True] * (step != "regenerated")
            length = first.prompt  # in the end of the first turn
        served.at_context(lambda: check_rows_of_states(served.scheduler.prefixes.entries[0].sequence))
    opening = read["regenerated"]  # of the answer
    assert 0 < opening < 5 and read["edited question"] < 16 and read["same system text"] < 16
    assert cached["next turn"] == length - opening and cached["edited answer"] == length


@pytest.mark.parametrize("name", ["qwen35-dense", "lfm2-dense", "mamba2-dense", "kimi-linear-moe"])
def test_a_system_text_survives_a_restart(tmp_path: Path, name: str) -> None:
    """With the bits of a prompt that was read; a file that is damaged is read as if there were none."""
    again, talk = [LONGER, said("user", "Another question")], [LONGER, *TALK[1:]]
    with serving(tmp_path, name) as served:
        answered(served, [said("system", LONGER["content"] + "It is 4 May today."), again[1]])  # gets no file
        wanted = answered(served, again)
        for _ in range(1000):
            if kept := [*(tmp_path / "library" / "learned").glob("*.gguf")]:
                break
            time.sleep(0.01)
    (path,) = kept
    for damaged in (False, True):
        if damaged:
            path.write_bytes(path.read_bytes()[:-40] + b"\x01" * 40)
        with serving(tmp_path, name) as served:
            found = answered(served, again)
            assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
            assert found.cached == (0 if damaged else len(peek(path)))
            longer = answered(served, talk)
            served.at_context(lambda: served.scheduler.prefixes.evict_beyond(0))  # blocks after the file's
            restored = answered(served, talk)
            assert restored.cached > longer.cached == len(peek(path)) and same(restored, longer)


@pytest.mark.parametrize(("name", "swa_full"), [("gemma3-dense", True), ("gpt-oss-moe", True), ("gpt-oss-moe", False)])
def test_texts_longer_than_a_window(tmp_path: Path, name: str, swa_full: bool) -> None:
    """The same steps where a window has 32 tokens. With all rows in the cache only the change is read, else everything,
    and the reply names the window."""
    with serving(tmp_path, name, swa_full=swa_full) as served:
        for step, talks in STEPS.items():
            before, messages = ([LONGER, *talk[1:]] for talk in talks)
            forget(served)
            answered(served, before)
            warm = answered(served, messages)
            forget(served)
            cold = answered(served, messages)
            assert not cold.cached and cold.tokens == warm.tokens, step
            assert np.allclose(cold.logprobs, warm.logprobs, rtol=0, atol=1e-4), step
            named = ["keeps no more rows than its sliding window" in notice for notice in warm.notices]
            assert warm.prompt - warm.cached < 14 if swa_full else warm.prompt > 150 and not warm.cached, step
            assert named == [True] * (not swa_full), step


def test_another_state_gives_other_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each state is replaced by the first one that was kept after as many tokens, of another text."""
    others: dict[int, State] = {}
    read = Context.state

    def first_of_this_length(context: Context, seq_id: int) -> State:
        return others.setdefault(context.length(seq_id), read(context, seq_id))

    monkeypatch.setattr(Context, "state", first_of_this_length)
    other = [said("system", SYSTEM["content"].replace("shop", "port").replace("things", "cattle")), *FIRST[1:]]
    again = [other[0], said("user", "Another question")]
    with serving(tmp_path, "qwen35-dense") as served:
        for talk in (FIRST, other):
            answered(served, talk)
        wrong = answered(served, again)
        forget(served)
        right = answered(served, again)
        assert wrong.cached and wrong.logprobs != right.logprobs


def same(one: Answered, other: Answered) -> bool:
    """True if two answers are equal, up to a token where others are about as likely."""
    for number, (token, wanted) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        near = np.abs(np.subtract(one.logprobs[number], other.logprobs[number])).max() < CLOSE
        if token != wanted:
            return near and one.logprobs[number][0] - one.logprobs[number][1] < CLOSE
        if not near:
            return False
    return len(one.tokens) == len(other.tokens)


def test_many_conversations_on_a_small_budget(tmp_path: Path) -> None:
    """64 of them, two turns each in turn, where a state has 137 KB: those that are kept stay within the budget, and an
    answer is that of a prompt that is read."""
    budget = 2 << 20
    with serving(tmp_path, "qwen35-dense", 4, 1024, cache_ram=budget) as served:
        store = served.scheduler.prefixes.store
        assert store is not None
        talks, cached, most = [[SYSTEM, said("user", f"What is {number}?")] for number in range(64)], 0, 0
        for _ in range(2):
            for talk in talks:
                found = answered(served, talk, 1)
                talk += [said("assistant", "".join(found.tokens)), said("user", "And then?")]
                kept, nbytes = served.at_context(lambda: (store.states_kept, store.nbytes + store.live_bytes))
                assert nbytes <= budget and kept <= budget // store.state_size
                cached, most = cached + found.cached, max(most, kept)
        assert most > 4 and cached > 64 * 40  # the system text, at least
        assert "\nnotes_cache_ram_states " in served.http.get("/metrics").text and store.state_size == 137 << 10
        for talk in talks[::16]:
            warm = answered(served, talk)
            forget(served)
            assert same(answered(served, talk), warm)


CONVERSATIONS, TURNS = 12, 4  # tried with 300 and 10
CLOSE = 0.05  # log-probabilities of sums in another order


def changed(talk: list[Json], answer: str, choice: random.Random, number: int) -> list[Json]:
    """Return the next request of a conversation whose last one was `talk`."""
    way = choice.choice(["next", "next", "next", "again", "question", "answer", "new"])
    question = said("user", f"And {choice.choice('abcdefgh')}{number}? " * choice.randint(1, 4))
    if way == "next":
        return [*talk, said("assistant", answer), question]
    if way == "question":
        return [*talk[:-1], question]
    if way == "answer" and len(talk) > 2:
        return [*talk[:-2], said("assistant", f"No {number}."), talk[-1]]
    return [talk[0], question] if way == "new" else talk


@pytest.mark.parametrize(
    ("name", "cells", "fixed"), [("qwen35-dense", 512, True), ("lfm2-dense", 256, False), ("mamba2-dense", 512, True)]
)
def test_interleaved_conversations(
    tmp_path: Path, name: str, cells: int, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More conversations than sequences and cells: some are evicted, stored, restored and preempted, or the context
    grows. Each answer is the one that is given with nothing cached."""
    monkeypatch.setattr(Model, "ends", lambda self, token: False)
    asked: list[tuple[list[Json], int, Answered]] = []

    def converse(number: int) -> None:
        choice = random.Random(number)
        system = said("system", f"You serve shop {number % 3}. " * (3 + number % 3))
        talk, answer = [system, said("user", f"What is {number}?")], ""
        for turn in range(TURNS):
            talk = changed(talk, answer, choice, turn) if turn else talk
            length = choice.choice([4] * 9 + [160])  # more than are reserved at first
            found = answered(served, talk, length)
            answer = f"It is {len(asked)}."
            asked.append((talk, length, found))

    with serving(tmp_path, name, 4, cells, fixed, cache_ram=32 << 20) as served:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(converse, range(CONVERSATIONS)))
        store, metrics = served.scheduler.prefixes.store, served.scheduler.metrics
        assert store is not None and store.nbytes + store.live_bytes <= store.budget
        assert store.hits and (metrics.preempted or not fixed or name == "mamba2-dense")  # which takes no cells
        assert fixed or served.scheduler.workspace.context.cells > cells
        assert sum(found.cached for *_, found in asked) > sum(found.prompt for *_, found in asked) / 3
        for talk, length, found in asked:
            forget(served)
            assert same(answered(served, talk, length), found), talk
