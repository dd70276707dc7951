"""Calls that the engine refuses: each has one error with the reason, and no sequence has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from reference import LoadZoo, nmse, open_context

from notes_cli.engine.context import Context
from notes_cli.engine.native import llama
from notes_cli.engine.positions import Patch
from notes_cli.engine.segment import LayerRows, Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, NotesError

from ..refused import refused
from .test_vision import BEFORE, WIDE, span, tell

Calls = list[tuple[Any, ...]]  # the text of the error, a function and its arguments

random = np.random.default_rng(3)
TEXT = random.integers(0, 128, 48).astype(np.int32)
QUESTION = random.integers(0, 128, 8).astype(np.int32)
TWO, TABLE = TEXT[:2], np.zeros((2, 3), np.int32)
LAST = 2**31 - 1  # the largest position of a C int


def show(ctx: Context, position: int, count: int = 4, axes: Any = None, sequence: int = 0, cut: int = 0) -> None:
    """Decode that many rows of an image."""
    width = llama.llama_model_n_embd_inp(ctx.model.handle) - cut
    ctx.decode_embeddings(sequence, position, np.ones((count, width), np.float32), axes)


def move(ctx: Context, base: int, position: int, count: int) -> None:
    if reason := ctx.can_move(base, position, count):
        raise EngineError(reason)


ROW_OF_FOUR = np.stack([np.zeros(4), np.zeros(4), np.arange(4)], axis=1).astype(np.int32)


def beyond(ctx: Context, axes: Any = None) -> Calls:
    """Images of which a row, on some axis, is beyond the context."""
    places = [(LAST, 1), *((at, 4) for at in (253, 1000, LAST - 3)), *([] if axes is None else [(253, 4, axes)])]
    return [("do not fit a context of 256", show, ctx, *one) for one in places]


def of_a_text(ctx: Context) -> Calls:
    """And of a sequence into which stock calls have put two rows at one position: 0 1 3 3 4 5 6 7."""
    ctx.append({0: TEXT, 1: QUESTION, 2: QUESTION})
    memory = llama.llama_get_memory(ctx.handle)
    llama.llama_memory_seq_rm(memory, 2, 2, 3)
    llama.llama_memory_seq_cp(memory, 0, 2, 3, 4)
    rows = ctx.read(0, 0, 48, base=0)
    calls: Calls = [
        *(("already hold rows", ctx.splice, *to, TEXT, rows, 0) for to in ((0, 10), (1, 0))),
        ("do not fit a context of 256", ctx.splice, 0, 250, TEXT, rows, 0),
        ("rows of 1 layers, the cache has 2", ctx.splice, 0, 100, TEXT, rows[:1], 0),
        ("expected", ctx.splice, 0, 100, TEXT[:-1], rows, 0),
        ("one line of numbers", ctx.splice, 0, 48, TABLE, rows, 0),
        ("there are no positions", ctx.splice, 0, 48, TEXT, rows, -1),
        *(("does not exist", ctx.splice, to, 0, TEXT, rows, 0) for to in (4, -1)),
        ("has no row at position 60", ctx.rewrite, 0, [3, 60], TWO),
        ("must ascend", ctx.rewrite, 0, [3, 3], TWO),
        ("2 positions but 1 tokens", ctx.rewrite, 0, [3, 4], TWO[:1]),
        *(("one line of numbers", ctx.rewrite, 0, at, TABLE) for at in ([[1, 2], [3, 4]], [1, 2])),
        ("do not fit a context", ctx.append, {0: np.zeros(600, np.int32)}),
        ("one line of numbers", ctx.append, {0: TABLE}),
        ("48 of the 60 rows", partial(ctx.read, base=0), 0, 0, 60),
        ("sequence 4 does not exist", partial(ctx.read, base=0), 4, 0, 1),
        ("8 of the 8 rows", partial(ctx.read, base=0), 2, 0, 8),
        ("several rows at position 3", ctx.rewrite, 2, [3], TWO[:1]),
        *((f"sequence {one} does not exist", ctx.copy, *to, 0, 5) for one, to in ((300, (0, 300)), (-1, (-1, 1)))),
        *((why, ctx.share, *of) for why, of in (("share 49", (0, 49)), ("share -1", (0, -1)), ("sequence 7", (7, 3)))),
        ("after the last row", show, ctx, 47),
        ("the model takes", partial(show, cut=1), ctx, 48),
        *beyond(ctx),
    ]
    for token in (128, LAST, -1):
        ids, why = np.array([3, token], np.int32), f"token {token} is outside the vocabulary of 128"
        pair = [one.cut(slice(2)) for one in rows]
        calls += [(why, ctx.append, {0: ids}), (why, ctx.rewrite, 0, [1, 2], ids)]
        calls += [(why, ctx.splice, 0, 48, ids, pair, 0)]
        calls += [(why, ask, token) for ask in (ctx.model.token_bytes, ctx.model.ends)]
    for far in (LAST, LAST + 1, 2**32, 2**32 + 8, 2**64, -1, -LAST - 2):  # some would wrap around to a number that is
        calls += [("", ctx.splice, *to, TEXT, rows, base) for *to, base in ((0, far, 0), (0, 48, far), (far, 48, 0))]
        calls += [("", partial(ctx.read, base=to), *of, 8) for *of, to in ((0, far, 0), (0, 0, far), (far, 0, 0))]
        calls += [("", ctx.rewrite, *at, [token]) for *at, token in ((0, [far], 1), (far, [1], 1), (0, [1], far))]
        calls += [("", ctx.append, {far: TWO}), ("", ctx.append, {0: [far]}), ("", ctx.truncate, far, 0)]
        calls += [("", move, ctx, *one) for one in ((0, far, 8), (far, 0, 8), (0, 1, far))]
        calls += [("", ctx.length, far), *([("", ctx.truncate, 0, far)] if far < 0 else [])]
    return calls


def of_numbers(ctx: Context) -> Calls:
    """NaN or infinity in any tensor; in f16 a number that it does not have, and two that turn into one."""
    ctx.append({0: TEXT, 1: QUESTION})
    rows = ctx.read(0, 0, 48, base=0, dtype="f32")
    large = [replace(one, k=np.full_like(one.k, 60000.0)) for one in rows]

    def wrong(layer: int, part: str, value: float) -> list[LayerRows]:
        changed = getattr(rows[layer], part).copy()
        changed[3, 5] = value
        return [*rows[:layer], replace(rows[layer], **{part: changed}), *rows[layer + 1 :]]

    f16 = ctx.lossless_type == "f16"
    tensors = [(layer, part) for layer, one in enumerate(rows) for part in "kv" if getattr(one, part).size]
    spoilt = [wrong(*one, value) for one in tensors for value in (np.nan, np.inf, 1e6)[: 3 if f16 else 2]]
    found: Calls = [("NaN or infinity", ctx.splice, 1, 8, TEXT, layers, 0) for layers in spoilt]
    return found + [("NaN or infinity", ctx.splice, 1, 100, TEXT, large, 0)] * f16


def of_separate_caches(ctx: Context) -> Calls:
    ctx.append({0: TEXT})
    parts: Calls = [("no part", ctx.copy, 0, 1, *to) for to in ((0, 5), (5, -1))]
    return [*parts, ("caches of their own cannot share", ctx.share, 0, 48)]


def of_a_state(ctx: Context) -> Calls:
    """llama.cpp would abort at a part of it, or copy rows without their state."""
    ctx.append({0: TEXT})
    shared = ("recurrent state belongs to the last one", ctx.share, 0, 20)
    return [("no part", ctx.copy, 0, 1, 0, 5), shared, *beyond(ctx)]


def of_a_window(ctx: Context) -> Calls:
    """A share goes on where its small cache has dropped what an image would attend to."""
    ctx.append({0: np.tile(TEXT, 12)})

    def continued() -> None:
        with ctx.share(0, 200) as other:
            show(ctx, 200, sequence=other.id)

    return [("sliding-window layers no longer hold what position 200", continued)]


def of_images(ctx: Context) -> Calls:
    tokens, first = span(WIDE.seen(ctx.model)), len(BEFORE)
    end = tell(ctx, WIDE.seen(ctx.model), 0)
    rows, axes = ctx.read_axes(0, 0, len(tokens), base=0, dtype="f32")
    below = axes.copy()
    below[first + 2, 2] = -1
    places = [("begin at base and ascend", 37, wrong) for wrong in (axes[::-1], axes + 1, below)]
    places += [("already hold rows", 2, axes), ("do not fit", 250, axes)]
    shapes = axes[:-1], axes[:, :2], axes[0]
    places += [(r"expected \(22, 3\)", 37, wrong) for wrong in shapes]
    return [
        *((why, partial(ctx.splice, axes=where), 0, at, tokens, rows, 0) for why, at, where in places),
        *((r"expected \(22, 3\)", show, ctx, end, len(tokens), wrong) for wrong in shapes),
        (f"several rows at position {first}", ctx.rewrite, 0, [first], TWO[:1]),
        ("rows at positions", partial(ctx.read, base=0), 0, 0, len(tokens)),
        *beyond(ctx, ROW_OF_FOUR),
    ]


def of_one_axis(ctx: Context) -> Calls:
    ctx.append({0: TEXT})
    rows, axes = ctx.read_axes(0, 0, 48, base=10, dtype="f32")
    assert (axes == 10 + np.arange(48)[:, None]).all()
    return [("one axis only", partial(ctx.splice, axes=axes), 0, 60, TEXT, rows, 10)]


def of_a_sequence(ctx: Context, dry: bool = False) -> Calls:
    """16 tokens fewer than the context."""
    with KVSequence(ctx) as other:
        other.append(TEXT)
        other.flush()
        segment = Segment("s", "", "", TEXT, 0, TEXT[:0], (), ctx.identity("w"), other.read(0, 48, "f32")[0])
    sequence = KVSequence(ctx, dry=dry)
    sequence.append(np.resize(TEXT, 240))
    sequence.flush()
    wrong = [[], *([span] for span in ((-1, 2), (239, 241), (240, 241), (5, 5), (6, 5)))]
    wrong += [[(9, 10), (8, 9)], [(8, 10), (9, 11)]]
    full = r"do not fit 256\. Give it -c 1024"
    return [
        (full, sequence.append, np.zeros(17, np.int32)),
        *((full, sequence.splice, segment), (full, sequence.place, TEXT, segment.layers, 0, "text", "")),
        ("no place in the cache" if dry else full, sequence.lookahead, [1] * 17),
        (full, sequence.replace, [Patch(0, 1, (1,) * 18)]),
        *(("must ascend inside of the sequence, which has 240", sequence.replace, patched(*spans)) for spans in wrong),
        *(("cannot go back", sequence.truncate, length) for length in (-1, 241)),
        *(("rows cannot be shared", sequence.share, length) for length in (-1, 241)),
    ]


def patched(*spans: tuple[int, int]) -> list[Patch]:
    return [Patch(*span, (1,)) for span in spans]


def of_a_sequence_with_an_image(ctx: Context, axes: bool = True) -> Calls:
    """Its rows are never decoded as tokens, and no part of it goes."""
    seen = WIDE.seen(ctx.model)
    if not axes:
        seen = replace(seen, axes=None, media=(replace(seen.media[0], positions=WIDE.rows),))
    sequence = KVSequence(ctx)
    sequence.append(BEFORE)
    sequence.append_image(seen)
    sequence.append(QUESTION)
    sequence.flush()
    first, inside, last = len(BEFORE), len(BEFORE) + 1, len(BEFORE) + WIDE.rows
    return [
        ("inside of an image", sequence.truncate, inside),
        *(
            ("are no words", sequence.replace, patched(one))
            for one in ((inside, last), (first, last - 1), (first, inside))
        ),
        ("are no words", sequence.replace, patched((0, 1)), [inside]),
        ("are no words", sequence.rewrite, [inside], TWO[:1]),
        ("cannot be decoded again", sequence.preempt, first),
    ]


SEVERAL: dict[str, Any] = {"n_sequences": 4, "unified": True}
STATES: dict[str, tuple[Callable[[Context], Calls], str, dict[str, Any]]] = {
    "a text": (of_a_text, "llama-dense", SEVERAL),
    "numbers in f16": (of_numbers, "llama-dense", {**SEVERAL, "kv": "f16", "flash": "on"}),
    "numbers in f16, V transposed": (of_numbers, "llama-dense", {**SEVERAL, "kv": "f16"}),
    "numbers of an indexer": (of_numbers, "deepseek32-moe", SEVERAL),
    "numbers of an indexer, separate caches": (of_numbers, "deepseek32-moe", {"n_sequences": 2}),
    "separate caches": (of_separate_caches, "llama-dense", {"n_sequences": 2}),
    "a recurrent state": (of_a_state, "granitehybrid-dense", SEVERAL),
    "a small window": (of_a_window, "gemma3-dense", {**SEVERAL, "n_ctx": 1024, "swa_full": False}),
    "images": (of_images, "qwen2vl-dense", {}),
    "one axis": (of_one_axis, "qwen2-dense", {}),
    "a sequence": (of_a_sequence, "llama-dense", {}),
    "a dry sequence": (partial(of_a_sequence, dry=True), "llama-dense", {}),
    "a sequence with an image": (of_a_sequence_with_an_image, "qwen2vl-dense", {}),
    "one with an image on one axis": (partial(of_a_sequence_with_an_image, axes=False), "qwen2-dense", {}),
}


def kept(ctx: Context, calls: Calls) -> list[Any]:
    """The cells and leases in use; of each sequence its length, its cells, and the K/V that can be read; tokens and
    pieces of those whose methods are called."""
    found: list[Any] = [ctx.used, ctx.n_leased]
    for sequence in range(ctx.options.n_sequences):
        length, cells = ctx.length(sequence), ctx.cells_of(sequence)
        first = max(0, length - 16) if ctx.drops else 0
        found += [length, cells]
        try:
            rows, axes = ctx.read_axes(sequence, first, len(cells) - first, base=first, dtype="f32")
        except EngineError as error:
            found.append(str(error))
        else:
            found += [axes.tolist(), *(part.tobytes() for one in rows for part in (one.k, one.v))]
    called = (getattr(function, "__self__", None) for _, function, *_ in calls)
    return found + [(one.tokens.tolist(), [*one.pieces], one.intact) for one in called if isinstance(one, KVSequence)]


@pytest.mark.parametrize("state", STATES)
def test_what_is_refused_changes_nothing(load_zoo: LoadZoo, state: str) -> None:
    """Neither the sequences nor the logits of the tokens after them."""
    fill, name, options = STATES[state]
    model, options = load_zoo(name), {"n_ctx": 256, **options}
    with open_context(model, **options) as ctx, open_context(model, **options) as fresh:
        calls, others = fill(ctx), fill(fresh)
        before = kept(ctx, calls)
        assert len(calls) == len(others) and (
            state == "a dry sequence" or any(isinstance(one, bytes) for one in before)
        )
        for why, function, *arguments in calls:
            with refused(NotesError, why):
                function(*arguments)
            assert kept(ctx, calls) == before, why
        for each in (ctx, fresh):
            each.append({0: QUESTION})
        assert nmse(ctx.logits(), fresh.logits()) < 1e-9


@pytest.mark.parametrize(
    ("name", "axes"), [("llama-dense", None), ("qwen2vl-dense", ROW_OF_FOUR), ("granitehybrid-dense", None)]
)
def test_what_just_fits(load_zoo: LoadZoo, name: str, axes: Any) -> None:
    """An image whose last row is at the end of the context, and a copy of all of a sequence."""
    with open_context(load_zoo(name), n_sequences=2) as ctx:
        ctx.append({0: np.resize(TEXT, 250)})
        ctx.copy(0, 1, 0, -1)
        ctx.append({0: TWO, 1: TWO})
        assert nmse(ctx.logits(-1), ctx.logits(-2)) < 1e-9
        show(ctx, 252, 4, axes)
