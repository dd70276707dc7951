"""Small readers of tables: their texts, how they are measured, and the page of what was."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest

from bench import ablations
from bench.protocol.hypotheses import SCALE
from bench.protocol.texts import Next
from notes_cli import config
from training.ablations.subjects import LESSONS, SIZES, SUBJECTS, Lessons
from training.tiny.world import GOES_BY

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("lessons", [Lessons(), Lessons(bound=True), Lessons(below=1.0)])
def test_texts_are_of_the_last_lessons(lessons: Lessons) -> None:
    """Rules are tables, one and two skills in turn, fields above the rules whatever training had."""
    bound = []
    texts = ablations.Tables(Next("f" * 40, "known"), lessons)
    for number, case in islice(texts.cases("above", 60), 60):
        assert len(case.drafts) == (2 if number % 2 == 0 else 1)
        assert {rule.kind for draft in case.drafts for rule in draft.rules} == {"table"}
        assert not any(draft.below for draft in case.drafts) and all(1 <= len(one.rules) <= 3 for one in case.drafts)
        bound += [GOES_BY.get(rule.topic) == rule.field for draft in case.drafts for rule in draft.rules]
        assert case.answer != case.answer_new
    assert all(bound) == lessons.bound


def test_subjects_differ_in_one_thing() -> None:
    """Sizes in nothing but the size, lessons in one of them, or in those that are named; `all` has all four."""
    smallest = next(iter(SIZES.values()))
    assert len({subject.lessons for subject in SIZES.values()}) == 1 == len({s.size for s in LESSONS.values()})
    for name, subject in LESSONS.items():
        plain, own = vars(smallest.lessons), vars(subject.lessons)
        assert subject.size == smallest.size and len([key for key in own if own[key] != plain[key]]) == (
            4 if name == "all" else 1 + name.count("-")
        )


def test_a_subject_is_measured_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the model that ships in a small reader's place: one case; again, nothing is measured again."""
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(config.shipped_model(), models / "1m-seed1.gguf")
    (models / "1m-seed1.log").write_text("as it began\nstep 1 loss 1\nstep 2 loss 0\nwrote it\n", encoding="utf-8")
    given = ["1m", "--models", str(models), "--keep", str(tmp_path / "kept"), "--cases", "1"]
    assert ablations.main(given) == 0
    said = capsys.readouterr().out
    assert "R4 models of about 1, 4 and 10 million parameters, known words: TOO FEW CASES" in said
    assert "note index: 1.000" in said and "field's rows fresh: 0.000" in said
    kept = {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*.jsonl")}
    assert len(kept) == len(SCALE.measures)
    assert ablations.main(given) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*.jsonl")} == kept


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["2m"], "no subject '2m'. There are: 1m, 4m"),
        (["1m", "--models", "/nowhere"], "python -m training.ablations.train 1m --seed 1"),
        (["--write", "/nowhere"], "there is no such folder"),
        (["--write", ".", "--cases", "3"], "as many cases as docs/protocol.md asks"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said, before anything is measured."""
    with pytest.raises(SystemExit) as stop:
        ablations.main(arguments)
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_the_page_is_what_is_stored() -> None:
    """No figure of it is typed in, and every subject is there."""
    stored = json.loads((DOCS / ablations.STORED).read_text(encoding="utf-8"))
    assert (DOCS / ablations.PAGE).read_text(encoding="utf-8") == ablations.page(stored)
    assert list(stored) == list(SUBJECTS)
