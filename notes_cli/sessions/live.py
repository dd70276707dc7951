"""A session at hand: its notebook, in memory or put back from disk, and what is written down of it.

Rows come back as they were read (rows.py), so going on equals never having stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from notes_cli.engine.notebook import Notebook
from notes_cli.engine.patches import Range
from notes_cli.errors import UnsupportedError
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import SessionFolder
from notes_cli.sessions.lines import Line
from notes_cli.sessions.rows import RowFiles
from notes_cli.sessions.state import State


class Live:
    """A session in a workspace, for as long as its lock is held.

    Raise SessionError if it is another model's, UnsupportedError for a model whose rows cannot be kept.
    """

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        self.workspace = workspace
        self.stored = stored
        self._rows = RowFiles(workspace, stored)
        self._notebook: Notebook | None = None
        self._unwritten = False  # its rows were changed, and that is not in the ledger
        self.changes = 0  # how often the ledger was written or the notebook dropped: what began before is over
        for operation in ("read", "restore"):
            reason = workspace.context.supports(operation)
            if reason:
                raise UnsupportedError(f"a session cannot be kept for {workspace.model.name}: {reason}")
        self._rows.check()

    @property
    def state(self) -> State:
        return self.stored.state

    @property
    def notebook(self) -> Notebook:
        """The notebook as the ledger has it, put back from disk unless it is at hand."""
        if self._notebook is None or not self.at_hand:
            self.drop()
            self._notebook = self._rows.restored()
        return self._notebook

    @property
    def at_hand(self) -> int:
        """How many tokens of the notebook have rows in the context; 0 where it would be put back from disk."""
        found = self._notebook
        if found is None or self._unwritten or not found.intact:
            return 0
        return len(self.state.tokens) if found.tokens.tolist() == self.state.tokens else 0

    @property
    def held(self) -> Notebook:
        """The notebook with the turn at hand, which is not in the ledger yet."""
        assert self._notebook is not None
        return self._notebook

    def hold(self, notebook: Notebook) -> None:
        """From now on this is the session's notebook: it ends with what is about to be written down."""
        if self._notebook is not notebook:
            self.drop()
        self._notebook = notebook

    def drop(self) -> None:
        """Close the notebook: it is put back from disk when it is wanted again."""
        if self._notebook is not None:
            self._notebook.close()
        self._notebook, self._unwritten = None, False
        self.changes += 1

    @contextmanager
    def changing(self) -> Iterator[Notebook]:
        """The notebook, for changes that are written down next (`commit`, `rewrite`), whole or not at all: what a
        failure leaves is dropped, and so is what was not written down."""
        notebook, self._unwritten = self.notebook, True
        try:
            yield notebook
        except BaseException:
            self.drop()
            raise

    def commit(self, line: Line, places: Sequence[Range]) -> None:
        """Write down a line, and the rows of these positions of the notebook as it is now."""
        self._rows.commit(line, places, self._notebook)
        self._wrote()

    def rewrite(self, line: Line) -> None:
        """Write down all rows of the notebook, and this line in the place of all others."""
        self._rows.rewrite(line, self.held)
        self._wrote()

    def _wrote(self) -> None:
        self._unwritten = False
        self.changes += 1

    def undo(self) -> Line:
        """Take back the last line, to the very rows. Raise SessionError if there is none."""
        undone = self.stored.undo()
        self._wrote()
        self.drop()
        return undone

    def spelt(self, first: int, last: int) -> bytes:
        """The text of tokens [first, last)."""
        return b"".join(map(self.workspace.model.token_bytes, self.state.tokens[first:last]))
