"""Reading the metadata that a GGUF file begins with, without numpy: a shell that completes a word cannot wait.

What is read is not to be trusted: see gguf.py.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

MAGIC = b"GGUF"
VERSION = 3
UINT32, STRING, UINT64 = 4, 8, 10

# A segment has a few tensors a layer and one checksum for each. Far above any model, far below what takes
# long to read.
MAX_ENTRIES = 1 << 14
GLANCE = 1 << 22  # bytes in which the fields are looked for: a text far longer than any model reads precedes them


class FormatError(ValueError):
    """The bytes are not the head of a GGUF file that this reader understands."""


class ShortError(FormatError):
    """The bytes end before the head does."""


class Cursor:
    """Reads forward in the bytes and refuses to leave them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise ShortError("it ends too early")
        self.at += size
        return bytes(self._data[self.at - size : self.at])

    def uint32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def uint64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        try:
            return self.take(self.uint64()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError("it holds a string that is not UTF-8") from error


def begin(cursor: Cursor) -> tuple[int, int]:
    """How many tensors and how many keys a file has that begins here."""
    if cursor.take(4) != MAGIC:
        raise FormatError("it does not begin like a GGUF file")
    version = cursor.uint32()
    if version != VERSION:
        raise FormatError(f"GGUF version {version}, not {VERSION}")
    n_tensors, n_keys = cursor.uint64(), cursor.uint64()
    if n_tensors > MAX_ENTRIES or n_keys > MAX_ENTRIES:
        raise FormatError("it declares too many entries")
    return n_tensors, n_keys


def read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, str | int], dict[str, int]]:
    """Value of each key, and where in the file the bytes of those begin that are strings."""
    metadata: dict[str, str | int] = {}
    offsets: dict[str, int] = {}
    for _ in range(count):
        key, kind = cursor.string(), cursor.uint32()
        if key in metadata:
            raise FormatError("it holds a key twice")
        if kind == STRING:
            offsets[key] = cursor.at + 8
            metadata[key] = cursor.string()
        elif kind == UINT32:
            metadata[key] = cursor.uint32()
        elif kind == UINT64:
            metadata[key] = cursor.uint64()
        else:
            raise FormatError(f"it holds a value of type {kind}, which segments do not have")
    return metadata, offsets


def fields_in(path: Path) -> dict[str, str]:
    """Value of each field of a segment, by name; {} of what is none. For people who are about to type one: nothing of
    the file is checked."""
    try:
        with path.open("rb") as file:
            cursor = Cursor(memoryview(file.read(GLANCE)))
        metadata, _ = read_metadata(cursor, begin(cursor)[1])
        spans = json.loads(str(metadata["notes.fields"]))
        return {str(span["name"]): str(span["value"]) for span in spans}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
