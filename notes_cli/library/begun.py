"""What a long compile keeps on its way: the rows of its first tokens, as a segment in `.begun/` of the library.

It has the name of the segment that it is to become. Only the next compile of that looks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from notes_cli.engine.segment import Segment
from notes_cli.errors import SegmentError
from notes_cli.library.container import open_segment
from notes_cli.library.files import name_in

FOLDER = ".begun"


def beside(segment: Path) -> Path:
    """Where the begun part of a segment file is, whether it exists or not."""
    return segment.parent / FOLDER / segment.name


def kept(segment: Path) -> Segment | None:
    """What is there of it, None where that is nothing that can be used: it would only have saved time."""
    path = beside(segment)
    with suppress(OSError, SegmentError):
        return open_segment(path) if path.is_file() and not path.is_symlink() else None
    return None


def forget(segment: Path) -> None:
    """Remove it: the segment is compiled, or not wanted any more."""
    with suppress(OSError):
        beside(segment).unlink(missing_ok=True)


def parts(folder: Path) -> Iterator[Path]:
    """All of a library's."""
    with suppress(OSError):
        yield from sorted(path for path in (folder / FOLDER).iterdir() if name_in(path))
