"""Any order of operations on a session, and kills between them: three invariants.

Tokens are those of its conversation, rendered anew. K/V is that of a prefill within the bound of rounding, or what it
was computed with is named. What an undo leaves is bit for bit what was there before. With recurrent layers a change is
decoded from the last state before it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference import nmse

from notes_cli.config import paths
from notes_cli.editing.methods import Method
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.pieces import Reason
from notes_cli.errors import NotesError
from notes_cli.measure.verify import causes_of
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.archive import load, save
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.follow import render
from notes_cli.sessions.session import Session
from notes_cli.sessions.state import State
from notes_cli.text.skill import parse_skill

from ..conftest import MakeWorkspace
from ..zoo import texted
from .test_session import begin, rows, same, turn

SKILL = parse_skill("date: 2026-06-01\ntier: gold\n\nReturns are accepted.", source="returns.md", default="returns")
VALUES = st.sampled_from(["2026-07-01", "July 1", "the second of July"])
METHODS = st.sampled_from(["field", "field+erratum", "erratum", "suffix"])
Before = tuple[State, list[Any]]


def far(found: list[Any], wanted: list[Any]) -> float:
    return max(nmse(*pair) for pair in zip(found, wanted, strict=True) if np.any(pair))


class Machine(RuleBasedStateMachine):
    make: Callable[[], Workspace]
    examples = 0
    exact = 0  # times that K/V was that of a prefill, without a reason for it not to be
    again, left = 0, 0  # with recurrent layers: tokens that changes decoded, of those in the sessions after them

    @initialize()
    def start(self) -> None:
        Machine.examples += 1
        self.workspace, self.open = Machine.make(), ExitStack()
        self.name = f"mine{Machine.examples}"
        self.session = self._opened()
        begin(self.session, SKILL, answer="yes")
        self.earlier: list[Before] = []

    def teardown(self) -> None:
        if hasattr(self, "open"):
            self.open.close()

    def _opened(self) -> Session:
        stored = self.open.enter_context(Sessions(paths().sessions).locked(self.name, new=True))
        return self.open.enter_context(Session(self.workspace, stored))

    def _alike(self, kept: list[Any]) -> bool:
        return same(rows(self.session.sequence), kept)

    def _reopen(self) -> None:
        self.open.close()
        self.open = ExitStack()
        self.session = self._opened()

    def _done(self, operation: Callable[[], object]) -> None:
        """Run an operation. One that is refused changes nothing."""
        before = self.session.state, rows(self.session.sequence)
        try:
            operation()
        except NotesError:
            assert self.session.state == before[0] and self._alike(before[1])
            return
        if self.session.state != before[0]:
            self.earlier.append(before)
            self._count_again(before[0])

    def _count_again(self, before: State) -> None:
        state, sequence = self.session.state, self.session.sequence
        again = sum(piece.tokens for piece in sequence.pieces if piece.reason is Reason.AGAIN)
        if self.workspace.model.recurrent and again and state.tokens != before.tokens:
            common = zip(before.tokens, state.tokens, strict=False)
            same = next((at for at, (one, other) in enumerate(common) if one != other), len(state.tokens))
            kept = max((at for at in before.states if at <= same), default=0)
            assert again == len(state.tokens) - kept
            Machine.again, Machine.left = Machine.again + again, Machine.left + len(state.tokens)

    @rule(errata=st.lists(st.sampled_from(["date=2026-08-01", "tier=silver", "tier=basic", "Be kind."]), max_size=2))
    def ask(self, errata: list[str]) -> None:
        self._done(lambda: turn(self.session, SKILL, f"Q{self.session.state.turns}?", *dict.fromkeys(errata), limit=2))

    @rule(value=VALUES, method=METHODS)
    def edit(self, value: str, method: str) -> None:
        self._done(lambda: self.session.edit("date", value, Method.parse(method)))

    @rule()
    def compact(self) -> None:
        self._done(lambda: self.session.compact())

    @rule(number=st.integers(1, 6), suffix=st.booleans())
    def forget(self, number: int, suffix: bool) -> None:
        turns = self.session.state.turns
        self._done(lambda: self.session.forget([str(number)], "suffix" if suffix else "cut"))
        if suffix and self.session.state.turns < turns:
            self.earlier.clear()
            with pytest.raises(NotesError, match="nothing to undo"):
                self.session.undo()

    @precondition(lambda self: self.earlier)
    @rule()
    def undo(self) -> None:
        state, kept = self.earlier.pop()
        self.session.undo()
        found = self.session.state
        assert found.conversation == state.conversation and found.tokens == state.tokens
        assert (found.fields, found.pending, found.entries) == (state.fields, state.pending, state.entries)
        assert self._alike(kept)

    @rule(whole=st.booleans())
    def continue_a_copy(self, whole: bool) -> None:
        """A fork, or an export that is imported; the original stays as it is."""
        before, sessions = self.session.state, Sessions(paths().sessions)
        name, self.name = self.name, self.name + ("f" if whole else "x")
        if whole:
            with self.session.fork(self.name) as fork:
                assert same(rows(fork.sequence), rows(self.session.sequence))
        else:
            archive = io.BytesIO()
            save(self.session.stored, archive)
            archive.seek(0)
            load(sessions, archive, "it", self.name)
        self._reopen()
        assert self.session.state == before == sessions.find(name).state

    @rule(half=st.booleans())
    def kill(self, half: bool) -> None:
        """The process ends, perhaps within a turn; what it left on the disk does not count."""
        before, kept = self.session.state, rows(self.session.sequence)
        if half:
            self.session.follow("lost", ["tier=none"]).flush()
        stored = self.session.stored
        stored.next_rows.write_bytes(b"GGUF")
        (stored.folder / ".0001.json.x.tmp").write_bytes(b"{")
        self.workspace = Machine.make()
        self._reopen()
        assert self.session.state == before and self._alike(kept)

    @invariant()
    def tokens_are_those_of_the_conversation(self) -> None:
        if not hasattr(self, "session"):
            return
        state, tokens = self.session.state, list[int]()
        texts = {one.name: np.array(state.tokens[slice(*state.span(one.name))], np.int32) for one in state.skills}
        for number, one in enumerate(state.conversation):
            parts = render(self.workspace, one, texts, first=number == 0)
            tokens += [token for part in parts for token in part.tokens]
        assert state.tokens == tokens == self.session.sequence.tokens.tolist()
        (text,) = (b"".join(map(self.workspace.model.token_bytes, texts[one.name])) for one in state.skills)
        assert text.decode() == state.skills[0].text
        stated = {part.key: part.value for one in state.conversation for part in one.errata if part.key}
        for key, value in state.current.items():
            in_text = {f"returns.{span.name}": span.value for span in state.skills[0].fields}[key] == value
            assert in_text or stated.get(key) == value or key in state.corrections.pending

    @invariant()
    def rows_are_those_of_a_prefill_or_a_reason_is_named(self) -> None:
        if not hasattr(self, "session"):
            return
        with self.workspace.sequence() as fresh:
            fresh.append(self.session.state.tokens)
            fresh.flush()
            distance = far(rows(self.session.sequence), rows(fresh))
        causes = causes_of(self.session.state)
        assert distance < 1e-4 or causes
        Machine.exact += not causes


# Tried with 100 scripts of each recurrent model.
@pytest.mark.parametrize(
    ("kind", "examples"), [("llama", 16), ("gpt2", 6), ("lfm2", 6), ("qwen35-dense", 3), ("gemma3-dense", 3)]
)
def test_any_operations_in_any_order(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, examples: int
) -> None:
    """Of a model whose rows move, of one whose positions are learned, of two with recurrent layers, and of one
    whose window is shorter than its skill."""
    options = ContextOptions(n_ctx=2048, n_threads=1)
    zoo = texted(kind, tmp_path / "model.gguf") if "-" in kind else None
    make = staticmethod(
        lambda: Workspace(zoo, options, beyond_trained=True) if zoo else make_workspace(kind, cache="f16", n_ctx=2048)
    )
    monkeypatch.setattr(Machine, "make", make, raising=False)
    monkeypatch.setattr(Machine, "exact", 0)
    how = settings(
        max_examples=examples,
        stateful_step_count=10,
        deadline=None,
        derandomize=True,
        suppress_health_check=[*HealthCheck],
    )
    run_state_machine_as_test(Machine, settings=how)
    assert Machine.exact > examples and (not Machine.left or Machine.again < Machine.left)
