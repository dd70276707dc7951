"""Folding ledger lines into a state: tokens, K/V locations, pieces, errata and field values."""

from __future__ import annotations

import subprocess
import sys

from notes_cli.sessions.state import fold

from .ledgers import edit, toggles, turn


def test_what_gives_way_across_pieces() -> None:
    """In an untrusted ledger, a patch across two pieces leaves none with a negative length."""
    state = fold([turn(1, 2, 3), turn(4, 5, 6), edit("b", [(1, 5, [7])], [])])
    assert state.tokens == [1, 7, 6]
    assert [(entry.position, entry.tokens) for entry in state.entries if entry.kind != "edit"] == [(0, 2), (2, 1)]
    state = fold([turn(1, 2, 3), turn(4, 5, 6), edit("b", [(2, 5, [7, 8])], [])])
    assert [(entry.position, entry.tokens) for entry in state.entries if entry.kind != "edit"] == [(0, 3), (3, 2)]


def test_what_is_superseded() -> None:
    """By a later erratum or edit of the field; never the last one, nor errata without a field."""
    positions = lambda *lines: [entry.position for entry in fold([*toggles(), *lines]).superseded()]  # noqa: E731
    assert positions() == [3]
    assert positions(edit("d", [], [], "It is d.")) == [3, 6]
    assert positions(edit("d", [(0, 1, [9])], [[0, 1]])) == [3, 6]
    assert positions({"op": "undo"}) == []
    other = {**edit("d", [], [], "It is d."), "field": "tier"}
    assert positions(other) == [3]


def test_it_needs_no_llama_cpp() -> None:
    code = "import sys, notes_cli.sessions.folder, notes_cli.sessions.archive; sys.exit('notes_cli.lib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
