"""Tests of several sequences in one context: an operation on one leaves the others bit-identical."""

from __future__ import annotations

import numpy as np
import pytest
from reference import LoadZoo, nmse, open_context, same

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import LayerRows
from notes_cli.errors import EngineError

MEMORIES = ["llama-dense", "gemma3-dense", "deepseek32-moe", "dots3note-moe", "minimax-m3-moe", "qwen2vl-dense"]
BOUND = 1e-6  # nmse of f32 rows and logits
FLASH = {"minimax-m3-moe": "on"}  # its indexer needs it

random = np.random.default_rng(5)
TEXTS = [random.integers(0, 128, n).astype(np.int32) for n in (7, 19, 40)]
SKILL = random.integers(0, 128, 24).astype(np.int32)
QUESTION = random.integers(0, 128, 12).astype(np.int32)
NEW = random.integers(0, 128, 3).astype(np.int32)


def context(model: Model, name: str, sequences: int = 1, **options: object) -> Context:
    settings = {"n_ctx": 256 * sequences, "n_sequences": sequences, **options}
    return open_context(model, flash=FLASH.get(name, "off"), **settings)


def everything(ctx: Context, seq_id: int) -> tuple[LayerRows, ...]:
    return ctx.read(seq_id, 0, ctx.length(seq_id), base=0, dtype="f32")


def ask(ctx: Context, *sequences: int) -> list[np.ndarray]:
    """Logits of every token of a question put to each sequence."""
    ctx.append(dict.fromkeys(sequences, QUESTION), "all")
    logits = np.stack([ctx.logits(i) for i in range(len(sequences) * len(QUESTION))])
    return np.split(logits, len(sequences))


def bound(name: str) -> float:
    return BOUND if name not in FLASH else 1e-5  # the kernel works in f16 inside


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("name", MEMORIES)
def test_splice_into_each_sequence(load_zoo: LoadZoo, name: str, unified: bool) -> None:
    """Three sequences of different lengths: a splice into each is as into one that is alone, the others do not move."""
    model = load_zoo(name)
    with context(model, name, 3, unified=unified) as ctx, context(model, name, 3, unified=unified) as alone:
        alone.append({0: SKILL})
        rows = everything(alone, 0)
        ctx.append(dict(enumerate(TEXTS)))
        for seq_id, text in enumerate(TEXTS):
            others = {other: everything(ctx, other) for other in range(3) if other != seq_id}
            ctx.splice(seq_id, len(text), SKILL, rows, 0)
            assert all(same(everything(ctx, other), before) for other, before in others.items())
        found = ask(ctx, *range(3))
        for seq_id, text in enumerate(TEXTS):
            alone.clear()
            alone.append({0: text})
            alone.splice(0, len(text), SKILL, rows, 0)
            (wanted,) = ask(alone, 0)
            assert nmse(found[seq_id], wanted) < bound(name)
            assert nmse(found[seq_id - 1], wanted) > 100 * bound(name)  # of another text


@pytest.mark.parametrize("name", MEMORIES)
def test_rewrite_copies_on_write(load_zoo: LoadZoo, name: str) -> None:
    """Two sequences share their cells: a rewrite, a splice and an append in one leave the other bit for bit."""
    model = load_zoo(name)
    where = [3, 4, 20]
    with context(model, name, 2, unified=True) as ctx, context(model, name, 2, unified=True) as fresh:
        ctx.append({0: TEXTS[2]})
        llama.llama_memory_seq_cp(llama.llama_get_memory(ctx.handle), 0, 1, -1, -1)
        before = everything(ctx, 1)
        ctx.rewrite(0, where, NEW)
        assert same(everything(ctx, 1), before) and not same(everything(ctx, 0), before)
        fresh.append({0: TEXTS[2]})
        rows = fresh.read(0, 0, 24, base=0, dtype="f32")
        fresh.rewrite(0, where, NEW)
        assert same(everything(ctx, 0), everything(fresh, 0))
        ctx.splice(0, 40, TEXTS[2][:24], rows, 0)
        ctx.append({0: QUESTION})
        assert same(everything(ctx, 1), before)
        fresh.clear()
        fresh.append({0: TEXTS[2]})
        assert nmse(ask(ctx, 1)[0], ask(fresh, 0)[0]) < bound(name)


@pytest.mark.parametrize("name", ["gemma3-dense", "dots3note-moe"])
def test_sequences_that_share_a_small_window(load_zoo: LoadZoo, name: str) -> None:
    """Where only the window is kept, a sequence keeps a shared text, whatever is done to the other one."""
    model = load_zoo(name)
    text = random.integers(0, 128, 150).astype(np.int32)
    with (
        context(model, name, 2, unified=True, n_ctx=1024, swa_full=False) as ctx,
        context(model, name, n_ctx=1024) as alone,
    ):
        alone.append({0: SKILL})
        rows = everything(alone, 0)
        alone.clear()
        alone.append({0: text})
        (wanted,) = ask(alone, 0)
        ctx.append({0: text})
        llama.llama_memory_seq_cp(llama.llama_get_memory(ctx.handle), 0, 1, -1, -1)
        before = ctx.read(1, 118, 32, base=118, dtype="f32")
        for _ in range(4):
            ctx.splice(0, ctx.length(0), SKILL, rows, 0)
            ctx.append({0: TEXTS[2]})
            ctx.rewrite(0, [ctx.length(0) - 9], NEW[:1])
        assert same(ctx.read(1, 118, 32, base=118, dtype="f32"), before)
        assert nmse(ask(ctx, 1)[0], wanted) < BOUND


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_a_refused_splice_moves_nobody(load_zoo: LoadZoo, unified: bool) -> None:
    """Rows already there, NaN, no such sequence: neither this sequence nor another one changes."""
    with context(load_zoo("deepseek32-moe"), "deepseek32-moe", 2, unified=unified) as ctx:
        ctx.append({0: TEXTS[2], 1: TEXTS[1]})
        before = [everything(ctx, seq_id) for seq_id in range(2)]
        rows = ctx.read(0, 0, 24, base=0, dtype="f32")
        for seq_id, position, base in ((0, 30, 0), (1, 0, 0), (2, 0, 0), (-1, 0, 0), (0, 500, 0), (0, 40, -1)):
            with pytest.raises(EngineError):
                ctx.splice(seq_id, position, TEXTS[2][:24], rows, base)
        rows[-1].k[5, 5] = np.inf
        with pytest.raises(EngineError, match="NaN or infinity"):
            ctx.splice(1, 19, TEXTS[2][:24], rows, 0)
        assert all(same(everything(ctx, seq_id), before[seq_id]) for seq_id in range(2))
