"""Tests of segment files: they are read as they were written, and damaged ones are refused."""

from __future__ import annotations

import stat
import struct
import subprocess
import sys
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

from notes_cli.engine.segment import Carry, FieldSpan, LayerRows, Prefill, Segment, Transition
from notes_cli.errors import SegmentError, UnwritableError
from notes_cli.library import container, info
from notes_cli.library.container import FIRST, open_segment, open_stored, peek, write_segment

from ..limits import small_files

MakeSegment = Callable[..., Segment]


def same(a: Segment, b: Segment) -> bool:
    """Equal in everything, to the bit."""
    plain = ("name", "description", "text", "base", "prefix_only", "fields", "identity", "blocks", "source")
    arrays: list[tuple[NDArray[Any], NDArray[Any]]] = [(a.tokens, b.tokens), (a.context, b.context)]
    for left, right in zip(a.layers, b.layers, strict=True):
        arrays += [(left.k, right.k), (left.v, right.v)]
    arrays += [(a.influence[name], b.influence[name]) for name in a.influence]
    return (
        all(getattr(a, part) == getattr(b, part) for part in plain)
        and list(a.influence) == list(b.influence)
        and [(rows.layer, rows.part) for rows in a.layers] == [(rows.layer, rows.part) for rows in b.layers]
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
    """Any shape and any text comes back bit for bit; the info agrees."""
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


def part(layer: int, part: str, n: int, k: int, v: int, dtype: str = "f2") -> LayerRows:
    """Random rows of one part of a layer."""
    random = np.random.default_rng(n)
    return LayerRows(layer, random.normal(size=(n, k)).astype(dtype), random.normal(size=(n, v)).astype(dtype), part)


@pytest.fixture
def whole(make_segment: MakeSegment) -> Segment:
    """3 tokens after 2, kept from position 0 on: attention, attention with an indexer, and two kinds of states."""
    layers = (
        part(0, "attention", 5, 2, 3),
        part(1, "attention", 5, 4, 0),
        part(1, "indexer", 5, 3, 0),
        part(2, "state", 1, 6, 0, "f4"),
        part(4, "state", 1, 6, 8, "f4"),
        part(7, "state", 1, 0, 8, "f4"),
    )
    return replace(make_segment(), layers=layers, prefix_only=True)


def test_a_whole_segment_comes_back(tmp_path: Path, whole: Segment) -> None:
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


def test_a_whole_segment_without_a_left_context(tmp_path: Path, whole: Segment) -> None:
    """Compiled at position 0 there are no rows before the skill, and it is kept whole all the same."""
    layers = tuple(replace(rows, k=rows.k[-3:], v=rows.v[-3:]) for rows in whole.layers)
    segment = replace(whole, base=0, context=np.empty(0, np.int32), layers=layers)
    write_segment(tmp_path / "a.gguf", segment)
    assert same(open_segment(tmp_path / "a.gguf"), segment)
    plain = replace(segment, prefix_only=False, layers=layers[:3])
    write_segment(tmp_path / "a.gguf", plain)
    assert same(open_segment(tmp_path / "a.gguf"), plain)


@pytest.fixture
def carried(whole: Segment) -> Segment:
    """Its first token is decoded where it is; a diagonal for a layer, a matrix for another, a convolution alone."""
    random = np.random.default_rng(7)

    def numbers(n: int) -> NDArray[np.float32]:
        return random.normal(size=n).astype("f4")

    transitions = (
        Transition(2, numbers(6), numbers(0), numbers(0)),
        Transition(4, numbers(6), numbers(2), numbers(8)),
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


def test_a_state_that_is_carried_asks_for_a_newer_format(tmp_path: Path, carried: Segment, whole: Segment) -> None:
    """An older version would take it for damaged; one that has nothing of it stays as it was."""
    for segment, version in ((carried, 2), (whole, 1)):
        write_segment(tmp_path / "a.gguf", segment)
        field = gguf.GGUFReader(tmp_path / "a.gguf").fields["notes.format"]
        assert field.contents() == version


def test_a_damaged_transition_is_said(tmp_path: Path, carried: Segment) -> None:
    """A flipped bit in the transitions is reported by every reader of them, and by no other."""
    path = tmp_path / "a.gguf"
    write_segment(path, carried)
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == "blk.7.carry.a")
    with path.open("rb+") as file:
        file.seek(tensor.data_offset)
        byte = file.read(1)[0]
        file.seek(tensor.data_offset)
        file.write(bytes([byte ^ 1]))
    stored = open_stored(path)
    assert stored.layers[0].layer == 0
    assert stored.carry is not None
    with pytest.raises(SegmentError, match=r"checksum of 'blk\.7\.carry\.a' is wrong"):
        stored.carry.load()
    with pytest.raises(SegmentError, match=r"checksum of 'blk\.7\.carry\.a' is wrong"):
        open_segment(path)


def test_states_alone(tmp_path: Path, whole: Segment) -> None:
    """A model of recurrent layers only has no rows at all."""
    segment = replace(whole, layers=whole.layers[3:])
    write_segment(tmp_path / "a.gguf", segment)
    assert same(open_segment(tmp_path / "a.gguf"), segment)
    info = peek(tmp_path / "a.gguf")
    assert (info.layers, info.dtype, info.states) == (0, "", 3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first": 1}, "notes.first does not fit"),  # rows begin at 0 or at the skill
        ({"first": "0"}, "notes.first does not fit"),
        ({"base": 3}, "notes.first does not fit"),  # other than the left context is long
        ({"base": 1}, "notes.first does not fit"),
        ({"first": None}, "holds the state of recurrent layers, but not all rows before it"),
        ({"blk.0.k": (3, 2)}, "blk.0.k does not have one row a token"),  # the skill's rows alone
        ({"blk.0.v": (6, 3)}, "blk.0.v does not have one row a token"),
        ({"blk.1.indexer.k": (3, 3)}, "blk.1.indexer.k does not have one row a token"),
        ({"blk.1.indexer.k": None}, None),  # the model decides which layers must exist
        ({"blk.1.k": None}, None),
        ({"blk.0.k": None}, "layer 0 has no K rows"),
        ({"blk.2.state.r": (2, 6)}, "blk.2.state.r is not one row of f32"),
        ({"blk.2.state.r": (6,)}, "blk.2.state.r is not one row of f32"),
        ({"blk.4.state.s": np.float16}, "blk.4.state.s is not one row of f32"),
        ({"blk.4.state.p": (1, 8)}, "holds a tensor 'blk.4.state.p'"),
        ({"blk.1.indexer": (5, 3)}, "holds a tensor 'blk.1.indexer'"),
        ({"blocks": "[0, 1]"}, "its blocks do not fit its tokens"),  # a segment with its left context has none
        ({"moves": "[1]"}, "notes.moves does not fit its blocks"),
        ({"moves": "no list"}, "notes.moves cannot be read"),
    ],
)
def test_a_whole_segment_that_does_not_fit(
    tmp_path: Path, whole: Segment, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str | None
) -> None:
    """Sound checksums do not make wrong positions, rows or states right."""
    make_metadata, make_tensors = container.metadata, container._tensors

    def metadata(*arguments: Any) -> dict[str, str | int]:
        made = make_metadata(*arguments) | {key: value for key, value in changes.items() if "blk" not in key}
        return {key: value for key, value in made.items() if value is not None}

    def tensors(segment: Segment) -> dict[str, NDArray[Any]]:
        made = make_tensors(segment)
        for name, change in changes.items():
            if name.startswith("blk"):
                old = made.pop(name, np.zeros(0, np.float32))
                if isinstance(change, tuple):
                    made[name] = np.zeros(change, old.dtype)
                elif change is not None:
                    made[name] = old.astype(change)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(container, "metadata", metadata)
        patch.setattr(container, "_tensors", tensors)
        write_segment(tmp_path / "a.gguf", whole)
    if says is None:
        open_segment(tmp_path / "a.gguf")
    else:
        with pytest.raises(SegmentError, match=says):
            open_segment(tmp_path / "a.gguf")


@pytest.mark.parametrize("base", [(1 << 31) - 3, (1 << 32) - 1])
def test_positions_that_no_token_has(tmp_path: Path, make_segment: MakeSegment, base: int) -> None:
    """A position that llama.cpp would wrap around is refused, with a valid checksum or without."""
    write_segment(tmp_path / "a.gguf", make_segment(base=base))
    for read in (open_segment, peek):
        with pytest.raises(SegmentError, match=rf"notes\.base is {base}"):
            read(tmp_path / "a.gguf")
    write_segment(tmp_path / "a.gguf", make_segment(base=(1 << 31) - 4))
    assert open_segment(tmp_path / "a.gguf").base == (1 << 31) - 4


@pytest.mark.parametrize("blocks", [(), (0,), (0, 2), (0, 1, 2)])
def test_blocks_come_back(tmp_path: Path, make_segment: MakeSegment, blocks: tuple[int, ...]) -> None:
    """Starts of blocks come back in the segment and its info; a file without the key has one block."""
    segment = make_segment(blocks=blocks)
    write_segment(tmp_path / "a.gguf", segment)
    assert same(open_segment(tmp_path / "a.gguf"), segment)
    assert peek(tmp_path / "a.gguf").blocks == blocks
    assert ("notes.blocks" in gguf.GGUFReader(tmp_path / "a.gguf").fields) == bool(blocks)


BAD = ["", "[]", "x", "[1, 2]", "[0, 3]", "[0, 2, 1]", "[0, 1, 1]", "[0, 1.0]", "[false, 1]", '["0"]', "{}", "0"]


@pytest.mark.parametrize("blocks", [*BAD, "[0, [1]]", "[" * 100_000, 0], ids=lambda given: str(given)[:9])
def test_blocks_that_do_not_fit(
    tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch, blocks: object
) -> None:
    """Only token numbers from 0 on that ascend and exist are blocks."""
    make = container.metadata
    monkeypatch.setattr(container, "metadata", lambda *arguments: {**make(*arguments), "blocks": blocks})
    write_segment(tmp_path / "a.gguf", make_segment())
    for read in (open_segment, peek):
        with pytest.raises(SegmentError, match=r"its blocks (cannot be read|do not fit its tokens)"):
            read(tmp_path / "a.gguf")


@pytest.mark.parametrize("prefill", [None, Prefill(8.125, 3, 2)])
def test_the_time_of_a_compile_comes_back(tmp_path: Path, make_segment: MakeSegment, prefill: Prefill | None) -> None:
    """The value comes back in the segment and its info; it is unknown in a file without the key."""
    write_segment(tmp_path / "a.gguf", make_segment(prefill=prefill))
    assert open_segment(tmp_path / "a.gguf").prefill == peek(tmp_path / "a.gguf").prefill == prefill
    assert ("notes.prefill" in gguf.GGUFReader(tmp_path / "a.gguf").fields) == (prefill is not None)


NO_TIMES = ['{"seconds": NaN}', *(f'{{"seconds": {a}, "tokens": {b}, "threads": {c}}}' for a, b, c in (
    *((-1, 1, 1), ("NaN", 1, 1), ("Infinity", 1, 1), ("1e300", 1, 1), ("true", 1, 1), ('"1"', 1, 1)),
    *((1, 0, 1), (1, 1.5, 1), (1, 1, 0), (1, 1, "null"), (1, 2**31, 1)),
))]  # fmt: skip


@pytest.mark.parametrize("prefill", ["", "[]", "1", "[" * 100_000, *NO_TIMES], ids=lambda given: given[:40])
def test_a_time_that_is_none(
    tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch, prefill: str
) -> None:
    """Seconds of prefill, which answers report as saved, must be a number."""
    make = container.metadata
    monkeypatch.setattr(container, "metadata", lambda *arguments: {**make(*arguments), "prefill": prefill})
    write_segment(tmp_path / "a.gguf", make_segment())
    for read in (open_segment, peek):
        with pytest.raises(SegmentError, match=r"notes\.prefill (cannot be read|does not hold)"):
            read(tmp_path / "a.gguf")


@pytest.fixture
def influenced(make_segment: MakeSegment) -> Segment:
    """3 tokens with two fields, one of which is in two places, and the influence of both."""
    fields = (FieldSpan("b", "d", 0, 1, 0, 1), FieldSpan("a", "1é", 6, 8, 2, 3), FieldSpan("b", "d", 0, 1, 0, 1))
    found = {"b": np.array([0, 0.5, 0.25], np.float32), "a": np.array([0, 0, 1e-3], np.float32)}
    return make_segment(fields=fields, influence=found)


def test_influence_comes_back(tmp_path: Path, influenced: Segment) -> None:
    """Influence has one row per field in the order of the text, whatever the order of the input; the info reports
    it."""
    path = tmp_path / "a.gguf"
    write_segment(path, influenced)
    assert same(open_segment(path), influenced) and peek(path).influence
    assert list(open_segment(path).influence) == ["b", "a"]
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "notes.influence")
    assert tensor.data.shape == (2, 3) and tensor.data[0].tolist() == [0, 0.5, 0.25]
    write_segment(tmp_path / "b.gguf", replace(influenced, influence=dict(reversed(influenced.influence.items()))))
    assert same(open_segment(tmp_path / "b.gguf"), influenced)
    write_segment(path, replace(influenced, influence={}))
    assert open_segment(path).influence == {} and not peek(path).influence


@pytest.mark.parametrize(
    ("shape", "kind"), [((1, 3), "f4"), ((2, 2), "f4"), ((3, 2), "f4"), ((6,), "f4"), ((2, 3, 1), "f4"), ((2, 3), "f2")]
)
def test_influence_that_does_not_fit(
    tmp_path: Path, influenced: Segment, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], kind: str
) -> None:
    """Sound checksums do not make another shape or type right."""
    make = container._tensors
    wrong = np.zeros(shape, kind)
    with monkeypatch.context() as patch:
        patch.setattr(container, "_tensors", lambda segment: make(segment) | {"notes.influence": wrong})
        write_segment(tmp_path / "a.gguf", influenced)
    with pytest.raises(SegmentError, match=r"notes\.influence"):
        open_segment(tmp_path / "a.gguf")


def test_influence_without_fields(tmp_path: Path, influenced: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that belongs to no field is refused."""
    make = container._tensors
    with monkeypatch.context() as patch:
        patch.setattr(container, "_tensors", lambda s: make(s) | {"notes.influence": np.zeros((1, 3), np.float32)})
        write_segment(tmp_path / "a.gguf", replace(influenced, fields=(), influence={}))
    with pytest.raises(SegmentError, match="one row a field"):
        open_segment(tmp_path / "a.gguf")


def test_states_that_do_not_fit_are_not_written(tmp_path: Path, whole: Segment) -> None:
    """Two states of a layer, or one in f16, are refused as a caller's mistake."""
    for wrong in (part(2, "state", 2, 6, 0, "f4"), part(2, "state", 1, 6, 0)):
        with pytest.raises(SegmentError, match=r"layer 2.* state\.r"):
            write_segment(tmp_path / "a.gguf", replace(whole, layers=(wrong,)))
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("which", ["moved", "whole", "influenced"])
def test_every_flipped_byte_is_found(tmp_path: Path, request: pytest.FixtureRequest, which: str) -> None:
    """No byte of the file is unchecked: head, padding, tensors, checksums themselves. Of larger ones, a sample."""
    path = tmp_path / "a.gguf"
    segment = request.getfixturevalue("make_segment")() if which == "moved" else request.getfixturevalue(which)
    write_segment(path, replace(segment, description=""))
    data = path.read_bytes()
    missed = []
    for at in range(0, len(data), 1 if which == "moved" else 23):
        for flip in (0xFF, 1 << at % 8, 0x20):
            path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            try:
                open_segment(path)
            except SegmentError as error:
                assert "\n" not in str(error) and str(path) in str(error)
            else:
                missed.append(at)
    assert not missed


def test_a_file_without_lists(tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tokens nor a left context: refused by `ls`, which reads no more than these, as by all others."""
    make = container._tensors
    monkeypatch.setattr(
        container,
        "_tensors",
        lambda segment: {name: rows for name, rows in make(segment).items() if name not in container.LISTS},
    )
    write_segment(tmp_path / "a.gguf", make_segment())
    for read in (open_segment, peek):
        with pytest.raises(SegmentError, match="it has no tokens"):
            read(tmp_path / "a.gguf")


def test_a_name_in_a_message_is_one_line(
    tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message with any tensor name stays one printable line."""
    make = container._tensors
    odd = {"blk.0\n\x1b[2J": np.zeros(8, np.float32)}
    monkeypatch.setattr(container, "_tensors", lambda segment: make(segment) | odd)
    write_segment(tmp_path / "a.gguf", make_segment())
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(data[:-1] + b"x")
    with pytest.raises(SegmentError, match=r"it holds a tensor 'blk\.0\\n\\x1b\[2J' that segments do not have"):
        open_segment(tmp_path / "a.gguf")


def test_every_truncation_is_found(tmp_path: Path, make_segment: MakeSegment) -> None:
    """A file cut short at any length, or with bytes after its end, is refused; so is its info."""
    path = tmp_path / "a.gguf"
    write_segment(path, make_segment())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        for read in (open_segment, peek):
            with pytest.raises(SegmentError):
                read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(SegmentError, match="its header describes"):
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
    """The message names the kind of file: a model, an empty file, a text, a folder, none."""
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
        ("text", "it is not a GGUF file"),
        ("", "cannot read"),
        ("none", "no such segment"),
    ]:
        with pytest.raises(SegmentError, match=message):
            open_segment(tmp_path / name)


def test_a_newer_format_is_said(tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version reports a newer format, not a damaged file."""
    with monkeypatch.context() as patch:
        patch.setattr(info, "PLAIN", 3)
        write_segment(tmp_path / "a.gguf", make_segment())
    with pytest.raises(SegmentError, match="segment format 3"):
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
    """Whatever is in the JSON, the answer is one clear error."""
    with monkeypatch.context() as patch:
        patch.setattr("notes_cli.library.info.json.dumps", lambda *_, **__: encoded)
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


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Wherever the disk ends: one line with the reason, no temporary file, and the old segment."""
    path, larger = tmp_path / "a.gguf", make_segment(n=40, k=64, v=64)
    write_segment(path, larger)
    size = path.stat().st_size
    write_segment(path, make_segment())
    before = path.read_bytes()
    for nbytes in (0, 100, 1000, size // 2, size - 5000, size - 4096, size - 33, size - 1):
        with small_files(nbytes), pytest.raises(UnwritableError) as caught:
            write_segment(path, larger)
        assert str(caught.value) == f"cannot write {path}: File too large. Nothing was changed"
        assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before
    with small_files(size):
        write_segment(path, larger)
    assert open_segment(path).tokens.tolist() == larger.tokens.tolist()


MEANWHILE = """
import os, sys, threading
from pathlib import Path
from notes_cli.errors import SegmentError
from notes_cli.library.container import open_segment, peek
path, how = Path(sys.argv[1]), sys.argv[2]
before = path.read_bytes()

def bytes_of(segment):
    return b"".join(layer.k.tobytes() + layer.v.tobytes() for layer in segment.layers)

segment = open_segment(path)
rows = bytes_of(segment)
if how == "cut off":
    os.truncate(path, 100)
else:
    with path.open("r+b") as file:
        file.seek(-len(rows) // 2, os.SEEK_END)
        file.write(bytes(len(rows) // 2))
assert bytes_of(segment) == rows  # mapped rows: a bus error, or zeros
with path.open("r+b") as file:
    file.write(before)

def disturb():
    while not done:
        os.truncate(path, len(before) // 2)
        with path.open("r+b") as file:
            file.write(before)

done = False
other = threading.Thread(target=disturb)
other.start()
said = set()
for _ in range(60):
    try:
        assert bytes_of(open_segment(path)) == rows
        assert len(peek(path).tokens) == len(segment)
    except SegmentError as error:
        said.add(str(error).count("\\n"))
done = True
other.join()
print(said or {0})
"""


@pytest.mark.parametrize("how", ["cut off", "written into"])
def test_a_file_that_others_change_meanwhile(tmp_path: Path, make_segment: MakeSegment, how: str) -> None:
    """A file truncated or rewritten while it is opened or later: the K/V stays as it was checked, or one line has the
    error. Runs in a process of its own, which a bus error would end."""
    path = tmp_path / "returns.gguf"
    write_segment(path, make_segment(4000, layers=2, k=64, v=64))
    done = subprocess.run([sys.executable, "-c", MEANWHILE, str(path), how], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "{0}"), done.stderr[-500:]


def test_a_long_head_is_read_whole(tmp_path: Path, make_segment: MakeSegment) -> None:
    """Texts around the size of the first read, to a byte: the same segment and info come back."""
    for length in (FIRST - 4000, FIRST, 20 * FIRST):
        path = tmp_path / f"{length}.gguf"
        segment = make_segment(3, text="date: 1é" + "x" * length)
        write_segment(path, segment)
        assert open_segment(path).text == peek(path).text == segment.text
        assert (open_segment(path).layers[0].v == segment.layers[0].v).all()


def test_a_card_costs_no_rows(tmp_path: Path, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ls` of large segments reads their heads alone."""
    path = tmp_path / "returns.gguf"
    write_segment(path, make_segment(4000, layers=8, k=64, v=64))
    asked: list[int] = []
    whole = container._read_on
    monkeypatch.setattr(container, "_read_on", lambda file, data, size: asked.append(size) or whole(file, data, size))
    peek(path)
    assert sum(asked) <= FIRST < path.stat().st_size


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
