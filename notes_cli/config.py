"""Where things are: the folders of this user, the config file, and the data that comes with the package.

It knows neither commands nor models. Which flag wins over which setting is decided by the command line.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import notes_cli
from notes_cli.documents import read_yaml
from notes_cli.errors import Help, NotesError

APP = "notes"
SHIPPED_MODEL = "notes-tiny-q8_0.gguf"
MEND = "Mend or remove the file"
SETTING = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Paths:
    """The places of one user. Nothing is created until something is written there."""

    library: Path  # compiled segments: derivable, so in the cache folder
    sessions: Path  # saved conversations: not derivable
    config: Path  # config.yaml
    models: Path  # what is remembered of models: their digests
    profiles: Path  # what was measured of models: minutes of work

    @classmethod
    def under(cls, home: Path) -> Paths:
        """Everything in one folder, as NOTES_HOME asks."""
        return cls(home / "library", home / "sessions", home / "config.yaml", home / "models", home / "profiles")


def paths() -> Paths:
    """NOTES_HOME where it is set, else the cache, state and config folders of this system."""
    home = os.environ.get("NOTES_HOME")
    if home:
        return Paths.under(Path(home).expanduser().absolute())
    import platformdirs  # 14 ms, not needed with NOTES_HOME

    cache = platformdirs.user_cache_path(APP, appauthor=False)
    state = platformdirs.user_state_path(APP, appauthor=False)
    return Paths(
        library=cache / "library",
        sessions=state / "sessions",
        config=platformdirs.user_config_path(APP, appauthor=False) / "config.yaml",
        models=cache / "models",
        profiles=state / "profiles",
    )


def load_config(path: Path | None = None) -> dict[str, Any]:
    """The settings of config.yaml, {} without one: every value as it is written, as on the command line.

    Raise NotesError if it cannot be read as a mapping of names.
    """
    path = path or paths().config
    try:
        settings = read_yaml(path)
    except NotesError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise NotesError(error.what, MEND) from error
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(SETTING.fullmatch(key) for key in settings):
        raise NotesError(f"{path} must hold `setting: value` lines", MEND)
    return settings


def resource(name: str) -> Path:
    """The folder `name` (prompts, skills, models) that comes with the package.

    Installed, it is inside the package. In a source checkout prompts/ and skills/ are beside it.
    """
    inside = [Path(entry) for entry in notes_cli.__path__]
    for folder in [*inside, *(entry.parent for entry in inside)]:
        if (folder / name).is_dir():
            return folder / name
    raise NotesError(f"the folder {name}/ is missing from this installation of notes", "Install it again")


def shipped_model() -> Path:
    """The small model that comes with notes. Raise NotesError if it is not there."""
    model = resource("models") / SHIPPED_MODEL
    if not model.is_file():
        raise NotesError(f"{model} is missing", Help.REINSTALL_OR_NAME_MODEL())
    return model
