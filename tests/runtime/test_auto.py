"""Tests the method `auto`: for each edit the field in place alone, where that decides as field and erratum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from notes_cli.editing.methods import AUTO, FIELD, FIELD_ERRATUM
from notes_cli.engine.segment import Segment
from notes_cli.errors import UnsupportedError
from notes_cli.runtime.answering import ask, explain
from notes_cli.runtime.auto import compare
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import parse_skill

OLD, NEW = "2026-06-01", "2026-07-01"


def _never() -> Any:
    raise AssertionError("the decision without an edit was not needed")


@pytest.mark.parametrize(
    ("field", "both", "stale", "method"),
    [
        ([0.6, 0.4], [0.9, 0.1], None, FIELD),  # they agree
        ([0.6, 0.4], [0.1, 0.9], None, FIELD_ERRATUM),  # field decides otherwise, by more than the margin
        ([0.6, 0.4], [0.45, 0.55], [0.9, 0.1], FIELD),  # and by less, and as without an edit
        ([0.0, 0.6, 0.4], [0.0, 0.45, 0.55], [1.0, 0.0, 0.0], FIELD_ERRATUM),  # the edit moves the decision
    ],
)
def test_the_cheaper_method(field: list[float], both: list[float], stale: list[float] | None, method: object) -> None:
    """By the margin; the decision without an edit is computed only where it counts."""
    verdict = compare(np.array(field), np.array(both), _never if stale is None else lambda: np.array(stale))
    assert verdict.method == method and verdict.why


@pytest.fixture
def returns(workspace: Workspace) -> Segment:
    text = f"date: {OLD}\n\nAll goods count.\nA tier is a class of customers."
    return compile_skill(workspace, parse_skill(text, source="returns.txt", default="returns"))


@pytest.mark.parametrize("value", [NEW, "the first of July"], ids=["same length", "longer"])
@pytest.mark.parametrize("choices", [None, ["yes", "no"]], ids=["text", "choices"])
@pytest.mark.parametrize("chosen", ["field", "field+erratum"])
def test_the_prompt_is_that_of_the_chosen_method(
    workspace: Workspace,
    returns: Segment,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    choices: list[str] | None,
    chosen: str,
) -> None:
    """So are its counts and its answer; tokens decoded to choose the method are counted, and no lease remains."""
    seen: dict[str, np.ndarray] = {}

    def choose(field: np.ndarray, both: np.ndarray, stale: Callable[[], np.ndarray]) -> object:
        seen.update(field=field, both=both, stale=stale())
        return replace(compare(both, both, stale), method=FIELD if chosen == "field" else FIELD_ERRATUM)

    monkeypatch.setattr("notes_cli.runtime.auto.compare", choose)
    request = Request("Why?", [returns], errata=[f"date={value}"], choices=choices, max_tokens=4, method=AUTO)
    by_name = ask(workspace, replace(request, method=FIELD if chosen == "field" else FIELD_ERRATUM))
    plain = ask(workspace, replace(request, errata=[]))
    leased = workspace.context.n_leased
    answer = ask(workspace, request)
    assert workspace.context.n_leased == leased
    assert str(answer.settings.method) == chosen and answer.settings.tried > 0
    assert (answer.text, answer.counts) == (by_name.text, by_name.counts)
    assert len(seen["field"]) == len(seen["stale"]) and not np.allclose(seen["field"], seen["both"], atol=1e-4)
    if choices is not None:
        assert np.allclose(seen["stale"], [*plain.probabilities.values()], atol=0.02)


def test_where_nothing_is_compared(workspace: Workspace, returns: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a plan, an exact prompt, and where sequences cannot be shared: field and erratum, or an erratum."""
    request = Request("Why?", [returns], errata=[f"date={NEW}"], max_tokens=2, method=AUTO)
    assert explain(workspace, request).settings.method == FIELD_ERRATUM
    assert str(ask(workspace, replace(request, exact=True)).settings.method) == "erratum"

    def refuse(*_: object) -> object:
        raise UnsupportedError("sequences of this model share nothing")

    monkeypatch.setattr("notes_cli.engine.sequence.KVSequence.share", refuse)
    settings = ask(workspace, request).settings
    assert settings.method == FIELD_ERRATUM and "share nothing" in str(settings.why)
