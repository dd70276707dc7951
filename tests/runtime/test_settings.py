"""Tests effective settings: without a profile, with one, and where few tokens follow a change."""

from __future__ import annotations

import re

import pytest

from notes_cli.commands.remedies import worded
from notes_cli.editing.change import change
from notes_cli.editing.methods import Method
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import NotesError
from notes_cli.library.profiles import FORMAT, Measured, Profile, Profiles
from notes_cli.runtime.compile import compile_skill
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
        assert defaults(other).method == Method("field+erratum")
    (path,) = workspace.paths.profiles.iterdir()
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    found = defaults(workspace)
    assert found.method == Method("field+erratum")
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
