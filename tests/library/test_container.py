"""The container: what is written is read, and what is damaged is refused."""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from notes_cli.engine.segment import FieldSpan, Segment
from notes_cli.errors import SegmentError
from notes_cli.library import card, container
from notes_cli.library.container import open_segment, peek, write_segment

MakeSegment = Callable[..., Segment]


def same(a: Segment, b: Segment) -> bool:
    """Equal in everything, to the bit."""
    plain = ("name", "description", "text", "base", "fields", "identity")
    arrays: list[tuple[NDArray[Any], NDArray[Any]]] = [(a.tokens, b.tokens), (a.context, b.context)]
    for left, right in zip(a.layers, b.layers, strict=True):
        arrays += [(left.k, right.k), (left.v, right.v)]
    return (
        all(getattr(a, part) == getattr(b, part) for part in plain)
        and [rows.layer for rows in a.layers] == [rows.layer for rows in b.layers]
        and all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in arrays)
    )


@given(
    n=st.integers(1, 40),
    layers=st.integers(1, 12),
    k=st.integers(1, 9),
    v=st.integers(0, 9),
    dtype=st.sampled_from(["f2", "f4"]),
    text=st.text(st.characters(codec="utf-8"), max_size=80),
    context=st.lists(st.integers(0, 2**31 - 1), max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    make_segment: MakeSegment,
    n: int,
    layers: int,
    k: int,
    v: int,
    dtype: str,
    text: str,
    context: list[int],
) -> None:
    """Any shape and any text comes back bit for bit; the card agrees."""
    segment = make_segment(
        n, layers, k, v, dtype, text=text, description=text, fields=(), context=np.array(context, np.int32)
    )
    path = tmp_path_factory.mktemp("c") / "a.gguf"
    write_segment(path, segment)
    assert same(open_segment(path), segment)
    seen = peek(path)
    assert (seen.text, seen.base, seen.layers, seen.dtype) == (
        text,
        2,
        layers,
        {"f2": "f16", "f4": "f32"}[dtype],
    )
    assert seen.nbytes == path.stat().st_size


def test_layers_need_not_be_all(tmp_path: Path, make_segment: MakeSegment) -> None:
    """A model may keep K/V in some of its layers only."""
    segment = make_segment(layers=4)
    segment = replace(segment, layers=(segment.layers[1], segment.layers[3]))
    write_segment(tmp_path / "a.gguf", segment)
    assert same(open_segment(tmp_path / "a.gguf"), segment)


def test_rows_are_views_of_the_file(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Nothing is copied on load, nothing can be written to, and the file may be replaced meanwhile."""
    write_segment(tmp_path / "a.gguf", make_segment())
    segment = open_segment(tmp_path / "a.gguf")
    rows = segment.layers[0].k
    assert not rows.flags.owndata and not rows.flags.writeable
    kept = rows.copy()
    write_segment(tmp_path / "a.gguf", make_segment(n=5))
    assert np.array_equal(rows, kept)


def test_the_file_is_private_and_alone(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Mode 0600, for it holds the text; no temporary file stays."""
    write_segment(tmp_path / "new/a.gguf", make_segment())
    assert stat.S_IMODE((tmp_path / "new/a.gguf").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.gguf"]


def test_the_gguf_package_reads_it(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Users can look into the file with gguf-dump."""
    segment = make_segment(n=5, layers=2)
    write_segment(tmp_path / "a.gguf", segment, writer="notes 0", created="2026-06-01T00:00:00Z")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.architecture"].contents() == "notes"
    assert reader.fields["notes.text"].contents() == segment.text
    assert reader.fields["notes.identity.kv_type"].contents() == "f16/f16"
    assert [tensor.name for tensor in reader.tensors][:3] == ["notes.tokens", "notes.context", "blk.0.k"]
    assert np.array_equal(reader.tensors[2].data, segment.layers[0].k)


def test_every_flipped_byte_is_found(tmp_path: Path, make_segment: MakeSegment) -> None:
    """No byte of the file is unchecked: head, padding, tensors, checksums themselves."""
    path = tmp_path / "a.gguf"
    write_segment(path, make_segment(description=""))
    whole = path.read_bytes()
    missed = []
    for at in range(len(whole)):
        for flip in (0xFF, 1 << at % 8, 0x20):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                open_segment(path)
            except SegmentError as error:
                assert "\n" not in str(error) and str(path) in str(error)
            else:
                missed.append(at)
    assert not missed


def test_every_truncation_is_found(tmp_path: Path, make_segment: MakeSegment) -> None:
    """A file cut short at any length, or with bytes after its end, is refused; so is its card."""
    path = tmp_path / "a.gguf"
    write_segment(path, make_segment())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        for read in (open_segment, peek):
            with pytest.raises(SegmentError):
                read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(SegmentError, match="its head says"):
        open_segment(path)


@given(
    data=st.binary(max_size=300),
    start=st.sampled_from([b"", b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0\x01" + bytes(7)]),
)
@settings(deadline=None)
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, start: bytes, data: bytes) -> None:
    """Garbage of any kind gives one clear error."""
    path = tmp_path_factory.mktemp("g") / "a.gguf"
    path.write_bytes(start + data)
    with pytest.raises(SegmentError):
        open_segment(path)


def test_a_huge_length_allocates_nothing(tmp_path: Path) -> None:
    """A string of 2^62 bytes is refused by the size of the file."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(64))
    with pytest.raises(SegmentError, match="ends too early"):
        open_segment(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + bytes(64))
    with pytest.raises(SegmentError, match="too many entries"):
        open_segment(path)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    """A model, an empty file, a text, a folder, nothing: each message says what it is."""
    model = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(model, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["token"] * 50)
    writer.add_tensor("w", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello there")
    for name, message in [
        ("model.gguf", "is a GGUF file but not a compiled segment"),
        ("empty", "damaged or not a segment"),
        ("text", "does not begin as GGUF does"),
        ("", "cannot read"),
        ("none", "no such segment"),
    ]:
        with pytest.raises(SegmentError, match=message):
            open_segment(tmp_path / name)


def test_a_newer_format_is_said(
    tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old notes says that it is old, not that the file is broken."""
    with monkeypatch.context() as patch:
        patch.setattr(card, "FORMAT", 2)
        write_segment(tmp_path / "a.gguf", make_segment())
    with pytest.raises(SegmentError, match="segment format 2, this notes reads 1"):
        open_segment(tmp_path / "a.gguf")


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
    """A sound checksum does not make a wrong span right."""
    write_segment(tmp_path / "a.gguf", make_segment(fields=(span,)))
    with pytest.raises(SegmentError, match="fields do not fit"):
        peek(tmp_path / "a.gguf")


@pytest.mark.parametrize("encoded", ["{", "[1]", '[{"name": 1}]', "[" * 100_000, '{"a": 1}', '["abc"]'])
def test_fields_that_cannot_be_read(
    tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch, encoded: str
) -> None:
    """Whatever stands in the JSON, the answer is one clear error."""
    with monkeypatch.context() as patch:
        patch.setattr("notes_cli.library.card.json.dumps", lambda *_, **__: encoded)
        write_segment(tmp_path / "a.gguf", make_segment())
    with pytest.raises(SegmentError):
        peek(tmp_path / "a.gguf")


def test_rows_must_fit_the_tokens(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Neither written nor read otherwise."""
    with pytest.raises(SegmentError, match="rows that do not fit"):
        write_segment(tmp_path / "a.gguf", make_segment(tokens=np.zeros(9, np.int32)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SegmentError, match="no tokens"):
        write_segment(tmp_path / "b.gguf", make_segment(n=0, fields=()))
        open_segment(tmp_path / "b.gguf")
    with pytest.raises(SegmentError, match="negative token id"):
        write_segment(tmp_path / "c.gguf", make_segment(tokens=np.full(3, -1, np.int32)))
        open_segment(tmp_path / "c.gguf")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A full disk or an interrupt: the old segment stays, nothing else does."""
    path = tmp_path / "a.gguf"
    write_segment(path, make_segment())
    before = path.read_bytes()

    def fail(_: Path) -> None:
        raise error

    monkeypatch.setattr(container, "_seal", fail)
    with pytest.raises((SegmentError, KeyboardInterrupt)) as caught:
        write_segment(path, make_segment(n=4))
    if isinstance(error, OSError):
        assert "No space left on device. Nothing was changed" in str(caught.value)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["a.gguf"]
