"""Savings by splicing: on the terminal, in JSON and in the library; nothing extra in pipes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli import api
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import Prefill
from notes_cli.library.container import open_segment, peek, write_segment

from .conftest import Notes, on_a_terminal

ASK = ("ask", "Why?", "--splice", "returns", "-n", "2")
LINE = re.compile(r"\x1b\[2m(.* of prefill)\x1b\[0m")


def slowed(compiled: Path, seconds: float | None = 103.0) -> Path:
    """The segment as if its compile had taken so long."""
    segment = open_segment(compiled)
    prefill = None if seconds is None else Prefill(seconds, len(segment), 1)
    write_segment(compiled, replace(segment, prefill=prefill))
    return compiled


def test_compile_tells_its_speed(notes: Notes, skill: Path) -> None:
    """Tokens, seconds, tokens per second and bytes, as in the JSON and the file; nothing computed, no time."""
    outcome = notes("compile", skill)
    found = re.fullmatch(r"returns: 103 tokens in ([\d.]+) s \(([\d,]+) tokens/s\), (.*) kB, fields .*\n", outcome.err)
    assert found and len(outcome.err) <= 81
    path = Path(outcome.out.strip())
    prefill = peek(path).prefill
    assert prefill and (prefill.tokens, prefill.threads) == (103, 1)
    assert float(found[1]) == pytest.approx(prefill.seconds, abs=0.001)
    assert int(found[2].replace(",", "")) == pytest.approx(103 / prefill.seconds, abs=1)
    (one,) = notes("compile", skill, "--json").json["compiled"]
    assert (one["bytes"], one["ms"], one["up_to_date"]) == (path.stat().st_size, {"prefill": None}, True)
    assert notes("compile", skill).err == f"returns: 103 tokens, {found[3]} kB, fields date, tier (up to date)\n"
    (one,) = notes("compile", skill, "-f", "--json").json["compiled"]
    assert 0 < one["ms"]["prefill"] < 60_000
    (one,) = notes("inspect", "returns", "--json").json
    assert one["prefill"] == pytest.approx({"ms": 1000 * peek(path).prefill.seconds, "tokens": 103, "threads": 1})


def test_ask_ends_with_what_was_saved(compiled: Path) -> None:
    """On a terminal, dim, after the answer; the first token of a chain of thought is no measure of the wait."""
    slowed(compiled)
    shown = on_a_terminal([*ASK])
    (line,) = LINE.findall(shown)
    assert re.fullmatch(r"103 spliced, \d+ decoded; first token in [\d.]+ s, saved 1 min 43 s of prefill", line)
    assert len(line) <= 80 and shown.rstrip().endswith(f"{line}\x1b[0m")
    (line,) = LINE.findall(on_a_terminal([*ASK, "--think", "--max-think", "2", "-s", "Be brief."]))
    assert re.match(r"102( tokens)? spliced, \d+ decoded; prompt read in [\d.]+ s, saved 1 min 42 s", line)


def test_the_line_can_be_left_out(notes: Notes, compiled: Path, home: Path) -> None:
    """Not in a pipe or a document, with -q, an option, a variable or a setting; there by name. -v has it too."""
    slowed(compiled)
    assert "prefill" not in notes(*ASK).err
    assert notes(*ASK, "--gain").err.endswith("s, saved 1 min 43 s of prefill\n")
    for how in (["-q"], ["--no-gain"], ["--json"], ["--explain"]):
        assert not LINE.search(on_a_terminal([*ASK, *how])), how
    assert not LINE.search(on_a_terminal([*ASK], NOTES_ASK_GAIN="0"))
    shown = on_a_terminal([*ASK, "-v"])
    assert not LINE.search(shown) and "saved 1 min 43 s of prefill" in shown
    (home / "config.yaml").write_text("ask:\n  gain: off\n")
    assert not LINE.search(on_a_terminal([*ASK])) and LINE.search(on_a_terminal([*ASK, "--gain"]))


def test_it_is_in_the_document_and_in_python(notes: Notes, compiled: Path) -> None:
    """`ms.saved` and `Answer.saved`, by the tokens that were spliced: a second for each here."""
    slowed(compiled)
    edited = (*ASK, "--field", "date=2026-07-01", "--json", "--method")
    for method, least, most in (("suffix", -1, 60_000), ("field", 80_000, 103_000)):
        assert least < notes(*edited, method).json["ms"]["saved"] < most, method
    assert notes(*ASK, "--json").json["ms"]["saved"] == 103_000
    assert notes(*ASK, "-s", "Be brief.", "--seam", "3", "--json").json["ms"]["saved"] == 100_000
    assert notes(*ASK, "--recompute", "--json").json["ms"]["saved"] == 0
    assert notes(*ASK, "--exact", "-s", "Be brief.", "--json").json["ms"]["saved"] == 0
    lines = notes("ask", "--batch", "-", "--splice", "returns", "-n", 1, stdin='"x"\n"y"\n').out.splitlines()
    assert ['"saved": 103000.0' in line for line in lines] == [True, False]  # placed once for both
    with api.open(os.environ["NOTES_MODEL"], ContextOptions(n_ctx=1024, n_threads=1)) as model:
        assert model.ask("Why?", splice=["returns"], max_tokens=1).saved == 103
        assert model.ask("Why?", max_tokens=1).saved == 0
        with model.session("mine") as session:
            assert session.ask("Why?", splice=["returns"], max_tokens=1).saved == 103
            assert session.ask("And?", max_tokens=1).saved == 0  # it was there already
    assert notes("ask", "And?", "--session", "mine", "-n", 1, "--json").json["ms"]["saved"] is None  # from disk
    slowed(compiled, None)
    assert notes(*ASK, "--json").json["ms"]["saved"] is None


def test_ls_adds_up_what_processes_saved(notes: Notes, compiled: Path) -> None:
    """Two questions, a batch, a server's own answers alike; neither a plan nor a measurement is a gain."""
    slowed(compiled)
    assert "prefill" not in notes("ls").out
    assert [notes(*ASK).code for _ in "ab"] == [0, 0]
    assert notes("ls").out.splitlines()[3:] == ["spliced 2 times: 3 min 26 s of prefill saved"]
    expected = {"times": 2, "tokens": 206, "saved_ms": 206_000}
    assert notes("ls", "--json").json[0]["spliced"] == expected
    for arguments in ((*ASK, "--explain"), (*ASK, "--recompute"), ("verify", "returns", "--question", "Why?")):
        assert notes(*arguments).code in (0, 1)
    assert notes("ls", "--json").json[0]["spliced"] == expected
    assert notes("ask", "--batch", "-", "--splice", "returns", "-n", 1, stdin='"x"\n"y"\n').code == 0
    assert notes("ask", "x", "-n", 1, "--session", "mine", "--splice", "returns").code == 0
    assert notes("ask", "x", "-n", 1, "--session", "mine").code == 0
    assert notes("ls", "--json").json[0]["spliced"]["times"] == 4
    slowed(compiled, None)
    assert notes(*ASK).code == 0
    expected = {"times": 5, "tokens": 5 * 103, "saved_ms": 412_000}
    assert notes("ls", "--json").json[0]["spliced"] == expected
    assert notes("rm", "returns").code == 0 and notes("compile", "-", "--name", "returns", stdin="x").code == 0
    assert notes("ls", "--json").json[0]["spliced"]["times"] == 0


NAMES = (
    *("quarterly-returns-policy-for-members", "hybrid-retriever-reference", "api", "style-guide-of-the-web-team"),
    *("onboarding", "方針"),
)


@pytest.fixture
def six(notes: Notes, make_model: Callable[..., Path]) -> Callable[[], None]:
    """Skills with long names and many fields, for one model, or some of them for another."""

    def make(*kinds: str) -> None:
        for number, name in enumerate(NAMES):
            fields = enumerate(("ab", "cd", "ef", "gh", "ij", "kl"), 11)
            text = "".join(f"Window {field}: {days} days\n" for days, field in fields)
            put = ("compile", "-", "--name", name, "-m", make_model(kinds[number % len(kinds)]))
            assert notes(*put, stdin=text).code == 0

    return make


def lines_of(shown: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()]


@pytest.mark.parametrize("kinds", [("llama",), ("llama", "qwen2")])
def test_ls_fits_80_columns(
    notes: Notes, six: Callable[..., None], kinds: tuple[str, ...], tmp_path: Path, home: Path
) -> None:
    """Each name whole on a line with its state; models by name in a column where they are several, else below it."""
    six(*kinds)
    for width in (80, 100):
        lines = lines_of(on_a_terminal(["ls"], COLUMNS=str(width)))
        assert all(len(line) <= width for line in lines if line != str(home / "library"))  # a path is not broken
        for name in NAMES:
            (line,) = [line for line in lines if line.startswith(f"{name} ")]
            assert ("ready" in line) or "other model" in line
        assert all(f"tiny {kind} F32" in " ".join(lines) for kind in kinds)
        assert ("model" in lines[0].split()) != any("compiled for tiny llama F32" in line for line in lines)
    wide = lines_of(on_a_terminal(["ls", "--long"], COLUMNS="400"))
    head = "name tokens size model compiled uses used state fields text"
    assert wide[0].split() == head.split() and "Window kl=16 days" in wide[1]
    cut = lines_of(on_a_terminal(["ls"], COLUMNS="160"))[1]
    assert re.search(r"(ready|other model) +Window ab=11 days, (Window \w\w=\d\d days, )*…$", cut)
    long = lines_of(on_a_terminal(["ls", "--long"], COLUMNS="80"))
    assert "uses" in long[0] and "text of api: standard input" in long
