"""`notes calibrate`, `--method auto` after it, `notes verify`, and several skills: verified, warned about, repaired."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli import output
from notes_cli.config import resource
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.sequence import KVSequence, Task
from notes_cli.library.profiles import Composition, Profile, Profiles
from notes_cli.measure import battery, calibrate, composition, verify
from notes_cli.measure.battery import PAIRS
from notes_cli.measure.verify import Answered
from notes_cli.runtime import generate
from notes_cli.runtime.generate import Decision
from notes_cli.runtime.workspace import Workspace

from .conftest import Notes, on_a_terminal, saved

CASE = """cases:
  - skill: returns.txt
    question: May I return this?
    choices: [accepted, refused]
    field: date
    value: 2026-07-01
    right: [accepted, refused]
"""


@pytest.fixture
def mine(skill: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A battery of one decision in the folder of the skill's text; thoughts are short."""
    monkeypatch.setattr(calibrate, "THINK", 4)
    monkeypatch.setattr(calibrate, "SEAMS", (1,))
    path = skill.parent / "mine.yaml"
    path.write_text(CASE)
    return path


def repeat(mine: Path, monkeypatch: pytest.MonkeyPatch, cases: int) -> None:
    """As many decisions as are needed: the same one, but the model does not know."""
    for module in (battery, calibrate):
        monkeypatch.setattr(module, "LEAST", cases)
    head, case = CASE.split("\n", 1)
    mine.write_text(f"{head}\n{case * cases}")


@pytest.fixture
def hears(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], bool]], None]:
    """Put a model in the place of the tiny one that gives the second answer to a prompt of which something holds."""

    def put(holds: Callable[[str], bool]) -> None:
        def decide(sequence: KVSequence, choices: Sequence[str], *_: object) -> Decision:
            text = sequence.context.model.text(map(int, sequence.tokens))
            choice = choices[holds(text)]
            return Decision(choice, {one: float(one == choice) for one in choices})

        def decide_task(sequence: KVSequence, choices: Sequence[str]) -> Task[Decision]:
            yield [sequence]
            return decide(sequence, choices)

        monkeypatch.setattr(composition, "choose_task", lambda _, *given: decide_task(*given[:2]))
        monkeypatch.setattr(generate, "decide_task", decide_task)

    return put


ASK = ("ask", "May I return this?", "--splice", "returns", "--field", "date=2026-07-01")


def test_what_is_right_stays_so(
    notes: Notes,
    compiled: Path,
    mine: Path,
    home: Path,
    hears: Callable[[Callable[[str], bool]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that overlooks the field and follows errata: agreement with its recompute would choose a wrong method."""
    hears(lambda text: "2026-07-01" in text.split("refused.")[1])  # after the text
    repeat(mine, monkeypatch, 2)
    answer = (*ASK, "--choices", "accepted,refused")
    assert notes(*answer).out == "refused\n"
    done = notes("calibrate", "--cases", mine, "--only")
    assert done.code == 0 and str(home / "profiles") in done.err
    assert "direct: use erratum: nothing was proven better than erratum, which is right in 2 of 2" in done.out
    assert "a recompute decides by the field in 0 of 2 cases" in done.out
    assert notes(*answer).out == "refused\n"
    explained = notes(*ASK, "--explain").out
    assert "method erratum: nothing was proven better" in explained and " (calibrate, 20" in explained


def test_what_is_proven_better_is_followed(
    notes: Notes,
    compiled: Path,
    mine: Path,
    hears: Callable[[Callable[[str], bool]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that reads its text and no errata; without the profile, which has a name, the safe default applies."""
    hears(lambda text: "date: 2026-07-01\ntier" in text)
    repeat(mine, monkeypatch, 6)  # six wins in six cases are a proof
    found = notes("calibrate", "--cases", mine, "--only", "--json").json
    assert found["methods"]["direct"] != "erratum" and Path(found["path"]).is_file()
    assert notes(*ASK, "--choices", "accepted,refused").out == "refused\n"
    (listed,) = notes("profile", "ls", "--json").json
    assert listed["methods"] == found["methods"] and listed["problem"] is None
    name = notes("profile", "ls", "-q").out.strip()
    assert name == listed["name"] == Path(found["path"]).stem and name in notes("profile", "ls").out
    assert found["verdicts"]["direct"] in notes("profile", "show", name[:6]).out
    assert notes("profile", "rm", name, "no such").code == 1 and Path(found["path"]).is_file()
    assert notes("profile", "rm", name).out.strip() == found["path"] and not Path(found["path"]).exists()
    assert notes("profile", "ls").err.startswith("no profiles yet in ")
    explained = "method field+erratum: the default for a model that calibrate has not measured"
    assert explained in notes(*ASK, "--explain").out


def test_an_interrupted_calibration_goes_on(
    notes: Notes, compiled: Path, mine: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C keeps measured steps, and the same command measures the rest."""

    @contextmanager
    def interrupting(*_: object, **__: object) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: os.kill(os.getpid(), signal.SIGINT) if done == 3 else None

    repeat(mine, monkeypatch, 2)
    arguments = ("calibrate", "--cases", mine, "--only")
    with monkeypatch.context() as patch:
        patch.setattr(output, "progress", interrupting)
        first = notes(*arguments)
    assert first.code == 130 and "measuring 2 decisions takes about " in first.err
    done = notes(*arguments)
    assert done.code == 0 and "3 of 4 steps were measured before" in done.err
    assert notes("profile", "ls", "-q").out and not any((home / "profiles" / ".begun").iterdir())


def test_a_report_for_others(notes: Notes, mine: Path, tmp_path: Path) -> None:
    """Of a new and of a saved calibration; it may replace such a page, and nothing else."""
    path = tmp_path / "model.md"
    done = notes("calibrate", "--cases", mine, "--only", "--report", path)
    assert done.code == 0 and f"written to {path}" in done.err
    text = path.read_text()
    assert text.startswith("# ") and "| recompute |" in text and "1 decisions are too few" in text + done.out
    name = saved(notes)
    assert notes("profile", "show", name, "--report", path).code == 0 and path.read_text() != text
    path.write_text("# Mine\n")
    for command in (("calibrate",), ("profile", "show", name)):
        refused = notes(*command, "--report", path)
        assert refused.code == 1 and "nothing is written over it" in refused.err and path.read_text() == "# Mine\n"
        assert notes(*command, "--report", tmp_path / "none" / "x.md").code == 1
        assert "writes .md" in notes(*command, "--report", "model.txt").err


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


def test_each_repair_is_what_is_typed(notes: Notes, two: Path) -> None:
    """No warning where calibration found no failure, or with a seam that is long enough."""
    for verdict, repair, advice in (
        ("fails", "reversed", "Name a skill with rules before the one with the values that they are for"),
        ("fails", "seam@16", "Give it --seam 16"),
        ("fails", "suffix", "Give it --decode fees"),
        ("fails", "recompute", "Give it --recompute"),
        *((verdict, "", None) for verdict in ("holds", "unable", "open")),
    ):
        name = put(notes, Composition(verdict, repair, "x"))
        err = notes(*BOTH).err
        assert (LOST in err) == (advice is not None) and (advice is None or f". {advice}\n" in err), repair
        if repair.startswith("seam"):
            assert LOST not in notes(*BOTH, "--seam", 16).err and LOST in notes(*BOTH, "--seam", 15).err
        shown = notes("profile", "show", name)
        assert "several skills: x" in shown.out
        assert ("for skills A and B: " in shown.out) == (advice is not None)
        assert notes("profile", "show", name, "--json").json["composition"]["verdict"] == verdict


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
    cases = resource("prompts") / "battery.yaml"
    found = notes("calibrate", "--cases", cases, "--only", "--json").json
    assert found["composition"]["repair"] == "together" and LOST in notes(*BOTH).err
    assert notes("calibrate", "--json").json["composition"] is None and pairs == [0, PAIRS]


def test_questions_come_from_a_file(notes: Notes, two: Path, tmp_path: Path) -> None:
    """One per line without blank ones, in addition to --question; also from stdin."""
    (tmp_path / "mine.txt").write_text("\ufeffWhy?\n\n  Who pays?  \nWhy?\n", encoding="utf-8")
    verify = ("verify", "returns", "fees", "--choices", "a,b", "--json")
    found = notes(*verify, "--question", "When?", "--questions", tmp_path / "mine.txt").json
    assert [case["question"] for case in found["cases"]] == ["When?", "Why?", "Who pays?"]
    assert [one["question"] for one in found["composition"]["questions"]] == ["When?", "Why?", "Who pays?"]
    assert [case["question"] for case in notes(*verify, "--questions", "-", stdin="Why?\n").json["cases"]] == ["Why?"]
    assert notes("verify", "returns", "--questions", tmp_path / "mine.txt", "--json").json["composition"] is None


def test_what_is_lost_is_told_with_what_repairs_it(notes: Notes, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows the skills that each question needs, repairs that were tried, and a command, with which verify passes."""
    for module in ("verify", "composition"):
        monkeypatch.setattr(f"notes_cli.measure.{module}.answered", lambda *given: Answered(*_concluding(*given)))
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
    """Its K/V equals that of a prefill after the spliced skill; named by skill or by word, or by a key of a batch. A
    later turn of a session refuses it (another name: tests/messages.yaml)."""
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
    assert js.code == 1 and js.json["pass"] is False and js.json["same_decision"] is True
    assert js.json["failed"] == [missed.removeprefix("missed: ")]


def test_keys_that_are_not_turned_fail(notes: Notes, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A splice with unrotated keys fails, whatever the logits are; the error names the skill and its K/V."""
    splice = Context.splice
    monkeypatch.setattr(Context, "splice", lambda *given, **how: splice(*given, **{**how, "rotate": False}))
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
    assert notes("verify", "returns", *ask, "--method", "all").code == 0  # auto is right, stale or not
