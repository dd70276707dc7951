"""The edit methods: how a skill with new values comes into a notebook. The reference is `recompute`.

Each lays one segment at the end of a notebook, amended, and is named as in the paper (arXiv:2606.17107, Operation 1).
What a method does not touch still holds what the model concluded from the old value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from notes_cli.editing.change import Change
from notes_cli.engine.notebook import Notebook, Patch
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError, UnsupportedError

# Whether a method touches the rows of the skill, and whether a sentence is said after it.
METHODS = {
    "stale": (False, False),
    "field": (True, False),
    "selective": (True, False),
    "erratum": (False, True),
    "field+erratum": (True, True),
    "suffix": (True, False),
    "recompute": (True, False),
}
DEFAULT_METHOD = "erratum"
DEFAULT_K = 16

Place = Callable[[Notebook, Segment], None]  # lays a segment as it was compiled


@dataclass(frozen=True, slots=True)
class Method:
    """An edit method by name; `k`: how many tokens behind a change `selective` recomputes with it."""

    name: str = DEFAULT_METHOD
    k: int = DEFAULT_K

    @classmethod
    def parse(cls, text: str) -> Method:
        """`selective@32`, `erratum`, ... Raise NotesError for a method that does not exist."""
        name, at, k = text.partition("@")
        if name not in METHODS or (at and (name != "selective" or not k.isdecimal() or int(k) < 1)):
            raise NotesError(f"no edit method {text!r}. Known: {', '.join(METHODS)} (selective@K)")
        return cls(name, int(k) if at else DEFAULT_K)

    @property
    def touches(self) -> bool:
        """Whether rows of the skill are replaced."""
        return METHODS[self.name][0]

    @property
    def says(self) -> bool:
        """Whether an erratum is appended."""
        return METHODS[self.name][1]


def lay_changed(notebook: Notebook, segment: Segment, change: Change, method: Method, place: Place) -> None:
    """Lay the segment at the end of the notebook, amended by the method.

    Raise UnsupportedError where this model's rows cannot be recomputed in place.
    """
    reason = notebook.context.supports("rewrite") if method.touches and method.name != "recompute" else None
    if reason:
        raise UnsupportedError(f"the edit method {method.name} is not possible: {reason}. Use erratum or recompute")
    if method.name == "recompute":
        notebook.append(change.tokens, "splice", segment.name, why="recomputed with the new value")
    elif method.name == "suffix":
        _suffix(notebook, segment, change, place)
    else:
        also = behind(segment, change, method.k) if method.name == "selective" else []
        start = len(notebook)
        place(notebook, segment)
        if method.touches:
            _patch(notebook, start, change.patches, also)


def _suffix(notebook: Notebook, segment: Segment, change: Change, place: Place) -> None:
    """What stands before the first change is reused, everything from there on decoded: equal to a recompute."""
    first = change.patches[0].first
    if first:
        place(notebook, head_of(segment, first))
    notebook.append(change.tokens[first:], "splice", segment.name, why="decoded from the changed value on")


def _patch(notebook: Notebook, start: int, patches: Sequence[Patch], also: Sequence[int]) -> None:
    moved = [replace(patch, first=start + patch.first, last=start + patch.last) for patch in patches]
    notebook.replace(moved, [start + position for position in also])


def behind(segment: Segment, change: Change, k: int) -> list[int]:
    """The `k` tokens behind the first change on which it has the highest effect, as measured when it was compiled."""
    first = change.patches[0].first
    inside = {position for patch in change.patches for position in range(patch.first, patch.last)}
    candidates = [position for position in range(first, len(segment)) if position not in inside]
    if not segment.influence:
        raise NotesError(
            f"{segment.name} was compiled without the influence of its fields, which selective goes by. "
            "Compile it again with: notes compile --influence"
        )
    effect = np.sum([segment.influence[name] for name in change.fields], axis=0)
    ranked = sorted(candidates, key=lambda position: -float(effect[position]))
    return sorted(ranked[:k])


def rewritten(segment: Segment, change: Change, method: Method) -> int:
    """How many tokens the method recomputes in place at most: they need as many free cells meanwhile."""
    if not method.touches or method.name in ("suffix", "recompute"):
        return 0
    field = sum(len(patch.tokens) for patch in change.patches)
    return min(len(segment), field + (method.k if method.name == "selective" else 0))


def head_of(segment: Segment, count: int) -> Segment:
    """The first tokens of a segment, with their rows."""
    rows = tuple(
        replace(
            layer, k=layer.k[: segment.base - segment.first + count], v=layer.v[: segment.base - segment.first + count]
        )
        for layer in segment.layers
    )
    return replace(segment, tokens=np.asarray(segment.tokens[:count]), layers=rows)
