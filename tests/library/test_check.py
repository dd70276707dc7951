"""Tests of checking a library: every kind of damage is found, and a repair loses nothing of value."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli.engine.segment import Identity, Segment
from notes_cli.errors import NotesError, SegmentError
from notes_cli.library import segment_files
from notes_cli.library.check import ASIDE, Finding, check_library, check_memory
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.library.safe_files import locked, replacing
from notes_cli.library.segment_files import lock_of
from notes_cli.library.store import Library

from ..refused import refused

MakeSegment = Callable[..., Segment]


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "library")


@pytest.fixture
def path(library: Library, identity: Identity, make_segment: MakeSegment) -> Path:
    path = library.path("returns", identity)
    write_segment(path, make_segment(n=50))
    return path


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def mend(finding: Finding) -> str:
    assert finding.mend is not None
    return finding.mend()


def test_a_sound_library_has_no_findings(library: Library, path: Path, tmp_path: Path) -> None:
    """A sound or missing library has no findings; other files are ignored, and nothing is written."""
    (library.folder / "readme.txt").touch()
    before = sorted(library.folder.rglob("*"))
    sizes: list[int] = []
    assert list(check_library(library.folder, sizes.append)) == []
    assert sizes == [path.stat().st_size]
    assert sorted(library.folder.rglob("*")) == before
    for check in (check_library, check_memory):
        assert list(check(tmp_path / "none")) == [] and not (tmp_path / "none").exists()


@pytest.mark.parametrize("at", [5, 200, -40, -1])
def test_a_byte_that_is_wrong_anywhere(library: Library, path: Path, at: int) -> None:
    """Damage in head and K/V is found, and the file moved aside; a sound head still yields the text."""
    flip(path, at)
    finding = only(check_library(library.folder))
    assert (finding.kind, finding.path) == ("damaged", path) and finding.remedy
    library.used(path)
    before = path.read_bytes()
    assert ASIDE in mend(finding)
    assert list(check_library(library.folder)) == [] and not library.names()
    aside = path.parent / ASIDE / path.name
    assert aside.read_bytes() == before and stat.S_IMODE(aside.parent.stat().st_mode) == 0o700
    if at < -1:
        assert str(aside) in str(finding.remedy) and peek(aside).text


def test_what_is_compiled_meanwhile_is_not_moved(library: Library, path: Path, tmp_path: Path) -> None:
    """While the rest is checked, which takes minutes. The remedy names the file of the text, if it is there."""
    (tmp_path / "returns.txt").write_text("x")
    write_segment(path, replace(open_segment(path), source=str(tmp_path / "returns.txt")))
    sound = path.read_bytes()
    flip(path, -40)
    finding = only(check_library(library.folder))
    assert str(tmp_path / "returns.txt") in str(finding.remedy)
    with locked(lock_of(path)), refused(SegmentError, "is being compiled"):
        mend(finding)
    path.write_bytes(sound)
    assert "compiled again" in mend(finding) and path.read_bytes() == sound


def test_leftovers_of_a_process_that_was_killed(library: Library, path: Path) -> None:
    """Leftovers are removed; a temporary file that is being written is neither reported nor touched."""
    left = path.with_name(f".{path.name}.abc.tmp")
    left.write_bytes(b"half")
    with replacing(path.with_name("other.gguf")) as writing:
        finding = only(check_library(library.folder))
        assert (finding.kind, finding.path) == ("leftover", left)
        assert mend(finding) == "removed it" and not left.exists() and writing.exists()
        writing.write_bytes(b"x")


def test_orphans_renamed_files_and_modes(library: Library, path: Path, identity: Identity) -> None:
    """Orphaned records of uses, files named for another skill or model, permissions of others."""
    library.used(path)
    gone = path.with_name(f"gone.{identity.key}.gguf")
    (path.parent / segment_files.USES / gone.name).write_bytes(b"..")
    renamed = path.with_name(f"other.{'0' * 12}.gguf")
    path.rename(renamed)
    renamed.chmod(0o644)
    found = {one.kind: one for one in check_library(library.folder) if one.path.name != path.name}
    assert set(found) == {"orphan", "renamed", "permission"}
    assert found["renamed"].mend is None and str(renamed) in str(found["renamed"].remedy)
    mend(found["permission"])
    mend(found["orphan"])
    assert stat.S_IMODE(renamed.stat().st_mode) == 0o600
    assert {one.kind for one in check_library(library.folder)} == {"renamed", "orphan"}  # that of `returns`


def test_a_newer_format_is_left_and_a_folder_that_others_can_write_in_is_refused(library: Library, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"notes.format\x04\x00\x00\x00\x01", b"notes.format\x04\x00\x00\x00\x63"))
    finding = only(check_library(library.folder))
    assert finding.kind == "newer" and finding.mend is None
    os.chmod(library.folder, 0o777)
    with refused(NotesError, "others can write"):
        list(check_library(library.folder))


def test_what_is_remembered(tmp_path: Path) -> None:
    """A memory that is damaged is removed, and found out again."""
    folder = tmp_path / "models"
    folder.mkdir(mode=0o700)
    bad = folder / "digests.json"
    bad.write_text("{")
    bad.chmod(0o600)
    finding = only(check_memory(folder))
    assert finding.kind == "damaged"
    mend(finding)
    assert not bad.exists() and list(check_memory(folder)) == []
