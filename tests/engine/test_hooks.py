"""Tests of the hooks on tiny random models: rows are at their places, and equal those of decoding.

Every comparison has a control: the same test with the rotation left out or wrong must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from reference import decode, edit_in_place, nmse

from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
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
    loaded: dict[Path, Model] = {}

    def get(kind: str = "llama", **settings: object) -> Model:
        path = make_model(kind, **settings)
        if path not in loaded:
            loaded[path] = Model(path)
        return loaded[path]

    yield get
    for model in loaded.values():
        model.close()


def context(model: Model, kv: str = "f16", flash: str = "off", **options: object) -> Context:
    return Context(
        model, ContextOptions(n_ctx=512, n_threads=1, type_k=kv, type_v=kv, flash_attention=flash, **options)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("scaling", [None, "yarn", "linear"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_splice_is_position_exact(
    load: Callable[..., Model], kind: str, scaling: str | None, kv: str, flash: str
) -> None:
    """Rows compiled at 0 and spliced at 100 give the logits and the rows of decoding at 100; unrotated ones do not."""
    with (
        context(load(kind, scaling=scaling), kv, flash) as ours,
        context(load(kind, scaling=scaling), kv, flash) as stock,
    ):
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


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("flash", ["on", "off"])
def test_splice_into_one_of_several_sequences(load: Callable[..., Model], flash: str, unified: bool) -> None:
    """A splice into sequence 1 is exact and leaves sequence 0 bit-identical, streams apart or together."""
    model = load("qwen2")
    with context(model, flash=flash) as single, context(model, flash=flash, n_sequences=2, unified=unified) as several:
        single.append({0: SKILL})
        rows = single.read(0, 0, len(SKILL), base=0)
        single.clear()
        decode(single, SKILL, 40)
        expected = decode(single, QUESTION, 40 + len(SKILL))

        several.append({0: QUESTION})
        before = several.read(0, 0, len(QUESTION), base=0)
        several.splice(1, 40, SKILL, rows, 0)
        several.append({1: QUESTION})
        assert nmse(several.logits(), expected) < BOUND["f16"]
        after = several.read(0, 0, len(QUESTION), base=0)
        assert all((a.k == b.k).all() and (a.v == b.v).all() for a, b in zip(before, after, strict=True))


def test_splice_where_it_was_compiled_copies_bit_for_bit(load: Callable[..., Model]) -> None:
    """Without a distance there is nothing to rotate or round."""
    with context(load("qwen2")) as ctx:
        ctx.append({0: SKILL})
        rows = ctx.read(0, 5, 20, base=5)
        ctx.truncate(0, 5)
        ctx.splice(0, 5, SKILL[5:25], rows, 5)
        again = ctx.read(0, 5, 20, base=5)
        assert all((a.k == b.k).all() and (a.v == b.v).all() for a, b in zip(rows, again, strict=True))


def test_magnitude_is_in_the_rows_once(load: Callable[..., Model]) -> None:
    """YaRN scales K when it is decoded; a splice that scaled it again would be caught by the exactness test."""
    with context(load("qwen2", scaling="yarn"), "f32") as ctx:
        magnitude = ctx.layers[0].magnitude
        assert magnitude == pytest.approx(1.1386294)
        ctx.append({0: SKILL})
        rows = ctx.read(0, 0, len(SKILL), base=0, dtype="f32")
        moved = ctx.read(0, 0, len(SKILL), base=300, dtype="f32")
        for at_zero, at_300 in zip(rows, moved, strict=True):
            assert np.linalg.norm(at_zero.k) == pytest.approx(np.linalg.norm(at_300.k), rel=1e-5)
            assert nmse(at_zero.k * magnitude, at_zero.k) > 1000 * BOUND["f32"]


def test_read_returns_what_splice_placed(load: Callable[..., Model]) -> None:
    """Reading back at another base and splicing there again ends at the same rows, to one rounding each way."""
    with context(load("llama"), "f32") as ctx:
        ctx.append({0: SKILL})
        original = ctx.read(0, 0, len(SKILL), base=0, dtype="f32")
        ctx.clear()
        ctx.splice(0, 77, SKILL, original, 0)
        back = ctx.read(0, 77, len(SKILL), base=0, dtype="f32")
        assert all(nmse(b.k, a.k) < 1e-12 and (a.v == b.v).all() for a, b in zip(original, back, strict=True))


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_rewrite_equals_the_same_edit_by_other_means(
    load: Callable[..., Model], kind: str, count: int, flash: str
) -> None:
    """Scattered tokens rewritten in one pass equal them recomputed one by one with the tail parked."""
    where = sorted(int(p) for p in random.choice(np.arange(2, len(SKILL) - 1), count, replace=False))
    new = random.integers(0, 256, count).astype(np.int32)
    with context(load(kind), "f32", flash) as ours, context(load(kind), "f32", flash) as stock:
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


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_rewrite_of_the_whole_suffix_is_a_recompute(load: Callable[..., Model], kind: str) -> None:
    """Everything from the field on rewritten equals prefilling the corrected text; the stale cache does not."""
    corrected = SKILL.copy()
    corrected[20] = (corrected[20] + 1) % 256
    with context(load(kind), "f32") as ours, context(load(kind), "f32") as fresh:
        ours.append({0: SKILL})
        fresh.append({0: corrected})
        fresh.append({0: QUESTION})
        ours.append({0: QUESTION})
        stale = nmse(ours.logits(), fresh.logits())
        ours.truncate(0, len(SKILL))
        ours.rewrite(0, list(range(20, len(SKILL))), corrected[20:])
        ours.append({0: QUESTION})
        assert nmse(ours.logits(), fresh.logits()) < BOUND["f32"] < stale / 100


def test_rewrite_copies_on_write(load: Callable[..., Model]) -> None:
    """Cells shared by two sequences: a rewrite in one leaves the other bit-identical."""
    with context(load("llama"), n_sequences=2, unified=True) as ctx:
        ctx.append({0: SKILL})
        memory = native.llama.llama_get_memory(ctx.handle)
        native.llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
        before = ctx.read(1, 0, len(SKILL), base=0)
        ctx.rewrite(0, [4, 9], np.array([1, 2], np.int32))
        after = ctx.read(1, 0, len(SKILL), base=0)
        mine = ctx.read(0, 0, len(SKILL), base=0)
        assert all((a.k == b.k).all() and (a.v == b.v).all() for a, b in zip(before, after, strict=True))
        assert (mine[0].k[4] != before[0].k[4]).any()


@pytest.mark.parametrize("unified", [True, False])
def test_append_leaves_earlier_rows_bit_identical(load: Callable[..., Model], unified: bool) -> None:
    """Tokens for two sequences of different lengths in one batch; earlier rows are unchanged."""
    with context(load("qwen3"), n_sequences=2, unified=unified) as ctx, context(load("qwen3")) as alone:
        ctx.append({0: SKILL})
        ctx.append({1: SKILL[:11]})
        before = [ctx.read(s, 0, n, base=0) for s, n in ((0, len(SKILL)), (1, 11))]
        ctx.append({0: QUESTION, 1: QUESTION[:2]})
        after = [ctx.read(s, 0, n, base=0) for s, n in ((0, len(SKILL)), (1, 11))]
        for old, new in zip(before, after, strict=True):
            assert all((a.k == b.k).all() and (a.v == b.v).all() for a, b in zip(old, new, strict=True))
        assert (ctx.length(0), ctx.length(1)) == (len(SKILL) + len(QUESTION), 13)
        alone.append({0: np.concatenate([SKILL[:11], QUESTION[:2]])})
        assert nmse(ctx.logits(-1), alone.logits()) < BOUND["f16"]


def test_append_of_more_than_a_batch(load: Callable[..., Model]) -> None:
    """More tokens than n_batch go in several decodes and end in the same place."""
    with context(load("llama"), n_batch=16) as small, context(load("llama")) as large:
        for ctx in (small, large):
            ctx.append({0: np.concatenate([SKILL, QUESTION])})
        assert nmse(small.logits(), large.logits()) < BOUND["f16"]


def test_failed_calls_leave_the_sequence_as_it_was(load: Callable[..., Model]) -> None:
    """Occupied positions, missing rows, NaN rows, foreign tokens, a full cache: refused in words, nothing changed."""
    with context(load("llama")) as ctx:
        ctx.append({0: SKILL})
        rows = ctx.read(0, 0, len(SKILL), base=0)
        poisoned = [type(r)(r.layer, r.k.copy(), r.v.copy()) for r in rows]
        poisoned[-1].v[3, 5] = np.nan

        with pytest.raises(EngineError, match="already hold rows"):
            ctx.splice(0, 10, SKILL, rows, 0)
        with pytest.raises(EngineError, match="NaN or infinity"):
            ctx.splice(0, len(SKILL), SKILL, poisoned, 0)
        with pytest.raises(EngineError, match="do not fit a context of 512"):
            ctx.splice(0, 500, SKILL, rows, 0)
        with pytest.raises(EngineError, match="outside the vocabulary"):
            ctx.splice(0, 100, np.full_like(SKILL, 99999), rows, 0)
        with pytest.raises(EngineError, match="rows of 2 layers, the cache has 3"):
            ctx.splice(0, 100, SKILL, rows[:2], 0)
        with pytest.raises(EngineError, match="expected"):
            ctx.splice(0, 100, SKILL[:-1], rows, 0)
        with pytest.raises(EngineError, match="has no row at position 60"):
            ctx.rewrite(0, [3, 60], np.array([1, 2], np.int32))
        with pytest.raises(EngineError, match="must ascend"):
            ctx.rewrite(0, [3, 3], np.array([1, 2], np.int32))
        with pytest.raises(EngineError, match=r"outside the vocabulary|llama_decode failed"):
            ctx.rewrite(0, [3], np.array([99999], np.int32))
        with pytest.raises(EngineError, match="outside the vocabulary"):
            ctx.append({0: np.array([-4], np.int32)})
        with pytest.raises(EngineError, match="do not fit a context"):
            ctx.append({0: np.zeros(600, np.int32)})
        with pytest.raises(EngineError, match="48 of the 60 rows"):
            ctx.read(0, 0, 60, base=0)
        with pytest.raises(EngineError, match="sequence 3 does not exist"):
            ctx.read(3, 0, 1, base=0)

        after = ctx.read(0, 0, len(SKILL), base=0)
        assert all((a.k == b.k).all() and (a.v == b.v).all() for a, b in zip(rows, after, strict=True))
        assert ctx.length(0) == len(SKILL)
        ctx.append({0: QUESTION})
        assert np.isfinite(ctx.logits()).all()


def test_rewrite_needs_room_and_says_so(load: Callable[..., Model]) -> None:
    """A full cache cannot park the old rows; after making room it can."""
    with context(load("llama")) as ctx:
        ctx.append({0: np.zeros(512, np.int32)})
        with pytest.raises(EngineError, match="needs as many free cells"):
            ctx.rewrite(0, [1], np.array([5], np.int32))
        ctx.truncate(0, 511)
        ctx.rewrite(0, [1], np.array([5], np.int32))
        assert ctx.length(0) == 511


def test_aborted_rewrite_and_append_leave_no_trace(load: Callable[..., Model]) -> None:
    """The abort callback stops a computation half-way; the sequence keeps its rows and remains usable."""
    with context(load("llama")) as ctx:
        ctx.append({0: SKILL})
        before = ctx.read(0, 0, len(SKILL), base=0)
        stop = native.llama.ggml_abort_callback(lambda _: True)
        go = native.llama.ggml_abort_callback(lambda _: False)
        native.llama.llama_set_abort_callback(ctx.handle, stop, None)
        with pytest.raises(EngineError, match="the computation was stopped"):
            ctx.rewrite(0, [4, 9], np.array([1, 2], np.int32))
        with pytest.raises(EngineError, match="the computation was stopped"):
            ctx.append({0: QUESTION})
        native.llama.llama_set_abort_callback(ctx.handle, go, None)
        after = ctx.read(0, 0, len(SKILL), base=0)
        assert all((a.k == b.k).all() and (a.v == b.v).all() for a, b in zip(before, after, strict=True))
        ctx.rewrite(0, [4, 9], np.array([1, 2], np.int32))
        ctx.append({0: QUESTION})
        assert ctx.length(0) == len(SKILL) + len(QUESTION)


def test_supports_tells_why_not(load: Callable[..., Model]) -> None:
    """A model without rows supports append; everything else is refused with the reason."""
    with context(load("llama-embed"), "f16", "on") as ctx:
        assert ctx.supports("append") is None
        for operation in ("splice", "restore", "rewrite", "read"):
            assert "keeps no K/V cache" in (ctx.supports(operation) or "")
        with pytest.raises(EngineError, match="keeps no K/V cache"):
            ctx.read(0, 0, 1, base=0)
