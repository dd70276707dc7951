"""Patches: tokens that take the place of others in a sequence, and where everything is afterwards.

Plain arithmetic over positions; it knows neither llama.cpp nor files. Patches ascend and do not overlap (`ascending`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

Range = tuple[int, int]  # positions [first, last)


@dataclass(frozen=True, slots=True)
class Patch:
    """Tokens [first, last) are to become `tokens`."""

    first: int
    last: int
    tokens: Sequence[int]

    @property
    def span(self) -> Range:
        return self.first, self.last

    @property
    def grows(self) -> int:
        """How many positions everything after it moves by."""
        return len(self.tokens) - (self.last - self.first)

    def offset(self, by: int) -> Patch:
        """The same patch of a sequence that has `by` more tokens before it."""
        return replace(self, first=self.first + by, last=self.last + by)


class Aligned(NamedTuple):
    """Neighbouring positions before the patches, and those that they become."""

    before: Range
    after: Range
    patch: Patch | None  # None: the tokens are the same


def is_ascending(ranges: Iterable[Range], length: int) -> bool:
    """Whether ranges ascend without overlap inside a sequence of `length` tokens. They may be empty."""
    end = 0
    for first, last in ranges:
        if not end <= first <= last:
            return False
        end = last
    return end <= length


def position_map(patches: Sequence[Patch]) -> Callable[[int], int]:
    """Where a position is after the patches. One inside a patch stays inside the patch's tokens, or at their end where
    they are fewer; the first stays the first."""

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
    """The whole sequence of `length` tokens, in its order: each patch, and what lies between them."""
    found: list[Aligned] = []
    done = grown = 0

    def keep(last: int) -> None:
        if done < last:
            found.append(Aligned((done, last), (done + grown, last + grown), None))

    for patch in patches:
        keep(patch.first)
        start = patch.first + grown
        found.append(Aligned(patch.span, (start, start + len(patch.tokens)), patch))
        done, grown = patch.last, grown + patch.grows
    keep(length)
    return found


def apply_patches(tokens: Sequence[int], patches: Sequence[Patch]) -> list[int]:
    """The tokens after the patches."""
    found: list[int] = []
    for part in align(patches, len(tokens)):
        found += part.patch.tokens if part.patch else tokens[slice(*part.before)]
    return found


def new_positions(patches: Sequence[Patch]) -> set[int]:
    """The positions that hold tokens of a patch afterwards."""
    parts = align(patches, 0)  # what lies after the last patch does not matter
    return {position for part in parts if part.patch for position in range(*part.after)}


def changed_ranges(patches: Sequence[Patch], length: int, also: Iterable[int] = ()) -> list[Range]:
    """The positions afterwards whose rows are not what they were: those of new tokens, of the tokens `also` that were
    computed again (counted before the patches), and of all that moved, in a sequence of `length` tokens before."""
    parts, shift = align(patches, length), position_map(patches)
    moved = next((part.after[0] for part in parts if part.patch and part.patch.grows), shift(length))
    return merge_ranges(new_positions(patches) | set(map(shift, also)) | set(range(moved, shift(length))))


def merge_ranges(positions: Iterable[int]) -> list[Range]:
    """Positions as ranges, ascending."""
    found: list[Range] = []
    for position in sorted(set(positions)):
        if found and found[-1][1] == position:
            found[-1] = found[-1][0], position + 1
        else:
            found.append((position, position + 1))
    return found
