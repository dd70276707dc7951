"""The check of a wheel finds what it lacks, and what does not belong there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import wheel

LIB = "notes_cli/lib/"
WHOLE = [
    *(f"{LIB}lib{name}.so" for name in ("notes-llama", "notes-mtmd", "notes-ggml", "notes-ggml-base")),
    *(f"{LIB}libggml-cpu-{name}.so" for name in ("x64", "haswell", "zen4")),
    *(f"{LIB}{name}.py" for name in ("__init__", "llama_cpp", "mtmd_cpp", "_ctypes_extensions")),
    *(f"{LIB}LICENSE.{name}" for name in ("llama.cpp", "llama-cpp-python", "xxhash")),
    *(f"notes_cli/engine/part{number}.py" for number in range(50)),
    *("notes_cli/models/notes-tiny-q8_0.gguf", "notes_cli/prompts/errata.json"),
    "notes_cli/skills/store-handbook/SKILL.md",
    *(f"notes_cli/serve/page/{name}" for name in ("index.html", "style.css", "app.js")),
    *("notes_cli/skills/style-guide/SKILL.md", "notes_cli-0.1.0.dist-info/METADATA"),
]


def test_a_whole_wheel_is_right() -> None:
    """Also one with a GPU backend, and with what a compiler's library was taken along as."""
    assert wheel.wrong(WHOLE) == []
    assert wheel.wrong([*WHOLE, f"{LIB}libggml-metal.so", "notes_cli.libs/libgomp-a34b3233.so.1.0.0"]) == []


@pytest.mark.parametrize("number", [number for number, name in enumerate(WHOLE) if "/lib/" in name])
def test_each_part_is_missed(number: int) -> None:
    assert len(wheel.wrong(WHOLE[:number] + WHOLE[number + 1 :])) == 1


@pytest.mark.parametrize(
    "name", ["llama_cpp/llama_cpp.py", "lib/libllama.so", f"{LIB}libllama.so", f"{LIB}a.h", "tests/test_a.py"]
)
def test_what_does_not_belong_there_is_named(name: str) -> None:
    """A second binding or library above all: it would be in the way of a user's own."""
    assert wheel.wrong([*WHOLE, name]) == [f"it has {name}, which is no part of it"]


def test_without_a_compiler_means_that_none_can_be_found(tmp_path: Path) -> None:
    assert wheel.bare(tmp_path)["PATH"] == str(tmp_path)
    shutil.copy("/bin/sh", tmp_path / "cmake")
    with pytest.raises(AssertionError, match="cmake can be found"):
        wheel.bare(tmp_path)
