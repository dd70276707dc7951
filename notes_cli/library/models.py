"""Models by name: our own, what other programs keep on this machine, and which file a name means.

A name that means several files means none, and a file that is there is never taken for a name. Our own names and those
of the user win over those in stores: what they mean does not depend on what other programs download.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from notes_cli.engine.header import Header, read_header
from notes_cli.engine.ollama_form import ADVICE, ollama_evidence
from notes_cli.errors import Help, ModelError
from notes_cli.library import smollm2
from notes_cli.library.model_stores import (
    HUB,
    LLAMA_CPP,
    LM_STUDIO,
    OLLAMA,
    NamedModel,
    Warn,
    hub_models,
    llama_cpp_models,
    lm_studio_models,
    ollama_models,
    parse,
)

ALIAS = "config.yaml"
_READERS: Mapping[str, Callable[[Path, Warn], Iterator[NamedModel]]] = {
    OLLAMA: ollama_models,
    HUB: hub_models,
    LLAMA_CPP: llama_cpp_models,
    LM_STUDIO: lm_studio_models,
}
_NEAR = 5  # names that are offered instead of one that there is not


class Models:
    """All models that have a name."""

    def __init__(
        self, stores: Sequence[tuple[str, Path]], aliases: Mapping[str, str], own: Sequence[NamedModel] = ()
    ) -> None:
        """`stores`: the program and the folder in which it keeps models. `aliases`: what the user calls models: a file
        or a name for each. `own`: the models of notes itself."""
        self.stores, self._aliases, self._own = stores, aliases, own
        self.trouble: list[str] = []  # what could not be read, for people

    @cached_property
    def named(self) -> list[NamedModel]:
        """What the stores hold, by name, with what cannot be used."""
        found = [one for store, root in self.stores for one in _READERS[store](root, self.trouble.append)]
        return sorted(found, key=lambda one: (one.name.casefold(), one.store))

    @property
    def all(self) -> list[NamedModel]:
        """What has a name: our own first, and also what the user calls models."""
        found = [*self._own]
        for alias in sorted(self._aliases):
            path, problem = Path(self._aliases[alias]), ""
            try:
                path = self.find(alias)
            except ModelError as error:
                problem = error.what
            found.append(NamedModel(ALIAS, (alias,), "", path, problem))
        return found + self.named

    def find(self, word: str) -> Path:
        """The file that a word means: a path, an alias, or a name in a store.

        What looks like a path is one, whether it is there or not. Raise ModelError for a name that there is not, that
        means several files, or one that is no whole model.
        """
        return self._find(word, ())

    def _find(self, word: str, before: tuple[str, ...]) -> Path:
        path = Path(os.path.expanduser(word))
        if os.path.exists(path) and not os.path.isdir(path):
            return path
        if os.path.isdir(path) or _like_path(word):
            files = [self._aliases[word]] if word in self._aliases else [one.path for one in self._meant(word)]
            if not files:
                return path
            what = "is a folder" if os.path.isdir(path) else "no such file"
            raise ModelError(f"{word}: {what}, but also the name of a model", Help.NAME_ONE(files=files))
        if word in self._aliases and word not in before:
            return self._find(self._aliases[word], (*before, word))
        if word in before:
            circle = ", ".join((*before[before.index(word) :], word))
            raise ModelError(f"models in {ALIAS} goes in a circle: {circle}", "Name a file there")
        return self._in_stores(word)

    def _in_stores(self, word: str) -> Path:
        found = self._meant(word)
        sound = [one for one in found if not one.problem]
        if len(sound) > 1:
            sound = [one for one in sound if _is_model(one.path)] or sound
        if len(sound) > 1:
            what = f"{word} may be {' or '.join(f'{one.name} ({one.store})' for one in sound)}"
            if len({one.name.casefold() for one in sound}) == len(sound):
                raise ModelError(what, "Name one of these")
            raise ModelError(what, Help.NAME_ONE(files=[one.path for one in sound]))
        if not found:
            raise self._unknown(word)
        one = (sound or found)[0]
        if one.problem:
            raise ModelError(f"{one.name} ({one.store}) cannot be used: {one.problem}")
        _check(one, read_header(one.path))
        return one.path

    def _meant(self, word: str) -> list[NamedModel]:
        """The models that a name means, each file once. In Ollama no tag is `latest`, where there is one."""
        base, tag = parse(word)
        if mine := [one for one in self._own if one.matches(base, tag)]:
            return mine[:1]
        found = [one for one in self.named if one.matches(base, tag)]
        latest = {one.bases for one in found if one.store == OLLAMA and one.tag == "latest"}
        if tag is None:
            found = [one for one in found if one.bases not in latest or one.tag == "latest"]
        once: dict[object, NamedModel] = {}
        for one in found:
            once.setdefault((file_key(one.path) or one, not one.problem), one)
        return list(once.values())

    def _unknown(self, word: str) -> ModelError:
        from difflib import get_close_matches

        base, _ = parse(word)
        if word.casefold() == smollm2.NAME:
            return ModelError(f"{smollm2.NAME} is not there", Help.GET_SMOLLM2())
        spelt = {name: name for name in (*self._aliases, *(one.name for one in self._own), smollm2.NAME)}
        spelt |= {key: one.name for one in self.named for key in (one.bases[0], one.name)}
        near = [one.name for one in self.named if one.matches(base, None)]
        near = near or [name for key, name in spelt.items() if len(word) > 2 and word.casefold() in key.casefold()]
        near = near or [spelt[key] for key in get_close_matches(word, spelt)]
        near = list(dict.fromkeys(near))
        what = f"{word}: no such model" + (f". Did you mean {' or '.join(near[:_NEAR])}?" if near else "")
        return ModelError(what, Help.LOOKED_IN(places=self.places))

    @property
    def places(self) -> str:
        """Where names are looked up, for people."""
        there = ", ".join(f"{root} ({store})" for store, root in self.stores)
        return "; ".join((there, *self.trouble))


def file_key(path: Path) -> tuple[int, int] | None:
    """The same for two paths of one file; None if there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _like_path(word: str) -> bool:
    """Whether somebody who types this means a file."""
    path = Path(os.path.expanduser(word))
    separated = any(separator and separator in word for separator in (os.sep, os.altsep))
    return (
        path.is_absolute()
        or word.startswith((".", "~"))
        or word.lower().endswith(".gguf")
        or (separated and os.path.isdir(path.parent))
    )


def _is_model(path: Path) -> bool:
    """Whether it is, or may be if its head cannot be read, a language model."""
    try:
        return read_header(path).model
    except ModelError:
        return True


def _check(one: NamedModel, header: Header) -> None:
    """Raise ModelError for what llama.cpp would refuse in its own words, or misread."""
    if not header.model:
        raise ModelError(f"{one.name} ({one.path}) is no language model")
    if form := ollama_evidence(header):
        raise ModelError(f"{one.name} is {form}", ADVICE)
