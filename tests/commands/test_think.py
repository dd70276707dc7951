"""`notes ask --think`: the answer alone on stdout, the reasoning on stderr or in the JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli.engine.model import Model
from notes_cli.runtime import generate

from ..thinkers import HARMONY, OPENED, SWITCH, UNAWARE, Scripted
from .conftest import Notes, run_here

Script = Callable[..., None]
CHAIN = "The date is {}. So the return is {}."
ACCEPTED, REFUSED = CHAIN.format("2026-05-01", "accepted"), CHAIN.format("2026-07-01", "refused")


@pytest.fixture
def thinker(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Script]:
    """`thinker(template)(text)`: a model with that template is the default one, and is going to write that text."""

    def make(template: str) -> Script:
        path = make_model("llama", template=template)
        monkeypatch.setenv("NOTES_MODEL", str(path))

        def script(text: str, interrupted: bool = False) -> None:
            with Model(path) as model:
                monkeypatch.setattr(generate, "Sampler", Scripted(model, text, interrupted))

        return script

    return make


@pytest.fixture
def returns() -> Notes:
    """`notes` with the model that ships and its sample skill."""
    outcome = run_here("compile", SAMPLES / "returns")
    assert outcome.code == 0, outcome.err
    return run_here


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (SWITCH, "Hm.\n</think>4"),
        (OPENED, "Hm.\n</think>4"),
        (UNAWARE, "Hm.</think>4"),
        (HARMONY, "Hm.<|end|>4"),
    ],
)
@pytest.mark.parametrize("stream", [(), ("--no-stream",)], ids=len)
def test_reasoning_goes_to_stderr(
    thinker: Callable[[str], Script], template: str, text: str, stream: tuple[str, ...]
) -> None:
    """Without marks and colours, on lines of its own; stdout has the answer and a newline."""
    thinker(template)(text)
    outcome = run_here("ask", "2+2?", "--think", *stream)
    assert (outcome.code, outcome.out) == (0, "4\n")
    assert outcome.err.strip() == "Hm." and outcome.err.endswith("\n")


def test_the_json_has_all_of_it(thinker: Callable[[str], Script]) -> None:
    """Reasoning, whether it is complete, its tokens; counts add up to the pieces."""
    script = thinker(SWITCH)
    for limit, reasoning, whole in ((50, "Hm.", True), (2, "Hm", False), (0, "", False)):
        script("Hm.</think>4" if whole else reasoning + "4")
        outcome = run_here("ask", "2+2?", "--think", "--max-think", limit, "--json")
        found = outcome.json
        cut = "the reasoning was cut after 2 tokens. Let it have more: --max-think 4\n"
        assert outcome.err == (cut if limit == 2 else "") and found["answer"] == "4"
        assert (found["thought_stopped"], found["stopped"]) == ("end" if whole else "length", "end")
        assert (found["reasoning"], found["thought_whole"]) == (reasoning, whole)
        tokens = found["tokens"]
        assert tokens["reasoning"] == len(reasoning + "</think>\n\n") and tokens["answer"] == 1
        assert sum(piece["tokens"] for piece in found["pieces"]) == (
            tokens["total"] + tokens["reasoning"] + tokens["answer"]
        )


def test_reasoning_that_nobody_asked_for_is_hidden(thinker: Callable[[str], Script]) -> None:
    """It is neither on stdout nor on stderr; the JSON has it."""
    script = thinker(UNAWARE)
    script("<think>\nHm.</think>4")
    outcome = run_here("ask", "2+2?")
    assert (outcome.out, outcome.err) == ("4\n", "")
    script("<think>\nHm.</think>4")
    assert run_here("ask", "2+2?", "--json").json["reasoning"] == "Hm."


def test_an_interrupt_ends_both_lines(thinker: Callable[[str], Script]) -> None:
    """Partial text ends its line, on its stream; the status is that of an interrupt."""
    script = thinker(SWITCH)
    for text, out, err in (("Hm", "", "Hm\n"), ("Hm.</think>4", "4\n", "Hm.\n")):
        script(text, interrupted=True)
        outcome = run_here("ask", "2+2?", "--think")
        assert (outcome.code, outcome.out) == (130, out)
        assert outcome.err.startswith(err) and outcome.err.endswith("\nnotes: interrupted\n")


def test_a_session_remembers_its_reasoning(returns: Notes) -> None:
    """The chain is in the sequence as the model wrote it, is shown by the ledger, and the next turn follows it."""
    ask = ("ask", "May I return this?", "--session", "mine")
    assert returns(*ask, "--splice", "returns", "--think").out == "accepted\n"
    assert returns(*ask, "--erratum", "date=2026-07-01", "--think", "--choices", "accepted,refused").out == "refused\n"
    assert returns(*ask, "-n", 8).code == 0
    pieces = returns("session", "show", "mine", "--json").json["pieces"]
    answers = [piece for piece in pieces if piece["kind"] == "answer"]
    assert [piece["text"] for piece in answers[:2]] == [ACCEPTED, REFUSED]
    assert [piece["why"] for piece in answers] == ["chain of thought", "chain of thought", ""]
    assert sum("Think first." in piece["text"] for piece in pieces) == 2
    assert returns("session", "undo", "mine").code == 0
    total = returns("session", "show", "mine", "--json").json["tokens"]
    assert total == sum(piece["tokens"] for piece in pieces[:-2])


def test_no_blanks_at_the_end(thinker: Callable[[str], Script]) -> None:
    """Streamed or not, reasoning and answer end with one newline, whatever blanks the model generates."""
    script = thinker(SWITCH)
    for stream in ((), ("--no-stream",)):
        script("Hm. \n\nSo 4.\n \n</think>\n4 \n\n5\n\n ")
        outcome = run_here("ask", "2+2?", "--think", *stream)
        assert (outcome.out, outcome.err) == ("4 \n\n5\n", "Hm. \n\nSo 4.\n")
