"""Which models this user has names for, and the file that a name means."""

from __future__ import annotations

import os
from pathlib import Path

from notes_cli import config
from notes_cli.library.models import Models


def models() -> Models:
    """All models by name: those of other programs, and the aliases of config.yaml. Raise NotesError for a config that
    cannot be read."""
    return Models(config.model_stores(), config.aliases(config.load_config()))


def model_file(word: str) -> Path:
    """The file of a model that is named by its path, an alias, or a name in a store. Raise ModelError."""
    path = Path(os.path.expanduser(word))
    return path if os.path.isfile(path) else models().find(word)  # a file needs no settings
