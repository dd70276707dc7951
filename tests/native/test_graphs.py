"""Tests that a changed graph of llama.cpp, for which native/notes_graph.cpp was not written, stops the build."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LLAMA_CPP = ROOT / "build" / "zoo" / "llama.cpp"  # as `make zoo` and `make test` prepare it


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("graphs", ROOT / "native/graphs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LIST", shutil.copy(module.LIST, tmp_path / "GRAPHS.sha256"))
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "llama.cpp"
    shutil.copytree(LLAMA_CPP / "src", folder / "src")
    shutil.copy(LLAMA_CPP / ".notes-pristine", folder)
    return folder


def change(source: Path, name: str) -> None:
    """Another version of llama.cpp has another file of that name: its digest before patching is another one."""
    pristine = source / ".notes-pristine"
    lines = [
        f"{'0' * 64}  {file}" if file == f"src/models/{name}" else f"{digest}  {file}"
        for digest, file in map(str.split, pristine.read_text().splitlines())
    ]
    assert lines != pristine.read_text().splitlines()
    pristine.write_text("\n".join(lines) + "\n")


def test_the_pinned_sources_are_those_that_were_read(graphs: ModuleType) -> None:
    """All architectures that notes_graph.cpp names are on the list."""
    assert graphs.refusal(LLAMA_CPP) == ""


def test_a_changed_graph_is_named(graphs: ModuleType, source: Path) -> None:
    """The build stops with instructions, and continues after `--accept`."""
    change(source, "qwen3.cpp")
    why = graphs.refusal(source)
    assert "src/models/qwen3.cpp has changed" in why and why.count("has changed") == 1
    assert "native/prepare.py build/llama.cpp --accept" in why and "\n" not in why
    graphs.accept(source)
    assert graphs.refusal(source) == ""


def test_a_graph_that_is_gone_or_new(graphs: ModuleType, source: Path) -> None:
    """One cannot be found; one is named by notes_graph.cpp and has not been read. One whose rows are never moved may
    change."""
    change(source, "deepseek4.cpp")
    assert graphs.refusal(source) == ""
    lines = graphs.LIST.read_text().splitlines()
    graphs.LIST.write_text("\n".join(line for line in lines if "gemma3.cpp" not in line) + "\n")
    assert "src/models/gemma3.cpp is new to the list" in graphs.refusal(source)
    (source / "src/models/llama.cpp").unlink()
    assert "llama.cpp" in graphs.refusal(source)


def test_our_own_patches_change_no_digest(graphs: ModuleType, source: Path) -> None:
    """A bug fix may be left out: files count as they were before patching."""
    path = source / "src/models/plamo2.cpp"
    graphs.record(source)
    graphs.accept(source)
    path.write_text(path.read_text() + "// patched\n")
    assert graphs.refusal(source) == ""
    graphs.record(source)
    assert "src/models/plamo2.cpp has changed" in graphs.refusal(source)
