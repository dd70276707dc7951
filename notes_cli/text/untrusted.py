"""Strings of users in values that a template prints itself: marked before rendering, and found again after it.

Tool definitions and the arguments of calls are JSON, and each template prints them in its own way, so their strings
must pass through the template. Those that may spell a control token (`<|im_end|>` in a description) are put between two
marks, which are around them in the rendered text, too. All others are passed as they are: a template can compare them,
and they are tokenised together with the words around them, as the model was trained.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from notes_cli.errors import NotesError

# A secret, so that nobody can write a mark. Letters and digits only, so that no template escapes it or takes it apart.
_SECRET = os.urandom(6).hex()
OPEN, CLOSE = f"NOTES{_SECRET}open", f"NOTES{_SECRET}shut"
MAX_DEPTH = 64

# Vocabularies spell control tokens with brackets, bars or unusual characters such as U+2581.
_DOUBTFUL = re.compile(r"[^\w\s!-/:;=?@\\^_`~]")
_NOT_OPENING = re.compile(r"[^\w\s!-/:;=?@\\^_`~<]")
_MARKED = re.compile(f"({OPEN}|{CLOSE})")
_AROUND = re.compile(rf"NOTES{_SECRET}(?:open|shut|(?:begin|end)\d+x)")
_MARKER = re.compile(rf"NOTES{_SECRET}[a-z]+\d+x")
_NO_TEXT = re.compile(rf"(?:NOTES{_SECRET}text\d+x|\s)*")
_SEAL = "\ue000"  # what is kept in the place of the secret, in private use: nothing else may be that


def marker(number: int, kind: str = "text") -> str:
    """What takes the place of a text, or of another kind of value, while a template renders."""
    return f"NOTES{_SECRET}{kind}{number:03d}x"


def markers_in(text: str) -> Counter[str]:
    """How often each marker is in a rendered text, which is looked through once."""
    return Counter(_MARKER.findall(text))


def places_of_markers(text: str) -> dict[str, int]:
    """Where each marker is in a rendered text for the first time."""
    return {found[0]: found.start() for found in reversed([*_MARKER.finditer(text)])}


Way = Callable[[Any], Any]  # how a JSON value is passed to a template


def as_given(value: Any) -> Any:
    """A JSON value as it is.

    Raise NotesError for what JSON does not have, and for more than MAX_DEPTH levels.
    """
    return _passed(value, lambda text: text)


def marked(value: Any) -> Any:
    """A JSON value with marks around each string, also each key, that may spell a control token."""
    return _passed(value, lambda text: between(text, OPEN, CLOSE))


def neutral(value: Any) -> Any:
    """As `marked`, with _ in the place of each character that a control token may be spelled with, except for <, which
    some templates look for, and with which no control token ends."""
    return _passed(value, lambda text: between(_NOT_OPENING.sub("_", text), OPEN, CLOSE))


def unmarked(value: Any) -> Any:
    """As `as_given`; only the ends of results are marked."""
    return _passed(value, lambda text: text)


def blurred(value: Any) -> Any:
    """As `unmarked`, with _ in the place of each character that a control token may be spelled with."""
    return _passed(value, lambda text: _DOUBTFUL.sub("_", text))


def marked_where_different(text: str, other: str) -> str | None:
    """A rendered text with marks around what is different in another one of the same length, what is rendered of
    `blurred` values: these are the characters of users that a control token may be spelled with. None where the
    lengths differ, so that it is not known which these are."""
    if len(text) != len(other):
        return None
    found, at, end = [], 0, 0  # what is marked begins at `at` and ends at `end`
    for place, (one, another) in enumerate(zip(text, other, strict=True)):
        if one == another:
            continue
        if end and not _DOUBTFUL.search(text, end, place) and not _AROUND.search(text, end, place):
            end = place + 1
            continue
        found += [text[at:end], CLOSE] if end else []
        found += [text[end:place], OPEN]
        at, end = place, place + 1
    return "".join([*found, text[at:end], CLOSE, text[end:]]) if end else text


def _passed(value: Any, doubtful: Callable[[str], str], depth: int = 0) -> Any:
    """The value with strings that may spell a control token replaced."""
    if depth > MAX_DEPTH:
        raise NotesError(f"a tool's definition or arguments are nested more than {MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        check_unicode(value)
        return doubtful(value) if _DOUBTFUL.search(value) else value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise NotesError("a tool's definition or arguments have a key that is not a text, which JSON does not have")
        return {_passed(key, doubtful, depth + 1): _passed(one, doubtful, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_passed(one, doubtful, depth + 1) for one in value]
    raise NotesError(f"a tool's definition or arguments hold {type(value).__name__}, which JSON does not have")


def between(text: str, first: str, last: str) -> str:
    """The text between two marks; white space at its ends stays outside, where a template may trim it."""
    core = text.strip()
    before, _, after = text.partition(core) if core else ("", "", text)
    return f"{before}{first}{core}{last}{after}"


def check_unicode(text: str) -> None:
    """Raise NotesError for half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NotesError(f"{text[error.start]!a} in {text[:40]!a} is half of a UTF-16 surrogate pair") from None


def without_marks(text: str) -> str:
    """The text without marks, and without the markers at both ends of a text ("begin" and "end")."""
    return _AROUND.sub("", text)


def stretches(text: str) -> list[tuple[str, bool]] | None:
    """A rendered text without the marks, as (stretch, whether the template wrote it); None if marks do not match."""
    found: list[tuple[str, bool]] = []
    own = True
    for part in _MARKED.split(text):
        if part in (OPEN, CLOSE):
            if own is (part == CLOSE):
                return None
            own = not own
        elif part:
            found.append((part, own))
    return found if own else None


def is_left(text: str) -> bool:
    """Whether a part of a mark or of a marker is left in a text without them."""
    return _SECRET in text


def no_text(content: object) -> bool:
    """Whether this is nothing but markers of texts."""
    return isinstance(content, str) and _NO_TEXT.fullmatch(content) is not None


def sealed(text: str) -> str | None:
    """The text with its marks as any process would know them; None where they could not be told from the rest."""
    return None if _SEAL in text else text.replace(_SECRET, _SEAL)


def unsealed(text: str) -> str:
    """What was sealed, with marks of this process."""
    return text.replace(_SEAL, _SECRET)
