"""Folders that nobody else can write in: what is looked at, what is mended, what is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from notes_cli.commands.remedies import worded
from notes_cli.errors import NotesError
from notes_cli.library.private import check, make

from ..limits import belongs_to_another
from ..refused import refused


def test_what_is_not_there_is_fine(tmp_path: Path) -> None:
    """It will be made when something is written."""
    check(tmp_path / "home" / "library")
    assert not (tmp_path / "home").exists()


def test_make_leaves_what_is_there(tmp_path: Path) -> None:
    """Nobody's folder is changed by making one in it; a file in its place is an error."""
    (tmp_path / "here").mkdir(mode=0o755)
    make(tmp_path / "here" / "a" / "b")
    make(tmp_path / "here" / "a" / "b")
    assert [(tmp_path / "here" / part).stat().st_mode & 0o777 for part in (".", "a", "a/b")] == [0o755, 0o700, 0o700]
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "a"):
        with pytest.raises(OSError, match="file"):
            make(path)


def test_where_nothing_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in /proc, where the system says "no such file" of a folder whose parent is there."""

    def nothing(path: Path, mode: int) -> None:
        raise (
            FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            if path != tmp_path
            else FileExistsError
        )

    monkeypatch.setattr(os, "mkdir", nothing)
    with pytest.raises(FileNotFoundError, match="home"):
        make(tmp_path / "home" / "library")
    with pytest.raises(FileNotFoundError):
        make(Path("relative") / "library")


def test_the_folder_above_counts(tmp_path: Path) -> None:
    """Who can write there can put another folder in its place; both are named in one command. Not so where only the
    owner can rename, as in /tmp; and what others can only read above is left as it is."""
    home, folder = tmp_path / "ho me", tmp_path / "ho me" / "library"
    folder.mkdir(parents=True)
    home.chmod(0o777)
    folder.chmod(0o777)
    with pytest.raises(NotesError) as caught:
        check(folder)
    assert worded(caught.value).endswith(f"run: chmod 700 '{home}' '{folder}'") and "\n" not in worded(caught.value)
    folder.chmod(0o700)
    with refused(NotesError, r"chmod 700 '[^']*ho me'$"):
        check(folder)
    home.chmod(0o1777)
    check(folder)
    home.chmod(0o755)
    check(folder)
    assert home.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("which", ["home", "home/library"])
def test_another_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """What is in it is theirs, whatever its mode is."""
    folder = tmp_path / "home" / "library"
    make(folder)
    belongs_to_another(tmp_path / which, monkeypatch)
    with pytest.raises(NotesError, match=r"user 12345, .*NOTES_HOME=FOLDER"):
        check(folder)
