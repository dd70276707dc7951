"""Tests of numbers that llama.cpp cannot take (beyond 32 bits, or unexpected): they are refused before it aborts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import EngineError, ModelError

FAR = 2**31  # the first number that a C int does not hold
TOKENS = np.arange(8, dtype=np.int32)
MakeModel = Callable[..., Path]


@pytest.fixture
def ctx(make_model: MakeModel) -> Iterator[Context]:
    with Model(make_model("llama")) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)) as context:
        context.append({0: TOKENS})
        yield context


CALLS: list[tuple[str, Callable[[Context, int], object]]] = [
    ("can_move to", lambda ctx, big: ctx.can_move(0, big, 8)),
    ("can_move from", lambda ctx, big: ctx.can_move(big, 0, 8)),
    ("can_move rows", lambda ctx, big: ctx.can_move(0, 1, big)),
    ("splice at", lambda ctx, big: ctx.splice(0, big, TOKENS, ctx.read(0, 0, 8, base=0), 0)),
    ("splice of", lambda ctx, big: ctx.splice(0, 8, TOKENS, ctx.read(0, 0, 8, base=0), big)),
    ("splice into", lambda ctx, big: ctx.splice(big, 8, TOKENS, ctx.read(0, 0, 8, base=0), 0)),
    ("read at", lambda ctx, big: ctx.read(0, big, 8, base=0)),
    ("read to", lambda ctx, big: ctx.read(0, 0, 8, base=big)),
    ("read of", lambda ctx, big: ctx.read(big, 0, 8, base=0)),
    ("rewrite at", lambda ctx, big: ctx.rewrite(0, [big], TOKENS[:1])),
    ("rewrite of", lambda ctx, big: ctx.rewrite(big, [1], TOKENS[:1])),
    ("rewrite token", lambda ctx, big: ctx.rewrite(0, [1], np.array([big]))),
    ("append to", lambda ctx, big: ctx.append({big: TOKENS})),
    ("append token", lambda ctx, big: ctx.append({0: np.array([big])})),
    ("truncate to", lambda ctx, big: ctx.truncate(0, big)),
    ("truncate of", lambda ctx, big: ctx.truncate(big, 0)),
    ("length of", lambda ctx, big: ctx.length(big)),
]


@pytest.mark.parametrize("big", [FAR - 1, FAR, 2**32, 2**32 + 8, 2**64, -1, -FAR - 1])
@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_no_number_wraps(ctx: Context, name: str, call: Callable[[Context, int], object], big: int) -> None:
    """Positions, sequences and tokens beyond or near the range of a C int are refused or reported as impossible; the
    context is unchanged."""
    before = ctx.read(0, 0, 8, base=0)
    try:
        answer = call(ctx, big)
    except EngineError as error:
        assert len(str(error)) > 20
    else:
        assert isinstance(answer, str) or (name == "truncate to" and big > 0)  # a reason; nothing to be dropped there
    assert ctx.length(0) == 8
    assert all((a.k == b.k).all() for a, b in zip(ctx.read(0, 0, 8, base=0), before, strict=True))


@pytest.mark.parametrize("bad", [259, FAR - 1, -1])
def test_tokens_outside_the_vocabulary(ctx: Context, bad: int) -> None:
    """259 tokens are known: another one is refused wherever tokens come in, and named."""
    tokens = np.array([3, bad], np.int32)
    for call in (
        lambda: ctx.append({0: tokens}),
        lambda: ctx.rewrite(0, [1, 2], tokens),
        lambda: ctx.splice(0, 8, tokens, [layer.cut(slice(2)) for layer in ctx.read(0, 0, 8, base=0)], 0),
    ):
        with pytest.raises(EngineError, match=f"token {bad} is outside the vocabulary of 259"):
            call()
    for ask in (ctx.model.token_bytes, ctx.model.ends):
        with pytest.raises(ModelError, match=f"token {bad} is outside the vocabulary of 259"):
            ask(bad)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n_ctx", -1), ("n_ctx", 2**32 + 512), ("n_batch", 0), ("n_batch", 2**32 + 1), ("n_ubatch", -5)),
        *(("n_threads", -1), ("n_sequences", 0), ("n_sequences", 257), ("yarn_orig_ctx", -7)),
        *(("rope_freq_base", float("nan")), ("rope_freq_base", -5.0), ("rope_freq_scale", float("inf"))),
        *(("yarn_attn_factor", float("nan")), ("type_k", "q9"), ("rope_scaling", "x"), ("flash_attention", "maybe")),
    ],
)
def test_options_of_a_context(make_model: MakeModel, name: str, value: Any) -> None:
    with Model(make_model("llama")) as model, pytest.raises(EngineError, match=rf"{name} is .?{value}"):
        Context(model, ContextOptions(**{name: value}))


SMALL = [
    {"n_batch": 1},
    {"n_batch": 1, "n_ubatch": 1},
    {"n_batch": 2, "n_ubatch": 1},
    {"n_batch": 3, "n_ubatch": 2, "swa_full": False},
    {"n_ctx": 1},
    {"n_ctx": 2},
    {"n_batch": 1, "n_sequences": 3},
    {"n_batch": 2, "n_sequences": 3, "unified": True},
    {"n_ctx": 1, "n_sequences": 3},
    {"n_batch": FAR - 1, "n_ubatch": FAR - 1},
]
USE = """
import json, sys
from pathlib import Path
from notes_cli.engine.context import Context
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.sequence import KVSequence
with Model(Path(sys.argv[1])) as model:
    for options in json.loads(sys.argv[2]):
        options = {"n_ctx": 512} | options
        with Context(model, ContextOptions(n_threads=1, **options)) as context:
            sequence = KVSequence(context)
            sequence.append(range(10))
            if not model.recurrent or options.get("n_sequences", 1) == 1:
                assert sequence.lookahead([1, 2, 3]).shape == (3, model.n_vocab)
            sequence.append(range(5))
            print(sequence.logits().argmax())
"""


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
def test_small_and_huge_batches(make_model: MakeModel, kind: str) -> None:
    """`-b 1` and the like, with every kind of memory: no abort, and the same answer. A context has an output for each
    of its sequences, the spare one of recurrent models among them."""
    command = [sys.executable, "-c", USE, str(make_model(kind)), json.dumps(SMALL)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-500:]
    assert len(set(result.stdout.split())) == 1
    assert len(result.stdout.split()) == len(SMALL)
