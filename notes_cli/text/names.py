"""Names of skills and sessions: words in any script that are the same file name on every system.

A name is of letters, marks and digits, with single - between them, in NFC and small letters. It knows no files.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MAX_NAME = 64  # characters
MAX_BYTES = 192  # of UTF-8: with what is put before and after it, a file's name may have 255
RULE = "letters and digits of any script, in small letters, and single -"

# Letters and marks that nothing is seen of: two names would look alike.
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Windows keeps these for devices, whatever comes after a dot.
DEVICE = re.compile("con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]")


def name_of(word: str) -> str:
    """The name that a word gives: what no name may hold becomes -, a word that is a name stays. Empty if nothing is
    left."""
    plain = unicodedata.normalize("NFC", UNSEEN.sub("", unicodedata.normalize("NFC", word)).lower())
    found = ""
    for char in plain:
        kind = unicodedata.category(char)[0]
        if kind in "LN" or (kind == "M" and found and not found.endswith("-")):
            found += char
        elif found and not found.endswith("-"):
            found += "-"
    return _short(found).rstrip("-")


def typed(word: str) -> str:
    """A name as somebody typed it, in the form in which names are kept: systems write the same letters in several."""
    return unicodedata.normalize("NFC", word)


def is_name(word: str) -> bool:
    """Whether the word is a name as it is."""
    return word != "" and name_of(word) == word


def objection(name: str, others: Iterable[str]) -> str | None:
    """Why nothing new should have this name, None if it may; `others` are the names that there are.

    Some file system takes two names for one that `_folded` gives the same: ß and ss, ﬁ and fi.
    """
    if DEVICE.fullmatch(name):
        return f"Windows keeps the name {name} for a device"
    for other in others:
        if other != name and _folded(other) == _folded(name):
            return f"there is {other} already, which some systems take for the same name as {name}"
    return None


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def _short(name: str) -> str:
    """No longer than a name may be, and no letter without its marks."""
    cut = name[:MAX_NAME].encode()[:MAX_BYTES].decode(errors="ignore")
    while len(cut) < len(name) and unicodedata.category(name[len(cut)])[0] == "M" and cut:
        cut = cut[:-1]
    return cut
