"""Which files of the library's folder are segments: `<name>.<key of the identity>.gguf`, and nothing else.

It loads neither numpy nor llama.cpp, so that a shell can complete names and fields at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from notes_cli.engine.gguf_file import Cursor, read_counts, read_values
from notes_cli.errors import SegmentError, reason
from notes_cli.library import private
from notes_cli.text import names

ERRATA = "errata.jsonl"  # what everybody is told (standing.py)
GLANCE = 1 << 22  # bytes in which the fields are looked for: a text far longer than any model reads precedes them
MOST_KEYS = 1 << 14
FILE = re.compile(r"(?P<name>[^.]+)\.(?P<key>[0-9a-f]{12})\.gguf")


def name_in(path: Path) -> str | None:
    """The name of the skill that a file is of, None if it is not called like a segment."""
    match = FILE.fullmatch(path.name)
    name = names.typed(match["name"]) if match else ""
    return name if names.is_name(name) else None


def skill_named(word: str, known: Collection[str]) -> str | None:
    """The known name that a user's word means: as it is typed, or in lower case (Returns.txt was compiled as returns),
    unless there is a file of that name. None if it means none."""
    typed = names.typed(word)
    if typed in known:
        return typed
    lower = names.typed(word.lower())
    return lower if lower in known and not Path(word).exists() else None


def segment_files(folder: Path) -> list[tuple[str, Path]]:
    """Name and path of each segment in a folder, by the file's name; none if it is not there.

    Raise NotesError if it cannot be read, or may be of another user's making (private.py).
    """
    private.check(folder)
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SegmentError(f"cannot read the library {folder}: {reason(error)}") from error
    return [(name, path) for path in paths if (name := name_in(path))]


def fields_in(path: Path) -> dict[str, str]:
    """The value of each field of a segment, by name, for completion: {} for any other file, and nothing is checked."""
    try:
        with path.open("rb") as file:
            cursor = Cursor(file.read(GLANCE))
        values = read_values(cursor, read_counts(cursor, MOST_KEYS)[2])
        spans = json.loads(str(values["notes.fields"].value))
        return {str(span["name"]): str(span["value"]) for span in spans}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
