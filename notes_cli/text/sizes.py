"""Formats and parses sizes, ages and durations for users: 12.3 MB, 20GB, 30d."""

from __future__ import annotations

import math
import re

from notes_cli.errors import NotesError

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhdwy]|min)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


def human_size(count: float) -> str:
    """Format bytes: 12.3 MB."""
    for unit, digits in (("B", 0), ("kB", 1), ("MB", 1)):
        if round(count, digits) < 1000:
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def human_age(seconds: float) -> str:
    """Format an age in seconds: 3 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def human_time(seconds: float) -> str:
    """Format a duration in seconds: 0.021 s, 8.1 s, 2 min 5 s, 1 h 12 min."""
    if seconds < 59.5:
        digits = 3 if seconds < 0.0995 else 2 if seconds < 0.995 else 1 if seconds < 9.95 else 0
        return f"{seconds:.{digits}f} s"
    for size, parts, most, large, small in (
        *((1, 60, 60, "min", "s"), (60, 60, 24, "h", "min")),
        (3600, 24, math.inf, "d", "h"),
    ):
        whole, rest = divmod(round(seconds / size), parts)
        if whole < most:
            return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"
    raise AssertionError(seconds)


def parse_size(text: str) -> int:
    """Return the bytes of `20GB`, `1.5 GiB`, `800MB` or a number of bytes. Raises NotesError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise NotesError(f"{text!r} is not a size", "Write it like 20GB, 500MB or 1.5GiB")
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** " kmgt".index(match[2].lower() or " "))


def parse_age(text: str) -> float:
    """Return the seconds of `30d`, `12h`, `2w`. Raises NotesError."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise NotesError(f"{text!r} is not an age", "Write it like 30d, 12h or 2w")
    return float(match[1]) * _SECONDS[match[2]]
