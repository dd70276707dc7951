"""Folding ledger lines into a state: tokens, K/V locations, pieces, errata and field values."""

from __future__ import annotations

import subprocess
import sys

import pytest

from notes_cli.sessions.state import fold

from .ledgers import edit, toggles, turn


def test_edits_are_folded_in() -> None:
    """Tokens are replaced and moved, K/V is that of the latest file, and pieces move along."""
    longer = edit("b", [(1, 2, [7, 8, 9])], [[1, 5]])
    state = fold([turn(1, 2, 3), longer, turn(4, rows="0003.gguf")])
    assert state.tokens == [1, 7, 8, 9, 3, 4]
    assert state.rows == [("0001.gguf", 0), *(("0002.gguf", row) for row in range(4)), ("0003.gguf", 0)]
    assert [(entry.kind, entry.position, entry.tokens) for entry in state.entries] == [
        ("text", 0, 5),
        ("edit", 1, 0),
        ("text", 5, 1),
    ]
    shorter = fold([turn(1, 2, 3, 4), edit("b", [(0, 2, [7]), (3, 4, [8])], [[0, 3]])])
    assert shorter.tokens == [7, 3, 8] and [row for _, row in shorter.rows] == [0, 1, 2]
    scattered = fold([turn(1, 2, 3, 4), edit("b", [(1, 2, [7])], [[1, 2], [3, 4]])])
    assert scattered.rows == [("0001.gguf", 0), ("0002.gguf", 0), ("0001.gguf", 2), ("0002.gguf", 1)]


def test_what_gives_way_across_pieces() -> None:
    """In an untrusted ledger, a patch across two pieces leaves none with a negative length."""
    state = fold([turn(1, 2, 3), turn(4, 5, 6), edit("b", [(1, 5, [7])], [])])
    assert state.tokens == [1, 7, 6]
    assert [(entry.position, entry.tokens) for entry in state.entries if entry.kind != "edit"] == [(0, 2), (2, 1)]
    state = fold([turn(1, 2, 3), turn(4, 5, 6), edit("b", [(2, 5, [7, 8])], [])])
    assert [(entry.position, entry.tokens) for entry in state.entries if entry.kind != "edit"] == [(0, 3), (3, 2)]


def test_undo_takes_back_what_was_not_undone() -> None:
    """A second undo goes further back; later lines count from there."""
    undo = {"op": "undo"}
    lines = [turn(1, 2), edit("b", [], [], "It is b."), turn(3), undo]
    assert fold(lines).tokens == [1, 2] and fold(lines).pending == {"date": "It is b."}
    assert fold([*lines, undo]).pending == {} and fold([*lines, undo, turn(4)]).tokens == [1, 2, 4]
    with pytest.raises(IndexError):
        fold([*lines, undo, undo, undo])


def test_errata_wait_for_a_turn() -> None:
    """The last erratum of a field counts; a turn states it."""
    waiting = [turn(1), edit("b", [], [], "It is b."), edit("c", [], [], "It is c.")]
    assert fold(waiting).pending == {"date": "It is c."} and not fold(waiting).stated
    after = fold([*waiting, turn(2)])
    assert (after.pending, after.stated, after.values) == ({}, {"date"}, {"date": "c"})
    assert fold([*waiting, edit("d", [(0, 1, [9])], [[0, 1]])]).pending == {}


def test_what_is_superseded() -> None:
    """By a later erratum or edit of the field; never the last one, nor errata without a field."""
    positions = lambda *lines: [entry.position for entry in fold([*toggles(), *lines]).superseded]  # noqa: E731
    assert positions() == [3]
    assert positions(edit("d", [], [], "It is d.")) == [3, 6]
    assert positions(edit("d", [(0, 1, [9])], [[0, 1]])) == [3, 6]
    assert positions({"op": "undo"}) == []
    other = {**edit("d", [], [], "It is d."), "field": "tier"}
    assert positions(other) == [3]


def test_a_compaction_is_folded_in() -> None:
    """Removed tokens and pieces are gone, later ones move and have new K/V; an undo restores all."""
    patches = [{"first": 3, "last": 4, "tokens": []}, {"first": 4, "last": 5, "tokens": []}]
    line = {
        "op": "compact",
        "fields": ["date"],
        "patches": patches,
        "changed": [[3, 7]],
        "rows": "0004.gguf",
        "rows_checksum": "?",
    }
    before, state = fold(toggles()), fold([*toggles(), line])
    assert state.tokens == [1, 2, 3, 6, 7, 8, 9] and state.rows[3:] == [("0004.gguf", row) for row in range(4)]
    assert [(entry.kind, entry.position, entry.tokens) for entry in state.entries] == [
        *(("splice", 0, 2), ("question", 2, 1), ("question", 3, 1)),
        *(("erratum", 4, 2), ("question", 6, 1)),
    ]
    assert (state.superseded, state.stated, state.values) == ([], {"date"}, {"date": "c"})
    undone = fold([*toggles(), line, {"op": "undo"}])
    assert undone == before and [line["op"] for line in state.live].count("compact") == 1
    every = {**line, "patches": [*patches, {"first": 6, "last": 8, "tokens": []}], "changed": [[3, 5]]}
    assert not fold([*toggles(), every]).stated


def test_it_needs_no_llama_cpp() -> None:
    """Listing and showing sessions does not load llama.cpp."""
    code = "import sys, notes_cli.sessions.folder, notes_cli.sessions.archive; sys.exit('notes_cli.lib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
