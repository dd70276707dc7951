"""Tests of random scripts of operations against a forward pass in float64 (bench/windows.py runs a thousand)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from forward import Rows

from bench.windows import CONTROLS, MODELS, Shapes, run
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shapes]:
    made = Shapes(tmp_path_factory.mktemp("shapes"))
    yield made
    made.close()


@pytest.mark.parametrize("number", range(len(MODELS)), ids=[f"{kind}-{window}" for kind, window in MODELS])
def test_the_reference_is_the_model(shapes: Shapes, number: int) -> None:
    """One prefill: all logits and rows of the reference equal llama.cpp's, to rounding."""
    model, forward = shapes.models[number]
    tokens = np.random.default_rng(7).integers(0, 256, 100).astype(np.int32)
    options = ContextOptions(n_ctx=256, n_threads=1, type_k="f32", type_v="f32", flash_attention="off")
    rows: Rows = {}
    wanted = forward.compute(rows, range(100), tokens)
    with Context(model, options) as ctx:
        ctx.append({0: tokens}, "all")
        assert np.allclose([ctx.logits(i) for i in range(100)], wanted, rtol=0, atol=0.05)
        assert np.allclose(
            ctx.read(0, 0, 100, base=0, dtype="f32")[1].v, [rows[i].v[1].ravel() for i in range(100)], atol=0.01
        )


def test_random_scripts_compute_what_they_say(shapes: Shapes) -> None:
    """Append, rewrite, splice, truncate and copy, with and without swa_full: no difference beyond rounding, and no
    refusal without a reason."""
    totals = run(shapes, range(5000, 5008))
    assert totals.wrong == []
    assert totals.operations.total() == 8 * 24 > 5 * totals.refusals.total()


@pytest.mark.parametrize("spoil", CONTROLS)
def test_a_wrong_reference_is_caught(shapes: Shapes, spoil: str) -> None:
    """The control: a window off by one, an old row kept, or keys turned too far, differ in most scripts."""
    assert run(shapes, range(5000, 5004), spoil).bad_scripts >= 2
