"""Names of skills and sessions: words in any script that are the same file name on every system.

A name consists of lower-case letters, marks and digits, with single - between them, in NFC. It knows no files.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

MAX_NAME = 64  # characters
MAX_BYTES = 192  # of UTF-8: a file's name, with what is put before and after it, may have 255
SENT = "image-"  # before the first digits of the SHA-256 of an image that a client of a server sent
BETWEEN = "\n"  # the files of a skill that was joined of several, as its source has them
RULE = "lower-case letters and digits of any script, and single -"

# Letters and marks that are invisible: two names would look alike.
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Windows reserves these for devices, whatever follows a dot.
DEVICE = re.compile("con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]")


def files_of(source: str) -> list[str]:
    """The files that a text came from, by its source: several if they were joined; none if it came from standard input,
    or that is not known."""
    return [] if source in ("", "-") else source.split(BETWEEN)


def spelt(path: str | Path) -> str:
    """A path as one of the files that a source has: a line break in it is no end of it. It cannot be opened so."""
    return str(path).replace(BETWEEN, "\\x0a")


def name_of(word: str) -> str:
    """The name made of a word: what no name may have becomes -, and a name stays as it is. Empty if nothing is left."""
    plain = unicodedata.normalize("NFC", UNSEEN.sub("", unicodedata.normalize("NFC", word)).lower())
    found = ""
    for char in plain:
        kind = unicodedata.category(char)[0]
        if kind in "LN" or (kind == "M" and found and not found.endswith("-")):
            found += char
        elif found and not found.endswith("-"):
            found += "-"
    return _short(found).rstrip("-")


def of_sent(sha256: str) -> str:
    """The name of an image that a client of a server sent, by the digest of its bytes."""
    return f"{SENT}{sha256[:16]}"


def typed(word: str) -> str:
    """A name as somebody typed it, in the Unicode form in which names are kept; systems differ in theirs."""
    return unicodedata.normalize("NFC", word)


def is_name(word: str) -> bool:
    """Whether the word already is a name."""
    return word != "" and name_of(word) == word


def objection(name: str, others: Iterable[str]) -> str | None:
    """Why nothing new should have this name, or None if it may; `others` are the names that are in use.

    Names for which `_folded` gives the same are one name to some file systems: ß and ss, ﬁ and fi.
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
    """The name, cut to the length that a name may have, but not between a letter and its marks."""
    cut = name[:MAX_NAME].encode()[:MAX_BYTES].decode(errors="ignore")
    while len(cut) < len(name) and unicodedata.category(name[len(cut)])[0] == "M" and cut:
        cut = cut[:-1]
    return cut
