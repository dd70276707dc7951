"""Sessions compared with a full prefill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from notes_cli.config import paths
from notes_cli.editing.methods import Method
from notes_cli.errors import NotesError
from notes_cli.measure.examination import Cause, LayerError, Point, SessionReport, verify_session
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.sessions.session_kv import SessionKV
from notes_cli.text.skill import Skill

from ..conftest import MakeWorkspace

END = Point(None, 1.0, 0.0, True, None, None)
ASKED = Point("Why?", 1.0, 0.0, True, "a", "a")
ERROR = LayerError(0, "attention", 0.1, 0.2, 3)


@pytest.fixture
def session(workspace: Workspace, skill: Skill) -> Iterator[Session]:
    """One turn, spliced at its compiled position: exact."""
    with Sessions(paths().sessions).locked("mine", new=True) as stored:
        session = Session(workspace, stored)
        prompt = Prompt("Why?", [compile_skill(workspace, skill)])
        session.begin(prompt, assemble(workspace, prompt))
        session.keep("yes")
        yield session


def measured(session: Session) -> SessionReport:
    """Verify a session restored from disk."""
    return verify_session(Session(session.workspace, session.stored), ["When?"], choices=["a", "b"])


@pytest.mark.parametrize(
    ("point", "passed"),
    [(ASKED, True), (replace(ASKED, decision="b"), False), (replace(ASKED, cosine=0.9), False)],
)
def test_what_passes(point: Point, passed: bool) -> None:
    """Equal decisions, and a mean cosine of 0.99."""
    report = SessionReport(9, (END, point), (ERROR, replace(ERROR, k=0.3)), (), ())
    assert report.passed is passed and report.largest.k == 0.3


def test_a_session_is_its_prefill(session: Session) -> None:
    """Also after errata, suffix edits and a compaction: only rounding differs, and no cause is reported."""
    for number in range(2):
        session.edit("date", f"2026-07-0{number + 1}", Method())
        session.follow("And then?")
        session.keep("no")
    session.edit("tier", "basic", Method("suffix"))
    session.compact()
    report = measured(session)
    assert report.passed and report.cosine > 0.9999 and not report.causes
    assert max(report.largest.k, report.largest.v) < 0.01
    assert [(edit.text, edit.how) for edit in report.edits] == [
        *(("date=2026-07-01", "erratum"), ("date=2026-07-02", "erratum"), ("tier=basic", "suffix")),
    ]


def test_stale_rows_are_seen_where_they_are(session: Session) -> None:
    """After an edit in place, K/V before it is exact, later K/V differs, and the edit is the cause."""
    session.edit("date", "2026-12-24", Method("field"))
    report = measured(session)
    start = session.state.skills[0].fields[0].first + session.state.skills[0].position
    assert report.largest.position > start and max(report.largest.k, report.largest.v) > 0.03
    assert report.layers[0].k < 0.001  # the first layer depends only on its own token
    assert report.causes == {Cause.IN_PLACE: ("date=2026-12-24",)}


def test_a_correction_of_a_turn_is_a_cause(session: Session) -> None:
    """An erratum with a question edits in place, too."""
    session.follow("And then?", errata=["tier=basic"])
    session.keep("no")
    report = measured(session)
    assert report.largest.k > 0.01 and report.causes == {Cause.IN_PLACE: ("returns",)}


def test_rows_of_another_left_context_are_a_reason(workspace: Workspace, skill: Skill) -> None:
    """A moved skill was compiled after a different context."""
    with Sessions(paths().sessions).locked("mine", new=True) as stored:
        session = Session(workspace, stored)
        prompt = Prompt("Why?", [compile_skill(workspace, skill)], system="Be kind.")
        session.begin(prompt, assemble(workspace, prompt))
        session.keep("yes")
        assert measured(session).causes == {Cause.OTHER_CONTEXT: ("returns",)}


def test_the_session_stays_as_it_is(session: Session) -> None:
    """No question of a verification is kept, on disk or in the sequence. Without a turn there is nothing to compare."""
    ledger, tokens = session.stored.ledger.read_bytes(), list(session.state.tokens)
    report = verify_session(session, ["When?", "Who?"])
    assert [point.question for point in report.points] == [None, "When?", "Who?"]
    assert session.stored.ledger.read_bytes() == ledger
    assert session.sequence.tokens.tolist() == tokens == session.state.tokens
    session.undo()
    with pytest.raises(NotesError, match="session mine has no turn"):
        verify_session(session, ["When?"])


def test_rows_of_another_session_do_not_pass(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: K/V of other tokens differs clearly from the prefill."""
    read = SessionKV._restore

    def spoilt(self: SessionKV) -> object:
        sequence = read(self)
        positions = list(range(5, 25))
        sequence.context.rewrite(sequence.seq_id, positions, np.full(len(positions), 65, np.int32))
        return sequence

    monkeypatch.setattr(SessionKV, "_restore", spoilt)
    session.sequence.close()  # restored from disk
    report = measured(session)
    assert max(report.largest.k, report.largest.v) > 0.5 and report.cosine < 0.999


def test_a_session_longer_than_a_fresh_context(make_workspace: MakeWorkspace, session: Session) -> None:
    """The context grows."""
    session.follow("x" * (512 - len(session.state.tokens) - 40))
    session.keep("no")
    workspace = make_workspace(n_ctx=256)
    report = verify_session(Session(workspace, session.stored), ["When?"], choices=["a", "b"])
    assert report.passed and report.tokens == len(session.state.tokens) > 256 and workspace.context.n_ctx > 256
