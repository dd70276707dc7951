"""Runs a slice of bench/clients.py: clients that vanish, stall, repeat and send garbage leave no leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import clients
from notes_cli.engine.options import ContextOptions
from notes_cli.runtime.prefix_cache import CachedPrefix
from notes_cli.serve.jobs import Limits

from .conftest import Served, started

CONTEXT = ContextOptions(n_ctx=2048, n_threads=1, type_k="f32", type_v="f32")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with started(tmp_path, Limits(parallel=8, queue=8), context=CONTEXT, fixed_size=True) as found:
        clients.prepare(found.url)
        yield found


def test_misbehaving_clients_leave_nothing_behind(served: Served) -> None:
    outcome = asyncio.run(clients.campaign(served.url, 100, seed=5, parallel=12))
    assert outcome.wrong == [] and outcome.right > 30 and len(outcome.kinds) == 7


def test_a_leak_is_found(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the campaign reports one sequence that is not returned."""
    prefixes, kept = served.scheduler.prefixes, list[CachedPrefix]()
    rest = prefixes.set_idle

    def lose(one: CachedPrefix) -> None:
        if kept or served.scheduler.metrics.outcomes["answered"] < 26:
            rest(one)
        else:
            prefixes.entries.remove(one)
            one.idle = True  # else the scheduler closes it at the end of its job
            kept.append(one)

    monkeypatch.setattr(prefixes, "set_idle", lose)
    outcome = asyncio.run(clients.campaign(served.url, 12, seed=5, parallel=4))
    assert any("sequences" in one for one in outcome.wrong), outcome.wrong
