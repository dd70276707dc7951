"""What the lines of a ledger come to: tokens, rows, pieces, errata and the values of fields."""

from __future__ import annotations

import subprocess
import sys

import pytest

from notes_cli.sessions.state import fold

from .ledgers import edit, toggles, turn


def test_edits_are_folded_in() -> None:
    """Tokens give way and move, rows come from the latest file that has them, pieces move along."""
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
    """A ledger may be anybody's: a patch that begins in one piece and ends in another leaves none of less than no
    tokens."""
    state = fold([turn(1, 2, 3), turn(4, 5, 6), edit("b", [(1, 5, [7])], [])])
    assert state.tokens == [1, 7, 6]
    assert [(entry.position, entry.tokens) for entry in state.entries if entry.kind != "edit"] == [(0, 2), (2, 1)]
    state = fold([turn(1, 2, 3), turn(4, 5, 6), edit("b", [(2, 5, [7, 8])], [])])
    assert [(entry.position, entry.tokens) for entry in state.entries if entry.kind != "edit"] == [(0, 3), (3, 2)]


def test_undo_takes_back_what_was_not_undone() -> None:
    """An undo after an undo goes further back; what comes after counts from there."""
    undo = {"op": "undo"}
    lines = [turn(1, 2), edit("b", [], [], "It is b."), turn(3), undo]
    assert fold(lines).tokens == [1, 2] and fold(lines).pending == {"date": "It is b."}
    assert fold([*lines, undo]).pending == {} and fold([*lines, undo, turn(4)]).tokens == [1, 2, 4]
    with pytest.raises(IndexError):
        fold([*lines, undo, undo, undo])


def test_errata_wait_for_a_turn() -> None:
    """The last of a field counts; a turn says it, and then it has been stated."""
    waiting = [turn(1), edit("b", [], [], "It is b."), edit("c", [], [], "It is c.")]
    assert fold(waiting).pending == {"date": "It is c."} and not fold(waiting).stated
    said = fold([*waiting, turn(2)])
    assert (said.pending, said.stated, said.values) == ({}, {"date"}, {"date": "c"})
    assert fold([*waiting, edit("d", [(0, 1, [9])], [[0, 1]])]).pending == {}


def test_what_is_superseded() -> None:
    """Errata of a field with a later one, said or waiting, or a later edit; never the last one, nor free words."""
    positions = lambda *lines: [entry.position for entry in fold([*toggles(), *lines]).superseded]  # noqa: E731
    assert positions() == [3]
    assert positions(edit("d", [], [], "It is d.")) == [3, 6]
    assert positions(edit("d", [(0, 1, [9])], [[0, 1]])) == [3, 6]
    assert positions({"op": "undo"}) == []
    other = {**edit("d", [], [], "It is d."), "field": "tier"}
    assert positions(other) == [3]


def test_a_compaction_is_folded_in() -> None:
    """Taken out tokens and pieces are gone, what comes after them moves and has new rows; an undo brings all back."""
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
    """So that whoever lists or shows sessions need not load a model's library, and a ledger can be read anywhere."""
    code = "import sys, notes_cli.sessions.folder, notes_cli.sessions.archive; sys.exit('notes_cli.lib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
