"""How a piece of a notebook came about, in a sentence for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notes_cli.engine.pieces import Piece

_WHY = {
    "": "",
    "moved": "reused, keys rotated by {moved:+d} positions",
    "unmoved": "reused at the position where it was compiled",
    "not_rotated": "reused without rotation, {detail} positions from where it was compiled (control)",
    "restored": "restored at the start of the prompt, where it was compiled",
    "restored_context": "restored with {detail}",
    "restored_session": "restored with session {detail}",
    "other_context": "recomputed: preceded by a different context than at compile time",
    "not_spliced": "full prefill was asked for",
    "refused": "decoded: {detail}",
    "new_value": "recomputed with the new value",
    "from_change": "decoded from the changed value on",
    "block": "block {detail} of {blocks}, recomputed after the left context alone by a pass over {passed} tokens",
    "thought": "chain of thought",
    "thought_end": "end of the chain of thought",
    "chosen": "chosen",
    "again": "decoded again",
}


def why(piece: Piece) -> str:
    """Why the piece's rows came about as they did; empty where there is nothing to tell."""
    told = reason_text(piece.reason.value, piece.detail, piece.moved, piece.blocks, piece.passed)
    parts = [told] if told else []
    if piece.reason.value != "block":
        if piece.blocks:
            parts.append(f"compiled in {piece.blocks} blocks")
        if piece.passed:
            parts.append(f"selected by a pass over {piece.passed} tokens of the corrected text")
        if piece.selected == "selective":
            parts.append("notes compile --influence spares it")
        if piece.rewritten:
            parts.append(f"{piece.rewritten} of them recomputed in place")
    return "; ".join(parts)


def reason_text(name: str, detail: str, moved: int, blocks: int, passed: int) -> str:
    """A reason in words; one that another notes wrote into a ledger is told by its name."""
    told = _WHY.get(name, name).format(detail=detail, moved=moved, blocks=blocks, passed=passed)
    return f"{told}, cut after {detail} tokens" if name == "thought_end" and detail else told


def as_json(piece: Piece) -> dict[str, Any]:
    """The piece as docs/json.md has it."""
    kept = ("kind", "name", "position", "tokens", "how", "moved", "rewritten")
    facts = asdict(piece)
    return {**{key: facts[key] for key in kept}, "refused": piece.refused, "reason": piece.reason, "why": why(piece)}
