"""Tests of segment files: they are read as they were written, and damaged or contradictory ones are refused."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import finish

from notes_cli.engine.gguf import FIRST
from notes_cli.engine.segment import (
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
from notes_cli.errors import NewerError, SegmentError, UnwritableError
from notes_cli.library import container, metadata
from notes_cli.library.container import open_segment, open_stored, peek, small, write_segment

from ..limits import small_files

MakeSegment = Callable[..., Segment]
DATA = b"the bytes of a picture, 31 long"
DIGEST = sha256(DATA).hexdigest()
SPAN, MEDIA = FieldSpan("date", "1é", 6, 8, 2, 3), Media(1, 5, 2, DIGEST, 48, 24)
AXES = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3, 3, 3]], np.int32)
OF_THE_FILE = {"path", "file_size", "checksum", "created", "writer"}


def bits(value: Any) -> Any:
    """A value in which arrays can be compared to the bit."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, LayerRows | Transition):
        return [bits(getattr(value, part.name)) for part in fields(value)]
    if isinstance(value, Carry):
        return value.seam, value.tail, value.nbytes, [bits(each) for each in value.load()]
    if isinstance(value, dict):
        return [(key, bits(each)) for key, each in value.items()]
    return [bits(each) for each in value] if isinstance(value, tuple) else value


def same(one: Segment, other: Segment, *apart: str) -> bool:
    """Compare all attributes but those of the file, and those named."""
    names = {part.name for part in fields(Segment)} - OF_THE_FILE - set(apart)
    return all(bits(getattr(one, name)) == bits(getattr(other, name)) for name in names)


def part(layer: int, part: str, n: int, k: int, v: int, dtype: str = "f2") -> LayerRows:
    random = np.random.default_rng(n)
    return LayerRows(layer, random.normal(size=(n, k)).astype(dtype), random.normal(size=(n, v)).astype(dtype), part)


Samples = dict[str, Segment]


@pytest.fixture(scope="module")
def samples(make_segment: MakeSegment) -> Samples:
    """One of each kind: with all optional keys, with rows of the left context and states, with their transitions, with
    an image of four rows in two positions, quantized."""
    random = np.random.default_rng(7)

    def numbers(count: int) -> Any:
        return random.normal(size=count).astype("f4")

    batches = MicroBatches(2, 2, 1), MicroBatches(3, 512, 2)
    keys = make_segment(blocks=(0, 2), moves=(0, 3), source="/a/é.txt", stamp=(1, 2, 3), backend="b", batches=batches)
    layers = (
        *(part(0, "attention", 5, 2, 3), part(1, "attention", 5, 4, 0), part(1, "indexer", 5, 3, 0)),
        *(part(2, "state", 1, 6, 0, "f4"), part(4, "state", 1, 6, 8, "f4"), part(7, "state", 1, 0, 8, "f4")),
    )
    whole = replace(make_segment(), layers=layers, prefix_only=True, moves=())
    transitions = (
        *(Transition(2, numbers(6), numbers(0), numbers(0)), Transition(4, numbers(6), numbers(2), numbers(8))),
        Transition(7, numbers(0), numbers(8), numbers(8), head=2),
    )
    text = f"Look: image {DIGEST}."
    photo = make_segment(
        *(6,),
        media=(MEDIA,),
        axes=AXES,
        projector="ab max=4",
        pictures=(ImageFile(6, len(text) - 1, DATA),),
        fields=(),
        text=text,
    )
    return {
        "plain": make_segment(),
        "keys": replace(keys, tools=True, prefill=Prefill(8.125, 3, 2)),
        "whole": whole,
        "carried": replace(whole, carry=Carry.of(1, 0, transitions)),
        "photo": photo,
        "quantized": small(make_segment(k=32, v=64, kv="q8_0")),
    }


NAMES = ("plain", "keys", "whole", "carried", "photo", "quantized")


@pytest.mark.parametrize("name", NAMES)
def test_a_segment_comes_back_to_the_bit(tmp_path: Path, samples: Samples, name: str) -> None:
    """From memory, from the file when it is needed, and without its K/V; gguf-py reads the same tensors."""
    segment, path = samples[name], tmp_path / "a.gguf"
    digest = write_segment(path, segment, writer="me", created="2026-06-01T12:00:00Z")
    found, stored, seen = open_segment(path), open_stored(path), peek(path)
    assert same(found, segment) and found.nbytes == stored.nbytes == seen.nbytes == segment.nbytes
    assert same(seen, segment, "layers", "carry", "pictures")
    assert bool(seen.carry) == bool(segment.carry) and len(seen.pictures) == len(segment.pictures)
    with pytest.raises(ValueError, match="closed file"):
        _ = seen.layers[0]
    assert stored.layers[0].layer == 0  # reads the rows; the transitions are read later
    assert same(replace(stored, layers=tuple(stored.layers)), segment)
    of_the_file = (path, path.stat().st_size, digest, "2026-06-01T12:00:00Z", "me")
    assert all((s.path, s.file_size, s.checksum, s.created, s.writer) == of_the_file for s in (found, stored, seen))
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    names = {"attention": ("k", "v"), "indexer": ("indexer.k", "indexer.v"), "state": ("state.r", "state.s")}
    for rows in segment.layers:
        for kind, values in zip(names[rows.part], (rows.k, rows.v), strict=True):
            if values.size:
                assert tensors.pop(f"blk.{rows.layer}.{kind}").tobytes() == values.tobytes()
    assert tensors["notes.tokens"].tolist() == segment.tokens.tolist() and not any(".k" in name for name in tensors)


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9), st.integers(0, 9)),
    dtype=st.sampled_from(["f2", "f4"]),
    text=st.text(st.characters(codec="utf-8"), max_size=80),
    context=st.lists(st.integers(0, 2**31 - 1), max_size=5),
)
@settings(max_examples=15)
def test_any_shape_and_any_text_come_back(
    tmp_path_factory: Any, make_segment: MakeSegment, shape: tuple[int, ...], dtype: str, text: str, context: list[int]
) -> None:
    given = {"text": text, "description": text, "fields": (), "context": np.array(context, np.int32)}
    segment, path = make_segment(*shape, dtype, **given), tmp_path_factory.mktemp("c") / "a.gguf"
    write_segment(path, segment)
    assert same(open_segment(path), segment) and peek(path).stored_types == {"f2": "f16", "f4": "f32"}[dtype]


Change = dict[str, Any]  # keys (None: without it), and tensors as a shape, a type, an array or None


def write_changed(monkeypatch: pytest.MonkeyPatch, path: Path, segment: Segment, changes: Change) -> None:
    """Write a file with right checksums whose keys and tensors do not fit."""
    make_metadata, make_arrays = container.metadata, container._arrays
    tensors_too = {name for name in changes if name.startswith(("blk.", "notes."))}

    def keys(*arguments: Any) -> dict[str, str | int]:
        made = make_metadata(*arguments) | {key: changes[key] for key in {*changes} - tensors_too}
        return {key: value for key, value in made.items() if value is not None}

    def arrays(segment: Segment) -> dict[str, Any]:
        made = make_arrays(segment)
        for name in tensors_too:
            change, old = changes[name], made.pop(name, np.zeros(0, np.float32))
            if isinstance(change, tuple | np.ndarray):
                made[name] = np.zeros(change, old.dtype) if isinstance(change, tuple) else change
            elif change is not None:
                made[name] = old.astype(change)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(container, "metadata", keys)
        patch.setattr(container, "_arrays", arrays)
        write_segment(path, segment)


DEEP = "[" * 100_000
COSTS = [(-1, 1, 1), ("NaN", 1, 1), ("true", 1, 1), (1, 0, 1), (1, 1.5, 1)]
JSON = {  # values of a key that are no JSON, of another shape, of other types, or out of range
    "blocks": ("", "[]", "[1, 2]", "[0, 3]", "[0, 2, 1]", "[0, 1, 1]", "[0, 1.0]", "[false, 1]", '["0"]', "{}", "0", 0),
    "moves": ("no list", "[1]"),
    "prefill": ("[]", *('{{"seconds": {}, "tokens": {}, "threads": {}}}'.format(*odd) for odd in COSTS)),
    "batches": ("{}", "[[3]]", "[[1, 1, 1]]", "[[5, 0, 1]]", "[[5, 1, 1.0]]", "[[6, 1, 1], [-1, 1, 1]]"),
    "fields": ("{", "[1]", '[{"name": 1}]', '{"a": 1}', '["abc"]'),
    "media": ("[]", "[[1, 2]]"),
    "source.stamp": ("[1]", "[1, 2, true]"),
}  # fmt: skip
MOVED = [by * np.eye(18, dtype=np.int32)[place].reshape(6, 3) for place, by in ((15, 1), (8, 1), (4, -1), (6, 1))]
IMAGES: list[dict[str, Any]] = [{"last": 7}, {"last": 1}, {"positions": 5}, {"sha256": "12"}, {"first": -1}]
SPANS: list[dict[str, Any]] = [
    *({"value": "2"}, {"last": 4}, {"first": 3}, {"name": ""}, {"start": 8, "value": ""}, {"first": 0.5})
]
ODD = {"blk.0\n\x1b[2J": np.zeros(8, np.float32)}


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("whole", {"first": 1}, "notes.first does not fit"),  # rows begin at 0 or at the skill
        ("whole", {"first": "0"}, "notes.first does not fit"),
        ("whole", {"base": 3}, "notes.first does not fit"),  # the left context has another length
        ("whole", {"first": None}, "state of recurrent layers|one row a token"),
        ("whole", {"blk.0.k": (3, 2)}, "blk.0.k does not have one row a token"),  # the skill's rows alone
        ("whole", {"blk.1.indexer.k": (3, 3)}, "blk.1.indexer.k does not have one row a token"),
        ("whole", {"blk.0.k": None}, "layer 0 has no K rows"),
        ("whole", {"blk.2.state.r": (2, 6)}, "blk.2.state.r does not have one row of f32 a state"),
        ("whole", {"blk.4.state.s": np.float16}, "blk.4.state.s does not have one row of f32 a state"),
        ("whole", {"blk.4.state.p": (1, 8)}, "holds a tensor 'blk.4.state.p'"),
        ("whole", {"blocks": "[0, 1]"}, "its blocks do not fit its tokens"),  # a segment with its left context has none
        ("carried", {"carry.seam": None}, "notes.carry does not fit its tokens"),
        ("carried", {"carry.tail": 2}, "notes.carry does not fit its tokens"),
        ("carried", {"carry.heads": None}, "notes.carry does not fit its tokens"),
        ("carried", {"carry.heads": '{"7": 0}'}, "does not hold the sizes of heads"),
        ("carried", {f"blk.{n}.state.{kind}": None for n in (2, 4, 7) for kind in "rs"}, "and holds none"),
        ("plain", {"base": (1 << 31) - 3}, f"notes.base is {(1 << 31) - 3}"),  # llama.cpp would wrap it around
        ("plain", {"notes.tokens": None, "notes.context": None}, "it has no tokens"),
        ("plain", {"notes.tokens": np.full(3, -1, np.int32)}, "negative token id"),
        ("plain", {"kv": "q4_0"}, "notes.kv is 'q4_0'"),
        ("plain", {"kv": "q8_0"}, "not kept as notes.kv"),
        ("quantized", {"kv": None}, "not kept as notes.kv"),  # a compile never goes on from rounded rows
        ("plain", {"identity.rope": None}, "identity.rope is missing"),
        ("plain", ODD, r"it holds a tensor 'blk\.0\\n\\x1b\[2J' that segments do not have"),
        *(("plain", {key: wrong}, "damaged or not") for key, values in JSON.items() for wrong in (*values, DEEP)),
        ("photo", {"notes.axes": None}, "share positions"),
        ("photo", {"notes.axes": (5, 3)}, "three numbers"),
        ("photo", {"notes.pictures": None}, "it has no notes.pictures"),
        ("photo", {"notes.pictures": np.zeros(8, np.int32)}, "the images that its rows are of"),
        ("photo", {"pictures.places": "[[6, 99, 0, 31]]"}, "does not fit its text"),
        ("photo", {"pictures.places": "[[0, 5, 0, 31]]"}, "the images that its rows are of"),
        ("photo", {"pictures.places": "[[6, 76, 0, 31], [6, 76, 0, 31]]"}, "does not fit its text"),
        *(("photo", {"axes": AXES + moved}, "axes does not fit") for moved in MOVED),
        *(("photo", {"media": (replace(MEDIA, **odd),)}, "images do not fit") for odd in IMAGES),
        ("photo", {"media": (MEDIA, replace(MEDIA, first=2))}, "images do not fit"),
        *(("plain", {"fields": (replace(SPAN, **odd),)}, r"fields (do not fit|cannot be read)") for odd in SPANS),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch, name: str, changes: Change, problem: str
) -> None:
    """Right checksums do not make wrong keys, positions, rows or states right; one line has the reason."""
    parts = {
        key: value
        for key, value in changes.items()
        if key in ("axes", "media", "fields") and not isinstance(value, str)
    }
    rest = {key: changes[key] for key in changes.keys() - parts}
    write_changed(monkeypatch, tmp_path / "a.gguf", replace(samples[name], **parts), rest)
    with pytest.raises(SegmentError, match=problem) as caught:
        open_segment(tmp_path / "a.gguf")
    assert "\n" not in str(caught.value)


def test_equal_images_are_kept_once(tmp_path: Path, samples: Samples) -> None:
    """Three places, two files; one that is left out is missed."""
    text, pictures, media = "", [], []
    for number, data in enumerate((DATA, b"another picture's", DATA)):
        digest = sha256(data).hexdigest()
        pictures.append(ImageFile(len(text), len(text) + 64, data))
        media.append(Media(2 * number, 2 * number + 1, 1, digest, 8, 8))
        text += digest + ". "
    path = tmp_path / "photo.gguf"
    segment = replace(samples["photo"], text=text, pictures=tuple(pictures), media=tuple(media), axes=None)
    write_segment(path, segment)
    assert same(open_segment(path), segment)
    assert path.read_bytes().count(DATA) == path.read_bytes().count(b"another picture's") == 1
    write_segment(path, replace(segment, pictures=(pictures[0], pictures[2])))
    with pytest.raises(SegmentError, match="the images"):
        open_segment(path)


def test_other_files_are_told_apart(tmp_path: Path, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, an empty file, a text, a folder, none, a later format; strings and counts beyond the file."""
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
    monkeypatch.setattr(metadata, "FORMAT", 3)
    write_segment(tmp_path / "later", samples["quantized"])
    data = (tmp_path / "later").read_bytes()  # and with a type of tensors that is not known here
    (tmp_path / "later").write_bytes(data.replace(struct.pack("<QQI", 32, 3, 8), struct.pack("<QQI", 32, 3, 20)))
    with pytest.raises(NewerError, match="segment format 3"):
        peek(tmp_path / "later")


def test_what_does_not_fit_is_not_written(tmp_path: Path, make_segment: MakeSegment, samples: Samples) -> None:
    layers = [(part(2, "state", *odd),) for odd in ((2, 6, 0, "f4"), (1, 6, 0, "f2"))]
    for wrong in (make_segment(tokens=np.zeros(9, np.int32)), *(replace(samples["whole"], layers=x) for x in layers)):
        with pytest.raises(SegmentError, match="rows that do not fit"):
            write_segment(tmp_path / "a.gguf", wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Wherever the disk ends, or at Ctrl-C: no temporary file, and the old segment; one line has the reason."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    path, larger = tmp_path / "a.gguf", make_segment(n=40, k=64, v=64)
    write_segment(path, larger)
    size = path.stat().st_size
    write_segment(path, make_segment())
    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", interrupted)
        write_segment(path, larger)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before
    for nbytes in (0, 100, 1000, size // 2, size - 5000, size - 4096, size - 33, size - 1):
        with small_files(nbytes), pytest.raises(UnwritableError) as caught:
            write_segment(path, larger)
        assert str(caught.value) == f"cannot write {path}: File too large. Nothing was changed"
        assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before
    with small_files(size):
        write_segment(path, larger)
    assert same(open_segment(path), larger)


def test_a_file_that_others_change_meanwhile(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Truncated or written into, opened or later: K/V stays as it was checked, or one line has the error."""
    path = tmp_path / "returns.gguf"
    write_segment(path, make_segment(4000, layers=2, k=64, v=64))
    whole, segment, done = path.read_bytes(), open_segment(path), threading.Event()
    rows = bits(tuple(segment.layers))

    def cut_and_mend() -> None:
        while not done.is_set():
            os.truncate(path, len(whole) // 2)
            with path.open("r+b") as file:
                file.write(whole)

    for changed in (whole[:100], whole[: len(whole) // 2] + bytes(len(whole) // 2)):
        path.write_bytes(changed)
        assert bits(tuple(segment.layers)) == rows
    path.write_bytes(whole)
    other = threading.Thread(target=cut_and_mend)
    other.start()
    try:
        for _ in range(25):
            try:
                assert bits(tuple(open_segment(path).layers)) == rows
                assert len(peek(path)) == len(segment)
            except SegmentError as error:
                assert "\n" not in str(error)
    finally:
        done.set()
        other.join()


def test_a_long_head_is_read_whole(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Texts around the size of the first read."""
    for length in (FIRST - 4000, FIRST, 20 * FIRST):
        segment = make_segment(3, text="date: 1é" + "x" * length)
        write_segment(tmp_path / "a.gguf", segment)
        assert same(open_segment(tmp_path / "a.gguf"), segment) and peek(tmp_path / "a.gguf").text == segment.text


def test_rows_that_do_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_segment: MakeSegment
) -> None:
    """One line, as for all that cannot be read now: the file may be as good as ever."""
    write_segment(tmp_path / "returns.gguf", make_segment(n=40))

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(container._SegmentFile, "array", full)
    with pytest.raises(SegmentError, match="do not fit into memory"):
        open_segment(tmp_path / "returns.gguf")
