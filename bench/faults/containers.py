"""Hostile segment files: random bytes changed, and false values in valid form with valid checksums."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.faults.frame import ACCEPTED, Mutants, check, refused
from bench.faults.mutate import bytes_changed, parts_changed
from bench.faults.parts import Parts, apart, vouched
from notes_cli.engine.segment import FieldSpan, Identity, LayerRows, Segment, concatenate_rows
from notes_cli.errors import SegmentError
from notes_cli.library.container import open_segment, peek, write_segment

POSITIONS = 1 << 31


class Containers(Mutants):
    """Mutants of a few sound files, of their bytes and of their parts."""

    cases, share, patience, memory, suffix = 120_000, 3, 10, 6 << 30, ".gguf"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.path = self.folder() / "mutant.gguf"
        self.sound = [written(self.path, segment) for segment in segments()]
        self.parts = [apart(data) for data in self.sound]

    def mutant(self, rng: random.Random, number: int) -> bytes:
        if number % 5 < 2:
            return bytes_changed(rng, rng.choice(self.sound), self.sound)
        return sealed(rng, rng.choice(self.parts).copy(), self.parts, rng.choice((1, 1, 1, 2, 3)))

    def examine(self, rng: random.Random, number: int, data: bytes) -> str:
        self.path.write_bytes(data)
        return examined(self.path, data, self.sound if number % 5 < 2 else None)


def sealed(rng: random.Random, parts: Parts, sound: list[Parts], changes: int) -> bytes:
    """A segment file with so many changes, and right checksums."""
    for _ in range(changes):
        parts_changed(rng, parts, rng.choice(sound))
    return parts.seal()


def examined(path: Path, data: bytes, sound: list[bytes] | None = None) -> str:
    """Compare the reader's result with the bytes. `sound`: the valid files; no other may be accepted."""
    try:
        segment = open_segment(path)
    except SegmentError as error:
        try:
            peek(path)
        except SegmentError as other:
            refused(other)
        return refused(error)
    check(sound is None or data in sound, "bytes were changed, and it was taken")
    contradictions(segment, vouched(data))
    info = peek(path)
    check((info.text, info.base, info.fields) == (segment.text, segment.base, segment.fields), "peek differs")
    return ACCEPTED


def contradictions(segment: Segment, parts: Parts) -> None:
    """Raise Failed where a segment differs from its file, or contradicts itself."""
    n, base = len(segment), segment.base
    for key in ("name", "description", "text"):
        check(getattr(segment, key) == parts.text(f"notes.{key}"), f"{key} is not that of the file")
    check(base == parts.number("notes.base") and 0 <= base < POSITIONS - n, f"base {base}")
    for name, ids in (("notes.tokens", segment.tokens), ("notes.context", segment.context)):
        check(ids.tobytes() == parts.tensor(name) and (ids >= 0).all(), f"{name} is not that of the file")
    check(n, "no tokens")
    for key, value in segment.identity.as_dict().items():
        check(value == parts.text(f"notes.identity.{key}"), f"another {key}")
    names = ("name", "value", "start", "end", "first", "last")
    spans = [tuple(span[key] for key in names) for span in json.loads(parts.text("notes.fields"))]
    check([tuple(getattr(span, key) for key in names) for span in segment.fields] == spans, "other fields")
    for span in segment.fields:
        right = segment.text[span.start : span.end] == span.value and 0 <= span.first < span.last <= n
        check(right and span.name, f"field {span}")
    check(segment.prefix_only == (parts.key("notes.first") is not None), "prefix only")
    check(not segment.prefix_only or len(segment.context) == base, "left context")
    blocks = list(segment.blocks)
    if blocks:
        check(blocks[0] == 0 and sorted(set(blocks)) == blocks and blocks[-1] < n, f"blocks {blocks}")
        check(blocks == json.loads(parts.text("notes.blocks")), "other blocks")
    kept = list(segment.states)
    check(not kept or (kept == json.loads(parts.text("notes.states")) and kept[-1] == n), "other states")
    check(not kept or (len(segment.context) == base and kept[0] > 0 and sorted(set(kept)) == kept), f"states {kept}")
    check(len(segment.moves) == len(blocks) and all(count >= 0 for count in segment.moves), f"moves {segment.moves}")
    tensors = {tensor.name.decode(): tensor for tensor in parts.tensors}
    for name in ("notes.tokens", "notes.context"):
        tensors.pop(name, None)
    names_of = {"attention": ("k", "v"), "indexer": ("indexer.k", "indexer.v"), "state": ("state.r", "state.s")}
    for rows in segment.layers:
        count = len(segment.states) or 1 if rows.part == "state" else base + n if segment.prefix_only else n
        for part, values in zip(names_of[rows.part], (rows.k, rows.v), strict=True):
            name = f"blk.{rows.layer}.{part}"
            found = tensors.pop(name, None)
            check(values.tobytes() == (found.data if found else b""), f"{name} is not that of the file")
            right = found is None or (list(values.shape) == found.dims[::-1] and len(values) == count)
            check(right, f"{name} has the shape {values.shape}")
    check(not tensors, f"{min(tensors, default='')} was passed over")


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
    first, *rest = rows(9, v=0)
    return [
        plain,
        replace(plain, layers=rows(9, "f4"), identity=replace(identity, kv_type="f32/f32")),
        replace(plain, blocks=(0, 4, 7), moves=(0, 2, 0)),
        replace(plain, prefix_only=True, layers=(*rows(11), state)),
        replace(plain, states=(4, 9), layers=(*rows(9), concatenate_rows([[state], [state]])[0])),
        replace(plain, layers=(first, indexer, *rest)),
        Segment("rows", "", "", tokens(3), 40, tokens(0), (), identity, rows(3, layers=1)),
    ]


def written(path: Path, segment: Segment) -> bytes:
    write_segment(path, segment, writer="notes 0", created="2026-06-01T12:00:00Z")
    return path.read_bytes()
