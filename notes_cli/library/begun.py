"""What a long compile keeps on its way: the rows of its first tokens, as a segment in `.begun/` of the library.

It has the name of the segment that it is to become. Only the next compile of that looks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from notes_cli.library.files import name_in

FOLDER = ".begun"


def beside(segment: Path) -> Path:
    """Where the begun part of a segment file is, whether it exists or not."""
    return segment.parent / FOLDER / segment.name


def forget(segment: Path) -> None:
    """Remove it: the segment is compiled, or not wanted any more."""
    with suppress(OSError):
        beside(segment).unlink(missing_ok=True)


def parts(folder: Path) -> Iterator[Path]:
    """All of a library's."""
    with suppress(OSError):
        yield from sorted(path for path in (folder / FOLDER).iterdir() if name_in(path))
