"""Reads and writes the GGUF head of a segment file: strings, unsigned integers, and tensors without gaps between them.

Written without the package gguf, which takes 40 ms to load, because each turn of a session writes a file. Reading
(engine/gguf_file.py) is stricter than for models: other types, gaps and bytes after the last tensor raise FormatError.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.gguf_file import (
    MAGIC,
    STRING,
    UINT32,
    UINT64,
    Cursor,
    FormatError,
    ShortError,
    Tensor,
    read_counts,
    read_tensors,
    read_values,
)
from notes_cli.engine.segment import BLOCK, Q8_0

VERSION = 3
ALIGNMENT = 32  # of every tensor, GGUF's default
DTYPES: Mapping[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 8: Q8_0, 26: np.dtype("<i4")}
# A segment has a few tensors a layer and a checksum for each: far above any model, and quick to read.
MAX_ENTRIES = 1 << 14


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor at bytes [offset, offset + nbytes) of the file, padded with zeros up to `end`."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]  # NumPy's order; counts blocks where the type is quantized
    offset: int
    nbytes: int
    end: int


@dataclass(frozen=True, slots=True)
class Head:
    """A parsed GGUF file without the tensors' bytes."""

    metadata: dict[str, str | int]
    value_offset: dict[str, int]  # offset in the file of each string value's bytes
    tensors: dict[str, TensorEntry]
    size: int  # bytes before the first tensor, padding included
    end: int  # bytes of the file


def read_head(data: memoryview, size: int | None = None) -> Head:
    """Parse the head of a GGUF file of `size` bytes from its first bytes. Raises ShortError if these are too few, and
    FormatError, also where tensors have gaps between them or do not end with the file."""
    cursor = Cursor(data)
    version, n_tensors, n_keys = read_counts(cursor, MAX_ENTRIES)
    if version != VERSION:
        raise FormatError(f"GGUF version {version}, not {VERSION}")
    metadata: dict[str, str | int] = {}
    value_offset: dict[str, int] = {}
    for key, (kind, value, offset) in read_values(cursor, n_keys).items():
        if isinstance(value, str):
            value_offset[key] = offset
        elif kind not in (UINT32, UINT64):
            raise FormatError(f"it holds a value of type {kind}, which segments do not have")
        metadata[key] = value  # type: ignore[assignment]
    infos = read_tensors(cursor, n_tensors)
    start = padded(cursor.at)
    tensors = _placed(infos, start)
    end = max((entry.end for entry in tensors.values()), default=start)
    size = len(data) if size is None else size
    if end != size:
        raise FormatError(f"it has {size} bytes, and its header describes {end}")
    if start > len(data):
        raise ShortError("it ends too early")
    return Head(metadata, value_offset, tensors, start, end)


def head_of(metadata: Mapping[str, str | int], tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the head of a file with these values (ints have 32 bits) and tensors (of DTYPES), padded to the alignment.
    The tensors follow in this order, each padded likewise."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if isinstance(value, int):
            parts += [_string(key), struct.pack("<II", UINT32, value)]
        else:
            parts += [_string(key), struct.pack("<I", STRING), _string(value)]
    offset = 0
    for name, tensor in tensors.items():
        kind = next(kind for kind, dtype in DTYPES.items() if dtype == tensor.dtype)
        *rows, columns = tensor.shape
        shape = columns * BLOCK if tensor.dtype == Q8_0 else columns, *reversed(rows)
        parts += [_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)]
        offset += padded(tensor.nbytes)
    head = b"".join(parts)
    return head.ljust(padded(len(head)), b"\0")


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def padded(size: int) -> int:
    """Round up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _placed(tensors: Mapping[str, Tensor], start: int) -> dict[str, TensorEntry]:
    """Return the entries of tensors, the first of which begins at byte `start`."""
    entries: dict[str, TensorEntry] = {}
    expected = 0
    for name, (dims, kind, offset) in tensors.items():
        if not dims:
            raise FormatError("it holds a tensor of 0 dimensions")
        if kind not in DTYPES:
            raise FormatError(f"it holds a tensor of type {kind}, which segments do not have")
        shape = dims[::-1]
        if DTYPES[kind] == Q8_0:
            if shape[-1] % BLOCK:
                raise FormatError(f"it holds rows of {shape[-1]} numbers, which are no whole blocks")
            shape = (*shape[:-1], shape[-1] // BLOCK)
        nbytes = prod(shape) * DTYPES[kind].itemsize
        if offset != expected or nbytes == 0:
            raise FormatError("its tensors do not follow each other")
        expected = padded(offset + nbytes)
        entries[name] = TensorEntry(DTYPES[kind], shape, start + offset, nbytes, start + expected)
    return entries
