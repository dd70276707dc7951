"""The files of a model, opened once: what is loaded and what is hashed are the same bytes.

A path may name another file a moment later (an update, a link that is changed), a descriptor does not. What is written
into a file while it is open shows in its times.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from notes_cli.errors import Help, ModelError

_SPLIT = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>[0-9]{5})\.gguf")


class Source:
    """One file of a model, open until it is closed."""

    def __init__(self, path: Path) -> None:
        """Raise OSError if it cannot be read."""
        self.path = path
        self.file: BinaryIO = path.open("rb", buffering=0)
        self._stamp = stamp(self.file)

    @property
    def changed(self) -> bool:
        """Whether the file may have other content than when it was opened, or last settled."""
        return stamp(self.file) != self._stamp

    def accept_content(self) -> None:
        """Its content has been found to be the same."""
        self._stamp = stamp(self.file)

    @property
    def loadable(self) -> str:
        """A name by which C opens this very file, whatever its path names by then."""
        name = f"/proc/self/fd/{self.file.fileno()}"
        return name if os.path.exists(name) else str(self.path)

    def close(self) -> None:
        self.file.close()


def stamp(file: BinaryIO) -> tuple[int, ...]:
    """What of an open file does not stay if its content changes. Its modification time alone can be set to anything."""
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def open_sources(path: Path) -> list[Source]:
    """All files of the model: a split one (name-00001-of-00003.gguf) has several.

    Raise ModelError for the mistakes that people make, before llama.cpp says something longer about them.
    """
    if path.is_dir():
        raise ModelError(f"{path}: is a folder", "Name the GGUF file in it")
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: is not a regular file", "Name a GGUF file")
    opened: list[Source] = []
    try:
        for part in parts(path):
            opened.append(Source(part))
        magic = opened[0].file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it starts with {magic!r})", "Name a model in GGUF format")
    except BaseException as error:
        for source in opened:
            source.close()
        if isinstance(error, FileNotFoundError):
            if opened:
                raise ModelError(f"{path}: its part {part.name} is missing", "Put all parts into one folder") from error
            raise ModelError(f"{path}: no such model", Help.NAME_MODEL()) from error
        if isinstance(error, OSError):
            raise ModelError(f"{part}: cannot be read ({error.strerror})") from error
        raise
    return opened


def parts(path: Path) -> list[Path]:
    """All files of the model of which this is the first, by its name. A lone file of such a name is the model."""
    if not path.name:  # "." and "/" have none
        return [path]
    first, *others = (path.with_name(name) for name in part_names(path.name))
    return [first, *others] if any(part.exists() for part in others) else [path]


def part_names(name: str) -> list[str]:
    """The names of all parts of a split model, from that of the first; of another model its own name."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return [name]
    count = match["count"]
    return [f"{match['stem']}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)]
