"""Fixtures that open models of the zoo, and variants of them, for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zoo

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
