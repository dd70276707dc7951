"""Atomic writes: all or nothing, and nothing left behind."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from notes_cli.library.atomic import replacing


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """The next write of the same file takes it away; files of others stay, whatever they are called."""
    others = [".b.json.abc.tmp", ".a.json.abc", "a.json.abc.tmp", ".a.jsonx.abc.tmp"]
    for name in (".a.json.abc.tmp", ".a.json.def.tmp", *others):
        (tmp_path / name).write_bytes(b"half")
    with replacing(tmp_path / "a.json") as temporary:
        temporary.write_bytes(b"whole")
    assert files(tmp_path) == sorted(["a.json", *others])


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    """Two writers at once do not sweep each other's file; the last one wins, and nothing is left."""
    with replacing(tmp_path / "a") as first:
        first.write_bytes(b"first")
        with replacing(tmp_path / "a") as second:
            second.write_bytes(b"second")
            assert first.exists() and first != second
        assert (tmp_path / "a").read_bytes() == b"second" and first.exists()
    assert (tmp_path / "a").read_bytes() == b"first" and files(tmp_path) == ["a"]


def test_a_file_swept_before_it_was_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may sweep between creation and lock: then there is another file, of mode 0600 as ever."""
    make, made = tempfile.mkstemp, []

    def mkstemp(**options: object) -> tuple[int, str]:
        handle, name = make(**options)  # type: ignore[call-overload]
        if not made:
            os.unlink(name)
        made.append(name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    with replacing(tmp_path / "a") as temporary:
        assert [str(temporary)] == made[1:]
        temporary.write_bytes(b"x")
    assert files(tmp_path) == ["a"] and stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path) -> None:
    """Any exception removes the temporary file."""
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as temporary:
        temporary.write_bytes(b"new")
        raise KeyboardInterrupt
    assert files(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"old"


def test_a_link_stays(tmp_path: Path) -> None:
    """What it names is replaced, whether that is there already or not."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/a")
    for text in (b"one", b"two"):
        with replacing(tmp_path / "link") as temporary:
            temporary.write_bytes(text)
        assert (tmp_path / "folder" / "a").read_bytes() == text
    assert (tmp_path / "link").is_symlink() and files(tmp_path / "folder") == ["a"] and len(files(tmp_path)) == 2


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    """A pipe, or a device as /dev/null, is not renamed over, by its own name or by a link to it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="no regular file"), replacing(tmp_path / name):
            raise AssertionError("it must not be written")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink() and len(files(tmp_path)) == 2
