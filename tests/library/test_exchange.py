"""Exports: whole, sound, without what is nobody else's business, and never over another file."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from notes_cli.engine.segment import Segment
from notes_cli.errors import DamagedError, SegmentError, UnwritableError
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.library.exchange import export, found_in

from ..limits import small_files
from ..refused import refused


@pytest.fixture
def own(tmp_path: Path, make_segment: Callable[..., Segment]) -> Path:
    (tmp_path / "own").mkdir(mode=0o700)
    path = tmp_path / "own" / "returns.0123456789ab.gguf"
    write_segment(path, make_segment(n=50, source="/home/me/secret/returns.txt", stamp=(1, 2, 3)))
    return path


def test_all_but_where_the_text_came_from(own: Path, tmp_path: Path) -> None:
    """Rows, text, fields, when it was compiled: the same; the path of the text is nowhere in the file."""
    target = tmp_path / "a.gguf"
    assert export(own, target)
    before, after = open_segment(own), open_segment(target)
    assert np.array_equal(before.layers[0].k, after.layers[0].k)
    assert (before.text, before.fields, before.identity) == (after.text, after.fields, after.identity)
    assert peek(own).created == peek(target).created and b"secret" not in target.read_bytes()
    assert (after.source, after.stamp) == ("", ())


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o700, 0o600), (0o750, 0o640), (0o755, 0o644)])
def test_who_can_read_the_folder_can_read_the_file(own: Path, tmp_path: Path, folder_mode: int, mode: int) -> None:
    """In a shared folder; a single file is for its owner alone."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(folder_mode)
    export(own, folder / own.name, shared=True)
    assert stat.S_IMODE((folder / own.name).stat().st_mode) == mode
    export(own, folder / "alone.gguf")
    assert stat.S_IMODE((folder / "alone.gguf").stat().st_mode) == 0o600


def test_what_is_there_is_not_written_over(own: Path, tmp_path: Path) -> None:
    """The same segment is left alone, any other file is refused, force replaces it."""
    target = tmp_path / "a.gguf"
    export(own, target)
    before = target.stat().st_mtime_ns
    assert not export(own, target) and target.stat().st_mtime_ns == before
    for content in (b"a letter", b""):
        target.write_bytes(content)
        with refused(SegmentError, "is there already, and is another file"):
            export(own, target)
        assert target.read_bytes() == content
    other = open_segment(own)
    write_segment(target, replace(other, text="other", fields=()))
    with refused(SegmentError, "is another file"):
        export(own, target)
    assert export(own, target, force=True) and open_segment(target).text == other.text


def test_damage_and_full_disks_leave_nothing(own: Path, tmp_path: Path) -> None:
    """Neither a part of a file nor a temporary one."""
    (tmp_path / "shared").mkdir()
    with small_files(500), refused(UnwritableError, "Nothing was changed"):
        export(own, tmp_path / "shared" / "a.gguf")
    data = bytearray(own.read_bytes())
    data[-40] ^= 1
    own.write_bytes(data)
    with refused(DamagedError, "checksum"):
        export(own, tmp_path / "shared" / "a.gguf")
    assert not list((tmp_path / "shared").iterdir())


def test_only_segments_are_found_in_a_folder(own: Path, tmp_path: Path) -> None:
    """By the names that exports have: models and letters beside them are not opened."""
    (own.parent / "model.gguf").write_bytes(b"GGUF")
    (own.parent / "readme.txt").touch()
    second = own.with_name("returns.abcdefabcdef.gguf")
    second.write_bytes(own.read_bytes())
    assert found_in(own.parent) == {"returns": [own, second]}
    with refused(SegmentError, "cannot read"):
        found_in(tmp_path / "nowhere")
