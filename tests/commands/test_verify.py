"""`notes verify`: measurements, output, and exit status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli.engine.context import Context
from notes_cli.measure import verify
from notes_cli.measure.verify import Answered, Parting

from .conftest import Notes, on_a_terminal


def test_the_system_text_that_is_put_before_skills_is_told(notes: Notes, compiled: Path) -> None:
    """A default text makes skills move, and is part of the comparison."""
    told = "the skills come after a system text (-s): "
    assert f"{told}You are a helpful assistant." in notes("verify", "returns").out
    assert f"{told}Hello." in notes("verify", "returns", "-s", "Hello.").out
    assert told not in notes("verify", "returns", "-s", "").out
    assert notes("verify", "returns", "-s", "Hello.", "--json").json["system"] == "Hello."


def test_pass_is_exit_0(notes: Notes, compiled: Path) -> None:
    """Decisions and logits as in a full recompute: one line a question, the verdict last, exit 0."""
    outcome = notes("verify", "returns", "--choices", "a,b", "--question", "Why?", "--question", "When?")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[1].startswith("Why?") and lines[2].startswith("When?")
    assert lines[-1].startswith("pass: 2 of 2 decisions")


def test_a_narrow_terminal_has_no_figures(notes: Notes, compiled: Path) -> None:
    """At 80 columns the decisions have room, without words cut into pieces."""
    asked = ["verify", "returns", "--choices", "a,b", "--question", "Why?"]
    narrow, wide = (on_a_terminal(asked, COLUMNS=columns) for columns in ("80", "120"))
    assert "decision" in narrow and "KL" not in narrow and "KL" in wide


def test_fail_is_exit_1(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cosine below the bound fails although the decisions agree; the report is printed all the same."""
    monkeypatch.setattr(verify, "COSINE", 1.1)
    outcome = notes("verify", "returns", "--choices", "a,b", "--question", "Why?")
    lines = outcome.out.splitlines()
    assert outcome.code == 1 and lines[-2].startswith("FAIL: 1 of 1") and lines[-1].startswith("next: ")
    assert lines[-3].startswith("missed: the mean cosine is ") and "it must be 1.1 or more (lowest: " in lines[-3]
    assert "'Why?'" in lines[-3]
    js = notes("verify", "returns", "--choices", "a,b", "--question", "Why?", "--json")
    assert js.code == 1 and js.json["pass"] is False and js.json["same_decision"] is True
    assert js.json["failed"] == [lines[-3].removeprefix("missed: ")]


def test_rows_that_were_not_moved_are_exact(notes: Notes, compiled: Path) -> None:
    """Without system text the skill is where it was compiled: no seam, no rotation."""
    case = notes("verify", "returns", "--choices", "a,b", "-s", "", "--json").json["cases"][0]
    assert case["moved"] is False and case["cosine"] > 0.9999 and case["kl"] < 1e-3


def test_all_rows_are_compared(notes: Notes, compiled: Path) -> None:
    """K and V of each layer and token, in the file and where the skill was placed."""
    rows = notes("verify", "returns", "--choices", "a,b", "--json").json["rows"]["returns"]
    assert rows["wrong"] == rows["unchecked"] == [] and rows["farthest"] < 0.03
    told = f"returns: K and V of {rows['layers']} layers and {rows['tokens']} tokens are as computed now"
    assert told in notes("verify", "returns", "--choices", "a,b").out


def test_keys_that_are_not_turned_fail(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A splice with unrotated keys fails, whatever the logits are; the error names the skill and its K/V."""
    splice = Context.splice
    monkeypatch.setattr(Context, "splice", lambda *given, **how: splice(*given, **{**how, "rotate": False}))
    outcome = notes("verify", "returns", "--choices", "a,b")
    lines = outcome.out.splitlines()
    assert outcome.code == 1 and lines[-2].startswith("FAIL")
    assert lines[-1] == "next: compile returns again: notes compile --from returns --force"
    assert any(line.startswith("missed: returns has wrong rows: layer 0, K") for line in lines)


def test_a_text_that_parts_late_is_told_and_passes(
    notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position, gap and an explanation; exit 0. Control: an early difference beyond rounding fails."""
    found = ["one text", "another text"]

    def parted(found: Answered, wanted: Answered, noise: object) -> Parting:
        return Parting(at, 2.0, 0.01)

    for at, code in ((20, 0), (3, 1)):
        texts = iter(found)
        monkeypatch.setattr(verify, "answered", lambda *_, texts=texts: Answered(next(texts)))
        monkeypatch.setattr(verify, "parting", parted)
        outcome = notes("verify", "returns", "--question", "Why?")
        assert outcome.code == code and f"Why?: both answers are the same up to token {at}" in outcome.out
        assert ("a text may part so late" in outcome.out) is (code == 0)


def test_decisions_that_differ_are_named(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the question, its decision and the recompute's."""
    found = iter(["a", "b"])
    monkeypatch.setattr(verify, "answered", lambda *_: Answered(next(found), 0.1))
    outcome = notes("verify", "returns", "--question", "Why?", "--choices", "a,b")
    assert outcome.code == 1 and "missed: 'Why?' decides 'a', the recompute's decision is 'b'" in outcome.out


def test_questions_come_from_the_fields(notes: Notes, compiled: Path) -> None:
    """Without --question each field is asked for; an erratum adds the same questions once more, corrected."""
    plain = notes("verify", "returns", "--choices", "a,b", "--json").json["cases"]
    assert [case["question"] for case in plain] == ["What is the date?", "What is the tier?"]
    assert {case["corrected"] for case in plain} == {None}
    both = notes("verify", "returns", "--choices", "a,b", "--json", "--erratum", "date=2026-07-01").json["cases"]
    assert [case["errata"] for case in both] == [[], [], ["date=2026-07-01"], ["date=2026-07-01"]]
    assert all(case["corrected"] in ("a", "b") for case in both[2:])
    for case in both:
        same = case["decision"] == case["reference"]
        assert case["right"] == (same and case["corrected"] in (None, case["decision"]))


def test_nothing_to_ask(notes: Notes, tmp_path: Path) -> None:
    """A skill without fields and no --question: one line, exit 1."""
    (tmp_path / "plain.txt").write_text("Be kind to all.")
    assert notes("compile", tmp_path / "plain.txt").code == 0
    outcome = notes("verify", "plain")
    assert outcome.code == 1 and "Give --question" in outcome.err
    assert notes("verify", "plain", "--question", "Why?", "--choices", "a,b").code == 0


EDIT = ("verify", "returns", "--field", "date=2026-07-01", "--choices", "a,b", "--question", "Why?")


def test_a_line_a_method(notes: Notes, compiled: Path) -> None:
    """All of them against a recompute of the corrected text, the refused with the reason; then auto and the verdict."""
    outcome = notes(*EDIT, "--method", "all")
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == list(METHODS_ALL)
    block = next(line for line in lines if line.startswith("block"))
    assert "refused" in block and "notes compile --from returns" in block and "--blocks 8" in block
    assert lines[-2] == "auto is field+erratum: the default for a model that calibrate has not measured"
    found = {one["method"]: one for one in notes(*EDIT, "--method", "all", "--json").json["methods"]}
    for name in ("suffix", "recompute"):
        assert found[name]["cosine"] > 0.999 and found[name]["pass"]
    assert found["recompute"]["kl"] == 0 and found["stale"]["cosine"] < found["suffix"]["cosine"]
    assert found["field"]["decoded"] < found["suffix"]["decoded"] < found["recompute"]["decoded"]
    assert outcome.code == (0 if found["field+erratum"]["pass"] else 1)


METHODS_ALL = (
    *("stale", "field", "selective@16", "blend@16", "erratum", "field+erratum", "suffix", "block", "recompute"),
)


def test_methods_that_are_named(notes: Notes, compiled: Path) -> None:
    """Only these; exit 0 if all decide as the recompute; auto is the default."""
    named = notes(*EDIT, "--method", "suffix", "--method", "recompute", "--json")
    assert [one["method"] for one in named.json["methods"]] == ["suffix", "recompute"]
    assert (named.code, named.json["pass"]) == (0, True)
    assert [one["method"] for one in notes(*EDIT, "--json").json["methods"]] == ["field+erratum"]
    refused = notes(*EDIT, "--method", "block")
    assert refused.code == 1 and refused.out.splitlines()[-1].startswith("FAIL")


def test_what_a_method_leaves_stale_fails(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shipped model: without an edit the old value decides, which is exit 1; with one the new value does."""
    monkeypatch.delenv("NOTES_MODEL")
    assert notes("compile", SAMPLES / "returns").code == 0
    ask = ("--question", "May I return this?", "--choices", "accepted,refused", "--field", "date=2026-07-01")
    stale = notes("verify", "returns", *ask, "--method", "stale")
    assert "missed: stale: 'May I return this?' decides 'accepted', the recompute's decision is 'refused'" in stale.out
    assert stale.code == 1 and "DIFFERS" in stale.out and "accepted (refused)" in stale.out
    assert notes("verify", "returns", *ask, "--method", "erratum", "--method", "suffix").code == 0
    assert notes("verify", "returns", *ask, "--method", "field").code == 1  # notes of the old value decide
    assert notes("verify", "returns", *ask, "--method", "all").code == 0  # auto is right, stale or not


def test_a_model_that_refuses_methods(
    notes: Notes, skill: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing can be rewritten, lines of these methods show that, and it is no failure."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model("lfm2")))
    assert notes("compile", skill).code == 0
    found = notes(*EDIT, "--method", "all", "--json").json["methods"]
    refused = {one["method"]: one["refused"] for one in found if one["refused"]}
    assert {"field", "selective@16", "suffix"} <= refused.keys() and "recurrent" in refused["field"]
    assert not {"erratum", "recompute", "stale"} & refused.keys()


def test_a_session_against_a_prefill(notes: Notes, compiled: Path) -> None:
    """Exact where nothing was left as it was: errata are in both; an edit in place is named, and shows in the rows."""
    for question in ("Why?", "And?"):
        assert (
            notes("ask", question, *(("--splice", "returns") if question == "Why?" else ()), "--session", "mine").code
            == 0
        )
        assert notes("edit", "mine", "--field", f"tier={question[:-1]}", "--method", "erratum").code == 0
    verify = ("verify", "--session", "mine", "--question", "When?", "--choices", "a,b")
    before = notes("session", "show", "mine", "--json").json
    outcome = notes(*verify)
    assert (
        outcome.code == 0 and "tier=And by erratum" in outcome.out and outcome.out.splitlines()[-1].startswith("pass")
    )
    exact = notes(*verify, "--json").json
    assert exact["cosine"] > 0.9999 and exact["same_top"] and not exact["reasons"]
    assert all(max(layer["k"], layer["v"]) < 0.02 for layer in exact["layers"])
    assert notes("session", "show", "mine", "--json").json == before
    assert notes("edit", "mine", "--field", "date=2026-07-01", "--method", "field").code == 0
    stale = notes(*verify, "--json").json
    assert "date=2026-07-01" in stale["reasons"][0] and stale["edits"][-1].startswith("date=2026-07-01 by field")
    assert max(layer["k"] for layer in stale["layers"]) > 5 * max(layer["k"] for layer in exact["layers"])
    assert "what comes after an edit in place was computed with the old value (date=2026-07-01)" in notes(*verify).out


@pytest.mark.parametrize("kind", ["lfm2", "gpt2"])
def test_sessions_of_whole_rows(
    notes: Notes, skill: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Verified like others, states too, also with greedy answers to several questions."""
    monkeypatch.setenv("NOTES_MODEL", str(make_model(kind)))
    assert notes("ask", "Why?", "--splice", skill, "--session", "mine", "-n", 2).code == 0
    outcome = notes("verify", "--session", "mine", "--json")
    assert outcome.code == 0 and [point["question"] for point in outcome.json["points"]] == [
        *(None, "What is the date?", "What is the tier?"),
    ]
    parts = {layer["part"] for layer in outcome.json["layers"]}
    assert parts == ({"attention", "state"} if kind == "lfm2" else {"attention"})


def test_another_models_session(notes: Notes, compiled: Path, make_model: Callable[..., Path]) -> None:
    """Is not verified with this one."""
    assert notes("ask", "Why?", "--splice", "returns", "--session", "mine", "-n", 2).code == 0
    outcome = notes("verify", "--session", "mine", "-m", make_model("qwen2"))
    assert outcome.code == 1 and "begun for architecture llama" in outcome.err
