"""make paper: end to end on a second architecture, resumed, on tasks of its form; its mixes, its gate and its page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import notes_cli as notes
from bench.paper import __main__ as command
from bench.paper import report
from bench.paper import tasks as made
from bench.paper.caches import Lab, Mix, Pair
from bench.paper.experiments import EXPERIMENTS
from bench.paper.records import read_records
from notes_cli.config import Paths, shipped_model
from notes_cli.engine.limits import ContextOptions

WORDS = ["red", "green", "blue", "black"]
TASKS: dict[str, Any] = {
    "gated": {
        "tasks": {
            "door": {
                "role": "You mind a door.",
                "field": "badge",
                "vold": "gold",
                "vnew": "of paper",  # longer than the old value
                "rule": "If badge is gold, open. If badge is of paper, wait.",
                "request": "Someone knocks.",
                "correct": "wait",
                "stale": "open",
            }
        }
    },
    "compose_edit": {
        "INSTANCES": [
            {
                "name": "gate",
                "sys": "You mind a gate.",
                "skill_name": "GATE",
                "field": "ticket",
                "rule": "Lift the gate only if ticket is valid.",
                "Told": "valid",
                "Tnew": "void",
                "task": "A car comes. lift or stop?",
                "act_old": "lift",
                "act_new": "stop",
            }
        ]
    },
    "agent": {
        "DOMAINS": [
            ["BOX", "seal", "open only if seal is cut.", [["cut", "box {x}", "open"], ["new", "box {x}", "keep"]]]
        ],
        "ACT_OTHER": {"open": "keep", "keep": "open"},
    },
    "facts": {
        **dict.fromkeys(("CO", "CITY", "NAME", "DRUG"), WORDS),
        "NUM": ["12", "18", "24"],
        "DOMAINS": [["The lamp costs {n0}, the rug {n1}.", [["lamp", ["12", "18", "24"], "What does the lamp cost?"]]]],
    },
    "memory": {
        "CATALOG": [["mail", f"letter_{number}", "a letter"] for number in range(3)],
        "ACTIONS": ["write a letter"],
    },
}


def tasks_file(folder: Path, tasks: dict[str, Any] = TASKS) -> Path:
    path = folder / "tasks.json"
    path.write_text(json.dumps(tasks), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab with a random model of another architecture than the models that ship."""
    folder = tmp_path_factory.mktemp("paper")
    path = tiny.write_model(folder / "tiny.gguf", "qwen3", layers=2, quantization=None)
    options = ContextOptions(n_ctx=4096, n_sequences=4, unified=True)
    with notes.open(path, options, paths=Paths.under(folder)) as model:
        yield Lab(model.workspace, system=False, erratum=lambda field, value: f"{field} is now {value}.")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return made.gated(TASKS)[0]


@pytest.mark.model
def test_mixes_of_one_text_equal_its_prefill(lab: Lab, pair: Pair) -> None:
    """With every column stale or fresh the score is that of a plain prefill, also for values of other lengths; a mix is
    neither."""
    texts, tail = lab.changed(pair), lab.tail(pair.question)
    plain = []
    for text in (texts.old, texts.new):
        with lab.sequence(texts.head, text, tail) as sequence:
            plain.append(lab.score(sequence, pair.choices))
    with Mix(lab, pair) as mix:
        assert [mix.stale, mix.fresh] == pytest.approx(plain, abs=0.02)
        field = mix.score(lambda number: mix.columns[number].field)
        assert abs(field - mix.stale) > 0.001
        assert abs(field - mix.fresh) > 0.001
        assert mix.recovery(lambda number: number >= mix.first) == pytest.approx(1, abs=0.02)


@pytest.mark.model
def test_it_runs_on_another_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All experiments, on a random model and tasks of ours; a second run computes nothing, and one that was killed
    while it wrote only its last task."""
    model = tiny.write_model(tmp_path / "second.gguf", "qwen2", layers=1, embd=32, heads=2, kv_heads=1, trained=40000)
    given = ["--model", str(model), "--tasks", str(tasks_file(tmp_path)), "--out", str(tmp_path / "out")]
    given += ["--scale", "0.001", "--n-ctx", "36000"]
    assert command.main(given) == 0
    (lines,) = (tmp_path / "out").glob("*.jsonl")
    first = lines.read_text(encoding="utf-8")
    found = report.rows({(entry := json.loads(line))["cell"]: entry["result"] for line in first.splitlines()[1:]})
    assert found["left"] == {}
    assert found["counts"] == dict.fromkeys(EXPERIMENTS, 1) | {"mechanism": 2}
    page = lines.with_suffix(".md").read_text(encoding="utf-8")
    assert "E2, memory after the conversation: cosine | " in page
    assert "| agent | right in " in page
    lines.write_text(first[:-20], encoding="utf-8")
    capsys.readouterr()
    assert command.main(given) == 0
    assert re.findall(r"(\w+/\d+): [\d.]+ s$", capsys.readouterr().err, re.M) == ["e5/0"]
    again = lines.read_text(encoding="utf-8")
    assert again.splitlines()[:-1] == first.splitlines()[:-1] and again.count("\n") == first.count("\n")
    changed = tasks_file(tmp_path, {**TASKS, "memory": {**TASKS["memory"], "ACTIONS": ["sleep"]}})
    assert command.main([*given, "--tasks", str(changed)]) == 1
    assert "of another model or of other tasks" in capsys.readouterr().err


@pytest.mark.model
def test_the_model_that_ships_shows_the_mechanism(tmp_path: Path) -> None:
    """Its decisions are in the K/V after a field, not in the field's."""
    only = [word for name in ("gated", "trigger") for word in ("--only", name)]
    tasks, out = str(tasks_file(tmp_path)), tmp_path / "out"
    given = ["--model", str(shipped_model()), "--tasks", tasks, "--out", str(out), "--scale", "0.5", "--n-ctx", "2048"]
    assert command.main([*given, *only]) == 0
    (path,) = out.glob("*.json")
    (model,) = json.loads(path.read_text(encoding="utf-8"))["models"].values()
    rows = model["rows"]
    assert all(report.passes(row) for row in rows.values())
    for name in ("mechanism", "trigger"):
        assert abs(rows[f"{name}.changed"][0]) < 0.1
        assert abs(rows[f"{name}.after"][0] - 1) < 0.1
    assert rows["mechanism.injected"][0] > 0.9


def test_records_are_read_by_model(tmp_path: Path) -> None:
    """Of results/ and of the memory's summary; a repetition by int8 is no model of its own."""
    (tmp_path / "results").mkdir()
    (tmp_path / "mem" / "results").mkdir(parents=True)
    agent = {"model": "a/Some-8B-Instruct", "agreement": 0.9, "unified_correct": 0.8}
    for name, figures in (("x", agent), ("x_int8", agent | {"agreement": 0.1})):
        (tmp_path / "results" / f"agent_rigorous_{name}.json").write_text(json.dumps(figures), encoding="utf-8")
    summary = {"e5": {"by_model": {"a/Some-8B-Instruct": {"proposed_cos": 0.98}}}}
    (tmp_path / "mem" / "results" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert read_records(tmp_path) == {
        "agent.agree": {"Some 8B": 0.9},
        "agent.right": {"Some 8B": 0.8},
        "e5.cosine": {"Some 8B": 0.98},
    }


def test_the_gate_leaves_rows_out_with_their_reason() -> None:
    """A row counts from 0.80 right prefills on; figures that are not about decisions always do."""
    call = {"spliced": True, "agree": True}
    rows = {count: report.rows({f"tools/{n}": {**call, "right": [n < count]} for n in range(10)}) for count in (7, 8)}
    assert [report.passes(found["rows"]["tools.agree"]) for found in rows.values()] == [False, True]
    assert not report.passes([1.0, 7, 7, 7])  # too few
    data = {"records": {"tools.agree": {"A": 0.5, "B": 1.0}}, "models": {"seven": rows[7], "eight": rows[8]}}
    assert "| tool calls: same tool as after a full prefill | 0.5 to 1 (2) | gate | 1.00 (10) |" in report.page(data)
    assert "| tools | right in 7 of 10; agree 1.00; right 1.00 |  |" in report.page(data)


def test_the_page_shows_what_was_measured() -> None:
    """docs/paper.md and the table of docs/findings.md are made of docs/results/paper.json."""
    assert report.PAGE.read_text(encoding="utf-8") == report.page(report.stored())
    assert report.FINDINGS.read_text(encoding="utf-8") == report.findings(report.stored())
