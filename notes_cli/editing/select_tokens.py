"""Selects the tokens to recompute with a change: the later tokens whose K/V depends most on the value.

The effect of a field's value is measured by replacing it: later tokens whose V (K in layers without V) differs depend
on it. V has no positional encoding, so a value of another length does not matter. At compile time the new value is not
known, and a counterfactual one is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import Change, change, stretches
from notes_cli.engine.positions import position_map
from notes_cli.engine.segment import LayerRows, Segment, Tokens, to_float32
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Progress

# Opens an empty sequence with capacity for so many tokens, in addition to those in use, and frees it afterwards.
Scratch = Callable[[int], AbstractContextManager[KVSequence]]


def prefill(
    sequence: KVSequence, left: Tokens, parts: Sequence[Tokens], dtype: str, progress: Progress | None = None
) -> Iterator[tuple[LayerRows, ...]]:
    """Yield the K/V of each part, decoded after `left` alone, in a scratch sequence, which is cleared. `progress`
    counts the tokens of all parts. Several parts need a context that can truncate."""
    total, done = sum(map(len, parts)), 0

    def update(count: int, _: int) -> None:
        if progress:
            progress(done + count, total)

    sequence.truncate(0)
    sequence.append(left)
    sequence.flush()
    for number, tokens in enumerate(parts):
        if number:
            sequence.truncate(len(left))
        sequence.append(tokens)
        sequence.flush(update)
        done += len(tokens)
        # The whole sequence: a recurrent state cannot be read for a part of it.
        rows = sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype=dtype)
        yield tuple(layer if layer.part == "state" else layer.cut(slice(len(left), None)) for layer in rows)


def counterfactual(value: str) -> str:
    """Return a different value of the same kind and length: other numbers (2026-06-01: 2021-01-05), or another word."""
    other = re.sub(r"\d+", lambda number: _other_number(number[0]), value)
    return other if other != value else ("other" if value != "other" else "another")


def _other_number(number: str) -> str:
    """Return the number minus 5, or plus 4 if that would not be a month or day; with as many digits."""
    other = int(number) - 5 if int(number) > 5 else int(number) + 4
    if len(number) > 2 and len(str(other)) < len(str(int(number))):
        other = int(number) + 5  # 100 becomes 105, not 095
    return f"{other:0{len(number)}d}"


def influence(sequence: KVSequence, segment: Segment, name: str) -> NDArray[np.float32]:
    """Return the `deviation` for a counterfactual value of the field, [n_tokens]. Clears the scratch sequence."""
    value = next(span.value for span in segment.fields if span.name == name)
    other = change(sequence.context.model, segment, {name: counterfactual(value)})
    return np.zeros(len(segment), np.float32) if other is None else deviation(sequence, segment, other)


def deviation(sequence: KVSequence, segment: Segment, change: Change, layers: int | None = None) -> NDArray[np.float32]:
    """Return the relative change of each token's V (or K) from the segment to the corrected text, [n_tokens]: the mean
    over the attention layers, or the first `layers` of them. 0 for replaced tokens, those before the change, and
    unchanged blocks. Decodes the corrected text, or its changed blocks, in the scratch sequence, which is cleared."""
    effect = np.zeros(len(segment), np.float32)
    left, shift, inside = segment.base - segment.first, position_map(change.patches), change.inside
    parts = stretches(segment, change)
    passes = prefill(sequence, segment.context, [part.tokens for part in parts], "f32")
    for part, rows in zip(parts, passes, strict=True):
        first = next(patch.first for patch in change.patches if patch.first >= part.first)
        kept = np.array([position for position in range(first, part.last) if position not in inside], int)
        moved = np.array([shift(int(position)) for position in kept], int) - part.start
        pairs = [pair for pair in zip(segment.layers, rows, strict=True) if pair[0].part == "attention"][:layers]
        for old, new in pairs:
            a, b = (old.v, new.v) if old.v.shape[1] else (old.k, new.k)
            before, after = to_float32(a[left + kept]), to_float32(b[moved])
            change_norm = np.linalg.norm(after - before, axis=1)
            effect[kept] += change_norm / (np.linalg.norm(before, axis=1) + 1e-6) / len(pairs)
    return effect


@dataclass(frozen=True, slots=True)
class Selection:
    """How a method selects tokens: by the compiled influence of fields, if allowed, else by the deviation in a pass
    over the corrected text."""

    influence: bool = False
    layers: int | None = None  # number of first layers compared in the pass; None: all

    def needs_pass(self, segment: Segment) -> bool:
        """Return True if the corrected text must be decoded to select tokens."""
        return not (self.influence and segment.influence)


def most_influenced(segment: Segment, change: Change, k: int) -> tuple[int, ...]:
    """Return the positions of the `k` tokens after the first change with the highest compiled influence. Raises
    NotesError if influence was not compiled."""
    if not segment.influence:
        why = f"{segment.name} was compiled without the influence of its fields, by which selective chooses"
        raise NotesError(why, Help.COMPILE_OTHERWISE(name=segment.name, options={"influence": True}))
    return _highest(segment, change, np.sum([segment.influence[name] for name in change.fields], axis=0), k)


def most_deviating(
    segment: Segment, change: Change, k: int, layers: int | None, sequence: KVSequence | None
) -> tuple[int, ...]:
    """Return the positions of the `k` tokens after the first change with the highest `deviation`, decoding in a scratch
    sequence. If `sequence` is None, nothing is computed and the positions are arbitrary."""
    effect = np.zeros(len(segment), np.float32)
    if sequence is not None:
        effect = deviation(sequence, segment, change, layers)
    return _highest(segment, change, effect, k)


def _highest(segment: Segment, change: Change, effect: NDArray[np.float32], k: int) -> tuple[int, ...]:
    first, inside = change.patches[0].first, change.inside
    candidates = [position for position in range(first, len(segment)) if position not in inside]
    return tuple(sorted(sorted(candidates, key=lambda position: -float(effect[position]))[:k]))
