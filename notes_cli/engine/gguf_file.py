"""Reads the head of a GGUF file: its keys and values, and the offsets of its tensors. No numpy, no llama.cpp.

The files are not trusted: nothing is allocated for a length before it is compared with the bytes that there are, and
whatever does not fit raises FormatError. The callers check what the keys mean, and the types that they accept.
Source of the layout: docs/gguf.md of ggml.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

MAGIC = b"GGUF"
UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", 5: "i", 6: "f", 7: "?", UINT64: "Q", 11: "q", 12: "d"}
MAX_DIMS = 4
_LENGTH = struct.Struct("<Q").unpack_from


class FormatError(ValueError):
    """The bytes are not the head of a GGUF file that is read here."""


class ShortError(FormatError):
    """The bytes end before the head does."""


class Value(NamedTuple):
    """The value of a key; of an array its number of elements. `offset`: 8 bytes after it begins, where the bytes of a
    string do."""

    kind: int
    value: int | float | bool | str
    offset: int


class Tensor(NamedTuple):
    """Dimensions with the fastest first, the ggml type, and the offset from the first tensor in bytes."""

    dims: tuple[int, ...]
    kind: int
    offset: int


class Cursor:
    """Reads forward in the first bytes of a file."""

    def __init__(
        self,
        data: bytes | memoryview,
        more: Callable[[int], bytes | memoryview] | None = None,
        *,
        errors: str = "strict",
    ) -> None:
        """`more`: returns the first bytes of the file, at least as many as asked for, or raises FormatError.
        `errors`: for strings that are not UTF-8, as in bytes.decode."""
        self._data, self._more, self._errors = data, more, errors
        self.at = 0

    def need(self, count: int) -> None:
        """Have the next `count` bytes in memory. Raise ShortError where there are fewer."""
        end = self.at + count
        if end > len(self._data):
            if self._more is None:
                raise ShortError("it ends too early")
            self._data = self._more(end)

    def take(self, count: int) -> bytes:
        self.need(count)
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def skip(self, count: int) -> None:
        self.need(count)
        self.at += count

    def numbers(self, codes: str) -> tuple[int, ...]:
        """Numbers of these types, as `struct` names them."""
        count = struct.calcsize(f"<{codes}")
        self.need(count)
        self.at += count
        return struct.unpack_from(f"<{codes}", self._data, self.at - count)

    def number(self, code: str) -> int:
        return self.numbers(code)[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise FormatError("it holds a string that is not UTF-8") from error

    def skip_strings(self, count: int) -> None:
        """Skip strings, of which a vocabulary has a quarter of a million."""
        data, at, known = self._data, self.at, len(self._data) - 8
        for _ in range(count):
            if at > known:
                self.at = at
                self.need(8)
                data, known = self._data, len(self._data) - 8
            at += 8 + _LENGTH(data, at)[0]
        self.at = at
        self.need(0)


def read_counts(cursor: Cursor, most: int) -> tuple[int, int, int]:
    """The version of the format, and the numbers of tensors and of keys, which are `most` each."""
    if cursor.take(4) != MAGIC:
        raise FormatError("it is not a GGUF file")
    version = cursor.number("I")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        raise FormatError("it is for big-endian machines" if big else f"it is of GGUF version {version}, not 2 or 3")
    n_tensors, n_keys = cursor.numbers("QQ")
    if max(n_tensors, n_keys) > most:
        raise FormatError("it declares too many entries")
    return version, n_tensors, n_keys


def read_values(cursor: Cursor, count: int) -> dict[str, Value]:
    """The keys and their values, in the order of the file."""
    values: dict[str, Value] = {}
    for _ in range(count):
        key, kind = cursor.string(), cursor.number("I")
        if key in values:
            raise FormatError("it holds a key twice")
        offset = cursor.at + 8
        values[key] = Value(kind, _value(cursor, kind), offset)
    return values


def _value(cursor: Cursor, kind: int) -> int | float | bool | str:
    if kind == STRING:
        return cursor.string()
    if kind in SCALARS:
        return cursor.number(SCALARS[kind])
    if kind != ARRAY:
        raise FormatError(f"it holds a value of the unknown type {kind}")
    of, count = cursor.numbers("IQ")
    if of == STRING:
        cursor.skip_strings(count)
    elif of in SCALARS:
        cursor.skip(count * struct.calcsize(f"<{SCALARS[of]}"))
    else:
        raise FormatError(f"it holds an array of the unknown type {of}")
    return count


def read_tensors(cursor: Cursor, count: int) -> dict[str, Tensor]:
    """The tensors by name, in the order of the file."""
    tensors: dict[str, Tensor] = {}
    for _ in range(count):
        name, n_dims = cursor.string(), cursor.number("I")
        if name in tensors:
            raise FormatError("it holds a tensor twice")
        if n_dims > MAX_DIMS:
            raise FormatError(f"it holds a tensor of {n_dims} dimensions")
        *dims, kind, offset = cursor.numbers(f"{n_dims}QIQ")
        tensors[name] = Tensor(tuple(dims), kind, offset)
    return tensors
