"""Resolves a model's name to its file: models of notes, aliases of the user, and models in other programs' stores.

An ambiguous name is refused, and an existing file is never taken for a name. Names of notes and of the user take
precedence over stores, so that downloads of other programs do not change their meaning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from notes_cli.engine.architectures import ADVICE, ollama_evidence
from notes_cli.engine.header import Header, read_header
from notes_cli.errors import Help, ModelError
from notes_cli.library.model_stores import (
    HUB,
    LLAMA_CPP,
    LM_STUDIO,
    OLLAMA,
    SMOLLM2,
    NamedModel,
    Warn,
    hub_models,
    llama_cpp_models,
    lm_studio_models,
    ollama_models,
    parse,
)

ALIAS = "config.yaml"
OWN = "notes"  # the store of models that come with notes or were downloaded by it
_READERS: Mapping[str, Callable[[Path, Warn], Iterator[NamedModel]]] = {
    OLLAMA: ollama_models,
    HUB: hub_models,
    LLAMA_CPP: llama_cpp_models,
    LM_STUDIO: lm_studio_models,
}
_NEAR = 5  # suggestions for an unknown name


class Models:
    """All models that have a name."""

    def __init__(
        self, stores: Sequence[tuple[str, Path]], aliases: Mapping[str, str], own: Sequence[NamedModel] = ()
    ) -> None:
        """`stores`: programs and the folders of their models. `aliases`: the user's names, with a file or a name for
        each. `own`: the models of notes itself."""
        self.stores, self._aliases, self._own = stores, aliases, own
        self.trouble: list[str] = []  # messages for folders that cannot be read

    @cached_property
    def named(self) -> list[NamedModel]:
        """The models in stores, by name, also unusable ones."""
        models = [model for store, root in self.stores for model in _READERS[store](root, self.trouble.append)]
        return sorted(models, key=lambda model: (model.name.casefold(), model.store))

    @property
    def all(self) -> list[NamedModel]:
        """All models with a name: those of notes, aliases, those in stores."""
        models = [*self._own]
        for alias in sorted(self._aliases):
            path, problem = Path(self._aliases[alias]), ""
            try:
                path = self.find(alias)
            except ModelError as error:
                problem = error.what
            models.append(NamedModel(ALIAS, (alias,), "", path, problem))
        return models + self.named

    def find(self, word: str) -> Path:
        """Return the file of a word: a path (also of a missing file), an alias, or a name in a store. Raises ModelError
        if the name is unknown or ambiguous, or its file is not a whole model."""
        return self._find(word, ())

    def _find(self, word: str, before: tuple[str, ...]) -> Path:
        path = Path(os.path.expanduser(word))
        if os.path.exists(path) and not os.path.isdir(path):
            return path
        if os.path.isdir(path) or _like_path(word):
            files = [self._aliases[word]] if word in self._aliases else [model.path for model in self._matches(word)]
            if not files:
                return path
            problem = "is a folder" if os.path.isdir(path) else "no such file"
            raise ModelError(f"{word}: {problem}, but also the name of a model", Help.NAME_ONE(files=files))
        if word in self._aliases and word not in before:
            return self._find(self._aliases[word], (*before, word))
        if word in before:
            circle = ", ".join((*before[before.index(word) :], word))
            raise ModelError(f"models in {ALIAS} goes in a circle: {circle}", "Name a file there")
        return self._in_stores(word)

    def _in_stores(self, word: str) -> Path:
        matches = self._matches(word)
        usable = [model for model in matches if not model.problem]
        if len(usable) > 1:
            usable = [model for model in usable if _is_model(model.path)] or usable
        if len(usable) > 1:
            message = f"{word} may be {' or '.join(f'{model.name} ({model.store})' for model in usable)}"
            if len({model.name.casefold() for model in usable}) == len(usable):
                raise ModelError(message, "Name one of these")
            raise ModelError(message, Help.NAME_ONE(files=[model.path for model in usable]))
        if not matches:
            raise self._unknown(word)
        model = (usable or matches)[0]
        if model.problem:
            raise ModelError(f"{model.name} ({model.store}) cannot be used: {model.problem}")
        if model.store != OWN:
            _check(model, read_header(model.path))
        return model.path

    def _matches(self, word: str) -> list[NamedModel]:
        """Return the models of a name, each file once. In Ollama a name without a tag means `latest`, if it exists."""
        base, tag = parse(word)
        if own := [model for model in self._own if model.matches(base, tag)]:
            return own[:1]
        models = [model for model in self.named if model.matches(base, tag)]
        latest = {model.bases for model in models if model.store == OLLAMA and model.tag == "latest"}
        if tag is None:
            models = [model for model in models if model.bases not in latest or model.tag == "latest"]
        distinct: dict[object, NamedModel] = {}
        for model in models:
            distinct.setdefault((file_key(model.path) or model, not model.problem), model)
        return list(distinct.values())

    def _unknown(self, word: str) -> ModelError:
        from difflib import get_close_matches

        base, _ = parse(word)
        if word.casefold() == SMOLLM2.name:
            return ModelError(f"{SMOLLM2.name} is not there", Help.GET_SMOLLM2())
        names = {name: name for name in (*self._aliases, *(model.name for model in self._own), SMOLLM2.name)}
        names |= {key: model.name for model in self.named for key in (model.bases[0], model.name)}
        near = [model.name for model in self.named if model.matches(base, None)]
        near = near or [name for key, name in names.items() if len(word) > 2 and word.casefold() in key.casefold()]
        near = near or [names[key] for key in get_close_matches(word, names)]
        near = list(dict.fromkeys(near))
        message = f"{word}: no such model" + (f". Did you mean {' or '.join(near[:_NEAR])}?" if near else "")
        return ModelError(message, Help.LOOKED_IN(places=self.places))

    @property
    def places(self) -> str:
        """The folders in which names are looked up, as text."""
        folders = ", ".join(f"{root} ({store})" for store, root in self.stores)
        return "; ".join((folders, *self.trouble))


def file_key(path: Path) -> tuple[int, int] | None:
    """Return a key that is equal for two paths of one file; None if it does not exist."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _like_path(word: str) -> bool:
    path = Path(os.path.expanduser(word))
    separated = any(separator and separator in word for separator in (os.sep, os.altsep))
    return (
        path.is_absolute()
        or word.startswith((".", "~"))
        or word.lower().endswith(".gguf")
        or (separated and os.path.isdir(path.parent))
    )


def _is_model(path: Path) -> bool:
    """Return True for a language model, and for a file whose head cannot be read."""
    try:
        return read_header(path).model
    except ModelError:
        return True


def _check(model: NamedModel, header: Header) -> None:
    """Raise ModelError for a file that llama.cpp would refuse or misread."""
    if not header.model:
        raise ModelError(f"{model.name} ({model.path}) is no language model")
    if form := ollama_evidence(header):
        raise ModelError(f"{model.name} is {form}", ADVICE)
