"""What a GGUF model says of itself in its head: metadata, and where its tensors end. Read without llama.cpp.

These files are anybody's: every length is checked against the size of the file before anything is read for it. Of
arrays only the length is kept, of tensors the shape.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from notes_cli.engine.source import parts
from notes_cli.errors import ModelError, reason

# llama_ftype -> the name people know (llama.h, enum llama_ftype)
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}

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

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q").unpack_from
_FIRST = 1 << 18  # bytes that are read at once to begin with
MAX_HEAD = 1 << 27  # bytes; the largest vocabularies take a tenth
MAX_ENTRIES = 1 << 17  # keys, and tensors
MAX_DIMS = 4


class _HeadError(ValueError):
    """The bytes are not the head of a model."""


@dataclass(slots=True)
class Header:
    """The heads of all files of a model."""

    values: dict[str, int | float | bool | str]  # of an array: how many elements it has
    tensors: dict[str, tuple[int, ...]]  # their shapes, as the file has them
    size: int  # bytes of all files
    missing: int = 0  # bytes that the files lack for their tensors

    def text(self, key: str) -> str:
        """A value that is a text, "" if it is none."""
        value = self.values.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        """A value that is a whole number, None if it is none."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def quantization(self) -> str:
        """The type of most of its weights, "" if the file does not say it."""
        kind = self.number("general.file_type")
        return "" if kind is None else FILE_TYPES.get(kind, f"type {kind}")

    @property
    def context(self) -> int | None:
        """Tokens that the model was trained for, without RoPE scaling."""
        return self.number(f"{self.architecture}.context_length")

    @property
    def model(self) -> bool:
        """Whether this is a language model: not the projector of one that sees, a LoRA, a vocabulary alone."""
        return bool(self.tensors) and self.architecture != "clip" and self.text("general.type") in ("", "model")


def read_header(path: Path) -> Header:
    """The head of a model, of all its parts if it is split. Raise ModelError for what is no whole GGUF model."""
    whole: Header | None = None
    there = parts(path)
    for part in there:
        try:
            found = _read_file(part)
        except _HeadError as error:
            raise ModelError(f"{part}: {error}") from error
        except OSError as error:
            raise ModelError(f"{part}: cannot be read ({reason(error)})") from error
        if found.missing:
            have = f"{found.size - found.missing:,} of its {found.size:,} bytes"
            raise ModelError(f"{part}: {have} are there. Was its download interrupted?")
        if whole is None:
            whole = found
        else:
            whole.tensors |= found.tensors
            whole.size += found.size
    assert whole is not None
    count = whole.number("split.count") or 1
    if count > len(there):
        raise ModelError(f"{path}: {len(there)} of its {count} parts are there, by their names")
    return whole


def _read_file(path: Path) -> Header:
    # A pipe that is opened would wait for somebody to write into it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise _HeadError("is not a regular file")
        return _read(_Reader(file, found.st_size), found.st_size)


class _Reader:
    """Reads forward in a file, and refuses to leave it."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._data = b""
        self.at = 0

    def need(self, count: int) -> None:
        """Have the next `count` bytes in memory."""
        end = self.at + count
        if end <= len(self._data):
            return
        if end > self._size:
            raise _HeadError("ends within its head. Was its download interrupted?")
        if end > MAX_HEAD:
            raise _HeadError(f"has a head of more than {MAX_HEAD >> 20} MiB")
        wanted = max(end, 2 * len(self._data), _FIRST)
        while len(self._data) < min(wanted, self._size):
            more = self._file.read(wanted - len(self._data))
            if not more:
                raise _HeadError("became shorter while it was read")
            self._data += more

    def number(self, code: str) -> int | float | bool:
        count = struct.calcsize(f"<{code}")
        self.need(count)
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += count
        return value  # type: ignore[no-any-return]

    def count(self, code: str = "Q") -> int:
        return int(self.number(code))

    def numbers(self, codes: str) -> tuple[int, ...]:
        """Several numbers at once: a model has hundreds of tensors."""
        count = struct.calcsize(f"<{codes}")
        self.need(count)
        self.at += count
        return struct.unpack_from(f"<{codes}", self._data, self.at - count)

    def skip(self, count: int) -> None:
        self.need(count)
        self.at += count

    def take(self, count: int) -> bytes:
        self.skip(count)
        return self._data[self.at - count : self.at]

    def string(self) -> str:
        return self.take(self.count()).decode("utf-8", errors="replace")

    def skip_strings(self, count: int) -> None:
        """A vocabulary has a quarter of a million."""
        if count > self._size // 8:
            raise _HeadError("ends within its head. Was its download interrupted?")
        data, at, known = self._data, self.at, len(self._data) - 8
        for _ in range(count):
            if at > known:
                self.at = at
                self.need(8)
                data, known = self._data, len(self._data) - 8
            at += 8 + _LENGTH(data, at)[0]
        self.at = at
        self.need(0)


def _read(reader: _Reader, size: int) -> Header:
    if size < 4 or reader.take(4) != b"GGUF":
        raise _HeadError("is not a GGUF file")
    version = reader.count("I")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        raise _HeadError("is for big-endian machines" if big else f"is of GGUF version {version}, not 2 or 3")
    n_tensors, n_keys = reader.count(), reader.count()
    if max(n_tensors, n_keys) > MAX_ENTRIES:
        raise _HeadError("declares too many entries")
    values: dict[str, int | float | bool | str] = {}
    for _ in range(n_keys):
        key = reader.string()
        values[key] = _value(reader, reader.count("I"))
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _HeadError(f"has an alignment of {alignment}")
    tensors, end = _tensors(reader, n_tensors)
    start = -(-reader.at // alignment) * alignment
    whole = max(size, start + end) if n_tensors else size
    return Header(values, tensors, whole, whole - size)


def _value(reader: _Reader, kind: int) -> int | float | bool | str:
    if kind == _STRING:
        return reader.string()
    if kind != _ARRAY:
        if kind not in _SCALARS:
            raise _HeadError(f"has a value of the unknown type {kind}")
        return reader.number(_SCALARS[kind])
    of, count = reader.count("I"), reader.count()
    if of == _STRING:
        reader.skip_strings(count)
    elif of in _SCALARS:
        reader.skip(count * struct.calcsize(f"<{_SCALARS[of]}"))
    else:
        raise _HeadError(f"has an array of the unknown type {of}")
    return count


def _tensors(reader: _Reader, count: int) -> tuple[dict[str, tuple[int, ...]], int]:
    """Shapes by name, and where the last one ends, counted from the first."""
    shapes: dict[str, tuple[int, ...]] = {}
    end = 0
    for _ in range(count):
        name, n_dims = reader.string(), reader.count("I")
        if n_dims > MAX_DIMS:
            raise _HeadError(f"has a tensor of {n_dims} dimensions")
        *shape, kind, offset = reader.numbers(f"{n_dims}QIQ")
        shapes[name] = tuple(shape)
        elements, nbytes = BLOCKS.get(kind, (1, 0))  # of an unknown type: at least where it begins
        end = max(end, offset + prod(shapes[name]) // elements * nbytes)
    return shapes, end
