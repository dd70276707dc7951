"""-ctk, -ctv and `notes compile --kv`: types of K/V in the cache and in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Notes, run_here

ASK = ("ask", "Why?", "--splice", "returns", "--choices", "a,b", "--json")


@pytest.fixture
def notes(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Notes:
    """With a model of 32 elements a head: that many are quantized together."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model("qwen3")))
    return run_here


def test_f32_says_how_to_compile_for_it(notes: Notes, skill: Path, compiled: Path) -> None:
    """The command in the message is the one that mends it, for a name; a file is refused with the same reason."""
    for kv in (("-ctk", "f32", "-ctv", "f32"), ("-ctk", "q8_0", "-ctv", "f32")):
        refused = notes(*ASK, *kv)
        assert refused.code == 1 and refused.err.count("\n") == 1
        options = refused.err.split("Run: notes ")[1].split()
        rows = ["-ctk", "f32", "-ctv", "f32"] if kv[1] == "f32" else ["-ctv", "f32"]
        assert options[:3] == ["compile", "--from", "returns"] and options[5:] == rows
        assert notes(*options).code == 0
        assert notes(*ASK, *kv).code == 0
    by_file = notes("ask", "Why?", "--splice", compiled, "-ctk", "f32", "-ctv", "f32")
    assert by_file.code == 1 and f"Run: notes compile --from {compiled} -m" in by_file.err


def test_quantized_v_without_flash_attention(notes: Notes, skill: Path, compiled: Path) -> None:
    """A usage error with advice, as llama.cpp has no such cache; K alone may be quantized."""
    for command in (ASK, ("compile", skill), ("verify", "returns")):
        refused = notes(*command, "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "off")
        assert refused.code == 2
        assert "-ctv q8_0 needs flash attention" in refused.err
        assert refused.out == "" or refused.json["error"]["status"] == 2
    assert notes(*ASK, "-ctk", "q8_0", "-fa", "off").json["tokens"]["spliced"] > 0


def test_a_type_that_does_not_fit_the_model(
    notes: Notes, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads too small to be quantized: one line with llama.cpp's own reason, from every command alike."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model("llama")))
    refused = notes("ask", "Why?", "-ctk", "q4_0")
    assert (refused.code, refused.out) == (1, "") and refused.err.count("\n") == 1
    assert "q4_0 with block size 32 does not divide" in refused.err
