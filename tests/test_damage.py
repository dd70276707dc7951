"""Any change of a file of ours: it is read as it was written, or refused in one line that names it.

Bytes are flipped and lost anywhere, the file ends anywhere, bytes are added or doubled. A model's head has no checksum:
a change there is another head, or refused.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.header import read_header
from notes_cli.errors import NotesError
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.sessions.archive import load, save
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import Part

from .conftest import MakeModel, MakeSegment
from .library.test_container import NAMES, Samples, bits, same, samples
from .sessions.snapshots import HEADER, asked

__all__ = ["samples"]  # a fixture


def damaged(data: bytes, count: int) -> Iterator[bytes]:
    """So many changed forms of a file for each way, at places from its start to its end."""
    choose = random.Random(len(data))
    for number in range(count):
        at, other = number * len(data) // count, choose.randrange(len(data))
        flipped = bytes([data[at] ^ (0xFF, 1 << at % 8, 0x20)[number % 3]])
        yield from (data[:at] + flipped + data[at + 1 :], data[:at])
        if not number % 8:
            yield from (data[:at] + data[at + 1 :], data[:at] + data[other : other + 64] + data[at:])
    yield from (data + b"\0", data + bytes(32), data[:-1], data[::-1], data[:8] + data, b"", bytes(len(data)))


def check(
    path: Path, named: str, count: int, read: Callable[[], Any], equal: Callable[[Any], bool] = lambda found: False
) -> None:
    """Damage the file in every way; whatever is read then must be equal to what was written."""
    data = path.read_bytes()
    for wrong in damaged(data, count):
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
def begun(tmp_path: Path, make_segment: MakeSegment) -> SessionFolder:
    """A session of one turn, with its K/V."""
    with Sessions(tmp_path / "sessions").locked("mine", new=True) as stored:
        stored.folder.mkdir(parents=True)
        segment = replace(make_segment(3), identity=HEADER.identity, text="", fields=())
        files = {stored.next_rows.name: write_segment(stored.next_rows, segment)}
        state, tokens = asked("Why?"), segment.tokens.tolist()
        turn = replace(state.conversation[0], answer=(Part((tokens[2],)),))
        stored.commit("turn", "Why?", replace(state, tokens=tokens, conversation=(turn,)), files, HEADER)
    return stored


def test_a_damaged_snapshot_is_read(begun: SessionFolder) -> None:
    sessions = Sessions(begun.folder.parent)
    check(begun.path(1), "0001.json", 400, lambda: sessions.find("mine").state, lambda found: found == begun.state)


def test_a_damaged_archive_is_imported(begun: SessionFolder, tmp_path: Path) -> None:
    """All of it: the K/V, too; nothing is left of one that is refused."""
    path, rows = tmp_path / "mine.tar", (begun.folder / "0001.gguf").read_bytes()
    with path.open("wb") as file:
        save(begun, file)
    sessions = Sessions(tmp_path / "other")

    def read() -> SessionFolder:
        for name in sessions.names():
            sessions.remove(name)
        return load(sessions, io.BytesIO(path.read_bytes()), str(path), "mine")

    check(
        *(path, str(path), 120, read),
        lambda found: found.state == begun.state and (found.folder / "0001.gguf").read_bytes() == rows,
    )
