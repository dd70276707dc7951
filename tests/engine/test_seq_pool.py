"""Tests of several sequences in a context: leases, shared cells, operations on one alone, and a context that grows."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest
import reference
from reference import Load, LoadZoo, all_rows, nmse, open_context, same

from notes_cli.engine.context import Context, Pool
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import LayerRows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, UnsupportedError

TEXT = list(range(40))
MORE = [7, 3, 9]


def written(context: Context, tokens: Sequence[int] = TEXT) -> KVSequence:
    return reference.written(context, tokens)


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal to rounding: other cells are added up in another order."""
    return bool(np.allclose(found, wanted, atol=2e-2 * np.abs(wanted).max()))


# Leases, without llama.cpp.


def test_a_closed_lease_does_not_take_the_next_ones_sequence() -> None:
    """Closed again, or collected, after the same id was leased again."""
    emptied: list[int] = []
    held = Pool(3, emptied.append)
    old = held.lease(0)
    old.close()
    new = held.lease(0)
    new.tokens.append(5)
    old.close()
    del old
    gc.collect()
    assert (held.held, held.tokens(0), emptied, new.held) == ([0], [5], [0], True)


def test_a_dropped_lease_is_taken_back_when_somebody_asks() -> None:
    """Not where it is dropped: that may be in any thread, and while the context computes."""
    emptied: list[int] = []
    held = Pool(3, emptied.append)
    lease = held.lease(2)
    del lease
    gc.collect()
    assert emptied == []
    assert held.free == [0, 1, 2] and emptied == [2] and held.tokens(2) == []


# Sequences.


def test_a_cleared_context_is_nobodys(load: Load) -> None:
    """The rows of a sequence are gone, which it reports, and a new one does not find them."""
    context = load()
    seq = written(context)
    context.clear()
    assert not seq.intact
    with written(context, MORE) as other:
        with pytest.raises(EngineError, match="was closed, or changed by other code"):
            seq.logits()
        seq.close()
        assert other.intact and context.length(other.seq_id) == len(MORE)


def test_no_more_sequences_than_a_context_may_have(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows on demand up to the limit, then refuses; a closed sequence is reused."""
    monkeypatch.setattr("notes_cli.engine.context._GROWS_TO", 4)
    context = load()
    seqs = [written(context, TEXT[: 3 + number]) for number in range(4)]
    assert sorted(seq.seq_id for seq in seqs) == [0, 1, 2, 3]
    with pytest.raises(EngineError, match="all 4 sequences of the context are in use"):
        KVSequence(context)
    seqs[2].close()
    with KVSequence(context) as seq:
        assert seq.seq_id == 2
    assert all(one.intact for one in (seqs[0], seqs[1], seqs[3]))


# Sharing.


def test_a_memory_of_another_kind_is_shared_as_a_whole(load_zoo: LoadZoo) -> None:
    """DeepSeek V4, which compresses keys over ranges: llama.cpp aborts at a part, so it is refused. The whole continues
    in each as alone, also after a lookahead."""
    options = ContextOptions(n_ctx=768, n_threads=1, n_sequences=3, unified=True, type_k="f32", type_v="f32")
    with load_zoo("deepseek4-moe") as model, Context(model, options) as context, Context(model, options) as alone:
        text = TEXT * 4  # more than one stretch of each kind of compression
        with written(context, text) as one:
            with pytest.raises(EngineError, match="cannot be taken apart"):
                context.share(one.seq_id, 20)
            with pytest.raises(UnsupportedError, match="no part of them"):
                context.copy(one.seq_id, 2, 0, 20)
            ahead = one.lookahead(MORE)
            with one.share() as two:
                two.append(MORE)
                one.append(MORE[::-1])
                found = two.logits(), one.logits()
        for logits, more in zip(found, (MORE, MORE[::-1]), strict=True):
            with written(alone, text + more) as wanted:
                assert nmse(logits, wanted.logits()) < 1e-9
                assert (nmse(ahead[-1], wanted.logits()) < 1e-9) == (more == MORE)


# Growing.


def test_a_lease_that_is_closed_while_the_context_grows(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that is collected meanwhile closes its sequence afterwards, and leaves no orphaned rows."""
    context = load(n_sequences=2, unified=True)
    gone, other = written(context), written(context, MORE)
    reopen = Context._reopen

    def collecting(self: Context, options: ContextOptions) -> None:
        reopen(self, options)
        gone.close()

    monkeypatch.setattr(Context, "_reopen", collecting)
    context.resize(n_ctx=1024)
    monkeypatch.undo()
    assert context.n_leased == 1 and context.used == len(MORE) and len(other) == len(MORE)
    context.resize(n_ctx=2048)
    assert context.used == len(MORE) and other.intact


def test_an_indexers_keys_come_along(load_zoo: LoadZoo) -> None:
    """A mixture of experts with a sparse attention: rows and keys of the indexer."""
    with (
        load_zoo("deepseek32-moe") as model,
        Context(model, ContextOptions(n_ctx=256, n_threads=1, n_sequences=2, unified=True)) as context,
    ):
        one = written(context)
        two = one.share()
        two.rewrite([5], [1])
        before, found = [], []
        for each in (before, found):
            each += [all_rows(one), all_rows(two)]
            context.resize(n_ctx=2 * context.n_ctx)
        assert context.used == len(TEXT) + 1
        for was, layers in zip(before, found, strict=True):
            attention = [[layer for layer in one if layer.part == "attention"] for one in (was, layers)]
            assert same(*attention) and len(attention[0]) < len(was)
            assert all(np.allclose(a.k, b.k, rtol=0, atol=1e-6) for a, b in zip(was, layers, strict=True))


def test_states_that_have_parted_are_not_lost(load: Load) -> None:
    """With a state, rows are shared as a whole. Where there is no place for all of them apart, all is as it was."""
    context = load("lfm2", n_ctx=256, n_sequences=3, unified=True)
    one = written(context, TEXT * 5)
    two = one.share()
    two.append(MORE)
    two.flush()
    before = all_rows(one), all_rows(two)
    with pytest.raises(UnsupportedError, match="without which they need 403 cells, and it has"):
        context.resize(n_ctx=1024)
    assert same(all_rows(one), before[0]) and same(all_rows(two), before[1]) and one.intact and two.intact


def test_a_rotation_that_would_change(load: Load) -> None:
    """LongRoPE has other factors beyond a length: refused while there are rows, and all is as it was."""
    context = load("phi3", n_ctx=1024)
    with written(context) as seq:
        before, logits = all_rows(seq), seq.logits()
        with pytest.raises(UnsupportedError, match="rotates its keys differently in a context of 8,192 tokens"):
            context.resize(n_ctx=8192)
        assert context.options.n_ctx == 1024 and same(all_rows(seq), before)
        seq.truncate(len(TEXT) - 1)
        seq.append(TEXT[-1:])
        assert close(seq.logits(), logits)
        context.resize(n_ctx=2048)
        assert same(all_rows(seq), before)
    context.resize(n_ctx=8192)
    assert context.n_ctx >= 8192


def test_rows_that_cannot_be_read(load: Load) -> None:
    """A small window has dropped some rows, or tokens are unknown: refused, and the sequence continues."""
    context = load("gemma3", swa_full=False, n_ubatch=8, n_batch=8)
    with written(context, TEXT * 8) as seq:
        with pytest.raises(UnsupportedError, match="cannot be made larger while sequence 0 has rows"):
            context.resize(n_ctx=1024)
        seq.append(MORE)
        assert seq.intact and len(seq.logits())
    context = load()
    context.append({0: np.array(TEXT, np.int32)})
    with pytest.raises(UnsupportedError, match="it has rows of unknown tokens"):
        context.resize(n_ctx=1024)
    assert context.length(0) == len(TEXT)


def test_a_context_of_the_models_own_size_does_not_shrink(load: Load) -> None:
    context = load(n_ctx=0)
    size = context.n_ctx
    context.resize(n_ctx=512, n_sequences=3)
    assert context.n_ctx >= size > 512


# Every kind of memory: an operation on one sequence leaves the others bit-identical.

MEMORIES = ["llama-dense", "gemma3-dense", "deepseek32-moe", "dots3note-moe", "minimax-m3-moe", "qwen2vl-dense"]
BOUND = 1e-6  # nmse of f32 rows and logits
FLASH = {"minimax-m3-moe": "on"}  # its indexer needs it

random = np.random.default_rng(5)
TEXTS = [random.integers(0, 128, n).astype(np.int32) for n in (7, 19, 40)]
SKILL = random.integers(0, 128, 24).astype(np.int32)
QUESTION = random.integers(0, 128, 12).astype(np.int32)
NEW = random.integers(0, 128, 3).astype(np.int32)


def streams(model: Model, name: str, sequences: int = 1, **options: object) -> Context:
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


@pytest.mark.parametrize(
    ("name", "unified"), [*((name, True) for name in MEMORIES), ("gemma3-dense", False), ("deepseek32-moe", False)]
)
def test_splice_into_each_sequence(load_zoo: LoadZoo, name: str, unified: bool) -> None:
    """Three sequences of different lengths: a splice into each is as into one that is alone, the others do not move."""
    model = load_zoo(name)
    with streams(model, name, 3, unified=unified) as ctx, streams(model, name, 3, unified=unified) as alone:
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
    with streams(model, name, 2, unified=True) as ctx, streams(model, name, 2, unified=True) as fresh:
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
        streams(model, name, 2, unified=True, n_ctx=1024, swa_full=False) as ctx,
        streams(model, name, n_ctx=1024) as alone,
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
