"""Tests staging buffers, as for a GPU, on host memory: the same bits, and no change by a refused segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from operations import TEXT, Done, all_operations
from reference import same

from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows, Segment
from notes_cli.errors import DamagedError, EngineError
from notes_cli.library.container import open_segment, open_stored, write_segment

from ..conftest import MakeModel, MakeSegment

WIDTH = 1024  # elements of a row
LONG = 4133  # rows: of f16 two buffers and something, of f32 four
FORMS = [(lines, late) for lines in (False, True) for late in (False, True)]
CACHES = [("f16", "on"), ("f16", "off"), ("f32", "off"), ("q8_0", "on"), ("bf16", "off")]


def options(kv: str, flash: Any, n_ctx: int = 512, threads: int = 1) -> ContextOptions:
    settings: dict[str, Any] = {"type_k": kv, "type_v": kv, "flash_attention": flash}
    return ContextOptions(n_ctx=n_ctx, n_threads=threads, n_sequences=3, unified=True, **settings)


def kept(context: Context, seq_id: int, count: int) -> list[bytes]:
    layers = context.read(seq_id, 0, count, base=0, dtype="f32")
    return [part.tobytes() for layer in layers for part in (layer.k, layer.v)]


KINDS = [*(("qwen3", *cache) for cache in CACHES), ("gemma3", "f16", "on"), ("gemma3", "f32", "off")]
KINDS += [("lfm2", "f16", "off")]


@pytest.mark.parametrize(("kind", "kv", "flash"), KINDS)
def test_the_same_bits_through_buffers(make_model: MakeModel, kind: str, kv: str, flash: str) -> None:
    """Whatever is done with rows: through buffers, by lines or not, copied at once or late, nothing differs."""
    with Model(make_model(kind)) as model:

        def made() -> Done:
            with Context(model, options(kv, flash)) as context:
                return all_operations(context)

        before = native.traffic().copies
        logits, rows = made()
        assert native.traffic().copies == before
        for lines, late in FORMS:
            with native.staged(lines=lines, late=late):
                staged_logits, staged_rows = made()
            assert native.traffic().copies > before
            assert all(map(np.array_equal, staged_logits, logits)) and all(map(same, staged_rows, rows)), (lines, late)


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> Iterator[Model]:
    """Two layers of K and V rows of 2 KB in f16."""
    with Model(make_model("qwen3", layers=2, embd=WIDTH, heads=32, kv_heads=32)) as opened:
        yield opened


@pytest.fixture(scope="module")
def path(make_segment: MakeSegment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segment of an odd number of rows, more than some buffers hold."""
    random = np.random.default_rng(3)

    def rows() -> np.ndarray:
        return random.standard_normal((LONG, WIDTH), np.float32).astype("f2")

    layers = tuple(LayerRows(number, rows(), rows()) for number in range(2))
    made: Segment = make_segment()
    path: Path = tmp_path_factory.mktemp("staging") / "long.gguf"
    write_segment(path, replace(made, tokens=np.zeros(LONG, np.int32), fields=(), layers=layers))
    return path


def placed(context: Context, segment: Segment, first: int = 0) -> list[bytes]:
    """The rows after a splice of all of them, or those from `first` on, at a position that moves them by 3."""
    context.clear()
    context.append({0: TEXT[:5]})
    context.splice(0, 5, segment.tokens[first:], segment.layers, segment.base + first, first=first)
    return kept(context, 0, 5 + LONG - first)


@pytest.mark.parametrize(("kv", "flash"), [("f16", "on"), ("f32", "off"), ("q8_0", "on")])
def test_rows_of_several_buffers(model: Model, path: Path, kv: str, flash: str) -> None:
    """From a file and from memory, an odd number of rows, by one thread, whose buffers take turns, and by three."""
    segment = open_segment(path)
    for threads, forms in ((1, FORMS[::3]), (3, FORMS[1:3])):
        with Context(model, options(kv, flash, LONG + 300, threads)) as context:
            wanted = [placed(context, segment), placed(context, segment, 777)]
            for lines, late in forms:
                with native.staged(lines=lines, late=late):
                    found = [placed(context, open_stored(path)), placed(context, open_stored(path), 777)]
                    assert found == wanted and placed(context, segment) == wanted[0], (threads, lines, late)


def test_what_is_refused_leaves_nothing(model: Model, path: Path, tmp_path: Path) -> None:
    """A wrong byte in the last tensor, while earlier rows are being copied: none of them is placed, and another
    sequence's rows are unchanged."""
    spoilt = tmp_path / "long.gguf"
    data = bytearray(path.read_bytes())
    segment = open_stored(path)
    data[-5000] ^= 1
    spoilt.write_bytes(data)
    for lines, late in FORMS[::3]:
        with Context(model, options("f16", "off", LONG + 600)) as context, native.staged(lines=lines, late=late):
            context.append({1: TEXT})
            before = kept(context, 1, len(TEXT))
            bad = [LayerRows(rows.layer, rows.k.copy(), rows.v.copy()) for rows in open_segment(path).layers]
            bad[1].v[LONG - 1, 3] = np.nan
            for layers, kind, why in (
                (open_stored(spoilt).layers, DamagedError, "checksum"),
                (bad, EngineError, "NaN"),
            ):
                with pytest.raises(kind, match=why):
                    context.splice(0, 0, segment.tokens, layers, segment.base)
                assert context.length(0) == 0 and kept(context, 1, len(TEXT)) == before
            context.append({1: TEXT[:2]})
            assert np.isfinite(context.logits()).all(), "free cells hold no NaN"
