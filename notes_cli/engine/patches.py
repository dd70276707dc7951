"""Patches: tokens that take the place of others in a sequence, and where all positions are afterwards.

Plain arithmetic over positions; it knows neither llama.cpp nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patch:
    """Tokens [first, last) of a notebook are to become `tokens`."""

    first: int
    last: int
    tokens: Sequence[int]

    @property
    def grows(self) -> int:
        return len(self.tokens) - (self.last - self.first)


def shifted(patches: Sequence[Patch]) -> Callable[[int], int]:
    """Where a position stands after the patches, which ascend; that of a patch's first token stays its first."""

    def shift(position: int) -> int:
        moved = position
        for patch in patches:
            inside = min(position, patch.last) - patch.first
            if inside > 0:  # behind the patch, or in it: what is inside of a shorter one ends with it
                moved += patch.grows if position >= patch.last else min(0, len(patch.tokens) - inside)
        return moved

    return shift
