"""Tests of the caches' memory: zeroed by the system on first use, and when emptied (native/patches/speed)."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from notes_cli.engine import limits, native
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model

from ..conftest import MakeModel

pytestmark = [
    pytest.mark.patches("speed"),
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's counters"),
]

CACHE = 128 << 20  # two layers of K and V rows of 2 KB, 16,384 of them
TOKENS = np.arange(40, dtype=np.int32)


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> Iterator[Model]:
    with Model(make_model("qwen3", layers=2, embd=1024, heads=32, kv_heads=32)) as opened:
        yield opened


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Cache:
    """Find the mapping of the cache that is created in the block; the system may have merged it with a neighbour."""

    def __init__(self, model: Model, flash: str = "on") -> None:
        before = limits.anonymous_mappings(1)
        self.context = Context(model, ContextOptions(n_ctx=16384, n_threads=1, n_ubatch=64, flash_attention=flash))  # type: ignore[arg-type]
        found = []
        for one in limits.anonymous_mappings(CACHE):
            edges = [one.first, one.first + one.size]
            edges += [edge for old in before for edge in (old.first, old.first + old.size)]
            inside = sorted({edge for edge in edges if one.first <= edge <= one.first + one.size})
            found += [first for first, last in pairwise(inside) if last - first == CACHE]
        assert len(found) == 1, f"{len(found)} new pieces of {CACHE} bytes"
        self.memory = limits.Buffer(found[0], CACHE)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def test_a_context_touches_no_page_of_its_cache(model: Model) -> None:
    """Until there are rows, and then those of the rows: a memset would be 32,768 faults."""
    before = faults()
    with Cache(model) as cache:
        assert faults() - before < 3000
        assert limits.resident(*cache.memory) < CACHE // 100
        cache.context.append({0: TOKENS})
        assert limits.resident(*cache.memory) <= 16 << 20, "of four tensors a huge page or two"


@pytest.mark.parametrize("flash", ["on", "off"])
def test_what_is_cleared_is_zero(model: Model, flash: str) -> None:
    """All memory is zeroed, and the context then computes as a new one."""
    with Cache(model, flash) as cache:
        context, memory = cache.context, cache.memory
        context.append({0: TOKENS})
        fresh = context.logits()
        ctypes.memset(memory.first + CACHE // 3, 0x7F, CACHE // 3)  # NaN, as a damaged state would leave it
        assert limits.resident(*memory) > CACHE // 4
        native.llama.llama_memory_clear(native.llama.llama_get_memory(context.handle), True)
        assert limits.resident(*memory) == 0, "handed back"
        assert not np.frombuffer(ctypes.string_at(memory.first, CACHE), np.uint64).any()
        context.append({0: TOKENS})
        assert np.array_equal(context.logits(), fresh)


def test_memory_that_is_promised_is_not_promised_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is empty yet takes nothing: a second one is refused all the same if both could not be filled."""
    options = ContextOptions(n_ctx=16384, n_threads=1, n_ubatch=64, flash_attention="on")
    promised = sum(one.size - limits.resident(*one) for one in limits.anonymous_mappings())
    there = promised + int(1.5 * limits.context_bytes(model, options))
    monkeypatch.setattr(limits, "_meminfo", lambda: there)
    monkeypatch.setattr(limits, "_control_group", lambda: None)
    with Context(model, options), pytest.raises(limits.EngineError, match="of memory is available"):
        Context(model, options)
    Context(model, options).close()  # closed contexts reserve nothing
