"""Tests of checking a library: every kind of damage is found, with what to do about it, and nothing is changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli.engine.segment import Identity, Segment
from notes_cli.errors import Help, NotesError
from notes_cli.library.check import OLD, Finding, check_files
from notes_cli.library.container import open_segment, write_segment
from notes_cli.library.safe_files import replacing
from notes_cli.library.segment_files import checkpoint_path
from notes_cli.library.store import Library

from ..limits import as_a_new_process
from ..refused import refused

MakeSegment = Callable[..., Segment]


@pytest.fixture
def path(tmp_path: Path, identity: Identity, make_segment: MakeSegment) -> Path:
    path = Library(tmp_path / "library").path("returns", identity)
    write_segment(path, make_segment(n=50))
    return path


def findings(path: Path) -> list[Finding]:
    """The problems of the file's library, of which no file is changed."""

    def kept() -> list[tuple[Path, bytes]]:
        return sorted((file, file.read_bytes()) for file in path.parent.rglob("*") if file.is_file())

    before = kept()
    found = list(check_files(path.parent))
    assert kept() == before
    return found


def test_a_sound_library_has_no_findings(path: Path, tmp_path: Path) -> None:
    """Other files are ignored, as is one that is being written; a missing library is sound, too."""
    (path.parent / "readme.txt").touch()
    sizes: list[int] = []
    with replacing(path.with_name("other.gguf")):
        assert list(check_files(path.parent, sizes.append)) == [] and sizes == [path.stat().st_size]
    assert list(check_files(tmp_path / "none")) == [] and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("at", "source", "remedy"),
    [
        (5, "", Help.COMPILE_TEXT),  # the head is gone, and the text with it
        (200, "", Help.COMPILE_TEXT),
        (-40, "", Help.COMPILE_SEGMENT),
        (-40, "/nowhere/returns.txt", Help.COMPILE_SEGMENT),
        (-1, __file__, Help.COMPILE_FILE),
    ],
)
def test_a_wrong_byte_anywhere_is_found(path: Path, at: int, source: str, remedy: Help) -> None:
    """With the command that compiles it again, from its file if that is there."""
    write_segment(path, replace(open_segment(path), source=source))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    (finding,) = findings(path)
    assert finding.path == path and finding.remedy is not None and finding.remedy.help is remedy


def test_files_that_are_left_renamed_or_newer(path: Path) -> None:
    left, begun = path.with_name(f".{path.name}.abc.tmp"), checkpoint_path(path)
    newer, renamed = (path.with_name(f"{name}.{'0' * 12}.gguf") for name in ("newer", "renamed"))
    begun.parent.mkdir()
    for file in (left, begun, checkpoint_path(renamed), renamed):
        file.write_bytes(path.read_bytes())
    os.utime(begun, (time.time() - 2 * OLD,) * 2)
    newer.write_bytes(path.read_bytes().replace(b"notes.format\x04\0\0\0\x01", b"notes.format\x04\0\0\0\x63"))
    found = {finding.path: (finding.what, finding.remedy and finding.remedy.help) for finding in findings(path)}
    assert set(found) == {left, begun, newer, renamed}
    assert found[left][1] is found[begun][1] is Help.REMOVE_FILE
    assert found[renamed][1] is Help.TAKE_OVER and "format 99" in found[newer][0]


def test_a_folder_that_others_can_write_in_is_refused(path: Path) -> None:
    os.chmod(path.parent, 0o777)
    as_a_new_process()
    with refused(NotesError, "others can write"):
        list(check_files(path.parent))
