"""Watching files: which of them have changed, told once each has been left alone for a moment.

Files are looked at again and again; what an editor writes in several steps, or by a rename, is one change.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

FileStamp = tuple[int, ...] | None  # what of a file does not stay if it changes; None: it is not there


class Watched:
    """What is known of some files: as they were when they were handled last, and at the latest look."""

    def __init__(self) -> None:
        self._handled: dict[Path, FileStamp] = {}
        self._latest: dict[Path, FileStamp] = {}

    def mark_handled(self, path: Path, look: FileStamp) -> None:
        """What this look saw has been dealt with."""
        self._handled[path] = self._latest[path] = look

    def changed(self, paths: Iterable[Path]) -> list[tuple[Path, FileStamp]]:
        """Those of the files that differ from what was handled, and have been the same at two looks in a row. One that
        is looked at for the first time counts as changed, unless it is not there."""
        found = []
        for path in dict.fromkeys(paths):
            now = file_stamp(path)
            settled = path in self._latest and self._latest[path] == now
            self._latest[path] = now
            if settled and now != self._handled.get(path):
                found.append((path, now))
        return found


class Files:
    """Which skills depend on which files: each on those that it is read from, and on the images that these show. Skills
    are called by words that mean them."""

    def __init__(self) -> None:
        self._own: dict[Path, Sequence[str]] = {}
        self._shown: dict[Path, Collection[Path]] = {}

    def add(self, own: Mapping[Path, Sequence[str]]) -> None:
        """These skills are read from these files; what is known of other files stays."""
        self._own.update(own)

    def set_images(self, path: Path, images: Collection[Path]) -> None:
        """The text in a file shows these images now."""
        self._shown[path] = images

    @property
    def paths(self) -> list[Path]:
        return list(dict.fromkeys([*self._own, *(image for images in self._shown.values() for image in images)]))

    def skills(self, path: Path) -> list[str]:
        """The skills that depend on a file."""
        texts = [path, *(text for text, images in self._shown.items() if path in images)]
        return list(dict.fromkeys(word for text in texts for word in self._own.get(text, ())))


def file_stamp(path: Path) -> FileStamp:
    """What of a file does not stay if it changes, or is replaced; None if it is not there, or cannot be looked at."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
