"""Refusals: one line on stderr, the right exit status, and an unchanged library."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli.library.container import open_segment, peek, write_segment

from .conftest import Notes, snapshot

MakeModel = Callable[..., Path]


@pytest.fixture
def refuse(notes: Notes, home: Path) -> Callable[..., str]:
    """Run, and see that it fails in one line, prints nothing on stdout and leaves the library as it was."""

    def check(*arguments: object, code: int = 1) -> str:
        before = snapshot(home / "library")
        outcome = notes(*arguments)
        assert (outcome.code, outcome.out) == (code, "")
        assert outcome.err.startswith("notes: ") and outcome.err.count("\n") == 1
        assert snapshot(home / "library") == before
        return outcome.err

    return check


Refuse = Callable[..., str]


def test_not_a_gguf(refuse: Refuse, compiled: Path, skill: Path, tmp_path: Path) -> None:
    """A text, an empty file, a folder, a truncated GGUF: each has its error, none is loaded."""
    empty, half = tmp_path / "empty.gguf", tmp_path / "half.gguf"
    empty.write_bytes(b"")
    half.write_bytes(b"GGUF" + bytes(100))
    for path, message in (
        (skill, "not a GGUF file"),
        (empty, "not a GGUF file"),
        (tmp_path, "is a folder"),
        (half, "llama.cpp cannot load this model"),
    ):
        assert message in refuse("ask", "Why?", "-m", path)
    for folder in (".", "./", "/"):  # paths without a name
        assert "is a folder" in refuse("ask", "Why?", "--splice", "returns", "-m", folder)


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
    assert notes("fsck").code != 0


@pytest.mark.parametrize("where", ["tokens", "context"])
def test_tokens_that_the_model_does_not_have(refuse: Refuse, compiled: Path, where: str) -> None:
    """A segment that claims this model and holds token ids beyond its vocabulary."""
    segment = open_segment(compiled)
    tokens = getattr(segment, where).copy()
    tokens[0] = 259
    write_segment(compiled, replace(segment, **{where: tokens}))
    for options in ((), ("--explain",), ("--field", "tier=silver")):
        error = refuse("ask", "Why?", "--splice", compiled, *options)
        assert "and tiny llama has a vocabulary of 259" in error


@pytest.mark.parametrize("by_path", [False, True])
@pytest.mark.parametrize(
    "rope",
    [
        ("--rope-freq-base", "20000"),
        ("--rope-freq-scale", "0.5"),
        ("--rope-scaling", "yarn", "--rope-freq-scale", "0.25", "--yarn-orig-ctx", "256"),
    ],
)
def test_a_segment_of_another_rope_setting(
    refuse: Refuse, notes: Notes, skill: Path, compiled: Path, rope: tuple[str, ...], by_path: bool
) -> None:
    """Rows turned by other angles do not fit; compiled with the same settings they do."""
    ask = ("ask", "Why?", "--splice", compiled if by_path else "returns", "-n", 1)
    assert "compiled with RoPE norm base 10000 scale 1, this context uses" in refuse(*ask, *rope)
    path = notes("compile", skill, *rope).out.strip()
    assert notes("ask", "Why?", "--splice", path, "-n", 1, *rope).code == 0
    assert notes(*ask).code == 0


@pytest.mark.parametrize("command", [("ask", "Why?", "-n", 1, "--splice"), ("verify",), ("inspect",)])
@pytest.mark.parametrize("damage", ["truncated", "longer", "head flipped", "tokens flipped", "rows flipped", "empty"])
def test_a_damaged_segment(refuse: Refuse, compiled: Path, damage: str, command: tuple[str, ...]) -> None:
    """A single wrong bit anywhere, a byte too few or too many: refused by name and by path."""
    data = bytearray(compiled.read_bytes())
    if damage == "truncated":
        del data[-1:]
    elif damage == "longer":
        data += b"\0"
    elif damage == "empty":
        data.clear()
    else:
        tokens = peek(compiled).tokens[:8].tobytes()
        at = {"head": data.index(b"gold"), "tokens": data.index(tokens), "rows": len(data) - 1000}
        data[at[damage.split()[0]]] ^= 4
    compiled.write_bytes(data)
    for word in ("returns", compiled):
        error = refuse(*command, word)
        if damage != "empty":
            assert str(compiled) in error and "damaged" in error and "Compile it again" in error


def test_context_too_small(notes: Notes, refuse: Refuse, compiled: Path) -> None:
    """ask and verify: tokens needed, tokens possible, and advice."""
    for command in (
        ("ask", "Why? " * 60, "--splice", "returns"),
        ("verify", "returns", "--question", "Why? " * 60),
    ):
        error = refuse(*command, "-c", 256)
        (size,) = re.findall(r"tokens do not fit 256\. Give it -c (\d+) or more", error)
        assert "context" not in notes(*command, "-c", size).err


@pytest.mark.parametrize(
    "shape",
    [
        (),
        ("--explain",),
        ("--think", "--max-think", 300),
        ("-n", 700),
        ("--choices", "yes,no", "--think"),
        ("--erratum", "date=2026-07-01", "--erratum", "The shop is closed on all days of this year. " * 20),
        ("--field", "returns.date=2026-07-01", "--method", "field"),
        ("--field", "tier=basic", "--method", "field+erratum"),
        ("--field", "tier=basic", "--method", "selective@64"),
        ("--field", "tier=basic", "--method", "recompute"),
        ("-s", "Be kind. " * 40),
        ("--session", "mine"),
        ("--recompute",),
        ("--batch", "-"),
    ],
    ids=lambda shape: " ".join(map(str, shape))[:40] or "plain",
)
def test_a_larger_context_is_right_at_once(
    notes: Notes, refuse: Refuse, compiled: Path, tmp_path: Path, shape: tuple[object, ...]
) -> None:
    """The size in the error suffices for all skills, pending computation and the whole answer."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.md").write_text(f"The {name} rule of the shop is a long one. " * 40)
        assert notes("compile", tmp_path / f"{name}.md").code == 0
    skills = ("--splice", "one", "--splice", "returns", "--splice", "two")
    lines = '"When was that?"\n"Why?"\n' if "--batch" in shape else ""
    ask = ("ask", *(() if lines else ("Why?",)), *skills, *shape)
    said = notes(*ask, "-c", 512, stdin=lines)
    assert said.code == 1 and "tokens do not fit 512" in said.err + said.out
    (size,) = set(re.findall(r"Give it -c (\d+) or more", said.err + said.out))
    found = notes(*ask, "-c", size, stdin=lines)
    assert found.code == 0 and "context" not in found.err
    assert int(size) <= 6144


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        ("-n", 500),
        ("--explain",),
        ("--place", "late"),
        ("--erratum", "date=2026-07-01"),
        ("--field", "date=2026-07-01", "--method", "suffix"),
        ("--decode", "two"),
        ("--session", "new"),
        ("--session", "mine", "--erratum", "The shop is closed today. " * 9),
    ],
    ids=lambda shape: " ".join(map(str, shape))[:40],
)
def test_a_larger_context_for_texts_is_right_at_once(
    notes: Notes, tmp_path: Path, shape: tuple[object, ...], kept: bool
) -> None:
    """For texts that are compiled for the question, or were before (`kept`): the size suffices for them, the question,
    its answer, and the session so far."""
    files = []
    for name in ("one", "two", "three"):
        files += ["--splice", path := tmp_path / f"{name}.md"]
        path.write_text("- date: 2026-06-01\n" * (name == "two") + f"The rule {name} of the shop is a long one. " * 30)
        assert not kept or notes("compile", path).code == 0
    if "mine" in shape:
        assert notes("ask", "Why? " * 40, "--session", "mine", "-n", 2).code == 0
    ask = ("ask", "Why? " * 30, *files, *shape)
    said = notes(*ask, "-c", 512)
    assert said.code == 1
    (size,) = re.findall(r"Give it -c (\d+) or more", said.err)
    found = notes(*ask, "-c", size)
    assert found.code == 0 and "the context" not in found.err and int(size) <= 6144


def test_unknown_field(notes: Notes, refuse: Refuse, compiled: Path) -> None:
    """The error lists the fields of the spliced skills."""
    error = refuse("ask", "Why?", "--splice", "returns", "--erratum", "dat=2026-07-01")
    assert "no spliced skill has a field 'dat'" in error
    named = notes("ask", "Why?", "--splice", "returns", "--erratum", "Date=2026-07-01", "-n", 1, "--json").json
    exact = notes("ask", "Why?", "--splice", "returns", "--erratum", "date=2026-07-01", "-n", 1, "--json").json
    assert named["pieces"] == exact["pieces"]
    assert "Known fields: none" in refuse("ask", "Why?", "--erratum", "date=2026-07-01")
    assert "no erratum wording 'x'" in refuse(
        *("ask", "Why?", "--splice", "returns", "--erratum", "tier=b", "--wording", "x")
    )


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
