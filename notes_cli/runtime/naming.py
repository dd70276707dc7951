"""Resolves names by the user's settings and folders: models, their projectors, and the library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notes_cli import config
from notes_cli.errors import NotesError, reason
from notes_cli.text.names import parse_size

if TYPE_CHECKING:
    from notes_cli.library.models import Models, NamedModel
    from notes_cli.library.store import Library


def models(paths: config.Paths | None = None) -> Models:
    """Return all models by name: of notes, of other programs, and aliases in config.yaml. Raises NotesError for an
    unreadable config."""
    from notes_cli.library.models import Models  # imports the stores of four programs; a path needs none

    paths = paths or config.paths()
    settings = config.load_config(paths.config)
    return Models(config.model_stores(), config.aliases(settings), _own(paths, settings))


def model_file(word: str, paths: config.Paths | None = None) -> Path:
    """Return the file of a model given by path, alias or name. Raises ModelError."""
    path = Path(os.path.expanduser(word))
    return path if os.path.isfile(path) else models(paths).find(word)  # a path needs no settings


def default_model(paths: config.Paths | None = None) -> Path:
    """Return the default model: SmolLM2 if it is installed, else the tiny one that ships."""
    from notes_cli.library.models import SMOLLM2

    return SMOLLM2.find((paths or config.paths()).models) or config.shipped_model()


def chosen_model(paths: config.Paths | None = None) -> Path:
    """Return the model set by NOTES_MODEL or config.yaml, else the default. Raises NotesError."""
    paths = paths or config.paths()
    named = config.named_model(config.load_config(paths.config))
    return model_file(named[0], paths) if named else default_model(paths)


def own_name(path: Path) -> str | None:
    """Return the name of a model that notes ships or installs; None for others."""
    from notes_cli.library.models import SMOLLM2

    own = {SMOLLM2.file: SMOLLM2.name, config.SHIPPED_MODEL: config.SHIPPED_TINY}
    return {**own, config.EYE_FILES[0]: config.SHIPPED_EYE}.get(path.name)


def model_argument(path: Path) -> str:
    """Return the argument of -m for a model: its name if that resolves to this file, else the path."""
    name = own_name(path)
    with suppress(NotesError, OSError):
        if name and model_file(name).samefile(path):
            return name
    return str(path)


def _own(paths: config.Paths, settings: Mapping[str, Any]) -> list[NamedModel]:
    """SmolLM2 if it is there, the models that ship, and a file that NOTES_MODEL or config.yaml names."""
    from notes_cli.library.models import OWN, SMOLLM2, NamedModel

    files = [SMOLLM2.find(paths.models), config.shipped_model(), config.shipped_eye()[0]]
    named = [NamedModel(OWN, (own_name(path) or path.stem,), "", path) for path in files if path]
    word, where = config.named_model(settings) or ("", "")
    path = Path(os.path.expanduser(word)).absolute()
    if word and path.is_file() and path not in files:
        named.append(NamedModel(where, (path.stem,), "", path))
    return named


def projector_of(model: Path) -> Path | None:
    """Return the projector of the shipped vision model; None for other models."""
    return model.with_name(config.EYE_FILES[1]) if model.name == config.EYE_FILES[0] else None


def max_size(settings: Mapping[str, Any]) -> int | None:
    """Return the library's size limit in bytes, None for no limit. Raises NotesError."""
    size = config.cache(settings).get("max_size")
    try:
        return None if size is None else parse_size(size)
    except NotesError as error:
        raise NotesError(f"max_size under cache in config.yaml: {error.what}", error.remedy) from error


def save_model_defaults(model: str, chosen: Mapping[str, str], paths: config.Paths | None = None) -> Path:
    """Write defaults of a model into config.yaml, in addition to those it has, and return its path. Raises NotesError
    if it cannot be written, or has another form."""
    from notes_cli.documents import parse_yaml
    from notes_cli.library.safe_files import replacing

    path = (paths or config.paths()).config
    settings = config.load_config(path)
    chosen = {**config.model_defaults(settings, model), **chosen}
    wanted = {**settings, "defaults": {**settings.get("defaults", {}), model: chosen}}
    try:
        before = path.read_text("utf-8-sig") if path.exists() else ""
        text = config.with_model_defaults(before, model, chosen)
        with suppress(ValueError):
            if parse_yaml(text) == wanted:
                with replacing(path) as temporary:
                    temporary.write_text(text, encoding="utf-8")
                return path
    except OSError as error:
        raise NotesError(f"cannot write {path}: {reason(error)}. Nothing was changed") from error
    values = ", ".join(f"{name}: {value}" for name, value in chosen.items())
    raise NotesError(f"{path} has its defaults in a form that is not edited", f"Write under {model!r} there: {values}")


def library(paths: config.Paths | None = None) -> Library:
    """Return the user's library, with the size limit of config.yaml. Raises NotesError for an unreadable config."""
    from notes_cli.library.store import Library  # slow to import, and not needed for names

    paths = paths or config.paths()
    settings = config.load_config(paths.config)
    return Library(paths.library, max_size(settings) if "cache" in settings else None, config.sample_names)
