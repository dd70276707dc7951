"""Locks: who waits is told for whom, and can stop waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from notes_cli.library import lock
from notes_cli.library.lock import HeldError, locked

HOLD = """
import pathlib, sys
from notes_cli.library.lock import locked
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
    path, held = tmp_path / "a.lock", ExitStack()
    held.enter_context(locked(path))
    with pytest.raises(HeldError), locked(path, wait=0):
        pass
    other = threading.Thread(target=held.close)
    other.start()
    other.join()
    with locked(path, wait=0):
        pass


def test_a_wait_is_told(tmp_path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the number of the process, and that it is stopped if it is; then the wait goes on."""
    monkeypatch.setattr(lock, "NOTICE", 0.01)
    told: list[str] = []
    path = tmp_path / "locks" / "a.lock"
    with pytest.raises(HeldError, match=str(holder.pid)), locked(path, 0.3, told.append):
        pass
    assert told == [f"process {holder.pid}"]
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)

    def go_on(who: str) -> None:
        told.append(who)
        os.kill(holder.pid, signal.SIGKILL)

    with locked(path, told=go_on):
        pass
    assert told[1:] == [f"process {holder.pid} (stopped, goes on with: kill -CONT {holder.pid})"]


def test_a_wait_can_be_ended(tmp_path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it waits."""
    monkeypatch.setattr(lock, "NOTICE", 0.01)

    def interrupt(_: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    def raised(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raised)
    try:
        with pytest.raises(KeyboardInterrupt), locked(tmp_path / "locks" / "a.lock", told=interrupt):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_free_lock_is_not_told_of(tmp_path: Path) -> None:
    """Nothing is said, and the folder is ours alone."""
    with locked(tmp_path / "locks" / "a.lock", told=pytest.fail):
        assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700
