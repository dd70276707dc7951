"""Decodes pending tokens of one or many sequences in a single llama.cpp batch, and runs tasks that need their logits.

A task is a generator. It yields the sequences whose pending tokens it needs decoded, and is resumed after each batch.
The same code runs alone (`run`) or with others (runtime/scheduler.py).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from notes_cli.errors import EngineError, NotesError

if TYPE_CHECKING:
    from notes_cli.engine.context import Output
    from notes_cli.engine.sequence import KVSequence

T = TypeVar("T")
Logits = NDArray[np.float32]
Task = Generator[Sequence["KVSequence"], None, T]


def run(task: Task[T]) -> T:
    """Run one task to its end and return its result. Errors are raised in the task at its yield, and end it."""
    try:
        sequences = next(task)
        while True:
            try:
                decode(sequences)
            except NotesError as error:
                throw(task, error)
            sequences = next(task)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        task.close()


def throw(task: Task[T], error: NotesError) -> None:
    """Raise an error in a task at its yield. Raises StopIteration, or the error that the task raises for it."""
    task.throw(error)
    raise EngineError("a task went on after an error")


def decode(sequences: Sequence[KVSequence], limit: int | None = None) -> None:
    """Decode pending tokens of all sequences in one batch of at most `limit` tokens. A sequence whose tokens are all
    decoded has its logits afterwards. NaN logits are an error of one sequence, which raises it when its logits are
    requested. After an interrupt or a failure each sequence keeps its decoded tokens; the rest stays pending."""
    context = sequences[0].context
    for sequence in sequences:
        sequence.check_intact()
    size = min(context.stride, limit or context.stride)
    shares = fair_shares([sequence.batch for sequence in sequences], size)
    parts = [(sequence, count) for sequence, count in zip(sequences, shares, strict=True) if count]
    outputs: dict[int, Output] = {}
    for sequence, count in parts:
        complete = count == len(sequence.pending)
        outputs[sequence.seq_id] = "all" if sequence.every is not None else "last" if complete else "none"
    started = time.perf_counter()
    try:
        context.append({seq.seq_id: np.array(seq.pending[:count], np.int32) for seq, count in parts}, outputs)
    except BaseException:
        done = [context.length(seq.seq_id) == seq.length(seq.rows + count) for seq, count in parts]
        if all(done):  # an interrupt raised after the call had completed
            _advance(parts, list(outputs.values()))
        else:
            for sequence in sequences:
                sequence.resync()
        raise
    finally:
        for sequence in sequences:
            sequence.seconds["decode"] += time.perf_counter() - started
    _advance(parts, list(outputs.values()))


def _advance(parts: Sequence[tuple[KVSequence, int]], outputs: Sequence[Output]) -> None:
    """Report to each sequence how many tokens were decoded, and their logits."""
    numbers = [{"none": 0, "last": 1, "all": count}[out] for (_, count), out in zip(parts, outputs, strict=True)]
    index = -sum(numbers)
    for (sequence, count), number in zip(parts, numbers, strict=True):
        try:
            sequence.advance(count, [sequence.context.logits(index + offset) for offset in range(number)])
        except EngineError as error:
            sequence.advance(count, error)
        index += number


def fair_shares(wanted: Sequence[int], size: int) -> list[int]:
    """Return shares of a total of at most `size`: small requests in full, large ones equally."""
    left, shares = size, [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for done, index in enumerate(order):
        shares[index] = min(wanted[index], left // (len(order) - done))
        left -= shares[index]
    return shares
