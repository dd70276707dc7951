"""Fixtures that open models of the zoo, and variants of them, for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zoo

from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model

LoadZoo = Callable[..., Model]


@pytest.fixture
def load_zoo(tmp_path: Path) -> Iterator[LoadZoo]:
    """Load a model of the zoo, or a variant of it if anything but its name is given."""
    loaded: list[Model] = []

    def load(name: str, overrides: dict[str, Any] | None = None, **changes: Any) -> Model:
        path = zoo.zoo_model(name)
        if overrides or changes:
            path = zoo.variant(name, tmp_path / f"{name}-{len(loaded)}.gguf", overrides or {}, **changes)
        loaded.append(Model(path))
        return loaded[-1]

    yield load
    for model in loaded:
        model.close()
    for path in tmp_path.glob("*.gguf"):  # up to 150 MB each, and pytest keeps the folders of three runs
        path.unlink()


@pytest.fixture
def load(make_model: Callable[..., Path]) -> Iterator[Callable[..., Context]]:
    """Contexts of tiny models, open as long as a test needs them."""
    with ExitStack() as opened:

        def make(kind: str = "llama", **options: Any) -> Context:
            model = opened.enter_context(Model(make_model(kind, name="tiny")))  # llama.cpp knows "phi3" in a name
            settings = {"n_ctx": 512, "n_threads": 1, "flash_attention": "off", **options}
            return opened.enter_context(Context(model, ContextOptions(**settings)))

        yield make
