"""Computes the effect of replacing tokens in a sequence: new tokens, moved positions, and positions to recompute.

Plain arithmetic over positions, without llama.cpp and files. Patches ascend and do not overlap (`ascending`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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

    def add_unchanged(last: int) -> None:
        if done < last:
            parts.append(Aligned((done, last), (done + grown, last + grown), None))

    for patch in patches:
        add_unchanged(patch.first)
        start = patch.first + grown
        parts.append(Aligned(patch.span, (start, start + len(patch.tokens)), patch))
        done, grown = patch.last, grown + patch.grows
    add_unchanged(length)
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
