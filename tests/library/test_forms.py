"""Which form a model is in is remembered, and believed only while file and rules are unchanged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.engine import header, ollama_form
from notes_cli.errors import ModelError
from notes_cli.library import forms


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose heads have been read."""
    found: list[Path] = []
    original = header.read_header

    def counting(path: Path) -> header.Header:
        found.append(path)
        return original(path)

    monkeypatch.setattr(header, "read_header", counting)
    return found


@pytest.fixture
def old(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model that was written an hour ago."""
    path = tmp_path / "model.gguf"
    path.write_bytes(make_model("qwen3").read_bytes())
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_a_head_is_read_once(old: Path, tmp_path: Path, read: list[Path]) -> None:
    for _ in range(2):
        assert forms.form_of(old, tmp_path / "memory" / "forms.json") == ""
    assert read == [old]


def test_a_model_that_changed_is_read_again(old: Path, tmp_path: Path, read: list[Path]) -> None:
    forms.form_of(old, tmp_path / "forms.json")
    os.utime(old, (time.time() - 1800,) * 2)
    forms.form_of(old, tmp_path / "forms.json")
    assert read == [old, old]


def test_other_rules_look_again(old: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an earlier version knew fewer signs."""
    forms.form_of(old, tmp_path / "forms.json")
    (other := tmp_path / "ollama_form.py").write_text("")
    monkeypatch.setattr(ollama_form, "__file__", str(other))
    for _ in range(2):
        forms.form_of(old, tmp_path / "forms.json")
    assert read == [old, old]
    monkeypatch.setattr(ollama_form, "__file__", str(tmp_path / "none"))
    for _ in range(2):
        assert forms.form_of(old, tmp_path / "forms.json") == ""
    assert len(read) == 4


def test_another_form_is_told_each_time(
    old: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ollama_form._NAMES, "qwen3", "another")
    for _ in range(2):
        assert "Ollama" in forms.form_of(old, tmp_path / "forms.json")
    assert len(read) == 2 and not (tmp_path / "forms.json").exists()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "text.gguf").write_text("text")
    os.utime(path, (time.time() - 3600,) * 2)
    for _ in range(2):
        with pytest.raises(ModelError, match="not a GGUF file"):
            forms.form_of(path, tmp_path / "forms.json")
    with pytest.raises(ModelError, match="cannot be read"):
        forms.form_of(tmp_path / "none.gguf", tmp_path / "forms.json")


def test_of_several_files_each_is_looked_at(old: Path, tmp_path: Path, read: list[Path]) -> None:
    """One that is not there is missed each time, whatever is remembered of the first."""
    first = old.rename(tmp_path / "model-00001-of-00002.gguf")
    second = tmp_path / "model-00002-of-00002.gguf"
    second.write_bytes(first.read_bytes())
    for _ in range(2):
        forms.form_of(first, tmp_path / "forms.json")
    assert len(read) == 2
