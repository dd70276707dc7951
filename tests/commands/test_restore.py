"""Models whose K/V cannot be moved: restored at the start, decoded elsewhere, always reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.runtime.compile import UNCAPTURED, UNTRUSTED

from .conftest import Notes, run_here

LEFT = len("system\n") + 1
REASONS = {
    "lfm2": UNTRUSTED,
    "mamba": UNTRUSTED,
    "gpt2": "this model learned a vector for every absolute position, so its rows belong where they were computed",
}
ASK = ("ask", "Why?", "--splice", "returns")


@pytest.fixture(params=["lfm2", "gpt2"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def notes(kind: str, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Notes:
    """As for all commands, with a model whose rows cannot be moved."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model(kind)))
    return run_here


@pytest.fixture
def fees(notes: Notes, compiled: Path, tmp_path: Path) -> None:
    """A second skill, compiled as `fees` after `returns`."""
    (tmp_path / "fees.txt").write_text("fee: 12\n\nThe fee is due at once.")
    assert notes("compile", tmp_path / "fees.txt").code == 0


def test_doctor_has_the_size_of_states(notes: Notes, kind: str) -> None:
    context = notes("doctor", "--json").json["context"]
    assert ("a recurrent state takes 1.0 kB: a session keeps one a turn" in context) == (kind == "lfm2")


@pytest.mark.patches("recurrent")
def test_ask_decodes_elsewhere_and_says_why(notes: Notes, fees: None, kind: str) -> None:
    """One sentence that names the place and the model's reason, which a compile gives at once."""
    why = f"decoded: preceded by a different context than at compile time; {REASONS[kind]}"
    assert f"It can be restored at the start of a prompt, and is decoded elsewhere: {REASONS[kind]}" in (
        notes("compile", "returns", "-f").err
    )
    behind = notes(*ASK, "-s", "Be kind.", "--explain", "--json").json
    assert behind["pieces"][1]["why"] == why and behind["tokens"]["spliced"] == 0
    done = notes(*ASK, "--splice", "fees", "-n", 2, "--json")
    two = done.json
    assert f"warning: fees is not spliced, its 32 tokens are decoded: {why.removeprefix('decoded: ')}" in done.err
    assert "returns is not" not in done.err
    assert [piece["name"] for piece in two["pieces"] if piece["refused"]] == ["fees"]
    how = {piece["name"]: (piece["how"], piece["why"]) for piece in two["pieces"] if piece["kind"] == "splice"}
    assert how["returns"][0] == "spliced" and how["fees"] == ("decoded", why)


def test_skills_in_one_order_are_restored_as_one(notes: Notes, fees: None) -> None:
    """Advice follows if the second of two skills is decoded; then both are restored, as a prefill of both."""
    both = (*ASK, "--splice", "fees", "--choices", "yes,no,not sure")
    printed = notes(*both).err
    assert "Run: notes compile returns fees --together returns-fees, and give it --splice returns-fees" in printed
    assert "--together" not in notes(*both, "-s", "Be kind.").err  # nothing is restored there, so that would not help
    assert notes("compile", "returns", "+", "fees").code == 0
    chain = ("ask", "Why?", "--splice", "returns-fees", "--choices", "yes,no,not sure")
    found, wanted = notes(*chain, "--json"), notes(*chain, "--json", "--recompute").json
    assert "not spliced" not in found.err and wanted["tokens"]["spliced"] == 0
    assert [piece["how"] for piece in found.json["pieces"] if piece["kind"] == "splice"] == ["spliced"]
    assert found.json["tokens"]["decoded"] < 60 < wanted["tokens"]["decoded"]
    assert found.json["probabilities"] == pytest.approx(wanted["probabilities"], rel=0.05, abs=0.01)


@pytest.mark.patches("recurrent")
def test_strict_refuses_to_decode(notes: Notes, fees: None, kind: str, home: Path) -> None:
    """Before decoding, in any turn, or as a setting; a restored skill is accepted, a refused turn is not saved."""
    assert notes(*ASK, "--strict", "-n", 2, "--session", "mine").code == 0
    turns = notes("session", "show", "mine", "--json").json["turns"]
    later = ("ask", "And?", "--splice", "fees", "--session", "mine")
    for arguments in (
        (*ASK, "-s", "Be kind."),
        (*ASK, "-s", "Be kind.", "--explain"),
        (*ASK, "--splice", "fees"),
        later,
    ):
        refusal = notes(*arguments, "--strict").refusal()
        assert "preceded by a different context" in refusal and REASONS[kind] in refusal
    assert notes("session", "show", "mine", "--json").json["turns"] == turns
    (home / "config.yaml").write_text("strict: true\n")
    assert notes(*later).code == 1
    (home / "config.yaml").unlink()
    done = notes(*later, "-n", 2)
    assert done.code == 0 and "warning: fees is not spliced, its 32 tokens" in done.err
    assert "warning" not in notes("ask", "And?", "--session", "mine", "-n", 2).err  # of a turn long ago


@pytest.mark.parametrize("kind", ["lfm2", "mamba"], indirect=True)
@pytest.mark.patches("recurrent")
def test_a_state_is_carried_where_that_is_asked_for(notes: Notes, compiled: Path, skill: Path) -> None:
    """Captured by a compile with --carry, shown by inspect and --explain, disabled by --no-carry."""
    ask = (*ASK, "-s", "Be kind.", "--explain", "--json")
    (piece,) = [one for one in notes(*ask, "--carry").json["pieces"] if one["name"] == "returns"]
    assert piece["how"] == "decoded" and piece["why"].endswith(UNCAPTURED)
    printed = notes("compile", skill, "--carry").err
    assert UNCAPTURED in printed and "the state of recurrent layers carried through it" in printed
    assert "up to date" in notes("compile", skill, "--carry").err
    assert "up to date" in notes("compile", skill).err  # extra segments are no reason
    (shown,) = notes("inspect", "returns", "--json").json
    assert re.search(r"; [0-9.]+ kB to carry it elsewhere, after a seam of 16 tokens$", shown["rows"])
    assert shown["compiled_at"] == f"position {LEFT}, after {LEFT} tokens"
    seam, rest = [one for one in notes(*ask, "--carry").json["pieces"] if one["name"] == "returns"]
    assert (seam["how"], seam["tokens"], rest["how"]) == ("seam", 16, "spliced")
    assert rest["why"].endswith("recurrent state carried through")
    for extra in ((), ("--no-carry",)):
        (piece,) = [one for one in notes(*ask, *extra).json["pieces"] if one["name"] == "returns"]
        assert piece["how"] == "decoded" and piece["why"].endswith(UNTRUSTED)
