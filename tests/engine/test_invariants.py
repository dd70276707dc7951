"""Tests of the invariants of a sequence under interrupts, closing and bad numbers.

No bad number enters a cache, no pending operation is overlooked, an interrupt leaves sequence and cache in agreement,
and using a closed object raises instead of crashing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from reference import edit_in_place, nmse

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import LayerRows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError

random = np.random.default_rng(7)
SKILL = random.integers(0, 256, 48).astype(np.int32)
QUESTION = random.integers(0, 256, 6).astype(np.int32)


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Iterator[Model]:
    with Model(make_model("qwen2")) as loaded:
        yield loaded


def context(model: Model, kv: str = "f16", flash: str = "off", **options: object) -> Context:
    settings = {"n_ctx": 512, "n_threads": 1, "type_k": kv, "type_v": kv, "flash_attention": flash, **options}
    return Context(model, ContextOptions(**settings))  # type: ignore[arg-type]


def stock_memory(ctx: Context) -> object:
    return llama.llama_get_memory(ctx.handle)


def distance(found: Sequence[LayerRows], expected: Sequence[LayerRows]) -> float:
    """The worst nmse of any layer's K or V."""
    return max(max(nmse(a.k, b.k), nmse(a.v, b.v)) for a, b in zip(found, expected, strict=True))


# Numbers that a cache must not hold.


@pytest.mark.parametrize("flash", ["on", "off"])
def test_rows_that_overflow_the_cache_are_refused_and_poison_nobody(model: Model, flash: str) -> None:
    """A finite f32 row that is infinite as f16 is refused, and another sequence of the stream stays finite."""
    with context(model, flash=flash, n_sequences=2, unified=True) as ctx:
        ctx.append({0: SKILL})
        read = ctx.read(0, 0, 48, base=0)
        rows = [LayerRows(r.layer, r.k.astype(np.float32), r.v.astype(np.float32)) for r in read]
        rows[0].v[3, 5] = 1e6
        with pytest.raises(EngineError, match="NaN or infinity"):
            ctx.splice(1, 0, SKILL, rows, 0)
        ctx.append({0: QUESTION})
        assert np.isfinite(ctx.logits()).all()


def test_rows_that_overflow_by_the_turn_are_refused(model: Model) -> None:
    """Two large finite elements of a pair can turn into one that f16 cannot hold."""
    with context(model) as ctx:
        ctx.append({0: SKILL})
        rows = ctx.read(0, 0, 48, base=0)
        ctx.clear()
        rows[0].k[:] = 60000.0
        with pytest.raises(EngineError, match="NaN or infinity"):
            ctx.splice(0, 100, SKILL, rows, 0)
        assert ctx.length(0) == 0


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
    with Model(path) as damaged, context(damaged, flash=flash) as ctx:
        ctx.append({0: tokens})
        with pytest.raises(EngineError, match="NaN or infinity"):
            ctx.read(0, 0, 48, base=0)
        with pytest.raises(EngineError, match="not numbers"):
            ctx.logits()


# Stock operations that wait for the next decode.


def test_splice_after_a_pending_copy_between_streams(model: Model) -> None:
    """llama.cpp copies streams at the next decode; that copy must not overwrite rows spliced meanwhile."""
    with context(model) as one, context(model, n_sequences=2) as ctx:
        one.append({0: SKILL})
        rows = one.read(0, 0, 48, base=0)
        ctx.append({0: QUESTION})
        llama.llama_memory_seq_cp(stock_memory(ctx), 0, 1, -1, -1)
        ctx.splice(1, 6, SKILL, rows, 0)
        ctx.append({1: QUESTION[:1]})
        assert distance(ctx.read(1, 6, 48, base=0), rows) < 1e-5


def test_read_after_a_pending_copy_and_a_pending_shift(model: Model) -> None:
    """Rows are read as they will be, not as they still lie."""
    with context(model, "f32", n_sequences=2) as ctx:
        ctx.append({0: SKILL})
        expected = ctx.read(0, 0, 48, base=0, dtype="f32")
        llama.llama_memory_seq_cp(stock_memory(ctx), 0, 1, -1, -1)
        assert distance(ctx.read(1, 0, 48, base=0, dtype="f32"), expected) < 1e-9
        llama.llama_memory_seq_add(stock_memory(ctx), 0, 0, -1, 10)
        assert distance(ctx.read(0, 10, 48, base=0, dtype="f32"), expected) < 1e-6


def test_two_rows_at_one_position_are_refused(model: Model) -> None:
    """Stock calls can put two rows at one position; neither read nor rewrite can know which is meant."""
    with context(model, n_sequences=2, unified=True) as ctx:
        ctx.append({0: SKILL, 1: QUESTION})
        llama.llama_memory_seq_rm(stock_memory(ctx), 1, 2, 3)
        llama.llama_memory_seq_cp(stock_memory(ctx), 0, 1, 3, 4)  # sequence 1 holds 0 1 3 3 4 5
        with pytest.raises(EngineError, match="6 of the 6 rows"):
            ctx.read(1, 0, 6, base=0)
        with pytest.raises(EngineError, match="several rows at position 3"):
            ctx.rewrite(1, [3], np.array([5], np.int32))


# Batches and their order.


@pytest.mark.parametrize("unified", [True, False])
def test_rewrite_over_several_batches_in_another_sequence(model: Model, unified: bool) -> None:
    """Twenty scattered tokens of sequence 1, eight a batch, four a micro-batch, equal the edit by other means."""
    where = sorted(int(p) for p in random.choice(np.arange(2, 47), 20, replace=False))
    new = random.integers(0, 256, 20).astype(np.int32)
    options = {"n_sequences": 2, "unified": unified, "n_batch": 8, "n_ubatch": 4}
    with context(model, "f32", **options) as ours, context(model, "f32") as stock:
        ours.append({0: QUESTION, 1: SKILL})
        stock.append({0: SKILL})
        ours.rewrite(1, where, new)
        edit_in_place(stock, dict(zip(where, map(int, new), strict=True)))
        ours.append({1: QUESTION})
        stock.append({0: QUESTION})
        assert nmse(ours.logits(), stock.logits()) < 1e-6


@pytest.mark.parametrize("unified", [True, False])
def test_append_keeps_the_order_of_logits_over_several_batches(model: Model, unified: bool) -> None:
    """Three sequences that need several batches: the last logits are in the order they were asked for."""
    parts = {2: SKILL[:30], 0: SKILL[5:6], 1: SKILL[10:25]}
    options = {"n_sequences": 3, "unified": unified, "n_batch": 16, "n_ubatch": 8}
    with context(model, "f32", **options) as ours, context(model, "f32") as alone:
        ours.append(parts)
        for index, (seq_id, tokens) in enumerate(parts.items()):
            alone.clear()
            alone.append({0: tokens})
            assert nmse(ours.logits(index - 3), alone.logits()) < 1e-6
            assert ours.length(seq_id) == len(tokens)


def test_strided_tokens_are_read_as_they_stand(model: Model) -> None:
    """Every second element of an array is not the first half of its memory."""
    wide = np.zeros(20, np.int32)
    wide[::2] = SKILL[:10]
    with context(model, "f32") as strided, context(model, "f32") as plain:
        for ctx, tokens in ((strided, wide[::2]), (plain, SKILL[:10])):
            ctx.append({0: QUESTION[:1].repeat(12)})
            ctx.rewrite(0, list(range(10)), tokens)
        rows = (ctx.read(0, 0, 10, base=0, dtype="f32") for ctx in (strided, plain))
        assert distance(*rows) == 0


# Interrupts, closing, and several sequences in one context.


class Interrupting:
    """A method that does its work and is then interrupted, as ctypes is: after the call."""

    def __init__(self, method: Callable[..., None]) -> None:
        self.method = method

    def __call__(self, *arguments: object, **options: object) -> None:
        self.method(*arguments, **options)
        raise KeyboardInterrupt


def test_interrupted_lookahead_leaves_no_rows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that were only looked at are gone, interrupted or not."""
    with context(model) as ctx:
        sequence = KVSequence(ctx)
        sequence.append(SKILL)
        sequence.flush()
        monkeypatch.setattr(ctx, "append", Interrupting(ctx.append))
        with pytest.raises(KeyboardInterrupt):
            sequence.lookahead(QUESTION)
        assert ctx.length(0) == len(sequence) == 48


def test_interrupted_rewrite_leaves_what_stands_before_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown whether the edit took place; the sequence keeps only the rows before it."""
    with context(model) as ctx:
        sequence = KVSequence(ctx)
        sequence.append(SKILL)
        monkeypatch.setattr(ctx, "rewrite", Interrupting(ctx.rewrite))
        with pytest.raises(KeyboardInterrupt):
            sequence.rewrite([30, 40], np.array([1, 2], np.int32))
        assert ctx.length(0) == len(sequence) == 30
        assert (sequence.tokens == SKILL[:30]).all()


def test_logits_after_an_interrupt_and_after_truncation(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token has a row but its logits are gone: it is decoded once more, to the same logits."""
    with context(model, "f32") as ctx:
        sequence = KVSequence(ctx)
        sequence.append(SKILL)
        expected = sequence.logits()
        sequence.append(QUESTION)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ctx, "append", Interrupting(ctx.append))
            sequence.flush()
        assert ctx.length(0) == 54
        sequence.logits()
        sequence.truncate(48)
        assert nmse(sequence.logits(), expected) < 1e-9


def test_two_notebooks_in_one_context_do_not_share_logits(model: Model) -> None:
    """An answer starts from its own sequence's logits, also if another sequence decoded last."""

    def alone(tokens: np.ndarray) -> list[int]:
        with context(model, "f32") as ctx, Sampler(SamplerOptions()) as sampler:
            sequence = KVSequence(ctx)
            sequence.append(tokens)
            return list(sequence.generate(sampler, 8))

    with context(model, "f32", n_sequences=2) as ctx, Sampler(SamplerOptions()) as sampler:
        first, second = KVSequence(ctx), KVSequence(ctx)
        first.append(SKILL)
        second.append(QUESTION)
        first.flush()
        second.flush()
        assert list(first.generate(sampler, 8)) == alone(SKILL) != alone(QUESTION)


def test_a_sequence_changed_behind_a_notebook_is_noticed(model: Model) -> None:
    """A sequence whose rows were removed refuses to continue."""
    with context(model) as ctx:
        sequence = KVSequence(ctx)
        sequence.append(SKILL)
        sequence.flush()
        sequence.append(QUESTION)
        ctx.truncate(sequence.seq_id, 3)
        with pytest.raises(EngineError, match="changed by other code"):
            sequence.flush()
        ctx.clear()
        with pytest.raises(EngineError, match="changed by other code"):
            sequence.flush()


def test_a_dry_notebook_touches_no_rows(model: Model) -> None:
    """A ledger without computation leaves the context's rows alone, truncating too."""
    with context(model) as ctx:
        ctx.append({0: SKILL})
        sequence = KVSequence(ctx, dry=True)
        sequence.append(SKILL)
        sequence.flush()
        sequence.truncate(3)
        sequence.rewrite([1], np.array([5], np.int32))
        assert sequence.tokens.tolist() == [SKILL[0], 5, SKILL[2]]
        assert ctx.length(0) == 48


def test_what_is_closed_says_so(model: Model) -> None:
    """A closed context, model or sampler raises; it does not crash."""
    path = model.path
    with Model(path) as other:
        ctx = context(other)
        ctx.close()
        for call in (lambda: ctx.length(0), lambda: ctx.truncate(0, 1), ctx.clear, lambda: ctx.logits()):
            with pytest.raises(EngineError, match="closed"):
                call()
        sampler = Sampler(SamplerOptions())
        sampler.close()
        with context(other) as open_context, pytest.raises(EngineError, match="closed"):
            sampler.next(open_context)
    with pytest.raises(Exception, match="closed"):
        other.tokenize("text")


def test_threads_that_cannot_be_had_are_done_without(make_model: Callable[..., Path]) -> None:
    """A splice large enough for threads, in a process that may not have any more memory for them, still succeeds."""
    path = make_model("qwen2", layers=8, embd=256, heads=16, kv_heads=16)
    code = f"""
import resource
from pathlib import Path
import numpy as np
from notes_cli.engine.context import Context
from notes_cli.engine.options import ContextOptions
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
