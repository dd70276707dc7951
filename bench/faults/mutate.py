"""Random changes of bytes, texts, JSON and GGUF files."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from bench.faults.parts import ARRAY, FORMATS, HEAD, LONG, STRING, UINT, Key, Parts, Tensor

WORDS = (
    *(b"\0", b"\xff", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff\xff\xff\xff\xff"),
    *(b"GGUF", b"\n", b"{", b"}", b"[", b'"', b"notes.", b"\xc3", b"\xed\xa0\x80", b"-1", b"1e999", b"\x1b[2J"),
)


def bytes_changed(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The data with 1 to 4 changes: bits, bytes, words; parts cut, doubled, moved, or taken from another file."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = _changed_once(rng, data, others)
    return data


def _changed_once(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 4, 8, 32, 100, 1000)))
    word, other = rng.choice(WORDS), rng.choice(others)
    begin = rng.randrange(len(other) + 1)
    part = other[begin : begin + rng.choice((1, 4, 32, 200))]
    bit = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b""
    return rng.choice(
        (
            data[:at] + bit + data[at + 1 :],
            data[:at] + rng.randbytes(1) + data[at + 1 :],
            data[:at] + word + data[at + len(word) :],
            data[:at] + word + data[at:],
            data[:at] + data[end:],
            data[:end] + data[at:],
            data[:at],
            data[:at] + other[begin:],
            data[:at] + part + data[at + len(part) :],
        )
    )


MARKS = "\0\n\r\t\x1b\x85\u2028{}[]()<>\"'`|:;,.-_#&*!%@=~^$ é規😀\ud800\u202e"


def text_changed(rng: random.Random, text: str) -> str:
    """The text with 1 to 4 changes: characters, marks of all the little languages, parts cut, doubled and moved."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((1, 2, 5, 20)))
        mark = rng.choice(MARKS) * rng.choice((1, 1, 1, 2, 30))
        text = rng.choice(
            (
                text[:at] + mark + text[at:],
                text[:at] + mark + text[end:],
                text[:at] + text[end:],
                text[:end] + text[at:],
                text[at:] + text[:at],
                text[:at],
            )
        )
    return text


SCALARS = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 1.5, 1e308, "", "x", [], {}, [0], {"a": 1})


def json_changed(rng: random.Random, value: Any) -> Any:
    """A value of JSON with one difference: a part left out or doubled, of another type, out of its range."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        inside = [*value[:at], json_changed(rng, value[at]), *value[at + 1 :]]
        return rng.choice((value[:at] + value[at + 1 :], [*value, value[at]], value[::-1], inside, inside))
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: one for name, one in value.items() if name != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(("more", "name", "value")): "x"}
        return {**value, key: json_changed(rng, value[key])}
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 2, 10, -10, 1000))
    return copy.deepcopy(rng.choice(SCALARS))  # callers change it in place


# ---- GGUF files. Each changes the parts in place; `donor` is a sound file.

Change = Callable[[random.Random, Parts, Parts], None]
NUMBERS = (
    *(0, 1, 2, 3, 7, 31, 32, 33, 64, 255, 256, 65535, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32),
    *(1 << 40, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
FLOATS = (0.0, -1.0, 0.3, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *(
        "",
        "\0",
        "a" * 70000,
        "../../x",
        "\x1b[31m",
        "\x1b[2J\x1b]0;x\x07",
        "é" * 9,
        "null",
        "[]",
        "{}",
        "0",
        "-1",
        "1e999",
    ),
    *("NaN", "[[[[", "[" * 2000, "llama", "bert", "\u2581", "<|im_start|>", "%s%n"),
)
NAMES = (
    *("notes.tokens", "notes.context", "notes.influence", "blk.0.k", "blk.0.v", "blk.1.k", "blk.00.k", "blk.99999.k"),
    *("blk.2.state.r", "blk.2.state.s", "blk.0.indexer.k", "blk.0.indexer.v", "blk.0.state.r", "blk.100000.k", "other"),
    "blk.9999.attn_k.weight",
)


def number_of(rng: random.Random, kind: int) -> bytes:
    """A false number of this type."""
    form = "<" + FORMATS[kind]
    if form[1] in "fd":
        return struct.pack(form, rng.choice(FLOATS))
    size = struct.calcsize(form)
    number = rng.choice((rng.choice(NUMBERS), rng.choice(NUMBERS), rng.randrange(64), rng.getrandbits(64)))
    return (number & (1 << 8 * size) - 1).to_bytes(size, "little")


def _count(rng: random.Random, right: int) -> int:
    return rng.choice((rng.choice(NUMBERS), max(0, right + rng.choice((-1, 1)))))


def _value(rng: random.Random, parts: Parts, donor: Parts) -> None:
    key = rng.choice(parts.keys)
    if key.kind == STRING:
        text = rng.choice((rng.choice(TEXTS), text_changed(rng, key.value.decode(errors="replace"))))
        key.value = text.encode(errors="replace")
    elif key.kind in FORMATS:
        key.value = number_of(rng, key.kind)
    elif len(key.value) >= 12:
        element, count = struct.unpack_from("<IQ", key.value)
        way = rng.randrange(3)
        if way == 2 and count and element in FORMATS:
            size, at = struct.calcsize("<" + FORMATS[element]), rng.randrange(count)
            key.value = key.value[: 12 + at * size] + number_of(rng, element) + key.value[12 + (at + 1) * size :]
        else:
            element = rng.choice((*FORMATS, STRING, ARRAY, 99)) if way else element
            key.value = struct.pack("<IQ", element, count if way else _count(rng, count)) + key.value[12:]


def _value_bytes(rng: random.Random, parts: Parts, donor: Parts) -> None:
    key = rng.choice(parts.keys)
    key.value = bytes_changed(rng, key.value, [key.value])


def _type(rng: random.Random, parts: Parts, donor: Parts) -> None:
    key = rng.choice(parts.keys)
    key.kind = rng.choice((*FORMATS, STRING, ARRAY, 13, 200, rng.getrandbits(32)))
    if rng.random() < 0.8 and key.kind in FORMATS:
        key.value = number_of(rng, key.kind)


def _wider(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """A number as u64, which readers must take."""
    if numbers := [key for key in parts.keys if key.kind == UINT]:
        key = rng.choice(numbers)
        value = int.from_bytes(key.value, "little") + rng.choice((0, 0, 1 << 32, 1 << 31, 1 << 63))
        key.kind, key.value = LONG, (value % (1 << 64)).to_bytes(8, "little")


def _length(rng: random.Random, parts: Parts, donor: Parts) -> None:
    key = rng.choice(parts.keys)
    key.length = _count(rng, len(key.value))


def _keys(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """A key is missing, twice there, or has another name; or all are in another order."""
    at = rng.randrange(len(parts.keys))
    key, other = parts.keys[at], rng.choice(parts.keys)
    way = rng.randrange(4)
    if way == 0:
        del parts.keys[at]
    elif way == 1:
        twice = Key(key.name, key.kind, rng.choice((key.value, other.value)))
        parts.keys.insert(rng.randrange(len(parts.keys) + 1), twice)
    elif way == 2:
        key.name = rng.choice((bytes_changed(rng, key.name, [key.name]), b"", other.name, b"\xff\xfe"))
    else:
        rng.shuffle(parts.keys)


def _donated(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """A key or a tensor of another file."""
    if rng.random() < 0.5:
        key = rng.choice(donor.keys)
        parts.keys = [one for one in parts.keys if one.name != key.name or one.name == HEAD.encode()]
        if key.name != HEAD.encode():
            parts.keys.append(Key(key.name, key.kind, key.value))
        return
    tensor = rng.choice(donor.tensors)
    name = rng.choice((tensor.name, rng.choice(NAMES).encode()))
    place = rng.randrange(len(parts.tensors) + 1)
    parts.tensors.insert(place, Tensor(name, list(tensor.dims), tensor.kind, tensor.data))
    if rng.random() < 0.9 and parts.key(f"notes.checksum.{name.decode()}") is None:
        parts.keys.append(Key(b"notes.checksum." + name, STRING, b""))


def _header(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """False counts, version, magic or alignment, or bytes after the end."""
    way = rng.randrange(7)
    if way == 0:
        parts.n_keys = _count(rng, len(parts.keys))
    elif way == 1:
        parts.n_tensors = _count(rng, len(parts.tensors))
    elif way == 2:
        parts.version = rng.choice((0, 1, 2, 4, 3 << 24, rng.choice(NUMBERS)))
    elif way == 3:
        parts.magic = rng.choice((b"GGUX", b"FUGG", b"\0\0\0\0", b"GGML"))
    elif way == 4:
        parts.keys.append(Key(b"general.alignment", UINT, number_of(rng, UINT)))
    elif way == 5:
        parts.align = rng.choice((1, 2, 8, 16, 64, 128))
    else:
        parts.tail = rng.choice((b"\0" * 32, b"\0", rng.randbytes(rng.randrange(1, 99))))


def _shape(rng: random.Random, parts: Parts, donor: Parts) -> None:
    if not parts.tensors:
        return
    tensor = rng.choice(parts.tensors)
    dims = tensor.dims
    if rng.random() < 0.2:
        tensor.offset = rng.choice((rng.choice(NUMBERS), 32 * rng.randrange(99), -32 & (1 << 64) - 1))
        return
    if dims and rng.random() < 0.3:
        dims[rng.randrange(len(dims))] = rng.choice(NUMBERS)
        return
    flat = 1
    for dim in dims:
        flat *= dim
    huge = [1 << 32, 1 << 32, *dims][: rng.choice((2, 3, 4))]
    tensor.dims = rng.choice(([*dims, rng.choice((1, 1, 2, 1 << 32))], dims[::-1], dims[1:], [flat], huge, [0, *dims]))


def _element(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """Another type, sometimes with as many bytes as it needs."""
    if parts.tensors:
        tensor = rng.choice(parts.tensors)
        old = {0: 4, 26: 4, 1: 2}.get(tensor.kind, 0)
        tensor.kind = rng.choice((0, 1, 26, 26, *range(42), 99, rng.choice(NUMBERS)))
        new = {0: 4, 26: 4, 1: 2}.get(tensor.kind, 0)
        if old and new and rng.random() < 0.5:
            tensor.data = (tensor.data * 2)[: len(tensor.data) * new // old]


def _tensors(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """A tensor is missing or has another name, with its checksum; or all are in another order."""
    if not parts.tensors:
        return
    tensor, way = rng.choice(parts.tensors), rng.randrange(3)
    if way == 0:
        parts.tensors.remove(tensor)
    elif way == 1:
        rng.shuffle(parts.tensors)
    else:
        changed = bytes_changed(rng, tensor.name, [tensor.name])
        new = rng.choice((rng.choice(NAMES).encode(), changed, rng.choice(parts.tensors).name))
        for key in parts.keys:
            if key.name == b"notes.checksum." + tensor.name:
                key.name = b"notes.checksum." + new
        tensor.name = new


def _data(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """Other numbers: negative and huge ids, infinities, noise; another length."""
    if not parts.tensors:
        return
    tensor = rng.choice(parts.tensors)
    size, at = len(tensor.data), 4 * rng.randrange(max(1, len(tensor.data) // 4))
    word = rng.choice((b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\0\0\x80\x7f", rng.randbytes(4)))
    one = (tensor.data[:at] + word + tensor.data[at + 4 :])[:size]
    every = struct.pack("<f", rng.choice(FLOATS)) * (size // 4)
    cut = tensor.data[: rng.randrange(size + 1)]
    changed = bytes_changed(rng, tensor.data, [tensor.data])
    tensor.data = rng.choice((one, one, changed, every, rng.randbytes(size), cut))


def _json(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """Well-formed JSON with other content, in a segment."""
    name = rng.choice(("notes.fields", "notes.blocks", "notes.moves"))
    found = parts.key(name)
    if found is None:
        value: Any = rng.choice(([], [0], [0, 3], [0, 0], [1], [0, 10**9], 0, None, {}, "x"))
        parts.keys.append(Key(name.encode(), STRING, json.dumps(value).encode()))
        return
    with suppress(ValueError, RecursionError):
        value = json_changed(rng, json.loads(found.value))
        found.kind, found.value = STRING, json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _prefix_only(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """A segment that includes or omits the K/V of its left context, regardless of the rest of the file."""
    if found := parts.key("notes.first"):
        parts.keys.remove(found)
    else:
        parts.keys.append(Key(b"notes.first", UINT, rng.choice((0, 0, 0, 1)).to_bytes(4, "little")))


GGUF: tuple[Change, ...] = (
    *(_value, _value, _value, _value_bytes, _type, _length, _keys, _keys, _header, _shape, _shape, _element, _tensors),
    *(_data, _data, _donated, _donated),
)
SEGMENT: tuple[Change, ...] = (*GGUF, _wider, _json, _json, _json, _prefix_only)
