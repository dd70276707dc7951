"""Parse and write GGUF files by the format's description alone, without the reader of notes.

So the campaign can change any place of a file, compute its checksums again, and find which bytes a file vouches for.
"""

from __future__ import annotations

import copy
import math
import struct
from dataclasses import dataclass, field

import xxhash

from bench.faults.frame import Failed, check

ALIGN = 32
SIZES = {0: 4, 1: 2, 26: 4}  # bytes of an element in a segment: f32, f16, i32
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of numbers
UINT, STRING, ARRAY, LONG = 4, 8, 9, 10
HEAD = "notes.checksum.head"
ZEROS = b"0" * 32


class UnreadableError(Failed):
    """These bytes violate the format."""

    def __init__(self, why: str) -> None:
        super().__init__(f"docs/format.md has this refused: {why}")


@dataclass
class Key:
    """A key with its type and its value as bytes. `length`: a false length of a string."""

    name: bytes
    kind: int
    value: bytes
    length: int | None = None


@dataclass
class Tensor:
    """A tensor's place and bytes. `offset`: a false one."""

    name: bytes
    dims: list[int]  # the fastest first
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Parts:
    """The parts of a file. `n_keys`, `n_tensors`: false counts in its header."""

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

    def set(self, name: str, value: bytes) -> None:
        """Change a string, if there is such a key."""
        found = self.key(name)
        if found:
            found.value, found.kind = value, STRING

    def tensor(self, name: str) -> bytes:
        """The bytes of a tensor; none where there is no such tensor."""
        return next((tensor.data for tensor in self.tensors if tensor.name == name.encode()), b"")

    def seal(self) -> bytes:
        """The bytes of a segment, with checksums that are right for them."""
        for tensor in self.tensors:
            found = self.key(f"notes.checksum.{tensor.name.decode(errors='replace')}")
            if found:
                found.value = xxhash.xxh3_128_hexdigest(_padded(tensor.data, ALIGN)).encode()
        head = self.key(HEAD)
        if head is not None and head.kind == STRING:
            head.value = ZEROS
            head.value = xxhash.xxh3_128_hexdigest(self.head()[0]).encode()
        return self.bytes()

    def bytes(self) -> bytes:
        """The bytes as they are, right or wrong."""
        return self.head()[0] + b"".join(_padded(tensor.data, self.align) for tensor in self.tensors) + self.tail

    def head(self) -> tuple[bytes, int]:
        """Everything before the tensors, and the place of the digits of its checksum."""
        out = bytearray(self.magic + struct.pack("<I", self.version & 0xFFFFFFFF))
        out += _u64(len(self.tensors) if self.n_tensors is None else self.n_tensors)
        out += _u64(len(self.keys) if self.n_keys is None else self.n_keys)
        at = 0
        for key in self.keys:
            out += _u64(len(key.name)) + key.name + struct.pack("<I", key.kind & 0xFFFFFFFF)
            if key.kind == STRING:
                out += _u64(len(key.value) if key.length is None else key.length)
            at = len(out) if key.name == HEAD.encode() else at
            out += key.value
        offset = 0
        for tensor in self.tensors:
            out += _u64(len(tensor.name)) + tensor.name + struct.pack("<I", len(tensor.dims))
            out += b"".join(map(_u64, tensor.dims)) + struct.pack("<I", tensor.kind & 0xFFFFFFFF)
            out += _u64(offset if tensor.offset is None else tensor.offset)
            offset += -(-len(tensor.data) // self.align) * self.align
        return _padded(bytes(out), ALIGN), at


def _u64(number: int) -> bytes:
    return struct.pack("<Q", number & 0xFFFFFFFFFFFFFFFF)


def _padded(data: bytes, align: int) -> bytes:
    return data + bytes(-len(data) % align)


def apart(data: bytes, *, segment: bool = True) -> Parts:
    """Parse a file, whatever its checksums. `segment`: raise UnreadableError where it violates docs/format.md."""
    try:
        return _apart(data, segment)
    except (struct.error, IndexError, MemoryError, OverflowError) as error:
        raise UnreadableError(str(error)) from error


def _apart(data: bytes, segment: bool) -> Parts:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        if size > len(data) - at:
            raise UnreadableError("short")
        at += size
        return data[at - size : at]

    def number(size: int) -> int:
        return int.from_bytes(take(size), "little")

    def value(kind: int) -> bytes:
        """A value as it is in the file, lengths included."""
        begin = at
        if kind == STRING:
            take(number(8))
        elif kind == ARRAY:
            element, count = number(4), number(8)
            for _ in range(count):
                value(element)
        else:
            take(struct.calcsize("<" + FORMATS[kind]))
        return data[begin:at]

    if take(4) != b"GGUF" or number(4) != 3:
        raise UnreadableError("magic")
    n_tensors, n_keys = number(8), number(8)
    if max(n_tensors, n_keys) > 1 << 14:
        raise UnreadableError("counts")
    parts, places = Parts(), []
    for _ in range(n_keys):
        name, kind = take(number(8)), number(4)
        if segment and kind not in (UINT, STRING, LONG):
            raise UnreadableError("type")
        parts.keys.append(Key(name, kind, value(kind)[8 if kind == STRING else 0 :]))
    for _ in range(n_tensors):
        name, n_dims = take(number(8)), number(4)
        if not 1 <= n_dims <= 4:
            raise UnreadableError("dimensions")
        places.append((name, [number(8) for _ in range(n_dims)], number(4), number(8)))
    start = at + -at % ALIGN
    ends = [*(offset for *_, offset in places[1:]), len(data) - start]
    expected = 0
    for (name, dims, kind, offset), end in zip(places, ends, strict=False):
        size = SIZES.get(kind, 0) * math.prod(dims) if segment else end - offset
        if segment and (offset != expected or size <= 0 or end - offset != size + -size % ALIGN):
            raise UnreadableError("type, or a gap")
        parts.tensors.append(Tensor(name, dims, kind, data[start + offset : start + offset + size]))
        expected = end
    if segment and start + expected != len(data):
        raise UnreadableError("end")
    return parts


def vouched(data: bytes) -> Parts:
    """The parts of a segment whose checksums vouch for all of its bytes. Raises Failed for another one."""
    parts = apart(data)
    for names in ([key.name for key in parts.keys], [tensor.name for tensor in parts.tensors]):
        check(len(names) == len(set(names)), "a name twice")
    head, at = parts.head()
    offset = len(head)
    head = data[:offset]  # as it is in the file
    digest = xxhash.xxh3_128_hexdigest(head[:at] + ZEROS + head[at + 32 :])
    check(digest.encode() == head[at : at + 32], "the head's checksum")
    for tensor in parts.tensors:
        end = offset + len(tensor.data) + -len(tensor.data) % ALIGN
        name = tensor.name.decode(errors="replace")
        check(parts.text(f"notes.checksum.{name}") == xxhash.xxh3_128_hexdigest(data[offset:end]), f"{name}: checksum")
        offset = end
    return parts
