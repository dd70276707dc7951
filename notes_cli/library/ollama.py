"""Ollama's models: manifests by name, which say which blob is the GGUF.

Two layouts: `manifests-v2/HOST/NAMESPACE/MODEL/TAG`, a link to a blob or a copy of it, which may list a manifest for
each format; and `manifests/...` of the same depth. A digest is a name in `blobs/` and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notes_cli.errors import reason
from notes_cli.library.named import Named, Tell, fault, listed

STORE = "Ollama"
_HOSTS = ("ollama.com", "registry.ollama.ai")  # one and the same
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_WORD = re.compile(r"\w[\w.:-]*", re.ASCII)
_LIST = "application/vnd.ollama.manifest.list.v2+json"
_LAYER = "application/vnd.ollama.image."
MAX_BYTES = 4 << 20  # of a manifest; thousands of layers


class _ManifestError(ValueError):
    """A manifest that names no GGUF model."""


def models(root: Path, tell: Tell) -> Iterator[Named]:
    """All models of a store; what is wrong with one is said in it."""
    seen = set()
    for folder in ("manifests-v2", "manifests"):
        for manifest in _manifests(root / folder, tell):
            host, *rest = manifest.relative_to(root / folder).parts
            host = _HOSTS[-1] if host.lower() in _HOSTS else host
            logical = tuple(part.lower() for part in (host, *rest))
            if logical not in seen:
                seen.add(logical)
                yield _model(root, manifest, host, *rest)


def _manifests(root: Path, tell: Tell) -> Iterator[Path]:
    """The files four folders deep whose names Ollama could have given."""
    folders = [root]
    for _ in range(4):
        folders = [folder / name for folder in folders for name in listed(folder, tell) if _WORD.fullmatch(name)]
    yield from folders


def _model(root: Path, manifest: Path, host: str, namespace: str, model: str, tag: str) -> Named:
    base = f"{namespace}/{model}"
    bases: tuple[str, ...] = (f"{host}/{base}",)
    if host in _HOSTS:
        bases = (base, *(f"{one}/{base}" for one in _HOSTS))
        bases = (model, *bases) if namespace.lower() == "library" else bases
    path, problem = manifest, ""
    try:
        path = _weights(root, _runnable(root, _read(root, manifest)))
        problem = fault(path, root)
    except _ManifestError as error:
        problem = str(error)
    return Named(STORE, bases, tag, path, problem, frozenset((tag.casefold(),)))


def _read(root: Path, path: Path) -> dict[str, Any]:
    """A manifest, or the list of a model's manifests. Links may lead to blobs, not out of the store."""
    try:
        problem = fault(path, root)
        if problem:
            raise _ManifestError(f"its manifest cannot be used: {problem}")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _ManifestError(f"its manifest {path} cannot be read ({reason(error)})") from error
    if len(data) > MAX_BYTES:
        raise _ManifestError(f"its manifest {path} is larger than {MAX_BYTES >> 20} MiB")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _ManifestError(f"its manifest {path} is not valid")
    return found


def _runnable(root: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The manifest for a GGUF, of a list that has one for each format."""
    if found.get("mediaType") != _LIST:
        return found
    children = [child for child in _dicts(found.get("manifests")) if child.get("format") in ("gguf", "", None)]
    children = [child for child in children if child.get("runner") != "mlx"]
    if not children:
        raise _ManifestError("it has no GGUF, only other formats")
    if len(children) > 1:
        raise _ManifestError("it has several GGUF models")
    child = children[0]
    if "digest" in child and "layers" not in child:
        return _read(root, _blob(root, child["digest"]))
    return child


def _weights(root: Path, manifest: dict[str, Any]) -> Path:
    """The file of the one layer that is a model."""
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
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
