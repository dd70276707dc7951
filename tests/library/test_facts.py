"""Tests of cached facts about models: digests, forms, renderings."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from notes_cli.errors import ModelError, Progress
from notes_cli.library import safe_files


def file_sha256(path: Path, memory: Path, progress: Progress | None = None) -> str:
    with path.open("rb") as file:
        return safe_files.file_sha256(path, file, memory, progress)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that was written an hour ago."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1000)
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_hashed_once(model: Path, tmp_path: Path) -> None:
    """The second time nothing is read; progress ends at the whole. Where nothing can be remembered it is as right."""
    seen: list[tuple[int, int]] = []
    memory = tmp_path / "cache/digests.json"
    for _ in range(2):
        assert file_sha256(model, memory, lambda done, size: seen.append((done, size))) == sha256(model)
        assert seen == [(7000, 7000)]
    (tmp_path / "file").touch()
    assert file_sha256(model, tmp_path / "file/digests.json") == sha256(model)


@pytest.mark.parametrize("same_time", [True, False])
def test_other_bytes_of_the_same_size_are_hashed_again(model: Path, tmp_path: Path, same_time: bool) -> None:
    """Also with equal path, size and time; one that was just written may change within a tick: not remembered."""
    memory, other, before = tmp_path / "digests.json", tmp_path / "other", model.stat()
    file_sha256(model, memory)
    other.write_bytes(b"WEIGHTS" * 1000)
    if same_time:
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, model)
    kept = memory.read_bytes()
    assert file_sha256(model, memory) == sha256(model)
    assert (memory.read_bytes() == kept) is not same_time


def test_a_damaged_memory_is_forgotten(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it stays small: the oldest digest goes."""
    memory, other = tmp_path / "digests.json", tmp_path / "other.gguf"
    for data in ("", "{", "[]", '{"a": 1}', f'{{"{model}": [1, 2, "x"]}}', "[" * 100_000, f'{{"{model}": {{}}}}'):
        memory.write_text(data)
        assert file_sha256(model, memory) == sha256(model)
        assert list(json.loads(memory.read_text())) == [str(model)]
    monkeypatch.setattr(safe_files, "REMEMBERED", 1)
    other.write_bytes(b"o")
    os.utime(other, (1, 1))
    file_sha256(other, memory)
    assert list(json.loads(memory.read_text())) == [str(other)]


def test_what_is_open_is_hashed_and_not_what_the_path_names_by_then(model: Path, tmp_path: Path) -> None:
    """A model that is replaced between load and digest would give its rows the identity of another file."""
    memory = tmp_path / "digests.json"
    expected = sha256(model)
    with model.open("rb") as file:
        other = tmp_path / "other"
        other.write_bytes(b"WEIGHTS" * 1000)
        os.utime(other, (1, 1))
        os.replace(other, model)
        assert safe_files.file_sha256(model, file, memory) == expected
    assert file_sha256(model, memory) == sha256(model) != expected
    with (tmp_path / "none").open("wb") as file, pytest.raises(ModelError, match=r"cannot read .*none"):
        safe_files.file_sha256(tmp_path / "none", file, tmp_path / "digests.json")
