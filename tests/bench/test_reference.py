"""make reference: its cases and our side of them, compared with a forward pass in float64; PyTorch is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from forward import Forward, Rows

from bench.reference import __main__ as command
from bench.reference import ours, report
from bench.reference.cases import Case, CaseTokens, tokens_of
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
    """With the number of decisions that agree, and how far the state is from a stale cache."""
    found = [
        report.Compared("a", "erratum", 1e-9, 0.25, True),
        report.Compared("b", "erratum", 4e-9, 0.75, False),
        report.Compared("a", "stale", 0.0, 0.0, True),
    ]
    assert report.table({"m": found}).split("\n")[2:] == [
        "| erratum | 4e-09 | 1 of 2 | 5e-01 |",
        "| stale | 0e+00 | 1 of 1 | 0e+00 |",
    ]


def test_the_page_shows_that_every_case_conforms() -> None:
    """Two models, every state."""
    page = command.PAGE.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.split("\n") if line.startswith("| ") and " of " in line]
    states = [*ours.EDITS, ours.FULL, *(ours.TRANSPLANTED + state for state in ours.EDITS), ours.OTHER_LENGTH]
    assert [row[0] for row in rows] == states
    for row in rows:
        for furthest, same in ((row[1], row[2]), (row[4], row[5])):
            agreed, cases = same.split(" of ")
            assert agreed == cases != "0" and float(furthest) <= report.DISTANCE
