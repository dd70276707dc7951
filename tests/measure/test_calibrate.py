"""Calibration: which settings are measured and chosen, also for several skills and for carried recurrent state."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notes_cli.config import shipped_model
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.sequence import KVSequence, Task
from notes_cli.errors import NotesError
from notes_cli.library.profiles import CalibrationCheckpoint, Carried, Profile, Profiles, step_name
from notes_cli.measure import battery, composition, verify
from notes_cli.measure.battery import LEAST, Asked, Case, Pair, pairs, shipped_battery
from notes_cli.measure.calibrate import SEAMS, calibrate
from notes_cli.measure.composition import REPAIRS, WITHOUT, Tally, judge, judge_carried, measure_carried, measure_pairs
from notes_cli.measure.examination import Examination, examine_splice
from notes_cli.measure.verify import Answered
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import Decision
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import shipped_wordings
from notes_cli.text.skill import parse_skill

from ..conftest import MakeWorkspace


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model thinks without end, and one seam is as good as four."""
    monkeypatch.setattr("notes_cli.measure.calibrate.THINK", 4)
    monkeypatch.setattr("notes_cli.measure.calibrate.SEAMS", (1,))


def short_cases(number: int) -> list[Case]:
    """Different decisions by short texts."""
    skills = [
        parse_skill(f"date: 2026-06-0{day}\n\nReturns before 2026-06-15 are accepted.", source="x", default="x")
        for day in range(1, number + 1)
    ]
    ways = ("accepted", "refused")
    return [Case(skill, "May I return this?", ways, "date", "2026-07-01", ways) for skill in skills]


def test_it_is_not_agreement_that_counts() -> None:
    """One case, ten times in three ways: correctness counts, not agreement with the recompute."""
    logits = np.ones(3, np.float32)
    choices = {"erratum": "new", "field": "old"}
    found = {name: composition.Decision(choice, logits, 1, 0.1) for name, choice in choices.items()}
    tally = Tally()
    for _ in range(10):
        for name, one in found.items():
            tally.add("method", name, "direct", one, found["field"], "new")
        tally.add("method", "stale", "direct", found["field"], found["field"], "new")
    tally.add("method", "suffix", "direct", found["erratum"], found["field"], "new")  # in one case alone
    assert tally.right("method") == {"erratum": [True] * 10, "field": [False] * 10, "stale": [False] * 10}
    measured = {one.name: (one.same, one.right) for one in tally.measured()}
    assert measured == {"erratum": (0, 10), "field": (10, 0), "stale": (10, 0), "suffix": (0, 1)}


def test_fields_decide_on_the_shipped_model() -> None:
    """On a few decisions: every method, wording, seam and place is measured, and none is chosen."""
    progress: list[tuple[int, int]] = []
    with Workspace(shipped_model(), ContextOptions(n_ctx=1024, n_threads=1)) as workspace:
        profile = calibrate(workspace, shipped_battery()[:3], lambda done, of: progress.append((done, of)))
    assert progress == [(done, 6) for done in range(1, 7)]
    assert profile.decisive["direct"] == 3
    for way in ("direct", "reasoned"):
        assert profile.methods[way] == "erratum" and profile.verdicts[way].startswith("3 cases prove nothing")
        stale, recompute = profile.found("method", "stale", way), profile.found("method", "recompute", way)
        assert stale is not None and recompute is not None
        assert stale.same < stale.cases == recompute.same and stale.decoded < recompute.decoded
    named = {(one.what, one.name) for one in profile.measured}
    assert {("wording", name) for name in shipped_wordings().forms} <= named
    assert {("seam", str(seam)) for seam in SEAMS} <= named
    assert {("place", "early"), ("place", "late")} <= named


@pytest.mark.parametrize("kind", ["llama", pytest.param("lfm2", marks=pytest.mark.patches("recurrent"))])
def test_a_stopped_calibration_goes_on(make_workspace: MakeWorkspace, tmp_path: Path, kind: str, brief: None) -> None:
    """After each step, with the figures of a single run; steps of other cases, versions or damage are not used."""
    cases, drawn = short_cases(2), pairs()[:1]
    whole = calibrate(make_workspace(kind), cases, None, drawn)
    profile, steps = tmp_path / "profiles" / "a.json", {"llama": 5, "lfm2": 6}[kind]
    measured: list[str] = []

    def stop_after(most: int) -> Profile:
        unfinished = CalibrationCheckpoint(profile, "this version")

        def keep(name: str, measure: Callable[[], Any]) -> Any:
            return unfinished.keep(name, lambda: (measured.append(name), measure())[1])

        def progress(done: int, of: int) -> None:
            if done == most:
                raise KeyboardInterrupt

        return calibrate(make_workspace(kind), cases, progress, drawn, keep)

    for most in range(1, steps + 1):
        with pytest.raises(KeyboardInterrupt):
            stop_after(most)
        assert len(measured) == most
    assert figures(stop_after(0)) == figures(whole) and len(measured) == steps == len(set(measured))
    kept = profile.parent / ".begun" / "a.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:-1]) + lines[-1][:9])  # as if the disk was full
    assert len(CalibrationCheckpoint(profile, "this version").found) == steps - 1
    assert not CalibrationCheckpoint(profile, "another version").found
    assert not {step_name("forms", 0, cases[0])} & {step_name("forms", 0, cases[1]), step_name("forms", 1, cases[0])}
    kept.write_bytes(b"\xff" * 99)
    assert not CalibrationCheckpoint(profile, "this version").found
    CalibrationCheckpoint(profile, "this version").forget()
    assert not kept.exists()


def figures(profile: Profile) -> list[tuple[object, ...]]:
    """All counts, without times."""
    rows = [(one.what, one.name, one.way, one.cases, one.same, one.right) for one in profile.measured]
    means = [(one.cosine, one.decoded) for one in profile.measured]
    return [*rows, *means, tuple(profile.decisive.items()), (profile.wording, profile.seam, profile.carry)]


def test_a_model_that_overlooks_fields_proves_nothing(make_workspace: MakeWorkspace, brief: None) -> None:
    """Decisions of random weights do not depend on the field: nothing is proven, and the default stays."""
    profile = calibrate(make_workspace(), short_cases(3))
    assert profile.methods == {"direct": "erratum", "reasoned": "erratum"}
    assert max(profile.decisive.values()) < 2


N = 48
FEW = 6  # pairs


def rights(right: dict[str, int], of: int = N) -> tuple[dict[str, list[bool]], dict[str, list[bool]]]:
    """Correctness by way: of all questions that need one skill, and of so many that need two."""
    ways = {"recompute": of, "spliced": of, **dict.fromkeys(REPAIRS, of), **dict.fromkeys(WITHOUT, of // 3), **right}
    one = {way: [True] * of for way in ways if way not in WITHOUT}
    return one, {way: [number < count for number in range(of)] for way, count in ways.items()}


@pytest.mark.parametrize(
    ("right", "verdict", "repair"),
    [
        ({}, "holds", ""),
        ({"spliced": 46}, "holds", ""),
        ({"spliced": 44}, "open", ""),  # neither proven
        ({"recompute": 18, "spliced": 17}, "unable", ""),  # no better than with one skill alone
        ({"recompute": 40, "spliced": 40, "without the second": 39}, "unable", ""),  # one skill would do
        ({"spliced": 20}, "fails", "reversed"),
        ({"spliced": 20, "reversed": 24}, "fails", "seam@16"),
        ({"spliced": 20, "reversed": 24, "seam@16": 20}, "fails", "together"),
        ({"spliced": 20, "reversed": 24, "seam@16": 20, "together": 40}, "fails", "suffix"),
        ({"spliced": 20, **dict.fromkeys(REPAIRS, 30)}, "fails", "recompute"),
    ],
)
def test_what_follows_from_the_figures(right: dict[str, int], verdict: str, repair: str) -> None:
    """A proven loss has the cheapest repair; there is no verdict if the model cannot answer such questions."""
    found = judge(*rights(right))
    assert (found.verdict, found.repair) == (verdict, repair)
    spliced = right.get("recompute" if verdict == "unable" else "spliced", N)
    assert f"{spliced} of {N} (" in found.why
    assert judge(*rights({"spliced": 0}, of=LEAST - 1)).verdict == "open"  # few questions prove nothing


class Reader:
    """Replaces a model that takes notes: it needs K/V of the second skill that depends on the first. The right answer
    is the first choice."""

    def __init__(self, found: Sequence[Pair]) -> None:
        self.needs = {one.question: one.needs for pair in found for one in pair.asked}

    def decide(self, sequence: KVSequence, choices: Sequence[str]) -> Decision:
        text = sequence.context.model.text(map(int, sequence.tokens))
        needs = next(needs for question, needs in self.needs.items() if question in text)
        skills = [piece for piece in sequence.pieces if piece.kind == "splice" and piece.how != "seam"]
        both = "# Customers" in text and "# Rules" in text
        concluded = len(skills) == 1 or skills[-1].how == "decoded"
        choice = choices[0 if needs == 1 or (both and concluded) else -1]
        return Decision(choice, {one: float(one == choice) for one in choices})


def first_right(asked: Asked, number: int) -> Asked:
    """The question, made unique, with the first choice as the right one."""
    return replace(asked, right=asked.choices[0], question=f"{number}: {asked.question}")


def test_what_concludes_while_it_reads_fails_and_is_repaired(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order and seam do not help, compiling together does, as the cheapest repair."""
    monkeypatch.setattr(composition, "LEAST", FEW)  # enough here: nothing is random
    monkeypatch.setattr(battery, "LOSS", 0.5)
    given = [
        replace(pair, asked=tuple(first_right(one, number) for one in pair.asked))
        for number, pair in enumerate(pairs(FEW))
    ]
    reader = Reader(given)

    def choosing(_: Workspace, sequence: KVSequence, choices: Sequence[str], limit: int) -> Task[Decision]:
        yield [sequence]
        return reader.decide(sequence, choices)

    monkeypatch.setattr(composition, "choose_task", choosing)
    done: list[int] = []
    found, measured = measure_pairs(make_workspace(), given, lambda: done.append(1))
    assert found is not None and (found.verdict, found.repair) == ("fails", "together") and len(done) == FEW
    right = {(one.name, one.way): one.right for one in measured}
    assert [right[way, "two"] for way in ("recompute", "spliced", *REPAIRS)] == [FEW, 0, 0, 0, FEW, FEW]
    assert all(right[way, "one"] == FEW for way in ("recompute", "spliced", *REPAIRS))
    assert [right[way, "two"] for way in WITHOUT] == [0, 0]
    decoded = {one.name: one.decoded for one in measured if one.way == "two"}
    assert decoded["together"] < decoded["spliced"] < decoded["seam@16"] < decoded["suffix"] < decoded["recompute"]


def test_on_the_model_that_ships() -> None:
    """Questions of one skill are right in all ways; those of two only if K/V of one depends on the other."""
    with Workspace(shipped_model(), ContextOptions(n_ctx=1024, n_threads=1)) as workspace:
        found, measured = measure_pairs(workspace, pairs(4))
        assert workspace.context.used == 0
    assert found is not None and found.verdict == "open" and "4 questions prove nothing" in found.why
    assert all(one.right == one.same == 4 for one in measured if one.way == "one")
    right = {one.name: one.right for one in measured if one.way == "two"}
    assert right["recompute"] == right["together"] == right["suffix"] == 4
    assert max(right[name] for name in ("spliced", "reversed", "seam@16", *WITHOUT)) <= 2
    exact = next(one for one in measured if one.name == "recompute")
    assert exact.cosine == 1.0


@pytest.mark.parametrize("kind", ["mamba", "gpt2"])
def test_what_cannot_be_moved_is_not_measured(make_workspace: MakeWorkspace, kind: str) -> None:
    """Only the first of several skills is reused there."""
    assert measure_pairs(make_workspace(kind), pairs(1)) == (None, [])
    workspace = make_workspace(kind)
    segments = [compile_skill(workspace, one) for one in (pairs(1)[0].first, pairs(1)[0].second)]
    report = examine_splice(workspace, Examination(segments, ["Why?"], choices=["a", "b"]))
    assert report.composition is None


def test_which_skills_a_question_needs(make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose removal changes the decision; repairs are tried for other decisions than the recompute's."""
    pair = pairs(1)[0]
    alone, both = (replace(one, choices=("yes", "no")) for one in pair.asked)
    reader = Reader([replace(pair, asked=(alone, both))])

    def answered(sequence: KVSequence, choices: Sequence[str]) -> Answered:
        return Answered(reader.decide(sequence, choices).choice, 1.0)

    for module in (verify, composition):
        monkeypatch.setattr(module, "answered", answered)
    workspace = make_workspace()
    segments = [compile_skill(workspace, one) for one in (pair.first, pair.second)]
    wanted = Examination(segments, [alone.question, both.question], choices=alone.choices)
    found = examine_splice(workspace, wanted).composition
    assert found is not None and workspace.context.used == 0
    assert [(one.needs, one.same) for one in found.questions] == [
        ((), True),  # the Reader always answers yes
        ((pair.first.name, pair.second.name), False),
    ]
    assert found.counts(several=False) == (1, 1) and found.counts(several=True) == (0, 1)
    assert {one.name: one.same for one in found.tried} == {
        **dict.fromkeys(("reversed", "seam@16"), (True, False)),
        **dict.fromkeys(("together", "suffix"), (True, True)),
    }
    assert found.repair == "together"
    single = examine_splice(workspace, replace(wanted, questions=[alone.question])).composition
    assert single is not None and single.tried == () and single.repair == ""
    assert examine_splice(workspace, replace(wanted, splice=segments[:1])).composition is None


@pytest.mark.parametrize(
    ("carried", "read", "without", "verdict", "says"),
    [
        (60, 60, 20, "holds", "decides as one that is decoded: right in 60 of 60"),
        (59, 60, 20, "holds", "right in 59 of 60"),
        (40, 60, 20, "fails", "loses decisions"),
        (55, 60, 20, "open", "neither a loss nor that there is none"),
        (30, 30, 30, "open", "does not decide by a skill even when it reads it"),
    ],
)
def test_what_follows(carried: int, read: int, without: int, verdict: str, says: str) -> None:
    """`holds` needs decisions that depend on the skill, and hardly any of them lost."""
    right = {
        name: [number < count for number in range(60)]
        for name, count in (("carried", carried), ("recompute", read), ("without", without))
    }
    found = judge_carried(right)
    assert found.verdict == verdict and says in found.why
    few = judge_carried({name: [name != "without"] * 40 for name in right})  # even if all are right
    assert few.verdict == "open" and few.why.startswith("40 decisions prove nothing")


@pytest.mark.patches("recurrent")
def test_a_random_hybrid_is_not_trusted(make_workspace: MakeWorkspace) -> None:
    """Both places and all three ways are measured, and the verdict is `open`."""
    workspace, cases = make_workspace("lfm2"), short_cases(3)
    progress: list[int] = []
    found, measured = measure_carried(workspace, cases, lambda: progress.append(1))
    assert found is not None and found.verdict == "open" and len(progress) == 3
    assert {(one.name, one.way) for one in measured} == {
        (way, place) for way in ("carried", "recompute", "without") for place in ("after", "before")
    }
    decoded = {(one.name, one.way): one.decoded for one in measured}
    assert all(decoded["carried", place] < decoded["recompute", place] for place in ("after", "before"))
    assert not workspace.context.carries
    # attention alone has no recurrent state
    assert measure_carried(make_workspace(), cases[:1], lambda: None) == (None, [])


@pytest.mark.patches("recurrent")
def test_a_profile_decides_unless_the_user_does(make_workspace: MakeWorkspace, brief: None) -> None:
    """A saved profile is followed; a damaged one is refused, and no state is carried. Methods that rewrite are not
    measured on a model that cannot."""
    first = make_workspace("mamba")
    progress: list[tuple[int, int]] = []
    profile = calibrate(first, short_cases(2), lambda done, of: progress.append((done, of)))
    assert progress[-1] == (6, 6) and profile.carry is not None and profile.carry.verdict == "open"
    names = {one.name for one in profile.measured if one.what == "method"}
    assert names and not names & {"field", "selective@16", "suffix"}
    profiles = Profiles(first.paths.profiles)

    def opened(found: Carried | None, **chosen: bool) -> bool:
        parts = {name: getattr(profile, name) for name in Profile.__dataclass_fields__} | {"carry": found}
        path = profiles.save(Profile(**parts), "test")
        assert profiles.read(path).carry == found
        with Workspace(first.model.path, first.options, paths=first.paths, **chosen) as workspace:
            _ = workspace.identity
            return workspace.context.carries

    assert opened(Carried("holds", "because"))
    assert not opened(Carried("fails", "because")) and not opened(None)
    assert not opened(Carried("holds", "because"), carry=False)
    assert opened(Carried("open", "because"), carry=True)
    path = profiles.path(first.identity, first.context.options.cache)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"carry": {"verdict": "surely", "why": ""}}))
    with pytest.raises(NotesError, match=r"carry\.verdict is 'surely'"):
        profiles.read(path)
    with Workspace(first.model.path, first.options, paths=first.paths) as workspace:
        _ = workspace.identity
        assert not workspace.context.carries
