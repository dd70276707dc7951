"""Tests many requests at once: each is answered as alone, from shared cells, and no skill is decoded twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from samples import SAMPLES

from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.serve.jobs import Limits

from .conftest import Json, Served, compile_into, started, told

SKILLS = ("returns", "support", "delivery.txt", "skill.txt")
NAMES = ("returns", "support", "delivery", "skill")
QUESTIONS = ("May I return this?", "What is the tier?", "What is the plan? Think first.", "What is the amount?")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over four skills with an f32 cache, whose sums do not round."""
    home = tmp_path_factory.mktemp("four")
    context = ContextOptions(n_threads=1, type_k="f32", type_v="f32")
    with started(home, Limits(parallel=32, queue=64), context=context) as found:
        for name, source in zip(NAMES, SKILLS, strict=True):
            path = SAMPLES / source
            text = (path / "SKILL.md" if path.is_dir() else path).read_text()
            reply = found.http.post("/v1/notes/compile", json={"name": name, "text": text})
            assert '"skill"' in reply.text, reply.text
        yield found


def requests() -> list[Json]:
    """Return 64 different requests: each of four questions, in four lengths, with each of four skills."""
    return [
        {
            "messages": [{"role": "user", "content": f"{QUESTIONS[n % 4]}{' Really?' * (n // 16)}"}],
            "max_tokens": 16,
            "notes": {"splice": [NAMES[n // 4 % 4]], "explain": True},
        }
        for n in range(64)
    ]


@contextmanager
def never_ends() -> Iterator[None]:
    """No token ends an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "ends", lambda self, token: False)
        yield


def at_once(url: str, every: list[Json], path: str = "/v1/chat/completions") -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(client.post(path, json=one) for one in every))

    return asyncio.run(all_of_them())


@pytest.mark.patches("speed")
def test_64_at_once_answer_as_alone(exact: Served) -> None:
    """Every answer equals that of the same request alone; no skill is decoded or spliced twice; cells are shared; only
    reusable prefixes remain."""
    every = requests()
    alone = []
    for one in every:  # decoded whole and alone, with an empty prefix cache
        plain = {**one, "notes": {**one["notes"], "cache_salt": str(len(alone))}}
        alone.append(told(exact.http.post("/v1/chat/completions", json=plain).json()))
    exact.at_context(exact.scheduler.prefixes.close)
    exact.scheduler.metrics.spliced = 0
    before = exact.at_context(lambda: exact.scheduler.workspace.context.used)
    assert before == 0
    replies = at_once(exact.url, every)
    assert [one.status_code for one in replies] == [200] * 64
    assert [told(one.json()) for one in replies] == alone and len(set(alone)) > 8
    lengths = {name: exact.http.get(f"/v1/notes/{name}").json()["tokens"] for name in NAMES}
    assert exact.scheduler.metrics.spliced == sum(lengths.values()), "each skill once for all"
    for one in replies:
        decoded = [piece for piece in one.json()["notes"]["pieces"] if piece["how"] == "decoded"]
        assert not [piece for piece in decoded if piece["kind"] == "splice"]
    used = exact.at_context(lambda: exact.scheduler.workspace.context.used)
    total = sum(one.json()["usage"]["prompt_tokens"] for one in replies)
    assert used < total / 2, "in cells of their own they would take more"
    assert exact.scheduler.load == 0 and not exact.scheduler.budget.reservations


@pytest.mark.patches("speed")
def test_chosen_numbers_are_its_own(exact: Served) -> None:
    """A seed gives the same answer alone, with others, and as one of several choices."""
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell me about it. Think first."}],
        "temperature": 1.2,
        "max_tokens": 16,
        "notes": {"splice": ["returns"]},
    }
    every = [{**asked, "seed": seed} for seed in range(8)]
    alone = [told(exact.http.post("/v1/chat/completions", json=one).json()) for one in every]
    assert [told(one.json()) for one in at_once(exact.url, every)] == alone and len(set(alone)) > 3
    several = exact.http.post("/v1/chat/completions", json={**asked, "seed": 0, "n": 8}).json()
    assert [one["message"]["content"] for one in several["choices"]] == alone
    assert [one["index"] for one in several["choices"]] == list(range(8))


def test_a_full_cache_queues(tmp_path: Path) -> None:
    """With cells for about three, 24 are answered by evicting idle prefixes; a prompt that never fits is refused, and
    so are requests beyond the queue."""
    compile_into(tmp_path, "returns", "support")
    context = ContextOptions(n_ctx=512, n_threads=1)
    with started(tmp_path, Limits(parallel=8, queue=20), context=context, fixed_size=True) as served:
        every = [one for one in requests() if one["notes"]["splice"][0] in ("returns", "support")][:24]
        wanted = [told(served.http.post("/v1/chat/completions", json=one).json()) for one in every]
        assert served.at_context(lambda: served.scheduler.workspace.context.cells) == 512
        replies = at_once(served.url, every)
        assert [told(one.json()) for one in replies] == wanted
        assert served.chat([{"role": "user", "content": "x " * 600}], 400)["code"] == "context_length_exceeded"
        flood = at_once(served.url, [{**one, "max_tokens": 64} for one in requests()[:48]])
        states = sorted({one.status_code for one in flood} - {404})
        assert states == [200, 429]
        late = next(one for one in flood if one.status_code == 429)
        assert int(late.headers["retry-after"]) >= 1 and late.json()["error"]["code"] == "queue_full"


def test_an_answer_longer_than_the_room(tmp_path: Path) -> None:
    """Answers that together exceed the context all finish: some wait, and none is lost."""
    context = ContextOptions(n_ctx=512, n_threads=1, type_k="f32", type_v="f32")
    with started(tmp_path, Limits(parallel=4), context=context, fixed_size=True) as served:
        every = [{"prompt": [5, 6, 7 + number], "max_tokens": 250} for number in range(4)]
        every[0]["max_tokens"] = 9999  # as many as there are cells for
        every = [{**one, "notes": {"cache_salt": str(number)}} for number, one in enumerate(every)]

        def at_once_(every: list[Json]) -> list[Json]:
            return [one.json() for one in at_once(served.url, every, "/v1/completions")]

        with never_ends():
            alone = [one for each in every for one in at_once_([each])]
            before = served.scheduler.metrics.preempted
            replies = at_once_(every)
        written = [one["usage"]["completion_tokens"] for one in replies]
        assert written == [one["usage"]["completion_tokens"] for one in alone] == [509, 250, 250, 250]
        for found, wanted in zip(replies, alone, strict=True):  # sums over several tokens are rounded in another order
            assert found["choices"][0]["text"][:400] == wanted["choices"][0]["text"][:400]
        assert served.scheduler.metrics.preempted > before == 0, "some must have made room for others"
        assert served.scheduler.load == 0 and not served.scheduler.budget.reservations
