"""Effective settings where the request names none: of config.yaml, near the end of a text, and where neither holds."""

from __future__ import annotations

import pytest

from notes_cli.editing.methods import change
from notes_cli.engine.limits import ContextOptions
from notes_cli.errors import NotesError
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import DEFAULT_SEAM
from notes_cli.runtime.resolve import choose, default_method, defaults
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeWorkspace


def reopened(workspace: Workspace, settings: str, name: str | None = None) -> Workspace:
    """The same model opened again with these defaults of it, or of a model of another name, in config.yaml."""
    lines = "".join(f"    {line}\n" for line in settings.splitlines())
    workspace.paths.config.parent.mkdir(exist_ok=True)
    workspace.paths.config.write_text(f"defaults:\n  {name or workspace.name}:\n{lines}")
    return Workspace(workspace.model.path, ContextOptions(n_ctx=256, n_threads=1), paths=workspace.paths)


def test_the_defaults_of_one_model_are_not_those_of_another(workspace: Workspace) -> None:
    assert defaults(workspace).seam == DEFAULT_SEAM
    with reopened(workspace, "method: recompute\nseam: 4", "another Q4_0") as other:
        assert (default_method(other)[0].name, defaults(other).seam) == ("field+erratum", DEFAULT_SEAM)
    with reopened(workspace, "method: recompute\nseam: 4") as same:
        assert (default_method(same)[0].name, defaults(same).seam) == ("recompute", 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *(("method: magic", "no edit method 'magic'"), ("wording: loud", "no erratum wording 'loud'")),
        *(("seam: -1", "seam of .* in config.yaml is '-1'"), ("place: nowhere", "place of .* is 'nowhere'")),
        ("temperature: 1", "config.yaml has 'temperature', there is method"),
    ],
)
def test_a_default_that_there_is_not_is_refused(workspace: Workspace, line: str, message: str) -> None:
    with reopened(workspace, line) as again, pytest.raises(NotesError, match=message):
        defaults(again)


@pytest.mark.patches("recurrent")
@pytest.mark.parametrize("given", [None, False, True])
def test_a_state_is_carried_as_config_yaml_has_it_unless_the_user_does(
    make_workspace: MakeWorkspace, given: bool | None
) -> None:
    first = make_workspace("mamba")
    assert first.identity and not first.context.carries
    with reopened(first, "carry: true") as again:
        again._carry = given
        assert again.identity and again.context.carries == (given is not False)


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
