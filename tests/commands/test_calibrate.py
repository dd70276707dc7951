"""`notes calibrate`, and `--method auto` after it."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from notes_cli.engine.decision import Decision
from notes_cli.engine.decoding import Task
from notes_cli.engine.sequence import KVSequence
from notes_cli.measure import calibrate
from notes_cli.measure.significance import LEAST
from notes_cli.runtime import answering

from .conftest import Notes, command_line, saved

CASE = """cases:
  - skill: returns.txt
    question: May I return this?
    choices: [accepted, refused]
    field: date
    value: 2026-07-01
    right: [accepted, refused]
"""


@pytest.fixture
def mine(skill: Path) -> Path:
    """A battery of one decision in the folder of the skill's text."""
    path = skill.parent / "mine.yaml"
    path.write_text(CASE)
    return path


@pytest.fixture
def many(mine: Path) -> Path:
    """As many decisions as are needed: the same one, but the model does not know."""
    head, case = CASE.split("\n", 1)
    mine.write_text(f"{head}\n{case * LEAST}")
    return mine


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

        monkeypatch.setattr(calibrate, "choose_task", lambda _, *given: decide_task(*given[:2]))
        monkeypatch.setattr(answering, "decide_task", decide_task)
        monkeypatch.setattr(calibrate, "SEAMS", (1,))

    return put


ASK = ("ask", "May I return this?", "--splice", "returns", "--field", "date=2026-07-01")


def test_what_is_right_stays_so(
    notes: Notes, compiled: Path, many: Path, home: Path, hears: Callable[[Callable[[str], bool]], None]
) -> None:
    """A model that overlooks the field in its text and follows errata: agreement with its recompute would choose a
    wrong method. Before and after calibration, auto gives the right answer."""
    hears(lambda text: "2026-07-01" in text.split("refused.")[1])  # after the text
    answer = (*ASK, "--choices", "accepted,refused")
    assert notes(*answer).out == "refused\n"
    done = notes("calibrate", "--cases", many, "--only")
    assert done.code == 0 and str(home / "profiles") in done.err
    assert (
        f"direct: use erratum: nothing was proven better than erratum, which is right in {LEAST} of {LEAST}" in done.out
    )
    assert f"a recompute decides by the field in 0 of {LEAST} cases" in done.out
    assert notes(*answer).out == "refused\n"
    told = notes(*ASK, "--explain").out
    assert "method erratum: nothing was proven better" in told and " (calibrate, 20" in told


def test_what_is_proven_better_is_followed(
    notes: Notes, compiled: Path, many: Path, hears: Callable[[Callable[[str], bool]], None]
) -> None:
    """A model that reads its text and no errata: a method that changes the text is right. The profile is listed, shown
    and removed by name; then the safe default applies."""
    hears(lambda text: "date: 2026-07-01\ntier" in text)
    found = notes("calibrate", "--cases", many, "--only", "--json").json
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
    told = "method field+erratum: the default for a model that calibrate has not measured"
    assert told in notes(*ASK, "--explain").out


def test_few_decisions_set_nothing(notes: Notes, compiled: Path, mine: Path, home: Path) -> None:
    """They are measured and shown, and an older profile stays."""
    done = notes("calibrate", "--cases", mine, "--only")
    assert done.code == 0 and "direct: use erratum: 1 cases prove nothing" in done.out
    assert "nothing is written: 1 decisions are too few" in done.err and not (home / "profiles").exists()
    found = notes("calibrate", "--cases", mine, "--only", "--json").json
    assert found["cases"] == 1 and found["path"] is None


def test_an_interrupted_calibration_goes_on(notes: Notes, compiled: Path, many: Path, home: Path) -> None:
    """The first line estimates the time. Ctrl-C keeps measured steps; the same command measures the rest, then removes
    the intermediate file. Other decisions start anew."""
    arguments = ("calibrate", "--cases", many, "--only")
    process = subprocess.Popen(command_line(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    folder, end = home / "profiles" / ".begun", time.monotonic() + 60
    while not (files := list(folder.glob("*.jsonl"))) or files[0].read_text().count("\n") < 4:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    first = process.communicate()[1].splitlines()
    assert process.returncode == 130 and first[-1] == "notes: interrupted"
    assert re.fullmatch(
        rf"measuring {LEAST} decisions takes about [0-9].*\. Ctrl-C keeps what was measured, and the same command "
        "goes on with it",
        first[-2],
    )
    measured = files[0].read_text().count("\n") - 1
    assert 3 <= measured < 2 * LEAST
    few = notes("calibrate", "--cases", many, "--only", "-n", 1)
    assert "measuring 1 decision takes about" in few.err
    done = notes(*arguments)
    assert done.code == 0 and f"{measured} of {2 * LEAST} steps were measured before" in done.err
    assert notes("profile", "ls", "-q").out and not any(folder.iterdir())
    assert "measuring 1 decision takes about" in notes(*arguments, "-n", 1).err


def test_a_report_for_others(notes: Notes, mine: Path, tmp_path: Path) -> None:
    """The page has the printed figures, of a new and of a saved calibration. It may replace such a page; another file
    is refused before measuring."""
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


def test_a_profile_of_an_older_notes_is_told(notes: Notes, compiled: Path, home: Path) -> None:
    """`ask` uses the safe default with advice to measure again; `profile ls` shows the problem, too."""
    name = saved(notes)
    path = home / "profiles" / f"{name}.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    asked = notes(*ASK, "-n", 2)
    assert asked.code == 0 and f"{path} was written by an older version" in asked.err
    assert f"notes profile rm {name}" in asked.err
    assert "older version" in notes("profile", "ls", "--json").json[0]["problem"]
    assert notes("profile", "rm", name).code == 0 and "warning" not in notes(*ASK, "-n", 2).err
