"""Tests several compiles in a row: their common prefix is decoded once, and files equal those of single compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.context import Context
from notes_cli.library.container import open_segment
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill, parse_skill

from ..conftest import MakeWorkspace

SKILLS = [
    parse_skill(f"date: 2026-06-0{number}\n\n" + "All is well. " * 7 * number, source=f"{name}.txt", default=name)
    for number, name in enumerate(("one", "two", "three"), 1)
]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the tokens that each call of llama.cpp decodes."""
    found: list[int] = []
    append = Context.append

    def counting(self: Context, tokens: Any, *more: Any, **others: Any) -> None:
        append(self, tokens, *more, **others)
        found.append(sum(map(len, tokens.values())))

    with monkeypatch.context() as patch:
        patch.setattr(Context, "append", counting)
        yield found


def files(workspace: Workspace, skills: list[Skill] = SKILLS, **how: Any) -> list[list[bytes]]:
    """Return the rows of each file."""
    paths = [compile_to_library(workspace, skill, force=True, **how).path for skill in skills]
    return [[part.tobytes() for layer in open_segment(path).layers for part in (layer.k, layer.v)] for path in paths]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "smollm3", "lfm2"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_rows_are_those_of_a_compile_by_itself(make_workspace: MakeWorkspace, kind: str, blocks: int) -> None:
    """To the bit, in any order, also if the context grows."""
    if kind == "lfm2" and blocks > 1:
        blocks = 1  # its rows cannot be moved
    alone = [files(make_workspace(kind, n_ctx=256), [skill], blocks=blocks)[0] for skill in SKILLS]
    workspace = make_workspace(kind, n_ctx=256)
    with workspace.compiling():
        assert files(workspace, blocks=blocks) == alone
        assert files(workspace, SKILLS[::-1], blocks=blocks) == alone[::-1]
        assert workspace.context.n_leased <= 1
    assert workspace.context.n_leased == workspace.context.used == 0


def test_tokens_and_calls_are_counted(make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each skill in its own call, and the left context once. The control: three times, separately."""
    workspace = make_workspace()
    left, own = len(workspace.left_context), [len(workspace.tokens_of(skill)) for skill in SKILLS]
    workspace.measure_rotation()
    with counted(monkeypatch) as calls:
        files(workspace)
    assert calls == [left, own[0], left, own[1], left, own[2]]
    with counted(monkeypatch) as calls, workspace.compiling():
        files(workspace)
    assert calls == [left, *own]


def test_long_ones_fill_batches_by_themselves(make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call decodes a full batch; with progress a physical batch, the first less."""
    workspace = make_workspace(n_ctx=2048, n_ubatch=128)
    skill = parse_skill("All is well. " * 60, source="long.txt", default="long")
    tokens = len(workspace.tokens_of(skill))
    workspace.measure_rotation()
    with counted(monkeypatch) as calls:
        compile_to_library(workspace, skill, progress=lambda done, total: None)
    assert calls[1:] == [32, 96] + [128] * (tokens // 128 - 1) + [tokens % 128]
    with counted(monkeypatch) as calls:
        compile_to_library(workspace, skill, force=True)
    assert calls[1:] == [tokens]


def test_other_work_between_them(workspace: Workspace) -> None:
    """Cells that other work cleared or took are decoded again."""
    alone = files(workspace)
    with workspace.compiling():
        files(workspace, SKILLS[:1])
        workspace.context.clear()
        assert files(workspace) == alone
        with workspace.sequence() as sequence:
            sequence.append([1, 2, 3])
            sequence.flush()
            assert workspace.context.used == len(workspace.left_context) + 3
            assert files(workspace, SKILLS[1:2])[0] == alone[1]
            assert sequence.intact
    assert workspace.context.used == 0


def test_the_context_is_as_large_as_for_one_alone(make_workspace: MakeWorkspace) -> None:
    """The prefix kept for the next compile needs no cells: a larger context may rotate keys otherwise (LongRoPE)."""
    workspace = make_workspace(n_ctx=256)
    room = 256 - len(workspace.left_context)
    full = next(
        skill
        for skill in (parse_skill("a " * 90 + "b" * more, source="full.txt", default="full") for more in range(90))
        if len(workspace.tokens_of(skill)) == room
    )
    alone = files(workspace, [full])
    with workspace.compiling():
        files(workspace, SKILLS[:1])
        assert files(workspace, [full]) == alone and workspace.options.n_ctx == 256


def test_one_that_fails_leaves_the_others(make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt in the second, the first exists, the third is not started, and the next run continues."""
    workspace = make_workspace(n_ubatch=32)

    def stopping(number: int) -> Callable[[int, int], None]:
        def told(done: int, total: int) -> None:
            if number == 1 and done > 40:
                raise KeyboardInterrupt

        return told

    made: list[Path] = []
    with pytest.raises(KeyboardInterrupt), workspace.compiling():
        for number, skill in enumerate(SKILLS):
            made.append(compile_to_library(workspace, skill, progress=stopping(number)).path)
    assert len(made) == 1 and workspace.context.n_leased == 0
    with workspace.compiling():
        done = [compile_to_library(workspace, skill) for skill in SKILLS]
    assert [bool(one.reasons) for one in done] == [False, True, True]
