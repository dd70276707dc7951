"""Makes and checks names of skills and sessions, and formats and parses sizes, ages and durations (12.3 MB, 30d).

A name is a file name on every system: lower-case letters, marks and digits of any script, with single - between them,
in NFC.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from notes_cli.errors import NotesError

MAX_NAME = 64  # characters
MAX_BYTES = 192  # of UTF-8: a file name, with prefix and suffix, may have 255
SENT = "image-"  # prefix of images from a server's clients, before digits of their SHA-256
BETWEEN = "\n"  # separates the files in the source of a joined skill
RULE = "lower-case letters and digits of any script, and single -"

# Letters and marks that are invisible: two names would look alike.
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Windows reserves these for devices, whatever follows a dot.
DEVICE = re.compile("con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]")


def files_of(source: str) -> list[str]:
    """Return the files that a text came from, by its source: several if joined; none for standard input or an unknown
    source."""
    return [] if source in ("", "-") else source.split(BETWEEN)


def spelt(path: str | Path) -> str:
    """Return a path as a source has it, with line breaks escaped. It cannot be opened in this form."""
    return str(path).replace(BETWEEN, "\\x0a")


def name_of(word: str) -> str:
    """Make a name of a word: characters that names exclude become -, and names do not change. Empty if none remain."""
    plain = unicodedata.normalize("NFC", UNSEEN.sub("", unicodedata.normalize("NFC", word)).lower())
    name = ""
    for char in plain:
        kind = unicodedata.category(char)[0]
        if kind in "LN" or (kind == "M" and name and not name.endswith("-")):
            name += char
        elif name and not name.endswith("-"):
            name += "-"
    cut = name[:MAX_NAME].encode()[:MAX_BYTES].decode(errors="ignore")
    while len(cut) < len(name) and unicodedata.category(name[len(cut)])[0] == "M" and cut:
        cut = cut[:-1]  # not between a letter and its marks
    return cut.rstrip("-")


def of_sent(sha256: str) -> str:
    """Return the name of an image that a server's client sent, by the digest of its bytes."""
    return f"{SENT}{sha256[:16]}"


def typed(word: str) -> str:
    """Return a name that a user typed in NFC, as names are kept; systems differ in their form."""
    return unicodedata.normalize("NFC", word)


def is_name(word: str) -> bool:
    """Return True if the word is a name."""
    return word != "" and name_of(word) == word


def objection(name: str, others: Iterable[str]) -> str | None:
    """Return why this name must not be used for something new, or None. `others`: the names in use.

    Some file systems identify names for which `_folded` is equal: ß and ss, ﬁ and fi.
    """
    if DEVICE.fullmatch(name):
        return f"Windows reserves the name {name} for a device"
    for other in others:
        if other != name and _folded(other) == _folded(name):
            return f"there is already {other}, which is the same name as {name} to some systems"
    return None


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


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
