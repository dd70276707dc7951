"""`notes compile --kv`: set by flag, variable or setting, and shown wherever a skill is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.commands.options import KEPT_TYPES
from notes_cli.engine.segment import STORED_TYPES
from notes_cli.library.container import peek

from .conftest import Notes, run_here

CHOICES = ("--choices", "a,b")
ASK = ("ask", "Why?", "--splice", "returns", "-s", "Be kind.", *CHOICES)


@pytest.fixture
def notes(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Notes:
    """With a model of 32 elements a head."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model("qwen3")))
    return run_here


def test_the_types_of_the_help_are_those_there_are() -> None:
    assert KEPT_TYPES == STORED_TYPES


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
        pieces = [piece for piece in notes(*ASK, "--json").json["pieces"] if piece["how"] == "spliced"]
        assert {(piece["kept"], piece["nbytes"] > 0) for piece in pieces} == {(kv if small else "", small)}
        assert (f"kept as {kv} (" in notes(*ASK, "--explain").out) == small
        checked = notes("verify", "returns", "--question", "Why?", *CHOICES)
        assert (f"returns: its file keeps rows as {kv} (" in checked.out) == small
        told = notes("verify", "returns", "--question", "Why?", *CHOICES, "--json").json["kept"]
        assert list(told) == (["returns"] if small else [])
    assert sizes["q8_0"] < sizes["f16/q8_0"] < sizes["f16"]


@pytest.mark.parametrize("way", ["variable", "setting"])
def test_asked_for_for_good(notes: Notes, skill: Path, home: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A flag wins over both."""
    if way == "variable":
        monkeypatch.setenv("NOTES_COMPILE_KV", "q8_0")
    else:
        home.mkdir(exist_ok=True)
        (home / "config.yaml").write_text("compile:\n  kv: q8_0\n")
    assert notes("compile", skill, "--json").json["compiled"][0]["kv"] == "q8_0"
    assert notes("compile", skill, "--kv", "f16", "--json").json["compiled"][0]["kv"] == "f16"


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


def test_a_session_goes_on_from_it(notes: Notes, skill: Path) -> None:
    """Its K/V is the cache's from then on; the origin of the skill is kept."""
    notes("compile", skill, "--kv", "q8_0")
    assert notes(*ASK, "--session", "mine").code == 0
    notes("rm", "returns")
    assert notes("ask", "And why?", "--session", "mine", *CHOICES).code == 0
    assert "kept as q8_0 (" in notes("session", "show", "mine", "--pieces").out
