"""What this user's settings and folders say: the models that have names, the library and how large it may be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notes_cli import config
from notes_cli.errors import NotesError
from notes_cli.library.models import Models
from notes_cli.text.sizes import parse_size

if TYPE_CHECKING:
    from notes_cli.library.store import Library


def models() -> Models:
    """All models by name: those of other programs, and the aliases of config.yaml. Raise NotesError for a config that
    cannot be read."""
    return Models(config.model_stores(), config.aliases(config.load_config()))


def model_file(word: str) -> Path:
    """The file of a model that is named by its path, an alias, or a name in a store. Raise ModelError."""
    path = Path(os.path.expanduser(word))
    return path if os.path.isfile(path) else models().find(word)  # a file needs no settings


def max_size(settings: Mapping[str, Any]) -> int | None:
    """Bytes that the library may take by these settings, None for any number. Raise NotesError."""
    size = config.cache(settings).get("max_size")
    try:
        return None if size is None else parse_size(size)
    except NotesError as error:
        raise NotesError(f"max_size under cache in config.yaml: {error.what}", error.remedy) from error


def library(paths: config.Paths | None = None) -> Library:
    """The compiled skills of this user, within the size that config.yaml says. Raise NotesError for one that cannot be
    read."""
    from notes_cli.library.store import Library  # it takes long to load, and names need none of it

    paths = paths or config.paths()
    return Library(paths.library, max_size(config.load_config(paths.config)))
