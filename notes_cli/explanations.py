"""Describe prompt pieces, edits, answers and library files: texts for people and JSON documents (docs/json.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from notes_cli.text.names import human_size

if TYPE_CHECKING:
    from notes_cli.engine.pieces import Piece
    from notes_cli.engine.segment import Segment
    from notes_cli.library.global_errata import GlobalErratum
    from notes_cli.library.store import SegmentFile
    from notes_cli.runtime.request import Answer, Prefilled, Request, Settings
    from notes_cli.runtime.workspace import Workspace
    from notes_cli.sessions.state import Entry

_WHY = {
    "": "",
    "moved": "reused, keys rotated by {moved:+d} positions",
    "carried": "reused, keys rotated by {moved:+d} positions, recurrent state carried through",
    "unmoved": "reused at the position where it was compiled",
    "not_rotated": "reused without rotation, {detail} positions from where it was compiled (control)",
    "restored": "restored at the start of the prompt, where it was compiled",
    "restored_context": "restored with {detail}",
    "restored_session": "restored with session {detail}",
    "other_context": "recomputed: preceded by a different context than at compile time",
    "not_spliced": "full prefill was asked for",
    "refused": "decoded: {detail}",
    "inexact": "exact rows were asked for: {detail}",
    "new_value": "recomputed with the new value",
    "from_change": "decoded from the changed value on",
    "thought": "chain of thought",
    "thought_end": "end of the chain of thought",
    "chosen": "chosen",
    "again": "decoded again",
    "live": "reused from an earlier prompt that begins alike",
    "near": "reused from {detail}, after another text there, keys rotated by {moved:+d} positions",
}

TIME = "%Y-%m-%dT%H:%M:%SZ"  # of JSON documents, in UTC


def attributes(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def timestamp(text: str) -> float:
    """Return a time of a JSON document in seconds. Raises ValueError."""
    return datetime.strptime(text, TIME).replace(tzinfo=timezone.utc).timestamp()


def why(piece: Piece | Entry) -> str:
    """Describe the origin of a piece's KV entries; empty for a plain piece."""
    reason = piece.reason.value
    facts = attributes(piece, "detail", "moved", "blocks")
    text = _WHY[reason].format(**facts)
    if reason == "thought_end" and piece.detail:
        text += f", cut after {piece.detail} tokens"
    if reason == "live" and piece.detail:
        text += f"; {piece.detail} of them were computed after another text"
    parts = [text] if text else []
    if piece.blocks:
        parts.append(f"compiled in {piece.blocks} blocks")
    if piece.kept:
        parts.append(f"kept as {piece.kept} ({human_size(piece.nbytes)})")
    if piece.rewritten:
        parts.append(f"{piece.rewritten} of them recomputed in place")
    return "; ".join(parts)


def edit_why(entry: Entry) -> str:
    moved = f", {entry.moved} moved" if entry.moved else ""
    parts = [f"{entry.rewritten} row{'s' * (entry.rewritten != 1)} recomputed{moved}"] if entry.rewritten else []
    if entry.erratum:
        parts.append("an erratum before the next question")
    if entry.contradicted:
        parts.append("an earlier erratum contradicts it: notes session compact takes that out")
    return "; ".join(parts)


def entry_why(entry: Entry) -> str:
    from notes_cli.sessions.state import TRACE

    if entry.kind == TRACE:
        return "what comes after it may carry notes of it"
    return edit_why(entry) if entry.kind == "edit" else why(entry)


def as_json(piece: Piece) -> dict[str, Any]:
    keys = ("kind", "name", "position", "tokens", "how", "moved", "rewritten", "kept", "nbytes", "refused", "reason")
    return {**attributes(piece, *keys), "why": why(piece)}


def storage_type(info: Segment) -> str:
    """Describe the type of K/V in a file, with sizes if quantized."""
    if info.kv == "f16":
        return info.stored_types
    return f"{info.stored_types}, {human_size(info.nbytes)} of {human_size(info.computed_nbytes)}"


def entry_as_json(entry: SegmentFile, problem: str | None) -> dict[str, Any]:
    """Return a file of the library as in docs/json.md; `problem`: why it cannot be read."""
    info, facts = entry.info, {"name": entry.name, "path": str(entry.path), "problem": problem}
    if info is None:
        return facts
    return {
        **facts,
        "tokens": len(info.tokens),
        "fields": {span.name: span.value for span in info.fields},
        "bytes": info.file_size,
        "kv": info.kv,
        "created": info.created,
        "source": info.source or None,
        "identity": info.identity.as_dict(),
    }


def erratum_as_json(erratum: GlobalErratum) -> dict[str, str]:
    return attributes(erratum, "skill", "field", "was", "value")


def turn_as_json(
    workspace: Workspace,
    request: Request,
    answer: Answer,
    started: float,
    session: str | None,
    goes_on: bool,
    memory: str | None = None,
) -> dict[str, Any]:
    """Return an answer of `notes ask` as in docs/json.md. `started`: time of the request (time.perf_counter)."""
    identified = session or request.splice
    return {
        "version": 1,
        "session": session,
        "memory": memory,
        "server": None,
        **answer_as_json(answer, started, goes_on),
        "sampling": asdict(request.sampling),
        "identity": workspace.identity.as_dict() if identified else {"model": workspace.model.name},
    }


def figures_as_json(answer: Answer, started: float) -> dict[str, Any]:
    times = {
        "load": answer.begun + answer.load - started,
        "splice": answer.splice,
        "prompt": answer.prompt,
        "first_token": answer.first_token,
        "total": time.perf_counter() - started,
    }
    ms: dict[str, float | None] = {name: round(1000 * seconds, 3) for name, seconds in times.items()}
    ms["saved"] = None if answer.saved is None else round(1000 * answer.saved, 3)
    counts = {
        **asdict(answer.counts),
        "reasoning": answer.thought.tokens if answer.thought else 0,
        "answer": answer.tokens,
    }
    return {"tokens": counts, "ms": ms}


def answer_as_json(answer: Answer, started: float, goes_on: bool = False) -> dict[str, Any]:
    """Return the keys of docs/json.md that all answers share."""
    thought, decision = answer.thought, answer.decision
    return {
        "answer": answer.text,
        "reasoning": thought.text if thought else None,
        "thought_whole": thought.finished if thought else None,
        "thought_stopped": thought.stopped if thought else None,
        "stopped": answer.stopped,
        "choice": decision.choice if decision else None,
        "probabilities": decision.probabilities if decision else None,
        **figures_as_json(answer, started),
        **_settings_as_json(answer.settings, goes_on),
        "pieces": [as_json(piece) for piece in answer.pieces],
    }


def plan_as_json(plan: Prefilled) -> dict[str, Any]:
    facts = {"version": 1, "server": None, "tokens": asdict(plan.counts), **_settings_as_json(plan.settings)}
    return {**facts, "pieces": [as_json(piece) for piece in plan.pieces]}


def _settings_as_json(settings: Settings, goes_on: bool = False) -> dict[str, Any]:
    """Return effective settings of a request. A session that `goes_on` has its place from the first turn."""
    return {
        "method": str(settings.method) if settings.method else None,
        "method_why": settings.why,
        "place": None if goes_on else settings.place,
        **attributes(settings, "seam", "wording"),
    }


def explanation(pieces: Sequence[Piece], counts: dict[str, Any], notices: Sequence[str]) -> dict[str, Any]:
    return {"pieces": [as_json(piece) for piece in pieces], "counts": counts, "notices": list(notices)}
