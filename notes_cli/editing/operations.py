"""The ways of editing: what is done to the rows of a sequence so that a skill in it has its new values.

Each works on a skill that is in the sequence already, as in a session, or brings it to the sequence's end, as in a
prompt that is being assembled: what would be thrown away is not placed then.
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

Placer = Callable[[KVSequence, Segment], None]  # puts a segment at the end of a sequence, as it was compiled


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was found out or computed for an edit before the sequence is touched."""

    also: tuple[int, ...] = ()  # tokens of the segment after the change that are computed again with it, ascending
    blocks: tuple[tuple[Stretch, Segment], ...] = ()  # those with a change, computed from the corrected text
    passed: int = 0  # tokens that a pass went over for that


@dataclass(frozen=True, slots=True)
class Edit:
    """A skill, what changes in it, and where that is to happen."""

    sequence: KVSequence
    segment: Segment
    change: Change
    method: str  # its name, which pieces tell
    prepared: Prepared
    placer: Placer | None  # how the skill comes to the sequence's end. None: it is there, from its base on

    def placed(self) -> int:
        """See to the skill in the sequence as it was compiled; where it begins."""
        if self.placer is None:
            return self.segment.base
        start = len(self.sequence)
        self.placer(self.sequence, self.segment)
        if self.prepared.passed:
            last = self.sequence.pieces[-1]
            self.sequence.pieces[-1] = replace(last, passed=self.prepared.passed, selected=self.method)
        return start


Way = Callable[[Edit], Sequence[Range]]  # edits; the positions of rows that are not what they were before


def unchanged(edit: Edit) -> Sequence[Range]:
    """No row changes."""
    edit.placed()
    return ()


def in_place(edit: Edit) -> Sequence[Range]:
    """The rows of the new value, and of the selected tokens, are computed where they are. What follows a value of
    another length moves."""
    start, sequence = edit.placed(), edit.sequence
    patches, also = offset(edit.change.patches, start), [start + position for position in edit.prepared.also]
    length = len(sequence)
    sequence.replace(patches, also)
    return changed_ranges(patches, length, also)


def from_change_on(edit: Edit) -> Sequence[Range]:
    """What precedes the first change is kept, everything from there on decoded: equal to a recompute."""
    if edit.placer is None:
        return decode_from(edit.sequence, offset(edit.change.patches, edit.segment.base))
    first = edit.change.patches[0].first
    if first:
        edit.placer(edit.sequence, edit.segment.slice(0, first))
    start = len(edit.sequence)
    edit.sequence.append(edit.change.tokens[first:], "splice", edit.segment.name, reason=Reason.FROM_CHANGE)
    return [(start, len(edit.sequence))]


def corrected_text(edit: Edit) -> Sequence[Range]:
    """The corrected text is decoded."""
    assert edit.placer is not None  # in a session, decoding everything from the change on comes to the same
    start = len(edit.sequence)
    edit.sequence.append(edit.change.tokens, "splice", edit.segment.name, reason=Reason.NEW_VALUE)
    return [(start, len(edit.sequence))]


def by_blocks(edit: Edit) -> Sequence[Range]:
    """The blocks with a change take the place of the old ones; what lies before, between and after them is kept."""
    sequence, segment, start, done = edit.sequence, edit.segment, len(edit.sequence), 0
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
    return [(start, len(sequence))]


def _place_part(edit: Edit, part: Segment, first: int) -> None:
    """A part of a segment; only the first one has a seam, as each block after it was compiled alone, too."""
    assert edit.placer is not None  # this way is not for sessions: their text has no blocks
    if len(part):
        edit.placer(edit.sequence, replace(part, context=edit.sequence.tokens) if first else part)


def decode_from(sequence: KVSequence, patches: Sequence[Patch]) -> list[Range]:
    """Patch the sequence, and decode everything from the first patch on. Where the model's memory cannot go back, that
    is everything."""
    first, tokens = patches[0].first, apply_patches(sequence.tokens.tolist(), patches)
    if sequence.context.model.recurrent:
        first = 0
    out = removed_images(sequence.images, [patch.span for patch in patches])
    if any(image.last > first and image not in out for image in sequence.images):
        raise UnsupportedError("an image follows the change, and its rows are not decoded again as tokens")
    sequence.truncate(first)
    sequence.append(tokens[first:], reason=Reason.AGAIN)
    sequence.flush()
    return [(first, len(tokens))]


def offset(patches: Sequence[Patch], by: int) -> list[Patch]:
    """The patches of a text that begins at a position of a sequence."""
    return [patch.offset(by) for patch in patches]
