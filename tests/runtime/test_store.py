"""Tests a workspace with given folders and a given store of segments, independent of the environment."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from notes_cli.config import Paths
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import Identity
from notes_cli.errors import Notice, Remedy, Say, SegmentError
from notes_cli.library.store import Library, SegmentFile, Target
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.open_skills import open_segments
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill

from ..conftest import MakeModel
from ..refused import refused


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

    def find(self, name: str, identity: Identity, remedy: Remedy | None = None) -> Path:
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


def test_another_store_takes_the_place_of_the_library(
    make_model: MakeModel, skill: Skill, tmp_path: Path, home: Path
) -> None:
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


def test_folders_that_are_handed_in(
    make_model: MakeModel, skill: Skill, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library and the model's cached facts are there, whatever NOTES_HOME is."""
    monkeypatch.setenv("NOTES_HOME", str(home))
    paths = Paths.under(tmp_path / "mine")
    with Workspace(make_model(), ContextOptions(n_ctx=512, n_threads=1), paths=paths) as workspace:
        assert compile_to_library(workspace, skill).path.parent == paths.library
    assert list(paths.models.iterdir()) and not home.exists()
