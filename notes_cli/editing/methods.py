"""The edit methods: how a skill with new values comes into a notebook. The reference is `recompute`.

Each lays one segment at the end of a notebook, amended, and is named as in the paper (arXiv:2606.17107, Operation 1).
What a method does not touch still holds what the model concluded from the old value.

* `stale`: as it was compiled.
* `field`: the field's tokens are recomputed in place; what stands behind a value of another length moves.
* `selective@K`: these, and the K tokens behind them on which the field has the highest effect: its influence, if that
  was measured when the skill was compiled, else what a pass over the corrected text shows.
* `blend@K`: these, and the K tokens behind them whose rows deviate most after the first layers (as CacheBlend chooses).
  llama.cpp cannot stop there, so a whole pass over the corrected text is what it costs here.
* `erratum`: as it was compiled, and a sentence behind it. `field+erratum`: both.
* `suffix`: everything from the field on is decoded, which equals a recompute.
* `block`: the block that the field stands in is computed anew, alone as when it was compiled, and takes the old one's
  place. Equal to compiling the corrected text in the same blocks.
* `recompute`: the corrected text is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import Change, Stretch, stretches
from notes_cli.editing.influence import deviation
from notes_cli.editing.prefill import Scratch, prefill
from notes_cli.engine.context import Context
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.patches import Patch
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, UnsupportedError

# Whether a method touches the rows of the skill, and whether a sentence is said after it.
METHODS = {
    "stale": (False, False),
    "field": (True, False),
    "selective": (True, False),
    "blend": (True, False),
    "erratum": (False, True),
    "field+erratum": (True, True),
    "suffix": (True, False),
    "block": (True, False),
    "recompute": (True, False),
}
RANKED = ("selective", "blend")  # those that take @K
DEFAULT_METHOD = "erratum"
DEFAULT_K = 16
_COUNT = re.compile("[1-9][0-9]{0,8}")  # of tokens
FIRST_LAYERS = 2  # in the first of them no token has seen another's value yet

Place = Callable[[Notebook, Segment], None]  # lays a segment as it was compiled


@dataclass(frozen=True, slots=True)
class Method:
    """An edit method by name; `k`: how many tokens behind a change `selective` and `blend` recompute with it."""

    name: str = DEFAULT_METHOD
    k: int = DEFAULT_K

    @classmethod
    def parse(cls, text: str, *, also: Sequence[str] = ()) -> Method:
        """`selective@32`, `erratum`, ... Raise NotesError for a method that does not exist, naming those that do, and
        what else the caller takes in the place of one."""
        name, at, k = text.partition("@")
        if name not in METHODS or (at and (name not in RANKED or not _COUNT.fullmatch(k))):
            known = ", ".join([*METHODS, *also])
            raise NotesError(f"no edit method {text!r}. Known: {known} (selective@K, blend@K)")
        return cls(name, int(k) if at else DEFAULT_K)

    def __str__(self) -> str:
        return f"{self.name}@{self.k}" if self.ranks else self.name

    @property
    def touches(self) -> bool:
        """Whether rows of the skill are replaced."""
        return METHODS[self.name][0]

    @property
    def says(self) -> bool:
        """Whether an erratum is appended."""
        return METHODS[self.name][1]

    @property
    def ranks(self) -> bool:
        """Whether it chooses tokens behind the change."""
        return self.name in RANKED


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a method has to know or to have before it lays a segment."""

    also: tuple[int, ...] = ()  # tokens of the segment behind the change that are recomputed with it, ascending
    blocks: tuple[tuple[Stretch, Segment], ...] = ()  # those with a change, computed anew
    passed: int = 0  # tokens that a pass went over for that


def prepare(scratch: Scratch, segment: Segment, change: Change, method: Method, *, dry: bool = False) -> Prepared:
    """Choose tokens, or compute blocks, in a scratch notebook.

    `dry`: compute nothing; which tokens would be chosen is then not known, only how many. Raise UnsupportedError where
    the method is not possible, and NotesError for `block` on a segment of one block.
    """
    if method.name == "block" and not segment.pinned and not segment.blocks:
        why = f"{segment.name} was compiled in one piece, so there is no block to compute anew"
        raise NotesError(why, Help.COMPILE_OTHERWISE(name=segment.name, options={"blocks": 8}))
    if method.name == "selective" and segment.influence:
        return Prepared(tuple(behind(segment, change, method.k)))
    if not method.ranks and method.name != "block":
        return Prepared()
    passed = _pass(segment, change)
    if dry:
        return _prepared(segment, change, method, None, passed)
    with scratch() as notebook:
        _check(notebook.context, method)
        return _prepared(segment, change, method, notebook, passed)


def _pass(segment: Segment, change: Change) -> int:
    """Tokens of the pass: the left context, and what the change is in."""
    return len(segment.context) + sum(len(part.tokens) for part in stretches(segment, change))


def _prepared(segment: Segment, change: Change, method: Method, notebook: Notebook | None, passed: int) -> Prepared:
    if method.name == "block":
        return Prepared(blocks=_computed(segment, stretches(segment, change), notebook), passed=passed)
    effect = np.zeros(len(segment), np.float32)
    if notebook is not None:
        effect = deviation(notebook, segment, change, FIRST_LAYERS if method.name == "blend" else None)
    return Prepared(tuple(_highest(segment, change, effect, method.k)), passed=passed)


def _computed(
    segment: Segment, parts: Sequence[Stretch], notebook: Notebook | None
) -> tuple[tuple[Stretch, Segment], ...]:
    """Each stretch as a segment, compiled behind the left context alone; without rows if there is no notebook."""
    tokens = [part.tokens for part in parts]
    rows = (
        list(prefill(notebook, segment.context, tokens, segment.row_type))
        if notebook is not None
        else [()] * len(parts)
    )
    plain = replace(segment, text="", base=len(segment.context), fields=(), influence={}, blocks=())
    return tuple(
        (part, replace(plain, tokens=part.tokens, layers=layers)) for part, layers in zip(parts, rows, strict=True)
    )


def _check(context: Context, method: Method) -> None:
    """Raise UnsupportedError where this model's rows cannot be recomputed in place, or moved."""
    if not method.touches or method.name == "recompute":
        return
    reason = context.supports("splice" if method.name == "block" else "rewrite")
    if reason:
        raise UnsupportedError(f"the edit method {method.name} is not possible: {reason}", "Use erratum or recompute")


def place_changed(
    notebook: Notebook, segment: Segment, change: Change, method: Method, place: Place, prepared: Prepared
) -> None:
    """Lay the segment at the end of the notebook, amended by the method, for which it has been prepared.

    Raise UnsupportedError where this model's rows cannot be recomputed in place.
    """
    _check(notebook.context, method)
    if method.name == "recompute":
        notebook.append(change.tokens, "splice", segment.name, reason=Reason.NEW_VALUE)
    elif method.name == "suffix":
        _suffix(notebook, segment, change, place)
    elif method.name == "block":
        _blocks(notebook, segment, prepared, place)
    else:
        start = len(notebook)
        place(notebook, segment)
        if prepared.passed:
            last = notebook.pieces[-1]
            notebook.pieces[-1] = replace(last, passed=prepared.passed, selected=method.name)
        if method.touches:
            _patch(notebook, start, change.patches, prepared.also)


def _suffix(notebook: Notebook, segment: Segment, change: Change, place: Place) -> None:
    """What stands before the first change is reused, everything from there on decoded: equal to a recompute."""
    first = change.patches[0].first
    if first:
        place(notebook, segment.slice(0, first))
    notebook.append(change.tokens[first:], "splice", segment.name, reason=Reason.FROM_CHANGE)


def _patch(notebook: Notebook, start: int, patches: Sequence[Patch], also: Sequence[int]) -> None:
    notebook.replace([patch.offset(start) for patch in patches], [start + position for position in also])


def _blocks(notebook: Notebook, segment: Segment, prepared: Prepared, place: Place) -> None:
    """Lay what stands before, between and behind the new blocks as it is, and these in place of the old ones."""
    done = 0
    for part, block in prepared.blocks:
        _lay_part(notebook, segment.slice(done, part.first), done, place)
        start = len(notebook.pieces)
        _lay_part(notebook, block, part.first, place)
        numbers = " and ".join(map(str, part.blocks))
        for index, piece in enumerate(notebook.pieces[start:], start):
            if piece.how == "spliced":
                notebook.pieces[index] = replace(
                    piece,
                    reason=Reason.BLOCK,
                    detail=numbers,
                    blocks=len(segment.blocks),
                    passed=prepared.passed,
                    rewritten=piece.tokens,
                )
        done = part.last
    _lay_part(notebook, segment.slice(done, len(segment)), done, place)


def _lay_part(notebook: Notebook, part: Segment, first: int, place: Place) -> None:
    """A part of a segment; only the first one has a seam, as the blocks behind it have been compiled alone, too."""
    if len(part):
        place(notebook, replace(part, context=notebook.tokens) if first else part)


def behind(segment: Segment, change: Change, k: int) -> list[int]:
    """The `k` tokens behind the first change on which it has the highest effect, as measured when it was compiled.

    Raise NotesError where that was not measured.
    """
    if not segment.influence:
        why = f"{segment.name} was compiled without the influence of its fields, which selective goes by"
        raise NotesError(why, Help.COMPILE_OTHERWISE(name=segment.name, options={"influence": True}))
    return _highest(segment, change, np.sum([segment.influence[name] for name in change.fields], axis=0), k)


def _highest(segment: Segment, change: Change, effect: NDArray[np.float32], k: int) -> list[int]:
    first, inside = change.patches[0].first, change.inside
    candidates = [position for position in range(first, len(segment)) if position not in inside]
    return sorted(sorted(candidates, key=lambda position: -float(effect[position]))[:k])


def rewritten(segment: Segment, change: Change, method: Method) -> int:
    """How many tokens the method recomputes in place at most: they need as many free cells meanwhile."""
    if not method.touches or method.name in ("suffix", "block", "recompute"):
        return 0
    field = sum(len(patch.tokens) for patch in change.patches)
    return min(len(segment), field + (method.k if method.ranks else 0))
