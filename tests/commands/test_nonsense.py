"""Nonsensical input: one line, the right exit status, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.commands import terminal

from .conftest import Notes, Outcome, command_line, run_apart


def test_a_question_that_is_no_text(notes: Notes) -> None:
    """Bytes that are not UTF-8, piped or as an argument: exit 2, one line."""
    outcome = notes("ask", stdin=b"\x00\xff\xfe binary")
    assert outcome.code == 2 and "the piped text is not UTF-8 text (byte 1)." in outcome.err
    done = subprocess.run(
        [*map(os.fsencode, command_line("ask")), b"\xff\xfe"], capture_output=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2 and b"not UTF-8 text" in done.stderr and done.stderr.count(b"\n") == 1


def test_a_pipe_without_an_end(notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped text, and that of a file, is read as far as any context could hold."""
    monkeypatch.setattr(terminal, "MAX_BYTES", 1 << 20)
    long = "y\n" * (1 << 19)
    (tmp_path / "long").write_text(long + "y")
    for outcome in (notes("ask", stdin=long + "y"), notes("ask", "-f", tmp_path / "long")):
        assert outcome.code == 2 and "is longer than 1 MiB" in outcome.err and outcome.err.count("\n") == 1
    assert "is longer" not in notes("ask", stdin=long).err  # one that no context holds, all the same


def test_what_is_piped_in_is_called_so(notes: Notes) -> None:
    """`-` is how it is asked for, and no name of it."""
    assert notes("compile", "-").err == "notes: standard input has no text. A skill needs something to say\n"
    assert "standard input is not UTF-8 text: invalid byte at offset 0" in notes("compile", "-", stdin=b"\xff").err
    assert "standard input: the name 'A b'" in notes("compile", "-", "--name", "A b", stdin="x").err


def test_a_target_that_is_no_file(notes: Notes, skill: Path, compiled: Path, tmp_path: Path) -> None:
    """`-o /dev/null`, `export -f returns /dev/stdout`: refused, and the target stays."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for command in (
        ("compile", skill, "-o"),
        ("compile", "-f", skill, "-o"),
        ("export", "returns"),
        ("export", "-f", "returns"),
    ):
        outcome = notes(*command, pipe)
        assert (outcome.code, outcome.out) == (1, "") and outcome.err.count("\n") == 1
        assert "regular file" in outcome.err or "is another file" in outcome.err
    assert pipe.is_fifo()


def test_a_dash_is_no_file_to_write(
    notes: Notes, skill: Path, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of that name is made where standard output may have been meant; by its path it can be."""
    monkeypatch.chdir(tmp_path)
    for command in (("compile", skill, "-o"), ("export", "returns"), ("export", "-f", "returns")):
        outcome = notes(*command, "-")
        assert (outcome.code, outcome.out) == (2, "") and outcome.err.count("\n") == 1
        assert "'-' is no file" in outcome.err and "Name a file, ./- for one of that name" in outcome.err
        assert not Path("-").exists()
        assert notes(*command, "./-").code == 0 and Path("-").is_file()
        Path("-").unlink()


def test_a_pipe_with_a_name(model: Path, tmp_path: Path) -> None:
    """The shell's <(command) is read once, like stdin, and named like it."""
    shell = 'notes() { "$PYTHON" -m notes_cli "$@"; }; '
    asked = "compile <(printf 'date: 1\n\nBe brief.')", "ask x -n 1 --json --splice <(printf 'date: 2\n\nBe kind.')"
    compiled, answer, empty = (
        subprocess.run(
            ["bash", "-c", f"{shell}notes {line}"],
            env={**os.environ, "PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        for line in (*asked, "ask x --splice <(true)")
    )
    assert compiled.returncode == 0 and Path(compiled.stdout).name.startswith("stdin.")
    assert answer.returncode == 0 and json.loads(answer.stdout)["tokens"]["total"] > 20
    assert empty.returncode == 1 and "has no text" in empty.stderr


def test_one_file_for_another(notes: Notes, model: Path, compiled: Path, tmp_path: Path) -> None:
    """A model for a text, a skill for a model, a missing projector: each error names the actual kind of file."""
    for arguments, says in (
        (("compile", model), "is a GGUF file, as models and compiled skills are, and no text"),
        (("ask", "x", "-m", compiled), "it is a compiled skill, and no model"),
        (("ask", "x", "--mmproj", tmp_path / "none.gguf"), "none.gguf: no such projector"),
        (("import", tmp_path / "none.gguf"), "none.gguf: no such file or folder"),
    ):
        outcome = notes(*arguments)
        assert outcome.code == 1 and says in outcome.err and outcome.err.count("\n") == 1


def test_several_skills_in_one_word(notes: Notes, compiled: Path) -> None:
    """As other programs take lists."""
    notes("compile", "-", "--name", "other", stdin="x")
    outcome = notes("ask", "x", "--splice", "returns,other")
    assert outcome.code == 1 and "Name each skill on its own" in outcome.err


def test_control_characters_in_a_question(notes: Notes) -> None:
    """NUL and escape characters are text like any other."""
    assert notes("ask", "-n", 2, "--json", stdin="a\0b\x1b[31m").json["tokens"]["answer"] == 2


def test_closed_standard_input(model: Path) -> None:
    """`<&-`: an argument is enough; without one it is wrong usage."""
    kept = ("session", "import", "-", "--name", "x")
    wanted = ((("ask", "-"), 2), (("ask", "Why?", "-f", "-"), 2), (("compile", "-"), 1), (kept, 2))
    asked = ((("ask", "Why?", "-n", "1"), 0), (("ask",), 2), (("rm", "x"), 1), *wanted)
    for arguments, code in asked:
        script = 'exec "$@" <&-'
        done = subprocess.run(["bash", "-c", script, "-", *command_line(*arguments)], capture_output=True, text=True)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_large_but_possible_values(notes: Notes, compiled: Path) -> None:
    """Batches larger than the context and more GPU layers than the model has are clipped."""
    big = 2**31 - 1
    outcome = notes("ask", "x", "-n", 1, "-b", big, "-ub", big, "-ngl", big, "--top-k", big, "--seam", big, "-c", 512)
    assert (outcome.code, outcome.err.splitlines()[1:]) == (0, [])  # but that the answer was cut


def test_settings_are_as_on_the_command_line(notes: Notes, home: Path) -> None:
    """YAML booleans and numbers are converted by the option."""
    home.mkdir()
    (home / "config.yaml").write_text("flash-attn: on\nthink: off\nrope-freq-base: 1e4\npredict: 2\njson: yes\n")
    assert notes("ask", "x").json["tokens"]["answer"] <= 2


def test_settings_are_called_as_their_flags(notes: Notes, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`predict: 3` is -n 3; a command's section overrides common settings; flags and variables override both."""
    home.mkdir()
    config = home / "config.yaml"
    config.write_text("predict: 3\ntop-k: 7\nask: {top-k: 9}\n")
    result = notes("ask", "x", "--json").json
    assert (result["tokens"]["answer"], result["sampling"]["top_k"]) == (3, 9)
    assert notes("ask", "x", "--json", "--predict", 2).json["tokens"]["answer"] == 2
    config.write_text("ctx-size: 256\n")
    assert notes("ask", "x" * 300).code == 1
    monkeypatch.setenv("NOTES_CTX_SIZE", "1024")
    assert notes("ask", "x" * 300, "-n", 1).code == 0


def test_a_home_that_is_a_file(notes: Notes, home: Path, skill: Path) -> None:
    """Every command fails in one line, and the file stays."""
    home.write_text("mine")
    for arguments in (("ls",), ("compile", skill), ("ask", "x"), ("rm", "-y", "x"), ("inspect", "x"), ("doctor",)):
        outcome = notes(*arguments)
        assert (outcome.code, outcome.out) == (1, "") and outcome.err.count("\n") == 1
    assert home.read_text() == "mine"


def test_what_needs_no_writing_does_not_write(
    model: Path, skill: Path, home: Path, tmp_path: Path, unprivileged: Callable[..., Outcome]
) -> None:
    """Everything read-only: compiled skills are up to date and usable, by their texts, too; another text is compiled
    for one question; sessions can be shown, exported and verified."""
    assert run_apart("compile", skill).code == 0
    assert run_apart("ask", "x", "-n", 1, "--splice", "returns", "--session", "mine").code == 0
    folders = [path for path in (home, *home.rglob("*")) if path.is_dir()]
    for lock in home.rglob("*.lock"):
        lock.unlink()
    for folder in folders:
        folder.chmod(0o500)
    try:
        again = unprivileged("compile", skill)
        assert again.code == 0 and "up to date" in again.err
        for name in ("returns", skill):
            assert unprivileged("ask", "x", "-n", 1, "--splice", name).code == 0
        skill.write_text("date: 2026-07-01")
        once = unprivileged("ask", "x", "-n", 1, "--splice", skill)
        assert once.code == 0 and f"{skill} is compiled for this question only" in once.err
        assert unprivileged("session", "show", "mine").code == 0
        out = tmp_path / "mine.notes.tar"
        assert unprivileged("session", "export", "mine", out).code == 0 and out.exists()
        verified = unprivileged("verify", "--session", "mine")
        assert verified.out and "cannot write" not in verified.err
        refused = unprivileged("ask", "x", "-n", 1, "--session", "mine")
        assert (refused.code, refused.err.count("\n")) == (1, 1) and "cannot write to" in refused.err
    finally:
        for folder in folders:
            folder.chmod(0o700)
