"""Sessions on disk: the ledger is authoritative, damage is detected, and no concurrent turn is lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notes_cli.errors import HeldSessionError, NotesError, SessionError
from notes_cli.sessions import HEAD, LEDGER
from notes_cli.sessions.folder import SessionFolder, Sessions

from ..limits import as_a_new_process, small_files
from ..refused import refused
from .ledgers import HEADER, edit, forge, forget, snapshot, turn

TIME = "2026-06-01T12:00:00Z"


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "sessions")


@pytest.fixture
def begun(sessions: Sessions) -> SessionFolder:
    with sessions.locked("mine", new=True) as stored:
        stored.folder.mkdir(parents=True)
        stored.next_rows.write_bytes(b"rows")
        stored.commit(turn(1, 2, 3), HEADER)
    return sessions.find("mine")


@pytest.mark.parametrize("change", [{"model": 3}, {"model": None}, {"cache": []}, {"identity": {"rope": 1}}], ids=str)
def test_nothing_of_a_first_line_is_believed(begun: SessionFolder, sessions: Sessions, change: dict[str, Any]) -> None:
    """Types are checked: an export removes the folder from the model's path."""
    identity = change.pop("identity", {})

    def change_it(lines: list[Any]) -> None:
        lines[0] = {**lines[0], "identity": lines[0]["identity"] | identity, **change}

    forge(begun.folder, change_it)
    with pytest.raises(SessionError, match="the ledger of session mine is damaged"):
        sessions.find("mine")


def test_a_torn_line_is_dropped(begun: SessionFolder) -> None:
    """After an interrupted write the session is unchanged, and the next line replaces the incomplete one."""
    before, head = begun.ledger.read_bytes(), (begun.folder / HEAD).read_bytes()
    begun.commit(turn(4, 5, rows="0002.gguf"))
    line = begun.ledger.read_bytes()[len(before) :]
    for end in (1, len(line) // 2, len(line) - 1):
        begun.ledger.write_bytes(before + line[:end])
        (begun.folder / HEAD).write_bytes(head)
        stored = SessionFolder(begun.folder)
        assert stored.state.tokens == [1, 2, 3] and stored.next_rows.name == "0002.gguf" and stored.torn == end
        stored.commit(turn(6, rows="0002.gguf"))
        assert SessionFolder(begun.folder).state.tokens == [1, 2, 3, 6]
        assert all(json.loads(part) for part in begun.ledger.read_text().splitlines())


def _append(stored: SessionFolder, *lines: dict[str, Any]) -> None:
    forge(stored.folder, lambda old: old.extend({"time": TIME, **line} for line in lines))


@pytest.mark.parametrize("line", [turn(4), edit("b", [(2, 3, [9])], [[2, 3]]), forget(1)])
def test_a_line_is_added(begun: SessionFolder, sessions: Sessions, line: dict[str, Any]) -> None:
    """The control of the next test."""
    _append(begun, line)
    assert sessions.find("mine").state.live[-1]["op"] == line["op"]


def with_skill(**parts: Any) -> dict[str, Any]:
    return turn(4, skills=[{"name": "a", "position": 0, "text": "b", "tokens": 1, "fields": [], **parts}])


# An invalid name of a file is damage in an undone line, too: the next name depends on all lines.
ROWS = [turn(4, rows=rows) for rows in ("../../x", "../../x.gguf", f"{'9' * 10}.gguf", f"{'9' * 5000}.gguf")]
WRONG: list[list[dict[str, Any]]] = [
    *([line] for line in ({}, {"op": "open"}, {"op": "jump"}, {"op": "turn"}, turn(9, rows_checksum=3))),
    *([edit("b", patches, [])] for patches in ([(0, "x", [])], [(2, 1, [])], [(0, 99, [])])),  # type: ignore[list-item]
    *([edit("b", [(0, 1, [token])], [])] for token in (2**31, -1)),
    *([edit("b", [], [changed])] for changed in ([0, 10**15], ["0", "1"])),  # type: ignore[list-item]
    *([turn(token)] for token in (float("inf"), 4.0, "4", True)),  # type: ignore[arg-type]
    *(
        [turn(4, **part)]
        for part in ({"question": 7}, {"errata": {"date": None}}, {"time": "tomorrow"}, {"time": None})
    ),
    *([turn(4, rows=rows)] for rows in ([], None)),
    *([with_skill(**part)] for part in ({"tokens": 9}, {"position": (1 << 31) - 2, "tokens": 2}, {"tokens": 2.0})),
    *([forget(moves)] for moves in ("1", None)),
    *([line] for line in ROWS),
    *([line, {"op": "undo"}] for line in ROWS),
]


@pytest.mark.parametrize("lines", WRONG)
def test_nothing_of_a_ledger_is_believed(begun: SessionFolder, sessions: Sessions, lines: list[dict[str, Any]]) -> None:
    """With valid checksums; detected before any allocation. The session can still be listed and removed."""
    _append(begun, *lines)
    with refused(SessionError, "the ledger of session mine is damaged: its lines contradict each other"):
        sessions.find("mine")
    sessions.remove("mine")
    assert sessions.names() == [] and not begun.folder.exists()


def test_lines_that_are_none(begun: SessionFolder, sessions: Sessions) -> None:
    """Lines appended by another program: the error names the line, and nothing is written."""
    data = begun.ledger.read_bytes()
    for text in ("", "{", "[]", "null", '{"op": "undo"}', "[" * 100_000, '{"op": "undo"}\n' * 2):
        begun.ledger.write_bytes(data + text.encode() + b"\n")
        before = snapshot(begun.folder)
        with refused(SessionError, "the ledger of session mine is damaged: line 3 is not as it was written"):
            sessions.find("mine")
        assert snapshot(begun.folder) == before


def test_a_letter_that_was_changed(begun: SessionFolder, sessions: Sessions) -> None:
    """Anywhere in a ledger, it is detected, and the error names the line."""
    data = begun.ledger.read_bytes()
    for at in range(0, len(data), 7):
        begun.ledger.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(SessionError, match=r"session mine is damaged|has format 4"):
            sessions.find("mine")
    for old, new, why in (
        (b"Why?", b"Who?", "the ledger of session mine is damaged: line 2 is not as it was written"),
        (b'"format": 8', b'"format": 9', r"has format 9, this version of notes reads 8\. Update notes"),
    ):
        begun.ledger.write_bytes(data.replace(old, new))
        with pytest.raises(SessionError, match=why):
            sessions.find("mine")


@pytest.mark.parametrize("turns", [1, 2])
def test_a_ledger_that_was_cut(begun: SessionFolder, sessions: Sessions, turns: int) -> None:
    """One line of error, and nothing is overwritten. Without the head, the remaining lines are accepted."""
    if turns == 2:
        begun.next_rows.write_bytes(b"second")
        begun.commit(turn(4, rows="0002.gguf"))
    data = begun.ledger.read_bytes()
    last = data[:-1].rfind(b"\n") + 1
    for size in {*range(0, len(data), 11), last, last + 1, len(data) - 20, len(data) - 1}:
        begun.ledger.write_bytes(data[:size])
        before = snapshot(begun.folder)
        with pytest.raises(SessionError, match="the ledger of session mine is damaged: it "):
            sessions.find("mine")
        with pytest.raises(SessionError), sessions.locked("mine", new=True):
            pass
        assert snapshot(begun.folder) == before and sessions.names() == ["mine"]
    begun.ledger.unlink()
    for new in (False, True):
        with refused(SessionError, "the ledger of session mine is missing"), sessions.locked("mine", new=new):
            pass
    if turns == 2:
        begun.ledger.write_bytes(data[:-20])
        with refused(SessionError, "it ends within line 3 of 3. Put a copy of it back, or "):
            sessions.find("mine")
        (begun.folder / HEAD).unlink()
        assert sessions.find("mine").state.tokens == [1, 2, 3]


def test_lines_of_another_ledger(begun: SessionFolder, sessions: Sessions) -> None:
    """An older copy, that of a fork, and ledgers with lines removed or doubled are all refused."""
    older = begun.ledger.read_bytes()
    sessions.fork("mine", "other")
    with sessions.locked("other") as fork:
        fork.commit(turn(7, rows=""))
        fork.commit(turn(8, rows=""))
    with sessions.locked("mine") as stored:
        stored.commit(turn(4, rows=""))
    data = begun.ledger.read_bytes()
    lines = fork.ledger.read_bytes().splitlines(keepends=True)
    for wrong in (older, fork.ledger.read_bytes(), b"".join([*lines[:2], lines[3]]), b"".join([*lines, lines[-1]])):
        begun.ledger.write_bytes(wrong)
        with pytest.raises(SessionError, match="the ledger of session mine is damaged"):
            sessions.find("mine")
    begun.ledger.write_bytes(data)
    (begun.folder / HEAD).write_text("2 lines\n")
    with refused(SessionError, "ledger.head is damaged"):
        sessions.find("mine")


def test_a_head_that_is_behind(begun: SessionFolder, sessions: Sessions) -> None:
    """After a crash between a line and its head the line counts, and the next write repairs the head."""
    head = begun.folder / HEAD
    head.unlink()
    with sessions.locked("mine") as stored:
        stored.commit(turn(4, rows=""))
    before = head.read_text()
    for change in (lambda: stored.commit(turn(5, rows="")), lambda: stored.rewrite(turn(6, rows=""))):
        with sessions.locked("mine") as stored:
            change()
        now = head.read_text()
        head.write_text(before)
        sessions.find("mine")
        head.write_text(now)
        before = now
    assert sessions.find("mine").state.tokens == [6]


def test_a_line_that_cannot_be_synced_has_not_happened(
    begun: SessionFolder, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete line is removed again if syncing fails, as the error message promises."""
    before = begun.ledger.read_bytes()

    def fsync(handle: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, sessions.locked("mine") as stored:
        patch.setattr("os.fsync", fsync)
        with pytest.raises(SessionError, match=r"Input/output error. Nothing was changed"):
            stored.commit(turn(4, rows="0002.gguf"))
    assert begun.ledger.read_bytes() == before
    with sessions.locked("mine") as stored:
        stored.commit(turn(4, rows="0002.gguf"))
        assert stored.state.tokens == [1, 2, 3, 4]


def test_files_that_no_line_names_go(begun: SessionFolder, sessions: Sessions) -> None:
    """Undone K/V and leftovers of killed processes are removed with the next line, not earlier. Foreign files and
    folders survive that, and the removal of the session."""
    begun.next_rows.write_bytes(b"second")
    (begun.folder / ".0002.gguf.abc.tmp").write_bytes(b"")
    begun.commit(turn(4, rows="0002.gguf"))
    assert {path.name for path in begun.folder.iterdir()} == {LEDGER, HEAD, "0001.gguf", "0002.gguf"}
    assert begun.undo()["pieces"][0]["tokens"] == [4]
    assert {path.name for path in begun.folder.iterdir()} == {LEDGER, HEAD, "0001.gguf"}
    begun.undo()
    with pytest.raises(SessionError, match="nothing to undo in session mine"):
        begun.undo()
    strange = [begun.folder / name for name in ("mine.txt", "1.gguf", ".hidden", "0009.gguf.bak", ".x.tmp")]
    for path in strange:
        path.write_text("mine")
    (begun.folder / "folder").mkdir()
    begun.next_rows.write_bytes(b"second")
    begun.commit(turn(4, rows="0002.gguf"))
    begun.undo()
    assert not (begun.folder / "0002.gguf").exists()
    assert sessions.remove("mine") == [begun.folder] and sessions.names() == []
    assert {*begun.folder.iterdir()} == {*strange, begun.folder / "folder"}
    with sessions.locked("mine", new=True) as stored:
        stored.commit(turn(1, rows=""), HEADER)
    assert all(path.read_text() == "mine" for path in strange)


def test_a_folder_that_others_can_write_in(sessions: Sessions) -> None:
    """Ledger and K/V could be anyone's: refused, with the command that repairs it. Folders of sessions and locks are
    made private, whatever the umask."""
    before = os.umask(0)
    try:
        with sessions.locked("mine", new=True) as begun:
            begun.commit(turn(1, rows=""), HEADER)
        sessions.fork("mine", "other")
    finally:
        os.umask(before)
    folders = (sessions.folder, sessions.folder / ".locks", begun.folder, sessions.folder / "other")
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 4
    assert begun.ledger.stat().st_mode & 0o777 == 0o600
    for folder in (begun.folder, sessions.folder):
        folder.chmod(0o770)
        as_a_new_process()
        with refused(NotesError, f"run: chmod 700 {folder}$"):
            sessions.find("mine")
        folder.chmod(0o755)
        as_a_new_process()
        assert sessions.find("mine").name == "mine" and folder.stat().st_mode & 0o777 == 0o700


def test_names_in_any_script(sessions: Sessions) -> None:
    """An invalid name is refused with a valid one, and so are confusable names; a folder without a ledger is none."""
    (sessions.folder / "half").mkdir(parents=True)
    with sessions.locked("gru\u0308ße", new=True) as stored:
        stored.commit(turn(1, rows=""), HEADER)
    assert sessions.names() == ["grüße"] and sessions.find("gru\u0308ße").name == "grüße"
    named = {"Mein Tag": "such as mein-tag", "../x": "such as x", "": "single -$", "Mine": "mine", "a/b": "not a valid"}
    for name, message in named.items():
        with pytest.raises(SessionError, match=message), sessions.locked(name, new=True):
            pass
    with pytest.raises(SessionError, match="there is already grüße"), sessions.locked("grüsse", new=True):
        pass
    sessions.fork("grüße", "方針")
    assert sessions.names() == ["grüße", "方針"]


def test_a_fork_shares_rows_and_nothing_else(begun: SessionFolder, sessions: Sessions) -> None:
    """Both have the same inode; lines appended or undone in one session do not affect the other."""
    sessions.fork("mine", "other")
    other = sessions.find("other")
    assert (other.folder / "0001.gguf").samefile(begun.folder / "0001.gguf")
    other.commit(turn(4, rows=""))
    other.undo()
    other.undo()
    assert sessions.find("mine").state.tokens == [1, 2, 3] and (begun.folder / "0001.gguf").read_bytes() == b"rows"
    with pytest.raises(SessionError, match="there is a session other already"):
        sessions.fork("mine", "other")
    with pytest.raises(SessionError, match=r"no session 'mien'\. Did you mean mine"):
        sessions.fork("mien", "third")
    assert sessions.names() == ["mine", "other"]


def test_a_fork_is_held_like_what_it_came_from(begun: SessionFolder, sessions: Sessions) -> None:
    """Both are locked at once; a session without a turn cannot be forked, nor a session into itself."""
    with sessions.locked("mine") as stored, sessions.forked(stored, "other") as fork:
        for name in ("mine", "other"):
            with pytest.raises(SessionError, match="is open already"), sessions.locked(name):
                pass
        fork.commit(turn(4, rows=""))
        with pytest.raises(SessionError, match="there is a session mine already"), sessions.forked(fork, "mine"):
            pass
        with pytest.raises(SessionError, match="there is a session other already"), sessions.forked(fork, "other"):
            pass
    assert [sessions.find(name).state.tokens for name in ("mine", "other")] == [[1, 2, 3], [1, 2, 3, 4]]
    with (
        sessions.locked("empty", new=True) as stored,
        pytest.raises(SessionError, match="nothing to fork in session empty: it has no turn"),
        sessions.forked(stored, "third"),
    ):
        pass
    assert sessions.names() == ["mine", "other"]


def test_one_process_at_a_time(begun: SessionFolder, sessions: Sessions) -> None:
    """A second process fails at once with one line, and succeeds when the first is done; other sessions are free."""
    code = (
        "import sys; from pathlib import Path; from notes_cli.sessions.folder import Sessions\n"
        "for name in ('free', 'mine'):\n"
        "    with Sessions(Path(sys.argv[1])).locked(name, new=True): print('held', name)"
    )
    with sessions.locked("mine"):
        found = subprocess.run([sys.executable, "-c", code, str(sessions.folder)], capture_output=True, text=True)
        assert "session mine is open already, here or in another process." in found.stderr
        assert found.stdout == "held free\n"
    with sessions.locked("mine") as stored:
        assert stored.state.tokens == [1, 2, 3]


def test_all_are_removed_or_none(begun: SessionFolder, sessions: Sessions) -> None:
    """A locked or missing session prevents the removal of the others; duplicate names count once. If a file cannot be
    deleted, the error names the sessions removed by then."""
    sessions.fork("mine", "other")
    with sessions.locked("other"), pytest.raises(HeldSessionError, match="session other is open already"):
        sessions.remove("mine", "other")
    with pytest.raises(SessionError, match="there is no session 'third'"):
        sessions.remove("mine", "third")
    assert sessions.names() == ["mine", "other"] and sessions.find("mine").state == begun.state
    assert sessions.remove("other", "mine", "other") == [sessions.folder / "other", begun.folder]
    assert sessions.names() == []
    for name in ("one", "two"):
        with sessions.locked(name, new=True) as stored:
            stored.commit(turn(1, rows=""), HEADER)
    (stored.folder / HEAD).unlink()
    (stored.folder / HEAD).mkdir()
    with pytest.raises(SessionError, match=r"cannot remove .*two: .*\. Removed before it: one$"):
        sessions.remove("one", "two")


def test_the_last_name_of_rows_is_taken(begun: SessionFolder, sessions: Sessions) -> None:
    """A forged line has the last name: the session continues with the unused ones."""
    with sessions.locked("mine") as stored:
        stored.commit(turn(4, rows="999999999.gguf"))
        stored.commit(turn(5, rows="0004.gguf"))
        assert stored.next_rows.name == "0005.gguf"
        stored.commit(turn(6, rows="0003.gguf"))
        assert stored.next_rows.name == "0005.gguf"
        stored.commit(turn(7, rows="0006.gguf"))
        stored.commit({"op": "undo"})
        assert stored.next_rows.name == "0007.gguf"


def test_a_full_disk_leaves_what_was_there(begun: SessionFolder, sessions: Sessions) -> None:
    """If a turn, a fork or a first turn cannot be written, one line has the reason, and nothing has changed."""
    before = begun.ledger.read_bytes()
    for nbytes in (0, len(before), len(before) + 10):
        with small_files(nbytes), pytest.raises(SessionError, match=r"cannot write .*: File too large\. Nothing was"):
            begun.commit(turn(4, 5, rows="0002.gguf"))
        assert begun.ledger.read_bytes() == before and SessionFolder(begun.folder).state.tokens == [1, 2, 3]
    with small_files(10), pytest.raises(SessionError, match=r"cannot write .*other: File too large\. Nothing was"):
        sessions.fork("mine", "other")
    with (
        sessions.locked("new", new=True) as stored,
        small_files(10),
        pytest.raises(SessionError, match=r"cannot write .*: File too large\. Nothing was"),
    ):
        stored.commit(turn(1, rows=""), HEADER)
    assert sessions.names() == ["mine"]
    assert sorted(path.name for path in sessions.folder.iterdir()) == [".locks", "mine"]
    assert not list(sessions.folder.rglob("*.tmp"))


@pytest.mark.parametrize("there", [False, True])
def test_a_session_that_was_not_begun_leaves_no_folder(sessions: Sessions, there: bool) -> None:
    """K/V written before the first turn failed is removed; that of a session whose ledger was lost is not."""
    folder = sessions.folder / "new"
    if there:
        folder.mkdir(parents=True, mode=0o700)
    with pytest.raises(KeyboardInterrupt), sessions.locked("new", new=True) as stored:
        folder.mkdir(parents=True, exist_ok=True)
        stored.next_rows.write_bytes(b"rows")
        raise KeyboardInterrupt
    assert folder.exists() == there
