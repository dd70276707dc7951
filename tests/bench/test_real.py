"""make real: its tasks are about the sample skills, its tables are what the pages show, and it counts as it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import sizes
from bench.real import report
from bench.real.measure import Corrected, Fidelity, interval
from bench.real.run import Outcome, answers
from bench.real.tasks import SKILLS, Correction, Question, Tasks, contains, load_tasks
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, load_skill

TASKS = load_tasks()


@pytest.mark.parametrize("path", report.pages({}), ids=lambda path: path.name)
def test_the_pages_show_what_was_measured(path: Path) -> None:
    """Each table between markers is that of docs/results/real.json."""
    assert report.pages(report.stored())[path] == path.read_text(encoding="utf-8")


def test_the_pages_have_the_tables() -> None:
    readme, findings = ((report.ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/findings.md"))
    assert "<!-- real: summary -->\n| " in readme
    assert all(f"<!-- real: {name} -->\n| " in findings for name in report.TABLES)
    assert readme.count("\n") <= 180


def test_the_readme_has_the_table_of_sizes() -> None:
    table = sizes.table(json.loads(sizes.RESULTS.read_text(encoding="utf-8")))
    assert f"{sizes.BEGIN}{table}\n{sizes.END}" in (sizes.ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tasks", TASKS, ids=lambda tasks: tasks.skill)
def test_tasks_are_about_the_skills(tasks: Tasks) -> None:
    """40 questions whose answers are in the text, and 20 corrections of its fields: the new value is not in the text,
    the old one is, and neither counts as the other."""
    skill = load_skill(SKILLS / tasks.skill)
    assert (len(tasks.questions), len(tasks.corrections)) == (40, 20)
    assert [one.ask for one in tasks.questions if not contains(skill.text, one.accept)] == []
    for one in tasks.corrections:
        assert one.follows and one.other and one.other.right(skill.text)
        assert contains(one.value, one.new) and not contains(one.value, one.old), one.field
        assert contains(skill.values[one.field], one.old) and not contains(skill.values[one.field], one.new), one.field
        rest = skill.text.replace(f"{one.field}: {skill.values[one.field]}", "")
        assert not contains(rest, [skill.values[one.field], one.value]), one.field


@pytest.mark.parametrize(
    ("answer", "words", "right"),
    [
        ("It is 14 days.", ["14"], True),
        ("It is 140 days.", ["14"], False),
        ("version 4.2", ["2"], False),
        ("version 4.2.", ["4.2"], True),
        ("NINA falk", ["Nina Falk"], True),
        ("help@shop.example", ["help@shop.example"], True),
    ],
)
def test_words_count_as_a_whole(answer: str, words: list[str], right: bool) -> None:
    assert contains(answer, words) is right


def outcome(text: str) -> Outcome:
    return Outcome(text, np.array([1.0, 2.0], np.float32))


def test_old_and_new_values_are_counted_apart() -> None:
    """An answer with both has the old one; another answer stays right, or as wrong as it was."""
    question = Question("Who?", ("Ann",))
    one = Correction("fee", "9", "How much?", ("9",), ("5",), None, question)
    found = Corrected("field")
    assert found.add(one, [outcome("9"), outcome("Ann Lee")], [outcome("5"), outcome("Ann")])
    assert not found.add(one, [outcome("9, not 5"), outcome("Bob")], [outcome("5"), outcome("Ann")])
    assert (found.asked, found.new, found.old) == (2, 1, 1)
    assert (found.other_asked, found.other_same_verdict, found.other_same_text) == (2, 1, 0)


def test_verdicts_and_texts_are_counted_apart() -> None:
    rows = Fidelity("system")
    rows.add([Question("Who?", ("Ann",))] * 2, [outcome("Ann"), outcome("Bob")], [outcome("It is Ann"), outcome("Ann")])
    found = rows.as_dict()
    assert (found["right"], found["reference_right"], found["same_verdict"], found["same_text"]) == (1, 2, 1, 0)
    assert found["cosine"] == 1.0 and found["kl"] == 0.0


def test_the_interval_of_a_share() -> None:
    """Wilson's, as tables of it have it."""
    assert [round(one, 3) for one in interval(9, 10)] == [0.596, 0.982]
    assert interval(0, 0) == (0.0, 1.0)


def test_answers_from_a_shared_stem_are_those_of_each_prompt(workspace: Workspace, skill: Skill) -> None:
    """The same tokens and logits as for each question by itself, spliced and decoded."""
    segment = compile_skill(workspace, skill)
    prompts = [Prompt(ask, [segment], system="Be kind.") for ask in ("Why?", "When is it?")]
    for how in ({}, {"splice": False}, {"exact": True}):
        together = answers(workspace, prompts, **how)  # type: ignore[arg-type]
        apart = [answers(workspace, [one], **how)[0] for one in prompts]  # type: ignore[arg-type]
        assert [one.text for one in together] == [one.text for one in apart]
        for one, other in zip(together, apart, strict=True):
            np.testing.assert_allclose(one.logits, other.logits, rtol=1e-5, atol=1e-5)
