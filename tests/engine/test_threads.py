"""Tests of the default number of threads of a context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.engine import options as module
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.options import ContextOptions


@pytest.mark.parametrize(("share", "threads"), [(2.0, 1), (0.3, 3), (0.001, 4)])
def test_no_more_threads_than_the_weights_keep_busy(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, share: float, threads: int
) -> None:
    """A thread for each such share of the weights: one at least, a core each at most. As many as are asked for."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    with Model(make_model("llama")) as model:
        monkeypatch.setattr(module, "THREAD_WEIGHTS", int(share * llama.llama_model_size(model.handle)))
        with Context(model, ContextOptions(n_ctx=64)) as context:
            assert llama.llama_n_threads(context.handle) == threads
        with Context(model, ContextOptions(n_ctx=64, n_threads=7)) as context:
            assert llama.llama_n_threads(context.handle) == 7
