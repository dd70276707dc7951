"""Opens the files of a model once, so that the loaded and the hashed bytes are the same.

A path may refer to another file later (an update, a changed link), a descriptor does not. Writes to an open file show
in its timestamps.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from notes_cli.errors import Help, ModelError

_SPLIT = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>[0-9]{5})\.gguf")


class Source:
    """One open file of a model."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be read."""
        self.path = path
        self.file: BinaryIO = path.open("rb", buffering=0)
        self._stamp = stamp(self.file)

    @property
    def changed(self) -> bool:
        """True if the content may have changed since it was opened, or since `accept_content`."""
        return stamp(self.file) != self._stamp

    def accept_content(self) -> None:
        """Accept the present content as unchanged."""
        self._stamp = stamp(self.file)

    @property
    def loadable(self) -> str:
        """A path by which C opens this very file, even if `path` refers to another one now."""
        name = f"/proc/self/fd/{self.file.fileno()}"
        return name if os.path.exists(name) else str(self.path)

    def close(self) -> None:
        self.file.close()


def stamp(file: BinaryIO) -> tuple[int, ...]:
    """Return the attributes of an open file that change with its content. The modification time alone can be set to
    anything."""
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def open_sources(path: Path) -> list[Source]:
    """Open all files of the model: a split one (name-00001-of-00003.gguf) has several. Raises ModelError for common
    mistakes with a shorter message than llama.cpp's."""
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
    """Return all files of the model with this first file, by name. A single file with such a name is the whole
    model."""
    if not path.name:  # "." and "/" have no name
        return [path]
    first, *rest = (path.with_name(name) for name in part_names(path.name))
    return [first, *rest] if any(part.exists() for part in rest) else [path]


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split model from its first; otherwise the name itself."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return [name]
    count = match["count"]
    return [f"{match['stem']}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)]
