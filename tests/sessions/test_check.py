"""Checking sessions: damage is reported, leftovers are removed, and files that a ledger needs are never touched."""

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
from notes_cli.sessions import LEDGER
from notes_cli.sessions.archive import check_sessions
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.skill import parse_skill

from ..refused import refused
from .ledgers import snapshot


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
    assert (first.kind, first.path.name, first.mend) == ("damaged", "0001.gguf", None)
    assert "0002.gguf are missing" in second.what and second.mend is None


def test_a_ledger_that_is_damaged(sessions: Sessions) -> None:
    """The damage is reported, nothing is repaired, and no K/V file counts as a leftover."""
    ledger = sessions.folder / "mine" / LEDGER
    data = ledger.read_bytes()
    for damaged, why in (
        (data.replace(b"Why?", b"Who?"), "line 2 is not as it was written"),
        (data[:-20], "it ends within line 3 of 3"),
        (b"", "it is empty"),
        (None, "is missing"),
    ):
        ledger.unlink() if damaged is None else ledger.write_bytes(damaged)
        before = snapshot(ledger.parent)
        (finding,) = found(sessions)
        assert finding.kind == "damaged" and finding.mend is None and why in finding.what
        assert snapshot(ledger.parent) == before


def test_rows_that_only_an_undo_needs(workspace: Workspace, sessions: Sessions) -> None:
    """A missing file is found although an edit recomputed all of its K/V, because the edit can be undone."""
    with sessions.locked("undone", new=True) as stored, Session(workspace, stored) as session:
        skill = compile_skill(workspace, parse_skill("date: 2026-06-01", source="x.txt", default="returns"))
        session.ask(Request("Why?", splice=[skill], max_tokens=2))
        session.ask(Request("And then?", max_tokens=2))
        session.edit("date", "2026-07-01", Method.parse("suffix"))
        assert "0002.gguf" not in {name for name, _ in session.state.rows}
    (stored.folder / "0002.gguf").unlink()
    (finding,) = found(sessions)
    assert "session undone: the rows 0002.gguf are missing" in finding.what


def test_rows_of_another_file(workspace: Workspace, sessions: Sessions) -> None:
    """A valid file with the same tokens is refused: its checksum is not the one in the ledger."""
    path = sessions.folder / "mine" / "0001.gguf"
    segment = open_segment(path)
    layers = tuple(replace(rows, k=-rows.k) for rows in segment.layers)
    write_segment(path, replace(segment, layers=layers))
    (finding,) = found(sessions)
    assert finding.kind == "damaged" and "0001.gguf in it is not the file that the ledger names" in finding.what
    with sessions.locked("mine") as stored, Session(workspace, stored) as session:
        with refused(SessionError, "0001.gguf is not the file that the ledger of session mine names"):
            session.ask(Request("Last?", max_tokens=2))
        assert stored.state.turns == 2


def test_what_no_line_needs_goes(sessions: Sessions) -> None:
    """Half a line, K/V of a line that was never written, temporary files, imports and forks that were killed are
    removed; foreign files stay. A sound session has no findings, and one in use is not checked."""
    folder, others = sessions.folder / "mine", [sessions.folder / name for name in (".new.import", "fork", "kept")]
    before = snapshot(folder)
    assert found(sessions) == [] and snapshot(folder) == before
    assert found(Sessions(sessions.folder / "none")) == []
    with (folder / LEDGER).open("ab") as file:
        file.write(b'{"op": "tu')
    for name in ("0009.gguf", f".{LEDGER}.abc.tmp", "letter.txt"):
        (folder / name).write_text("x")
        (folder / name).chmod(0o600)
    with sessions.locked("mine"):
        (busy,) = found(sessions)
    assert busy.kind == "busy" and busy.mend is None
    for other in others:
        other.mkdir()
        (other / ("letter.txt" if other.name == "kept" else "0001.gguf")).write_text("x")
    findings = {one.path.name: one for one in found(sessions)}
    assert set(findings) == {LEDGER, f".{LEDGER}.abc.tmp", "0009.gguf", *(other.name for other in others)}
    assert "its last 10 bytes" in findings[LEDGER].what
    for one in findings.values():
        assert one.kind in ("leftover", "orphan") and one.mend
        one.mend()
    assert snapshot(folder) == before | {"letter.txt": b"x"}
    assert [other.exists() for other in others] == [False, False, True] and snapshot(others[2]) == {"letter.txt": b"x"}
    assert sessions.names() == ["mine"]
