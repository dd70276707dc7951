"""Parse and write segment files by docs/format.md alone, without the reader of notes.

So the campaign can lie in any place of a file, seal the lie with right checksums, and tell what a file vouches for.
"""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass, field

import xxhash

ALIGN = 32
SIZES = {0: 4, 1: 2, 26: 4}  # of an element: f32, f16, i32
HEAD = "notes.checksum.head"
ZEROS = b"0" * 32


class UnreadableError(ValueError):
    """These bytes cannot be taken apart."""


@dataclass
class Key:
    """A key with its type (8: string, 4: u32, 10: u64), and its value as bytes. `length`: a false length of a
    string."""

    name: bytes
    kind: int
    value: bytes
    length: int | None = None


@dataclass
class Tensor:
    """A tensor's place and bytes. `offset`: where that is a lie."""

    name: bytes
    dims: list[int]  # the fastest first
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Parts:
    """The parts of a segment file. `n_keys`, `n_tensors`: false counts in its header."""

    keys: list[Key] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None
    align: int = ALIGN
    tail: bytes = b""

    def copy(self) -> Parts:
        return copy.deepcopy(self)

    def key(self, name: str) -> Key | None:
        return next((key for key in self.keys if key.name == name.encode()), None)

    def text(self, name: str) -> str:
        found = self.key(name)
        return found.value.decode(errors="replace") if found else ""

    def number(self, name: str) -> int | None:
        found = self.key(name)
        return int.from_bytes(found.value, "little") if found else None

    def set(self, name: str, value: str | bytes) -> None:
        found = self.key(name)
        if found:
            found.value, found.kind = value.encode() if isinstance(value, str) else value, 8

    def tensor(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name.encode()), None)

    def seal(self) -> bytes:
        """The bytes, with checksums that are right for them."""
        for tensor in self.tensors:
            padded = tensor.data + bytes(-len(tensor.data) % ALIGN)
            found = self.key(f"notes.checksum.{tensor.name.decode(errors='replace')}")
            if found:
                found.value = xxhash.xxh3_128_hexdigest(padded).encode()
        head = self.key(HEAD)
        if head is None or head.kind != 8:
            return self.bytes()
        head.value = ZEROS
        start, at = self._head()
        digest = xxhash.xxh3_128_hexdigest(start).encode()
        head.value = digest
        return start[:at] + digest + start[at + 32 :] + self._body()

    def bytes(self) -> bytes:
        """The bytes as they are, right or wrong."""
        return self._head()[0] + self._body()

    def _head(self) -> tuple[bytes, int]:
        """Everything before the tensors, and where in it the digits of its checksum are."""
        out = bytearray(self.magic + struct.pack("<I", self.version & 0xFFFFFFFF))
        out += _u64(len(self.tensors) if self.n_tensors is None else self.n_tensors)
        out += _u64(len(self.keys) if self.n_keys is None else self.n_keys)
        at = 0
        for key in self.keys:
            out += _u64(len(key.name)) + key.name + struct.pack("<I", key.kind & 0xFFFFFFFF)
            if key.kind == 8:
                out += _u64(len(key.value) if key.length is None else key.length)
            at = len(out) if key.name == HEAD.encode() else at
            out += key.value
        offset = 0
        for tensor in self.tensors:
            out += _u64(len(tensor.name)) + tensor.name + struct.pack("<I", len(tensor.dims))
            out += b"".join(map(_u64, tensor.dims)) + struct.pack("<I", tensor.kind & 0xFFFFFFFF)
            out += _u64(offset if tensor.offset is None else tensor.offset)
            offset += -(-len(tensor.data) // self.align) * self.align
        out += bytes(-len(out) % ALIGN)
        return bytes(out), at

    def _body(self) -> bytes:
        return b"".join(tensor.data + bytes(-len(tensor.data) % self.align) for tensor in self.tensors) + self.tail


def _u64(number: int) -> bytes:
    return struct.pack("<Q", number & 0xFFFFFFFFFFFFFFFF)


def apart(data: bytes) -> Parts:
    """Parse a file, whatever its checksums. Raises UnreadableError for a file that violates docs/format.md."""
    try:
        return _apart(data)
    except (struct.error, IndexError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise UnreadableError(str(error)) from error


def _apart(data: bytes) -> Parts:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        if size > len(data) - at:
            raise UnreadableError("short")
        at += size
        return data[at - size : at]

    def number(size: int) -> int:
        return int.from_bytes(take(size), "little")

    if take(4) != b"GGUF" or number(4) != 3:
        raise UnreadableError("magic")
    n_tensors, n_keys = number(8), number(8)
    if max(n_tensors, n_keys) > 1 << 14:
        raise UnreadableError("counts")
    parts = Parts()
    for _ in range(n_keys):
        name, kind = take(number(8)), number(4)
        if kind not in (4, 8, 10):
            raise UnreadableError("type")
        parts.keys.append(Key(name, kind, take(number(8) if kind == 8 else 4 if kind == 4 else 8)))
    places = []
    for _ in range(n_tensors):
        name, n_dims = take(number(8)), number(4)
        if not 1 <= n_dims <= 4:
            raise UnreadableError("dimensions")
        dims = [number(8) for _ in range(n_dims)]
        kind, offset = number(4), number(8)
        if kind not in SIZES:
            raise UnreadableError("type")
        size = SIZES[kind]
        for dim in dims:
            size *= dim
        places.append((name, dims, kind, offset, size))
    at += -at % ALIGN
    start, expected = at, 0
    for name, dims, kind, offset, size in places:
        if offset != expected or size <= 0 or start + offset + size > len(data):
            raise UnreadableError("gap")
        begin = start + offset
        parts.tensors.append(Tensor(name, dims, kind, data[begin : begin + size]))
        expected = offset + size + -size % ALIGN
    if start + expected != len(data):
        raise UnreadableError("end")
    return parts


def vouched(data: bytes) -> str:
    """Why the checksums in these bytes do not vouch for them; empty if they do."""
    parts = apart(data)
    names = [key.name for key in parts.keys]
    if len(names) != len(set(names)) or len({tensor.name for tensor in parts.tensors}) != len(parts.tensors):
        return "a name twice"
    head, at = _head_of(data, parts)
    if xxhash.xxh3_128_hexdigest(head[:at] + ZEROS + head[at + 32 :]) != head[at : at + 32].decode(errors="replace"):
        return "the head's checksum"
    offset = len(head)
    for tensor in parts.tensors:
        end = offset + len(tensor.data) + -len(tensor.data) % ALIGN
        if parts.text(f"notes.checksum.{tensor.name.decode()}") != xxhash.xxh3_128_hexdigest(data[offset:end]):
            return f"the checksum of {tensor.name!r}"
        offset = end
    return ""


def _head_of(data: bytes, parts: Parts) -> tuple[bytes, int]:
    """The bytes of the head as they are in the file, and where its checksum is."""
    mine, at = parts._head()
    return data[: len(mine)], at
