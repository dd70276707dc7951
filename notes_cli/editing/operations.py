"""Implements the edit operations on the K/V of a sequence: recompute in place, decode from a change on, replace blocks.

Each edits a skill that is in the sequence already, as in a session, or appends it, as in a prompt being assembled: K/V
that the edit would discard is not spliced then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from notes_cli.editing.change import Change, Stretch
from notes_cli.engine.image_positions import removed_images
from notes_cli.engine.patches import Patch, Range, apply_patches, changed_ranges
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import UnsupportedError

Placer = Callable[[KVSequence, Segment], None]  # appends a segment to a sequence, as it was compiled


@dataclass(frozen=True, slots=True)
class Prepared:
    """Computed for an edit before the sequence is changed."""

    also: tuple[int, ...] = ()  # selected positions of the segment, after the change, ascending
    blocks: tuple[tuple[Stretch, Segment], ...] = ()  # changed blocks, compiled from the corrected text
    passed: int = 0  # tokens decoded for that in a scratch sequence


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a skill in a sequence."""

    sequence: KVSequence
    segment: Segment
    change: Change
    method: str  # name, recorded in pieces
    prepared: Prepared
    placer: Placer | None  # appends the skill; None: it is in the sequence, at its base

    def place(self) -> int:
        """Append the skill as compiled unless it is in the sequence, and return its start."""
        if self.placer is None:
            return self.segment.base
        start = len(self.sequence)
        self.placer(self.sequence, self.segment)
        if self.prepared.passed:
            last = self.sequence.pieces[-1]
            self.sequence.pieces[-1] = replace(last, passed=self.prepared.passed, selected=self.method)
        return start


EditOperation = Callable[[Edit], Sequence[Range]]  # returns the positions whose K/V changed; () for a skill it appends


def unchanged(edit: Edit) -> Sequence[Range]:
    """Change no K/V."""
    edit.place()
    return ()


def in_place(edit: Edit) -> Sequence[Range]:
    """Recompute the K/V of the new value and the selected tokens in place, and move that after a value of another
    length."""
    start, sequence = edit.place(), edit.sequence
    patches, also = offset(edit.change.patches, start), [start + position for position in edit.prepared.also]
    length = len(sequence)
    sequence.replace(patches, also)
    return () if edit.placer else changed_ranges(patches, length, also)


def from_change_on(edit: Edit) -> Sequence[Range]:
    """Decode everything from the first change on, which equals a recompute."""
    if edit.placer is None:
        return decode_from(edit.sequence, offset(edit.change.patches, edit.segment.base))
    first = edit.change.patches[0].first
    if first:
        edit.placer(edit.sequence, edit.segment.slice(0, first))
    edit.sequence.append(edit.change.tokens[first:], "splice", edit.segment.name, reason=Reason.FROM_CHANGE)
    return ()


def corrected_text(edit: Edit) -> Sequence[Range]:
    """Decode the corrected text."""
    assert edit.placer is not None  # in a session, from_change_on has the same result
    edit.sequence.append(edit.change.tokens, "splice", edit.segment.name, reason=Reason.NEW_VALUE)
    return ()


def by_blocks(edit: Edit) -> Sequence[Range]:
    """Splice the skill with recompiled blocks in place of the changed ones."""
    sequence, segment, done = edit.sequence, edit.segment, 0
    for part, block in edit.prepared.blocks:
        _place_part(edit, segment.slice(done, part.first), done)
        before = len(sequence.pieces)
        _place_part(edit, block, part.first)
        for index, piece in enumerate(sequence.pieces[before:], before):
            if piece.how == "spliced":
                sequence.pieces[index] = replace(
                    piece,
                    reason=Reason.BLOCK,
                    detail=" and ".join(map(str, part.blocks)),
                    blocks=len(segment.blocks),
                    passed=edit.prepared.passed,
                    rewritten=piece.tokens,
                )
        done = part.last
    _place_part(edit, segment.slice(done, len(segment)), done)
    return ()


def _place_part(edit: Edit, part: Segment, first: int) -> None:
    """Append a part of a segment. Only the first has a seam: blocks after it were compiled alone, too."""
    assert edit.placer is not None  # not for sessions, whose text has no blocks
    if len(part):
        edit.placer(edit.sequence, replace(part, context=edit.sequence.tokens) if first else part)


def decode_from(sequence: KVSequence, patches: Sequence[Patch]) -> list[Range]:
    """Patch the sequence and decode everything from the first patch on; all tokens if the model is recurrent. Raises
    UnsupportedError if an image follows."""
    first, tokens = patches[0].first, apply_patches(sequence.tokens.tolist(), patches)
    if sequence.context.model.recurrent:
        first = 0
    removed = removed_images(sequence.images, [patch.span for patch in patches])
    if any(image.last > first and image not in removed for image in sequence.images):
        raise UnsupportedError("an image follows the change, and its rows are not decoded again as tokens")
    sequence.truncate(first)
    sequence.append(tokens[first:], reason=Reason.AGAIN)
    sequence.flush()
    return [(first, len(tokens))]


def offset(patches: Sequence[Patch], by: int) -> list[Patch]:
    """Return the patches shifted by so many positions."""
    return [patch.offset(by) for patch in patches]
