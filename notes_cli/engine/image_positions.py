"""Where the rows of a sequence are: one a position, but for images under M-RoPE, whose rows share positions.

Plain data. A row is counted as a token is; a position is what llama.cpp counts. Within an image there is none to go
back to, and nothing to decode: it is there as a whole or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.segment import Media
from notes_cli.errors import EngineError


@dataclass(frozen=True, slots=True)
class Image:
    """Rows [first, last) of a sequence, with their positions: `positions` in all. `grid`: on three axes, in so many
    rows and columns; (0, 0) where they are in none, None where there is one axis."""

    first: int
    last: int
    positions: int
    grid: tuple[int, int] | None = None

    @property
    def shared(self) -> int:
        """How many positions fewer than rows."""
        return self.last - self.first - self.positions


def images_of(media: Sequence[Media], at: int, axes: NDArray[np.int32] | None) -> list[Image]:
    """The images of a segment whose first row is row `at`. `axes`: of all its rows, as a segment has them."""
    return [
        Image(one.first + at, one.last + at, one.positions, None if axes is None else _grid(axes[one.first : one.last]))
        for one in media
    ]


def _grid(axes: NDArray[np.int32]) -> tuple[int, int]:
    places = axes - axes[0]
    rows, columns = int(places[:, 1].max()) + 1, int(places[:, 2].max()) + 1
    return (rows, columns) if np.array_equal(places, grid_axes((rows, columns))) else (0, 0)


def grid_axes(grid: tuple[int, int]) -> NDArray[np.int32]:
    """Time, row and column of each row of an image in a grid, [rows, 3], from 0 on."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1], dtype=np.int32), np.int32(grid[1]))
    return np.stack([0 * rows, rows, columns], axis=1)


def axes_of(images: Sequence[Image], first: int, last: int) -> NDArray[np.int32] | None:
    """Time, row and column of rows [first, last), from 0 on; None where all of these are one a position. Raise
    EngineError for a cut inside of an image, and for one that is in no grid."""
    inside = [image for image in images if first <= image.first < last and image.grid is not None]
    check_cut(images, (first, last))
    if not inside:
        return None
    axes = np.empty((last - first, 3), np.int32)
    at = done = 0
    for image in inside:
        if not image.grid or not image.grid[0]:
            raise EngineError("the rows of an image are in no grid, and cannot be put back")
        words = image.first - first - done
        axes[done : done + words] = at + np.arange(words)[:, None]
        at, done = at + words, done + words
        axes[done : done + image.last - image.first] = at + grid_axes(image.grid)
        at, done = at + image.positions, done + image.last - image.first
    axes[done:] = at + np.arange(last - first - done)[:, None]
    return axes


def position(images: Sequence[Image], row: int) -> int:
    """The position of a row, or of what comes after the last. Raise EngineError for one inside of an image."""
    check_cut(images, [row])
    return row - sum(image.shared for image in images if image.last <= row)


def length(images: Sequence[Image], rows: int) -> int:
    """The length of a sequence with so many rows, as llama.cpp tells it: by the time axis alone, on which the rows of
    an image are at one position. Where an image is the last that there is, this is less than the next position."""
    last = next((image for image in images if image.last == rows and image.grid is not None), None)
    return position(images, rows) if last is None else position(images, last.first) + 1


def row(images: Sequence[Image], position: int) -> int:
    """The row that is at a position; of a position inside of an image its first row, where that is not all there is."""
    found = position
    for image in images:
        if found < image.first:
            break
        found += image.shared if found >= image.first + image.positions else image.first - found
        if found == image.first:
            break
    return found


def check_cut(images: Sequence[Image], rows: Iterable[int]) -> None:
    """Raise EngineError if one of these rows is inside of an image: what begins there cannot be told apart."""
    for one in rows:
        inside = next((image for image in images if image.first < one < image.last), None)
        if inside:
            raise EngineError(
                f"row {one} is inside of an image, rows {inside.first} to {inside.last - 1}, which is there as a whole "
                "or not"
            )


def removed_images(images: Sequence[Image], spans: Iterable[tuple[int, int]]) -> list[Image]:
    """The images that are within one of these stretches of rows. Raise EngineError for a stretch that has a part of
    one."""
    found = []
    for first, last in spans:
        inside = [image for image in images if first <= image.first and image.last <= last]
        check_no_images([image for image in images if image not in inside], range(first, last))
        found += inside
    return found


def check_no_images(images: Sequence[Image], rows: Iterable[int]) -> None:
    """Raise EngineError if one of these rows is an image's: there is no token to decode again."""
    for one in rows:
        if any(image.first <= one < image.last for image in images):
            raise EngineError(f"row {one} is of an image: its rows are no words, and cannot be rewritten")
