"""Tests of images under M-RoPE, whose rows share a time and have rows and columns: they move as a whole."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from reference import LoadZoo, decode, distance, nmse, open_context, same

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.errors import EngineError

# The zoo's sections hide the axes after the first; those of released models show them, and one has pairs that no axis
# of a text or an image turns (the last of qwen3vl's are neither time nor row nor column).
VARIANTS = [
    ("qwen2vl-dense", None),
    ("qwen2vl-dense", [16, 24, 24, 0]),
    ("qwen2vl-dense", [16, 16, 16, 16]),
    ("qwen3vl-dense", None),
    ("qwen3vl-dense", [24, 20, 20, 0]),
    ("qwen3vl-dense", [16, 16, 16, 16]),
    ("qwen3vlmoe-moe", [24, 20, 20, 0]),
    ("glm4-dense", [8, 12, 12, 0]),
    ("paddleocr-moe", [16, 24, 24, 0]),
]
context = partial(open_context, n_ctx=256)
BOUND = 1e-6  # nmse of f32 rows and logits
TARGET = 90

random = np.random.default_rng(11)
BEFORE, AFTER, QUESTION = (random.integers(0, 128, n).astype(np.int32) for n in (5, 7, 8))


class Image(NamedTuple):
    height: int
    width: int
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.height * self.width

    @property
    def positions(self) -> int:
        return max(self.height, self.width)

    def axes(self, position: int) -> np.ndarray:
        """Time, row and column of every row of it."""
        rows, columns = np.divmod(np.arange(self.rows), self.width)
        return position + np.stack([0 * rows, rows, columns], axis=1).astype(np.int32)


WIDE, HIGH = Image(3, 4), Image(5, 2, seed=1)
# Tokens of the whole span: an image has none, any will do.
SPAN = np.concatenate([BEFORE, np.zeros(WIDE.rows, np.int32), AFTER])


def load(load_zoo: LoadZoo, name: str, sections: list[int] | None) -> Model:
    return load_zoo(name, {"rope.dimension_sections": sections} if sections else None)


def show(ctx: Context, image: Image, position: int) -> None:
    """Stock llama_decode of an image's embeddings, its position in four planes as libmtmd lays them."""
    width = llama.llama_model_n_embd_inp(ctx.model.handle)
    embeddings = np.random.default_rng(image.seed).standard_normal((image.rows, width)).astype(np.float32)
    planes = np.concatenate([image.axes(position).T.ravel(), np.zeros(image.rows, np.int32)]).astype(np.int32)
    batch = llama.llama_batch_init(len(planes), width, 1)  # as many positions as there are, if not tokens
    try:
        ctypes.memmove(batch.embd, embeddings.ctypes.data, embeddings.nbytes)
        ctypes.memmove(batch.pos, planes.ctypes.data, planes.nbytes)
        for i in range(image.rows):
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, False
        batch.n_tokens = image.rows
        assert llama.llama_decode(ctx.handle, batch) == 0
    finally:
        llama.llama_batch_free(batch)


def tell(ctx: Context, position: int) -> int:
    """Text, image, text, from a position on; returns the one after it."""
    decode(ctx, BEFORE, position)
    show(ctx, WIDE, position + len(BEFORE))
    position += len(BEFORE) + WIDE.positions
    decode(ctx, AFTER, position)
    return position + len(AFTER)


def asked(ctx: Context, position: int) -> np.ndarray:
    """Logits of each token of a question at that position, by stock calls."""
    return np.stack([decode(ctx, [int(token)], position + i) for i, token in enumerate(QUESTION)])


@pytest.mark.parametrize("image", [WIDE, HIGH], ids=["wide", "high"])
@pytest.mark.parametrize(("name", "sections"), VARIANTS)
def test_an_image_moves(load_zoo: LoadZoo, name: str, sections: list[int] | None, image: Image) -> None:
    """Its rows spliced elsewhere, and a question after it, equal showing it there; with other axes they do not."""
    with context(load(load_zoo, name, sections)) as ours, context(load(load_zoo, name, sections)) as stock:
        show(ours, image, 3)
        rows, axes = ours.read_axes(0, 3, image.rows, base=0, dtype="f32")
        assert (axes == image.axes(0)).all()
        ours.clear()
        ours.splice(0, TARGET, np.zeros(image.rows, np.int32), rows, 0, axes=axes)
        show(stock, image, TARGET)
        (found, where), (wanted, _) = (
            ctx.read_axes(0, TARGET, image.rows, base=0, dtype="f32") for ctx in (ours, stock)
        )
        assert (where == axes).all()
        assert distance(found, wanted) < BOUND
        logits = asked(stock, TARGET + image.positions)
        ours.append({0: QUESTION}, "all")  # finds the position after the image by itself
        assert nmse(np.stack([ours.logits(i) for i in range(len(QUESTION))]), logits) < BOUND
        ours.clear()
        ours.splice(0, TARGET, np.zeros(image.rows, np.int32), rows, 1, axes=axes + 1)
        assert distance(ours.read_axes(0, TARGET, image.rows, base=0, dtype="f32")[0], wanted) > 1000 * BOUND


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize(("name", "sections"), VARIANTS)
def test_an_image_moves_with_the_text_around_it(
    load_zoo: LoadZoo, name: str, sections: list[int] | None, flash: str
) -> None:
    """Text, image and text in one segment, after other text or not, equal decoding them there."""
    bound = BOUND if flash == "off" else 1e-5  # the kernel works in f16 inside
    model = load(load_zoo, name, sections)
    with context(model, flash_attention=flash) as ours, context(model, flash_attention=flash) as stock:
        end = tell(ours, 0)
        rows, axes = ours.read_axes(0, 0, len(SPAN), base=0, dtype="f32")
        ours.clear()
        ours.splice(0, TARGET, SPAN, rows, 0, axes=axes)
        tell(stock, TARGET)
        found, wanted = (ctx.read_axes(0, TARGET, len(SPAN), base=TARGET, dtype="f32") for ctx in (ours, stock))
        assert (found[1] == wanted[1]).all() and (found[1] == axes + TARGET).all()
        assert distance(found[0], wanted[0]) < bound
        assert ours.length(0) == stock.length(0) == TARGET + end
        logits = asked(stock, TARGET + end)
        assert nmse(asked(ours, TARGET + end), logits) < bound
        ours.clear()
        ours.splice(0, TARGET, SPAN, rows, 1, axes=axes + 1)
        assert nmse(asked(ours, TARGET + end), logits) > 100 * bound  # a wrong distance


@pytest.mark.parametrize(("name", "sections"), [("qwen2vl-dense", [16, 24, 24, 0]), ("qwen3vl-dense", [24, 20, 20, 0])])
def test_what_is_left_after_a_splice_of_an_image(load_zoo: LoadZoo, name: str, sections: list[int]) -> None:
    """Rows before it stay bit-identical, axes of a second image are right, text after the first is rewritten."""
    model = load(load_zoo, name, sections)
    with context(model) as ours, context(model) as stock:
        show(ours, HIGH, 0)
        rows, axes = ours.read_axes(0, 0, HIGH.rows, base=0, dtype="f32")
        ours.clear()
        end = tell(ours, 0)
        before = ours.read_axes(0, 0, len(SPAN), base=0, dtype="f32")[0]
        ours.splice(0, end, np.zeros(HIGH.rows, np.int32), rows, 0, axes=axes)
        after = ours.read_axes(0, 0, len(SPAN), base=0, dtype="f32")[0]
        assert same(after, before)
        assert (ours.read_axes(0, end, HIGH.rows, base=end, dtype="f32")[1] == HIGH.axes(end)).all()
        where = end - np.arange(len(AFTER), 0, -1)
        ours.truncate(0, end)
        ours.rewrite(0, where, QUESTION[: len(AFTER)])
        decode(stock, BEFORE, 0)
        show(stock, WIDE, len(BEFORE))
        decode(stock, QUESTION[: len(AFTER)], int(where[0]))
        assert nmse(asked(ours, end), asked(stock, end)) < BOUND


def test_positions_that_cannot_be_are_refused(load_zoo: LoadZoo) -> None:
    """Axes that descend or begin elsewhere, a rewrite or a plain read of an image: refused, and nothing changes."""
    with context(load_zoo("qwen2vl-dense")) as ctx:
        tell(ctx, 0)
        rows, axes = ctx.read_axes(0, 0, len(SPAN), base=0, dtype="f32")
        swapped, late, below = axes[::-1], axes + 1, axes.copy()
        below[7, 2] = -1
        for wrong in (swapped, late, below):
            with pytest.raises(EngineError, match="begin at base and ascend"):
                ctx.splice(0, TARGET, SPAN, rows, 0, axes=wrong)
        with pytest.raises(EngineError, match="several rows at position 5"):
            ctx.rewrite(0, [5], QUESTION[:1])
        with pytest.raises(EngineError, match="rows at positions"):
            ctx.read(0, 0, len(SPAN), base=0)
        with pytest.raises(EngineError, match="already hold rows"):
            ctx.splice(0, 2, SPAN, rows, 0, axes=axes)
        with pytest.raises(EngineError, match="do not fit"):
            ctx.splice(0, 250, SPAN, rows, 0, axes=axes)
        again, still = ctx.read_axes(0, 0, len(SPAN), base=0, dtype="f32")
        assert (still == axes).all()
        assert same(again, rows)


def test_a_model_of_texts_has_one_axis(load_zoo: LoadZoo) -> None:
    """Without M-RoPE there is nowhere to put rows and columns: refused; read alone, the three axes are one."""
    with context(load_zoo("qwen2-dense")) as ctx:
        ctx.append({0: BEFORE})
        rows, axes = ctx.read_axes(0, 0, len(BEFORE), base=10, dtype="f32")
        assert (axes == 10 + np.arange(len(BEFORE))[:, None]).all()
        with pytest.raises(EngineError, match="one axis only"):
            ctx.splice(0, 20, BEFORE, rows, 10, axes=axes)
        assert ctx.length(0) == len(BEFORE)


@pytest.mark.parametrize(("sections", "clear"), [([24, 20, 20, 0], False), ([16, 16, 16, 16], False), (None, True)])
def test_rows_that_may_be_sound_are_not_read(load_zoo: LoadZoo, sections: list[int] | None, clear: bool) -> None:
    """Audio also uses the fourth axis, which cells do not record: where it has pairs, such rows are refused."""
    with context(load(load_zoo, "qwen3vl-dense", sections)) as ctx:
        sound = Image(1, 1)
        decode(ctx, BEFORE, 0)
        for i in range(3):
            show(ctx, sound, len(BEFORE) + i)
        assert len(ctx.read(0, 0, len(BEFORE), base=0)) > 0
        if clear:
            assert len(ctx.read(0, 0, len(BEFORE) + 3, base=0)) > 0
        else:
            with pytest.raises(EngineError, match="may be one of sound"):
                ctx.read(0, 0, len(BEFORE) + 3, base=0)
