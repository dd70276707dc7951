"""make reference: its cases and our side of them, compared with a forward pass in float64; PyTorch is not needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from forward import Forward, Rows

from bench.reference import __main__ as command
from bench.reference import ours, report
from bench.reference.cases import Case, CaseTokens, encode, load, padded, tokens_of
from notes_cli.config import shipped_model
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model

CASE = Case(
    *("gated tasks", "gate", "Be brief.\n\n", "# Gate\n", "gate", "open", "shut", ".\nIf it is shut, wait."),
    ask="Pass?\n",
    erratum="[STATE UPDATE] gate has changed to shut.",
)
LONGER = replace(CASE, new="closed")


@pytest.fixture(scope="module")
def path(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model, written again in f32."""
    return ours.in_f32(make_model(quantization=gguf.GGMLQuantizationType.Q8_0), tmp_path_factory.mktemp("f32"))


@pytest.fixture(scope="module")
def context(path: Path) -> Iterator[Context]:
    with Model(path) as model, ours.open_context(model, 1024, 1) as context:
        yield context


def expected(forward: Forward, case: CaseTokens) -> dict[str, ours.Logits]:
    """The states of a case by a forward pass in float64."""

    def decided(rows: Rows, tokens: list[int]) -> ours.Logits:
        return forward.compute(rows, range(len(rows), len(rows) + len(tokens)), tokens)[-1].astype(np.float32)

    def edited(rows: Rows) -> Iterator[tuple[str, ours.Logits]]:
        for state, (in_place, erratum) in ours.EDITS.items():
            copy = dict(rows)
            if in_place:
                forward.compute(copy, range(*case.field), case.value)
            yield state, decided(copy, case.erratum if erratum else case.ask)

    (first, last), count, prefilled, alone, spliced, full = case.chunk, len(case.context), {}, {}, {}, {}
    forward.compute(prefilled, range(count), case.context)
    forward.compute(alone, range(last - first), case.context[first:last])
    forward.compute(spliced, range(first), case.context[:first])
    spliced |= {first + place: forward.moved(row, first) for place, row in alone.items()}
    forward.compute(spliced, range(last, count), case.context[last:])
    found = dict(edited(prefilled)) | {ours.FULL: decided(full, case.full)}
    return found | {f"{ours.TRANSPLANTED}{state}": logits for state, logits in edited(spliced)}


def test_every_state_is_that_of_a_forward_pass(path: Path, context: Context) -> None:
    """And a state conforms to no other one: the bound tells them apart."""
    tokens = tokens_of(CASE, context.model)
    mine, reference = ours.logits_of(context, tokens), expected(Forward(path), tokens)
    assert report.failures(report.compare("gate", mine, reference, [])) == []
    for state in mine:
        others = [report.distance(mine[state], reference[other]) for other in mine if other != state]
        assert min(others) > 10 * report.DISTANCE, state


def test_a_value_of_another_length_moves_what_follows(path: Path, context: Context) -> None:
    """As in a forward pass whose later entries are moved."""
    tokens, forward, rows = tokens_of(LONGER, context.model), Forward(path), {}
    forward.compute(rows, range(len(tokens.context)), tokens.context)
    grows = len(tokens.value) - (tokens.field[1] - tokens.field[0])
    assert grows == 2
    moved = {place + grows: forward.moved(rows[place], grows) for place in range(tokens.field[1], len(rows))}
    rows = {place: rows[place] for place in range(tokens.field[0])} | moved
    forward.compute(rows, range(tokens.field[0], tokens.field[1] + grows), tokens.value)
    reference = forward.compute(rows, range(len(rows), len(rows) + len(tokens.ask)), tokens.ask)[-1]
    (mine,) = ours.logits_of_other_length(context, tokens).values()
    assert report.distance(mine, reference.astype(np.float32)) < report.DISTANCE


def test_values_are_padded_to_the_same_length(context: Context) -> None:
    """The shorter one, and neither where they are equally long."""
    tokenize = partial(encode, context.model)
    assert padded(CASE, tokenize) == CASE
    assert padded(LONGER, tokenize) == replace(LONGER, old="open x")
    assert padded(replace(LONGER, old="closed", new="open"), tokenize).new == "open x"


def test_cases_are_read_from_the_tasks(tmp_path: Path) -> None:
    """Fields and chunks have tokens of their own, in all three groups; facts are placed early and late in turn."""
    gate = {"field": "gate", "rule": "Pass if it is open."}
    names = ["Ann", "Bob"]
    tasks = {
        "gated": {
            "tasks": {
                "gate": gate
                | {"role": "You guard.", "vold": "open", "vnew": "shut", "request": "Pass?"}
                | {"correct": "no", "stale": "yes"}
            }
        },
        "compose_edit": {
            "INSTANCES": [
                gate
                | {"name": "gate", "sys": "You guard.", "skill_name": "GATE", "Told": "open", "Tnew": "shut"}
                | {"task": "Pass?", "act_old": "yes", "act_new": "no"}
            ]
        },
        "facts": {
            "CO": ["Orb"],
            "CITY": ["Ulm"],
            "NAME": names,
            "DRUG": ["salt"],
            "NUM": ["1", "2"],
            "SYS": "Read.",
            "DOMAINS": [["Log: the guard is {name}; the gate is {n0}.", [["guard", names, "Who guards?"]]]],
        },
    }
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    with Model(shipped_model()) as model:
        found = load(tmp_path / "tasks.json", model, facts=4)
        assert [one.group for one in found] == ["gated tasks", "compose-then-edit", *["facts"] * 4]
        assert ["[TOOL RESULT]" in one.head for one in found[2:]] == [False, True, False, True]
        guards = {f"the guard is {name}" for name in names}
        assert all({one.old, one.new} == guards for one in found[2:])
        for one in found:
            tokens = tokens_of(one, model)
            text = b"".join(model.token_bytes(token, special=True) for token in tokens.context).decode()
            assert text == one.context(one.old)
            assert model.text(tokens.context[slice(*tokens.field)]).strip() == one.old
            assert model.text(tokens.context[slice(*tokens.chunk)]).strip() == one.chunk(one.old)
            assert one.head.startswith("<|im_start|>") == (one.group != "gated tasks")


def logits(*values: float) -> ours.Logits:
    return np.array(values, np.float32)


def test_differences_fail() -> None:
    """Another direction, another likeliest token, another order of the answers; scale alone does not."""
    stale = {"stale": logits(1, 2, 3)}
    assert report.failures(report.compare("a", {"stale": logits(2, 4, 6)}, stale, [0, 1])) == []
    (line,) = report.failures(report.compare("a", {"stale": logits(1, 2, 3.01)}, stale, [0, 1]))
    assert line.startswith("a, stale: 1 - cosine ") and line.endswith("same decision: True")
    near = {"stale": logits(1, 2, np.nextafter(np.float32(2), 3))}
    (line,) = report.failures(report.compare("a", {"stale": logits(1, 2, 2)}, near, []))
    assert line.endswith("same decision: False")
    assert report.decision(logits(1, 2, 9), [0, 1]) != report.decision(logits(2, 1, 9), [0, 1])
    with pytest.raises(ValueError, match=r"a: .* cannot be compared with"):
        report.compare("a", {}, stale, [])


def test_the_table_has_the_worst_of_each_state() -> None:
    """With the number of cases, and how far the state is from a stale cache."""
    found = [
        report.Compared("a", "erratum", 1e-9, 0.25, True),
        report.Compared("b", "erratum", 4e-9, 0.75, False),
        report.Compared("a", "stale", 0.0, 0.0, True),
    ]
    assert report.table(found).split("\n")[2:] == [
        "| erratum | 2 | 4e-09 | 1 of 2 | 5e-01 |",
        "| stale | 1 | 0e+00 | 1 of 1 | 0e+00 |",
    ]


def test_the_page_shows_that_every_case_conforms() -> None:
    """Two models, every state."""
    page = command.PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.split("\n") if line.startswith("| ") and " of " in line]
    states = [*ours.EDITS, ours.FULL, *(ours.TRANSPLANTED + state for state in ours.EDITS), ours.OTHER_LENGTH]
    assert [row[0].strip("| ") for row in rows] == states * 2
    for _, cases, furthest, same, _ in rows:
        assert same == f"{cases} of {cases}" and float(furthest) <= report.DISTANCE


def test_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for a clone that is not named or is none, and for the extra."""
    with pytest.raises(SystemExit, match="name a clone of the author's repository"):
        command.main([])
    with pytest.raises(SystemExit, match=f"{tmp_path} is no clone of the author's repository"):
        command.main(["--clone", str(tmp_path)])
    (tmp_path / "editkv").mkdir()
    (tmp_path / "editkv" / "core.py").touch()
    monkeypatch.setattr(command, "NEEDED", ("torch_of_no_machine",))
    with pytest.raises(SystemExit, match="torch_of_no_machine not installed: make reference"):
        command.main(["--clone", str(tmp_path)])
