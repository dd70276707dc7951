"""What this user's settings and folders say: the models that have names, the library and how large it may be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notes_cli import config
from notes_cli.errors import NotesError
from notes_cli.text.sizes import parse_size

if TYPE_CHECKING:
    from notes_cli.library.models import Models
    from notes_cli.library.store import Library


def models() -> Models:
    """All models by name: those of other programs, and the aliases of config.yaml. Raise NotesError for a config that
    cannot be read."""
    from notes_cli.library.models import Models  # which knows the stores of four programs; a file needs none of it

    return Models(config.model_stores(), config.aliases(config.load_config()))


def model_file(word: str) -> Path:
    """The file of a model that is named by its path, an alias, or a name in a store; that of the small one that sees by
    its own. Raise ModelError."""
    path = Path(os.path.expanduser(word))
    if word == config.SHIPPED_EYE and not os.path.lexists(path):
        return config.shipped_eye()[0]
    return path if os.path.isfile(path) else models().find(word)  # a file needs no settings


def projector_of(model: Path) -> Path | None:
    """The projector of a model where notes knows it: of the small one that sees."""
    return model.with_name(config.EYE_FILES[1]) if model.name == config.EYE_FILES[0] else None


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
