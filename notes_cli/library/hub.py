"""The Hugging Face cache, which llama.cpp shares: `models--USER--REPO/` with refs, snapshots and blobs.

A snapshot holds links into the blobs of its repository. The one that `main` refers to counts, as for llama.cpp.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from notes_cli.library.named import DOWNLOADING, Named, Tell, fault, files, listed, unreadable

STORE = "Hugging Face"
_REPO = re.compile(r"models--(\w[\w.-]*?)--(\w[\w.-]*)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def models(root: Path, tell: Tell) -> Iterator[Named]:
    """All models of a cache; what is wrong with one is said in it."""
    for name in listed(root, tell):
        match = _REPO.fullmatch(name)
        if match:
            yield from _repository(root, root / name, bases(match[1], match[2]), tell)


def bases(user: str, repo: str) -> tuple[str, ...]:
    """What a repository is called."""
    return tuple(f"{host}{user}/{repo}" for host in ("", "hf.co/", "huggingface.co/"))


def _repository(root: Path, folder: Path, called: tuple[str, ...], tell: Tell) -> Iterator[Named]:
    paths: list[Path] = []
    for snapshot in _snapshots(folder, tell):
        whole = folder / "snapshots" / snapshot
        for place, _, names in os.walk(whole, onerror=lambda error: tell(unreadable(error))):  # links not followed
            paths += [Path(place, name) for name in sorted(names)]
    found = list(files(STORE, called, paths, lambda path: fault(path, root)))
    yield from found
    for blob in listed(folder / "blobs", tell):
        if blob.endswith(DOWNLOADING) and (found or "gguf" in called[0].lower()):
            yield Named(STORE, called, "", folder / "blobs" / blob, "a download of it has not been finished")


def _snapshots(folder: Path, tell: Tell) -> list[str]:
    """The commit that `main` refers to, or another reference; all that are there where nothing refers to one."""
    there = [name for name in listed(folder / "snapshots", tell) if _COMMIT.fullmatch(name)]
    references = listed(folder / "refs", tell)
    for name in sorted(references, key=lambda name: name != "main"):
        commit = _commit(folder / "refs" / name)
        if commit in there:
            return [commit]
    return there


def _commit(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            found = file.read(64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
    return found if _COMMIT.fullmatch(found) else ""
