"""Tests that a model's digest is of the loaded bytes, whatever happens to the file meanwhile."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import ModelError
from notes_cli.runtime.workspace import Workspace

MakeModel = Callable[..., Path]


@pytest.fixture
def path(make_model: MakeModel, tmp_path: Path) -> Path:
    """A model that a test may change."""
    return shutil.copy(make_model(), tmp_path / "model.gguf")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rewrite(path: Path) -> None:
    """Write another byte into the last tensor, and set the modification time back."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_model_that_is_replaced_after_it_was_loaded_keeps_its_identity(path: Path, make_model: MakeModel) -> None:
    """Its rows are computed from the loaded bytes."""
    expected, other = sha256(path), make_model(seed=1)
    with Workspace(path) as workspace:
        shutil.copy(other, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        with pytest.raises(ModelError, match="changed after it was loaded"):
            _ = workspace.weights  # the times of the old file show its removal, and may hide other changes
    with Workspace(path) as workspace:
        assert workspace.weights == sha256(other) != expected


def test_a_model_that_is_swapped_while_it_is_loaded(
    path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path names another file when llama.cpp opens it, and the first one again afterwards."""
    other, expected, load = make_model(seed=1), sha256(path), llama.llama_model_load_from_splits
    away = path.parent.with_name("away")

    def swapped(*arguments: Any) -> Any:
        path.parent.rename(away)
        path.parent.mkdir()
        shutil.copy(other, path)
        try:
            return load(*arguments)
        finally:
            shutil.rmtree(path.parent)
            away.rename(path.parent)

    monkeypatch.setattr(llama, "llama_model_load_from_splits", swapped)
    with Workspace(path, ContextOptions(n_ctx=256)) as workspace:
        monkeypatch.undo()
        assert workspace.weights == expected
        logits = workspace.sequence()
        logits.append([30, 31, 32])
        with Workspace(path, ContextOptions(n_ctx=256)) as again:
            same = again.sequence()
            same.append([30, 31, 32])
            assert (logits.logits() == same.logits()).all()


def test_a_model_that_is_written_into_while_it_is_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is still being downloaded."""
    load = llama.llama_model_load_from_splits

    def written(*arguments: Any) -> Any:
        handle = load(*arguments)
        rewrite(path)
        return handle

    monkeypatch.setattr(llama, "llama_model_load_from_splits", written)
    with pytest.raises(ModelError, match="changed while it was being loaded"):
        Model(path)


def test_a_model_that_is_written_into_while_it_is_in_use(path: Path) -> None:
    """Its memory is the file: before the digest and after it."""
    with Workspace(path) as workspace:
        rewrite(path)
        with pytest.raises(ModelError, match="changed after it was loaded"):
            _ = workspace.weights
    with Workspace(path) as workspace:
        before = workspace.weights
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\x02")
        with pytest.raises(ModelError, match="changed after it was loaded"):
            _ = workspace.identity
    with Workspace(path) as workspace:
        assert workspace.weights != before


def test_a_model_that_is_moved_or_touched_while_it_is_in_use(path: Path) -> None:
    """It is the same model."""
    with Workspace(path) as workspace:
        before = workspace.weights
        path.rename(path.with_name("other.gguf"))
        assert workspace.weights == before
        os.utime(path.with_name("other.gguf"))
        assert workspace.weights == before
        path.with_name("other.gguf").unlink()
        assert workspace.weights == before


def test_descriptors_are_closed(path: Path) -> None:
    """Those of models that load and of those that do not."""
    broken = path.with_name("broken.gguf")
    broken.write_bytes(path.read_bytes()[:5000])
    Model(path).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        Model(path).close()
        with pytest.raises(ModelError):
            Model(broken)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe would be waited for without end."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="is not a regular file"):
        Model(tmp_path / "pipe")
