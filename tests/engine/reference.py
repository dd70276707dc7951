"""Computes reference results with stock llama.cpp calls only, without our hooks.

Hooks are compared with these: decoding at a position that stock llama.cpp allows (an empty sequence may start
anywhere), and an in-place edit that parks the tail of a sequence under an unused sequence id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import LayerRows
from notes_cli.engine.sequence import KVSequence
from notes_cli.engine.vision import ImageEmbeddings

Load = Callable[..., Context]  # fixtures of conftest.py
LoadZoo = Callable[..., Model]
Rows = Sequence[LayerRows]


def nmse(found: np.ndarray, expected: np.ndarray) -> float:
    """Normalised mean squared error."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


def distance(found: Rows, expected: Rows) -> float:
    """The worst nmse of any layer's K or V; MLA and indexers keep no V."""
    pairs = [pair for a, b in zip(found, expected, strict=True) for pair in ((a.k, b.k), (a.v, b.v))]
    return max((nmse(a, b) for a, b in pairs if b.size), default=0.0)


def same(found: Rows, expected: Rows, rows: Sequence[int] | slice = slice(None)) -> bool:
    """True if these rows of all layers are bit-identical."""
    pairs = [pair for a, b in zip(found, expected, strict=True) for pair in ((a.k, b.k), (a.v, b.v))]
    return all(np.array_equal(a[rows], b[rows]) for a, b in pairs)


def open_context(model: Model, kv: str = "f32", flash: str = "off", **options: Any) -> Context:
    """A context in whose K/V nothing is rounded, by default, with small batches."""
    settings = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "type_k": kv, "type_v": kv}
    return Context(model, ContextOptions(**{**settings, "flash_attention": flash, **options}))


def written(context: Context, tokens: Sequence[int]) -> KVSequence:
    """A sequence of these tokens, which are decoded."""
    seq = KVSequence(context)
    seq.append(tokens)
    seq.flush()
    return seq


def all_rows(seq: KVSequence) -> tuple[LayerRows, ...]:
    """The K/V of all decoded tokens, in a type that loses nothing."""
    context, length = seq.context, seq.context.length(seq.seq_id)
    return context.read(seq.seq_id, 0, length, base=0, dtype=context.lossless_type) if length else ()


@contextmanager
def stopping(ctx: Context, after: float = 0) -> Iterator[list[int]]:
    """Computations are aborted after that many of their steps, which are counted."""
    steps = [0]

    @llama.ggml_abort_callback  # type: ignore[untyped-decorator]
    def stop(_: object) -> bool:
        steps[0] += 1
        return steps[0] > after

    llama.llama_set_abort_callback(ctx.handle, stop, None)
    try:
        yield steps
    finally:
        llama.llama_set_abort_callback(ctx.handle, llama.ggml_abort_callback(), None)


def decode(context: Context, tokens: Sequence[int], position: int, seq_id: int = 0) -> np.ndarray:
    """Stock llama_decode of tokens at a position; logits of the last one."""
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    try:
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
            batch.logits[i] = i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        assert llama.llama_decode(context.handle, batch) == 0
    finally:
        llama.llama_batch_free(batch)
    return context.logits()


def shown(ctx: Context, part: ImageEmbeddings, at: int) -> int:
    """Decode a text, or an image with the tokens that mark it, from a position on; returns the next position."""
    done = 0
    for image, rows in zip(part.media, part.rows, strict=True):
        if done < image.first:
            decode(ctx, part.tokens[done : image.first], at)
        at += image.first - done
        axes = None if part.axes is None else part.axes[image.first : image.last] - part.axes[image.first, 0]
        ctx.decode_embeddings(0, at, rows, axes, whole=part.whole)
        done, at = image.last, at + image.positions
    if done < len(part.tokens):
        decode(ctx, part.tokens[done:], at)
    return at + len(part.tokens) - done


def edit_in_place(context: Context, edits: dict[int, int]) -> None:
    """Recompute single tokens of sequence 0, ascending, parking the rows after each of them (one-stream caches)."""
    parked = 200  # any id at or above n_seq_max works for metadata in a one-stream cache
    memory = llama.llama_get_memory(context.handle)
    for position, token in sorted(edits.items()):
        llama.llama_memory_seq_cp(memory, 0, parked, position, -1)
        llama.llama_memory_seq_rm(memory, 0, position, -1)
        decode(context, [token], position)
        llama.llama_memory_seq_cp(memory, parked, 0, position + 1, -1)
        llama.llama_memory_seq_rm(memory, parked, -1, -1)
