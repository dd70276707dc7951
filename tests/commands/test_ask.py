"""`notes ask`: sources of the question, skills, new values, constraints, reasoning, and the JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from samples import SAMPLES

from notes_cli.config import shipped_model
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.runtime import generate
from notes_cli.runtime.workspace import Workspace

from ..thinkers import HARMONY, OPENED, SWITCH, UNAWARE, Scripted
from .conftest import Notes, run_here, snapshot


def test_where_the_question_comes_from(notes: Notes, tmp_path: Path) -> None:
    """Piped text, that of -f, then QUESTION or -p, with an empty line between; each alone; - is read once. A note says
    that piped text precedes a question."""
    text = tmp_path / "über.txt"
    text.write_text("A text.\n", encoding="utf-8-sig")

    def asked(*sources: object, stdin: str = "") -> tuple[object, bool]:
        found = notes("ask", *sources, "-n", 1, "--json", stdin=stdin)
        assert found.code == 0, found.err
        note = "characters of standard input precede the question; in a loop use </dev/null\n" in found.err
        return (found.json["answer"], found.json["tokens"]), note

    for sources, stdin, question, note in (
        *(((), "Why?\n", "Why?", False), (("-p", "Why?"), "", "Why?", False), (("-f", text), "", "A text.", False)),
        *((words, "Why?", "Why?", False) for words in (("-",), ("-p", "-"), ("-f", "-"), ("-f", "-", "-"))),
        *((words, "Piped.\n", "Piped.\n\nWhy?", True) for words in (("Why?",), ("-p", "Why?"))),
        *((("Why?", *more), "Piped.", "Piped.\n\nWhy?", False) for more in (("-q",), ("-f", "-"))),
        (("-f", text, "-p", "Why?"), "Piped.", "Piped.\n\nA text.\n\nWhy?", True),
    ):
        assert asked(*sources, stdin=stdin) == (asked(question)[0], note), sources
    assert asked("Piped.\n\nWhy?")[0] != asked("Why?")[0]


def test_the_defaults_of_the_model_hold(notes: Notes, compiled: Path, model: Path, home: Path) -> None:
    """Method, wording, seam and place of config.yaml hold where the user names none; another model has its own."""
    with Workspace(model, ContextOptions(n_ctx=256)) as workspace:
        name = workspace.name
    (home / "config.yaml").write_text(
        f"defaults:\n  {name}: {{method: recompute, wording: line, seam: 3, place: late}}\n  other Q8_0: {{seam: 9}}\n"
    )
    ask = ("ask", "Why?", "--splice", "returns", "-s", "Be kind.", "--field", "date=2026-07-01", "-n", 1, "--json")
    found = notes(*ask).json
    assert (found["method"], found["wording"], found["seam"], found["place"]) == ("recompute", "line", 3, "late")
    assert "recompute: the default of this model in config.yaml" in found["method_why"]
    assert found["tokens"]["spliced"] == 0
    said = notes(*ask[:6], "--erratum", "date=2026-07-01", "--json", "-n", 1).json
    assert (said["tokens"]["seam"], said["tokens"]["erratum"]) == (3, len("\n\nCorrection. date: 2026-07-01"))
    assert said["method"] == "field+erratum" and "an erratum was asked for" in said["method_why"]
    mine = notes(*ask, "--method", "stale", "--seam", 0, "--place", "early", "--wording", "now").json
    assert (mine["method"], mine["wording"], mine["seam"], mine["place"]) == ("stale", "now", 0, "early")
    shown = notes(*ask[:-1], "--explain").out.splitlines()
    assert shown[-1].startswith("method recompute: the default of this model")


def test_a_model_without_a_chat_template_is_reported(notes: Notes, make_model: Callable[..., Path]) -> None:
    """Without its template an instruct model answers badly, so `ask` and `doctor` report that there is none."""
    model = make_model("llama", template=None)
    for words in (("ask", "Why?", "-n", 1), ("ask", "Why?", "--explain")):
        assert f"{model.name} has no chat template: it is asked as Question" in notes(*words, "-m", model).err
        assert "template" not in notes(*words).err
    assert "chat template      none: it is asked as Question" in notes("doctor", "-m", model).out
    assert "chat template" not in notes("doctor").out


def test_explain_computes_nothing(
    notes: Notes, compiled: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--explain decodes, splices and compiles nothing; stderr notes a text that would be compiled first."""
    (tmp_path / "fees.txt").write_text("fee: 12")
    ask = ("ask", "Why?", "--splice", "returns", "--splice", tmp_path / "fees.txt", "--json", "-n", 1)
    before = snapshot(home / "library")
    with monkeypatch.context() as patch:
        for name in ("append", "splice", "read"):
            patch.delattr(Context, name)
        planned = notes(*ask, "--explain")
    assert planned.code == 0 and "would be compiled first, as fees" in planned.err
    assert snapshot(home / "library") == before
    done = notes(*ask).json
    assert planned.json["pieces"] == done["pieces"][:-1]


def test_a_seed_reproduces(notes: Notes) -> None:
    """The same seed gives the same text, another one another; without one the JSON shows which was drawn."""
    ask = ("ask", "Why?", "-n", 20, "--temp", 9, "--top-k", 0, "--top-p", 1, "--min-p", 0, "--json")
    first = notes(*ask, "--seed", 5).json
    assert first["answer"] == notes(*ask, "--seed", 5).json["answer"] != notes(*ask, "--seed", 6).json["answer"]
    assert first["sampling"]["seed"] == 5
    drawn = notes(*ask).json
    assert notes(*ask, "--seed", drawn["sampling"]["seed"]).json["answer"] == drawn["answer"]


def test_an_answer_that_was_cut_is_flagged(
    notes: Notes, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By -n, -c or the trained length: a line with advice, and in the JSON; complete answers and choices are not."""
    for form in (("-n", -1), ("--n-predict", "-1"), ("--predict=-1",)):  # no limit
        assert notes("ask", "Why?", "-c", 300, *form, "--json").json["stopped"] in ("end", "context")
    limited = notes("ask", "Why?", "-n", 3, "--json")
    assert limited.json["stopped"] == "length" and limited.err.endswith("Let it have more: -n 6\n")
    full = notes("ask", "Why? " * 40, "-n", 500, "-c", 256, "--json")
    assert full.json["stopped"] == "context" and full.code == 0
    assert full.err.endswith("give it more: -c 768\n")
    monkeypatch.setenv("NOTES_MODEL", str(make_model(trained=512)))
    end = notes("ask", "Why? " * 90, "-n", 500, "--json")
    assert end.json["stopped"] == "context" and "trained for no more (--beyond-trained)" in end.err
    chosen = notes("ask", "Why?", "--choices", "a,b", "--json")
    assert (chosen.json["stopped"], chosen.err) == (None, "")
    monkeypatch.delenv("NOTES_MODEL")
    done = notes("ask", "May I return this?", "--splice", SAMPLES / "returns", "--json")
    assert done.json["stopped"] == "end" and "cut" not in done.err


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
}


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that ships, in place of the random one."""
    monkeypatch.setenv("NOTES_MODEL", str(shipped_model()))


def test_json_that_is_valid(notes: Notes, tmp_path: Path, shipped: None) -> None:
    """A file or the schema itself; greedy, drawn, and the same with the same seed."""
    path = tmp_path / "answer.schema.json"
    path.write_text(json.dumps(SCHEMA))
    ask = ("ask", "Who?", "-n", 120)
    found = [notes(*ask, "--json-schema", path), notes(*ask, "-j", json.dumps(SCHEMA))]
    drawn = [notes(*ask, "-j", path, "--temp", 1, "--seed", seed) for seed in (1, 1)]
    for outcome in (*found, *drawn):
        assert outcome.code == 0, outcome.err
        jsonschema.validate(json.loads(outcome.out), SCHEMA)
        assert "cut" not in outcome.err
    assert found[0].out == found[1].out and drawn[0].out == drawn[1].out


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


BLANKS = "Hm. \n\nSo 4.\n \n</think>\n4 \n\n5\n\n "


@pytest.mark.parametrize(
    ("template", "text", "out", "err"),
    [
        (SWITCH, "Hm.\n</think>4", "4\n", "Hm.\n"),
        (OPENED, "Hm.\n</think>4", "4\n", "Hm.\n"),
        (UNAWARE, "Hm.</think>4", "4\n", "Hm.\n"),
        (HARMONY, "Hm.<|end|>4", "4\n", "Hm.\n"),
        (SWITCH, BLANKS, "4 \n\n5\n", "Hm. \n\nSo 4.\n"),
    ],
    ids=[*"12345"],
)
def test_reasoning_goes_to_stderr(
    thinker: Callable[[str], Script], template: str, text: str, out: str, err: str
) -> None:
    """Without marks and colours, on lines of its own, streamed or not; both end with one newline, whatever blanks the
    model generates."""
    script = thinker(template)
    for stream in ((), ("--no-stream",)):
        script(text)
        outcome = run_here("ask", "2+2?", "--think", *stream)
        assert (outcome.code, outcome.out, outcome.err.lstrip()) == (0, out, err)


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


def test_an_interrupt_ends_both_lines(thinker: Callable[[str], Script]) -> None:
    """Partial text ends its line, on its stream; the status is that of an interrupt."""
    script = thinker(SWITCH)
    for text, out, err in (("Hm", "", "Hm\n"), ("Hm.</think>4", "4\n", "Hm.\n")):
        script(text, interrupted=True)
        outcome = run_here("ask", "2+2?", "--think")
        assert (outcome.code, outcome.out) == (130, out)
        assert outcome.err.startswith(err) and outcome.err.endswith("\nnotes: interrupted\n")


def test_a_session_remembers_its_reasoning() -> None:
    """The chain is in the sequence as the model wrote it, is shown by the ledger, and the next turn follows it."""
    assert run_here("compile", SAMPLES / "returns").code == 0
    ask = ("ask", "May I return this?", "--session", "mine")
    assert run_here(*ask, "--splice", "returns", "--think").out == "accepted\n"
    assert run_here(*ask, "--erratum", "date=2026-07-01", "--think", "--choices", "accepted,refused").out == "refused\n"
    assert run_here(*ask, "-n", 8).code == 0
    pieces = run_here("session", "show", "mine", "--json").json["pieces"]
    answers = [piece for piece in pieces if piece["kind"] == "answer"]
    assert [piece["text"] for piece in answers[:2]] == [ACCEPTED, REFUSED]
    assert [piece["why"] for piece in answers] == ["chain of thought", "chain of thought", ""]
    assert sum("Think first." in piece["text"] for piece in pieces) == 2
    assert run_here("session", "undo", "mine").code == 0
    total = run_here("session", "show", "mine", "--json").json["tokens"]
    assert total == sum(piece["tokens"] for piece in pieces[:-2])
