"""Selecting the tokens that are computed again with a change: those after it on which it has the highest effect."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import Change
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError


@dataclass(frozen=True, slots=True)
class Selection:
    """By what a method selects tokens."""

    # The influence of the fields, if it was measured when the skill was compiled; else a pass over the corrected text.
    influence: bool = False
    layers: int | None = None  # of the pass: how many of the first layers count; None: all

    def needs_pass(self, segment: Segment) -> bool:
        """Whether the corrected text must be read for it."""
        return not (self.influence and segment.influence)


def most_influenced(segment: Segment, change: Change, k: int) -> tuple[int, ...]:
    """The `k` tokens after the first change on which it has the highest effect, as measured when it was compiled.

    Raise NotesError where that was not measured.
    """
    if not segment.influence:
        why = f"{segment.name} was compiled without the influence of its fields, by which selective chooses"
        raise NotesError(why, Help.COMPILE_OTHERWISE(name=segment.name, options={"influence": True}))
    return _highest(segment, change, np.sum([segment.influence[name] for name in change.fields], axis=0), k)


def most_deviating(
    segment: Segment, change: Change, k: int, layers: int | None, notebook: Notebook | None
) -> tuple[int, ...]:
    """The `k` tokens after the first change whose rows deviate most in a pass over the corrected text, in a scratch
    notebook. Without one nothing is computed, and any tokens are returned in their place."""
    effect = np.zeros(len(segment), np.float32)
    if notebook is not None:
        from notes_cli.editing.influence import deviation  # a pass is what few edits need

        effect = deviation(notebook, segment, change, layers)
    return _highest(segment, change, effect, k)


def _highest(segment: Segment, change: Change, effect: NDArray[np.float32], k: int) -> tuple[int, ...]:
    first, inside = change.patches[0].first, change.inside
    candidates = [position for position in range(first, len(segment)) if position not in inside]
    return tuple(sorted(sorted(candidates, key=lambda position: -float(effect[position]))[:k]))
