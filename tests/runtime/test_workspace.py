"""Tests the workspace: a context as large as necessary, the identity of a model, and a given store of segments."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.segment import Identity
from notes_cli.errors import EngineError, Notice, Remedy, Say, SegmentError
from notes_cli.library.store import Library, SegmentFile, Target
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.open_skills import open_segments
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill

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
    """Neither a text, an answer, a chosen size nor llama.cpp's rounding; the error has the options that help."""
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
    """By the flag, and as far as RoPE scaling reaches; no flag gives a model positions that it never learned."""
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


# Given folders and a given store of segments, independent of the environment.


@dataclass
class Remote:
    """A shared store: segments are fetched from it into a local folder, and sent there."""

    shared: Library
    own: Library
    moved: list[str] = field(default_factory=list)

    def resolve(self, word: str) -> Target:
        return self.shared.resolve(word)

    def entries(self, name: str | None = None) -> list[SegmentFile]:
        return self.shared.entries(name)

    def path(self, name: str, identity: Identity) -> Path:
        there, here = self.shared.path(name, identity), self.own.path(name, identity)
        if there.exists() and not here.exists():
            self._move(there, here)
        return here

    def find(self, name: str, identity: Identity, remedy: Callable[[], Remedy] | None = None) -> Path:
        path = self.path(name, identity)
        return path if path.exists() else self.shared.find(name, identity, remedy)

    @contextmanager
    def compiling(self, name: str, identity: Identity, wait: float = -1, say: Say | None = None) -> Iterator[Path]:
        with self.own.compiling(name, identity, wait, say) as path:
            yield path
            self._move(path, self.shared.path(name, identity))

    def used(self, path: Path, spliced: int = 0, saved: float | None = None) -> None:
        self.own.used(path, spliced, saved)

    def _move(self, source: Path, target: Path) -> None:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy(source, target)
        self.moved.append(f"{source.parent.parent.name} to {target.parent.parent.name}")


def opened(path: Path, shared: Path, own: Path) -> tuple[Workspace, Remote]:
    store = Remote(Library(shared / "library"), Library(own / "library"))
    return Workspace(path, ContextOptions(n_ctx=512, n_threads=1), paths=Paths.under(own), library=store), store


def test_a_store_in_place_of_the_library(make_model: MakeModel, skill: Skill, tmp_path: Path, home: Path) -> None:
    """Compiled by one user, spliced by another: fetched once, compiled once; the environment's folders stay empty."""
    model, shared = make_model(), tmp_path / "shared"
    said: list[Notice] = []
    first, sender = opened(model, shared, tmp_path / "one")
    with first:
        assert compile_to_library(first, skill).reasons == ("it has not been compiled yet",)
        assert sender.moved == ["one to shared"]
    second, receiver = opened(model, shared, tmp_path / "two")
    with second:
        segments = open_segments(second, ["returns"], said.append)
        sequence = assemble(second, Prompt("Why?", segments))
        assert sequence.count("spliced") == len(segments[0]) and not said
        assert not compile_to_library(second, skill).reasons
        assert receiver.moved == ["shared to two"]
    other, _ = opened(make_model("qwen2"), shared, tmp_path / "three")
    with (
        other,
        refused(SegmentError, r"for architecture llama, this model is qwen2\. Run: notes compile --from returns"),
    ):
        open_segments(other, ["returns"], said.append)
    assert not home.exists()
