"""Tests effective settings: with and without a profile, near the end of a text, and by the method auto."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from notes_cli.library.profiles import FORMAT, Measured, Profile, Profiles

from notes_cli.commands.remedies import worded
from notes_cli.editing.methods import AUTO, FIELD, FIELD_ERRATUM, Method, change
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError, UnsupportedError
from notes_cli.runtime.answering import ask, compare, explain
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.request import Request
from notes_cli.runtime.resolve import choose, defaults
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeWorkspace


def calibrated(workspace: Workspace, direct: str, reasoned: str = "recompute") -> None:
    measured = [
        Measured("method", direct, "direct", 40, 39, 38, 0.99, 30.0, 10.0),
        Measured("method", reasoned, "reasoned", 36, 36, 35, 0.99, 30.0, 10.0),
    ]
    profile = Profile(
        *(workspace.identity, "f16/f16", 40, {"direct": 40, "reasoned": 36}),
        *({"direct": direct, "reasoned": reasoned}, "line", 4, "late", measured),
        verdicts=dict.fromkeys(("direct", "reasoned"), "it is right in 38 of 40"),
    )
    Profiles(workspace.paths.profiles).save(profile, "notes 0")


def test_a_profile_of_another_cache_or_an_older_notes_is_not_followed(workspace: Workspace) -> None:
    """It could make answers worse: safe defaults apply, and a notice has the remedy."""
    calibrated(workspace, "recompute")
    options = ContextOptions(n_ctx=256, n_threads=1, type_k="bf16", type_v="bf16")
    with Workspace(workspace.model.path, options) as other:
        assert defaults(other).method == Method.parse("field+erratum")
    (path,) = workspace.paths.profiles.iterdir()
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    found = defaults(workspace)
    assert found.method == Method.parse("field+erratum")
    assert found.note and "Measure again (notes calibrate)" in worded(found.note)


def test_names_that_there_are_not(workspace: Workspace) -> None:
    calibrated(workspace, "field")
    (path,) = workspace.paths.profiles.iterdir()
    text = path.read_text()
    for old, new, message in (
        ('"direct": "field"', '"direct": "magic"', "methods.direct is 'magic', it must be an edit method"),
        ('"wording": "line"', '"wording": "loud"', "wording is 'loud', it must be"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(NotesError, match=re.escape(message)):
            defaults(workspace)


@pytest.mark.parametrize(
    ("kind", "behind", "method"), [("llama", 3, "suffix"), ("llama", 300, "field+erratum"), ("lfm2", 3, "erratum")]
)
def test_little_behind_a_change_is_decoded(make_workspace: MakeWorkspace, kind: str, behind: int, method: str) -> None:
    """A value at the end, as with hoisting, is exact for the price of an erratum, where the model can go back to it."""
    workspace = make_workspace(kind)
    skill: Skill = parse_skill("x " * 9 + "\ndate: 2026-06-01\n" + "y" * behind, source="s", default="s")
    segment = compile_skill(workspace, skill)
    changed = change(workspace.model, segment, {"date": "2026-07-01"})
    assert changed is not None
    found, why = choose(workspace, [changed])
    assert found.name == method and why.startswith(method)


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


@pytest.mark.parametrize(
    ("value", "choices", "chosen"),
    [
        *((NEW, None, chosen) for chosen in ("field", "field+erratum")),
        *(("the first of July", ["yes", "no"], chosen) for chosen in ("field", "field+erratum")),
    ],
)
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

    monkeypatch.setattr("notes_cli.runtime.answering.compare", choose)
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
