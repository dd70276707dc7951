"""Open sessions beside others: turns and compiles interleaved, and forks that share cells and read nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.config import paths
from notes_cli.editing.methods import Method
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import SessionError
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions import folder
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.skill import Skill, parse_skill

from .test_session import Open, held, make, rows, same, turn

__all__ = ["make"]  # a fixture

OTHER = parse_skill("fee: 3 euro\n\nParcels of 2 kg cost the fee.", source="fees.txt", default="fees")
STEPS: list[Callable[[Session, Skill], object]] = [
    lambda session, skill: turn(session, skill, "Why?"),
    lambda session, skill: session.edit("date", "2026-07-01", Method.parse("field")),
    lambda session, skill: turn(session, skill, "And then?"),
    lambda session, skill: session.edit("date", "July 2nd", Method.parse("field+erratum")),
    lambda session, skill: turn(session, skill, "And now?", "tier=silver"),
    lambda session, skill: session.undo(),
]


def close(found: Any, wanted: Any) -> bool:
    return all(np.allclose(a, b, atol=4e-3) for a, b in zip(found, wanted, strict=True))


def pieces_of(session: Session) -> list[tuple[Any, ...]]:
    return [(piece.kind, piece.name, piece.position, piece.tokens, piece.how) for piece in session.sequence.pieces]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    opened: list[Path] = []
    real = folder.open_segment

    def counted(path: Path) -> Segment:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(folder, "open_segment", counted)
    return opened


def test_each_is_as_alone(make: Open, skill: Skill, reads: list[Path]) -> None:
    """Turns of two sessions in turn, with compiles between: as those of separate runs; nothing is read from disk."""
    kind = "gemma3"
    alone: dict[str, tuple[Any, ...]] = {}
    for name in ("first", "second"):
        with held(make(kind), f"{name}-alone") as session:
            for step in STEPS[: 6 if name == "first" else 5]:
                step(session, skill)
            alone[name] = session.state.tokens, pieces_of(session), rows(session.sequence)
    compiled = compile_skill(make(kind), OTHER)
    reads.clear()

    workspace = make(kind)
    made: list[Segment] = []
    with held(workspace, "first") as first, held(workspace, "second") as second:
        for step in STEPS[:5]:
            step(first, skill)
            made.append(compile_skill(workspace, OTHER))
            step(second, skill)
        assert not reads and workspace.context.used >= len(first.sequence) + len(second.sequence)
        STEPS[5](first, skill)
        for session, name in ((first, "first"), (second, "second")):
            tokens, pieces, wanted = alone[name]
            assert session.state.tokens == tokens and close(rows(session.sequence), wanted)
            assert name == "first" or pieces_of(session) == pieces  # undone K/V is restored from disk
    assert len(made) == 5
    for segment in made:
        assert segment.tokens.tolist() == compiled.tokens.tolist()
        assert all(close((a.k, a.v), (b.k, b.v)) for a, b in zip(segment.layers, compiled.layers, strict=True))


@pytest.fixture
def workspace(make_model: Callable[..., Path]) -> Iterator[Workspace]:
    """A workspace whose context has four sequences at first."""
    options = ContextOptions(n_ctx=1024, n_threads=1, n_sequences=4, unified=True)
    with Workspace(make_model("llama"), options) as workspace:
        yield workspace


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*_: Any) -> None:
        raise AssertionError("rows were read from disk")

    monkeypatch.setattr(folder, "open_segment", refuse)


def test_forks_share_cells_and_read_nothing(workspace: Workspace, skill: Skill, unread: None) -> None:
    """A fork takes no cells until it has its own turns, and the original is unchanged, also where the context has to
    grow for more of them."""
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
        more = [forks.enter_context(session.fork(f"fork{number}")) for number in range(3, 10)]
        assert all(same(rows(one.sequence), before) for one in (session, others[2], *more))
        turn(more[-1], skill, "And then?")
        assert len(more[-1].sequence) > len(session.sequence) and same(rows(more[0].sequence), before)
    assert context.used == used
    assert Sessions(paths().sessions).names() == [*(f"fork{number}" for number in range(10)), "mine"]


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


@pytest.mark.parametrize("kind", ["llama", "lfm2", "mamba", "gpt2"])
def test_a_live_fork_is_one_from_disk(make: Open, skill: Skill, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the tokens and K/V of a fork that another process continues; closing it frees its sequence."""
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
