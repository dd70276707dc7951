"""Tests that an idle server decodes again what a reply has guessed, and gives that up for a request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.engine.sequence import decode, run
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.prefix_cache import CachedPrefix
from notes_cli.serve.prepare import Options

from .conftest import Json, Served, compile_into, pieces, reply_text, started
from .test_learned import CONTEXT, ROOM, part, wait


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    compile_into(tmp_path, "returns")
    with started(tmp_path, Options(reuse="learned"), CONTEXT) as found:
        yield found


def talk(status: str, *more: str) -> list[Json]:
    system = f"Git status: {status}.\n\n{part('chair', 50)}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]
    return [
        *messages,
        *({"role": role, "content": text} for role, text in zip(("assistant", "user"), more, strict=False)),
    ]


def near(reply: Json) -> int:
    """Return the tokens of a prompt with K/V of another context."""
    found = reply["notes"]["pieces"]
    live = re.findall(r"(\d+) of them were computed after another text", str(found))
    return sum(map(int, live)) + sum(piece["tokens"] for piece in found if piece["reason"] == "near")


def guessed(served: Served, *, idle: bool = False, **notes: Any) -> Json:
    """Learn a system text, then ask under another status, with its K/V. `idle`: also let the server work after that."""
    ask = {"max_tokens": 4, "temperature": 0, "notes": {"explain": True, **notes}}
    served.chat(talk("clean"), **ask)
    wait(served)
    if not idle:
        served.scheduler._begin_idle = lambda: False  # type: ignore[method-assign]
    found = served.chat(talk("dirty"), **ask)
    assert near(found) > 0.7 * found["notes"]["counts"]["total"]
    return found


def prefix(served: Served, *, moved: bool) -> CachedPrefix:
    """Return the idle prefix under the other status."""
    model = served.scheduler.workspace.model
    [found] = [
        one
        for one in served.scheduler.prefixes.idle_prefixes()
        if "status: dirty" in model.text(one.tokens) and bool((one.origins < 0).any()) is moved
    ]
    return found


@pytest.mark.parametrize("skills", [[], ["returns"]])
def test_the_next_turn_continues_from_the_rows_of_a_prefill(served: Served, skills: list[str]) -> None:
    notes = {"splice": skills}
    answer = reply_text(guessed(served, idle=True, **notes))
    wait(served)

    def rows() -> bool:
        """Compare the prompt's rows with those of a prefill, bit for bit."""
        cached, workspace = prefix(served, moved=False), served.scheduler.workspace
        assert cached.layout is not None
        count, dtype = len(cached.layout), workspace.context.lossless_type
        ours, _ = cached.sequence.read(0, count, dtype)
        alone = run(assemble_task(workspace, cached.layout.prompt))
        while alone.pending:
            decode([alone], workspace.context.n_ubatch)
        theirs, _ = alone.read(0, count, dtype)
        alone.close()
        each = zip(ours, theirs, strict=True)
        return all(np.array_equal(one.k, other.k) and np.array_equal(one.v, other.v) for one, other in each)

    assert served.at_context(rows)
    then = served.chat(talk("dirty", answer, "And now?"), max_tokens=2, notes={"explain": True, **notes})
    assert near(then) == 0
    assert pieces(then)[0][1] == "live" and then["notes"]["counts"]["decoded"] < 40


def test_a_request_ends_it_and_it_goes_on_from_there(served: Served) -> None:
    guessed(served)
    idle, workspace = served.scheduler.idle_work, served.scheduler.workspace
    assert idle is not None

    def steps(count: int) -> int:
        """Do so many batches of the work, and end it. Returns the tokens that are decoded then."""
        job = idle._next_job(ROOM)
        assert job is not None
        served.scheduler.scheduler.submit(job)
        for _ in range(count):
            served.scheduler.scheduler.step()
        job.cancel()
        served.scheduler.scheduler.step()
        assert job.dropped
        return len(prefix(served, moved=False))

    assert served.at_context(lambda: steps(1)) == workspace.context.n_ubatch
    assert served.at_context(lambda: steps(1)) == 2 * workspace.context.n_ubatch
    del served.scheduler._begin_idle  # the method of its class again
    wait(served)
    assert len(prefix(served, moved=False)) > 2 * workspace.context.n_ubatch


def test_a_prompt_that_fails_is_left_as_it_is(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guessed(served)
    monkeypatch.setattr("notes_cli.serve.idle_work.assemble_task", lambda *_, **__: 1 / 0)
    del served.scheduler._begin_idle
    wait(served)
    assert "a prompt was not decoded again: " in capsys.readouterr().err
    assert near(served.chat(talk("dirty"), max_tokens=2, notes={"explain": True})) > 0
