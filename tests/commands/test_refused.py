"""Refusals and nonsensical input: one line on stderr, the right exit status, and an unchanged library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli.commands import terminal
from notes_cli.engine import limits
from notes_cli.library.container import open_segment, peek, write_segment

from .conftest import Notes, Outcome, snapshot
from .test_messages import kept

MakeModel = Callable[..., Path]


@pytest.fixture
def refuse(notes: Notes, home: Path) -> Callable[..., str]:
    """Run, and see that it fails in one line, prints nothing on stdout and leaves the library as it was."""

    def check(*arguments: object, code: int = 1) -> str:
        before = snapshot(home / "library")
        refusal = notes(*arguments).refusal(code)
        assert refusal.startswith("notes: ") and snapshot(home / "library") == before
        return refusal

    return check


Refuse = Callable[..., str]


def test_a_file_of_the_library_with_another_skill(refuse: Refuse, notes: Notes, compiled: Path, tmp_path: Path) -> None:
    """A segment under a wrong name is never spliced, and is listed with the problem."""
    (tmp_path / "fees.txt").write_text("fee: 12\n\nThe fee is due at once.")
    assert notes("compile", tmp_path / "fees.txt").code == 0
    path = compiled
    (other,) = (one for one in compiled.parent.glob("*.gguf") if one.name.startswith("fees."))
    shutil.copyfile(other, path)
    for command in (("ask", "Why?", "--splice", "returns"), ("compile", "returns")):
        assert f"{path} holds fees, and is not returns" in refuse(*command)
    assert "holds fees" in notes("ls").out + notes("ls").err
    assert "holds fees" in notes("doctor").out


def test_tokens_that_the_model_does_not_have(refuse: Refuse, compiled: Path) -> None:
    """A segment that claims this model and holds token ids beyond its vocabulary."""
    segment = open_segment(compiled)
    for where in ("tokens", "context"):
        tokens = getattr(segment, where).copy()
        tokens[0] = 259
        write_segment(compiled, replace(segment, **{where: tokens}))
        for options in ((), ("--explain",), ("--field", "tier=silver")):
            assert "has a vocabulary of 259" in refuse("ask", "Why?", "--splice", compiled, *options)


def test_a_damaged_segment(refuse: Refuse, compiled: Path) -> None:
    """A wrong bit in its head, its tokens or its rows: refused by name and by path. (Any byte: tests/library.)"""
    sound = compiled.read_bytes()
    for at in (sound.index(b"gold"), sound.index(peek(compiled).tokens[:8].tobytes()), len(sound) - 1000):
        compiled.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        for command in (("ask", "Why?", "--splice", "returns"), ("verify", compiled), ("inspect", "returns")):
            error = refuse(*command)
            assert str(compiled) in error and "damaged" in error and "Compile it again" in error


SHAPES: list[tuple[object, ...]] = [
    ("-n", 500),
    ("--explain",),
    ("--think", "--max-think", 200, "-n", 100),
    ("--choices", "yes,no", "--think"),
    ("--erratum", "date=2026-07-01", "--erratum", "The shop is closed on all days of this year. " * 9),
    ("--field", "two.date=2026-07-01", "--method", "field"),
    ("--field", "tier=basic", "--method", "field+erratum"),
    ("--field", "tier=basic", "--method", "suffix"),
    ("--field", "tier=basic", "--method", "recompute"),
    ("-s", "Be kind. " * 40),
    ("--place", "late"),
    ("--decode", "two"),
    ("--recompute",),
    ("--session", "new"),
    ("--session", "mine", "--erratum", "The shop is closed today. " * 9),
    ("--batch", "-"),
]


@pytest.mark.parametrize("by", ["name", "text", "compiled text"])
def test_a_larger_context_is_right_at_once(notes: Notes, tmp_path: Path, by: str) -> None:
    """The size in the error suffices for all skills, pending computation, the answer, and the session so far."""
    texts, skills = [tmp_path / f"{name}.md" for name in ("one", "two", "three")], []
    for path in texts:
        fields = "- date: 2026-06-01\n- tier: gold\n" * (path.stem == "two")
        path.write_text(f"{fields}The rule {path.stem} of the shop is a long one. " * (1 if fields else 8))
        skills += ["--splice", path.stem if by == "name" else path]
    assert by == "text" or notes("compile", *texts).code == 0
    assert notes("ask", "Why? " * 20, "--session", "mine", "-n", 2).code == 0
    # a text is compiled first, whatever is asked with it
    for shape in SHAPES if by == "name" else [SHAPES[number] for number in (0, 4, 5)]:
        lines = '"When was that?"\n"Why?"\n' if "--batch" in shape else ""
        few = (*(() if "-n" in shape or "--explain" in shape else ("-n", 40)), *shape)
        ask = ("ask", *(() if lines else ("Why? " * 30,)), *skills, *few)
        refused = notes(*ask, "-c", 512, stdin=lines)
        assert refused.code == 1, shape
        (size,) = set(re.findall(r"Give it -c (\d+) or more", refused.err + refused.out))
        found = notes(*ask, "-c", size, stdin=lines)
        assert found.code == 0 and "the context" not in found.err and int(size) <= 3072, shape
        assert by != "text" or notes("rm", *(path.stem for path in texts)).code == 0


def test_an_architecture_that_cannot_be_spliced(
    refuse: Refuse, notes: Notes, compiled: Path, skill: Path, make_model: MakeModel, home: Path
) -> None:
    """compile, ask and --explain give the reason; asking without a skill works."""
    model = make_model("llama-embed")
    for command in (
        ("compile", skill),
        ("ask", "Why?", "--splice", skill),
        ("ask", "Why?", "--splice", skill, "--explain"),
        ("ask", "Why?", "--splice", "returns"),
        ("verify", "returns"),
    ):
        assert "keeps no K/V cache" in refuse(*command, "-m", model)
    assert notes("ask", "Why?", "-n", 2, "-m", model).out.strip()


TRAINED = 512


@pytest.fixture
def short(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    path = make_model("llama", trained=TRAINED)
    monkeypatch.setenv("NOTES_MODEL", str(path))
    return path


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    """A skill of more tokens than that, with a field."""
    path = tmp_path / "manual.txt"
    path.write_text("date: 2026-06-01\n" + "Be kind to all.\n" * 40)
    return path


def test_beyond_the_trained_context(notes: Notes, short: Path, skill: Path, manual: Path, home: Path) -> None:
    """compile, ask, a later turn and verify: each error has the length and advice."""
    assert notes("compile", skill).code == 0
    assert notes("ask", "Why?", "--splice", "returns", "--session", "mine", "-n", 2).code == 0
    before = kept(home)
    long = "Why? " * 120
    for arguments in (
        ("compile", manual),
        ("compile", manual, "--blocks", 4),
        ("ask", "Why?", "--splice", manual),
        ("ask", long, "--splice", "returns", "--explain"),
        ("ask", long, "--think"),
        ("ask", long, "--session", "mine"),
        ("ask", long, "--session", "other"),
        ("verify", "returns", "--question", long, "--field", "tier=b"),
        ("verify", "--session", "mine", "--question", long),
        ("compile", skill, "-f", "-c", TRAINED + 1),
    ):
        refusal = notes(*arguments).refusal()
        assert "but tiny llama was trained for 512" in refusal and "--beyond-trained" in refusal, arguments
    assert kept(home) == before


def test_what_the_line_suggests_works(notes: Notes, short: Path, manual: Path, home: Path) -> None:
    """RoPE scaling by the factor that it names, the flag, and the flag as a setting."""
    refused = notes("compile", manual)
    scaling = refused.err.split("extend that (")[1].split(")")[0].split()
    assert notes("compile", manual, *scaling).code == 0
    assert notes("ask", "Why?", "--splice", "manual", "-n", 2, *scaling).code == 0
    assert notes("compile", manual, "--beyond-trained").code == 0
    (home / "config.yaml").write_text("beyond-trained: true\n")
    assert notes("ask", "Why?", "--splice", "manual", "-n", 2).code == 0


def test_more_than_memory(notes: Notes, model: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before allocation, with needed and available memory and advice. -v prints the estimate."""
    assert "a context of 4,096 tokens: " in notes("ask", "Why?", "-n", 1, "-v").err
    assert "of K/V" in notes("doctor", "--json").json["context"]
    monkeypatch.setattr(limits, "available_memory", lambda: 3_000_000)
    for arguments in (("ask", "Why?"), ("ask", "Why?", "--splice", "returns"), ("verify", "returns", "-c", 8000)):
        refusal = notes(*arguments).refusal()
        assert "tokens needs about" in refusal and "3.0 MB of memory is available" in refusal


def test_a_question_that_is_no_text(notes: Notes) -> None:
    """Bytes that are not UTF-8, piped or as an argument: exit 2, one line. Control characters are text."""
    assert "not UTF-8 text (byte 1)." in notes("ask", stdin=b"\x00\xff\xfe binary").refusal(2)
    assert notes("ask", "-n", 2, "--json", stdin="a\0b\x1b[31m").json["tokens"]["answer"] == 2
    assert "not UTF-8 text" in notes("ask", os.fsdecode(b"\xff\xfe")).refusal(2)


def test_a_pipe_without_an_end(notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped text, and that of a file, is read as far as any context could hold."""
    monkeypatch.setattr(terminal, "MAX_BYTES", 1 << 16)
    long = "y\n" * (1 << 15)
    (tmp_path / "long").write_text(long + "y")
    for outcome in (notes("ask", stdin=long + "y"), notes("ask", "-f", tmp_path / "long")):
        assert "is longer than" in outcome.refusal(2)
    assert "is longer" not in notes("ask", stdin=long).err  # one that no context holds, all the same


def test_what_is_piped_in_is_called_so(notes: Notes) -> None:
    """`-` is how it is asked for, and no name of it."""
    assert "standard input has no text" in notes("compile", "-").err
    assert "standard input is not UTF-8 text" in notes("compile", "-", stdin=b"\xff").err
    assert "standard input: the name 'A b'" in notes("compile", "-", "--name", "A b", stdin="x").err


def test_a_target_that_is_no_file(
    notes: Notes, skill: Path, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-o /dev/null`, `export -f returns -`: refused, the target stays, and no file of that name is made."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for command in (
        ("compile", skill, "-o"),
        ("compile", "-f", skill, "-o"),
        ("export", "returns"),
        ("export", "-f", "returns"),
    ):
        refusal = notes(*command, "pipe").refusal()
        assert "regular file" in refusal or "is another file" in refusal
        assert "'-' is no file" in notes(*command, "-").refusal(2) and not Path("-").exists()
        assert notes(*command, "./-").code == 0 and Path("-").is_file()
        Path("-").unlink()
    assert Path("pipe").is_fifo()


def test_a_pipe_with_a_name(notes: Notes) -> None:
    """The shell's <(command) is read once, like stdin, and named like it."""

    def piped(text: str, *arguments: object) -> Outcome:
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        try:
            return notes(*arguments, f"/dev/fd/{reading}")
        finally:
            os.close(reading)

    assert Path(piped("date: 1\n\nBe brief.", "compile").out).name.startswith("stdin.")
    ask = ("ask", "x", "-n", 1, "--json", "--splice")
    assert piped("date: 2\n\nBe kind.", *ask).json["tokens"]["total"] > 20
    assert "has no text" in piped("", "ask", "x", "--splice").err


def test_one_file_for_another(notes: Notes, model: Path, compiled: Path, tmp_path: Path) -> None:
    """A model for a text, a skill for a model, a missing projector: each error names the actual kind of file."""
    for arguments, says in (
        (("compile", model), "is a GGUF file, as models and compiled skills are, and no text"),
        (("ask", "x", "-m", compiled), "it is a compiled skill, and no model"),
        (("ask", "x", "--mmproj", tmp_path / "none.gguf"), "none.gguf: no such projector"),
    ):
        assert says in notes(*arguments).refusal()


@pytest.mark.process
def test_closed_standard_input(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`<&-`: an argument is enough; without one it is wrong usage."""
    kept = ("session", "import", "-", "--name", "x")
    wanted = ((("ask", "-"), 2), (("ask", "Why?", "-f", "-"), 2), (("compile", "-"), 1), (kept, 2))
    asked = ((("ask", "Why?", "-n", "1"), 0), (("ask",), 2), (("rm", "x"), 1), *wanted)
    script = (
        f"import json, sys; from notes_cli.cli import run; statuses = [run(one) for one in {[a for a, _ in asked]}]"
    )
    script += "; print(statuses, file=sys.stderr)"
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "-", sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1] == str([code for _, code in asked]) and "Traceback" not in done.stderr


def test_large_but_possible_values(notes: Notes, compiled: Path) -> None:
    """Batches larger than the context and more GPU layers than the model has are clipped."""
    big = 2**31 - 1
    outcome = notes("ask", "x", "-n", 1, "-ub", big, "-ngl", big, "--top-k", big, "--seam", big, "-c", 512)
    assert (outcome.code, outcome.err.splitlines()[1:]) == (0, [])  # but that the answer was cut


def test_a_home_that_is_a_file(notes: Notes, home: Path, skill: Path) -> None:
    """Every command fails in one line, and the file stays."""
    home.write_text("mine")
    for arguments in (("ls",), ("compile", skill), ("ask", "x"), ("rm", "-y", "x"), ("inspect", "x"), ("doctor",)):
        notes(*arguments).refusal()
    assert home.read_text() == "mine"


def test_what_needs_no_writing_does_not_write(
    notes: Notes, compiled: Path, skill: Path, home: Path, tmp_path: Path, unprivileged: Notes
) -> None:
    """Compiled skills are usable; another text is compiled for one question; sessions can be shown and exported."""
    assert notes("ask", "x", "-n", 1, "--splice", "returns", "--session", "mine").code == 0
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
        assert "cannot write to" in unprivileged("ask", "x", "-n", 1, "--session", "mine").refusal()
    finally:
        for folder in folders:
            folder.chmod(0o700)


KEPT = ("ask", "Why?", "--splice", "returns", "--choices", "a,b", "--json")


@pytest.fixture
def wide(notes: Notes, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Notes:
    """With a model of 32 elements a head: that many are quantized together."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model("qwen3")))
    return notes


def test_quantized_v_without_flash_attention(wide: Notes, skill: Path, compiled: Path, model: Path) -> None:
    """A usage error with advice, as llama.cpp has no such cache; K alone may be quantized, by heads that are large."""
    for command in (KEPT, ("compile", skill), ("verify", "returns")):
        refused = wide(*command, "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "off")
        assert refused.code == 2 and "-ctv q8_0 needs flash attention" in refused.err
        assert refused.out == "" or refused.json["error"]["status"] == 2
    assert wide(*KEPT, "-ctk", "q8_0", "-fa", "off").json["tokens"]["spliced"] > 0
    assert "q4_0 with block size 32 does not divide" in wide("ask", "Why?", "-ctk", "q4_0", "-m", model).refusal()


def test_what_is_kept_so_stays_so(wide: Notes, skill: Path, tmp_path: Path) -> None:
    """By name, with --stale, after an export and an import; a text without the flag is kept as computed."""
    wide("compile", skill, "--kv", "q8_0")
    skill.write_text(skill.read_text() + "\nOne more rule.\n")
    assert wide("compile", "--stale", "--json").json["compiled"][0]["kv"] == "q8_0"
    skill.write_text(skill.read_text() + "\nAnd another.\n")
    by_name = wide("compile", "returns", "--json").json["compiled"][0]
    assert by_name["kv"] == "q8_0" and by_name["decoded"] == by_name["tokens"]
    assert wide("compile", "--from", "returns", "-f", "--json").json["compiled"][0]["kv"] == "q8_0"
    assert wide("export", "returns", tmp_path / "out.gguf").code == 0
    assert wide("rm", "returns").code == 0
    assert wide("import", tmp_path / "out.gguf").code == 0
    assert wide("ls", "--json").json[0]["kv"] == "q8_0"
    again = wide("compile", skill, "--json").json["compiled"][0]
    assert again["kv"] == "f16" and again["reasons"] == ["its rows are kept as q8_0, not as f16"]
