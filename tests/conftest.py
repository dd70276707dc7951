"""Shared by all tests: tiny models, made once a run, and a NOTES_HOME that is nobody's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Write a tiny random model, or hand out the one already written with the same settings."""
    import tiny

    folder = tmp_path_factory.mktemp("models")
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str = "llama", **settings: object) -> Path:
        key = (kind, *sorted((name, str(value)) for name, value in settings.items()))
        if key not in made:
            made[key] = tiny.write_model(folder / f"{kind}-{len(made)}.gguf", kind, **settings)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Library, sessions and configuration of every test are its own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("NOTES_HOME", str(folder))
    for name in ("NOTES_MODEL", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return folder
