"""A probe as plain data, with the keys that docs/json.md has for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from notes_cli.measure.probe import Probe


def as_json(report: Probe) -> dict[str, Any]:
    """The keys of docs/json.md for it, without the version."""
    return {
        "skill": report.skill,
        "field": report.field,
        "old": report.values[0],
        "new": report.values[1],
        "question": report.question,
        "decision": dict(zip(("stale", "fresh"), report.decisions, strict=True)),
        "score": dict(zip(("stale", "fresh"), report.scores, strict=True)),
        "tokens": {
            "field": report.field_tokens,
            "after": report.after_tokens,
            "to_50": report.reach(0.5),
            "to_90": report.reach(0.9),
        },
        "field_only": report.field_only,
        "after_only": report.after_only,
        "check": {
            "field": report.by_field,
            "field_difference": _less(report.by_field, report.field_only),
            "suffix": report.by_suffix,
            "suffix_difference": _less(report.by_suffix, report.windows[0].suffix),
        },
        "best": None if report.best is None else report.windows.index(report.best),
        "window": report.window,
        "windows": [asdict(window) for window in report.windows],
    }


def _less(found: float | None, expected: float) -> float | None:
    return None if found is None else found - expected
