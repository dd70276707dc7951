"""Reading the head of a GGUF file: its metadata, and where its tensors lie.

A reader of our own, because these files come from disk and are not to be trusted: every length and type is
checked against the size of the file before anything is allocated, and whatever does not fit raises
FormatError. It reads only what a segment holds (strings and unsigned integers; f16, f32 and i32 tensors
without gaps) and knows nothing of what the keys mean.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32  # of every tensor; also the default of the format

UINT32, STRING, UINT64 = 4, 8, 10
DTYPES: Mapping[int, np.dtype[np.generic]] = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 26: np.dtype("<i4")}

# A segment has a few tensors a layer and one checksum for each. Far above any model, far below what takes
# long to read.
MAX_ENTRIES = 1 << 14
MAX_DIMS = 4


class FormatError(ValueError):
    """The bytes are not the head of a GGUF file that this reader understands."""


class ShortError(FormatError):
    """The bytes end before the head does."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [offset, offset + nbytes) of the file, padded with zeros up to `end`."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]  # as NumPy has it: the last dimension runs fastest
    offset: int
    nbytes: int
    end: int


@dataclass(frozen=True, slots=True)
class Head:
    """All of a GGUF file but the tensors' bytes."""

    metadata: dict[str, str | int]
    value_offset: dict[str, int]  # where in the file the bytes of each string value begin
    tensors: dict[str, TensorEntry]
    size: int  # bytes before the first tensor, padding included
    end: int  # bytes of the file


def read_head(data: memoryview, size: int | None = None) -> Head:
    """Read the head of a GGUF file of `size` bytes, given all of them or the first ones. Raise FormatError; ShortError
    if there are too few of them.

    The tensors must follow each other without a gap and end where the file ends.
    """
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        raise FormatError("it does not begin like a GGUF file")
    version = cursor.uint32()
    if version != VERSION:
        raise FormatError(f"GGUF version {version}, not {VERSION}")
    n_tensors, n_keys = cursor.uint64(), cursor.uint64()
    if n_tensors > MAX_ENTRIES or n_keys > MAX_ENTRIES:
        raise FormatError("it declares too many entries")
    metadata, value_offset = _read_metadata(cursor, n_keys)
    entries = _read_entries(cursor, n_tensors)
    start = padded(cursor.at)
    tensors = {name: _shifted(entry, start) for name, entry in entries.items()}
    end = max((entry.end for entry in tensors.values()), default=start)
    size = len(data) if size is None else size
    if end != size:
        raise FormatError(f"it has {size} bytes where its head says {end}")
    if start > len(data):
        raise ShortError("it ends too early")
    return Head(metadata, value_offset, tensors, start, end)


def padded(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Cursor:
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


def _read_metadata(cursor: _Cursor, count: int) -> tuple[dict[str, str | int], dict[str, int]]:
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


def _read_entries(cursor: _Cursor, count: int) -> dict[str, TensorEntry]:
    """Where the tensors lie, with offsets that count from the first of them."""
    entries: dict[str, TensorEntry] = {}
    expected = 0
    for _ in range(count):
        name, n_dims = cursor.string(), cursor.uint32()
        if name in entries:
            raise FormatError("it holds a tensor twice")
        if not 1 <= n_dims <= MAX_DIMS:
            raise FormatError(f"it holds a tensor of {n_dims} dimensions")
        shape = tuple(cursor.uint64() for _ in range(n_dims))[::-1]
        kind, offset = cursor.uint32(), cursor.uint64()
        if kind not in DTYPES:
            raise FormatError(f"it holds a tensor of type {kind}, which segments do not have")
        nbytes = prod(shape) * DTYPES[kind].itemsize
        if offset != expected or nbytes == 0:
            raise FormatError("its tensors do not follow each other")
        expected = padded(offset + nbytes)
        entries[name] = TensorEntry(DTYPES[kind], shape, offset, nbytes, expected)
    return entries


def _shifted(entry: TensorEntry, start: int) -> TensorEntry:
    return TensorEntry(entry.dtype, entry.shape, start + entry.offset, entry.nbytes, start + entry.end)
