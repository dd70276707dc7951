"""Sessions with skills that recurrent state was carried through: restored from disk, and corrected by errata."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from notes_cli.config import paths
from notes_cli.editing.methods import Method
from notes_cli.engine.pieces import Reason
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.erratum import known_fields, read_errata
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeWorkspace
from .test_session import held

FEES = parse_skill("fee: 5 euros\nThe fee is due at once, and in full.", source="fees.txt", default="fees")
Open = Callable[..., Workspace]

pytestmark = pytest.mark.patches("recurrent")


@pytest.fixture(params=["lfm2", "mamba"])
def make(request: pytest.FixtureRequest, make_workspace: MakeWorkspace) -> Open:
    """A workspace on a hybrid model, or one with recurrent layers only; by default with carried state."""
    return lambda carry=True, **settings: make_workspace(request.param, carry=carry, **settings)


def carried(sequence: KVSequence) -> list[str]:
    return [piece.name for piece in sequence.pieces if piece.reason is Reason.CARRIED]


def begin(session: Session, skill: Skill, *errata: str) -> KVSequence:
    """A first turn with the skill after a system text."""
    segment = compile_skill(session.workspace, skill)
    prompt = Prompt("Why?", [segment], read_errata(errata, known_fields(segment)), system="Be kind.")
    sequence = assemble(session.workspace, prompt, room=4)
    session.begin(prompt, sequence)
    return sequence


def answer(session: Session, sequence: KVSequence) -> None:
    with Sampler(SamplerOptions()) as sampler:
        list(sequence.generate(sampler, 3))
    session.keep()


def logits(sequence: KVSequence) -> NDArray[np.float32]:
    """Logits after one more token."""
    sequence.append([65])
    return sequence.logits()


def test_a_turn_goes_on_from_disk_as_if_it_had_not_stopped(make: Open, skill: Skill) -> None:
    """The restored state is bit-identical, also in a workspace that does not carry."""
    workspace = make()
    with held(workspace) as session:
        sequence = begin(session, skill)
        assert carried(sequence) == ["returns"]
        answer(session, sequence)
        fees = compile_skill(workspace, FEES)
        sequence = session.follow("How much?", ["fee=6 euros"], room=8, segments=[fees])
        assert carried(sequence) == ["returns", "fees"]
        answer(session, sequence)
        tokens = session.state.tokens
        wanted = logits(session.sequence)
    for carry in (True, False):
        with held(make(carry)) as session:
            assert session.state.tokens == tokens and session.sequence.count("spliced") == len(tokens)
            assert np.array_equal(logits(session.sequence), wanted)


def test_a_session_with_a_carried_skill_grows_beyond_its_context(make: Open, skill: Skill) -> None:
    found = []
    for n_ctx in (256, 1024):
        workspace = make(n_ctx=n_ctx)
        with held(workspace) as session:
            sequence = begin(session, skill)
            assert carried(sequence) == ["returns"]
            answer(session, sequence)
            sequence = session.follow("x" * 500, room=4)
            assert workspace.context.n_ctx >= 600
            found.append(sequence.logits())
        Sessions(paths().sessions).remove("mine")
    assert np.allclose(*found, rtol=1e-3, atol=1e-3 * np.abs(found[0]).max())


def test_what_rewrites_a_carried_skill_is_refused_or_decodes_all(make: Open, skill: Skill) -> None:
    """The state at an earlier position is not available: edits in place are refused, and suffix decodes everything."""
    with held(make()) as session:
        answer(session, begin(session, skill))
        before = session.state.tokens
        with pytest.raises(NotesError, match="recurrent layers"):
            session.edit("date", "2026-07-01", Method("field"))
        assert session.state.tokens == before and carried(session.sequence) == ["returns"]
        done = session.edit("date", "the first of July", Method("suffix"))
        assert done.rows == len(session.state.tokens)
        tokens = session.state.tokens
        found = logits(session.sequence)
    seq = make().sequence()
    seq.append(tokens)
    seq.flush()
    wanted = logits(seq)
    assert float(((found - wanted) ** 2).sum() / (wanted**2).sum()) < 1e-6


def test_undo_takes_a_carried_turn_back(make: Open, skill: Skill) -> None:
    """The state before the turn is restored exactly, although a state cannot be truncated."""
    workspace = make()
    with held(workspace) as session:
        answer(session, begin(session, skill))
        tokens = session.state.tokens
    with held(make()) as session:
        wanted = logits(session.sequence)
    with held(workspace) as session:
        fees = compile_skill(workspace, FEES)
        answer(session, session.follow("How much?", room=8, segments=[fees]))
        session.undo()
        assert session.state.tokens == tokens
        assert np.array_equal(logits(session.sequence), wanted)
