"""Tests of private folders, atomic replacement of files, and locks between processes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from notes_cli.commands.remedies import worded
from notes_cli.errors import NotesError
from notes_cli.library import safe_files
from notes_cli.library.safe_files import HeldError, check_private, locked, make_private, replacing

from ..limits import as_a_new_process, belongs_to_another
from ..refused import refused


def test_make_leaves_what_is_there(tmp_path: Path) -> None:
    """Creating a folder does not change its existing parents; a file in its place is an error, a missing one none."""
    check_private(tmp_path / "home" / "library")
    assert not (tmp_path / "home").exists()
    (tmp_path / "here").mkdir(mode=0o755)
    make_private(tmp_path / "here" / "a" / "b")
    make_private(tmp_path / "here" / "a" / "b")
    assert [(tmp_path / "here" / part).stat().st_mode & 0o777 for part in (".", "a", "a/b")] == [0o755, 0o700, 0o700]
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "a"):
        with pytest.raises(OSError, match="file"):
            make_private(path)


def test_the_folder_above_counts(tmp_path: Path) -> None:
    """Who can write in it can replace the folder; one command mends both. A sticky parent as /tmp is accepted."""
    home, folder = tmp_path / "ho me", tmp_path / "ho me" / "library"
    folder.mkdir(parents=True)
    home.chmod(0o777)
    folder.chmod(0o777)
    with pytest.raises(NotesError) as caught:
        check_private(folder)
    assert worded(caught.value).endswith(f"run: chmod 700 '{home}' '{folder}'") and "\n" not in worded(caught.value)
    folder.chmod(0o700)
    with refused(NotesError, r"chmod 700 '[^']*ho me'$"):
        check_private(folder)
    for mode in (0o1777, 0o755):
        home.chmod(mode)
        as_a_new_process()
        check_private(folder)
    assert home.stat().st_mode & 0o777 == 0o755


def test_another_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home, which in (("a", "."), ("b", "library")):
        make_private(tmp_path / home / "library")
        belongs_to_another(tmp_path / home / which, monkeypatch)
        with pytest.raises(NotesError, match=r"belongs to user 12345, not to you.*NOTES_HOME=FOLDER"):
            check_private(tmp_path / home / "library")


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
    # Two writers at once do not sweep each other's file; the last one wins, and nothing is left.
    with replacing(tmp_path / "c") as first:
        first.write_bytes(b"first")
        with replacing(tmp_path / "c") as second:
            second.write_bytes(b"second")
            assert first.exists() and first != second
        assert (tmp_path / "c").read_bytes() == b"second" and first.exists()
    assert (tmp_path / "c").read_bytes() == b"first" and files(tmp_path) == sorted(["a.json", "c", *others])


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


def test_links_and_pipes_stay(tmp_path: Path) -> None:
    """The target of a link is replaced or created. A pipe, or a device as /dev/null, is not renamed over."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/a")
    for text in (b"one", b"two"):
        with replacing(tmp_path / "link") as temporary:
            temporary.write_bytes(text)
        assert (tmp_path / "folder" / "a").read_bytes() == text
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "other").symlink_to("pipe")
    for name in ("pipe", "other"):
        with pytest.raises(OSError, match="no regular file"), replacing(tmp_path / name):
            raise AssertionError("it must not be written")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "other").is_symlink() and (tmp_path / "link").is_symlink()
    assert files(tmp_path / "folder") == ["a"] and len(files(tmp_path)) == 4


HOLD = """
import pathlib, sys
from notes_cli.library.safe_files import locked
with locked(pathlib.Path(sys.argv[1])):
    print(1, flush=True)
    input()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "locks" / "a.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout and process.stdout.read(1)
    yield process
    process.kill()
    process.communicate()


def test_another_thread_may_give_it_back(tmp_path: Path) -> None:
    """As a server does, which opens a session in one thread and ends its turn in another."""
    path, held = tmp_path / "locks" / "a.lock", ExitStack()
    held.enter_context(locked(path, on_wait=pytest.fail))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(HeldError), locked(path, wait=0):
        pass
    with ThreadPoolExecutor(1) as pool:
        pool.submit(held.close).result()
    with locked(path, wait=0):
        pass


def test_a_wait_is_told(tmp_path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice comes once, with the number of the process and whether it is stopped; then the wait continues."""
    monkeypatch.setattr(safe_files, "NOTICE", 0.01)
    waits: list[str] = []
    path = tmp_path / "locks" / "a.lock"
    with pytest.raises(HeldError, match=str(holder.pid)), locked(path, 0.3, waits.append):
        pass
    assert waits == [f"process {holder.pid}"]
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)

    def go_on(who: str) -> None:
        waits.append(who)
        os.kill(holder.pid, signal.SIGKILL)

    with locked(path, on_wait=go_on):
        pass
    assert waits[1:] == [f"process {holder.pid} (stopped, goes on with: kill -CONT {holder.pid})"]
