"""Tests two agents in turn in a context with room for one: each goes on where it was, from memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from notes_cli.cli import run
from notes_cli.engine.options import ContextOptions
from notes_cli.runtime import prefix_store
from notes_cli.serve import server
from notes_cli.serve.jobs import Limits

from .conftest import Json, Served, started, told

NOTES = {
    name: " ".join(f"{name} note {number}: all is well." for number in range(22)) for name in ("Kitchen", "Garage")
}


def take_turns(served: Served, rounds: int = 3) -> tuple[list[str], list[int], list[list[Json]]]:
    """Return all answers, the decoded tokens of each prompt, and both conversations."""
    agents: list[list[Json]] = [[{"role": "system", "content": text}] for text in NOTES.values()]
    answers, decoded = [], []
    for number in range(rounds):
        for turns in agents:
            turns.append({"role": "user", "content": f"Is there anything {number}?"})
            reply = served.chat(turns, max_tokens=8, temperature=0)
            answers.append(told(reply))
            turns.append({"role": "assistant", "content": answers[-1]})
            decoded.append(reply["usage"]["prompt_tokens_details"]["notes"]["decoded_tokens"])
    return answers, decoded, agents


@pytest.mark.parametrize("cache_ram", [0, None])
def test_two_agents_in_turn(tmp_path: Path, cache_ram: int | None) -> None:
    """The answers are the same with and without memory, in which only the later turns differ: they decode a few tokens.
    Tenants do not share it, and explanations and metrics count it."""
    context = ContextOptions(n_ctx=512, n_threads=1)
    limits = Limits(cache_ram=cache_ram)
    with started(tmp_path, limits, context=context, fixed_size=True) as served:
        answers, decoded, agents = take_turns(served)
        prompt = min(decoded[:2])
        assert 256 < prompt < 512, "there must be room for one agent"
        assert all(tokens < 40 if cache_ram is None else tokens > prompt for tokens in decoded[2:]), decoded
        gauges = served.at_context(served.scheduler.gauges)
        assert bool(gauges["cache_ram_bytes"]) == bool(gauges["cache_ram_blocks"]) == (cache_ram is None)
        metrics = served.http.get("/metrics").text
        assert f"notes_restored_prefixes_total {4.0 if cache_ram is None else 0.0}" in metrics
        agents[0].append({"role": "user", "content": "Anything else?"})
        for salt, reused in (("", cache_ram is None), ("other", False)):
            given = {"messages": agents[0], "notes": {"cache_salt": salt}}
            counts = served.http.post("/v1/notes/explain", json=given).json()["counts"]
            assert (counts["decoded"] < 40) == reused, counts
    with started(tmp_path, context=ContextOptions(n_ctx=2048, n_threads=1), fixed_size=True) as large:
        assert take_turns(large)[0] == answers and not large.at_context(large.scheduler.gauges)["cache_ram_bytes"]


def test_the_size_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In MiB, as for llama-server; by default a quarter of the free memory, up to a limit, none if that is unknown."""
    given: list[int | None] = []
    monkeypatch.setattr(server, "serve", lambda service, *_: given.append(service.scheduler.limits.cache_ram))
    for options in ((), ("--cache-ram", "0"), ("--cache-ram", "3000")):
        assert run(["serve", "--port", "0", *options]) == 0
    assert given == [None, 0, 3000 << 20]
    for free, budget in ((None, 0), (4 << 30, 1 << 30), (1 << 40, 8 << 30)):
        monkeypatch.setattr(prefix_store, "available_memory", lambda free=free: free)
        assert prefix_store.default_budget() == budget


def test_a_fault_before_a_prefill_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence is closed, whose cells no other request would get."""
    context = ContextOptions(n_ctx=512, n_threads=1)
    with started(tmp_path, context=context, fixed_size=True) as served:
        _, _, agents = take_turns(served, 1)
        turn = [*agents[0], {"role": "user", "content": "Anything else?"}]
        with monkeypatch.context() as patch:
            patch.setattr(prefix_store.PrefixStore, "restore", lambda *_: 1 // 0)
            served.chat(turn, 500)
        leased = served.at_context(lambda: served.scheduler.workspace.context.n_leased)
        assert leased == len(served.at_context(lambda: list(served.scheduler.prefixes.idle_prefixes())))
        assert served.chat(turn, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
