"""Decodes pending tokens of one or many sequences in a single llama.cpp batch."""

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
    """Decode pending tokens of all sequences in one batch of at most `limit` tokens. A sequence whose tokens are all
    decoded has its logits afterwards. Returns, for the sequence ids in `every`, the logits after each token, or an
    error. NaN logits are an error of one sequence, which raises it when its logits are requested. After an interrupt or
    a failure each sequence keeps its decoded tokens; the rest stays pending."""
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
        if all(done):  # an interrupt raised after the call had completed
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
    """Report to each sequence how many tokens were decoded and their logits."""
    outputs_of = [{"none": 0, "last": 1, "all": count}[outputs[seq.seq_id]] for seq, count in parts]
    logits_of: dict[int, list[Logits] | EngineError] = {}
    index = -sum(outputs_of)
    for (sequence, count), number in zip(parts, outputs_of, strict=True):
        sequence.advance(count)
        try:
            logits = [sequence.context.logits(index + offset) for offset in range(number)]
        except EngineError as error:
            sequence.advance(0, error)
            logits_of[sequence.seq_id] = error
        else:
            if logits and not sequence.pending:
                sequence.advance(0, logits[-1])
            if sequence.seq_id in every:
                logits_of[sequence.seq_id] = logits
        index += number
    return logits_of


def fair_shares(wanted: Sequence[int], size: int) -> list[int]:
    """Return shares of a total of at most `size`: small requests in full, large ones equally."""
    left, shares = size, [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for done, index in enumerate(order):
        shares[index] = min(wanted[index], left // (len(order) - done))
        left -= shares[index]
    return shares
