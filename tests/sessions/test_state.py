"""Folding ledger lines into a state: tokens, K/V locations, pieces with their origins, errata and field values."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from notes_cli.engine.pieces import Piece, Reason
from notes_cli.explanations import edit_why, entry_why, why
from notes_cli.sessions.state import Origin, as_line, fold, origin_of

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


PIECES = [
    Piece("splice", "a", 0, 9, "spliced", Reason.MOVED, moved=-3, rewritten=2, blocks=4),
    Piece("splice", "a", 0, 9, "decoded", Reason.REFUSED, "it has recurrent layers; and more"),
    Piece("splice", "a", 0, 9, "spliced", Reason.UNMOVED, rewritten=1),
    Piece("answer", "", 0, 9, "decoded", Reason.THOUGHT_END, "20"),
    Piece("text", "", 0, 9, "decoded"),
]


@pytest.mark.model
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.reason.name)
def test_pieces_are_told_by_a_ledger_as_by_a_notebook(piece: Piece) -> None:
    line = json.loads(json.dumps(as_line(Origin.of(piece))))
    assert all(line.values())
    assert origin_of(line) == Origin.of(piece) and why(origin_of(line)) == why(piece)


@pytest.mark.model
def test_edits_are_told_by_what_they_did() -> None:
    """All effects round-trip; a pending erratum is recorded by its text."""
    origin = Origin(rewritten=12, erratum=True, contradicted=True)
    line = {**edit("b", [(0, 1, [9])], [[0, 1]], "It is b."), **as_line(origin)}
    entry = fold([turn(1, 2, 3), json.loads(json.dumps(line))]).entries[-1]
    assert entry.origin == origin
    assert edit_why(entry.origin) == entry_why(entry)
    assert all(word in entry_why(entry) for word in ("12 rows", "an erratum before", "contradicts"))


@pytest.mark.model
def test_a_reason_of_a_newer_notes_is_none() -> None:
    """Unknown reasons are ignored, whatever their name."""
    for name in ("sent_by_mail", "{0}", "{reason.__class__}", "moved "):
        origin = origin_of({"reason": name, "detail": "{x}", "moved": 3})
        assert origin == Origin(detail="{x}", moved=3) and why(origin) == ""
    assert why(origin_of({"reason": "refused", "detail": "{x}"})) == "decoded: {x}"


@pytest.mark.model
@pytest.mark.parametrize("line", [{key: [1]} for key in ("reason", "detail", "moved", "blocks")])
def test_what_is_no_origin(line: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError)):
        origin_of(line)
