"""The tokens that are computed again with a change: those after it on which the value has the highest effect.

The effect of a value is measured by giving the field another one: later tokens whose V rows (K where V is part of it)
differ depend on it. V carries no position, so a value of another length does not matter. Before the new value is
known, a counterfactual one is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import Change, change, stretches
from notes_cli.engine.patches import position_map
from notes_cli.engine.segment import LayerRows, Segment, Tokens, to_float32
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Progress

# Opens an empty sequence to compute so many rows in, beside those that are in use, and gives it back afterwards.
Scratch = Callable[[int], AbstractContextManager[KVSequence]]


def prefill(
    sequence: KVSequence, left: Tokens, parts: Sequence[Tokens], dtype: str, progress: Progress | None = None
) -> Iterator[tuple[LayerRows, ...]]:
    """Rows of each part, K rotated to the positions after `left`. `progress` counts the tokens of all parts.

    The sequence is a scratch one: what it holds is dropped. More than one part needs a memory that can go back.
    """
    total, done = sum(map(len, parts)), 0

    def told(count: int, _: int) -> None:
        if progress:
            progress(done + count, total)

    sequence.truncate(0)
    sequence.append(left)
    sequence.flush()
    for number, tokens in enumerate(parts):
        if number:
            sequence.truncate(len(left))
        sequence.append(tokens)
        sequence.flush(told)
        done += len(tokens)
        # All of them: a recurrent state can be read with no fewer.
        rows = sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype=dtype)
        yield tuple(layer if layer.part == "state" else layer.cut(slice(len(left), None)) for layer in rows)


def counterfactual(value: str) -> str:
    """Another value of the same kind and length: other numbers (2026-06-01: 2021-01-05), or another word."""
    other = re.sub(r"\d+", lambda number: _other(number[0]), value)
    return other if other != value else ("other" if value != "other" else "another")


def _other(number: str) -> str:
    """Five less, or four more where that would be no month and no day any more; as many digits."""
    found = int(number) - 5 if int(number) > 5 else int(number) + 4
    if len(number) > 2 and len(str(found)) < len(str(int(number))):
        found = int(number) + 5  # 100 becomes 105, not 095
    return f"{found:0{len(number)}d}"


def influence(sequence: KVSequence, segment: Segment, name: str) -> NDArray[np.float32]:
    """What a counterfactual value of the field changes: its `deviation`, [n_tokens]. The sequence is a scratch one."""
    value = next(span.value for span in segment.fields if span.name == name)
    other = change(sequence.context.model, segment, {name: counterfactual(value)})
    return np.zeros(len(segment), np.float32) if other is None else deviation(sequence, segment, other)


def deviation(sequence: KVSequence, segment: Segment, change: Change, layers: int | None = None) -> NDArray[np.float32]:
    """Relative change of each token's rows from the segment to the corrected text, [n_tokens].

    The mean over the attention layers, or over the first few of them. 0 for what gives way to other tokens, what
    precedes it, and blocks without a change. Costs a pass over the corrected text, or over its blocks with a change.

    The sequence is a scratch one: what it holds is dropped.
    """
    found = np.zeros(len(segment), np.float32)
    left, shift, inside = segment.base - segment.first, position_map(change.patches), change.inside
    parts = stretches(segment, change)
    passes = prefill(sequence, segment.context, [part.tokens for part in parts], "f32")
    for part, rows in zip(parts, passes, strict=True):
        first = next(patch.first for patch in change.patches if patch.first >= part.first)
        here = np.array([position for position in range(first, part.last) if position not in inside], int)
        there = np.array([shift(int(position)) for position in here], int) - part.start
        pairs = [pair for pair in zip(segment.layers, rows, strict=True) if pair[0].part == "attention"][:layers]
        for mine, theirs in pairs:
            a, b = (mine.v, theirs.v) if mine.v.shape[1] else (mine.k, theirs.k)
            was, now = to_float32(a[left + here]), to_float32(b[there])
            found[here] += np.linalg.norm(now - was, axis=1) / (np.linalg.norm(was, axis=1) + 1e-6) / len(pairs)
    return found


@dataclass(frozen=True, slots=True)
class Selection:
    """By what a method selects tokens."""

    # The influence of the fields, if it was measured when the skill was compiled; else a pass over the corrected text.
    influence: bool = False
    layers: int | None = None  # of the pass: how many of the first layers count; None: all

    def needs_pass(self, segment: Segment) -> bool:
        """Whether the corrected text must be read for it."""
        return not (self.influence and segment.influence)


def most_influenced(segment: Segment, change: Change, k: int) -> tuple[int, ...]:
    """The `k` tokens after the first change on which it has the highest effect, as measured when it was compiled.

    Raise NotesError where that was not measured.
    """
    if not segment.influence:
        why = f"{segment.name} was compiled without the influence of its fields, by which selective chooses"
        raise NotesError(why, Help.COMPILE_OTHERWISE(name=segment.name, options={"influence": True}))
    return _highest(segment, change, np.sum([segment.influence[name] for name in change.fields], axis=0), k)


def most_deviating(
    segment: Segment, change: Change, k: int, layers: int | None, sequence: KVSequence | None
) -> tuple[int, ...]:
    """The `k` tokens after the first change whose rows deviate most in a pass over the corrected text, in a scratch
    sequence. Without one nothing is computed, and any tokens are returned in their place."""
    effect = np.zeros(len(segment), np.float32)
    if sequence is not None:
        # DROP  # a pass is what few edits need

        effect = deviation(sequence, segment, change, layers)
    return _highest(segment, change, effect, k)


def _highest(segment: Segment, change: Change, effect: NDArray[np.float32], k: int) -> tuple[int, ...]:
    first, inside = change.patches[0].first, change.inside
    candidates = [position for position in range(first, len(segment)) if position not in inside]
    return tuple(sorted(sorted(candidates, key=lambda position: -float(effect[position]))[:k]))
