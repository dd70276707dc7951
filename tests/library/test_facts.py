"""Tests of cached facts about models: digests, forms, renderings."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from notes_cli.errors import ModelError, Progress
from notes_cli.library import facts


def file_sha256(path: Path, memory: Path, progress: Progress | None = None) -> str:
    with path.open("rb") as file:
        return facts.file_sha256(path, file, memory, progress)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that was written an hour ago."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1000)
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_hashed_once(model: Path, tmp_path: Path) -> None:
    """The second time nothing is read; progress ends at the whole."""
    seen: list[tuple[int, int]] = []
    memory = tmp_path / "cache/digests.json"
    expected = hashlib.sha256(model.read_bytes()).hexdigest()
    assert file_sha256(model, memory, lambda done, size: seen.append((done, size))) == expected
    assert seen == [(7000, 7000)]
    assert file_sha256(model, memory, lambda done, size: seen.append((done, size))) == expected
    assert len(seen) == 1


def test_a_changed_file_is_hashed_again(model: Path, tmp_path: Path) -> None:
    """Other size or other time: other content, until shown otherwise."""
    memory = tmp_path / "digests.json"
    first = file_sha256(model, memory)
    model.write_bytes(b"WEIGHTS" * 1000)
    assert file_sha256(model, memory) != first


def test_another_file_with_the_same_size_and_time_is_hashed_again(model: Path, tmp_path: Path) -> None:
    """Copying tools keep modification times: two models of one size can share path and time, but not the file."""
    memory = tmp_path / "digests.json"
    first = file_sha256(model, memory)
    other = tmp_path / "other"
    other.write_bytes(b"WEIGHTS" * 1000)
    os.utime(other, ns=(model.stat().st_atime_ns, model.stat().st_mtime_ns))
    assert other.stat().st_size == model.stat().st_size
    os.replace(other, model)
    assert file_sha256(model, memory) != first


def test_a_file_just_written_is_not_remembered(tmp_path: Path) -> None:
    """It might change again within one tick of the clock."""
    path, memory = tmp_path / "new", tmp_path / "digests.json"
    path.write_bytes(b"x")
    file_sha256(path, memory)
    assert not memory.exists()


@pytest.mark.parametrize("data", ["", "{", "[]", '{"a": 1}', '{"MODEL": [1, 2, "x"]}', "[" * 100_000, '{"MODEL": {}}'])
def test_a_damaged_memory_is_forgotten(model: Path, tmp_path: Path, data: str) -> None:
    """It costs time, never a wrong answer."""
    memory = tmp_path / "digests.json"
    memory.write_text(data.replace("MODEL", str(model)))
    expected = hashlib.sha256(model.read_bytes()).hexdigest()
    assert file_sha256(model, memory) == expected
    assert list(json.loads(memory.read_text())) == [str(model)]


def test_an_unwritable_memory_is_no_error(model: Path, tmp_path: Path) -> None:
    """The digest is still right."""
    (tmp_path / "file").touch()
    assert file_sha256(model, tmp_path / "file/digests.json") == hashlib.sha256(model.read_bytes()).hexdigest()


def test_the_memory_stays_small(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the latest files are kept."""
    monkeypatch.setattr(facts, "DIGESTS", 1)
    memory = tmp_path / "digests.json"
    other = tmp_path / "other.gguf"
    other.write_bytes(b"o")
    os.utime(other, (1, 1))
    file_sha256(model, memory)
    file_sha256(other, memory)
    assert list(json.loads(memory.read_text())) == [str(other)]


def test_what_is_open_is_hashed_and_not_what_the_path_names_by_then(model: Path, tmp_path: Path) -> None:
    """A model that is replaced between load and digest would give its rows the identity of another file."""
    memory = tmp_path / "digests.json"
    expected = hashlib.sha256(model.read_bytes()).hexdigest()
    with model.open("rb") as file:
        other = tmp_path / "other"
        other.write_bytes(b"WEIGHTS" * 1000)
        os.utime(other, (1, 1))
        os.replace(other, model)
        assert facts.file_sha256(model, file, memory) == expected
    assert file_sha256(model, memory) == hashlib.sha256(b"WEIGHTS" * 1000).hexdigest()


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """One line, with the path."""
    (tmp_path / "none").touch()
    with (tmp_path / "none").open("wb") as file, pytest.raises(ModelError, match=r"cannot read .*none"):
        facts.file_sha256(tmp_path / "none", file, tmp_path / "digests.json")
