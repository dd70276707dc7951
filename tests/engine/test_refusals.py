"""Calls that cannot be done are refused with the reason, and leave all sequences as they were.

Each group of calls has a context; after each of them the rows of all sequences are the same bits, and after all of them
each sequence goes on to the logits of one that was never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference import LoadZoo, nmse, open_context, same

from notes_cli.engine.context import Context
from notes_cli.engine.native import llama
from notes_cli.engine.segment import LayerRows
from notes_cli.errors import EngineError

from .test_vision import WIDE, span, tell

random = np.random.default_rng(3)
TEXT, OTHER = (random.integers(0, 128, 30).astype(np.int32) for _ in range(2))
LONG = random.integers(0, 128, 240).astype(np.int32)
SKILL = random.integers(0, 128, 24).astype(np.int32)
QUESTION = random.integers(0, 128, 2).astype(np.int32)
TWO: dict[str, Any] = {"n_sequences": 2, "unified": True}
SMALL: dict[str, Any] = {"n_ctx": 1024, "n_sequences": 3, "unified": True, "swa_full": False, "n_ubatch": 16}

Call = tuple[Callable[[], object], str]
Calls = Callable[[Context], Iterator[Call]]


def picture(ctx: Context, count: int) -> np.ndarray:
    width = llama.llama_model_n_embd_inp(ctx.model.handle)
    return np.random.default_rng(count).standard_normal((count, width)).astype(np.float32)


def compiled(ctx: Context) -> tuple[LayerRows, ...]:
    """Rows of SKILL at position 0."""
    with open_context(ctx.model) as scratch:
        scratch.append({0: SKILL})
        return scratch.read(0, 0, len(SKILL), base=0, dtype="f32")


def one_text(ctx: Context) -> Iterator[Call]:
    rows, two = compiled(ctx), SKILL[:2]
    poisoned = [replace(one, k=one.k.copy(), v=one.v.copy()) for one in rows]
    poisoned[-1].k[3, 5] = np.nan
    table = np.zeros((2, 3), np.int32)
    yield lambda: ctx.splice(0, 10, SKILL, rows, 0), "already hold rows"
    yield lambda: ctx.splice(0, 30, SKILL, poisoned, 0), "NaN or infinity"
    yield lambda: ctx.splice(0, 500, SKILL, rows, 0), "do not fit a context of 512"
    yield lambda: ctx.splice(0, 100, SKILL, rows[:1], 0), "rows of 1 layers, the cache has"
    yield lambda: ctx.splice(0, 100, SKILL[:-1], rows, 0), "expected"
    yield lambda: ctx.splice(0, 40, SKILL, rows, -1), "there are no positions"
    yield lambda: ctx.splice(2, 0, SKILL, rows, 0), "sequence 2 does not exist"
    yield lambda: ctx.splice(-1, 0, SKILL, rows, 0), "sequence -1 does not exist"
    yield lambda: ctx.splice(0, 30, table, rows, 0), "one line of numbers"
    yield lambda: ctx.rewrite(0, [3, 60], two), "has no row at position 60"
    yield lambda: ctx.rewrite(0, [3, 3], two), "must ascend"
    yield lambda: ctx.rewrite(0, [[1, 2], [3, 4]], table), "one line of numbers"  # type: ignore[list-item]
    yield lambda: ctx.rewrite(0, [1, 2], table), "one line of numbers"
    yield lambda: ctx.append({0: table}), "one line of numbers"
    yield lambda: ctx.append({0: np.zeros(600, np.int32)}), "do not fit a context"
    yield lambda: ctx.read(0, 0, 60, base=0), "30 of the 60 rows"
    yield lambda: ctx.read(3, 0, 1, base=0), "sequence 3 does not exist"
    yield lambda: ctx.share(0, 41), ""
    yield lambda: ctx.share(0, -1), ""
    yield lambda: ctx.share(7, 3), ""
    yield lambda: ctx.copy(0, 300, 0, 5), "sequence 300 does not exist"
    yield lambda: ctx.copy(-1, 1, 0, 5), "sequence -1 does not exist"


def apart(ctx: Context) -> Iterator[Call]:
    """Sequences with caches of their own, of which llama.cpp would abort."""
    yield lambda: ctx.copy(0, 1, 0, 5), "no part"
    yield lambda: ctx.copy(0, 1, 5, -1), "no part"
    yield lambda: ctx.share(0, 30), "caches of their own cannot share"


def with_a_state(ctx: Context) -> Iterator[Call]:
    yield lambda: ctx.copy(0, 1, 0, 5), "no part"
    yield lambda: ctx.share(0, 20), "recurrent state belongs to the last one"


def image_at_the_end(ctx: Context) -> Iterator[Call]:
    """Beyond the context by its first row or its last, on any axis: positions there cannot be gone on from."""
    for position, count in ((509, 4), (1000, 4), (2**31 - 1, 1), (2**31 - 4, 4)):
        yield lambda at=position, n=count: ctx.decode_embeddings(0, at, picture(ctx, n)), "do not fit a context of 512"
    yield lambda: ctx.decode_embeddings(0, 29, picture(ctx, 4)), "after the last row"
    yield lambda: ctx.decode_embeddings(0, 30, picture(ctx, 4)[:, 1:]), "the model takes"


def of_several_axes(ctx: Context) -> Iterator[Call]:
    """After a text with an image."""
    tokens, end = span(WIDE.seen(ctx.model)), ctx.length(0)
    rows, axes = ctx.read_axes(0, 0, len(tokens), base=0, dtype="f32")
    first, below = 4, axes.copy()
    below[first + 2, 2] = -1
    line = np.zeros((4, 3), np.int32)
    line[:, 2] = np.arange(4)  # one row of four
    for wrong in (axes[::-1], axes + 1, below):
        yield lambda axes=wrong: ctx.splice(0, 100, tokens, rows, 0, axes=axes), "begin at base and ascend"
    for wrong in (axes[:-1], axes[:, :2], axes[0]):
        yield lambda axes=wrong: ctx.splice(0, 100, tokens, rows, 0, axes=axes), rf"expected \({len(tokens)}, 3\)"
        yield lambda axes=wrong: ctx.decode_embeddings(0, end, picture(ctx, len(tokens)), axes), "expected"
    yield lambda: ctx.rewrite(0, [first], QUESTION[:1]), f"several rows at position {first}"
    yield lambda: ctx.read(0, 0, len(tokens), base=0), "rows at positions"
    yield lambda: ctx.splice(0, 2, tokens, rows, 0, axes=axes), "already hold rows"
    yield lambda: ctx.splice(0, 510, tokens, rows, 0, axes=axes), "do not fit"
    yield lambda: ctx.decode_embeddings(0, 509, picture(ctx, 4), line), "do not fit a context of 512"


def of_one_axis(ctx: Context) -> Iterator[Call]:
    rows, axes = ctx.read_axes(0, 0, 30, base=10, dtype="f32")
    assert (axes == 10 + np.arange(30)[:, None]).all()
    yield lambda: ctx.splice(0, 40, TEXT, rows, 10, axes=axes), "one axis only"


def without_cells(ctx: Context) -> Iterator[Call]:
    """Shared rows of other sequences fill the cache of a small window, from which none may be dropped."""
    rows = compiled(ctx)
    yield lambda: ctx.splice(0, 8, SKILL, rows, 0), "free cells"


def texts(ctx: Context) -> None:
    ctx.append({0: TEXT, **({1: OTHER} if ctx.options.n_sequences > 1 else {})})


def first_of_two(ctx: Context) -> None:
    ctx.append({0: TEXT})


def full(ctx: Context) -> None:
    ctx.append({1: LONG})
    ctx.copy(1, 2, 0, -1)
    ctx.append({0: TEXT[:8]})


def seen(ctx: Context) -> None:
    tell(ctx, WIDE.seen(ctx.model), 0)


CASES: dict[str, tuple[str, dict[str, Any], Callable[[Context], None], Calls]] = {
    "one text": ("llama-dense", TWO, texts, one_text),
    "texts in caches of their own": ("llama-dense", {"n_sequences": 2}, texts, one_text),
    "with an indexer": ("deepseek32-moe", TWO, texts, one_text),
    "caches apart": ("llama-dense", {"n_sequences": 2}, first_of_two, apart),
    "with a state": ("granitehybrid-dense", TWO, first_of_two, with_a_state),
    "an image": ("llama-dense", {}, texts, image_at_the_end),
    "an image after a state": ("granitehybrid-dense", {}, texts, image_at_the_end),
    "an image on three axes": ("qwen2vl-dense", {}, texts, image_at_the_end),
    "three axes": ("qwen2vl-dense", {}, seen, of_several_axes),
    "one axis": ("qwen2-dense", {}, texts, of_one_axis),
    "a small window": ("gemma3-dense", SMALL, full, without_cells),
    "a small window with an indexer": ("dots3note-moe", SMALL, full, without_cells),
}


def everything(ctx: Context) -> list[Any]:
    """The length of each sequence, its rows, up to the last 20 where a window may have dropped others, and axes."""
    found: list[Any] = [ctx.used]
    for seq_id in range(ctx.options.n_sequences):
        length = ctx.length(seq_id)
        first = max(0, length - 20) if not ctx.options.swa_full else 0
        if length:
            found.append((length, *ctx.read_axes(seq_id, first, length - first, base=first, dtype="f32")))
    return found


def unchanged(ctx: Context, before: list[Any]) -> bool:
    now = everything(ctx)
    pairs = zip(now[1:], before[1:], strict=True)
    return now[0] == before[0] and all(
        a[0] == b[0] and same(a[1], b[1]) and np.array_equal(a[2], b[2]) for a, b in pairs
    )


@pytest.mark.parametrize("case", CASES)
def test_a_refused_call_changes_something(load_zoo: LoadZoo, case: str) -> None:
    name, options, fill, calls = CASES[case]
    model = load_zoo(name)
    with open_context(model, **options) as ctx, open_context(model, **options) as fresh:
        fill(ctx)
        fill(fresh)
        before = everything(ctx)
        for call, why in calls(ctx):
            with pytest.raises(EngineError, match=why) as caught:
                call()
            assert unchanged(ctx, before), f"{why}: {caught.value}"
        for seq_id in range(ctx.options.n_sequences):
            for each in (ctx, fresh):
                each.append({seq_id: QUESTION})
            assert nmse(ctx.logits(), fresh.logits()) < 1e-9
