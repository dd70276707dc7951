"""Hostile segment files: random bytes changed, and false values in valid form with valid checksums."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from bench.faults.frame import ACCEPTED, FOUND, REFUSED, SCRATCH, Budget, Row, Verdict, chance, tried
from bench.faults.mutate import bytes_changed, text_changed, twisted
from bench.faults.parts import HEAD, Key, Parts, Tensor, UnreadableError, apart, vouched
from notes_cli.engine.segment import FieldSpan, Identity, LayerRows, Segment
from notes_cli.errors import SegmentError
from notes_cli.library.container import open_segment, peek, write_segment

TITLE = (
    "Segment files of six shapes, mutated: bytes (flips, cuts, insertions, two files spliced), the structure (keys, "
    "types, lengths, counts, tensors, offsets, alignment, JSON in values) with all checksums computed again, and both "
    "on a corpus of mutants that reached new lines of notes_cli/library."
)
FAILS = (
    "an exception other than the one-line refusal, more than 6 GiB or 10 s, or a wrong accept: bytes changed without "
    "new checksums and still taken; or taken where a reader of the campaign's own finds other text, tokens, positions, "
    "fields, identity or rows than those handed out, checksums that do not vouch for them, or values that contradict "
    "each other."
)
CASES, SHARE = 120_000, 3
MEMORY = 6 << 30
POSITIONS = 1 << 31
LIBRARY = str(Path(sys.modules[open_segment.__module__].__file__ or "").parent)


def run(budget: Budget, seed: int) -> Row:
    folder = SCRATCH / "containers"
    folder.mkdir(parents=True, exist_ok=True)
    return tried(Containers(folder, seed), budget, patience=10, memory=MEMORY, say="containers")


class Containers:
    """Judges mutants of a few sound files."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.sound = [written(folder / f"sound-{number}.gguf", one) for number, one in enumerate(segments())]
        self.parts = [apart(data) for data in self.sound]
        self.corpus: list[bytes] = list(self.sound)
        self.seen: set[tuple[str, int, int]] = set()

    def __call__(self, number: int) -> Verdict:
        rng = chance(self.seed, number)
        way = number % 5
        if way < 2:
            data = bytes_changed(rng, rng.choice(self.sound), self.sound)
        elif way < 4:
            data = self._lie(rng, rng.choice(self.parts))
        else:
            data = self._grown(rng)
        path = self.folder / "mutant.gguf"
        path.write_bytes(data)
        verdict = judged(path, data, self.sound if way < 2 else None) if way < 4 else self._guided(path, data)
        if verdict.outcome in ("crash", "wrong"):
            (FOUND / f"container-{number}.gguf").write_bytes(data)
        return verdict

    def _lie(self, rng: random.Random, parts: Parts) -> bytes:
        parts = parts.copy()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(LIES)(rng, parts, self.parts)
        return parts.seal()

    def _grown(self, rng: random.Random) -> bytes:
        """A mutant of the corpus, its checksums right if it can be taken apart."""
        data = rng.choice(self.corpus)
        if rng.random() < 0.5:
            data = bytes_changed(rng, data, self.corpus)
        try:
            parts = apart(data)
        except UnreadableError:
            return data
        for _ in range(rng.randrange(3)):
            rng.choice(LIES)(rng, parts, self.parts)
        return parts.seal()

    def _guided(self, path: Path, data: bytes) -> Verdict:
        """Judge with coverage: files that reach new lines join the corpus."""
        new = len(self.seen)
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            verdict = judged(path, data, None)
        finally:
            sys.settrace(before)
        if len(self.seen) > new and len(self.corpus) < 2000:
            self.corpus.append(data)
        return verdict

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        last, name, seen = 0, frame.f_code.co_name, self.seen

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            seen.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line


def judged(path: Path, data: bytes, sound: list[bytes] | None) -> Verdict:
    """Judge a file by the reader. `sound`: the valid files; no other may be accepted."""
    try:
        segment = open_segment(path)
    except SegmentError as error:
        said = [str(error)]
        try:
            peek(path)
        except SegmentError as error:
            said.append(str(error))
        unclear = [one for one in said if not one.isprintable() or len(one) > 1000]
        return Verdict("wrong", f"not one clear line: {unclear[0]!r}") if unclear else REFUSED
    if sound is not None and data not in sound:
        return Verdict("wrong", "bytes were changed, and it was taken")
    try:
        why = vouched(data) or contradicted(segment, apart(data))
    except UnreadableError as error:
        why = f"taken where docs/format.md has it refused: {error}"
    if not why:
        try:
            info = peek(path)
            why = "" if (info.text, info.base, info.fields) == (segment.text, segment.base, segment.fields) else "peek"
        except SegmentError as error:
            why = f"ls refuses what ask takes: {error}"
    return Verdict("wrong", why) if why else ACCEPTED


def contradicted(segment: Segment, parts: Parts) -> str:
    """Return contradictions between a segment and its file, or within it."""
    n, base = len(segment), segment.base
    texts = {key: parts.text(f"notes.{key}") for key in ("name", "description", "text")}
    if any(getattr(segment, key) != value for key, value in texts.items()):
        return "other texts than in the file"
    if base != parts.number("notes.base") or base < 0 or base + n >= POSITIONS:
        return f"base {base}"
    for name, ids in (("notes.tokens", segment.tokens), ("notes.context", segment.context)):
        found = parts.tensor(name)
        if ids.tobytes() != (found.data if found else b"") or (ids < 0).any():
            return f"{name} is not that of the file"
    if not n:
        return "no tokens"
    if segment.identity.as_dict() != {key: parts.text(f"notes.identity.{key}") for key in segment.identity.as_dict()}:
        return "another identity"
    spans = json.loads(parts.text("notes.fields"))
    if [(span.name, span.value, span.start, span.end, span.first, span.last) for span in segment.fields] != [
        tuple(span[key] for key in ("name", "value", "start", "end", "first", "last")) for span in spans
    ]:
        return "other fields"
    for span in segment.fields:
        if segment.text[span.start : span.end] != span.value or not 0 <= span.first < span.last <= n or not span.name:
            return f"field {span}"
    if segment.prefix_only != (parts.key("notes.first") is not None) or (
        segment.prefix_only and len(segment.context) != base
    ):
        return "whole"
    if segment.blocks:
        if segment.blocks[0] != 0 or sorted(set(segment.blocks)) != list(segment.blocks) or segment.blocks[-1] >= n:
            return f"blocks {segment.blocks}"
        if list(segment.blocks) != json.loads(parts.text("notes.blocks")):
            return "other blocks"
    if len(segment.moves) != len(segment.blocks) or any(count < 0 for count in segment.moves):
        return f"moves {segment.moves}"
    if any(len(row) != n for row in segment.influence.values()):
        return "influence"
    return _rows_contradict(segment, parts, base + n if segment.prefix_only else n)


def _rows_contradict(segment: Segment, parts: Parts, count: int) -> str:
    names = {"attention": ("k", "v"), "indexer": ("indexer.k", "indexer.v"), "state": ("state.r", "state.s")}
    used = {"notes.tokens", "notes.context", "notes.influence"}
    for rows in segment.layers:
        for part, values in zip(names[rows.part], (rows.k, rows.v), strict=True):
            name = f"blk.{rows.layer}.{part}"
            used.add(name)
            found = parts.tensor(name)
            if values.tobytes() != (found.data if found else b""):
                return f"{name} is not that of the file"
            if found and (
                list(values.shape) != found.dims[::-1] or len(values) != (1 if rows.part == "state" else count)
            ):
                return f"{name} has the shape {values.shape}"
    left = {tensor.name.decode() for tensor in parts.tensors} - used
    return f"{min(left)} was passed over" if left else ""


# ---- sound files


def segments() -> list[Segment]:
    """Small ones of every shape that files have."""
    random = np.random.default_rng(7)
    identity = Identity("tiny", "qwen2", "Q8_0", "ab" * 32, "c0ffee", "neox base 10000", "f16/f16", "")
    text = "date: 2026-06-01\ntier: gold\n\nReturns are accepted. 規則 é"

    def rows(n: int, dtype: str = "f2", layers: int = 2, v: int = 3) -> tuple[LayerRows, ...]:
        return tuple(
            LayerRows(i, random.normal(size=(n, 4)).astype(dtype), random.normal(size=(n, v)).astype(dtype))
            for i in range(layers)
        )

    def tokens(n: int) -> Any:
        return np.arange(n, dtype=np.int32) + 5

    fields = (FieldSpan("date", "2026-06-01", 6, 16, 1, 4), FieldSpan("tier", "gold", 23, 27, 5, 6))
    plain = Segment("returns", "A policy.", text, tokens(9), 2, tokens(2), fields, identity, rows(9))
    state = LayerRows(2, np.ones((1, 5), "f4"), np.ones((1, 6), "f4"), "state")
    indexer = LayerRows(0, np.ones((9, 2), "f2"), np.empty((9, 0), "f2"), "indexer")
    influence = {"date": np.linspace(0, 1, 9, dtype="f4"), "tier": np.zeros(9, "f4")}
    first, *rest = rows(9, v=0)
    return [
        plain,
        replace(plain, layers=rows(9, "f4"), identity=replace(identity, kv_type="f32/f32"), influence=influence),
        replace(plain, blocks=(0, 4, 7), moves=(0, 2, 0)),
        replace(plain, prefix_only=True, layers=(*rows(11), state)),
        replace(plain, layers=(first, indexer, *rest)),
        Segment("rows", "", "", tokens(3), 40, tokens(0), (), identity, rows(3, layers=1)),
    ]


def written(path: Path, segment: Segment) -> bytes:
    write_segment(path, segment, writer="notes 0", created="2026-06-01T12:00:00Z")
    return path.read_bytes()


# ---- lies in the right form. Each changes the parts in place; `others` are those of all sound files.

Lie = Callable[[random.Random, Parts, list[Parts]], None]
LENGTHS = (
    0,
    1,
    2,
    31,
    32,
    33,
    255,
    1 << 16,
    1 << 20,
    1 << 31,
    1 << 32,
    (1 << 62) - 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
TEXTS = (
    "",
    "\0",
    "a" * 70000,
    "../../x",
    "\x1b[31m",
    "é" * 9,
    "null",
    "[]",
    "{}",
    "0",
    "-1",
    "1e999",
    "NaN",
    "[[[[",
    "[" * 2000,
)
NAMES = (
    *("notes.tokens", "notes.context", "notes.influence", "blk.0.k", "blk.0.v", "blk.1.k", "blk.00.k", "blk.99999.k"),
    *("blk.2.state.r", "blk.2.state.s", "blk.0.indexer.k", "blk.0.indexer.v", "blk.0.state.r", "blk.100000.k", "other"),
)
JSON_KEYS = ("notes.fields", "notes.blocks", "notes.moves")


def _key_value(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    key = rng.choice(parts.keys)
    if key.kind == 8:
        text = key.value.decode(errors="replace")
        key.value = rng.choice((rng.choice(TEXTS), text_changed(rng, text))).encode(errors="replace")
    else:
        key.value = _number(rng).to_bytes(8, "little")[: 4 if key.kind == 4 else 8]


def _number(rng: random.Random) -> int:
    return rng.choice((rng.choice(LENGTHS), rng.randrange(64), rng.getrandbits(32), rng.getrandbits(64)))


def _key_bytes(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    key = rng.choice(parts.keys)
    key.value = bytes_changed(rng, key.value, [key.value])


def _key_type(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    key = rng.choice(parts.keys)
    key.kind = rng.choice((4, 8, 10, rng.randrange(14), rng.getrandbits(32)))
    if key.kind in (4, 10) and rng.random() < 0.8:
        key.value = _number(rng).to_bytes(8, "little")[: 4 if key.kind == 4 else 8]


def _key_wider(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    """A number as u64, which readers must take."""
    numbers = [key for key in parts.keys if key.kind == 4]
    if numbers:
        key = rng.choice(numbers)
        value = int.from_bytes(key.value, "little") + rng.choice((0, 0, 1 << 32, 1 << 31, 1 << 63))
        key.kind, key.value = 10, (value % (1 << 64)).to_bytes(8, "little")


def _key_length(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    rng.choice(parts.keys).length = _number(rng)


def _key_gone(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    del parts.keys[rng.randrange(len(parts.keys))]


def _key_twice(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    key = rng.choice(parts.keys)
    value = rng.choice((key.value, rng.choice(parts.keys).value))
    parts.keys.insert(rng.randrange(len(parts.keys) + 1), Key(key.name, key.kind, value))


def _key_of_another(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    key = rng.choice(rng.choice(others).keys)
    mine = parts.key(key.name.decode())
    if mine and key.name != HEAD.encode():
        mine.kind, mine.value = key.kind, key.value
    elif mine is None:
        parts.keys.append(Key(key.name, key.kind, key.value))


def _key_name(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    key = rng.choice(parts.keys)
    key.name = rng.choice((bytes_changed(rng, key.name, [key.name]), b"", rng.choice(parts.keys).name, b"\xff\xfe"))


def _key_order(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    rng.shuffle(parts.keys)


def _json(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    """Return well-formed JSON with other content."""
    name = rng.choice(JSON_KEYS)
    found = parts.key(name)
    if found is None:
        value: Any = rng.choice(([], [0], [0, 3], [0, 0], [1], [0, 10**9], 0, None, {}, "x"))
        parts.keys.append(Key(name.encode(), 8, json.dumps(value).encode()))
        return
    try:
        value = json.loads(found.value)
    except (ValueError, RecursionError):
        return
    found.kind = 8
    found.value = json.dumps(twisted(rng, value), ensure_ascii=False).encode(errors="replace")


def _counts(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    number = rng.choice((_number(rng), len(parts.keys) + rng.choice((-1, 1))))
    if rng.random() < 0.5:
        parts.n_keys = max(0, number)
    else:
        parts.n_tensors = max(0, number)


def _tensor_dims(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    if not parts.tensors:
        return
    tensor = rng.choice(parts.tensors)
    way = rng.randrange(6)
    if way == 0:
        tensor.dims[rng.randrange(len(tensor.dims))] = _number(rng)
    elif way == 1:
        tensor.dims = [*tensor.dims, rng.choice((1, 1, 2, 1 << 32))]
    elif way == 2:
        tensor.dims = tensor.dims[::-1]
    elif way == 3:
        size = 1
        for dim in tensor.dims:
            size *= dim
        tensor.dims = [size]
    elif way == 4:
        tensor.dims = [1 << 32, 1 << 32, *tensor.dims][: rng.choice((2, 3, 4))]
    else:
        tensor.dims = [] if rng.random() < 0.3 else [0, *tensor.dims]


def _tensor_type(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    if parts.tensors:
        tensor = rng.choice(parts.tensors)
        tensor.kind = rng.choice((0, 1, 26, 26, 8, 24, 27, 30, _number(rng)))
        if tensor.kind in (0, 26, 1) and rng.random() < 0.5 and tensor.dims:
            scale = {0: 4, 26: 4, 1: 2}[tensor.kind]
            size = scale
            for dim in tensor.dims:
                size *= dim
            tensor.data = (tensor.data * 2)[:size] if 0 < size <= 2 * len(tensor.data) else tensor.data


def _tensor_offset(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    if parts.tensors:
        rng.choice(parts.tensors).offset = rng.choice((_number(rng), 32 * rng.randrange(99), -32 & (1 << 64) - 1))


def _tensor_name(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    """A tensor under another name, with its checksum."""
    if not parts.tensors:
        return
    tensor = rng.choice(parts.tensors)
    old, new = tensor.name, rng.choice((rng.choice(NAMES).encode(), bytes_changed(rng, tensor.name, [tensor.name])))
    for key in parts.keys:
        if key.name == b"notes.checksum." + old:
            key.name = b"notes.checksum." + new
    tensor.name = new


def _tensor_gone(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    if parts.tensors:
        del parts.tensors[rng.randrange(len(parts.tensors))]


def _tensor_new(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    donor = rng.choice(rng.choice(others).tensors)
    name = rng.choice((donor.name, rng.choice(NAMES).encode()))
    parts.tensors.insert(
        rng.randrange(len(parts.tensors) + 1), Tensor(name, list(donor.dims), donor.kind, bytes(donor.data))
    )
    if rng.random() < 0.9 and parts.key(f"notes.checksum.{name.decode()}") is None:
        parts.keys.append(Key(b"notes.checksum." + name, 8, b""))


def _tensor_order(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    rng.shuffle(parts.tensors)


def _tensor_data(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    """Other numbers: negative and huge ids, infinities, another length."""
    if not parts.tensors:
        return
    tensor = rng.choice(parts.tensors)
    if rng.random() < 0.3:
        tensor.data = bytes_changed(rng, tensor.data, [tensor.data])
    else:
        at = 4 * rng.randrange(max(1, len(tensor.data) // 4))
        word = rng.choice((b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\0\0\x80\x7f", rng.randbytes(4)))
        tensor.data = (tensor.data[:at] + word + tensor.data[at + 4 :])[: len(tensor.data)]


def _alignment(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    if rng.random() < 0.5:
        parts.align = rng.choice((1, 2, 8, 16, 64, 128))
    else:
        parts.keys.append(Key(b"general.alignment", 4, rng.choice((1, 8, 64, 0)).to_bytes(4, "little")))


def _tail(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    parts.tail = rng.choice((b"\0" * 32, b"\0", rng.randbytes(rng.randrange(1, 99))))


def _first_words(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    if rng.random() < 0.5:
        parts.version = rng.choice((0, 1, 2, 4, 3 << 24, _number(rng)))
    else:
        parts.magic = rng.choice((b"GGUX", b"FUGG", b"\0\0\0\0", b"GGML"))


def _whole(rng: random.Random, parts: Parts, others: list[Parts]) -> None:
    """Include or omit the K/V of the left context, regardless of the rest of the file."""
    found = parts.key("notes.first")
    if found:
        parts.keys.remove(found)
    else:
        parts.keys.append(Key(b"notes.first", 4, rng.choice((0, 0, 0, 1)).to_bytes(4, "little")))


LIES: tuple[Lie, ...] = (
    *(_key_value, _key_value, _key_bytes, _key_type, _key_wider, _key_length, _key_gone, _key_twice, _key_of_another),
    *(_key_name, _key_order, _json, _json, _json, _counts, _tensor_dims, _tensor_dims, _tensor_type, _tensor_offset),
    *(_tensor_name, _tensor_gone, _tensor_new, _tensor_order, _tensor_data, _tensor_data, _alignment, _tail),
    *(_first_words, _whole),
)
