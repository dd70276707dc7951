"""Tests of the patches to llama.cpp: groups, size of the hooks, refusals in builds without a group."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from notes_cli.engine import native, recurrent
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import UnsupportedError

from ..conftest import MakeModel

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "native" / "patches"
MOST = 60  # lines that the hooks may add to llama.cpp


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "native"))
    return importlib.import_module("prepare")


def added(text: str) -> list[str]:
    """The lines that a patch adds, empty ones and comments too."""
    return re.findall(r"^\+(?!\+\+ ).*", text, re.MULTILINE)


def test_the_hooks_are_small() -> None:
    """Call sites alone: a kernel or a bug fix belongs to another group."""
    lines = [line for path in (PATCHES / "hooks").glob("*.patch") for line in added(path.read_text())]
    assert 0 < len(lines) <= MOST


def test_every_patch_is_in_a_group(prepare: ModuleType) -> None:
    """Each patch names its llama.cpp, the problem and the change; a fix has a reproduction."""
    assert {path.name for path in PATCHES.iterdir()} == set(prepare.GROUPS)
    assert sorted(prepare.patches_of(",".join(prepare.GROUPS))) == sorted(PATCHES.rglob("*.patch"))
    for path in PATCHES.rglob("*.patch"):
        head = path.read_text().partition("\n--- a/")[0]
        wanted = {"Target", "Problem", "Fix"} | ({"Reproduction"} if path.parent.name == "fixes" else set())
        assert wanted <= set(re.findall(r"^(\w+): ", head, re.MULTILINE)), path
        for named in re.findall(r"\b(?:bench|tests|native)/[\w/]+\.(?:py|cpp|h)\b(?!\s+of\s+commit)", head):
            assert (ROOT / named).is_file(), (path, named)


def test_groups_are_chosen_by_name(prepare: ModuleType) -> None:
    """In whatever order they are named: hooks first, on which capture builds."""
    assert {path.parent.name for path in prepare.patches_of("hooks")} == {"hooks"}
    assert [path.parent.name for path in prepare.patches_of("recurrent, hooks")] == ["hooks", "hooks", "recurrent"]
    with pytest.raises(SystemExit, match=r"no group 'sped'. The groups are hooks, fixes, speed, recurrent"):
        prepare.patches_of("hooks,sped")
    with pytest.raises(SystemExit, match="without the group 'hooks'"):
        prepare.patches_of("fixes,speed")


def test_a_file_is_new_where_its_text_is(prepare: ModuleType, tmp_path: Path) -> None:
    """Ninja compares times: a file that loses its patch must be newer than its object file."""
    made, before = tmp_path / "made", tmp_path / "before"
    texts = {"same.cpp": ("same", "same"), "other.cpp": ("plain", "patched"), "new.cpp": ("new", None)}
    for folder, at, time in ((made, 0, 1), (before, 1, 1000)):  # 1: as the archive has them
        (folder / "src").mkdir(parents=True)
        for name, versions in texts.items():
            if versions[at] is not None:
                (folder / "src" / name).write_text(versions[at])
                os.utime(folder / "src" / name, (time, time))
    prepare.set_times(made, before)
    times = {path.name: path.stat().st_mtime for path in made.rglob("*.cpp")}
    assert times["same.cpp"] == 1000 < min(times["other.cpp"], times["new.cpp"])


def test_the_library_names_its_groups(prepare: ModuleType) -> None:
    assert "hooks" in native.PATCHES and set(native.PATCHES) <= set(prepare.GROUPS)


@pytest.mark.skipif("recurrent" in native.PATCHES, reason="the library has the group")
def test_states_are_not_carried_without_the_group(make_model: MakeModel) -> None:
    """Refused with one reason, also for functions that the library lacks; the state can still be restored."""
    with Model(make_model("mamba")) as model, Context(model, ContextOptions(n_ctx=64, n_threads=1)) as context:
        why = context.supports("carry")
        assert why and "without the patch group 'recurrent'" in why
        assert context.supports("restore") is None
        assert recurrent.can_carry(context, 0, 8, 4) == why
        with pytest.raises(UnsupportedError, match="without the patch group 'recurrent'"):
            recurrent.margins(context)
        with pytest.raises(UnsupportedError), recurrent.capturing(context, 0):
            pass


@pytest.mark.skipif("fixes" in native.PATCHES, reason="the library has the group")
def test_what_llama_cpp_computes_wrongly_is_refused_without_the_fixes() -> None:
    """CogVLM always, and several sequences in one batch of some recurrent models, which may come one by one."""
    import zoo

    tokens = np.arange(4, dtype=np.int32)
    options = ContextOptions(n_ctx=64, n_threads=1, n_sequences=2, unified=True)
    with Model(zoo.zoo_model("cogvlm-dense")) as model, Context(model, options) as context:
        for operation in native.OPERATIONS:
            assert "without the patch group 'fixes'" in str(context.supports(operation))
        with pytest.raises(UnsupportedError, match="without the patch group 'fixes'"):
            context.append({0: tokens})
    for name in ("plamo2-dense", "arwkv7-dense", "rwkv6qwen2-dense"):
        with Model(zoo.zoo_model(name)) as model, Context(model, options) as context:
            with pytest.raises(UnsupportedError, match="one sequence after the other"):
                context.append({0: tokens, 1: tokens})
            context.append({0: tokens})
            context.append({1: tokens})
