"""Tests of the hooks on tiny random models: rows are at their places, equal those of decoding, and hold no bad number.

Every comparison has a control: the same test with the rotation left out or wrong must fail.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from reference import decode, distance, edit_in_place, nmse, open_context

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.errors import EngineError

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3"]
BOUND = {"f32": 1e-6, "f16": 1e-5}

random = np.random.default_rng(7)
SKILL = random.integers(0, 256, 48).astype(np.int32)
QUESTION = random.integers(0, 256, 6).astype(np.int32)
TARGET = 100


@pytest.fixture(scope="module")
def load(make_model: Callable[..., Path]) -> Iterator[Callable[..., Model]]:
    """Load a tiny model once a module."""
    with ExitStack() as loaded:
        yield cache(lambda kind="llama", **settings: loaded.enter_context(Model(make_model(kind, **settings))))


@pytest.mark.parametrize(
    ("kind", "scaling", "kv", "flash"),
    [
        *(
            (kind, scaling, "f32", "off")
            for kind, scaling in zip(ARCHITECTURES, [None, "yarn", "linear"] * 2, strict=True)
        ),
        *(
            (kind, scaling, "f16", "on")
            for kind, scaling in zip(ARCHITECTURES, ["yarn", "linear", None] * 2, strict=True)
        ),
        *(("llama", None, "f16", "off"), ("qwen3", "yarn", "f32", "on")),
    ],
)
def test_splice_is_position_exact(
    load: Callable[..., Model], kind: str, scaling: str | None, kv: str, flash: str
) -> None:
    """Rows compiled at 0 and spliced at 100 give the logits and the rows of decoding at 100; unrotated ones do not."""
    model = load(kind, scaling=scaling)
    with open_context(model, kv, flash) as ours, open_context(model, kv, flash) as stock:
        decode(stock, SKILL, TARGET)
        expected_rows = stock.read(0, TARGET, len(SKILL), base=TARGET, dtype=kv)
        expected = decode(stock, QUESTION, TARGET + len(SKILL))

        ours.append({0: SKILL})
        rows = ours.read(0, 0, len(SKILL), base=0, dtype=kv)

        def spliced(base: int, rotate: bool = True) -> float:
            ours.clear()
            ours.splice(0, TARGET, SKILL, rows, base, rotate=rotate)
            ours.append({0: QUESTION})
            return nmse(ours.logits(), expected)

        assert spliced(base=0) < BOUND[kv]
        for found, wanted in zip(ours.read(0, TARGET, len(SKILL), base=TARGET, dtype=kv), expected_rows, strict=True):
            assert nmse(found.k, wanted.k) < BOUND[kv]
            assert nmse(found.v, wanted.v) < BOUND[kv]
        assert spliced(base=0, rotate=False) > 1000 * BOUND[kv]
        assert spliced(base=7) > 1000 * BOUND[kv]  # a wrong distance


@pytest.mark.parametrize(
    ("kind", "count", "flash"),
    [*((kind, 16, "off") for kind in ARCHITECTURES), ("llama", 1, "off"), ("smollm3", 1, "on"), ("qwen3", 16, "on")],
)
def test_rewrite_equals_the_same_edit_by_other_means(
    load: Callable[..., Model], kind: str, count: int, flash: str
) -> None:
    """Scattered tokens rewritten in one pass equal them recomputed one by one with the tail parked."""
    where = sorted(int(p) for p in random.choice(np.arange(2, len(SKILL) - 1), count, replace=False))
    new = random.integers(0, 256, count).astype(np.int32)
    with open_context(load(kind), "f32", flash) as ours, open_context(load(kind), "f32", flash) as stock:
        for ctx in (ours, stock):
            ctx.append({0: SKILL})
        before = ours.read(0, 0, len(SKILL), base=0, dtype="f32")
        ours.rewrite(0, where, new)
        edit_in_place(stock, dict(zip(where, (int(t) for t in new), strict=True)))

        untouched = [p for p in range(len(SKILL)) if p not in where]
        rows, expected = (ctx.read(0, 0, len(SKILL), base=0, dtype="f32") for ctx in (ours, stock))
        for old, found, wanted in zip(before, rows, expected, strict=True):
            assert (found.k[untouched] == old.k[untouched]).all() and (found.v[untouched] == old.v[untouched]).all()
            assert nmse(found.k[where], wanted.k[where]) < BOUND["f32"]
            assert nmse(found.k[where], old.k[where]) > 1000 * BOUND["f32"]
        for ctx in (ours, stock):
            ctx.append({0: QUESTION})
        assert nmse(ours.logits(), stock.logits()) < BOUND["f32"]


@pytest.fixture(scope="module")
def model(load: Callable[..., Model]) -> Model:
    return load("qwen2")


def stock_memory(ctx: Context) -> object:
    return llama.llama_get_memory(ctx.handle)


# Numbers that a cache must not hold.


@pytest.mark.parametrize("flash", ["on", "off"])
def test_rows_that_are_not_finite_are_not_handed_out(tmp_path: Path, flash: str) -> None:
    """A damaged model writes NaN into its cache: read refuses rather than store them in a segment."""
    import tiny

    path = tiny.write_model(tmp_path / "damaged.gguf", "qwen2")
    reader = gguf.GGUFReader(path, "r+")
    next(t for t in reader.tensors if t.name == "token_embd.weight").data[7, :] = np.nan
    reader.data.flush()
    tokens = np.where(SKILL == 7, 8, SKILL).astype(np.int32)
    tokens[20] = 7
    with Model(path) as damaged, open_context(damaged, "f16", flash) as ctx:
        ctx.append({0: tokens})
        with pytest.raises(EngineError, match="NaN or infinity"):
            ctx.read(0, 0, 48, base=0)
        with pytest.raises(EngineError, match="not numbers"):
            ctx.logits()


# Stock operations that wait for the next decode.


def test_splice_after_a_pending_copy_between_streams(model: Model) -> None:
    """llama.cpp copies streams at the next decode; that copy must not overwrite rows spliced meanwhile."""
    with open_context(model, "f16") as one, open_context(model, "f16", n_sequences=2) as ctx:
        one.append({0: SKILL})
        rows = one.read(0, 0, 48, base=0)
        ctx.append({0: QUESTION})
        llama.llama_memory_seq_cp(stock_memory(ctx), 0, 1, -1, -1)
        ctx.splice(1, 6, SKILL, rows, 0)
        ctx.append({1: QUESTION[:1]})
        assert distance(ctx.read(1, 6, 48, base=0), rows) < 1e-5


def test_read_after_a_pending_copy_and_a_pending_shift(model: Model) -> None:
    with open_context(model, "f32", n_sequences=2) as ctx:
        ctx.append({0: SKILL})
        expected = ctx.read(0, 0, 48, base=0, dtype="f32")
        llama.llama_memory_seq_cp(stock_memory(ctx), 0, 1, -1, -1)
        assert distance(ctx.read(1, 0, 48, base=0, dtype="f32"), expected) < 1e-9
        llama.llama_memory_seq_add(stock_memory(ctx), 0, 0, -1, 10)
        assert distance(ctx.read(0, 10, 48, base=0, dtype="f32"), expected) < 1e-6


# Batches and their order.


@pytest.mark.parametrize("unified", [True, False])
def test_rewrite_over_several_batches_in_another_sequence(model: Model, unified: bool) -> None:
    """Twenty scattered tokens of sequence 1, eight a batch, four a micro-batch, equal the edit by other means."""
    where = sorted(int(p) for p in random.choice(np.arange(2, 47), 20, replace=False))
    new = random.integers(0, 256, 20).astype(np.int32)
    options = {"n_sequences": 2, "unified": unified, "n_batch": 8, "n_ubatch": 4}
    with open_context(model, "f32", **options) as ours, open_context(model) as stock:
        ours.append({0: QUESTION, 1: SKILL})
        stock.append({0: SKILL})
        ours.rewrite(1, where, new)
        edit_in_place(stock, dict(zip(where, map(int, new), strict=True)))
        ours.append({1: QUESTION})
        stock.append({0: QUESTION})
        assert nmse(ours.logits(), stock.logits()) < 1e-6


@pytest.mark.parametrize("unified", [True, False])
def test_append_keeps_the_order_of_logits_over_several_batches(model: Model, unified: bool) -> None:
    parts = {2: SKILL[:30], 0: SKILL[5:6], 1: SKILL[10:25]}
    options = {"n_sequences": 3, "unified": unified, "n_batch": 16, "n_ubatch": 8}
    with open_context(model, "f32", **options) as ours, open_context(model) as alone:
        ours.append(parts)
        for index, (seq_id, tokens) in enumerate(parts.items()):
            alone.clear()
            alone.append({0: tokens})
            assert nmse(ours.logits(index - 3), alone.logits()) < 1e-6
            assert ours.length(seq_id) == len(tokens)


def test_strided_tokens_are_read_as_they_stand(model: Model) -> None:
    wide = np.zeros(20, np.int32)
    wide[::2] = SKILL[:10]
    with open_context(model) as strided, open_context(model) as plain:
        for ctx, tokens in ((strided, wide[::2]), (plain, SKILL[:10])):
            ctx.append({0: QUESTION[:1].repeat(12)})
            ctx.rewrite(0, list(range(10)), tokens)
        rows = (ctx.read(0, 0, 10, base=0, dtype="f32") for ctx in (strided, plain))
        assert distance(*rows) == 0


def test_threads_that_cannot_be_had_are_done_without(make_model: Callable[..., Path]) -> None:
    """A splice large enough for threads, in a process that may not have any more memory for them, still succeeds."""
    path = make_model("qwen2", layers=8, embd=256, heads=16, kv_heads=16)
    code = f"""
import resource
from pathlib import Path
import numpy as np
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows

model = Model(Path({str(path)!r}))
context = Context(model, ContextOptions(n_ctx=2048, n_threads=8, type_k="f32", type_v="f32"))
n = 1500
rows = [
    LayerRows(l.layer, np.zeros((n, l.n_embd_k), np.float32), np.zeros((n, l.n_embd_v), np.float32))
    for l in context.layers
]
tokens = np.zeros(n, np.int32)
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 12_000_000,) * 2)
context.splice(0, 100, tokens, rows, 0)
print(context.length(0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "1600"), done.stderr[-300:]
