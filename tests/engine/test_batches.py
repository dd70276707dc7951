"""Tests of batches of several sequences: each gives the same results as alone, in every architecture of the zoo.

A server and a batch of questions decode so. llama.cpp's graphs of recurrent layers are seldom tried so.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import nmse

from bench import zoo_more
from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.errors import EngineError, ModelError, UnsupportedError

MODELS = Path(__file__).parents[2] / "build" / "zoo" / "models"
SEQUENCES = 4
BOUND = 1e-3  # of the squared error of logits, over their square: rounding is below 1e-5, another's state above 1e-2


def error(path: Path) -> float | None:
    """The largest error of any sequence's logits, in small micro-batches and, with a recurrent state, in one; None for
    a model that takes no several sequences. Each is decoded with others first and alone in the end, of other lengths;
    one is in none of the later batches, and none in all."""
    options = ContextOptions(n_ctx=512, n_threads=1, n_sequences=SEQUENCES, unified=True, type_k="f32", type_v="f32")
    try:
        with Model(path) as model:
            sizes = (4, 512) if model.recurrent else (8,)
            return max(_error(model, replace(options, n_ubatch=physical)) for physical in sizes)
    except (EngineError, ModelError, UnsupportedError):
        return None


def _error(model: Model, options: ContextOptions) -> float:
    rng = np.random.default_rng(11)
    said: list[list[int]] = [[] for _ in range(SEQUENCES)]
    found: dict[int, NDArray[np.float32]] = {}
    worst = 0.0
    with Context(model, options) as context:
        for batch in ({0: 7, 1: 7, 2: 5, 3: 9}, {1: 3, 2: 3}, {0: 4, 2: 4, 3: 2}, {0: 1, 1: 1}, {2: 6}):
            tokens = {one: rng.integers(0, model.n_vocab, count).astype(np.int32) for one, count in batch.items()}
            context.append(tokens, "last")
            for place, (one, ids) in enumerate(tokens.items()):
                said[one] += ids.tolist()
                found[one] = context.logits(place - len(tokens)).copy()
        for one, ids in enumerate(said):
            context.clear()
            context.append({one: np.array(ids, np.int32)}, "last")
            worst = max(worst, nmse(found[one], context.logits()))
    return worst


def test_each_sequence_is_as_alone() -> None:
    paths = sorted(MODELS.glob("*.gguf"))
    if not paths:
        pytest.fail(f"there are no models in {MODELS}. Run: make test")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = dict(pool.map(lambda path: (path.stem, error(path)), paths))
    wrong = {name: found for name, found in errors.items() if found is not None and found > BOUND}
    assert wrong == {}
    assert sum(found is not None for found in errors.values()) >= 100 + len(zoo_more.RECURRENT)
    mended = {"plamo2-dense", "arwkv7-dense", "rwkv6qwen2-dense"}  # by native/patches/fixes, else refused
    taken = mended & {name for name, found in errors.items() if found is not None}
    assert taken == (mended if "fixes" in native.PATCHES else set())
