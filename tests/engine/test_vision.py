"""Tests of images, whose rows may share a time and have rows and columns: they move as a whole."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from projectors import image_bytes, write_projector
from reference import LoadZoo, decode, distance, nmse, open_context, same, shown

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.positions import Patch
from notes_cli.engine.segment import Identity, LayerRows, Media, Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.engine.vision import ImageEmbeddings, VisionEncoder, join_parts, text_part
from notes_cli.errors import EngineError, ModelError
from notes_cli.images import read_picture

# A model of the zoo and a projector of a kind that such models are published with, or one that gives rows of the same
# kind: on several axes, on one, or on one and seeing each other.
ONE_AXIS = ("llama", "minicpm", "phi3", "granite", "smollm3")
PAIRS = [
    *((name, "qwen2vl_merger") for name in ("qwen2vl-dense", "glm4-dense", "glm4moe-moe", "paddleocr-moe")),
    *((name, "qwen3vl_merger") for name in ("qwen3vl-dense", "qwen3vlmoe-moe")),
    *((name, "mlp") for name in ("llama4-moe", "deepseek2-moe", *(f"{name}-dense" for name in ONE_AXIS))),
    *((name, "pixtral") for name in ("llama-dense", "mistral3-dense")),
    *(("gemma3-dense", "gemma3"), ("gemma3n-dense", "rows"), ("gemma4-dense", "rows")),
]
# The zoo's sections hide the axes after the first; those of released models show them, and one has pairs that no axis
# of a text or an image turns (the last of qwen3vl's are neither time nor row nor column).
SECTIONS = [
    *(("qwen2vl-dense", sections) for sections in (None, [16, 24, 24, 0], [16, 16, 16, 16])),
    *(("qwen3vl-dense", sections) for sections in (None, [24, 20, 20, 0], [16, 16, 16, 16])),
    *(("qwen3vlmoe-moe", [24, 20, 20, 0]), ("glm4-dense", [8, 12, 12, 0]), ("paddleocr-moe", [16, 24, 24, 0])),
]
KINDS = [PAIRS[0], PAIRS[4], ("llama-dense", "pixtral"), ("gemma3-dense", "gemma3")]  # position and mask kinds
MOVES = [
    *((name, projector, None, "f32") for name, projector in PAIRS),
    *((name, projector, None, kind) for kind in ("f16", "q8_0") for name, projector in KINDS),
    *((name, dict(PAIRS)[name], sections, "flash") for name, sections in SECTIONS[1:]),
]
BOUNDS = {"f32": 1e-6, "f16": 1e-5, "flash": 1e-5, "q8_0": 0.0}  # nmse; of q8_0 as far as it is off itself
TARGET = 37
random = np.random.default_rng(5)
BEFORE, AFTER, QUESTION, NEW = (random.integers(0, 128, n).astype(np.int32) for n in (4, 6, 5, 6))


class Sight(NamedTuple):
    model: Model
    seen: ImageEmbeddings
    other: ImageEmbeddings  # a second picture of the same size


@pytest.fixture
def sight(load_zoo: LoadZoo, tmp_path: Path) -> Callable[..., Sight]:
    """Two pictures, seen with a model of the zoo and a projector of a kind."""

    def see(name: str, kind: str, sections: list[int] | None = None) -> Sight:
        model = load_zoo(name, {"rope.dimension_sections": sections} if sections else None)
        width = llama.llama_model_n_embd(model.handle)
        if kind == "rows":  # the zoo has this one without a tokenizer, and there is no tiny projector of its kind
            media, axes = (Media(1, 10, 9, "0" * 64, 8, 8),), None
            some = [np.random.default_rng(seed).standard_normal((9, width)).astype(np.float32) for seed in (1, 2)]
            return Sight(model, *(ImageEmbeddings(np.ones(11, np.int32), media, axes, (rows,), True) for rows in some))
        deepstack = llama.llama_model_n_embd_inp(model.handle) // width - 1
        path = write_projector(tmp_path / "mmproj.gguf", kind, width, deepstack=deepstack)
        size = (12, 16) if kind in ("qwen2vl_merger", "qwen3vl_merger", "pixtral") else (8, 8)
        with VisionEncoder(model, path) as vision:
            seen = [vision.encode(read_picture(image_bytes(*size, seed=seed), f"{seed}.png")) for seed in (1, 2)]
            plan = vision.plan(read_picture(image_bytes(*size, seed=1), "1.png"))
        assert (plan.tokens == seen[0].tokens).all() and plan.media == seen[0].media and not plan.rows
        return Sight(model, *seen)

    return see


def context(model: Model, kind: str = "f32", **options: object) -> Context:
    """`kind`: of the cache; "flash": f32 with flash attention, whose kernel works in f16 inside."""
    flash = {"q8_0": "auto", "flash": "on"}.get(kind, "off")
    return open_context(model, "f32" if kind == "flash" else kind, flash, n_ctx=256, **options)


def tell(ctx: Context, seen: ImageEmbeddings, position: int) -> int:
    """Text, an image and text, from a position on, in a sequence that is empty; returns the next position."""
    decode(ctx, BEFORE, position)
    position += len(BEFORE)
    for image, rows in zip(seen.media, seen.rows, strict=True):  # without the tokens that mark it
        part = slice(image.first, image.last)
        axes = None if seen.axes is None else seen.axes[part] - seen.axes[image.first, 0]
        ctx.decode_embeddings(0, position, rows, axes, whole=seen.whole)
        position += image.positions
    decode(ctx, AFTER, position)
    return position + len(AFTER)


def span(seen: ImageEmbeddings) -> np.ndarray:
    """A token for each row of `tell`."""
    return np.concatenate([BEFORE, np.zeros(sum(one.rows for one in seen.media), np.int32), AFTER])


def asked(ctx: Context, position: int) -> np.ndarray:
    return np.stack([decode(ctx, [int(token)], position + i) for i, token in enumerate(QUESTION)])


def rows_of(
    ctx: Context, axes: np.ndarray | None, position: int, count: int
) -> tuple[tuple[LayerRows, ...], np.ndarray | None]:
    """Rows from this position on, rotated to position 0, and their axes, if images share positions."""
    if axes is None:
        return ctx.read(0, position, count, base=0, dtype="f32"), None
    return ctx.read_axes(0, position, count, base=0, dtype="f32")


@pytest.mark.parametrize(("name", "projector", "sections", "kind"), MOVES)
def test_an_image_and_the_text_around_it_move(
    sight: Callable[..., Sight], name: str, projector: str, sections: list[int] | None, kind: str
) -> None:
    """Spliced elsewhere, rows and a question after them are those of showing the image there; a wrong distance, or
    another image's rows, are not."""
    model, seen, other = sight(name, projector, sections)
    rows_kind, count = kind if kind in ("f32", "flash") else "f16", len(span(seen))
    with context(model, rows_kind) as compiled, context(model, kind) as ours, context(model, kind) as stock:
        end = tell(compiled, seen, TARGET) - TARGET
        exact, right = rows_of(compiled, seen.axes, TARGET, count)[0], asked(compiled, TARGET + end)
        compiled.clear()
        assert tell(compiled, seen, 0) == end
        rows, axes = rows_of(compiled, seen.axes, 0, count)
        ours.splice(0, TARGET, span(seen), rows, 0, axes=axes)
        tell(stock, seen, TARGET)
        (found, where), (wanted, there) = (rows_of(each, seen.axes, TARGET, count) for each in (ours, stock))
        assert (where is None) == (there is None) and (where is None or (where == there).all())
        logits = asked(stock, TARGET + end)
        off, answered = distance(found, wanted), nmse(asked(ours, TARGET + end), logits)
        assert off < max(BOUNDS[kind], 2 * distance(wanted, exact) if kind == "q8_0" else 0)
        assert answered < max(BOUNDS[kind], 2 * nmse(logits, right) if kind == "q8_0" else 0)
        wrong = 5 * max(BOUNDS[kind], answered)
        ours.clear()
        ours.splice(0, TARGET, span(seen), rows, 0, axes=axes, rotate=False)
        assert nmse(asked(ours, TARGET + end), logits) > wrong
        compiled.clear()
        tell(compiled, other, 0)
        ours.clear()
        ours.splice(0, TARGET, span(seen), rows_of(compiled, other.axes, 0, count)[0], 0, axes=axes)
        assert nmse(asked(ours, TARGET + end), logits) > wrong


def segment(sequence: KVSequence, seen: ImageEmbeddings, name: str = "photo") -> Segment:
    """The image at the start of this sequence, which is empty, as a segment."""
    sequence.append_image(seen)
    sequence.flush()
    rows, _ = sequence.read(0, len(seen.tokens), "f32")
    identity = Identity("tiny", "tiny", "F32", "", "", "", "f32/f32", "")
    nothing = np.zeros(0, np.int32)
    return Segment(*(name, "", "image", seen.tokens, 0, nothing, (), identity, rows), media=seen.media, axes=seen.axes)


def both(scratch: Context, seen: ImageEmbeddings, other: ImageEmbeddings) -> list[Segment]:
    """Two images, each compiled by itself."""
    found = []
    for one, name in ((seen, "first"), (other, "second")):
        with KVSequence(scratch) as seq:
            found.append(segment(seq, one, name))
    return found


@pytest.mark.parametrize(
    ("name", "projector", "kind"),
    [
        *(("qwen2vl-dense", "qwen2vl_merger", "f32"), ("qwen3vl-dense", "qwen3vl_merger", "f16")),
        *(("llama-dense", "mlp", "f16"), ("gemma3-dense", "gemma3", "f32")),
    ],
)
def test_a_text_with_images_in_it_moves_as_one(
    sight: Callable[..., Sight], name: str, projector: str, kind: str
) -> None:
    """Text, image, image, text, image, text as one segment, spliced elsewhere: rows and logits are those of decoding
    and showing them there one after the other; of the images in another order they are not."""
    model, seen, other = sight(name, projector)
    parts = [text_part(BEFORE), seen, other, text_part(AFTER), seen, text_part(AFTER)]
    whole, swapped = join_parts(parts), join_parts([parts[0], other, seen, *parts[3:]])
    assert (whole.tokens == swapped.tokens).all() and len(whole.media) == 3 * len(seen.media)
    with context(model) as scratch, context(model, kind) as ours, context(model, kind) as stock:
        with KVSequence(scratch) as seq:
            one = segment(seq, whole)
        at = TARGET
        for part in parts:
            at = shown(stock, part, at)
        assert at == TARGET + one.positions
        logits = asked(stock, at)
        ours.splice(0, TARGET, one.tokens, one.layers, 0, axes=one.axes)
        assert nmse(asked(ours, at), logits) < BOUNDS[kind]

        (found, where), (wanted, _) = (rows_of(each, one.axes, TARGET, len(one)) for each in (ours, stock))
        assert (where is None and one.axes is None) or (where == one.axes).all()
        assert distance(found, wanted) < BOUNDS[kind]
        with KVSequence(scratch) as seq:
            wrong = segment(seq, swapped)
        ours.clear()
        ours.splice(0, TARGET, wrong.tokens, wrong.layers, 0, axes=wrong.axes)
        assert nmse(asked(ours, at), logits) > 5 * BOUNDS[kind]


@pytest.mark.parametrize(("name", "projector"), [("qwen2vl-dense", "qwen2vl_merger"), ("qwen2-dense", "mlp")])
@pytest.mark.parametrize("new", [(), tuple(range(2, 40))])
def test_an_image_gives_way_as_a_whole(
    sight: Callable[..., Sight], name: str, projector: str, new: tuple[int, ...]
) -> None:
    """Taken out, or replaced by fewer or more tokens, with the image after it moved by its positions: as if it had
    never been there."""
    model, seen, other = sight(name, projector)
    with context(model) as ctx, context(model) as fresh, context(model) as scratch:
        first, second = both(scratch, seen, other)
        with KVSequence(ctx) as seq, KVSequence(fresh) as wanted:
            seq.append(BEFORE)
            seq.splice(first)
            seq.splice(second)
            start, end = len(BEFORE), len(BEFORE) + len(first)
            seq.replace([Patch(start, end, new)])
            wanted.append([*BEFORE, *new])
            wanted.splice(second)
            assert (seq.tokens == wanted.tokens).all() and seq.images == wanted.images
            (found, where), (exact, there) = (one.read(0, len(one), "f32") for one in (seq, wanted))
            assert distance(found, exact) < BOUNDS["f32"]
            assert (where is None) == (there is None) and (where is None or (where == there).all())
            for one in (seq, wanted):
                one.append(QUESTION)
            assert nmse(seq.logits(), wanted.logits()) < BOUNDS["f32"]


@pytest.mark.parametrize(("name", "projector"), [("qwen2vl-dense", "qwen2vl_merger"), ("qwen2-dense", "mlp")])
def test_a_notebook_with_images_goes_on_as_if_it_had_been_written_so(
    sight: Callable[..., Sight], name: str, projector: str
) -> None:
    """Two images and texts, spliced: shared, cut back, a text before them replaced by a longer one, the context grown:
    each equals decoding all of it from the beginning."""
    model, seen, other = sight(name, projector)
    with context(model) as ctx, context(model) as fresh, context(model) as scratch:
        first, second = both(scratch, seen, other)
        with KVSequence(ctx) as seq, KVSequence(fresh) as wanted:
            seq.append(BEFORE)
            seq.splice(first)
            seq.append(AFTER)
            rows = len(seq)
            seq.splice(second)
            seq.append(AFTER)
            before = seq.logits()
            with seq.share() as other_book:
                other_book.append(QUESTION)
                shared = other_book.logits()
            seq.append(QUESTION)
            assert nmse(seq.logits(), shared) < 1e-9
            seq.truncate(len(seq) - len(QUESTION))
            assert nmse(seq.logits(), before) < 1e-9
            ctx.resize(n_ctx=512)
            seq.append(QUESTION)
            assert nmse(seq.logits(), shared) < 1e-9
            seq.truncate(rows)
            longer = np.concatenate([BEFORE[:-1], QUESTION])
            seq.replace([Patch(len(BEFORE) - 1, len(BEFORE), tuple(QUESTION.tolist()))])
            seq.append(QUESTION)
            # The rows of the first image were computed on their own, so a fresh sequence has them spliced, too.
            wanted.append(longer)
            wanted.splice(first)
            wanted.append(AFTER)
            wanted.append(QUESTION)
            assert len(wanted) == len(seq)
            # Rows after the changed words were moved unchanged: words after the image have attended to the old ones.
            assert nmse(seq.logits(), wanted.logits()) < 0.2
            seq.rewrite([len(longer) + len(first) + i for i in range(len(AFTER))], AFTER)
            seq.truncate(len(seq) - len(QUESTION))
            seq.append(QUESTION)
            assert nmse(seq.logits(), wanted.logits()) < 1e-6


@pytest.mark.parametrize(("name", "projector"), [("qwen2vl-dense", "qwen2vl_merger"), ("qwen2-dense", "mlp")])
def test_rows_of_an_image_are_never_decoded_as_tokens(sight: Callable[..., Sight], name: str, projector: str) -> None:
    """A longer seam ends before it, also where rows are one a position; no part of it is taken out."""
    model, seen, _ = sight(name, projector)
    with context(model) as ctx, context(model) as scratch:
        with KVSequence(scratch) as one:
            photo = segment(one, seen)
        with KVSequence(ctx) as seq:
            seq.append(BEFORE)
            seq.splice(photo, seam=len(photo))
            seam = photo.media[0].first
            assert [piece.tokens for piece in seq.pieces if piece.how == "seam"] == ([seam] if seam else [])
            seq.append(AFTER)
            logits = seq.logits()
            with pytest.raises(EngineError, match="no part can be taken out"):
                photo.slice(0, photo.media[0].first + 2)
            seq.truncate(len(seq) - 1)
            seq.append(AFTER[-1:])
            assert nmse(seq.logits(), logits) < 1e-9


def test_an_image_whose_rows_see_each_other_takes_one_micro_batch(sight: Callable[..., Sight]) -> None:
    """An image larger than the micro-batch would end the process: refused with the required size, and nothing has
    changed."""
    model, seen, _ = sight("gemma3-dense", "gemma3")
    assert seen.whole
    with context(model, n_ubatch=3) as ctx, KVSequence(ctx) as seq:
        seq.append(BEFORE)
        before = seq.logits()
        with pytest.raises(EngineError, match="4 rows of this image see each other, and 3 fit"):
            seq.append_image(seen)
        assert len(seq) == len(BEFORE) and nmse(seq.logits(), before) < 1e-9


def test_one_that_does_not_fit_leaves_the_notebook_as_it_was(sight: Callable[..., Sight]) -> None:
    """More rows than the context has room for: refused before anything is decoded."""
    model, seen, _ = sight("qwen2vl-dense", "qwen2vl_merger")
    with context(model) as ctx, KVSequence(ctx) as seq:
        seq.token_limit = 16
        seq.append(BEFORE)
        seq.flush()
        with pytest.raises(EngineError, match="too small"):
            seq.append_image(seen)
        assert len(seq) == len(BEFORE) and seq.intact


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("text", "its architecture is"),
        ("wide", "mismatch between text model"),
        ("deepseek4v", "cannot move"),
        ("damaged", "were|bytes"),
        ("limits", "makes no image of 2 rows"),
    ],
)
def test_a_wrong_projector_is_refused(load_zoo: LoadZoo, tmp_path: Path, wrong: str, message: str) -> None:
    """A model, one of another width, one whose images depend on the prompt, half a file, a maximum below the minimum:
    one line that names it, no abort."""
    model = load_zoo("qwen2vl-dense")
    path = write_projector(tmp_path / "mmproj.gguf", "qwen2vl_merger", 128 if wrong == "wide" else 256)
    if wrong == "text":
        path = model.path
    elif wrong == "deepseek4v":
        out = gguf.GGUFWriter(path, "clip")
        out.add_string("clip.projector_type", wrong)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_ti_data_to_file()
        out.close()
    elif wrong == "damaged":
        path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=message):
        VisionEncoder(model, path, max_tokens=2 if wrong == "limits" else None)


# Without a projector: images of any shape, shown by stock calls.


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

    def seen(self, model: Model) -> ImageEmbeddings:
        width = llama.llama_model_n_embd_inp(model.handle)
        rows = np.random.default_rng(self.seed).standard_normal((self.rows, width)).astype(np.float32)
        media = (Media(0, self.rows, self.positions, "0" * 64, 8, 8),)
        return ImageEmbeddings(np.zeros(self.rows, np.int32), media, self.axes(0), (rows,), False)


WIDE, HIGH = Image(3, 4), Image(5, 2, seed=1)


def show(ctx: Context, image: Image, position: int) -> None:
    """Stock llama_decode of an image's embeddings, its position in four planes as libmtmd lays them."""
    (embeddings,) = image.seen(ctx.model).rows
    planes = np.concatenate([image.axes(position).T.ravel(), np.zeros(image.rows, np.int32)]).astype(np.int32)
    batch = llama.llama_batch_init(len(planes), embeddings.shape[1], 1)  # as many positions as there are, if not tokens
    try:
        ctypes.memmove(batch.embd, embeddings.ctypes.data, embeddings.nbytes)
        ctypes.memmove(batch.pos, planes.ctypes.data, planes.nbytes)
        for i in range(image.rows):
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, False
        batch.n_tokens = image.rows
        assert llama.llama_decode(ctx.handle, batch) == 0
    finally:
        llama.llama_batch_free(batch)


def load(load_zoo: LoadZoo, name: str, sections: list[int] | None) -> Model:
    return load_zoo(name, {"rope.dimension_sections": sections} if sections else None)


@pytest.mark.parametrize(("name", "sections"), SECTIONS)
def test_an_image_moves(load_zoo: LoadZoo, name: str, sections: list[int] | None) -> None:
    """Its rows spliced elsewhere, and a question after it, equal showing it there; with other axes they do not."""
    model, bound = load(load_zoo, name, sections), BOUNDS["f32"]
    with context(model) as ours, context(model) as stock:
        for image in (WIDE, HIGH):
            for each in (ours, stock):
                each.clear()
            show(ours, image, 3)
            rows, axes = ours.read_axes(0, 3, image.rows, base=0, dtype="f32")
            assert (axes == image.axes(0)).all()
            ours.clear()
            ours.splice(0, TARGET, np.zeros(image.rows, np.int32), rows, 0, axes=axes)
            show(stock, image, TARGET)
            (found, where), (wanted, _) = (rows_of(ctx, axes, TARGET, image.rows) for ctx in (ours, stock))
            assert (where == axes).all()
            assert distance(found, wanted) < bound
            logits = asked(stock, TARGET + image.positions)
            ours.append({0: QUESTION}, "all")  # finds the position after the image by itself
            assert nmse(np.stack([ours.logits(i) for i in range(len(QUESTION))]), logits) < bound
            ours.clear()
            ours.splice(0, TARGET, np.zeros(image.rows, np.int32), rows, 1, axes=axes + 1)
            assert distance(rows_of(ours, axes, TARGET, image.rows)[0], wanted) > 1000 * bound


@pytest.mark.parametrize(("name", "sections"), [("qwen2vl-dense", [16, 24, 24, 0]), ("qwen3vl-dense", [24, 20, 20, 0])])
def test_what_is_left_after_a_splice_of_an_image(load_zoo: LoadZoo, name: str, sections: list[int]) -> None:
    """Rows before it stay bit-identical, axes of a second image are right, text after the first is rewritten."""
    model = load(load_zoo, name, sections)
    seen = WIDE.seen(model)
    with context(model) as ours, context(model) as stock:
        show(ours, HIGH, 0)
        rows, axes = ours.read_axes(0, 0, HIGH.rows, base=0, dtype="f32")
        ours.clear()
        end = tell(ours, seen, 0)
        before = rows_of(ours, axes, 0, len(span(seen)))[0]
        ours.splice(0, end, np.zeros(HIGH.rows, np.int32), rows, 0, axes=axes)
        assert same(rows_of(ours, axes, 0, len(span(seen)))[0], before)
        assert (rows_of(ours, axes, end, HIGH.rows)[1] == axes).all()
        where = end - np.arange(len(AFTER), 0, -1)
        ours.truncate(0, end)
        ours.rewrite(0, where, NEW)
        decode(stock, BEFORE, 0)
        show(stock, WIDE, len(BEFORE))
        decode(stock, NEW, int(where[0]))
        assert nmse(asked(ours, end), asked(stock, end)) < BOUNDS["f32"]


@pytest.mark.parametrize(("sections", "clear"), [([24, 20, 20, 0], False), ([16, 16, 16, 16], False), (None, True)])
def test_rows_that_may_be_sound_are_not_read(load_zoo: LoadZoo, sections: list[int] | None, clear: bool) -> None:
    """Audio also uses the fourth axis, which cells do not record: where it has pairs, such rows are refused."""
    with context(load(load_zoo, "qwen3vl-dense", sections)) as ctx:
        decode(ctx, BEFORE, 0)
        for i in range(3):
            show(ctx, Image(1, 1), len(BEFORE) + i)
        assert len(ctx.read(0, 0, len(BEFORE), base=0)) > 0
        if clear:
            assert len(ctx.read(0, 0, len(BEFORE) + 3, base=0)) > 0
        else:
            with pytest.raises(EngineError, match="may be one of sound"):
                ctx.read(0, 0, len(BEFORE) + 3, base=0)
