"""Decoding: one call of llama.cpp over what is pending in one or many sequences of a context."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from notes_cli.errors import EngineError

if TYPE_CHECKING:
    from notes_cli.engine.context import Output
    from notes_cli.engine.sequence import KVSequence

Logits = NDArray[np.float32]


def decode(
    sequences: Sequence[KVSequence], limit: int | None = None, every: Collection[int] = ()
) -> dict[int, list[Logits] | EngineError]:
    """Decode as much of what is pending as goes into one batch, at most `limit` tokens, of each sequence some; where
    that is all, the sequence has its logits afterwards. Of the sequences in `every` return the logits after each token,
    or why there are none.

    Logits that are not numbers are an error of one sequence, which raises it when it is asked for them. Interrupted or
    failed, each keeps what of it was decoded, and the rest is still pending.
    """
    context = sequences[0].context
    for sequence in sequences:
        sequence.check_intact()
    size = min(context.stride, limit or context.stride)
    shares = fair_shares([sequence.batch for sequence in sequences], size)
    parts = [(sequence, count) for sequence, count in zip(sequences, shares, strict=True) if count]
    outputs: dict[int, Output] = {}
    for sequence, count in parts:
        complete = count == len(sequence.pending)
        outputs[sequence.seq_id] = "all" if sequence.seq_id in every else "last" if complete else "none"
    started = time.perf_counter()
    try:
        context.append({seq.seq_id: np.array(seq.pending[:count], np.int32) for seq, count in parts}, outputs)
    except BaseException:
        done = [context.length(seq.seq_id) == seq.length(seq.rows + count) for seq, count in parts]
        if all(done):  # an interrupt comes after the call that it waited for
            _advance(parts, outputs, every)
        else:
            for sequence in sequences:
                sequence.resync()
        raise
    finally:
        for sequence in sequences:
            sequence.seconds["decode"] += time.perf_counter() - started
    return _advance(parts, outputs, every)


def _advance(
    parts: Sequence[tuple[KVSequence, int]], outputs: Mapping[int, Output], every: Collection[int]
) -> dict[int, list[Logits] | EngineError]:
    """Tell the sequences how many of their tokens were decoded, and what came of it."""
    wanted = [{"none": 0, "last": 1, "all": count}[outputs[seq.seq_id]] for seq, count in parts]
    found: dict[int, list[Logits] | EngineError] = {}
    index = -sum(wanted)
    for (sequence, count), number in zip(parts, wanted, strict=True):
        sequence.advance(count)
        try:
            logits = [sequence.context.logits(index + place) for place in range(number)]
        except EngineError as error:
            sequence.advance(0, error)
            found[sequence.seq_id] = error
        else:
            if logits and not sequence.pending:
                sequence.advance(0, logits[-1])
            if sequence.seq_id in every:
                found[sequence.seq_id] = logits
        index += number
    return found


def fair_shares(wanted: Sequence[int], size: int) -> list[int]:
    """So many of each that all fit into `size`: the small ones whole, of the large ones the same."""
    left, given = size, [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for place, index in enumerate(order):
        given[index] = min(wanted[index], left // (len(order) - place))
        left -= given[index]
    return given
