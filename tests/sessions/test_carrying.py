"""Sessions with skills that recurrent state was carried through: restored from disk, and corrected by errata."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from reference import nmse

from notes_cli.config import paths
from notes_cli.editing.methods import Method
from notes_cli.engine.pieces import Reason
from notes_cli.errors import NotesError
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeWorkspace
from .test_session import held, logits, turn

FEES = parse_skill("fee: 5 euros\nThe fee is due at once, and in full.", source="fees.txt", default="fees")
Open = Callable[..., Workspace]

pytestmark = pytest.mark.patches("recurrent")


@pytest.fixture(params=["lfm2", "mamba"])
def make(request: pytest.FixtureRequest, make_workspace: MakeWorkspace) -> Open:
    """A workspace on a hybrid model, or one with recurrent layers only; by default with carried state."""
    return lambda carry=True, **settings: make_workspace(request.param, carry=carry, **settings)


def carried(session: Session) -> list[str]:
    return [piece.name for piece in session.sequence.pieces if piece.reason is Reason.CARRIED]


def test_a_session_with_a_carried_skill_grows_beyond_its_context(make: Open, skill: Skill) -> None:
    found = []
    for n_ctx in (256, 1024):
        workspace = make(n_ctx=n_ctx)
        with held(workspace) as session:
            turn(session, skill, "Why?")
            assert carried(session) == ["returns"]
            sequence = session.follow("x" * 500, room=4)
            assert workspace.context.n_ctx >= 600
            found.append(sequence.logits())
        Sessions(paths().sessions).remove("mine")
    assert np.allclose(*found, rtol=1e-3, atol=1e-3 * np.abs(found[0]).max())


def test_what_rewrites_a_carried_skill_is_refused_or_decodes_all(make: Open, skill: Skill) -> None:
    """No state is kept within a skill: edits in place are refused, and suffix decodes everything."""
    with held(make()) as session:
        turn(session, skill, "Why?")
        before = session.state.tokens
        with pytest.raises(NotesError, match="recurrent layers"):
            session.edit("date", "2026-07-01", Method.parse("field"))
        assert session.state.tokens == before and carried(session) == ["returns"]
        done = session.edit("date", "the first of July", Method.parse("suffix"))
        assert done.rewritten == len(session.state.tokens)
        tokens, found = session.state.tokens, logits(session)
    seq = make().sequence()
    seq.append(tokens)
    seq.flush()
    seq.append([65])
    assert nmse(found, seq.logits()) < 1e-6
