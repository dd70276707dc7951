"""Tests the workspace: a context as large as necessary, and the identity of a model."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from notes_cli.engine.options import ContextOptions
from notes_cli.errors import EngineError, Help
from notes_cli.runtime.workspace import Workspace

from ..conftest import MakeModel, MakeWorkspace
from ..refused import refused


def test_the_context_grows_as_far_as_needed(make_workspace: MakeWorkspace) -> None:
    """It has cells for the prompt, and for the answer up to the trained context (2048 here); it never shrinks."""
    workspace = make_workspace(n_ctx=256, trained=2048)
    workspace.make_room(100)
    assert workspace.context.n_ctx == 256
    workspace.make_room(100, 300)
    assert workspace.context.n_ctx == 512
    workspace.make_room(1000, 100_000)
    assert workspace.context.n_ctx == 2048
    workspace.make_room(10)
    assert workspace.context.n_ctx == 2048


def test_another_thread_may_ask_for_the_identity(make_workspace: MakeWorkspace) -> None:
    """While the context is recreated it is never that of an incomplete or freed one."""
    workspace = make_workspace(n_ctx=256, trained=8192)
    identity = workspace.identity
    over, found = threading.Event(), [identity]

    def ask() -> None:
        while not over.is_set():
            found.append(workspace.identity)

    other = threading.Thread(target=ask)
    other.start()
    for size in range(512, 8192, 512):
        workspace.make_room(size)
    over.set()
    other.join()
    assert len(found) > 1 and all(one == identity for one in found)


def test_nothing_goes_beyond_the_trained_context(make_workspace: MakeWorkspace) -> None:
    """Neither a text, nor an answer after a full one, nor a chosen size, nor llama.cpp's rounding exceeds it. The line
    has the number, the limit, and the options that help."""
    workspace = make_workspace(n_ctx=4096, trained=1000)
    assert workspace.context.n_ctx == 1000
    workspace.make_room(1000)
    for tokens, room in ((1001, 0), (1000, 1), (3_000_000, 0)):
        with refused(EngineError, r"but tiny llama was trained for 1,000\. Take fewer.*--beyond-trained"):
            workspace.make_room(tokens, room)
    with refused(EngineError, r"--rope-scaling yarn --rope-freq-scale 0\.25"):
        workspace.make_room(3000)
    with pytest.raises(EngineError, match="trained for 1,000"):
        make_workspace(n_ctx=4096, fixed_size=True, trained=1000)


def test_what_was_allowed_goes_beyond(make_model: MakeModel, home: Path) -> None:
    """By the flag, and as far as RoPE scaling reaches. No flag gives a model a position vector that it never learned:
    llama.cpp aborts there."""
    path, large = make_model("llama", trained=1000), ContextOptions(n_ctx=4096, n_threads=1)
    with Workspace(path, large, beyond_trained=True) as workspace:
        workspace.make_room(5000)
        assert workspace.context.n_ctx == 5120
    scaled = replace(large, rope_scaling="yarn", rope_freq_scale=0.25)
    with Workspace(path, scaled) as workspace:
        workspace.make_room(4000)
        assert workspace.context.n_ctx == 4000
        with pytest.raises(EngineError, match="trained for 4,000"):
            workspace.make_room(4001)
    with Workspace(make_model("gpt2", trained=512), large, beyond_trained=True) as workspace:
        assert workspace.context.n_ctx == 512
        with pytest.raises(EngineError, match="has no position beyond"):
            workspace.make_room(513)


def test_a_fixed_size_stays(make_workspace: MakeWorkspace) -> None:
    """The user's -c does not change: a larger prompt is refused, with a sufficient size."""
    workspace = make_workspace(n_ctx=512, fixed_size=True)
    workspace.make_room(512, 1000)
    with pytest.raises(EngineError, match="700 tokens do not fit 512") as refused:
        workspace.make_room(700, 1000)
    assert refused.value.remedy == Help.LARGER_CONTEXT(tokens=1792)
    assert workspace.context.n_ctx == 512


def test_bos_opens_a_prompt_once(make_workspace: MakeWorkspace) -> None:
    """It is added if the model needs it, and not again if the template has it."""
    wants, wants_not = make_workspace(bos=True), make_workspace()
    ids = np.array([65, 66], np.int32)
    assert wants.with_bos(ids).tolist() == [256, 65, 66] == wants.with_bos(wants.with_bos(ids)).tolist()
    assert wants_not.with_bos(ids).tolist() == [65, 66]
    assert wants.left_context[0] == 256


def test_a_copy_of_the_model_is_the_same_model(workspace: Workspace, tmp_path: Path) -> None:
    """Weights decide, not the name of the file; a changed byte makes another model."""
    copy = tmp_path / "renamed.gguf"
    shutil.copy(workspace.model.path, copy)
    with Workspace(copy, ContextOptions(n_ctx=256, n_threads=1)) as other:
        assert other.identity == workspace.identity
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    with Workspace(copy, ContextOptions(n_ctx=256, n_threads=1)) as changed:
        assert changed.identity.differences(workspace.identity)
