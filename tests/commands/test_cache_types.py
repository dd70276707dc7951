"""-ctk, -ctv and `notes compile --kv`: types of K/V in the cache and in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.engine.segment import STORED_TYPES
from notes_cli.library.container import peek

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


CHOICES = ("--choices", "a,b")
KEPT_ASK = ("ask", "Why?", "--splice", "returns", "-s", "Be kind.", *CHOICES)


def test_it_is_said_with_bytes(notes: Notes, skill: Path) -> None:
    """By compile, inspect, ls, ask and verify, in words and in JSON; not of a skill that is kept as it was computed."""
    sizes = {}
    for kv in STORED_TYPES:
        compiled = notes("compile", skill, "--kv", kv, "--json").json["compiled"][0]
        path = Path(compiled["path"])
        sizes[kv] = path.stat().st_size
        small = kv != "f16"
        assert compiled["kv"] == peek(path).kv == notes("ls", "--json").json[0]["kv"] == kv
        said = notes("compile", skill, "--kv", kv, "-f").err
        assert (f"kept as {kv}, " in said) == small
        shown = notes("inspect", "returns")
        assert f"3 layers, {kv}" in shown.out and (" kB of " in shown.out) == small
        pieces = [piece for piece in notes(*KEPT_ASK, "--json").json["pieces"] if piece["how"] == "spliced"]
        assert {(piece["kept"], piece["nbytes"] > 0) for piece in pieces} == {(kv if small else "", small)}
        assert (f"kept as {kv} (" in notes(*KEPT_ASK, "--explain").out) == small
        checked = notes("verify", "returns", "--question", "Why?", *CHOICES)
        assert (f"returns: its file keeps rows as {kv} (" in checked.out) == small
        told = notes("verify", "returns", "--question", "Why?", *CHOICES, "--json").json["kept"]
        assert list(told) == (["returns"] if small else [])
    assert sizes["q8_0"] < sizes["f16/q8_0"] < sizes["f16"]


def test_what_is_kept_so_stays_so(notes: Notes, skill: Path, tmp_path: Path) -> None:
    """By name, with --stale, by a watch, after an export and an import; a text without the flag is kept as computed."""
    notes("compile", skill, "--kv", "q8_0")
    skill.write_text(skill.read_text() + "\nOne more rule.\n")
    assert notes("compile", "--stale", "--json").json["compiled"][0]["kv"] == "q8_0"
    skill.write_text(skill.read_text() + "\nAnd another.\n")
    by_name = notes("compile", "returns", "--json").json["compiled"][0]
    assert by_name["kv"] == "q8_0" and by_name["decoded"] == by_name["tokens"]
    assert notes("compile", "--from", "returns", "-f", "--json").json["compiled"][0]["kv"] == "q8_0"
    assert notes("export", "returns", tmp_path / "out.gguf").code == 0
    assert notes("rm", "returns").code == 0
    assert notes("import", tmp_path / "out.gguf").code == 0
    assert notes("ls", "--json").json[0]["kv"] == "q8_0"
    again = notes("compile", skill, "--json").json["compiled"][0]
    assert again["kv"] == "f16" and again["reasons"] == ["its rows are kept as q8_0, not as f16"]
