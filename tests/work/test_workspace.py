"""The workspace: a context as large as it must be, and a model that is known again."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from notes_cli.engine.context import ContextOptions
from notes_cli.work.workspace import Workspace

from ..conftest import MakeWorkspace


def test_the_context_grows_as_far_as_needed(make_workspace: MakeWorkspace) -> None:
    """Room for the prompt always, for the answer as far as the model was trained (2048 here); never smaller again."""
    workspace = make_workspace(n_ctx=256)
    workspace.make_room(100)
    assert workspace.context.n_ctx == 256
    workspace.make_room(100, 100_000)
    assert workspace.context.n_ctx == 2048
    workspace.make_room(3000, 100_000)
    assert 3000 < workspace.context.n_ctx <= 3584
    grown = workspace.context.n_ctx
    workspace.make_room(10)
    assert workspace.context.n_ctx == grown


def test_a_fixed_size_stays(make_workspace: MakeWorkspace) -> None:
    """The user's own -c is neither grown nor shrunk."""
    workspace = make_workspace(n_ctx=512, fixed_size=True)
    workspace.make_room(3000)
    assert workspace.context.n_ctx == 512


def test_bos_opens_a_prompt_once(make_workspace: MakeWorkspace) -> None:
    """Put there where the model wants it, and not a second time where the template has."""
    wants, wants_not = make_workspace(bos=True), make_workspace()
    ids = np.array([65, 66], np.int32)
    assert wants.opened(ids).tolist() == [256, 65, 66] == wants.opened(wants.opened(ids)).tolist()
    assert wants_not.opened(ids).tolist() == [65, 66]
    assert wants.left_context[0] == 256


def test_a_copy_of_the_model_is_the_same_model(workspace: Workspace, tmp_path: Path) -> None:
    """Weights decide, not the name of the file; one changed byte is another model."""
    copy = tmp_path / "renamed.gguf"
    shutil.copy(workspace.model.path, copy)
    with Workspace(copy, ContextOptions(n_ctx=256, n_threads=1)) as other:
        assert other.identity == workspace.identity
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    with Workspace(copy, ContextOptions(n_ctx=256, n_threads=1)) as changed:
        assert changed.identity.differences(workspace.identity)
