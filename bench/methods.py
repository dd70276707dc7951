"""Three edit methods that the package leaves out, added to its METHODS by `add`.

selective@16 recomputes the field and the 16 later tokens whose V depends most on it, by a pass over the corrected text;
blend@16 those that deviate most in the first two layers, as CacheBlend chooses them (llama.cpp cannot stop after two,
so it costs a full pass). V has no positional encoding, so a value of another length does not matter. block computes the
blocks with the field again (of a skill that was compiled in blocks), which equals compiling the corrected text in them.

The passes take cells of the context besides those of the prompt, which it must have, and their tokens do not count as
decoded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.methods import METHODS, Change, Method, Placer, in_place
from notes_cli.engine.positions import position_map
from notes_cli.engine.segment import Segment, to_float32
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import UnsupportedError
from notes_cli.runtime.compile import compile_blocks, prefill, reusable_blocks

K = 16  # tokens that are recomputed besides the field


def deviation(sequence: KVSequence, segment: Segment, change: Change, layers: int | None) -> NDArray[np.float32]:
    """The relative change of each token's V (or K) from the segment to the corrected text, [n_tokens]: the mean over
    the attention layers, or the first `layers` of them; 0 for replaced tokens and those before the change."""
    with KVSequence(sequence.context) as scratch:
        rows = next(prefill(scratch, segment.context, [change.tokens], "f32"))
    left, shift, effect = segment.base - segment.first, position_map(change.patches), np.zeros(len(segment), np.float32)
    replaced = {position for patch in change.patches for position in range(patch.first, patch.last)}
    kept = np.array([at for at in range(change.patches[0].first, len(segment)) if at not in replaced], int)
    moved = np.array([shift(int(at)) for at in kept], int)
    pairs = [pair for pair in zip(segment.layers, rows, strict=True) if pair[0].part == "attention"][:layers]
    for old, new in pairs:
        a, b = (old.v, new.v) if old.v.shape[1] else (old.k, new.k)
        before, after = to_float32(a[left + kept]), to_float32(b[moved])
        change_norm = np.linalg.norm(after - before, axis=1)
        effect[kept] += change_norm / (np.linalg.norm(before, axis=1) + 1e-6) / len(pairs)
    return effect


def selected(
    sequence: KVSequence, segment: Segment, change: Change, placer: Placer, *, layers: int | None = None
) -> None:
    """Recompute the field and the K later tokens that deviate most in place."""
    effect = deviation(sequence, segment, change, layers)
    also = [int(at) for at in np.argsort(-effect, kind="stable")[:K] if effect[at] > 0]
    in_place(sequence, segment, change, placer, sorted(also))


def by_blocks(sequence: KVSequence, segment: Segment, change: Change, placer: Placer) -> None:
    """Append the skill with recompiled blocks in place of the changed ones. Raises UnsupportedError without blocks."""
    if not segment.blocks:
        raise UnsupportedError(f"{segment.name} was compiled in one piece")
    blocks = tuple(map(position_map(change.patches), segment.blocks))
    corrected = replace(segment, text=change.text, tokens=change.tokens, fields=change.spans, blocks=blocks)
    with KVSequence(sequence.context) as scratch:
        known, moves = reusable_blocks(sequence.context, corrected, segment)
        layers = compile_blocks(scratch, corrected, known, None)
    placer(sequence, replace(corrected, layers=layers, moves=moves))


def add() -> None:
    """Add these methods to those of the package. They are for prompts, not for sessions, whose skills have no rows."""
    for name, edit in (("selective@16", selected), ("blend@16", partial(selected, layers=2))):
        METHODS[name] = Method(name, edit, in_place=True, needs_rewrite=True)
    METHODS["block"] = Method("block", by_blocks)
