"""Makes and checks names of skills and sessions, which are file names on every system.

A name consists of lower-case letters, marks and digits of any script, with single - between them, in NFC.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

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
    return _short(name).rstrip("-")


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


def _short(name: str) -> str:
    """Cut a name to the maximum length, but not between a letter and its marks."""
    cut = name[:MAX_NAME].encode()[:MAX_BYTES].decode(errors="ignore")
    while len(cut) < len(name) and unicodedata.category(name[len(cut)])[0] == "M" and cut:
        cut = cut[:-1]
    return cut
