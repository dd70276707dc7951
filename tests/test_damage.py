"""Any change of a file of ours: it is read as it was written, or refused in one line that names it.

Bytes are flipped and lost anywhere, the file ends anywhere, bytes are added or doubled, a part is that of another file.
A model's head has no checksum: a change there is another head, or refused.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.header import read_header
from notes_cli.errors import NotesError
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.sessions.archive import load
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import Part

from .conftest import MakeModel, MakeSegment
from .library.test_container import NAMES, Samples, bits, same, samples
from .sessions.snapshots import HEADER, asked
from .sessions.test_archive import archived, members, packed

__all__ = ["samples"]  # a fixture


def damaged(data: bytes, count: int) -> Iterator[bytes]:
    """Yield damaged copies: with a byte flipped or the end cut off, at `count` places, or with other bytes."""
    choose = random.Random(len(data))
    for number in range(count):
        at, other = number * len(data) // count, choose.randrange(len(data))
        flipped = bytes([data[at] ^ (0xFF, 1 << at % 8, 0x20)[number % 3]])
        yield from (data[:at] + flipped + data[at + 1 :], data[:at])
        if not number % 8:
            yield from (data[:at] + data[at + 1 :], data[:at] + data[other : other + 64] + data[at:])
    yield from (data + b"\0", data + bytes(32), data[:-1], data[::-1], data[:8] + data, b"", bytes(len(data)))


def check(
    path: Path,
    named: str,
    count: int,
    read: Callable[[], Any],
    equal: Callable[[Any], bool],
    others: Iterable[bytes] = (),
) -> None:
    """Read damaged copies of the file, and other files in its place: each is refused, or equal to the original."""
    data = path.read_bytes()
    for wrong in (*damaged(data, count), *others):
        path.write_bytes(wrong)
        try:
            found = read()
        except NotesError as error:
            assert "\n" not in str(error) and named in str(error)
        else:
            assert wrong == data or equal(found), wrong[:99]
    path.write_bytes(data)
    read()


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_segment_is_read(tmp_path: Path, samples: Samples, name: str) -> None:
    path, segment = tmp_path / "a.gguf", samples[name]
    write_segment(path, segment)
    check(
        path,
        str(path),
        1000 if name == "plain" else 250,
        lambda: open_segment(path),
        lambda found: same(found, segment),
    )
    names = {"tokens", "text", "fields", "identity", "context", "base", "blocks", "axes", "media"}
    head = {name: bits(getattr(segment, name)) for name in names}
    # Without its rows, of which a change is not seen.
    check(
        path,
        str(path),
        250,
        lambda: peek(path),
        lambda found: {one: bits(getattr(found, one)) for one in names} == head,
    )


def test_a_damaged_model_is_neither_read_nor_refused(make_model: MakeModel, tmp_path: Path) -> None:
    """Its tensors are not read here; one that ends too early is refused."""
    path = tmp_path / "model.gguf"
    data = make_model("llama").read_bytes()
    path.write_bytes(data)
    check(path, str(path), 200, lambda: read_header(path), lambda found: path.stat().st_size >= found.size > 0)


@pytest.fixture
def begin(tmp_path: Path, make_segment: MakeSegment) -> Callable[..., SessionFolder]:
    """Make a session of one turn, with its K/V, whose keys are multiplied."""

    def begin(name: str, factor: int = 1) -> SessionFolder:
        with Sessions(tmp_path / "sessions").locked(name, new=True) as stored:
            stored.folder.mkdir(parents=True)
            segment = replace(make_segment(3), identity=HEADER.identity, text="", fields=())
            segment = replace(segment, layers=tuple(replace(rows, k=rows.k * factor) for rows in segment.layers))
            files = {stored.next_rows.name: write_segment(stored.next_rows, segment)}
            state, tokens = asked("Why?"), segment.tokens.tolist()
            turn = replace(state.conversation[0], answer=(Part((tokens[2],)),))
            stored.commit("turn", "Why?", replace(state, tokens=tokens, conversation=(turn,)), files, HEADER)
        return stored

    return begin


def test_a_damaged_snapshot_is_read(begin: Callable[..., SessionFolder]) -> None:
    begun = begin("mine")
    sessions = Sessions(begun.folder.parent)
    check(
        begun.path(1), "0001.json", 400, lambda: sessions.find("mine").snapshot, lambda found: found == begun.snapshot
    )


def test_a_damaged_archive_is_imported(begin: Callable[..., SessionFolder], tmp_path: Path) -> None:
    """All of it, and each snapshot in it; the K/V, too, also if it is another session's of the same tokens. Nothing is
    left of one that is refused."""
    begun, sessions, path = begin("mine"), Sessions(tmp_path / "imported"), tmp_path / "mine.tar"
    path.write_bytes(archived(begun))
    assert begun.snapshot
    exported = replace(begun.snapshot, header=replace(HEADER, model=Path(HEADER.model).name))
    own, others = members(path.read_bytes()), members(archived(begin("other", -1)))
    assert own.keys() == others.keys() and own["0001.gguf"] != others["0001.gguf"]

    def read() -> SessionFolder:
        for name in sessions.names():
            sessions.remove(name)
        return load(sessions, io.BytesIO(path.read_bytes()), str(path), "mine")

    parts = [("0001.gguf", others["0001.gguf"]), *(("0001.json", wrong) for wrong in damaged(own["0001.json"], 80))]
    check(
        *(path, str(path), 50, read),
        lambda found: found.snapshot == exported and (found.folder / "0001.gguf").read_bytes() == own["0001.gguf"],
        [packed({**own, name: wrong}) for name, wrong in parts],
    )
