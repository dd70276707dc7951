"""Tests of segment files with q8_0 rows: near the computed rows, spliced into any cache, never used as exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny

from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import BLOCK, Q8_0, STORED_TYPES, LayerRows, Segment, Stored, quantized, to_float32
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, SegmentError
from notes_cli.library.container import open_segment, open_stored, peek, small, write_segment

Make = Callable[..., Any]
BEFORE = np.arange(5, dtype=np.int32)  # which moves the segment by 3
SMALL = [kv for kv in STORED_TYPES if kv != "f16"]
# Neighbours that turn together, halves that do, and heads of which a part does; kept in f16 by a kernel of their own.
MODELS = {"norm": ("llama", {}), "neox": ("qwen3", {}), "part": ("gemma", {"gemma.rope.dimension_count": 16})}


@pytest.fixture(scope="module")
def make(make_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """K and V rows of 64 numbers, of 128 for llama."""

    def made(name: str) -> Path:
        kind, keys = MODELS[name]
        path: Path = make_model(kind, embd=128, heads=4, kv_heads=4 if kind == "llama" else 2)
        return tiny.alter_model(tmp_path_factory.mktemp("m") / "a.gguf", path, keys=keys) if keys else path

    return made


def context(model: Model, kv: str = "f16", flash: str = "on", **options: object) -> Context:
    settings = {"n_ctx": 256, "n_threads": 2, "type_k": kv, "type_v": kv, **options}
    return Context(model, ContextOptions(flash_attention=flash, **settings))  # type: ignore[arg-type]


def drawn(model: Model, make_segment: Make, count: int = 150) -> Segment:
    """A segment of random rows, with some that are much larger than their neighbours, and some 0."""
    random = np.random.default_rng(count)
    with context(model) as ctx:
        layers = []
        for one in ctx.layers:
            parts = [random.standard_normal((count, width), np.float32) for width in (one.n_embd_k, one.n_embd_v)]
            for part in parts:
                part[3, 7], part[5] = 300, 0
            layers.append(LayerRows(one.layer, *(part.astype(np.float16) for part in parts)))
    tokens = random.integers(0, 256, count).astype(np.int32)
    segment: Segment = make_segment()
    return replace(segment, tokens=tokens, fields=(), layers=tuple(layers))


def placed(ctx: Context, segment: Segment, seam: int = 0, base: int | None = None) -> tuple[LayerRows, ...]:
    """The rows of the segment after a splice, as the cache holds them."""
    ctx.clear()
    with KVSequence(ctx) as seq:
        seq.append(BEFORE[: segment.base] if base == segment.base else BEFORE)
        seq.splice(segment, seam=seam)
        start = len(seq) - len(segment) + seam
        return ctx.read(seq.seq_id, start, len(segment) - seam, base=start, dtype="f32")


def bits(rows: tuple[LayerRows, ...]) -> list[bytes]:
    return [part.tobytes() for layer in rows for part in (layer.k, layer.v)]


@pytest.mark.parametrize("kv", SMALL)
def test_each_number_is_rounded_once(tmp_path: Path, make_segment: Make, kv: str) -> None:
    """Rounding is at most half a step of the block; other rows are bit-identical, and the file records the type."""
    segment = replace(make_segment(n=40, layers=2, k=64, v=96), kv=kv)
    write_segment(tmp_path / "a.gguf", segment)
    found, seen = open_segment(tmp_path / "a.gguf"), peek(tmp_path / "a.gguf")
    full = sum(layer.k.nbytes + layer.v.nbytes for layer in segment.layers)
    assert (found.kv, seen.kv, seen.stored_types, seen.computed_nbytes) == (kv, kv, kv, full)
    assert seen.nbytes == found.nbytes == open_stored(tmp_path / "a.gguf").nbytes < full
    for one, other in zip(found.layers, segment.layers, strict=True):
        for mine, theirs, rounded in zip((one.k, one.v), (other.k, other.v), quantized(kv), strict=True):
            blocks: Any = mine
            assert (mine.dtype == Q8_0) == rounded
            if not rounded:
                assert np.array_equal(mine, theirs)
                continue
            assert mine.nbytes / theirs.nbytes == 34 / 64
            step = np.repeat(blocks["scale"].astype(np.float32), BLOCK, axis=1)
            # plus 127 times the rounding of the scale to f16
            assert (abs(to_float32(mine) - to_float32(theirs)) <= step * (0.5 + 127 / 2**11)).all()
    again = tmp_path / "again.gguf"
    write_segment(again, found)
    assert bits(open_segment(again).layers) == bits(found.layers)  # rows that were rounded are not rounded again


def test_other_tools_read_it(tmp_path: Path, make_segment: Make) -> None:
    """It is GGUF's own type: gguf-py gives the numbers that we do."""
    write_segment(tmp_path / "a.gguf", replace(make_segment(n=4, k=64, v=32), kv="q8_0"))
    found = open_segment(tmp_path / "a.gguf").layers[0]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    for name, mine in (("blk.0.k", found.k), ("blk.0.v", found.v)):
        tensor = tensors[name]
        assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), to_float32(mine))
        assert to_float32(mine[:0]).shape == (0, to_float32(mine).shape[1])  # after a field that ends its text


CASES = [("neox", *kind) for kind in (("f16", "on"), ("f32", "on"), ("bf16", "off"), ("q8_0", "on"), ("q4_0", "on"))]
CASES += [(name, "f16", "off") for name in MODELS] + [("norm", "f32", "off"), ("part", "bf16", "off")]


@pytest.mark.parametrize(("name", "cache", "flash"), CASES)
def test_into_every_cache(
    make: Callable[[str], Path], make_segment: Make, tmp_path: Path, name: str, cache: str, flash: str
) -> None:
    """From the file, memory and the numbers as f32 the same rows, near those of f16; the control, unturned, is not."""
    with Model(make(name)) as model, context(model, cache, flash) as ctx:
        head = ctx.layers[0].n_embd_k // (4 if name == "norm" else 2)
        assert (ctx.layers[0].n_rot < head) == (name == "part")
        exact = drawn(model, make_segment)
        wanted = placed(ctx, exact)
        for kv in SMALL:
            write_segment(tmp_path / "a.gguf", replace(exact, kv=kv))
            memory = open_segment(tmp_path / "a.gguf")
            plain = replace(
                memory, layers=tuple(replace(x, k=to_float32(x.k), v=to_float32(x.v)) for x in memory.layers)
            )
            for seam, base in ((0, None), (70, None), (0, exact.base)):
                stored = open_stored(tmp_path / "a.gguf")
                found = placed(ctx, stored, seam, base)
                assert isinstance(stored.layers, Stored) and stored.layers.file is not None  # one pass: none in memory
                assert bits(found) == bits(placed(ctx, memory, seam, base))
                for one, other in zip(found, placed(ctx, plain, seam, base), strict=True):
                    # the kernel for f16 adds in another order; V is converted, no more
                    assert np.array_equal(one.v, other.v)
                    bound = {"f16": 2**-10, "bf16": 2**-7, "f32": 2**-20, "q8_0": 0.02, "q4_0": 0.3}[cache]
                    assert abs(one.k - other.k).max() <= bound * abs(other.k).max()
            moved, unturned = placed(ctx, open_stored(tmp_path / "a.gguf")), placed(ctx, replace(memory, base=5))
            near = max(distance(one.k, other.k) for one, other in zip(moved, wanted, strict=True))
            off = max(distance(one.k, other.k) for one, other in zip(unturned, wanted, strict=True))
            assert near < {"q4_0": 0.2}.get(cache, 0.02) and off > 5 * near
            assert max(distance(one.v, other.v) for one, other in zip(moved, wanted, strict=True)) < 0.2


def distance(found: Any, wanted: Any) -> float:
    """Relative, of all rows but those with a number that is far larger than the others."""
    keep = np.arange(len(wanted)) != 3
    return float(np.linalg.norm((found - wanted)[keep]) / np.linalg.norm(wanted[keep]))


@pytest.mark.parametrize("flash", ["on", "off"])
def test_scales_that_are_no_numbers(
    make: Callable[[str], Path], make_segment: Make, tmp_path: Path, flash: str
) -> None:
    """NaN and infinity with valid checksums are refused by every splice, and never written."""
    with Model(make("neox")) as model:
        exact = drawn(model, make_segment)
        for part in "kv":
            for value in (np.inf, np.nan):
                spoilt = small(replace(exact, kv="q8_0"))
                rows: Any = getattr(spoilt.layers[1], part)
                rows["scale"][70, 1] = value
                write_segment(tmp_path / "a.gguf", spoilt)
                for cache in ("f16", "f32"):
                    with context(model, cache, flash) as ctx, KVSequence(ctx) as seq:
                        seq.append(BEFORE)
                        with pytest.raises(EngineError, match="NaN or infinity"):
                            seq.splice(open_stored(tmp_path / "a.gguf"))
        exact.layers[0].v[0, 0] = np.inf
        with pytest.raises(SegmentError, match="no number"):
            write_segment(tmp_path / "b.gguf", replace(exact, kv="q8_0"))


def test_what_is_no_whole_block(tmp_path: Path, make_segment: Make) -> None:
    with pytest.raises(SegmentError, match="48 numbers"):
        write_segment(tmp_path / "a.gguf", replace(make_segment(k=48, v=64), kv="q8_0"))
