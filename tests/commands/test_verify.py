"""`notes verify`, the default that it saves, and several skills: decoded after each other, compiled together."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import SAMPLES

from notes_cli.engine.limits import ContextOptions
from notes_cli.library.container import open_segment, write_segment
from notes_cli.measure import verify
from notes_cli.runtime.workspace import Workspace

from .conftest import Notes, ctrl_c, on_a_terminal

compare = verify._compare


@pytest.fixture
def two(notes: Notes, compiled: Path, tmp_path: Path) -> Path:
    """Compile a second skill, `fees`; return its text's file."""
    path = tmp_path / "fees.txt"
    path.write_text("# Fees\n\nplan: team\n\nGold customers of the team plan pay nothing, all others pay five.\n")
    assert notes("compile", path).code == 0
    return path


def test_questions_come_from_a_file(notes: Notes, two: Path, tmp_path: Path) -> None:
    """One per line without blank ones, in addition to --question; also from stdin."""
    (tmp_path / "mine.txt").write_text("\ufeffWhy?\n\n  Who pays?  \nWhy?\n", encoding="utf-8")
    verify = ("verify", "returns", "fees", "--choices", "a,b", "--json")
    found = notes(*verify, "--question", "When?", "--questions", tmp_path / "mine.txt").json
    assert [case["question"] for case in found["cases"]] == ["When?", "Why?", "Who pays?"]
    assert [case["question"] for case in notes(*verify, "--questions", "-", stdin="Why?\n").json["cases"]] == ["Why?"]


def test_ctrl_c_reports_the_questions_before_it(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the status of an interrupt; without a pass."""
    monkeypatch.setattr(verify, "_compare", lambda *given: (signal.raise_signal(signal.SIGINT), compare(*given))[1])
    with ctrl_c(monkeypatch):
        found = notes("verify", "returns", "--question", "Why?", "--question", "When?", "--choices", "a,b")
    assert found.code == 130 and "Why?" in found.out and "When?" not in found.out
    assert "interrupted: 1 of 2 cases are left out" in found.out and "FAIL: " in found.out


def test_a_skill_is_decoded_after_one_that_is_spliced(notes: Notes, two: Path) -> None:
    """Its K/V equals that of a prefill after the spliced skill; named by skill or by word."""
    for word in ("fees", two):
        pieces = notes(
            "ask", "Why?", "--splice", "returns", "--splice", word, "--decode", word, "--explain", "--json"
        ).json
        how = {piece["name"]: piece["how"] for piece in pieces["pieces"] if piece["name"]}
        assert how == {"returns": "spliced", "fees": "decoded"}
    ask = ("ask", "Why?", "--splice", "returns", "--splice", "fees", "--choices", "a,b", "--json")
    first, both, full = (notes(*ask, *more).json for more in (("--decode", "fees"), (), ("--recompute",)))
    assert both["tokens"]["spliced"] > first["tokens"]["spliced"] > full["tokens"]["spliced"] == 0

    def far(one: dict[str, dict[str, float]]) -> float:
        return abs(one["probabilities"]["a"] - full["probabilities"]["a"])

    assert far(first) < 1e-3 and far(first) < far(both)  # `returns` is where it was compiled


def test_skills_that_are_compiled_together(notes: Notes, skill: Path, two: Path) -> None:
    """One skill with the fields of both, whose rows are those of one text; out of date when one of its files is."""
    outcome = notes("compile", skill, "fees", "--together", "shop", "--json")
    (done,) = outcome.json["compiled"]
    assert done["name"] == "shop" and done["fields"] == {"date": "2026-06-01", "tier": "gold", "plan": "team"}
    assert notes("compile", skill, two, "--together", "shop", "--json").json["compiled"][0]["up_to_date"]
    model = Path(os.environ["NOTES_MODEL"])
    with Workspace(model, ContextOptions(n_ctx=1024, n_threads=1)) as workspace:
        both = workspace.open(Path(done["path"]))
        assert both.text == f"{skill.read_text().strip()}\n\n{two.read_text().strip()}"
    assert [one["stale"] for one in notes("ls", "--json").json if one["name"] == "shop"] == [[]]
    two.write_text(two.read_text().replace("five", "six"))
    (stale,) = [one["stale"] for one in notes("ls", "--json").json if one["name"] == "shop"]
    assert stale == ["text"]
    assert notes("compile", "--stale").code == 0
    assert "pay six" in notes("inspect", "shop", "--text").out
    two.unlink()
    assert [one["stale"] for one in notes("ls", "--json").json if one["name"] == "shop"] == [["gone"]]
    assert "pay six" in notes("inspect", "shop", "--text").out


def test_a_narrow_terminal_has_no_figures(notes: Notes, compiled: Path) -> None:
    """At 80 columns the decisions have room, without words cut into pieces."""
    asked = ["verify", "returns", "--choices", "a,b", "--question", "Why?"]
    narrow, wide = (on_a_terminal(asked, COLUMNS=columns) for columns in ("80", "120"))
    assert "decision" in narrow and "KL" not in narrow and "KL" in wide


def test_fail_is_exit_1(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cosine below the bound fails although the decisions agree; the report is printed all the same."""
    monkeypatch.setattr(verify, "COSINE", 1.1)
    asked = ("verify", "returns", "--choices", "a,b", "--question", "Why?")
    outcome, js = notes(*asked), notes(*asked, "--json")
    missed, fail, advice = outcome.out.splitlines()[-3:]
    assert outcome.code == 1 and fail.startswith("FAIL: 1 of 1") and advice.startswith("next: ")
    assert missed.startswith("missed: the mean cosine is ") and "must be 1.1" in missed and "'Why?'" in missed
    assert js.code == 1 and js.json["pass"] is False and js.json["cases"][0]["right"]
    assert js.json["failed"] == [missed.removeprefix("missed: ")]


def test_wrong_rows_fail(notes: Notes, compiled: Path) -> None:
    """Whatever the logits are; the error names the skill and its K/V."""
    segment = open_segment(compiled)
    layers = [replace(rows, k=np.roll(rows.k, 1, axis=0)) for rows in segment.layers]
    write_segment(compiled, replace(segment, layers=tuple(layers)))
    outcome = notes("verify", "returns", "--choices", "a,b")
    lines = outcome.out.splitlines()
    assert outcome.code == 1 and lines[-2].startswith("FAIL")
    assert lines[-1] == "next: compile returns again: notes compile --from returns --force"
    assert any(line.startswith("missed: returns has wrong rows: layer 0, K") for line in lines)


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
    assert notes("verify", "returns", *ask).code == 0  # the default is right, stale or not


ASK = ("ask", "May I return this?", "--splice", "returns", "--field", "date=2026-07-01")


def test_the_cheapest_method_that_agrees_is_saved(notes: Notes, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shipped model, for its text: from then on it is the default there, with a seam that was verified."""
    monkeypatch.delenv("NOTES_MODEL")
    assert notes("compile", SAMPLES / "returns").code == 0
    asked = ("--question", "May I return this?", "--choices", "accepted,refused")
    edit = ("verify", "returns", *asked, "--field", "date=2026-07-01")
    found = notes(*edit, "--json").json
    assert found["decisive"] and found["cheapest"] == "erratum" and not (home / "config.yaml").exists()
    outcome = notes(*edit, "--save")
    assert outcome.code == 0 and f"written to {home / 'config.yaml'}" in outcome.err
    assert "the cheapest that decides as the recompute: erratum" in outcome.out
    assert notes(*ASK, "--explain", "--json").json["method"] == "erratum"
    assert notes("verify", "returns", *asked, "--seam", 3, "--save").code == 0
    explained = notes(*ASK, "-s", "Be kind.", "--explain", "--json").json
    assert (explained["method"], explained["seam"]) == ("erratum", 3)


def test_nothing_is_saved_that_was_not_verified(notes: Notes, compiled: Path, home: Path) -> None:
    """Neither by questions that the old value decides as the new one does, nor without a method or an option."""
    same = ("--question", "Why?", "--choices", "a,b", "--field", "date=2026-07-01")
    outcome = notes("verify", "returns", *same, "--save")
    if "they tell nothing of methods" in outcome.out:
        assert outcome.code == 1
    wrong = notes("verify", "returns", *same, "--method", "stale", "--save")
    assert wrong.code == 1 and not (home / "config.yaml").exists()
    for arguments in (("returns", "--question", "Why?"), ("--session", "mine", "--seam", 3)):
        assert notes("verify", *arguments, "--save").code == 2
