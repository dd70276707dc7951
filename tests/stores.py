"""Stores of models as Ollama and Hugging Face leave them on a disk, with real GGUFs inside."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

IMAGE = "application/vnd.ollama.image."
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.ollama.manifest.list.v2+json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def blob(root: Path, data: bytes) -> str:
    """Ollama's file for these bytes; its digest."""
    digest = hashlib.sha256(data).hexdigest()
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "blobs" / f"sha256-{digest}").write_bytes(data)
    return f"sha256:{digest}"


def manifest(root: Path, model: Path | None, /, **more: str) -> dict[str, Any]:
    """Write Ollama's manifest for a model and its blobs. `more`: further layers and their content."""
    texts = {"template": "{{ .Prompt }}", "params": '{"stop": ["x"]}', **more}
    layers = [] if model is None else [_layer(root, "model", model.read_bytes())]
    layers += [_layer(root, name, text.encode()) for name, text in texts.items()]
    config = _layer(root, "config", b'{"model_format": "gguf"}') | {
        "mediaType": "application/vnd.docker.container.image.v1+json"
    }
    return {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}


def _layer(root: Path, kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": f"{IMAGE}{kind}", "digest": blob(root, data), "size": len(data)}


def ollama(root: Path, name: str, content: dict[str, Any] | bytes) -> Path:
    """Ollama's first layout: the manifest is a file. `name`: library/qwen3/0.6b, or with another host before it."""
    place = name if name.count("/") == 3 else f"registry.ollama.ai/{name}"
    path = root / "manifests" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def ollama_v2(root: Path, name: str, content: dict[str, Any]) -> Path:
    """Its second one: the manifest is a blob, and a link with a name leads there."""
    place = name if name.count("/") == 3 else f"ollama.com/{name}"
    path = root / "manifests-v2" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    target = root / "blobs" / blob(root, json.dumps(content).encode()).replace(":", "-")
    path.symlink_to(os.path.relpath(target, path.parent))
    return path


def hub(root: Path, repo: str, files: dict[str, Path], commit: str = COMMIT, ref: str | None = "main") -> Path:
    """A repository in the Hugging Face cache; its snapshot."""
    folder = root / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        target = folder / "blobs" / hashlib.sha256(source.read_bytes()).hexdigest()
        shutil.copy(source, target)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))
    if ref:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """All that is in a folder: names, kinds, sizes, times, contents. Reading may change times of access alone."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (root, *root.rglob("*")):
        stat = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path)] = (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, content)
    return found
