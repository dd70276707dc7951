"""Changes of bytes and texts by chance, for all kinds of hostile files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

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
    way = rng.randrange(9)
    if way == 0 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if way == 1 and data:
        at = min(at, len(data) - 1)
        return data[:at] + rng.randbytes(1) + data[at + 1 :]
    if way == 2:
        word = rng.choice(WORDS)
        return data[:at] + word + data[at + len(word) :]
    if way == 3:
        return data[:at] + rng.choice(WORDS) + data[at:]
    if way == 4:
        return data[:at] + data[end:]
    if way == 5:
        return data[:end] + data[at:]
    if way == 6:
        return data[:at]
    if way == 7:
        other = rng.choice(others)
        return data[:at] + other[rng.randrange(len(other) + 1) :]
    other = rng.choice(others)
    begin = rng.randrange(len(other) + 1)
    part = other[begin : begin + rng.choice((1, 4, 32, 200))]
    return data[:at] + part + data[at + len(part) :]


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


def twisted(rng: random.Random, value: Any) -> Any:
    """A value of JSON in which one thing is otherwise: left out, doubled, of another type, out of its range."""
    scalars = (None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 1.5, 1e308, "", "x", [], {}, [0], {"a": 1})
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        way = rng.randrange(5)
        if way == 0:
            return value[:at] + value[at + 1 :]
        if way == 1:
            return [*value, value[at]]
        if way == 2:
            return value[::-1]
        return [*value[:at], twisted(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: one for name, one in value.items() if name != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(("more", "name", "value")): "x"}
        return {**value, key: twisted(rng, value[key])}
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 2, 10, -10, 1000))
    return rng.choice(scalars)
