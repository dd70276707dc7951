"""Maps tokens and images of a sequence to positions, before and after tokens are replaced.

Plain arithmetic, without llama.cpp and files. Patches ascend and do not overlap (`is_ascending`).

A row is counted per token; a position is llama.cpp's. They are equal but for images under M-RoPE, whose rows share
positions. An image is kept or removed as a whole: there is no position to roll back to within it, and its rows have no
tokens to decode again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.segment import Media
from notes_cli.errors import EngineError

Range = tuple[int, int]  # positions [first, last)


@dataclass(frozen=True, slots=True)
class Patch:
    """Replaces tokens [first, last) by `tokens`."""

    first: int
    last: int
    tokens: Sequence[int]

    @property
    def span(self) -> Range:
        return self.first, self.last

    @property
    def grows(self) -> int:
        """Number of positions by which everything after it moves."""
        return len(self.tokens) - (self.last - self.first)

    def offset(self, by: int) -> Patch:
        """Return the same patch for a sequence with `by` more tokens before it."""
        return replace(self, first=self.first + by, last=self.last + by)


class Aligned(NamedTuple):
    """A range of positions before and after the patches."""

    before: Range
    after: Range
    patch: Patch | None  # None: unchanged tokens


def is_ascending(ranges: Iterable[Range], length: int) -> bool:
    """True if ranges, possibly empty, ascend without overlap within `length` tokens."""
    end = 0
    for first, last in ranges:
        if not end <= first <= last:
            return False
        end = last
    return end <= length


def position_map(patches: Sequence[Patch]) -> Callable[[int], int]:
    """Return a function that maps positions before the patches to positions after them. Within a patch a position stays
    in the patch's tokens, or moves to their end where they are fewer; the first stays the first."""

    def shift(position: int) -> int:
        moved = position
        for patch in patches:
            if patch.last <= position:
                moved += patch.grows
            elif patch.first < position:
                moved += min(0, len(patch.tokens) - (position - patch.first))
        return moved

    return shift


def align(patches: Sequence[Patch], length: int) -> list[Aligned]:
    """Split a sequence of `length` tokens into its patches and the ranges between them."""
    parts: list[Aligned] = []
    done = grown = 0
    for patch in (*patches, None):
        last = patch.first if patch else length
        if done < last:
            parts.append(Aligned((done, last), (done + grown, last + grown), None))
        if patch:
            start = last + grown
            parts.append(Aligned(patch.span, (start, start + len(patch.tokens)), patch))
            done, grown = patch.last, grown + patch.grows
    return parts


def apply_patches(tokens: Sequence[int], patches: Sequence[Patch]) -> list[int]:
    """Return the tokens after the patches."""
    result: list[int] = []
    for part in align(patches, len(tokens)):
        result += part.patch.tokens if part.patch else tokens[slice(*part.before)]
    return result


def new_positions(patches: Sequence[Patch]) -> set[int]:
    """Return the positions of patched tokens, after the patches."""
    parts = align(patches, 0)  # the length does not matter: no patch is beyond it
    return {position for part in parts if part.patch for position in range(*part.after)}


def changed_ranges(patches: Sequence[Patch], length: int, also: Iterable[int] = ()) -> list[Range]:
    """Return the ranges, after the patches, whose K/V differs from before: new tokens, the recomputed positions `also`
    (counted before the patches), and all that moved. `length`: tokens before."""
    parts, shift = align(patches, length), position_map(patches)
    moved = next((part.after[0] for part in parts if part.patch and part.patch.grows), shift(length))
    return merge_ranges(new_positions(patches) | set(map(shift, also)) | set(range(moved, shift(length))))


def merge_ranges(positions: Iterable[int]) -> list[Range]:
    """Merge positions into ascending ranges."""
    result: list[Range] = []
    for position in sorted(set(positions)):
        if result and result[-1][1] == position:
            result[-1] = result[-1][0], position + 1
        else:
            result.append((position, position + 1))
    return result


@dataclass(frozen=True, slots=True)
class Image:
    """Rows [first, last) of an image, which take `positions` positions. `grid`: rows and columns under M-RoPE, (0, 0)
    for an irregular placement; None with one axis."""

    first: int
    last: int
    positions: int
    grid: tuple[int, int] | None = None

    @property
    def shared(self) -> int:
        """Rows minus positions."""
        return self.last - self.first - self.positions


def images_of(media: Sequence[Media], at: int, axes: NDArray[np.int32] | None) -> list[Image]:
    """Return the images of a segment whose first row is row `at`. `axes`: positions of all its rows, [n, 3]."""
    return [
        Image(
            item.first + at,
            item.last + at,
            item.positions,
            None if axes is None else _grid(axes[item.first : item.last]),
        )
        for item in media
    ]


def _grid(axes: NDArray[np.int32]) -> tuple[int, int]:
    offsets = axes - axes[0]
    rows, columns = int(offsets[:, 1].max()) + 1, int(offsets[:, 2].max()) + 1
    return (rows, columns) if np.array_equal(offsets, grid_axes((rows, columns))) else (0, 0)


def grid_axes(grid: tuple[int, int]) -> NDArray[np.int32]:
    """Return time, row and column of each row of a grid, [rows, 3], from 0 on."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1], dtype=np.int32), np.int32(grid[1]))
    return np.stack([0 * rows, rows, columns], axis=1)


def axes_of(images: Sequence[Image], first: int, last: int) -> NDArray[np.int32] | None:
    """Return time, row and column of rows [first, last), from 0 on; None if each has one position. Raises EngineError
    for a cut within an image, and for an image that is in no grid."""
    inside = [image for image in images if first <= image.first < last and image.grid is not None]
    check_cut(images, (first, last))
    if not inside:
        return None
    axes = np.empty((last - first, 3), np.int32)
    at = filled = 0
    for image in inside:
        if not image.grid or not image.grid[0]:
            raise EngineError("the rows of an image are in no grid, and cannot be put back")
        words = image.first - first - filled
        axes[filled : filled + words] = at + np.arange(words)[:, None]
        at, filled = at + words, filled + words
        axes[filled : filled + image.last - image.first] = at + grid_axes(image.grid)
        at, filled = at + image.positions, filled + image.last - image.first
    axes[filled:] = at + np.arange(last - first - filled)[:, None]
    return axes


def position(images: Sequence[Image], row: int) -> int:
    """Return the position of a row, or of the row after the last. Raises EngineError for a row within an image."""
    check_cut(images, [row])
    return row - sum(image.shared for image in images if image.last <= row)


def length(images: Sequence[Image], rows: int) -> int:
    """Return llama.cpp's length of a sequence with so many rows. It counts the time axis only, on which an image has
    one position, so that after a final image it is less than the next position."""
    last = next((image for image in images if image.last == rows and image.grid is not None), None)
    return position(images, rows) if last is None else position(images, last.first) + 1


def row(images: Sequence[Image], position: int) -> int:
    """Return the row at a position; within an image its first row, if the image goes on beyond it."""
    index = position
    for image in images:
        if index < image.first:
            break
        index += image.shared if index >= image.first + image.positions else image.first - index
        if index == image.first:
            break
    return index


def check_cut(images: Sequence[Image], rows: Iterable[int]) -> None:
    """Raise EngineError if a row is within an image, where positions are ambiguous."""
    for row in rows:
        inside = next((image for image in images if image.first < row < image.last), None)
        if inside:
            raise EngineError(
                f"row {row} is inside of an image, rows {inside.first} to {inside.last - 1}, which is there as a whole "
                "or not"
            )


def removed_images(images: Sequence[Image], spans: Iterable[tuple[int, int]]) -> list[Image]:
    """Return the images within these ranges of rows. Raises EngineError for a range that cuts one."""
    removed = []
    for first, last in spans:
        inside = [image for image in images if first <= image.first and image.last <= last]
        check_no_images([image for image in images if image not in inside], range(first, last))
        removed += inside
    return removed


def check_no_images(images: Sequence[Image], rows: Iterable[int]) -> None:
    """Raise EngineError if a row belongs to an image: there is no token to decode again."""
    for row in rows:
        if any(image.first <= row < image.last for image in images):
            raise EngineError(f"row {row} is of an image: its rows are no words, and cannot be rewritten")
