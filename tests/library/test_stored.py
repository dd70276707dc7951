"""Tests of splices from a file: the same rows as from memory, each byte read once, and none placed unchecked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.engine import limits, native
from notes_cli.engine.context import Context
from notes_cli.engine.gguf import FIRST
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows, Segment, Stored, to_float32
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import DamagedError, EngineError, SegmentError
from notes_cli.library.container import open_segment, open_stored, write_segment

Make = Callable[..., Any]
BEFORE = np.arange(5, dtype=np.int32)  # tokens before the segment, which move it by 3
ROWS = 1500  # half as much again as a thread reads at once
LAYERS = 3


@pytest.fixture(scope="module")
def model(make_model: Make) -> Iterator[Model]:
    """K and V rows of 1024 bytes in f16."""
    with Model(make_model("qwen3", layers=LAYERS, embd=512, heads=16, kv_heads=16)) as opened:
        yield opened


def context(model: Model, kv: str = "f16", flash: str = "on", threads: int = 2, **options: object) -> Context:
    settings = {"n_ctx": 2048, "n_threads": threads, "type_k": kv, "type_v": kv, **options}
    return Context(model, ContextOptions(flash_attention=flash, **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def make(make_segment: Make) -> Callable[..., Segment]:
    """A segment of random rows for the model."""

    def made(count: int, layers: int = LAYERS) -> Segment:
        random = np.random.default_rng(count)
        parts = (random.standard_normal((count, 512), np.float32).astype("f2") for _ in range(2 * layers))
        rows = tuple(LayerRows(index, next(parts), next(parts)) for index in range(layers))
        tokens = random.integers(0, 256, count).astype(np.int32)
        return replace(make_segment(), tokens=tokens, fields=(), layers=rows)  # type: ignore[no-any-return]

    return made


@pytest.fixture(scope="module")
def path(make: Callable[..., Segment], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("stored") / "returns.gguf"
    write_segment(path, make(ROWS))
    return path


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    (tmp_path / "returns.gguf").write_bytes(path.read_bytes())
    return tmp_path / "returns.gguf"


def begun(ctx: Context) -> KVSequence:
    """A sequence with a few tokens, in a context that had nothing else."""
    ctx.clear()
    seq = KVSequence(ctx)
    seq.append(BEFORE)
    seq.flush()
    return seq


def rows(seq: KVSequence) -> list[bytes]:
    """All cached rows of a sequence, as raw bits."""
    found = seq.context.read(seq.seq_id, 0, len(seq), base=0, dtype="f32")
    return [part.tobytes() for layer in found for part in (layer.k, layer.v)]


def placed(ctx: Context, segment: Segment, seam: int = 0) -> list[bytes]:
    seq = begun(ctx)
    seq.splice(segment, seam=seam)
    return rows(seq)


def nearly(found: list[bytes], wanted: list[bytes]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(np.allclose(*(np.frombuffer(one, np.float32) for one in pair), rtol=1e-2, atol=1e-3) for pair in pairs)


@contextmanager
def unharmed(ctx: Context, kind: type[Exception], match: str | None = None) -> Iterator[KVSequence]:
    """Yield a sequence for a splice that is refused with exactly this kind of error, and changes neither rows nor
    metadata."""
    seq = begun(ctx)
    before = rows(seq)
    with pytest.raises(kind, match=match) as caught:
        yield seq
    native.call("notes_watch", ctx.handle, -1)
    assert caught.type is kind and len(seq) == len(BEFORE) == ctx.length(seq.seq_id) == ctx.used
    assert rows(seq) == before


@pytest.mark.parametrize("flash", ["on", "off"])
def test_the_same_rows_with_any_number_of_threads(
    make_model: Make, make: Callable[..., Segment], tmp_path: Path, flash: str
) -> None:
    """The result does not depend on the threads, also with more of them than layers or tensors."""
    segment = make(4200, 8)
    write_segment(tmp_path / "long.gguf", segment)
    assert segment.nbytes >= 16 << 22  # so much a thread, else fewer are started
    found = []
    with Model(make_model("qwen3", layers=8, embd=512, heads=16, kv_heads=16)) as model:
        for threads in (1, 3, 17):
            with context(model, "f16", flash, threads, n_ctx=4608) as ctx:
                found.append(placed(ctx, open_stored(tmp_path / "long.gguf"), 3))
    assert found[0] == found[1] == found[2]


def asked() -> int:
    """The bytes that this process has had the system read, by whatever means."""
    counters = Path("/proc/self/io")
    return (
        int(dict(line.split(": ") for line in counters.read_text().splitlines())["rchar"]) if counters.exists() else 0
    )


@pytest.mark.parametrize(
    ("kv", "flash"), [("f16", "on"), ("f16", "off"), ("f32", "off"), ("bf16", "off"), ("q4_0", "on")]
)
def test_the_same_rows_as_from_memory(model: Model, path: Path, kv: str, flash: str) -> None:
    """For all types and layouts of the cache, bit for bit; every byte is read once, every row written once."""
    segment, little = open_segment(path), 1024  # the counters themselves are read
    with context(model, kv, flash) as ctx:
        wanted = placed(ctx, segment)
        unrotated = replace(segment, base=len(BEFORE))
        assert placed(ctx, unrotated) != wanted  # it is moved
        assert placed(ctx, replace(open_stored(path), base=len(BEFORE))) == placed(ctx, unrotated)
        for seam in (0, 700):
            seq = begun(ctx)
            seq.append(segment.tokens[:seam])
            seq.flush()
            counted, at_first = native.traffic(), asked()
            stored = open_stored(path)
            opened = asked()
            what, base = stored.tokens[seam:], stored.base + seam
            ctx.splice(seq.seq_id, len(seq), what, stored.layers, base, first=seam)
            assert opened - at_first < FIRST + little
            assert not opened or 0 <= asked() - opened - stored.nbytes < little
            read, written, copies = (now - then for now, then in zip(native.traffic(), counted, strict=True))
            assert read == stored.nbytes == 2 * LAYERS * ROWS * 512 * 2
            assert written == 2 * LAYERS * (ROWS - seam) * int(512 * limits.ELEMENT[kv])
            assert copies == 0, "rows went through a buffer, and this is the host's memory"
            assert isinstance(stored.layers, Stored) and stored.layers.file is not None  # not read into memory
            assert placed(ctx, stored, seam) == (placed(ctx, segment, seam) if seam else wanted)


@pytest.mark.parametrize(("kept", "flash"), [("f16", "on"), ("f16", "off"), ("q8_0", "on")])
def test_a_wrong_byte_anywhere_is_refused(model: Model, copy: Path, kept: str, flash: str) -> None:
    """In any tensor, at its start, in the middle and at its end: one line, and the cache is as it was."""
    if kept != "f16":
        write_segment(copy, replace(open_segment(copy), kv=kept))
    stored, whole = open_stored(copy).layers, copy.read_bytes()
    assert isinstance(stored, Stored)
    places = [one for each in stored.tensors for one in (each.k, each.v)]
    with context(model, "f16", flash) as ctx:
        for number, place in enumerate(places):
            at = (place.offset, (place.offset + place.end) // 2, place.end - 1)[number % 3]
            copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with unharmed(ctx, DamagedError, r"checksum of [KV] of layer \d") as seq:
                seq.splice(open_stored(copy))
        copy.write_bytes(whole)
        seq.splice(open_stored(copy))
        assert rows(seq) == placed(ctx, open_segment(copy))


def test_a_file_that_is_cut_off_after_it_was_opened(model: Model, copy: Path) -> None:
    """A truncated file gives an error, no bus error; the rows before the segment stay."""
    size = copy.stat().st_size
    with context(model) as ctx:
        for left in (0, size // 2, size - 1):
            whole, segment = copy.read_bytes(), open_stored(copy)
            os.truncate(copy, left)
            with unharmed(ctx, DamagedError, r"within [KV] of layer [0-9]") as seq:
                seq.splice(segment)
            with pytest.raises(DamagedError, match="it was cut off while it was read"):
                segment.slice(0, 3)
            copy.write_bytes(whole)


def test_a_file_that_is_replaced_after_it_was_opened(model: Model, make: Callable[..., Segment], copy: Path) -> None:
    """A renamed-over file: the opened one is placed. Written in place: refused, before or during the splice. One whose
    reads fail is not called damaged."""
    with context(model) as ctx:
        segment, wanted = open_stored(copy), placed(ctx, open_segment(copy))
        write_segment(copy, make(600))
        assert placed(ctx, segment) == wanted
        segment = open_stored(copy)
        assert isinstance(segment.layers, Stored) and segment.layers.file is not None
        folder = os.open(copy.parent, os.O_RDONLY)
        os.dup2(folder, segment.layers.file.fileno())
        os.close(folder)
        with unharmed(ctx, SegmentError, r"cannot read .*: Is a directory") as seq:
            seq.splice(segment)
        segment = open_stored(copy)
        data = copy.read_bytes()
        with copy.open("r+b") as file:
            file.write(data[::-1])
        with unharmed(ctx, DamagedError) as seq:
            seq.splice(segment)


def test_rows_that_are_no_numbers(model: Model, make: Callable[..., Segment], tmp_path: Path) -> None:
    """Rows that are not finite are refused as such with valid checksums, and as damaged otherwise."""
    segment = make(600)
    segment.layers[1].v[5, 5] = np.nan
    write_segment(tmp_path / "a.gguf", segment)
    stored = open_stored(tmp_path / "a.gguf")
    assert isinstance(stored.layers, Stored)
    with context(model) as ctx:
        with unharmed(ctx, EngineError, "NaN or infinity") as seq:
            seq.splice(stored)
        with (tmp_path / "a.gguf").open("r+b") as file:
            file.seek(stored.layers.tensors[-1].v.offset)
            file.write(b"x")
        with unharmed(ctx, DamagedError) as seq:
            seq.splice(stored)


@pytest.mark.parametrize("kept", ["f16", "q8_0"])
def test_a_window_that_drops_rows_loses_none_to_a_damaged_file(
    make_model: Make, make_segment: Make, tmp_path: Path, kept: str
) -> None:
    """New rows are read and checked before any leaves a small window; rounded ones go where the same f32 rows go."""
    with Model(make_model("gemma3")) as model, context(model, swa_full=False, n_ctx=512) as ctx:
        seq = begun(ctx)
        seq.append(np.arange(100))
        seq.flush()
        layers = ctx.read(seq.seq_id, 2, 100, base=2)
        tokens = np.arange(100, dtype=np.int32)
        write_segment(tmp_path / "a.gguf", replace(make_segment(), tokens=tokens, fields=(), layers=layers, kv=kept))
        memory = open_segment(tmp_path / "a.gguf")
        plain = [replace(one, k=to_float32(one.k), v=to_float32(one.v)) for one in memory.layers]
        wanted = placed(ctx, memory)
        assert placed(ctx, open_stored(tmp_path / "a.gguf")) == wanted
        assert nearly(placed(ctx, replace(memory, layers=tuple(plain))), wanted)
        stored = open_stored(tmp_path / "a.gguf")
        os.truncate(tmp_path / "a.gguf", 5000)
        with unharmed(ctx, DamagedError) as seq:
            seq.splice(stored)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # pairs of neighbours, pairs of halves
def test_the_kernel_for_f16_turns_as_the_loops_for_all_types(make_model: Make, kind: str) -> None:
    """Rows of f16 that were turned in registers are those of an f32 cache, rounded once."""
    with Model(make_model(kind)) as model:
        found = []
        for kv in ("f16", "f32"):
            with context(model, kv, "off") as ctx:
                random = np.random.default_rng(2)
                parts = [random.standard_normal((40, one.n_embd_k), np.float32).astype("f2") for one in ctx.layers]
                layers = [LayerRows(index, part, part) for index, part in enumerate(parts)]
                ctx.splice(0, 500, np.arange(40), layers, 3)
                found.append(np.stack([layer.k for layer in ctx.read(0, 500, 40, base=500, dtype="f32")]))
        f16, f32 = found[0], found[1].astype(np.float16).astype(np.float32)
        assert (f16 == f32).mean() > 0.999 and np.allclose(f16, f32, rtol=1e-3, atol=1e-7)
        assert (f32 != np.stack([part.astype(np.float32) for part in parts])).mean() > 0.9  # they were turned


def test_a_splice_that_is_stopped(model: Model, path: Path) -> None:
    """As by Ctrl-C while a slow disk is read: at once, with nothing placed; the same splice can be had afterwards."""
    reading, writing = os.pipe()
    with context(model) as ctx, os.fdopen(reading), os.fdopen(writing, "w"):
        segment = open_stored(path)
        os.write(writing, b"x")
        with unharmed(ctx, native.StoppedError) as seq:
            native.call("notes_watch", ctx.handle, reading)
            seq.splice(segment)
        seq.splice(segment)
        assert rows(seq) == placed(ctx, open_segment(path))
