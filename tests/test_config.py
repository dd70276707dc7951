"""Paths and settings: folders, NOTES_* variables, config.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

import platformdirs
import pytest

import notes_cli
from notes_cli.config import Paths, load_config, model_defaults, model_stores, paths, resource, shipped_model
from notes_cli.errors import NotesError
from notes_cli.runtime.naming import save_model_defaults

from .refused import refused


def test_notes_home_holds_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One variable moves library, sessions and config; nothing is created by asking."""
    monkeypatch.setenv("NOTES_HOME", str(tmp_path / "home"))
    found = paths()
    assert found.library == tmp_path / "home/library"
    assert {found.sessions.parent, found.config.parent, found.models.parent} == {tmp_path / "home"}
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is platformdirs that answers")
@pytest.mark.parametrize("home", ["/home/someone", "/home/someone/", "/", "not/absolute", "", None])
@pytest.mark.parametrize("said", ["/mnt/a place", "/mnt/it/", "not/absolute", "~/it", " ", "", None])
def test_on_linux_the_folders_are_those_of_platformdirs(
    home: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The specification is followed without that library, for it takes long to load; with it nothing would move."""
    names = {"HOME": home, **{f"XDG_{kind}_HOME": said for kind in ("CACHE", "CONFIG", "STATE")}}
    for name in ("NOTES_HOME", *names):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    found = paths()
    assert found.library.parent == platformdirs.user_cache_path("notes", appauthor=False)
    assert found.sessions.parent == platformdirs.user_state_path("notes", appauthor=False)
    assert found.config.parent == platformdirs.user_config_path("notes", appauthor=False)


def test_settings_are_read(tmp_path: Path) -> None:
    """No file and an empty file are no settings. Values are as written: the command line makes numbers of them. A bad
    one is an error of one line; tests/messages.yaml has a list and invalid YAML."""
    path = tmp_path / "config.yaml"
    assert load_config(path) == {}
    for data, found in (("", {}), ("model: a\nask:\n  temp: 0.5\n", {"model": "a", "ask": {"temp": "0.5"}})):
        path.write_text(data)
        assert load_config(path) == found
    for wrong, says in ((b"1: a", "must hold `setting: value` lines"), (b"\xff", "not UTF-8")):
        path.write_bytes(wrong)
        with pytest.raises(NotesError, match=f"{path}.*{says}|{says}.*{path}") as caught:
            load_config(path)
        assert "\n" not in str(caught.value)


def test_data_folders_are_found_beside_and_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout has prompts/ next to the package, an installation inside it; inside has precedence."""
    monkeypatch.setattr(notes_cli, "__path__", [str(tmp_path / "notes_cli")])
    (tmp_path / "prompts").mkdir()
    assert resource("prompts") == tmp_path / "prompts"
    (tmp_path / "notes_cli/prompts").mkdir(parents=True)
    assert resource("prompts") == tmp_path / "notes_cli/prompts"
    with pytest.raises(NotesError, match="folder models/ is missing"):
        shipped_model()
    (tmp_path / "notes_cli/models").mkdir()
    with refused(NotesError, "name another model"):
        shipped_model()
    (tmp_path / "notes_cli/models/notes-tiny-q8_0.gguf").touch()
    assert shipped_model().name == "notes-tiny-q8_0.gguf"


def test_where_other_programs_keep_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program's own variables, in its own order, else its folder in the home."""
    home = tmp_path / "user"
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("OLLAMA_MODELS")
    hub = home / ".cache/huggingface/hub"
    service = Path("/usr/share/ollama/.ollama/models")
    ollama = [("Ollama", home / ".ollama/models"), ("Ollama", service)]
    assert model_stores() == [*ollama, ("Hugging Face", hub)]
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "o"))
    assert model_stores() == [("Ollama", tmp_path / "o"), ("Hugging Face", hub)]
    for name, folder in (
        *(("XDG_CACHE_HOME", "huggingface/hub"), ("HF_HOME", "hub"), ("HUGGINGFACE_HUB_CACHE", "")),
        ("HF_HUB_CACHE", ""),
    ):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert model_stores()[1] == ("Hugging Face", tmp_path / name / folder)
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "l"))
    hubs = [("Hugging Face", tmp_path / "l"), ("Hugging Face", tmp_path / "HF_HUB_CACHE")]
    assert model_stores()[1:] == hubs


MODEL = "tiny Q8_0"
WHOLE = "# mine\nctx-size: 4096\n\ndefaults:  # by model\n  other Q4_1:\n    seam: 9  # long\n# end\ncolor: auto\n"


@pytest.mark.parametrize("before", ["", "ctx-size: 4096", WHOLE])
def test_saved_defaults_leave_all_other_lines(tmp_path: Path, before: str) -> None:
    """Comments, too; a second save adds to the first one and replaces what it had."""
    places = Paths.under(tmp_path)
    if before:
        places.config.write_text(before)
    assert save_model_defaults(MODEL, {"method": "suffix", "seam": "4"}, places) == places.config
    save_model_defaults(MODEL, {"method": "erratum"}, places)
    text = places.config.read_text()
    assert model_defaults(load_config(places.config), MODEL) == {"method": "erratum", "seam": "4"}
    assert [line for line in text.splitlines() if line in before.splitlines()] == before.splitlines()
    assert text.count("method") == text.count(MODEL) == 1
    if before == WHOLE:
        assert model_defaults(load_config(places.config), "other Q4_1") == {"seam": "9"}


@pytest.mark.parametrize("before", ["defaults: {other: {seam: 9}}\n", "defaults:\n    other:\n        seam: 9\n"])
def test_a_config_of_another_form_is_not_edited(tmp_path: Path, before: str) -> None:
    """The error has the lines to write, and the file is as it was."""
    places = Paths.under(tmp_path)
    places.config.write_text(before)
    with refused(NotesError, r"in a form that is not edited\. Write under 'tiny Q8_0' there: method: suffix"):
        save_model_defaults(MODEL, {"method": "suffix"}, places)
    assert places.config.read_text() == before
