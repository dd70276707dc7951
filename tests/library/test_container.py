"""Tests of segment files: they are read as they were written, and damaged ones are refused."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import finish

from notes_cli.engine.segment import (
    Q8_0,
    Carry,
    FieldSpan,
    ImageFile,
    LayerRows,
    Media,
    MicroBatches,
    Prefill,
    Segment,
    Transition,
)
from notes_cli.errors import SegmentError, UnwritableError
from notes_cli.library import container
from notes_cli.library.container import FIRST, open_segment, open_stored, peek, write_segment

from ..limits import small_files

MakeSegment = Callable[..., Segment]


def same(a: Segment, b: Segment) -> bool:
    """Equal in everything, to the bit."""
    plain = ("name", "description", "text", "base", "prefix_only", "fields", "identity", "blocks", "source")
    arrays: list[tuple[NDArray[Any], NDArray[Any]]] = [(a.tokens, b.tokens), (a.context, b.context)]
    for left, right in zip(a.layers, b.layers, strict=True):
        arrays += [(left.k, right.k), (left.v, right.v)]
    return (
        all(getattr(a, part) == getattr(b, part) for part in plain)
        and [(rows.layer, rows.part) for rows in a.layers] == [(rows.layer, rows.part) for rows in b.layers]
        and all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in arrays)
    )


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9), st.integers(0, 9)),
    dtype=st.sampled_from(["f2", "f4"]),
    text=st.text(st.characters(codec="utf-8"), max_size=80),
    context=st.lists(st.integers(0, 2**31 - 1), max_size=5),
)
@settings(max_examples=15)
def test_what_is_written_is_read(
    tmp_path_factory: Any, make_segment: MakeSegment, shape: tuple[int, ...], dtype: str, text: str, context: list[int]
) -> None:
    """Any shape and any text comes back bit for bit; the info agrees."""
    given = {"text": text, "description": text, "fields": (), "context": np.array(context, np.int32)}
    segment = make_segment(*shape, dtype, **given)
    path = tmp_path_factory.mktemp("c") / "a.gguf"
    write_segment(path, segment)
    assert same(open_segment(path), segment)
    seen, kind = peek(path), {"f2": "f16", "f4": "f32"}[dtype]
    assert (seen.text, seen.base, seen.layers, seen.dtype) == (text, 2, shape[1], kind)
    assert seen.nbytes == path.stat().st_size
    reader = gguf.GGUFReader(path)  # it is a GGUF file for others, too
    assert reader.fields["notes.text"].contents() == text and reader.fields["notes.base"].contents() == 2
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    parts = {f"blk.{one.layer}.{kind}": getattr(one, kind) for one in segment.layers for kind in "kv"}
    assert all(np.array_equal(tensors[name], rows) for name, rows in parts.items() if rows.size)
    assert tensors["notes.tokens"].tolist() == segment.tokens.tolist()


def part(layer: int, part: str, n: int, k: int, v: int, dtype: str = "f2") -> LayerRows:
    random = np.random.default_rng(n)
    return LayerRows(layer, random.normal(size=(n, k)).astype(dtype), random.normal(size=(n, v)).astype(dtype), part)


@pytest.fixture
def whole(make_segment: MakeSegment) -> Segment:
    """3 tokens after 2, kept from position 0 on: attention, attention with an indexer, and two kinds of states."""
    layers = (
        *(part(0, "attention", 5, 2, 3), part(1, "attention", 5, 4, 0), part(1, "indexer", 5, 3, 0)),
        *(part(2, "state", 1, 6, 0, "f4"), part(4, "state", 1, 6, 8, "f4"), part(7, "state", 1, 0, 8, "f4")),
    )
    return replace(make_segment(), layers=layers, prefix_only=True)


def test_a_whole_segment_comes_back(tmp_path: Path, whole: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the left context, indexer keys and states, bit for bit and in order; the info counts them apart."""
    write_segment(tmp_path / "a.gguf", whole)
    assert same(open_segment(tmp_path / "a.gguf"), whole)
    info = peek(tmp_path / "a.gguf")
    assert (info.prefix_only, info.base, info.layers, info.dtype, info.states) == (True, 2, 2, "f16", 3)
    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors]
    assert names[2:] == [
        *("blk.0.k", "blk.0.v", "blk.1.k", "blk.1.indexer.k"),
        *("blk.2.state.r", "blk.4.state.r", "blk.4.state.s", "blk.7.state.s"),
    ]
    layers = tuple(replace(rows, k=rows.k[-3:], v=rows.v[-3:]) for rows in whole.layers)
    alone = replace(whole, base=0, context=np.empty(0, np.int32), layers=layers)  # no rows before the skill
    for other in (
        alone,
        replace(alone, prefix_only=False, layers=layers[:3]),  # without states
        replace(whole, layers=whole.layers[3:]),  # states alone
    ):
        write_segment(tmp_path / "a.gguf", other)
        assert same(open_segment(tmp_path / "a.gguf"), other)
    for name in ("blk.1.indexer.k", "blk.1.k"):  # the model decides which layers must exist
        write_altered(monkeypatch, tmp_path / "a.gguf", whole, {name: None})
        open_segment(tmp_path / "a.gguf")


@pytest.fixture
def carried(whole: Segment) -> Segment:
    """Its first token is decoded where it is; a diagonal for a layer, a matrix for another, a convolution alone."""
    random = np.random.default_rng(7)

    def numbers(n: int) -> NDArray[np.float32]:
        return random.normal(size=n).astype("f4")

    transitions = (
        *(Transition(2, numbers(6), numbers(0), numbers(0)), Transition(4, numbers(6), numbers(2), numbers(8))),
        Transition(7, numbers(0), numbers(8), numbers(8), head=2),
    )
    return replace(whole, carry=Carry.of(1, 0, transitions))


def test_what_carries_a_state_is_kept(tmp_path: Path, carried: Segment) -> None:
    """Bit for bit, read and checked when it is asked for, though the rows have been read and their file closed."""
    path = tmp_path / "a.gguf"
    write_segment(path, carried)
    assert carried.carry is not None
    assert peek(path).carried == carried.carry.nbytes == 4 * (6 + 6 + 2 + 8 + 8 + 8)
    stored = open_stored(path)
    assert stored.layers[0].layer == 0
    found = stored.carry
    assert found is not None and (found.seam, found.tail, found.nbytes) == (1, 0, carried.carry.nbytes)
    for one, other in zip(found.load(), carried.carry.load(), strict=True):
        assert (one.layer, one.head) == (other.layer, other.head)
        assert all(np.array_equal(getattr(one, kind), getattr(other, kind)) for kind in "rab")
    assert same(open_segment(path), carried)


Alter = dict[str, Any]  # metadata, and tensors as a shape, a type, an array or None


def write_altered(monkeypatch: pytest.MonkeyPatch, path: Path, segment: Segment, changes: Alter) -> None:
    """Write a file with sound checksums whose metadata and tensors do not fit."""
    make_metadata, make_tensors = container.metadata, container._tensors
    tensors_too = {name for name in changes if name.startswith(("blk.", "notes."))}

    def metadata(*arguments: Any) -> dict[str, str | int]:
        made = make_metadata(*arguments) | {key: changes[key] for key in {*changes} - tensors_too}
        return {key: value for key, value in made.items() if value is not None}

    def tensors(segment: Segment) -> dict[str, NDArray[Any]]:
        made = make_tensors(segment)
        for name in tensors_too:
            change, old = changes[name], made.pop(name, np.zeros(0, np.float32))
            if isinstance(change, tuple | np.ndarray):
                made[name] = np.zeros(change, old.dtype) if isinstance(change, tuple) else change
            elif change is not None:
                made[name] = old.astype(change)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(container, "metadata", metadata)
        patch.setattr(container, "_tensors", tensors)
        write_segment(path, segment)


DEEP = "[" * 100_000
BLOCKS = ["", "[]", "x", "[1, 2]", "[0, 3]", "[0, 2, 1]", "[0, 1, 1]", "[0, 1.0]", "[false, 1]", '["0"]', "{}", "0"]
TIMES = ['{"seconds": NaN}', *(f'{{"seconds": {a}, "tokens": {b}, "threads": {c}}}' for a, b, c in (
    *((-1, 1, 1), ("NaN", 1, 1), ("Infinity", 1, 1), ("1e300", 1, 1), ("true", 1, 1), ('"1"', 1, 1)),
    *((1, 0, 1), (1, 1.5, 1), (1, 1, 0), (1, 1, "null"), (1, 2**31, 1)),
))]  # fmt: skip
ODD = {"blk.0\n\x1b[2J": np.zeros(8, np.float32)}


@pytest.mark.parametrize(
    ("which", "changes", "says"),
    [
        ("whole", {"first": 1}, "notes.first does not fit"),  # rows begin at 0 or at the skill
        ("whole", {"first": "0"}, "notes.first does not fit"),
        ("whole", {"base": 3}, "notes.first does not fit"),  # other than the left context is long
        ("whole", {"base": 1}, "notes.first does not fit"),
        ("whole", {"first": None}, "holds the state of recurrent layers, but not all rows before it"),
        ("whole", {"blk.0.k": (3, 2)}, "blk.0.k does not have one row a token"),  # the skill's rows alone
        ("whole", {"blk.0.v": (6, 3)}, "blk.0.v does not have one row a token"),
        ("whole", {"blk.1.indexer.k": (3, 3)}, "blk.1.indexer.k does not have one row a token"),
        ("whole", {"blk.0.k": None}, "layer 0 has no K rows"),
        ("whole", {"blk.2.state.r": (2, 6)}, "blk.2.state.r is not one row of f32"),
        ("whole", {"blk.2.state.r": (6,)}, "blk.2.state.r is not one row of f32"),
        ("whole", {"blk.4.state.s": np.float16}, "blk.4.state.s is not one row of f32"),
        ("whole", {"blk.4.state.p": (1, 8)}, "holds a tensor 'blk.4.state.p'"),
        ("whole", {"blk.1.indexer": (5, 3)}, "holds a tensor 'blk.1.indexer'"),
        ("whole", {"blocks": "[0, 1]"}, "its blocks do not fit its tokens"),  # a segment with its left context has none
        ("whole", {"moves": "[1]"}, "notes.moves does not fit its blocks"),
        ("whole", {"moves": "no list"}, "notes.moves cannot be read"),
        ("carried", {"carry.seam": None}, "notes.carry does not fit its tokens"),
        ("carried", {"carry.tail": 2}, "notes.carry does not fit its tokens"),
        ("carried", {"carry.heads": None}, "notes.carry does not fit its tokens"),
        ("carried", {"carry.heads": '{"7": 0}'}, "does not hold the sizes of heads"),
        ("moved", {"base": (1 << 31) - 3}, f"notes.base is {(1 << 31) - 3}"),  # llama.cpp would wrap it around
        ("moved", {"base": (1 << 32) - 1}, f"notes.base is {(1 << 32) - 1}"),
        ("moved", {"notes.tokens": None, "notes.context": None}, "it has no tokens"),
        ("moved", {"notes.tokens": np.full(3, -1, np.int32)}, "negative token id"),
        ("moved", ODD, r"it holds a tensor 'blk\.0\\n\\x1b\[2J' that segments do not have"),
        *(("moved", {"blocks": given}, r"blocks (cannot be read|do not fit)") for given in (*BLOCKS, "[0, [1]]")),
        *(("moved", {"blocks": given}, r"blocks (cannot be read|do not fit)") for given in (DEEP, 0)),
        *(
            ("moved", {"prefill": given}, r"notes\.prefill (cannot be read|does not hold)")
            for given in ("", "[]", "1", DEEP, *TIMES)
        ),
        *(
            ("moved", {"batches": given}, r"notes\.batches (cannot be read|does not fit)")
            for given in (
                "",
                "{}",
                "[[3]]",
                "[[1, 1, 1]]",
                "[[5, 0, 1]]",
                "[[5, 1, 1.0]]",
                "[[6, 1, 1], [-1, 1, 1]]",
                DEEP,
            )
        ),
        *(
            ("moved", {"fields": given}, "damaged or not a segment")
            for given in ("{", "[1]", '[{"name": 1}]', DEEP, '{"a": 1}', '["abc"]')
        ),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    changes: Alter,
    says: str,
) -> None:
    """Sound checksums do not make wrong metadata, positions, rows or states right; one line has the reason."""
    segment = request.getfixturevalue("make_segment")() if which == "moved" else request.getfixturevalue(which)
    write_altered(monkeypatch, tmp_path / "a.gguf", segment, changes)
    with pytest.raises(SegmentError, match=says) as caught:
        open_segment(tmp_path / "a.gguf")
    assert "\n" not in str(caught.value)
    if not any(name.startswith("blk.") for name in changes) and "first" not in changes:
        with pytest.raises(SegmentError, match=says):  # `ls` reads no more than the head
            peek(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "values",
    [
        *({"blocks": blocks} for blocks in ((), (0,), (0, 2), (0, 1, 2))),
        {"prefill": Prefill(8.125, 3, 2), "batches": (MicroBatches(2, 2, 1), MicroBatches(3, 512, 2))},
    ],
)
def test_keys_that_not_every_file_has_come_back(
    tmp_path: Path, make_segment: MakeSegment, values: dict[str, Any]
) -> None:
    """They come back in the segment and its info; a file without the key has one block, and an unknown time."""
    segment = make_segment(**values)
    write_segment(tmp_path / "a.gguf", segment)
    found, info = open_segment(tmp_path / "a.gguf"), peek(tmp_path / "a.gguf")
    assert (found.blocks, found.prefill) == (info.blocks, info.prefill) == (segment.blocks, segment.prefill)
    assert found.batches == info.batches == segment.batches
    keys = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert ("notes.blocks" in keys, "notes.prefill" in keys) == (bool(segment.blocks), segment.prefill is not None)


@pytest.mark.parametrize("which", ["moved", "whole", "carried"])
def test_every_flipped_byte_is_found(tmp_path: Path, request: pytest.FixtureRequest, which: str) -> None:
    """Head, padding, tensors, checksums themselves: every byte of a file, and of the larger ones some."""
    path = tmp_path / "a.gguf"
    segment = request.getfixturevalue("make_segment")() if which == "moved" else request.getfixturevalue(which)
    write_segment(path, replace(segment, description=""))
    data = path.read_bytes()
    missed = []
    for number, at in enumerate(range(0, len(data), 1 if which == "moved" else 23)):
        flip = (0xFF, 1 << at % 8, 0x20)[number % 3]
        path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
        try:
            open_segment(path)
        except SegmentError as error:
            assert "\n" not in str(error) and str(path) in str(error)
        else:
            missed.append(at)
    assert not missed


def test_every_truncation_is_found(tmp_path: Path, make_segment: MakeSegment) -> None:
    """A file cut short, or with bytes after its end, is refused; so is its info."""
    path = tmp_path / "a.gguf"
    write_segment(path, make_segment())
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 11), len(whole) - 1):
        path.write_bytes(whole[:length])
        for read in (open_segment, peek):
            with pytest.raises(SegmentError):
                read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(SegmentError, match="its header describes"):
        open_segment(path)


@given(data=st.binary(max_size=300), start=st.sampled_from([b"", b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0\x01" + bytes(7)]))
@settings(max_examples=30)
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, start: bytes, data: bytes) -> None:
    path = tmp_path_factory.mktemp("g") / "a.gguf"
    path.write_bytes(start + data)
    with pytest.raises(SegmentError):
        open_segment(path)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    """A model, an empty file, a text, a folder, none; a string of 2^62 bytes, for which nothing is allocated."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["token"] * 50)
    writer.add_tensor("w", np.zeros((4, 4), np.float32))
    finish(writer, tmp_path / "model.gguf")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello there")
    (tmp_path / "long").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(64))
    (tmp_path / "many").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + bytes(64))
    for name, message in [
        *(("model.gguf", "is a GGUF file but not a compiled segment"), ("empty", "damaged or not a segment")),
        ("text", "it is not a GGUF file"),
        *(("", "cannot read"), ("none", "no such segment"), ("long", "ends too early"), ("many", "too many entries")),
    ]:
        with pytest.raises(SegmentError, match=message):
            open_segment(tmp_path / name)


@pytest.mark.parametrize(
    "span",
    [
        FieldSpan("date", "2", 6, 8, 2, 3),  # another value than the text has
        FieldSpan("date", "1é", 6, 8, 2, 4),  # tokens beyond the end
        FieldSpan("date", "1é", 6, 8, 3, 3),  # no token
        FieldSpan("", "1é", 6, 8, 2, 3),  # no name
        FieldSpan("date", "", 6, 6, 2, 3),  # no value
        FieldSpan("date", "1é", 6, 8, 0.5, 3),  # type: ignore[arg-type]
    ],
)
def test_fields_must_fit_the_text(tmp_path: Path, make_segment: MakeSegment, span: FieldSpan) -> None:
    write_segment(tmp_path / "a.gguf", make_segment(fields=(span,)))
    with pytest.raises(SegmentError, match="fields do not fit"):
        peek(tmp_path / "a.gguf")


def test_what_does_not_fit_is_not_written(tmp_path: Path, make_segment: MakeSegment, whole: Segment) -> None:
    states = [replace(whole, layers=(part(2, "state", *odd),)) for odd in ((2, 6, 0, "f4"), (1, 6, 0, "f2"))]
    for wrong in (make_segment(tokens=np.zeros(9, np.int32)), *states):
        with pytest.raises(SegmentError, match=r"rows that do not fit|layer 2.* state\.r"):
            write_segment(tmp_path / "a.gguf", wrong)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SegmentError, match="no tokens"):
        write_segment(tmp_path / "b.gguf", make_segment(n=0, fields=()))
        open_segment(tmp_path / "b.gguf")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Wherever the disk ends, or at Ctrl-C: no temporary file, and the old segment; one line has the reason."""

    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    path, larger = tmp_path / "a.gguf", make_segment(n=40, k=64, v=64)
    write_segment(path, larger)
    size = path.stat().st_size
    write_segment(path, make_segment())
    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(container, "_seal", interrupted)
        write_segment(path, larger)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before
    for nbytes in (0, 100, 1000, size // 2, size - 5000, size - 4096, size - 33, size - 1):
        with small_files(nbytes), pytest.raises(UnwritableError) as caught:
            write_segment(path, larger)
        assert str(caught.value) == f"cannot write {path}: File too large. Nothing was changed"
        assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before
    with small_files(size):
        write_segment(path, larger)
    assert open_segment(path).tokens.tolist() == larger.tokens.tolist()


def test_a_file_that_others_change_meanwhile(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Truncated or written into, opened or later: K/V stays as it was checked, or one line has the error."""
    path = tmp_path / "returns.gguf"
    write_segment(path, make_segment(4000, layers=2, k=64, v=64))
    whole, segment, done = path.read_bytes(), open_segment(path), threading.Event()

    def cut_and_mend() -> None:
        while not done.is_set():
            os.truncate(path, len(whole) // 2)
            with path.open("r+b") as file:
                file.write(whole)

    def bits(found: Segment) -> list[bytes]:
        return [part.tobytes() for layer in found.layers for part in (layer.k, layer.v)]

    rows = bits(segment)
    for changed in (whole[:100], whole[: len(whole) // 2] + bytes(len(whole) // 2)):
        with path.open("r+b") as file:
            file.write(changed)
            file.truncate(len(changed))
        assert bits(segment) == rows
    path.write_bytes(whole)
    other = threading.Thread(target=cut_and_mend)
    other.start()
    try:
        for _ in range(25):
            try:
                assert bits(open_segment(path)) == rows
                assert len(peek(path).tokens) == len(segment)
            except SegmentError as error:
                assert "\n" not in str(error)
    finally:
        done.set()
        other.join()


def test_a_long_head_is_read_whole(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Texts around the size of the first read, to a byte: the same segment and info come back."""
    for length in (FIRST - 4000, FIRST, 20 * FIRST):
        path = tmp_path / f"{length}.gguf"
        segment = make_segment(3, text="date: 1é" + "x" * length)
        write_segment(path, segment)
        assert open_segment(path).text == peek(path).text == segment.text
        assert (open_segment(path).layers[0].v == segment.layers[0].v).all()


def test_rows_that_do_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_segment: MakeSegment
) -> None:
    """One line, as for all that cannot be read now: the file may be as good as ever."""
    path = tmp_path / "returns.gguf"
    write_segment(path, make_segment(4000, layers=8, k=64, v=64))

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(container, "_read_on", full)
    with pytest.raises(SegmentError, match="do not fit into memory"):
        open_segment(path)


# Images.

DATA = b"the bytes of a picture, 31 long"


@pytest.fixture
def photo(make_segment: MakeSegment) -> Segment:
    """One token, four rows of an image that take two positions, one token."""
    media = (Media(1, 5, 2, sha256(DATA).hexdigest(), 48, 24),)
    axes = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3, 3, 3]], np.int32)
    text = f"Look: image {sha256(DATA).hexdigest()}."
    pictures = (ImageFile(6, len(text) - 1, DATA),)
    return make_segment(6, media=media, axes=axes, projector="ab max=4", pictures=pictures, fields=(), text=text)


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_an_image_comes_back_as_it_was(tmp_path: Path, photo: Segment, make_segment: MakeSegment, kv: str) -> None:
    photo = replace(photo, layers=make_segment(6, k=32, v=32).layers, kv=kv)
    write_segment(tmp_path / "photo.gguf", photo)
    found, info = open_segment(tmp_path / "photo.gguf"), peek(tmp_path / "photo.gguf")
    assert found.media == photo.media and (found.axes == photo.axes).all() and found.axes.dtype == np.int32
    assert (found.projector, found.pictures) == (photo.projector, photo.pictures)
    assert (info.media, info.projector) == (photo.media, photo.projector)
    assert [info.text[one.start : one.end] for one in info.pictures] == [f"image {sha256(DATA).hexdigest()}"]
    assert found.positions == 4 and found.max_seam == 1 and (found.kv, info.kv, info.dtype) == (kv, kv, kv)
    assert all((one.k.dtype == one.v.dtype == Q8_0) == (kv == "q8_0") for one in found.layers)


def test_a_text_with_images_keeps_each_file_once(tmp_path: Path, photo: Segment) -> None:
    """Three places, two files: the same picture is not written twice, and all come back where they were."""
    files = DATA, b"another picture's", DATA
    text, pictures, media = "", [], []
    for number, data in enumerate(files):
        text += "See "
        digest = sha256(data).hexdigest()
        pictures.append(ImageFile(len(text), len(text) + 64, data))
        text += digest + ". "
        media.append(Media(2 * number, 2 * number + 1, 1, digest, 8, 8))
    segment = replace(photo, text=text, pictures=tuple(pictures), media=tuple(media), axes=None)
    write_segment(tmp_path / "photo.gguf", segment)
    assert open_segment(tmp_path / "photo.gguf").pictures == segment.pictures
    data = (tmp_path / "photo.gguf").read_bytes()
    assert data.count(DATA) == data.count(files[1]) == 1
    missing = replace(segment, pictures=(pictures[0], pictures[2]))
    write_segment(tmp_path / "photo.gguf", missing)
    with pytest.raises(SegmentError, match="the images"):
        open_segment(tmp_path / "photo.gguf")


def other(photo: Segment, place: tuple[int, int], by: int) -> np.ndarray:
    assert photo.axes is not None
    axes = photo.axes.copy()
    axes[place] += by
    return axes


ODD_IMAGES = {
    "a text that leaps": lambda one: {"axes": other(one, (5, 0), 1)},
    "a row beyond the image": lambda one: {"axes": other(one, (2, 2), 1)},
    "a row before it": lambda one: {"axes": other(one, (1, 1), -1)},
    "a row at another time": lambda one: {"axes": other(one, (2, 0), 1)},
    "no axes": lambda one: {"axes": None},
    "too few axes": lambda one: {"axes": one.axes[:-1]},
    "beyond the end": lambda one: {"media": (replace(one.media[0], last=7),)},
    "no rows": lambda one: {"media": (replace(one.media[0], last=1),)},
    "more positions than rows": lambda one: {"media": (replace(one.media[0], positions=5),)},
    "one inside another": lambda one: {"media": (one.media[0], replace(one.media[0], first=2))},
    "no digest": lambda one: {"media": (replace(one.media[0], sha256="12"),)},
    "another image's bytes": lambda one: {"pictures": (one.pictures[0]._replace(data=DATA[:-1] + b"?"),)},
    "a place beyond the text": lambda one: {"pictures": (one.pictures[0]._replace(end=99),)},
    "a place of other words": lambda one: {"pictures": (one.pictures[0]._replace(start=0, end=5),)},
    "two in one place": lambda one: {"pictures": one.pictures * 2},
    "bytes without an image": lambda one: {"media": (), "axes": None},
}


@pytest.mark.parametrize("what", ODD_IMAGES)
def test_images_that_do_not_fit_are_refused(tmp_path: Path, photo: Segment, what: str) -> None:
    """A file that was written with other axes, images or bytes than belong together: never read as good."""
    write_segment(tmp_path / "photo.gguf", replace(photo, **ODD_IMAGES[what](photo)))
    with pytest.raises(SegmentError, match="damaged or not a segment"):
        open_segment(tmp_path / "photo.gguf")
