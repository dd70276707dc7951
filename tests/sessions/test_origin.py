"""How pieces and edits came about: what is written is read back, and sentences of earlier versions say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from notes_cli.engine.pieces import Piece, Reason
from notes_cli.explaining import edited, entry_why, why
from notes_cli.sessions.origin import Origin, as_line, origin_of
from notes_cli.sessions.state import Entry, fold

from .ledgers import edit, turn

# As they were written from the first ledgers on until pieces had reasons.
SENTENCES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("reused, keys rotated by +5 positions", {"reason": Reason.MOVED, "moved": 5}),
    ("reused, keys rotated by -12 positions", {"reason": Reason.MOVED, "moved": -12}),
    ("reused where it was compiled", {"reason": Reason.UNMOVED}),
    (
        "reused, keys rotated by +5 positions; 3 of them recomputed in place",
        {"reason": Reason.MOVED, "moved": 5, "rewritten": 3},
    ),
    (
        "reused where it was compiled; compiled in 8 blocks; ranked by a pass over 120 tokens of the corrected text; "
        "notes compile --influence spares it; 4 of them recomputed in place",
        {"reason": Reason.UNMOVED, "blocks": 8, "passed": 120, "selected": "selective", "rewritten": 4},
    ),
    (
        "block 1 and 2 of 8, computed anew behind the left context alone by a pass over 90 tokens",
        {"reason": Reason.BLOCK, "detail": "1 and 2", "blocks": 8, "passed": 90},
    ),
    ("restored with returns", {"reason": Reason.RESTORED_CONTEXT, "detail": "returns"}),
    ("restored where it was compiled, at the start of the prompt", {"reason": Reason.RESTORED}),
    ("repaired: what stands before is not what it was compiled behind", {"reason": Reason.OTHER_CONTEXT}),
    (
        "decoded: what stands before is not what it was compiled behind; this model has recurrent layers",
        {
            "reason": Reason.REFUSED,
            "detail": "what stands before is not what it was compiled behind; this model has recurrent layers",
        },
    ),
    ("full prefill asked for", {"reason": Reason.NOT_SPLICED}),
    ("recomputed with the new value", {"reason": Reason.NEW_VALUE}),
    ("decoded from the changed value on", {"reason": Reason.FROM_CHANGE}),
    ("chain of thought", {"reason": Reason.THOUGHT}),
    ("end of the chain", {"reason": Reason.THOUGHT_END}),
    ("end of the chain, after 20 tokens", {"reason": Reason.THOUGHT_END, "detail": "20"}),
    ("chosen", {"reason": Reason.CHOSEN}),
    ("1 row computed again", {"rewritten": 1}),
    (
        "12 rows computed again; ranked by a pass over 90 tokens of the corrected text; an erratum before the next "
        "question",
        {"rewritten": 12, "passed": 90, "erratum": True},
    ),
    (
        "12 rows computed again; what an erratum said of it before stands behind it: notes session compact takes it "
        "out",
        {"rewritten": 12, "contradicted": True},
    ),
    (
        "2 rows computed again; what an erratum said of it before stands behind it: field+erratum would say it anew",
        {"rewritten": 2, "contradicted": True},
    ),
    ("what nobody has ever written; rotated, in place, in a block", {}),
    ("compiled in 9999999999999999999999 blocks", {}),
]


@pytest.mark.parametrize(("sentence", "said"), SENTENCES, ids=[sentence[:30] for sentence, _ in SENTENCES])
def test_sentences_of_earlier_versions(sentence: str, said: dict[str, Any]) -> None:
    """The data is what they were made of, and they are shown as they are."""
    origin = origin_of({"why": sentence})
    assert origin == Origin(**said, sentence=sentence)
    assert not sentence or entry_why(Entry("text", "", "", 0, 1, "decoded", origin)) == sentence


PIECES = [
    Piece("splice", "a", 0, 9, "spliced", Reason.MOVED, moved=-3, rewritten=2, blocks=4),
    Piece("splice", "a", 0, 9, "spliced", Reason.BLOCK, "1 and 2", rewritten=9, blocks=8, passed=80, selected="block"),
    Piece("splice", "a", 0, 9, "decoded", Reason.REFUSED, "it has recurrent layers; and more"),
    Piece("splice", "a", 0, 9, "spliced", Reason.UNMOVED, passed=80, selected="selective", rewritten=1),
    Piece("answer", "", 0, 9, "decoded", Reason.THOUGHT_END, "20"),
    Piece("text", "", 0, 9, "decoded"),
]


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.reason.name)
def test_pieces_are_told_by_a_ledger_as_by_a_notebook(piece: Piece) -> None:
    line = json.loads(json.dumps(as_line(Origin.of(piece))))
    assert line["why"] == "" and all(line[key] for key in line if key != "why")
    assert origin_of(line) == Origin.of(piece) and why(origin_of(line)) == why(piece)


def test_edits_are_told_by_what_they_did() -> None:
    """All of it comes back with the ledger; that an erratum waits is known by the erratum."""
    origin = Origin(rewritten=12, passed=90, selected="selective", erratum=True, contradicted=True)
    line = {**edit("b", [(0, 1, [9])], [[0, 1]], "It is b."), **as_line(origin)}
    entry = fold([turn(1, 2, 3), json.loads(json.dumps(line))]).entries[-1]
    assert entry.origin == origin
    assert (
        edited(entry.origin)
        == entry_why(entry)
        == (
            "12 rows recomputed; selected by a pass over 90 tokens of the corrected text; notes compile --influence "
            "spares it; an erratum before the next question; an earlier erratum contradicts it: notes "
            "session compact takes that out"
        )
    )


def test_a_reason_of_a_newer_notes_is_none() -> None:
    """What it is called may be anything, in a ledger that may be anybody's."""
    for name in ("sent_by_mail", "{0}", "{reason.__class__}", "moved "):
        origin = origin_of({"why": "", "reason": name, "detail": "{x}", "moved": 3})
        assert origin == Origin(detail="{x}", moved=3) and why(origin) == ""
    assert why(origin_of({"why": "", "reason": "refused", "detail": "{x}"})) == "decoded: {x}"


@pytest.mark.parametrize(
    "line", [{}, {"why": 1}, *({"why": "", key: [1]} for key in ("reason", "detail", "moved", "blocks", "selected"))]
)
def test_what_is_no_origin(line: dict[str, Any]) -> None:
    """Refused, as is everything in a ledger that is not what it must be."""
    with pytest.raises((KeyError, TypeError)):
        origin_of(line)
