"""Random changes of bytes, texts, and trees of values: JSON, and the parts of GGUF files."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from bench.faults.parts import LONG, STRING, UINT, Key, Parts, Tensor

WORDS = (
    *(b"\0", b"\xff", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff\xff\xff\xff\xff"),
    *(b"GGUF", b"\n", b"{", b"}", b"[", b'"', b"notes.", b"\xc3", b"\xed\xa0\x80", b"-1", b"1e999", b"\x1b[2J"),
)
MARKS = "\0\n\r\t\x1b\x85\u2028{}[]()<>\"'`|:;,.-_#&*!%@=~^$ é規😀\ud800\u202e"
SCALARS = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 1.5, 1e308, "", "x", [], {}, [0], {"a": 1})
NUMBERS = (
    *(0, 1, 2, 3, 7, 31, 32, 33, 64, 255, 256, 65535, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32),
    *(1 << 40, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
FLOATS = (0.0, -1.0, 0.3, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", "\0", "a" * 70000, "../../x", "\x1b[31m", "\x1b[2J\x1b]0;x\x07", "é" * 9, "null", "[]", "{}", "0", "-1"),
    *("1e999", "NaN", "[[[[", "[" * 2000, "llama", "bert", "\u2581", "<|im_start|>", "%s%n", "[0, 3]"),
    *("notes.tokens", "notes.context", "blk.0.k", "blk.0.v", "blk.1.k", "blk.00.k", "blk.99999.k"),
    *("blk.2.state.r", "blk.0.indexer.k", "blk.0.state.r", "notes.first", "notes.blocks", "blk.9999.attn_k.weight"),
)


def bytes_changed(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The data with 1 to 4 changes: bits, bytes, words; parts cut, doubled, moved, or taken from another file."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 4, 8, 32, 100, 1000)))
        word, other = rng.choice(WORDS), rng.choice(others)
        begin = rng.randrange(len(other) + 1)
        part = other[begin : begin + rng.choice((1, 4, 32, 200))]
        bit = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b""
        data = rng.choice(
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
    return data


def text_changed(rng: random.Random, text: str) -> str:
    """The text with 1 to 4 changes: characters, marks of all the little languages, parts cut, doubled and moved."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((1, 2, 5, 20)))
        mark = rng.choice(MARKS) * rng.choice((1, 1, 1, 2, 30))
        inserted, replaced, cut = text[:at] + mark + text[at:], text[:at] + mark + text[end:], text[:at] + text[end:]
        text = rng.choice((inserted, replaced, cut, text[:end] + text[at:], text[at:] + text[:at], text[:at]))
    return text


def list_changed(rng: random.Random, values: list[Any], inside: Any, others: Sequence[Any] = ()) -> list[Any]:
    """A list with a value left out, doubled, exchanged, put in from `others` or changed by `inside`, or reversed."""
    at, to = rng.randrange(len(values)), rng.randrange(len(values))
    value, rest = values[at], values[:at] + values[at + 1 :]
    more = copy.deepcopy(rng.choice(others)) if others else value
    changed = [*values[:at], inside(rng, value), *values[at + 1 :]]
    doubled, moved, added = [*values, value], [*rest[:to], value, *rest[to:]], [*values[:to], more, *values[to:]]
    return rng.choice((rest, doubled, moved, added, values[::-1], changed, changed, changed))


def json_changed(rng: random.Random, value: Any) -> Any:
    """A value of JSON with one difference: a part left out or doubled, of another type, out of its range."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        return list_changed(rng, value, json_changed)
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: one for name, one in value.items() if name != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(("more", "name", "value")): "x"}
        return {**value, key: json_changed(rng, value[key])}
    if isinstance(value, int) and rng.random() < 0.6:
        near = (value + step for step in (-1, 1, 2, 10, -10, 1000))
        return rng.choice((*near, value << 32, str(value), value * 1.0 if value < 1 << 62 else value))
    if isinstance(value, str) and rng.random() < 0.5:
        return text_changed(rng, value)
    return copy.deepcopy(rng.choice(SCALARS))  # callers change it in place


def leaves_changed(rng: random.Random, value: Any) -> Any:
    """A value of JSON in which a twentieth of all leaves are others."""
    if isinstance(value, list):
        return [leaves_changed(rng, one) for one in value]
    if isinstance(value, dict):
        return {key: leaves_changed(rng, one) for key, one in value.items()}
    return json_changed(rng, value) if rng.random() < 0.05 else value


def number_of(rng: random.Random, size: int) -> bytes:
    """A false number of so many bytes."""
    if size in (4, 8) and rng.random() < 0.1:
        return struct.pack({4: "<f", 8: "<d"}[size], rng.choice(FLOATS))
    number = rng.choice((rng.choice(NUMBERS), rng.choice(NUMBERS), rng.randrange(64), rng.getrandbits(64)))
    return (number & (1 << 8 * size) - 1).to_bytes(size, "little")


def parts_changed(rng: random.Random, parts: Parts, donor: Parts) -> None:
    """Change a key, a tensor, their order or number, or the header, in place. `donor`: a sound file."""
    way = rng.random()
    if way < 0.1:
        _changed_inside(rng, parts, ("magic", "version", "n_keys", "n_tensors", "align", "tail"))
        parts.align = min(parts.align, 128)
    elif parts.tensors and way < 0.5:
        parts.tensors = list_changed(rng, parts.tensors, _changed_inside, donor.tensors)
    elif parts.keys:
        parts.keys = list_changed(rng, parts.keys, _changed_inside, donor.keys)


def _changed_inside(rng: random.Random, value: Any, names: Sequence[str] = ()) -> Any:
    """Change a field of a key or tensor: another number, other bytes, another list."""
    value = copy.copy(value)
    name = rng.choice(names or [one.name for one in fields(value)])
    old = getattr(value, name)
    if isinstance(value, Key) and name == "kind" and value.kind == UINT and rng.random() < 0.5:
        value.value = value.value + bytes(4)  # a number as u64, which readers must take
        new: Any = LONG
    elif isinstance(old, list):
        new = list_changed(rng, old, lambda rng, one: _leaf(rng, one, value)) if old else [rng.choice(NUMBERS)]
    else:
        new = _leaf(rng, old, value)
    setattr(value, name, new)
    return value


def _leaf(rng: random.Random, old: bytes | int | None, owner: Any) -> bytes | int:
    if not isinstance(old, bytes):
        near = [max(0, (old or 0) + step) for step in (-1, 1)]
        return rng.choice((*near, rng.choice(NUMBERS), rng.choice((0, 1, 8, 9, 26, 64))))
    if isinstance(owner, Tensor) and len(old) > 64:  # numbers: negative and huge ids, infinities, noise; a length
        at, size = 4 * rng.randrange(len(old) // 4), len(old)
        one = (old[:at] + number_of(rng, 4) + old[at + 4 :])[:size]
        every = struct.pack("<f", rng.choice(FLOATS)) * (size // 4)
        return rng.choice((one, one, bytes_changed(rng, old, [old]), every, rng.randbytes(size), old[: size // 2]))
    if isinstance(owner, Key) and owner.kind != STRING and 0 < len(old) <= 8:
        return number_of(rng, len(old))
    with suppress(ValueError, RecursionError):
        if old[:1] in (b"[", b"{") and rng.random() < 0.7:
            return json.dumps(json_changed(rng, json.loads(old)), ensure_ascii=False).encode(errors="replace")
    text = rng.choice((rng.choice(TEXTS), text_changed(rng, old.decode(errors="replace"))))
    return rng.choice((text.encode(errors="replace"), bytes_changed(rng, old, [old])))
