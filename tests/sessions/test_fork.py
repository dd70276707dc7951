"""Forks of an open session: they share its cells, read nothing from disk, and are independent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.config import paths
from notes_cli.editing.methods import Method
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import SessionError
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions import session_kv
from notes_cli.sessions.folder import Sessions
from notes_cli.text.skill import Skill

from .test_session import Open, held, make, rows, same, turn

__all__ = ["make"]  # a fixture


@pytest.fixture
def workspace(make_model: Callable[..., Path]) -> Iterator[Workspace]:
    """A workspace whose context has four sequences at first."""
    options = ContextOptions(n_ctx=1024, n_threads=1, n_sequences=4, unified=True)
    with Workspace(make_model("llama"), options) as workspace:
        yield workspace


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening K/V files fails."""

    def refuse(*_: Any) -> None:
        raise AssertionError("rows were read from disk")

    monkeypatch.setattr(session_kv, "open_segment", refuse)


def test_forks_share_cells_and_read_nothing(workspace: Workspace, skill: Skill, unread: None) -> None:
    """A fork takes no cells until it has its own turns, and the original is unchanged."""
    with held(workspace) as session, ExitStack() as forks:
        turn(session, skill, "Why?")
        context, before = session.workspace.context, rows(session.sequence)
        used = context.used
        others = [forks.enter_context(session.fork(f"fork{number}")) for number in range(3)]
        assert context.used == used > 0
        for number, other in enumerate(others[:2]):
            turn(other, skill, f"And {number}?")
        added = sum(len(other.sequence) - len(session.sequence) for other in others[:2])
        assert context.used == used + added and added > 0
        assert same(rows(session.sequence), before) and same(rows(others[2].sequence), before)
    assert context.used == used
    assert Sessions(paths().sessions).names() == ["fork0", "fork1", "fork2", "mine"]


def test_sequences_are_given_back(workspace: Workspace, skill: Skill) -> None:
    """Refused forks keep no sequence; consecutive ones use a single one, also after errors."""
    with held(workspace) as session:
        with pytest.raises(SessionError, match="nothing to fork in session mine"), session.fork("other"):
            pass
        turn(session, skill, "Why?")
        context = session.workspace.context
        used, sequences = context.used, context.options.n_sequences
        for number in range(2 * sequences):
            with pytest.raises(SessionError, match="there is a session mine already"), session.fork("mine"):
                pass
            with pytest.raises(RuntimeError, match="on purpose"), session.fork(f"fork{number}") as fork:
                turn(fork, skill, "And then?")
                raise RuntimeError("on purpose")
        assert (context.used, context.options.n_sequences) == (used, sequences)


def test_more_forks_than_there_were_sequences(make: Open, skill: Skill, unread: None) -> None:
    """The context grows, and all sessions keep their K/V."""
    with held(make()) as session, ExitStack() as forks:
        turn(session, skill, "Why?")
        before = rows(session.sequence)
        others = [forks.enter_context(session.fork(f"fork{number}")) for number in range(10)]
        assert all(same(rows(one.sequence), before) for one in (session, *others))
        turn(others[-1], skill, "And then?")
        assert len(others[-1].sequence) > len(session.sequence) and same(rows(others[0].sequence), before)


@pytest.mark.parametrize("kind", ["llama", "lfm2", "mamba", "gpt2"])
def test_a_live_fork_is_one_from_disk(make: Open, skill: Skill, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the tokens, K/V and ledger of a fork that another process continues; closing it frees its sequence."""
    with held(make(kind)) as session:
        turn(session, skill, "Why?")
        with session.fork("live") as live:
            turn(live, skill, "And then?", "date=2026-07-01")
            found, tokens = rows(live.sequence), live.state.tokens
        turn(session, skill, "And now?")
        assert session.state.turns == 2
    with held(make(kind), "live") as again:
        assert same(rows(again.sequence), found) and again.state.tokens == tokens
    with held(make(kind)) as alone:
        alone.undo()
        turn(alone, skill, "And then?", "date=2026-07-01")
        assert alone.state.tokens == tokens
        close = [np.allclose(a, b, atol=2e-3) for a, b in zip(rows(alone.sequence), found, strict=True)]
        assert all(close)


def test_an_edit_in_a_fork_is_nobody_elses(make: Open, skill: Skill, unread: None) -> None:
    """Rewritten K/V is copied first: in place, moved, or decoded again."""
    for number, (value, method) in enumerate([("2026-07-01", "field"), ("2026-07", "field"), ("2026-08-01", "suffix")]):
        with held(make(), f"mine{number}") as session:
            turn(session, skill, "Why?")
            before = rows(session.sequence)
            with session.fork(f"one{number}") as one, session.fork(f"two{number}") as two:
                one.edit("date", value, Method.parse(method))
                assert not same(rows(one.sequence), before)
                assert same(rows(session.sequence), before) and same(rows(two.sequence), before)
                assert (one.state.fields["date"], two.state.fields["date"]) == (value, session.state.fields["date"])
