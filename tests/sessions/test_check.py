"""Checking sessions: damage is reported, leftovers are removed, and files that a session needs are never touched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from notes_cli.editing.methods import Method
from notes_cli.errors import SessionError
from notes_cli.library.check import Finding
from notes_cli.library.container import open_segment, write_segment
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.archive import check_sessions
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.skill import parse_skill

from ..refused import refused
from .snapshots import snapshot


@pytest.fixture
def sessions(workspace: Workspace) -> Sessions:
    """One session of two turns, `mine`."""
    sessions = Sessions(workspace.paths.sessions)
    with sessions.locked("mine", new=True) as stored, Session(workspace, stored) as session:
        for question in ("Why?", "And then?"):
            session.ask(Request(question, max_tokens=2))
    return sessions


def found(sessions: Sessions) -> list[Finding]:
    return list(check_sessions(sessions))


def test_rows_that_are_damaged_or_missing(sessions: Sessions) -> None:
    """Each is reported with its file, and not repaired: the session can be undone to an earlier turn."""
    folder = sessions.folder / "mine"
    data = bytearray((folder / "0001.gguf").read_bytes())
    data[-40] ^= 1
    (folder / "0001.gguf").write_bytes(data)
    (folder / "0002.gguf").unlink()
    first, second = found(sessions)
    assert first.path.name == "0001.gguf" and "0002.gguf are missing" in second.what


def test_a_snapshot_that_is_damaged(sessions: Sessions) -> None:
    """The last one, or an earlier one, which an undo would need: reported, and nothing is repaired."""
    folder = sessions.folder / "mine"
    for name, why in (("0001.json", "0001.json is damaged"), ("0002.json", "0002.json, is damaged")):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data.replace(b"Why?", b"Who?"))
        before = snapshot(folder)
        (finding,) = found(sessions)
        assert why in finding.what
        assert snapshot(folder) == before
        (folder / name).write_bytes(data)


def test_rows_that_only_an_undo_needs(workspace: Workspace, sessions: Sessions) -> None:
    """A missing file is found although an edit recomputed all of its K/V, because the edit can be undone."""
    with sessions.locked("undone", new=True) as stored, Session(workspace, stored) as session:
        skill = compile_skill(workspace, parse_skill("date: 2026-06-01", source="x.txt", default="returns"))
        session.ask(Request("Why?", splice=[skill], max_tokens=2))
        session.ask(Request("And then?", max_tokens=2))
        session.edit("date", "2026-07-01", Method.parse("suffix"))
        assert "0002.gguf" not in {rows.file for rows in session.state.rows}
    (stored.folder / "0002.gguf").unlink()
    (finding,) = found(sessions)
    assert "session undone: the rows 0002.gguf are missing" in finding.what


def test_rows_of_another_file(workspace: Workspace, sessions: Sessions) -> None:
    """A valid file with the same tokens is refused: its checksum is not the one in the snapshots."""
    path = sessions.folder / "mine" / "0001.gguf"
    segment = open_segment(path)
    layers = tuple(replace(rows, k=-rows.k) for rows in segment.layers)
    write_segment(path, replace(segment, layers=layers))
    (finding,) = found(sessions)
    assert "0001.gguf is not the file that the session names" in finding.what
    with sessions.locked("mine") as stored, Session(workspace, stored) as session:
        with refused(SessionError, "0001.gguf is not the file that the session names"):
            session.ask(Request("Last?", max_tokens=2))
        assert stored.state.turns == 2


def test_a_sound_session_has_no_findings_and_folders_that_are_left_have(sessions: Sessions) -> None:
    """Of imports and forks that were killed; a session in use is not checked."""
    before = snapshot(sessions.folder / "mine")
    assert found(sessions) == [] == found(Sessions(sessions.folder / "none"))
    for name in (".new.import", "fork"):
        (sessions.folder / name).mkdir()
    (sessions.folder / "mine" / "0001.gguf").write_bytes(b"x")
    with sessions.locked("mine"):
        assert [finding.path.name for finding in found(sessions)] == [".new.import", "fork"]
    (sessions.folder / "mine" / "0001.gguf").write_bytes(before["0001.gguf"])
    assert snapshot(sessions.folder / "mine") == before and len(found(sessions)) == 2
