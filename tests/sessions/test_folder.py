"""Sessions on disk: the last complete snapshot counts, damage is detected, and no concurrent turn is lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from notes_cli.errors import HeldSessionError, NotesError, SessionError
from notes_cli.sessions import LEDGER
from notes_cli.sessions.folder import SessionFolder, Sessions

from ..limits import as_a_new_process, small_files
from ..refused import refused
from .snapshots import asked, commit, snapshot

FIRST, SECOND = asked("Why?"), asked("Why?", "And then?")


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "sessions")


@pytest.fixture
def begun(sessions: Sessions) -> SessionFolder:
    """A session of two turns."""
    with sessions.locked("mine", new=True) as stored:
        commit(stored, FIRST)
        commit(stored, SECOND)
    return sessions.find("mine")


def test_a_byte_that_is_not_as_it_was_written(begun: SessionFolder, sessions: Sessions) -> None:
    """Anywhere in the last snapshot, or cut off anywhere: refused with the way back, and nothing is written. An undo
    goes back to the snapshot before."""
    path = begun.path(2)
    data = path.read_bytes()
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data), 41)]
    for damaged in (
        *changed,
        *(data[:at] for at in range(0, len(data), 53)),
        data + b"\n",
        begun.path(1).read_bytes()[:-1],
    ):
        path.write_bytes(damaged)
        before = snapshot(begun.folder)
        with refused(SessionError, r"snapshot of session mine, 0002.json, is damaged: it is .*undo mine"):
            _ = sessions.find("mine").state
        assert snapshot(begun.folder) == before and sessions.names() == ["mine"]
    with sessions.locked("mine") as stored:
        assert stored.undo() == {"op": "snapshot", "what": "0002.json"} and stored.state == FIRST
    assert sessions.find("mine").state == FIRST
    begun.path(0).unlink()
    begun.path(1).write_bytes(b"{}")
    with pytest.raises(SessionError, match=r"0001.json, is damaged.*Put a copy of it back"):
        _ = sessions.find("mine").state
    sessions.remove("mine")


def forged(begun: SessionFolder, change: Callable[[Any], object]) -> None:
    """Change the last snapshot's JSON, with a right checksum."""
    content = json.loads(begun.path(2).read_bytes().split(b"\n")[0])
    change(content)
    line = json.dumps(content).encode()
    begun.path(2).write_bytes(line + b"\n" + sha256(line).hexdigest().encode() + b"\n")


def put(*keys: Any, to: Any) -> Callable[[Any], object]:
    """A change of one value in the JSON."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


SKILL = {"name": "a", "text": "b", "fields": []}
WRONG = [
    *(put("header", "model", to=value) for value in (3, None)),
    *(put("header", "identity", "rope", to=value) for value in (1, [])),
    *(put("state", "tokens", 0, to=value) for value in (float("inf"), 4.0, "4", True, -1, 2**31, None)),
    *(put("state", "rows", 0, key, to=value) for key in ("first", "count") for value in (-1, "1")),
    *(put("state", "rows", 0, "file", to=value) for value in ("../../x", "0009.gguf", "", 3)),
    *(
        put("files", to=value)
        for value in ({"../x.gguf": "?"}, {"0001.gguf": 3, "0002.gguf": "?"}, [], {"99999999999.gguf": ""})
    ),
    *(
        put("state", "pieces", 0, key, to=value)
        for key in ("position", "tokens", "turn")
        for value in (-1, 7, "1", None)
    ),
    *(put("state", "pieces", 0, "reason", to=value) for value in ("sent_by_mail", 3, [1])),
    *(put("state", "skills", to=value) for value in ([SKILL], [SKILL | {"position": 3}], {}, None)),
    *(
        put("state", "conversation", 0, key, to=value)
        for key, value in (("messages", []), ("answer", [{"tokens": [7]}]), ("x", 1))
    ),
    put("state", "conversation", 0, "messages", 0, "parts", 0, to={"picture": 3}),
    put("state", "corrections", to={"values": {"a.b": "c"}}),
    put("state", "images", to=[{"first": 0, "last": 99, "positions": 99}]),
    *(put(key, to=value) for key in ("op", "time", "state", "format") for value in (None, [], {"x": 1})),
]


@pytest.mark.parametrize("change", WRONG)
def test_nothing_of_a_snapshot_is_believed(
    begun: SessionFolder, sessions: Sessions, change: Callable[[Any], object]
) -> None:
    """With a valid checksum. The session can still be listed and removed."""
    forged(begun, change)
    with refused(SessionError, "0002.json, is damaged: its values contradict each other"):
        _ = sessions.find("mine").state
    assert sessions.names() == ["mine"]
    sessions.remove("mine")
    assert sessions.names() == [] and not begun.folder.exists()


def test_a_snapshot_is_read_as_it_was_written(begun: SessionFolder, sessions: Sessions) -> None:
    """The control of the two tests before. Those of other versions are refused with the remedy."""
    forged(begun, lambda content: None)
    assert sessions.find("mine").state == begun.state == SECOND
    forged(begun, put("format", to=12))
    with pytest.raises(SessionError, match=r"has format 12, this version of notes reads 11\. Update notes"):
        _ = sessions.find("mine").state
    old = sessions.folder / "old"
    old.mkdir(mode=0o700)
    (old / LEDGER).write_text('{"op": "open", "format": 8}\n')
    with refused(SessionError, "session old was kept by an earlier version of notes, which this one does not read"):
        _ = sessions.find("old").state
    assert sessions.names() == ["mine", "old"]
    sessions.remove("old")
    assert not old.exists()


def test_files_that_no_snapshot_needs_go(begun: SessionFolder) -> None:
    """Undone K/V and leftovers of killed processes are removed with the next snapshot, and what was forgotten for good
    also after a kill. Foreign files and folders survive that, and the removal of the session."""
    (begun.folder / "0003.gguf").write_bytes(b"killed")
    (begun.folder / ".0002.json.abc.tmp").write_bytes(b"")
    strange = [begun.folder / name for name in ("mine.txt", "1.gguf", ".hidden", "0009.gguf.bak", "00001.json")]
    for path in strange:
        path.write_text("mine")
    (begun.folder / "folder").mkdir()
    own = lambda: {*snapshot(begun.folder)} - {path.name for path in strange}  # noqa: E731
    commit(begun, asked("A", "B", "C"))
    assert own() == {f"000{number}.json" for number in range(4)} | {f"000{number}.gguf" for number in (1, 2, 3)}
    assert begun.undo() == {"op": "turn", "what": "C"} and begun.state == SECOND
    assert own() == {f"000{number}.json" for number in range(3)} | {"0001.gguf", "0002.gguf"}
    kept = snapshot(begun.folder)
    commit(begun, FIRST, "forget", for_good=True)
    assert own() == {"0003.json", "0003.gguf"}
    for name, data in kept.items():
        (begun.folder / name).write_bytes(data)  # as if killed before they were removed
    sessions = Sessions(begun.folder.parent)
    with sessions.locked("mine") as stored:
        assert own() == {"0003.json", "0003.gguf"}
        with pytest.raises(
            SessionError, match=r"nothing to undo in session mine: what was forgotten by suffix is gone"
        ):
            stored.undo()
        commit(stored, SECOND)
        assert own() == {"0003.json", "0003.gguf", "0004.json", "0004.gguf"} and stored.undo()["op"] == "turn"
    assert sessions.remove("mine") == [begun.folder] and sessions.names() == []
    assert {*begun.folder.iterdir()} == {*strange, begun.folder / "folder"}


def test_all_can_be_undone_and_no_more(begun: SessionFolder) -> None:
    begun.undo()
    begun.undo()
    assert begun.state.turns == 0 and begun.header
    with pytest.raises(SessionError, match=r"nothing to undo in session mine$"):
        begun.undo()
    commit(begun, FIRST)
    assert begun.state == FIRST and begun.numbers == [0, 1]


def test_a_folder_that_others_can_write_in(sessions: Sessions) -> None:
    """Snapshots and K/V could be anyone's: refused, with the command that repairs it. Folders of sessions and locks are
    made private, whatever the umask."""
    before = os.umask(0)
    try:
        with sessions.locked("mine", new=True) as begun:
            commit(begun, FIRST)
        sessions.fork("mine", "other")
    finally:
        os.umask(before)
    folders = (sessions.folder, sessions.folder / ".locks", begun.folder, sessions.folder / "other")
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 4
    assert begun.path(1).stat().st_mode & 0o777 == 0o600
    for folder in (begun.folder, sessions.folder):
        folder.chmod(0o770)
        as_a_new_process()
        with refused(NotesError, f"run: chmod 700 {folder}$"):
            sessions.find("mine")
        folder.chmod(0o755)
        as_a_new_process()
        assert sessions.find("mine").name == "mine" and folder.stat().st_mode & 0o777 == 0o700


def test_names_in_any_script(sessions: Sessions) -> None:
    """An invalid name is refused with a valid one, and so are confusable names; a folder without a snapshot is none."""
    (sessions.folder / "half").mkdir(parents=True)
    with sessions.locked("gru\u0308ße", new=True) as stored:
        commit(stored, FIRST)
    assert sessions.names() == ["grüße"] and sessions.find("gru\u0308ße").name == "grüße"
    named = {"Mein Tag": "such as mein-tag", "../x": "such as x", "": "single -$", "a/b": "not a valid"}
    for name, message in named.items():
        with pytest.raises(SessionError, match=message), sessions.locked(name, new=True):
            pass
    with pytest.raises(SessionError, match="there is already grüße"), sessions.locked("grüsse", new=True):
        pass
    sessions.fork("grüße", "方針")
    assert sessions.names() == ["grüße", "方針"]


def test_a_fork_shares_rows_and_nothing_else(begun: SessionFolder, sessions: Sessions) -> None:
    """Both have the same inode; what is done or undone in one session does not affect the other. Both are locked at
    once; a session without a turn cannot be forked, nor a session into itself."""
    with sessions.locked("mine") as stored, sessions.forked(stored, "other") as other:
        assert (other.folder / "0001.gguf").samefile(begun.folder / "0001.gguf") and other.state == SECOND
        for name in ("mine", "other"):
            with pytest.raises(SessionError, match="is open already"), sessions.locked(name):
                pass
        other.undo()
        commit(other, SECOND)
        other.undo()
        other.undo()
    assert sessions.find("mine").state == SECOND and (begun.folder / "0002.gguf").read_bytes() == b"rows"
    for name in ("other", "mine"):
        with pytest.raises(SessionError, match=f"there is a session {name} already"):
            sessions.fork("mine", name)
    with pytest.raises(SessionError, match=r"no session 'mien'\. Did you mean mine"):
        sessions.fork("mien", "third")
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
        assert stored.state == SECOND


def test_all_are_removed_or_none(begun: SessionFolder, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked or missing session prevents the removal of the others; duplicate names count once. If a file cannot be
    deleted, the error names the sessions removed by then."""
    sessions.fork("mine", "other")
    with sessions.locked("other"), pytest.raises(HeldSessionError, match="session other is open already"):
        sessions.remove("mine", "other")
    with pytest.raises(SessionError, match="there is no session 'third'"):
        sessions.remove("mine", "third")
    assert sessions.names() == ["mine", "other"] and sessions.find("mine").state == begun.state
    unlink = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "other":
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, missing_ok=missing_ok)

    with (
        monkeypatch.context() as patch,
        pytest.raises(SessionError, match=r"cannot remove .*other: .*before it: mine$"),
    ):
        patch.setattr(Path, "unlink", failing)
        sessions.remove("mine", "other")
    assert sessions.remove("other", "other") == [sessions.folder / "other"]
    assert sessions.names() == []


def test_a_full_disk_leaves_what_was_there(begun: SessionFolder, sessions: Sessions) -> None:
    """If a turn, an import or a first turn cannot be written, one line has the reason, and nothing has changed."""
    before = snapshot(begun.folder)
    for nbytes in (10, 300):
        with small_files(nbytes), pytest.raises(SessionError, match=r"cannot write .*: File too large\. Nothing was"):
            commit(begun, asked("A", "B", "C"))
        begun.sweep()
        assert snapshot(begun.folder) == before and SessionFolder(begun.folder).state == SECOND
    with (
        sessions.locked("new", new=True) as stored,
        small_files(10),
        pytest.raises(SessionError, match=r"cannot write .*: File too large\. Nothing was"),
    ):
        commit(stored, FIRST)
    assert sessions.names() == ["mine"] and not list(sessions.folder.rglob("*.tmp"))
    assert sorted(path.name for path in sessions.folder.iterdir()) == [".locks", "mine"]


@pytest.mark.parametrize("there", [False, True])
def test_a_session_that_was_not_begun_leaves_no_folder(sessions: Sessions, there: bool) -> None:
    """K/V written before the first turn failed is removed; that of a session whose snapshots were lost is not."""
    folder = sessions.folder / "new"
    if there:
        folder.mkdir(parents=True, mode=0o700)
    with pytest.raises(KeyboardInterrupt), sessions.locked("new", new=True) as stored:
        folder.mkdir(parents=True, exist_ok=True)
        stored.next_rows.write_bytes(b"rows")
        raise KeyboardInterrupt
    assert folder.exists() == there


def test_it_needs_no_llama_cpp() -> None:
    code = "import sys, notes_cli.sessions.folder, notes_cli.sessions.archive; sys.exit('notes_cli.lib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
