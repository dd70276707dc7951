"""Tests many requests at once: each is answered as alone, from shared cells, and no skill is decoded twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from samples import SAMPLES

from notes_cli.cli import run
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.runtime import prefix_cache
from notes_cli.serve import server
from notes_cli.serve.prepare import Options

from .conftest import NO_TLS, Json, Served, compile_into, reply_text, started

SKILLS = ("returns", "support", "delivery.txt", "skill.txt")
NAMES = ("returns", "support", "delivery", "skill")
QUESTIONS = ("May I return this?", "What is the tier?", "What is the plan? Think first.", "What is the amount?")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over four skills with an f32 cache, whose sums do not round."""
    home = tmp_path_factory.mktemp("four")
    context = ContextOptions(n_threads=1, type_k="f32", type_v="f32")
    with started(home, Options(parallel=8, queue=64), context=context) as found:
        for name, source in zip(NAMES, SKILLS, strict=True):
            path = SAMPLES / source
            text = (path / "SKILL.md" if path.is_dir() else path).read_text()
            reply = found.http.post("/v1/notes/compile", json={"name": name, "text": text})
            assert '"skill"' in reply.text, reply.text
        yield found


def requests() -> list[Json]:
    """Return 16 different requests: each of four questions, in two lengths, with each of four skills."""
    texts = [f"{QUESTIONS[n % 4]}{' Really?' * (n // 4 % 2)}" for n in range(16)]
    notes = [{"splice": [NAMES[n // 4]], "explain": True} for n in range(16)]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [{"messages": turn, "max_tokens": 16, "notes": how} for turn, how in zip(messages, notes, strict=True)]


def at_once(url: str, every: list[Json], path: str = "/v1/chat/completions") -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, verify=NO_TLS) as client:
            return await asyncio.gather(*(client.post(path, json=one) for one in every))

    return asyncio.run(all_of_them())


@pytest.mark.patches("speed")
def test_16_at_once_answer_as_alone(exact: Served) -> None:
    """No skill is decoded or spliced twice; cells are shared; only reusable prefixes remain."""
    every = requests()
    alone = []
    for one in every:  # decoded whole and alone, with an empty prefix cache
        plain = {**one, "notes": {**one["notes"], "cache_salt": str(len(alone))}}
        alone.append(reply_text(exact.http.post("/v1/chat/completions", json=plain).json()))
    exact.at_context(exact.scheduler.prefixes.close)
    exact.scheduler.metrics.spliced = 0
    before = exact.at_context(lambda: exact.scheduler.workspace.context.used)
    assert before == 0
    replies = at_once(exact.url, every)
    assert [one.status_code for one in replies] == [200] * 16
    assert [reply_text(one.json()) for one in replies] == alone and len(set(alone)) > 6
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
    asked: Json = {"messages": [{"role": "user", "content": "Tell me about it. Think first."}]}
    asked |= {"temperature": 1.2, "max_tokens": 16, "notes": {"splice": ["returns"]}}
    every = [{**asked, "seed": seed} for seed in range(4)]
    alone = [reply_text(exact.http.post("/v1/chat/completions", json=one).json()) for one in every]
    assert [reply_text(one.json()) for one in at_once(exact.url, every)] == alone and len(set(alone)) > 1
    several = exact.http.post("/v1/chat/completions", json={**asked, "seed": 0, "n": 4}).json()
    assert [one["message"]["content"] for one in several["choices"]] == alone
    assert [one["index"] for one in several["choices"]] == list(range(4))


def test_a_full_cache_queues(tmp_path: Path) -> None:
    """Idle prefixes are evicted; a prompt that never fits is refused, and so are requests beyond the queue."""
    compile_into(tmp_path, "returns", "support")
    context = ContextOptions(n_ctx=512, n_threads=1)
    with started(tmp_path, Options(parallel=4, queue=4), context=context, fixed_size=True) as served:
        every = [one for one in requests() if one["notes"]["splice"][0] in ("returns", "support")][:8]
        wanted = [reply_text(served.http.post("/v1/chat/completions", json=one).json()) for one in every]
        assert served.at_context(lambda: served.scheduler.workspace.context.cells) == 512
        replies = at_once(served.url, every)
        assert [reply_text(one.json()) for one in replies] == wanted
        assert served.chat([{"role": "user", "content": "x " * 600}], 400)["code"] == "context_length_exceeded"
        flood = at_once(served.url, [{**one, "max_tokens": 64} for one in requests() * 2])
        states = sorted({one.status_code for one in flood} - {404})
        assert states == [200, 429]
        late = next(one for one in flood if one.status_code == 429)
        assert int(late.headers["retry-after"]) >= 1 and late.json()["error"]["code"] == "queue_full"


def test_an_answer_longer_than_the_room(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Answers that together exceed the context all finish: some wait, and none is lost."""
    context = ContextOptions(n_ctx=384, n_threads=1, type_k="f32", type_v="f32")
    model = make_model("llama")
    with started(tmp_path, Options(parallel=4), context=context, fixed_size=True, model=model) as served:
        every = [{"prompt": [5, 6, 7 + number], "max_tokens": 180} for number in range(3)]
        every[0]["max_tokens"] = 9999  # as many as there are cells for
        every = [{**one, "notes": {"cache_salt": str(number)}} for number, one in enumerate(every)]

        def at_once_(every: list[Json]) -> list[Json]:
            return [one.json() for one in at_once(served.url, every, "/v1/completions")]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Model, "ends", lambda self, token: False)
            cells = served.at_context(lambda: served.scheduler.workspace.context.cells)
            alone = [one for each in every for one in at_once_([each])]
            before = served.scheduler.metrics.preempted
            replies = at_once_(every)
        written = [one["usage"]["completion_tokens"] for one in replies]
        assert written == [one["usage"]["completion_tokens"] for one in alone] == [cells - 3, 180, 180]
        for found, wanted in zip(replies, alone, strict=True):  # sums over several tokens are rounded in another order
            assert found["choices"][0]["text"][:200] == wanted["choices"][0]["text"][:200]
        assert served.scheduler.metrics.preempted > before == 0, "some must have made room for others"
        assert served.scheduler.load == 0 and not served.scheduler.budget.reservations


# Other kinds of models, with windows, recurrent layers, learned positions.

TEXT = "date: 2026-06-01\ntier: gold\n\nReturns before 2026-06-15 are accepted, and later ones are refused by us."


def decisions_share_their_input(served: Served) -> None:
    options = [{"value": "accepted"}, {"value": "refused"}]
    asked = ("Is it late?", "Is it gold?", "Is it it?")
    questions = [{"type": "choice", "instructions": text, "choices": options} for text in asked]
    body = {"input": TEXT * 3, "questions": questions}
    alone = [served.http.post("/v1/decisions", json={**body, "questions": [one]}).json() for one in questions]
    served.at_context(served.scheduler.prefixes.close)
    found = served.http.post("/v1/decisions", json=body).json()
    for one, answer in zip(alone, found["answers"], strict=True):
        [expected], values = one["answers"], [pair["probability"] for pair in answer["probabilities"]]
        assert values == pytest.approx([pair["probability"] for pair in expected["probabilities"]], abs=1e-4)
    decoded = found["usage"]["input_tokens_details"]["notes"]["decoded_tokens"]
    assert decoded < 1.5 * alone[0]["usage"]["input_tokens"], "the input was read once"


@pytest.mark.parametrize("kind", ["gemma3", "lfm2", "mamba", "gpt2"])
def test_served_as_alone(make_model: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Skills are restored where they cannot be moved, a state is reused only whole, and a conversation continues."""
    context = ContextOptions(n_ctx=2048, n_threads=1, type_k="f32", type_v="f32")
    with started(tmp_path, Options(parallel=3), context=context, model=make_model(kind)) as served:
        reply = served.http.post("/v1/notes/compile", json={"name": "rules", "text": TEXT})
        assert '"skill"' in reply.text, reply.text
        given: Json = {"max_tokens": 6, "notes": {"splice": ["rules"], "explain": True}}
        every: list[Json] = [{"messages": [{"role": "user", "content": f"Why {n}?"}], **given} for n in range(6)]
        salted = [{**one, "notes": {**one["notes"], "cache_salt": str(n)}} for n, one in enumerate(every)]
        alone = [reply_text(served.http.post("/v1/chat/completions", json=one).json()) for one in salted]
        replies = [one.json() for one in at_once(served.url, every)]
        assert [reply_text(one) for one in replies] == alone
        hows = {piece["how"] for one in replies for piece in one["notes"]["pieces"] if piece["kind"] == "splice"}
        assert "decoded" not in hows, "its rows were there"
        talk = [*every[0]["messages"], {"role": "assistant", "content": alone[0]}, *every[1]["messages"]]
        goes_on = {**every[0], "messages": talk}
        first = served.http.post("/v1/chat/completions", json=goes_on).json()
        fresh = {**goes_on, "notes": {"splice": ["rules"], "cache_salt": "fresh"}}
        assert reply_text(first) == reply_text(served.http.post("/v1/chat/completions", json=fresh).json())
        decisions_share_their_input(served)
        assert served.scheduler.load == 0 and not served.scheduler.budget.reservations


def test_a_state_cannot_take_back_a_call(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """So the tools that a model may call are all or none, unless a call is required."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "listen")]
    with started(tmp_path, model=make_model("mamba")) as served:
        for mode, status in (("auto", 400), ("required", 200)):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools[:1]}}
            asked = [{"role": "user", "content": "Hm?"}]
            reply = served.chat(asked, status, tools=tools, tool_choice=choice, max_tokens=40)
            assert status == 200 or (reply["param"] == "tool_choice" and "mode required" in reply["message"])


# Two agents in turn in a context with room for one: each goes on where it was, from memory.

AGENTS = {
    name: " ".join(f"{name} note {number}: all is well." for number in range(22)) for name in ("Kitchen", "Garage")
}


def take_turns(served: Served, rounds: int = 3) -> tuple[list[str], list[int], list[list[Json]]]:
    """Return all answers, the decoded tokens of each prompt, and both conversations."""
    agents: list[list[Json]] = [[{"role": "system", "content": text}] for text in AGENTS.values()]
    answers, decoded = [], []
    for number in range(rounds):
        for turns in agents:
            turns.append({"role": "user", "content": f"Is there anything {number}?"})
            reply = served.chat(turns, max_tokens=8, temperature=0)
            answers.append(reply_text(reply))
            turns.append({"role": "assistant", "content": answers[-1]})
            decoded.append(reply["usage"]["prompt_tokens_details"]["notes"]["decoded_tokens"])
    return answers, decoded, agents


def test_two_agents_in_turn(tmp_path: Path) -> None:
    """The same answers with memory and without, where later turns decode a few tokens; tenants do not share it."""
    large_context = ContextOptions(n_ctx=2048, n_threads=1)
    with started(tmp_path, Options(reuse="compiled"), context=large_context, fixed_size=True) as large:
        wanted, *_ = take_turns(large)
        assert not large.at_context(large.scheduler.gauges)["cache_ram_bytes"]
    context = ContextOptions(n_ctx=512, n_threads=1)
    for memory in (False, True):
        options = Options(cache_ram=None if memory else 0, reuse="compiled")
        with started(tmp_path, options, context=context, fixed_size=True) as served:
            answers, decoded, agents = take_turns(served)
            assert answers == wanted
            prompt = min(decoded[:2])
            assert 256 < prompt < 512, "there must be room for one agent"
            assert all(tokens < 40 if memory else tokens > prompt for tokens in decoded[2:]), decoded
            gauges = served.at_context(served.scheduler.gauges)
            assert bool(gauges["cache_ram_bytes"]) == bool(gauges["cache_ram_blocks"]) == memory
            assert f"notes_restored_prefixes_total {4.0 * memory}" in served.http.get("/metrics").text
            agents[0].append({"role": "user", "content": "Anything else?"})
            for salt, reused in (("", memory), ("other", False)):
                given = {"messages": agents[0], "notes": {"cache_salt": salt}}
                counts = served.http.post("/v1/notes/explain", json=given).json()["counts"]
                assert (counts["decoded"] < 40) == reused, counts


def test_the_size_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In MiB, as for llama-server; by default a quarter of the free memory, up to a limit, none if that is unknown."""
    given: list[int | None] = []
    monkeypatch.setattr(server, "serve", lambda service, *_: given.append(service.scheduler.options.cache_ram))
    for options in ((), ("--cache-ram", "0"), ("--cache-ram", "3000")):
        assert run(["serve", "--port", "0", *options]) == 0
    assert given == [None, 0, 3000 << 20]
    for free, budget in ((None, 0), (4 << 30, 1 << 30), (1 << 40, 8 << 30)):
        monkeypatch.setattr(prefix_cache, "available_memory", lambda free=free: free)
        assert prefix_cache.default_budget() == budget


def test_a_fault_before_a_prefill_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence is closed, whose cells no other request would get."""
    context = ContextOptions(n_ctx=512, n_threads=1)
    with started(tmp_path, context=context, fixed_size=True) as served:
        _, _, agents = take_turns(served, 1)
        turn = [*agents[0], {"role": "user", "content": "Anything else?"}]
        with monkeypatch.context() as patch:
            patch.setattr(prefix_cache.PrefixStore, "restore", lambda *_: 1 // 0)
            served.chat(turn, 500)
        leased = served.at_context(lambda: served.scheduler.workspace.context.n_leased)
        assert leased == len(served.at_context(lambda: list(served.scheduler.prefixes.idle_prefixes())))
        assert served.chat(turn, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
