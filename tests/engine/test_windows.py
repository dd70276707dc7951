"""Tests of layers with a sliding window or chunks: rewrite, splice and truncate keep the rows that they attend to.

The zoo's windows are 32 positions. Their cache holds 256 rows where `swa_full` is off, so texts here are longer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from reference import LoadZoo, decode, distance, nmse, open_context, same, stopping

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import LayerRows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, UnsupportedError

context = partial(open_context, n_ctx=1024)
WINDOW = 32
KINDS = ["gemma3-dense", "dots3note-moe"]  # the last with an indexer, too
BOUND = 1e-6  # nmse of f32 rows and logits
FAR = 1e-4  # the same at position 8000, an angle that a float holds to a thousandth only

random = np.random.default_rng(3)
TEXT = random.integers(0, 128, 640).astype(np.int32)  # every zoo model has 128 tokens
SKILL = random.integers(0, 128, 48).astype(np.int32)  # longer than the window
SHORT = SKILL[:12]
QUESTION = random.integers(0, 128, 8).astype(np.int32)


def read(ctx: Context, first: int, end: int) -> tuple[LayerRows, ...]:
    return ctx.read(0, first, end - first, base=first, dtype="f32")


def segment(model: Model, tokens: np.ndarray = SKILL) -> tuple[LayerRows, ...]:
    """Rows compiled at 0, where no row is dropped."""
    with context(model) as ctx:
        ctx.append({0: tokens})
        return read(ctx, 0, len(tokens))


def question(ctx: Context) -> np.ndarray:
    """Logits of every token of a question."""
    ctx.append({0: QUESTION}, "all")
    return np.stack([ctx.logits(i) for i in range(len(QUESTION))])


# Only the window is kept.


@pytest.mark.parametrize("name", KINDS)
def test_what_is_refused_costs_no_window(load_zoo: LoadZoo, name: str) -> None:
    """A rewrite or a cut that needs rows dropped from the small cache, NaN in any layer: the sequence continues
    unchanged. Truncating less gives the same logits."""
    model = load_zoo(name)
    rows = segment(model)
    with context(model, swa_full=False) as ctx, context(model) as full:
        ctx.append({0: TEXT[:400]})
        before = read(ctx, 368, 400)
        undisturbed = question(ctx)
        ctx.truncate(0, 400)
        for where in ([100], [160], [100, 399]):  # gone; there, but not all that it looks at; one of each
            with pytest.raises(EngineError, match="deeper than the sliding window"):
                ctx.rewrite(0, where, SKILL[: len(where)])
        for length in (1, 100, 150):
            with pytest.raises(EngineError, match="sliding-window layers no longer hold"):
                ctx.truncate(0, length)
        for (i, layer), row in product(enumerate(rows), (0, -1)):
            k = layer.k.copy()
            k[row, 3] = np.nan
            with pytest.raises(EngineError, match="NaN or infinity"):
                ctx.splice(0, 400, SKILL, [*rows[:i], replace(layer, k=k), *rows[i + 1 :]], 0)
        assert same(read(ctx, 368, 400), before) and ctx.length(0) == 400
        assert nmse(question(ctx), undisturbed) < 1e-9
        ctx.truncate(0, 390)
        full.append({0: TEXT[:390]})
        assert nmse(question(ctx), question(full)) < BOUND


@pytest.mark.parametrize(
    ("name", "tokens"),
    [*((name, SKILL) for name in ("gpt-oss-moe", "cohere2-dense", *KINDS)), ("gemma3-dense", SHORT)],
    ids=["gpt-oss", "cohere2", *KINDS, "shorter"],
)
def test_splices_until_cells_are_used_again(load_zoo: LoadZoo, name: str, tokens: np.ndarray) -> None:
    """Text and the same segment alternate, far beyond the small cache: logits equal those of a cache with all rows."""
    model = load_zoo(name)
    rows = segment(model, tokens)
    with context(model, swa_full=False) as small, context(model) as full:
        while full.length(0) < 600:
            for ctx in (small, full):
                ctx.append({0: TEXT[ctx.length(0) :][:20]})
                ctx.splice(0, ctx.length(0), tokens, rows, 0)
            assert nmse(question(small), question(full)) < BOUND
        last = full.length(0)
        assert distance(read(small, last - 20, last), read(full, last - 20, last)) < BOUND


@pytest.mark.parametrize("name", KINDS)
def test_a_splice_without_room_costs_no_window(load_zoo: LoadZoo, name: str) -> None:
    """Where other sequences fill the small cache, the splice is refused, and the sequence keeps its rows."""
    model = load_zoo(name)
    rows = segment(model)
    with context(model, swa_full=False, n_sequences=3, unified=True, n_ubatch=16) as ctx:
        ctx.append({1: TEXT[:240]})
        llama.llama_memory_seq_cp(llama.llama_get_memory(ctx.handle), 1, 2, -1, -1)  # shared cells are not used again
        ctx.append({0: TEXT[:8]})
        before = read(ctx, 0, 8)
        with pytest.raises(EngineError, match="free cells"):
            ctx.splice(0, 8, SKILL, rows, 0)
        assert ctx.length(0) == 8
        assert same(read(ctx, 0, 8), before)


@pytest.mark.parametrize(("name", "n_batch"), [("gemma3-dense", 64), ("gemma3-dense", 512), ("dots3note-moe", 64)])
def test_an_aborted_append_is_undone_or_leaves_nothing(load_zoo: LoadZoo, name: str, n_batch: int) -> None:
    """A long append moves the window: stopped late, the earlier window is lost, so the sequence is emptied."""
    model = load_zoo(name)
    options = {"swa_full": False, "n_batch": n_batch, "n_ubatch": 16}
    with context(model, **options) as ctx, context(model, **options) as straight:  # type: ignore[arg-type]
        wanted = {0: question(straight)}
        straight.clear()
        straight.append({0: TEXT[:200]})
        with stopping(straight, after=np.inf) as steps:
            straight.append({0: TEXT[200:500]})
        straight.clear()
        straight.append({0: TEXT[:200]})
        wanted[200] = question(straight)
        for part in (0.3, 0.8, 0.95):
            ctx.clear()
            ctx.append({0: TEXT[:200]})
            with stopping(ctx, part * steps[0]), pytest.raises(EngineError, match="the computation was stopped"):
                ctx.append({0: TEXT[200:500]})
            left = ctx.length(0)
            assert nmse(question(ctx), wanted[left]) < BOUND, f"{part}: {left} left"


@pytest.mark.parametrize("name", KINDS)
def test_a_cache_as_large_as_all_rows_keeps_them(load_zoo: LoadZoo, name: str) -> None:
    """Without swa_full, too: where few cells are all that there are, no row goes for lying outside of the window."""
    model = load_zoo(name)
    with context(model, n_ctx=256, swa_full=False) as small, context(model, n_ctx=256) as full:
        for ctx in (small, full):
            ctx.append({0: TEXT[:200]})
            ctx.rewrite(0, list(range(100, 104)), SKILL[:4])
            ctx.append({0: TEXT[200:253]})  # the last one finds no free cell before the head, but row 0 in its way
            ctx.rewrite(0, [10], SKILL[:1])
        assert distance(read(small, 0, 253), read(full, 0, 253)) < BOUND


@pytest.mark.parametrize(("name", "n_ubatch"), [("gemma3-dense", 8), ("gemma3-dense", 64), ("dots3note-moe", 8)])
def test_an_append_after_a_rewrite_keeps_every_window(load_zoo: LoadZoo, name: str, n_ubatch: int) -> None:
    """A rewrite puts cells out of the order of positions. The cells that the last micro-batches of an append free were
    in the window of its first ones."""
    model = load_zoo(name)
    options = {"n_batch": 512, "n_ubatch": n_ubatch}
    with context(model, swa_full=False, **options) as small, context(model, **options) as full:  # type: ignore[arg-type]
        for ctx in (small, full):
            ctx.append({0: TEXT[:180]})
            ctx.rewrite(0, list(range(160, 180)), TEXT[160:180])
            ctx.append({0: TEXT[180:200]})
            ctx.rewrite(0, [170, 185, 199], SKILL[:3])
        small.append({0: TEXT[200:500]}, "all")
        full.append({0: TEXT[200:500]}, "all")
        found, wanted = ([ctx.logits(i) for i in range(300)] for ctx in (small, full))
        assert nmse(np.stack(found), np.stack(wanted)) < BOUND


def test_a_copy_without_its_window_cannot_go_on(load_zoo: LoadZoo) -> None:
    """The first rows of a long sequence have left its small cache: a copy of them is refused at its next token, also
    where the small cache has none of them and would take it for empty."""
    with context(load_zoo("gemma3-dense"), swa_full=False, n_sequences=2, unified=True) as ctx:
        ctx.append({0: TEXT[:400]})
        memory = llama.llama_get_memory(ctx.handle)
        for length in (20, 100):
            llama.llama_memory_seq_rm(memory, 1, -1, -1)
            llama.llama_memory_seq_cp(memory, 0, 1, 0, length)
            with pytest.raises(EngineError, match="of sequence 1 looks at"):
                ctx.append({1: QUESTION})
            with pytest.raises(EngineError, match=r"already hold rows|deeper than the sliding window"):
                ctx.splice(1, 0, SHORT, segment(ctx.model, SHORT), 0)


@pytest.mark.parametrize(
    ("name", "several"),
    [
        *(("gemma3-dense", {}), ("gemma3-dense", {"n_sequences": 2})),
        *((name, {"n_sequences": 3, "unified": True}) for name in KINDS),
    ],
    ids=str,
)
def test_a_lookahead_past_the_window_leaves_it_there(load_zoo: LoadZoo, name: str, several: dict[str, object]) -> None:
    """A lookahead takes the cells of earlier rows. These are restored bit for bit, and the text continues as without
    it."""
    model = load_zoo(name)
    with context(model, swa_full=False, n_ctx=4096, **several) as ctx, context(model) as full:  # type: ignore[arg-type]
        seq = KVSequence(ctx)
        seq.append(TEXT[:300].tolist())
        seq.flush()
        before = read(ctx, 300 - WINDOW + 1, 300)
        full.append({0: TEXT[:300]})
        undisturbed = question(full)
        for count in (3, 100, 340):
            full.truncate(0, 300)
            full.append({0: TEXT[-count:]})
            ahead = seq.lookahead(TEXT[-count:].tolist())
            assert nmse(ahead[-1], full.logits()) < BOUND
            assert seq.intact and len(seq) == ctx.length(0) == ctx.used == 300
            assert same(read(ctx, 300 - WINDOW + 1, 300), before)
        seq.truncate(299)
        seq.append([int(TEXT[299])])
        assert seq.logits().shape == (model.n_vocab,)
        assert nmse(question(ctx), undisturbed) < BOUND


@pytest.mark.parametrize("name", [*KINDS, "lfm2-dense"])  # the last with a state, too: it looks ahead in a share
def test_a_share_of_a_full_small_cache_goes_on(load_zoo: LoadZoo, name: str) -> None:
    """Its cells all hold rows, most of them outside of the window: they make room for both."""
    model = load_zoo(name)
    options = {"swa_full": False, "n_sequences": 3, "unified": True}
    with context(model, n_ctx=2048, **options) as ctx, context(model) as full:  # type: ignore[arg-type]
        full.append({0: TEXT[:400]})
        wanted = question(full)
        seq = KVSequence(ctx)
        seq.append(TEXT[:400].tolist())
        with seq.share() as other:
            other.append(TEXT[:300].tolist())
            assert np.isfinite(other.logits()).all()
            assert seq.intact
        assert seq.lookahead(TEXT[:300].tolist()).shape == (300, model.n_vocab)
        with seq.share() as other:
            ctx.append({other.seq_id: QUESTION}, "all")
            assert nmse(np.stack([ctx.logits(i) for i in range(len(QUESTION))]), wanted) < BOUND
        assert seq.intact and nmse(question(ctx), wanted) < BOUND


def test_a_rewrite_without_room_costs_no_window(load_zoo: LoadZoo) -> None:
    """Rows outside of all windows are dropped only if that frees enough cells."""
    options = {"n_sequences": 3, "unified": True, "n_ubatch": 16}
    with context(load_zoo("gemma3-dense"), swa_full=False, **options) as ctx:  # type: ignore[arg-type]
        ctx.append({1: TEXT[:200]})
        ctx.copy(1, 2, 0, -1)  # shared cells are not used again
        ctx.append({0: TEXT[:56]})  # the rest of 256
        before = read(ctx, 0, 56)
        with pytest.raises(EngineError, match="needs as many free cells in the K/V cache, there are 5"):
            ctx.rewrite(0, list(range(36, 42)), SKILL[:6])
        assert same(read(ctx, 0, 56), before)
        ctx.rewrite(0, list(range(36, 41)), SKILL[:5])
        with pytest.raises(EngineError):
            read(ctx, 0, 56)
        assert same(read(ctx, 5, 36), [rows.cut(slice(5, 36)) for rows in before])


# Every kind of memory.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-dense", {}),
        ("gemma3-dense", {}),
        ("gemma3-dense", {"swa_full": False}),
        ("dots3note-moe", {"swa_full": False}),
        ("deepseek32-moe", {}),
        ("minimax-m3-moe", {"flash": "on"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_aborted_rewrite_leaves_no_trace(load_zoo: LoadZoo, name: str, options: dict[str, object]) -> None:
    """Stopped in its first batch or in its second, all caches are as they were, and the same rewrite then works."""
    where, new = list(range(60, 150)), TEXT[300:390]
    model = load_zoo(name)
    with context(model, n_ctx=512, **options) as ctx, context(model, n_ctx=512, **options) as straight:  # type: ignore[arg-type]
        for each in (ctx, straight):
            each.append({0: TEXT[:160]})
        before = read(ctx, 0, 160)
        with stopping(straight, after=np.inf) as steps:
            straight.rewrite(0, where, new)
        for after in (0, 0.8 * steps[0]):
            with stopping(ctx, after), pytest.raises(EngineError, match="the computation was stopped"):
                ctx.rewrite(0, where, new)
            assert same(read(ctx, 0, 160), before)
        with stopping(ctx), pytest.raises(EngineError, match="the computation was stopped"):
            ctx.append({0: QUESTION})
        assert ctx.length(0) == 160
        assert same(read(ctx, 128, 160), [replace(layer, k=layer.k[128:], v=layer.v[128:]) for layer in before])
        ctx.rewrite(0, where, new)
        assert distance(read(ctx, 128, 160), read(straight, 128, 160)) < BOUND
        assert nmse(question(ctx), question(straight)) < BOUND


# Positions that cannot be left: chunks, and stretches of them by which attention is scaled.


def test_rows_stay_inside_a_chunk(load_zoo: LoadZoo) -> None:
    """Llama 4 sees chunks of 8192 positions, and scales its attention by as many: neither may be crossed."""
    with context(load_zoo("llama4-moe"), n_ctx=20480, kv="f16") as ctx:
        for base, position, count in ((0, 40, 48), (0, 8143, 48), (8192, 9000, 48), (8300, 16300, 48)):
            assert ctx.can_move(base, position, count) is None
        for base, position, why in (
            (0, 8150, "chunks of 8192"),  # the last ones are in the next chunk
            (8180, 40, "chunks of 8192"),
            (0, 8192, "stretch of 8192"),  # by a whole chunk
            (0, 8144, "stretch of 8192"),  # up to the last position of the chunk
            (8192, 16384, "stretch of 8192"),
        ):
            assert why in (ctx.can_move(base, position, 48) or ""), (base, position)
        ctx.append({0: SKILL})
        rows = ctx.read(0, 0, 48, base=0)
        with pytest.raises(UnsupportedError, match="chunks of 8192"):
            ctx.splice(0, 8150, SKILL, rows, 0)
        assert ctx.length(0) == 48


@pytest.mark.parametrize(("base", "position"), [(0, 8100), (8192, 8400)])
def test_splice_inside_a_chunk(load_zoo: LoadZoo, base: int, position: int) -> None:
    """Far along the text, in the same chunk, rows and logits are those of decoding there."""
    moved_within(load_zoo("llama4-moe"), base, position, FAR, n_ctx=9216)


def test_across_a_boundary_is_wrong(load_zoo: LoadZoo) -> None:
    """The control: rows that cross into the next chunk are others, but for those of the first layer."""
    found = {}
    with context(load_zoo("llama4-moe"), n_ctx=9216) as ctx:
        for position in (0, 40, 8150):
            ctx.clear()
            decode(ctx, SKILL, position)
            found[position] = ctx.read(0, position, 48, base=0, dtype="f32")
    assert distance(found[40], found[0]) < FAR < 1e-3 < distance(found[8150], found[0])
    assert distance(found[8150][:1], found[0][:1]) < FAR


TEMPERATURE = [
    ("mistral3-dense", {"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 128}),
    ("mistral4-moe", {"attention.temperature_scale": 0.5, "attention.temperature_length": 128}),
    ("deepseek2-moe", {"attention.temperature_scale": 0.5, "attention.temperature_length": 128}),
]


@pytest.mark.parametrize(("name", "overrides"), TEMPERATURE)
def test_rows_stay_inside_a_stretch(load_zoo: LoadZoo, name: str, overrides: dict[str, object]) -> None:
    """Attention scaled by stretches of 128 positions: exact inside one; refused, and different, from one to another."""
    model = load_zoo(name, overrides)
    moved_within(model, 0, 80)
    moved_within(model, 128, 200)
    with context(model) as ctx:
        for base, position, count in ((0, 81, 48), (0, 128, 48), (100, 110, 48), (0, 256, 1)):
            assert "stretch of 128" in (ctx.can_move(base, position, count) or "")
        decode(ctx, SKILL, 0)
        there = ctx.read(0, 0, 48, base=128, dtype="f32")
        ctx.clear()
        with pytest.raises(UnsupportedError, match="stretch of 128"):
            ctx.splice(0, 128, SKILL, there, 0)
        decode(ctx, SKILL, 128)
        assert distance(there[:1], read(ctx, 128, 176)[:1]) < BOUND < 1e-4 < distance(there, read(ctx, 128, 176))


def moved_within(model: Model, base: int, position: int, bound: float = BOUND, **options: int) -> None:
    """Rows compiled at `base` and spliced at `position` are those of decoding there, and so are the logits."""
    with context(model, **options) as ours, context(model, **options) as stock:
        decode(ours, SKILL, base)
        rows = ours.read(0, base, 48, base=base, dtype="f32")
        ours.clear()
        ours.splice(0, position, SKILL, rows, base)
        decode(stock, SKILL, position)
        assert distance(read(ours, position, position + 48), read(stock, position, position + 48)) < bound
        assert nmse(question(ours), question(stock)) < bound
