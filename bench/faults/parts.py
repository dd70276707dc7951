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
SIZES = {0: 4, 1: 2, 26: 4}  # bytes of an element: f32, f16, i32
UINT, STRING, LONG = 4, 8, 10
WIDTHS = {UINT: 4, LONG: 8}  # bytes of a number
CHECKSUM = b"notes.checksum."
HEAD = CHECKSUM + b"head"
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

    def bytes(self) -> bytes:
        length = _u64(len(self.value) if self.length is None else self.length) if self.kind == STRING else b""
        return _string(self.name) + _u32(self.kind) + length + self.value


@dataclass
class Tensor:
    """A tensor's place and bytes. `offset`: a false one."""

    name: bytes
    dims: list[int]  # the fastest first
    kind: int
    data: bytes
    offset: int | None = None

    def bytes(self, offset: int) -> bytes:
        place = _u64(offset if self.offset is None else self.offset)
        return _string(self.name) + _u32(len(self.dims)) + b"".join(map(_u64, self.dims)) + _u32(self.kind) + place


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
        if found := self.key(name):
            found.value, found.kind = value, STRING

    def tensor(self, name: str) -> bytes:
        """The bytes of a tensor; none where there is no such tensor."""
        return next((tensor.data for tensor in self.tensors if tensor.name == name.encode()), b"")

    def seal(self) -> bytes:
        """The bytes of a segment, with checksums that are right for them: of each tensor that there is."""
        sums = {CHECKSUM + one.name: xxhash.xxh3_128_hexdigest(_padded(one.data, ALIGN)) for one in self.tensors}
        for name, digest in sums.items():
            found = next((key for key in self.keys if key.name == name), None)
            if found is None:
                self.keys.append(Key(name, STRING, digest.encode()))
            else:
                found.value = digest.encode()
        self.keys = [key for key in self.keys if key.name[:15] != CHECKSUM or key.name in (HEAD, *sums)]
        if head := self.key(HEAD.decode()):
            head.value = ZEROS
            head.value = xxhash.xxh3_128_hexdigest(self.head()).encode()
        return self.bytes()

    def head(self) -> bytes:
        """Everything before the tensors."""
        out = self.magic + _u32(self.version)
        out += _u64(len(self.tensors) if self.n_tensors is None else self.n_tensors)
        out += _u64(len(self.keys) if self.n_keys is None else self.n_keys)
        out += b"".join(key.bytes() for key in self.keys)
        offset = 0
        for tensor in self.tensors:
            out += tensor.bytes(offset)
            offset += len(_padded(tensor.data, self.align))
        return _padded(out, ALIGN)

    def bytes(self) -> bytes:
        """The bytes as they are, right or wrong."""
        return self.head() + b"".join(_padded(tensor.data, self.align) for tensor in self.tensors) + self.tail


def _u32(number: int) -> bytes:
    return struct.pack("<I", number & 0xFFFFFFFF)


def _u64(number: int) -> bytes:
    return struct.pack("<Q", number & 0xFFFFFFFFFFFFFFFF)


def _string(data: bytes) -> bytes:
    return _u64(len(data)) + data


def _padded(data: bytes, align: int) -> bytes:
    return data + bytes(-len(data) % max(1, align))


def apart(data: bytes) -> Parts:
    """Parse a segment, whatever its checksums. Raises UnreadableError where it violates docs/format.md."""
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
        if kind != STRING and kind not in WIDTHS:
            raise UnreadableError("type")
        return take(WIDTHS.get(kind) or number(8))

    if take(4) != b"GGUF" or number(4) != 3:
        raise UnreadableError("magic")
    n_tensors, n_keys = number(8), number(8)
    if max(n_tensors, n_keys) > 1 << 14:
        raise UnreadableError("counts")
    parts, places = Parts(), []
    for _ in range(n_keys):
        name, kind = take(number(8)), number(4)
        parts.keys.append(Key(name, kind, value(kind)))
    for _ in range(n_tensors):
        name, n_dims = take(number(8)), number(4)
        if not 1 <= n_dims <= 4:
            raise UnreadableError("dimensions")
        places.append((name, [number(8) for _ in range(n_dims)], number(4), number(8)))
    start = at + -at % ALIGN
    ends = [*(offset for *_, offset in places[1:]), len(data) - start]
    expected = 0
    for (name, dims, kind, offset), end in zip(places, ends, strict=False):
        size = SIZES.get(kind, 0) * math.prod(dims)
        if offset != expected or size <= 0 or end - offset != size + -size % ALIGN:
            raise UnreadableError("type, or a gap")
        parts.tensors.append(Tensor(name, dims, kind, data[start + offset : start + offset + size]))
        expected = end
    if start + expected != len(data):
        raise UnreadableError("end")
    return parts


def vouched(data: bytes) -> Parts:
    """The parts of a segment whose checksums vouch for all of its bytes. Raises Failed for another one."""
    parts = apart(data)
    for names in ([key.name for key in parts.keys], [tensor.name for tensor in parts.tensors]):
        check(len(names) == len(set(names)), "a name twice")
    offset = len(parts.head())
    digest = parts.text(HEAD.decode()).encode()
    head = data[:offset]  # as it is in the file
    at = head.find(Key(HEAD, STRING, digest).bytes()) + len(Key(HEAD, STRING, digest).bytes()) - 32
    check(xxhash.xxh3_128_hexdigest(head[:at] + ZEROS + head[at + 32 :]).encode() == digest, "the head's checksum")
    for tensor in parts.tensors:
        end = offset + len(_padded(tensor.data, ALIGN))
        name = tensor.name.decode(errors="replace")
        check(parts.text(f"notes.checksum.{name}") == xxhash.xxh3_128_hexdigest(data[offset:end]), f"{name}: checksum")
        offset = end
    return parts
