"""Reads and writes the head of a GGUF file: keys, values and the places of tensors, of models and of segments alike.

Files are not trusted: nothing is allocated for a length before it is compared with the bytes that there are, and
whatever does not fit raises FormatError. The callers check what keys and tensors mean. Source of the layout:
docs/gguf.md of ggml, whose own reader returns strings without their lengths: a text would end at its first NUL.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAGIC = b"GGUF"
UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", 5: "i", 6: "f", 7: "?", UINT64: "Q", 11: "q", 12: "d"}
ALIGNMENT = 32  # of every tensor, unless a key names another one
MAX_DIMS = 4
MAX_HEAD = 1 << 27  # bytes; the largest vocabularies take a tenth
MAX_ENTRIES = 1 << 17  # keys, and tensors
FIRST = 1 << 18  # bytes that are read at once to begin with
_LENGTH = struct.Struct("<Q").unpack_from

# elements of a block -> ggml_type -> bytes of a block (ggml.h)
_BLOCKS = {
    1: {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2},
    32: {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17},
    64: {40: 36},
    128: {41: 18},
    256: {
        10: 84,
        11: 110,
        12: 144,
        13: 176,
        14: 210,
        15: 292,
        16: 66,
        17: 74,
        18: 98,
        19: 50,
        21: 110,
        22: 82,
        23: 136,
        29: 56,
        34: 54,
        35: 66,
    },
}
BLOCKS = {kind: (elements, nbytes) for elements, kinds in _BLOCKS.items() for kind, nbytes in kinds.items()}


class FormatError(ValueError):
    """The bytes are not those of a GGUF file that is read here."""


Value = int | float | bool | str


class Tensor(NamedTuple):
    """Dimensions with the fastest first, the ggml type, and the offset from the first tensor in bytes."""

    dims: tuple[int, ...]
    kind: int
    offset: int


@dataclass(slots=True)
class Head:
    """All before the first tensor."""

    values: dict[str, Value]  # of an array its number of elements
    kinds: dict[str, int]  # types of the values
    offsets: dict[str, int]  # of the values in the file; of an array, of its type and length
    tensors: dict[str, Tensor]
    size: int  # bytes, padding included

    @property
    def end(self) -> int:
        """Bytes of the file, by its tensors."""
        ends = [self.size]
        for dims, kind, offset in self.tensors.values():
            elements, nbytes = BLOCKS.get(kind, (1, 0))
            ends.append(self.size + offset + prod(dims) // elements * nbytes)
        return max(ends)


def open_file(path: Path) -> BinaryIO:
    """Open a file without waiting for the writer of a pipe. Raises OSError."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    return open(os.open(path, flags), "rb", buffering=0)


class Cursor:
    """Reads a file forward, each byte once, as far as needed."""

    def __init__(self, file: BinaryIO, errors: str = "strict") -> None:
        """`errors`: for strings that are not UTF-8, as of bytes.decode."""
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("it is not a regular file")
        self.data, self.at, self.size = b"", 0, status.st_size
        self._file, self._errors = file, errors

    def need(self, count: int) -> None:
        """Have the next `count` bytes in memory."""
        end = self.at + count
        if end <= len(self.data):
            return
        if end > self.size:
            raise FormatError("it ends too early. Was its download interrupted?")
        if end > MAX_HEAD:
            raise FormatError(f"it has a head of more than {MAX_HEAD >> 20} MiB")
        wanted, parts = min(max(end, 2 * len(self.data), FIRST), self.size), [self.data]
        while (left := wanted - sum(map(len, parts))) > 0:
            parts.append(self._file.read(left))
            if not parts[-1]:
                raise FormatError("it was cut off while it was read")
        self.data = b"".join(parts)

    def take(self, count: int) -> bytes:
        self.need(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, codes: str) -> tuple[int, ...]:
        """Numbers of these types, as `struct` names them."""
        count = struct.calcsize(f"<{codes}")
        self.need(count)
        self.at += count
        return struct.unpack_from(f"<{codes}", self.data, self.at - count)

    def string(self) -> str:
        try:
            return self.take(self.numbers("Q")[0]).decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise FormatError("it holds a string that is not UTF-8") from error

    def skip_strings(self, count: int) -> None:
        """Skip strings, of which a vocabulary has a quarter of a million."""
        data, at, known = self.data, self.at, len(self.data) - 8
        for _ in range(count):
            if at > known:
                self.at = at
                self.need(8)
                data, known = self.data, len(self.data) - 8
            at += 8 + _LENGTH(data, at)[0]
        self.at = at
        self.need(0)

    def value(self, kind: int) -> Value:
        """Return a value of this type; of an array its number of elements."""
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            number: Value = self.numbers(SCALARS[kind])[0]
            return number
        if kind != ARRAY:
            raise FormatError(f"it holds a value of the unknown type {kind}")
        of, length = self.numbers("IQ")
        if of == STRING:
            self.skip_strings(length)
        elif of in SCALARS:
            nbytes = length * struct.calcsize(f"<{SCALARS[of]}")
            self.need(nbytes)
            self.at += nbytes
        else:
            raise FormatError(f"it holds an array of the unknown type {of}")
        return length


def read_head(cursor: Cursor) -> Head:
    """Read keys, values and places of tensors, in the order of the file."""
    if cursor.size < len(MAGIC) or cursor.take(4) != MAGIC:
        raise FormatError("it is not a GGUF file")
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        raise FormatError("it is for big-endian machines" if big else f"it is of GGUF version {version}, not 2 or 3")
    n_tensors, n_keys = cursor.numbers("QQ")
    if max(n_tensors, n_keys) > MAX_ENTRIES:
        raise FormatError("it declares too many entries")
    head = Head({}, {}, {}, {}, 0)
    for _ in range(n_keys):
        key = cursor.string()
        if key in head.values:
            raise FormatError("it holds a key twice")
        (head.kinds[key],) = cursor.numbers("I")
        head.offsets[key] = cursor.at
        head.values[key] = cursor.value(head.kinds[key])
    alignment = head.values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"it has an alignment of {alignment}")
    for _ in range(n_tensors):
        name, (n_dims,) = cursor.string(), cursor.numbers("I")
        if name in head.tensors:
            raise FormatError("it holds a tensor twice")
        if n_dims > MAX_DIMS:
            raise FormatError(f"it holds a tensor of {n_dims} dimensions")
        *dims, kind, offset = cursor.numbers(f"{n_dims}QIQ")
        head.tensors[name] = Tensor(tuple(dims), kind, offset)
    head.size = padded(cursor.at, alignment)
    return head


def head_bytes(values: Mapping[str, str | int], tensors: Iterable[tuple[str, tuple[int, ...], int, int]]) -> bytes:
    """Return the head of a file with these values (ints have 32 bits) and tensors (name, dimensions with the fastest
    first, ggml type, bytes), which follow in this order, each padded to the alignment."""
    tensors = list(tensors)
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(values))]
    for key, value in values.items():
        kind, content = (UINT32, struct.pack("<I", value)) if isinstance(value, int) else (STRING, _string(value))
        parts += [_string(key), struct.pack("<I", kind), content]
    offset = 0
    for name, dims, kind, nbytes in tensors:
        parts += [_string(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)]
        offset += padded(nbytes)
    head = b"".join(parts)
    return head.ljust(padded(len(head)), b"\0")


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def padded(size: int, alignment: int = ALIGNMENT) -> int:
    """Round up to the alignment."""
    return -(-size // alignment) * alignment
