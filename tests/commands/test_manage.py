"""`notes ls`, `rm`, `inspect` and `doctor`: looking at the library, and taking things out of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from notes_cli.engine.model import Model

from .conftest import TEXT, Notes, run_here, snapshot


def test_ls_shows_name_size_model_and_fields(notes: Notes, compiled: Path) -> None:
    """One line per segment and a total."""
    lines = notes("ls").out.splitlines()
    assert lines[1].split()[:2] == ["returns", str(len(TEXT.strip()))]
    assert "tiny llama F32" in lines[1] and "date=2026-06-01, tier=gold" in lines[1]
    assert lines[-1].startswith("1 file, ")


def test_rm_removes_all_files_of_a_name(
    notes: Notes, skill: Path, compiled: Path, make_model: Callable[..., Path]
) -> None:
    """-y removes without asking, for all models, prints the paths, and leaves the text and other skills."""
    other = notes("compile", skill, "-m", make_model("qwen2")).out.strip()
    kept = Path(notes("compile", skill, "--name", "kept").out.strip())
    outcome = notes("rm", "-y", "returns")
    assert outcome.code == 0
    assert set(outcome.out.splitlines()) == {str(compiled), other}
    assert not compiled.exists() and not Path(other).exists() and kept.exists() and skill.exists()


def test_rm_of_an_unknown_name_removes_nothing(notes: Notes, compiled: Path, home: Path) -> None:
    """A typing error among several names: exit 1, all stay."""
    before = snapshot(home)
    outcome = notes("rm", "-y", "returns", "retruns")
    assert outcome.code == 1 and "'retruns'" in outcome.err and outcome.err.count("\n") == 1
    assert snapshot(home) == before


def test_rm_dry_run(notes: Notes, compiled: Path) -> None:
    """--dry-run lists files and removes nothing, without asking."""
    outcome = notes("rm", "--dry-run", "returns")
    assert (outcome.code, outcome.out) == (0, f"{compiled}\n") and compiled.exists()


def test_rm_removes_a_broken_file(notes: Notes, compiled: Path) -> None:
    """A damaged segment can be removed."""
    compiled.write_bytes(b"GGUF")
    assert notes("rm", "-y", "returns").code == 0
    assert not compiled.exists()


def test_inspect_text_and_tokens(notes: Notes, compiled: Path, model: Path) -> None:
    """--text is the text as compiled, --tokens its ids one a line; both alone on stdout, by name or by path."""
    with Model(model) as loaded:
        ids = [int(token) for token in loaded.tokenize(TEXT.strip())]
    for word in ("returns", compiled):
        assert notes("inspect", word, "--text").out == TEXT.strip() + "\n"
        assert [int(line) for line in notes("inspect", word, "--tokens").out.splitlines()] == ids


def test_inspect_json_is_an_array(notes: Notes, skill: Path, compiled: Path, make_model: Callable[..., Path]) -> None:
    """One object a file of that name; spans point at the values."""
    assert notes("compile", skill, "-m", make_model("qwen2")).code == 0
    both = notes("inspect", "returns", "--json").json
    assert sorted(entry["identity"]["architecture"] for entry in both) == ["llama", "qwen2"]
    for field in both[0]["fields"]:
        first, last = field["characters"]
        assert both[0]["text"][first:last] == field["value"]


def test_doctor_finds_everything(notes: Notes, model: Path, home: Path) -> None:
    """Exit 0; versions, native library, devices, the model of NOTES_MODEL with its operations, and folders."""
    outcome = notes("doctor")
    assert (outcome.code, outcome.err) == (0, "")
    for part in ("native library", "llama-cpp-python", "CPU", str(model), "splice, rewrite, append, read", str(home)):
        assert part in outcome.out
    assert notes("doctor", "--json").json["problems"] == []
    assert not home.exists()


def test_doctor_says_who_can_write(notes: Notes, compiled: Path) -> None:
    """A folder that is not ours alone is a problem, with the command that mends it."""
    compiled.parent.chmod(0o777)
    outcome = notes("doctor")
    assert outcome.code == 1 and f"chmod 700 {compiled.parent}" in outcome.out.splitlines()[-1]
    for arguments in (
        ("ls",),
        ("ask", "x", "--splice", "returns", "-q"),
        ("compile", "-", "--name", "x"),
        ("rm", "returns"),
    ):
        refused = notes(*arguments, stdin="x")
        assert (refused.code, refused.out, refused.err.count("\n")) == (1, "", 1) and "chmod 700" in refused.err
    compiled.parent.chmod(0o700)
    assert notes("doctor").code == 0


def test_doctor_says_what_is_missing(notes: Notes, tmp_path: Path) -> None:
    """A model that is not there: exit 1, the problem last, the rest still shown."""
    outcome = notes("doctor", "-m", tmp_path / "no.gguf")
    assert outcome.code == 1 and "llama-cpp-python" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("PROBLEM") and "no such model" in outcome.out
    found = json.loads(run_here("doctor", "-m", tmp_path / "no.gguf", "--json").out)
    assert "no such model" in found["problems"][0] and "model" not in found


def test_doctor_says_what_a_model_cannot_do(notes: Notes, make_model: Callable[..., Path]) -> None:
    """An architecture whose rows cannot be moved is shown with the reason; that is no fault of the installation."""
    outcome = notes("doctor", "-m", make_model("llama-embed"))
    assert outcome.code == 0
    assert "no splice" in outcome.out and "keeps no K/V cache" in outcome.out
