"""Watches files by polling, and reports a change once a file has been stable for two polls.

Several writes by an editor, or a rename, count as one change.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

FileStamp = tuple[int, ...] | None  # attributes that change with the content; None if the file is missing


class Watched:
    """File attributes, as last handled and as last polled."""

    def __init__(self) -> None:
        self._handled: dict[Path, FileStamp] = {}
        self._latest: dict[Path, FileStamp] = {}

    def mark_handled(self, path: Path, look: FileStamp) -> None:
        """Record that the file with these attributes was processed."""
        self._handled[path] = self._latest[path] = look

    def changed(self, paths: Iterable[Path]) -> list[tuple[Path, FileStamp]]:
        """Return the files that differ from their handled attributes and were equal in two consecutive polls. A new
        file counts as changed, unless it is missing."""
        result = []
        for path in dict.fromkeys(paths):
            now = file_stamp(path)
            stable = path in self._latest and self._latest[path] == now
            self._latest[path] = now
            if stable and now != self._handled.get(path):
                result.append((path, now))
        return result


class Files:
    """Maps files to the skills that depend on them: the files of their texts, and images in those."""

    def __init__(self) -> None:
        self._own: dict[Path, Sequence[str]] = {}
        self._shown: dict[Path, Collection[Path]] = {}

    def add(self, own: Mapping[Path, Sequence[str]]) -> None:
        """Add the files that skills are read from."""
        self._own.update(own)

    def set_images(self, path: Path, images: Collection[Path]) -> None:
        """Set the images that a text file shows."""
        self._shown[path] = images

    @property
    def paths(self) -> list[Path]:
        return list(dict.fromkeys([*self._own, *(image for images in self._shown.values() for image in images)]))

    def skills(self, path: Path) -> list[str]:
        """Return the skills that depend on a file."""
        texts = [path, *(text for text, images in self._shown.items() if path in images)]
        return list(dict.fromkeys(word for text in texts for word in self._own.get(text, ())))


def file_stamp(path: Path) -> FileStamp:
    """Return the attributes that change with a file's content; None if it is missing or inaccessible."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
