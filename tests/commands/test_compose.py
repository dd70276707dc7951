"""Several skills: verified, calibrated, warned about, and repaired as advised."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from notes_cli.config import resource
from notes_cli.engine.options import ContextOptions
from notes_cli.library.profiles import Composition, Profile, Profiles
from notes_cli.measure import calibrate, composition, verify
from notes_cli.measure.battery import PAIRS
from notes_cli.measure.verify import Answered
from notes_cli.runtime.workspace import Workspace

from .conftest import Notes, saved

LOST = "on this model questions that need several skills fail where each was compiled apart"


@pytest.fixture
def two(notes: Notes, compiled: Path, tmp_path: Path) -> Path:
    """Compile a second skill, `fees`; return its text's file."""
    path = tmp_path / "fees.txt"
    path.write_text("# Fees\n\nplan: team\n\nGold customers of the team plan pay nothing, all others pay five.\n")
    assert notes("compile", path).code == 0
    return path


@pytest.fixture
def fails(notes: Notes, two: Path) -> str:
    """Write a profile in which composition fails and compiling together repairs it; return its name."""
    return put(notes, Composition("fails", "together", "16 of 48 are right, read together 43"))


def put(notes: Notes, found: Composition) -> str:
    name = saved(notes)
    path = Path(os.environ["NOTES_HOME"]) / "profiles" / f"{name}.json"
    said = {"verdict": found.verdict, "repair": found.repair, "why": found.why}
    path.write_text(json.dumps({**json.loads(path.read_text()), "composition": said}))
    return name


BOTH = ("ask", "Why?", "--splice", "returns", "--splice", "fees", "-n", 2)


def test_what_fails_is_told_with_the_command_that_repairs_it(notes: Notes, fails: str) -> None:
    """One warning, also for a batch; following the advice, there is none."""
    asked = notes(*BOTH)
    assert asked.code == 0 and asked.err.count(LOST) == 1
    assert "notes compile returns fees --together" in asked.err
    lines = notes(*BOTH[:1], *BOTH[2:], "--batch", "-", stdin='"Why?"\n"Who?"\n{"question": "How?", "seam": 2}\n')
    assert lines.code == 0 and lines.err.count(LOST) == 1
    assert notes("compile", "returns", "fees", "--together", "returns-fees").code == 0
    for quiet in (
        ("ask", "Why?", "-n", 2, "--splice", "returns-fees"),
        ("ask", "Why?", "-n", 2, "--splice", "returns"),
        (*BOTH, "--decode", "fees"),
        (*BOTH, "--recompute"),
        (*BOTH, "--think", "--max-think", 2),
    ):
        assert LOST not in notes(*quiet).err


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        (
            Composition("fails", "reversed", "x"),
            "Name a skill with rules before the one with the values that they are for",
        ),
        (Composition("fails", "seam@16", "x"), "Give it --seam 16"),
        (Composition("fails", "suffix", "x"), "Give it --decode fees"),
        (Composition("fails", "recompute", "x"), "Give it --recompute"),
        (Composition("holds", "", "x"), None),
        (Composition("unable", "", "x"), None),
        (Composition("open", "", "x"), None),
    ],
)
def test_each_repair_is_what_is_typed(notes: Notes, two: Path, found: Composition, advice: str | None) -> None:
    """No warning where calibration found no failure, or with a seam that is long enough."""
    name = put(notes, found)
    err = notes(*BOTH).err
    assert (LOST in err) == (advice is not None) and (advice is None or f". {advice}\n" in err)
    if found.repair.startswith("seam"):
        assert LOST not in notes(*BOTH, "--seam", 16).err and LOST in notes(*BOTH, "--seam", 15).err
    shown = notes("profile", "show", name)
    assert "several skills: x" in shown.out
    assert ("for skills A and B: " in shown.out) == (advice is not None)
    assert notes("profile", "show", name, "--json").json["composition"]["verdict"] == found.verdict


def test_a_profile_without_it_opens(notes: Notes, two: Path) -> None:
    """Profiles of an earlier format have no composition, and cause no warning; a contradictory one is refused."""
    name = saved(notes)
    path = Path(os.environ["NOTES_HOME"]) / "profiles" / f"{name}.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "composition"}))
    asked = notes(*BOTH)
    assert asked.code == 0 and "warning" not in asked.err
    assert "several skills: not measured" in notes("profile", "show", name).out
    for wrong in (Composition("fails", "", "x"), Composition("holds", "suffix", "x"), Composition("bad", "", "x")):
        put(notes, wrong)
        asked = notes(*BOTH)
        assert asked.code == 1 and "is damaged: composition." in asked.err and asked.err.count("\n") == 1


def test_what_is_known_stays_where_it_is_not_measured(
    notes: Notes, fails: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--only measures no pairs: the finding of an earlier calibration is kept and shown."""
    earlier = Profiles(home / "profiles").read(home / "profiles" / f"{fails}.json")
    pairs: list[int] = []

    def measured(*given: object) -> Profile:
        pairs.append(len(given[3]))  # type: ignore[arg-type]
        return replace(earlier, composition=None)

    monkeypatch.setattr(calibrate, "calibrate", measured)
    monkeypatch.setattr(calibrate, "LEAST", 1)
    battery = str(resource("prompts") / "battery.yaml")
    found = notes("calibrate", "--cases", battery, "--only", "--json").json
    assert found["composition"]["repair"] == "together" and LOST in notes(*BOTH).err
    assert notes("calibrate", "--json").json["composition"] is None and pairs == [0, PAIRS]


def test_pairs_are_measured_with_the_decisions(notes: Notes) -> None:
    """Each way with its counts; so few prove nothing."""
    done = notes("calibrate", "-n", 1)
    assert done.code == 0 and "several skills: 1 questions prove nothing" in done.out
    rows = [line.split()[0] for line in done.out.splitlines() if " of 1 (" in line]
    assert {"spliced", "reversed", "seam@16", "together", "suffix"} <= set(rows)


def test_questions_come_from_a_file(notes: Notes, two: Path, tmp_path: Path) -> None:
    """One per line without blank ones, in addition to --question; also from stdin."""
    (tmp_path / "mine.txt").write_text("\ufeffWhy?\n\n  Who pays?  \nWhy?\n", encoding="utf-8")
    verify = ("verify", "returns", "fees", "--choices", "a,b", "--json")
    found = notes(*verify, "--question", "When?", "--questions", tmp_path / "mine.txt").json
    assert [case["question"] for case in found["cases"]] == ["When?", "Why?", "Who pays?"]
    assert [one["question"] for one in found["composition"]["questions"]] == ["When?", "Why?", "Who pays?"]
    assert [case["question"] for case in notes(*verify, "--questions", "-", stdin="Why?\n").json["cases"]] == ["Why?"]
    assert notes("verify", "returns", "--questions", tmp_path / "mine.txt", "--json").json["composition"] is None


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"\n \n", 1, "has no questions. Write one a line"),
        (b"\xff", 2, "is not UTF-8 text (byte 0)"),
        (None, 2, "cannot read "),
    ],
)
def test_a_file_without_questions(
    notes: Notes, two: Path, tmp_path: Path, content: bytes | None, code: int, message: str
) -> None:
    """One line, and nothing is measured; an unreadable file is wrong usage."""
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    outcome = notes("verify", "returns", "fees", "--questions", path)
    assert outcome.code == code and message in outcome.err and (outcome.out, outcome.err.count("\n")) == ("", 1)


def test_what_is_lost_is_told_with_what_repairs_it(notes: Notes, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the skills that each question needs, repairs that were tried, and a command, with which verify passes."""
    for module in (verify, composition):
        monkeypatch.setattr(module, "answered", lambda *given: Answered(*_concluding(*given)))
    outcome = notes("verify", "returns", "fees", "--question", "Who pays?", "--choices", "a,b")
    assert outcome.code == 1 and "Who pays?  returns + fees  DIFFERS" in outcome.out
    assert "questions that need several skills: 0 of 1 (0.00 to 0.9" in outcome.out
    assert "tried reversed: 0 of 1" in outcome.out and "tried suffix: 1 of 1" in outcome.out
    run = "Run: notes compile returns fees --together returns-fees, and give it --splice returns-fees"
    assert f"what repairs it: {run}" in outcome.out
    found = notes("verify", "returns", "fees", "--question", "Who pays?", "--choices", "a,b", "--json").json
    assert found["composition"]["repair"] == "together" and found["composition"]["advice"] == run
    assert notes("compile", "returns", "fees", "--together", "returns-fees").code == 0
    assert notes("verify", "returns-fees", "--question", "Who pays?", "--choices", "a,b").code == 0


def _concluding(sequence: object, choices: object) -> tuple[str, float]:
    """The first answer where a skill has seen the other one, or both are one; the second where they were not."""
    pieces = [one for one in sequence.pieces if one.kind == "splice" and one.how != "seam"]  # type: ignore[attr-defined]
    text = sequence.context.model.text(map(int, sequence.tokens))  # type: ignore[attr-defined]
    concluded = len(pieces) == 1 or pieces[-1].how == "decoded"
    return ("a" if concluded and "# Fees" in text and "# Returns" in text else "b"), 1.0


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
    edited = notes(*BOTH, "--decode", "fees", "--field", "plan=solo", "--method", "suffix", "--json")
    assert edited.code == 0 and edited.json["tokens"]["spliced"] > 0


def test_only_a_spliced_skill_can_be_decoded(notes: Notes, two: Path) -> None:
    """Another name is an error; so is a later turn of a session; a batch takes it as a key."""
    wrong = notes(*BOTH, "--decode", "fee")
    assert wrong.code == 1 and "and is none of the skills to splice" in wrong.err
    assert notes(*BOTH, "--session", "mine", "--decode", "fees").code == 0
    later = notes("ask", "And?", "--session", "mine", "--decode", "fees")
    assert later.code == 1 and "session mine has begun" in later.err
    line = notes(*BOTH[:1], *BOTH[2:], "--batch", "-", stdin='{"question": "Why?", "decode": ["fees"]}\n').json
    assert {one["name"]: one["how"] for one in line["pieces"]}["fees"] == "decoded"


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
        assert Profiles(workspace.paths.profiles).names() == []
    assert [one["stale"] for one in notes("ls", "--json").json if one["name"] == "shop"] == [[]]
    two.write_text(two.read_text().replace("five", "six"))
    (stale,) = [one["stale"] for one in notes("ls", "--json").json if one["name"] == "shop"]
    assert stale == ["text"]
    assert notes("compile", "--stale").code == 0
    assert "pay six" in notes("inspect", "shop", "--text").out
    two.unlink()
    assert [one["stale"] for one in notes("ls", "--json").json if one["name"] == "shop"] == [["gone"]]
    assert "pay six" in notes("inspect", "shop", "--text").out


@pytest.mark.parametrize(
    "arguments",
    [
        ("returns", "--together", "shop"),
        ("returns", "fees", "--together", "shop", "--name", "other"),
        ("returns", "-", "--together", "shop"),
        ("--all", "--together", "shop"),
        ("--from", "returns", "--together", "shop"),
    ],
)
def test_together_needs_two(notes: Notes, two: Path, arguments: tuple[str, ...]) -> None:
    """Wrong usage: one line, and nothing is compiled."""
    outcome = notes("compile", *arguments)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "--together NAME joins two SOURCEs" in outcome.err


def test_together_is_not_watched(notes: Notes, skill: Path, two: Path) -> None:
    """It has no file of its own to look at, so a watch that names it would never see a change."""
    assert notes("compile", skill, "fees", "--together", "shop").code == 0
    outcome = notes("watch", "shop")
    assert outcome.code == 1 and "notes compile --stale" in outcome.err


@pytest.mark.parametrize("sources", [("+", "returns"), ("returns", "+"), ("returns", "+", "+", "fees"), ("+",)])
def test_a_plus_goes_between_two_skills(notes: Notes, compiled: Path, sources: tuple[str, ...]) -> None:
    done = notes("compile", *sources)
    assert done.code == 2 and "a + goes between two SOURCEs" in done.err
