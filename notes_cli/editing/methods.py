"""Defines and applies the edit methods, which update the K/V of a skill for new field values.

They are named as in the paper (arXiv:2606.17107, Operation 1); the reference is `recompute`. KV entries that a method
does not recompute still depend on the old value. To add a method, add it to METHODS, with a function if it edits in a
new way (bench/methods.py adds three). A function edits a skill that is in the sequence already, as in a session, or
appends it, as in a prompt being assembled: K/V that the edit would discard is not spliced then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.pieces import Reason
from notes_cli.engine.positions import Patch, Range, apply_patches, changed_ranges, position_map, removed_images
from notes_cli.engine.segment import FieldSpan, Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Remedy, UnsupportedError
from notes_cli.text.fields import Field, Hole, clean_value, fill, token_spans


@dataclass(frozen=True, slots=True)
class Change:
    """New values for fields of a segment. Positions count from the segment's first token."""

    fields: tuple[str, ...]
    text: str  # the corrected text
    tokens: Tokens  # of the corrected text, as a compile of it would have them
    patches: tuple[Patch, ...]  # from the segment's tokens to these
    spans: tuple[FieldSpan, ...]  # of all fields in the corrected text


def change(model: Model, segment: Segment, values: Mapping[str, str]) -> Change | None:
    """Return the change that new values make in this segment, None if none. Ignores fields that it does not have.
    Raises UnsupportedError for a segment with images."""
    current = {span.name: span.value for span in segment.fields}
    clean = {name: clean_value(name, value) for name, value in values.items() if name in current}
    changed = {name: value for name, value in clean.items() if value != current[name]}
    if not changed:
        return None
    if segment.media:
        message = f"{segment.name} has an image, and its text cannot be edited"
        raise UnsupportedError(message, "Correct it by an erratum")
    holes = [Hole(span.start, span.end, span.name) for span in segment.fields]
    text, fields = fill(segment.text, holes, current | changed)
    tokens = model.tokenize(text)
    spans = field_spans(model, text, fields, tokens)
    patches = _patches(segment.tokens, tokens, segment.fields, spans, changed)
    return Change(tuple(changed), text, tokens, patches, spans)


def same(segment: Segment, name: str) -> Change:
    """Return a change that replaces a field's value by itself, to recompute the K/V after it."""
    span = next(span for span in segment.fields if span.name == name)
    patch = Patch(span.first, span.last, tuple(segment.tokens[span.first : span.last].tolist()))
    return Change((name,), segment.text, segment.tokens, (patch,), segment.fields)


def field_spans(model: Model, text: str, fields: Sequence[Field], tokens: Tokens) -> tuple[FieldSpan, ...]:
    """Return each field with the tokens that hold its value. Raises SkillError if the tokens do not spell the text."""
    pieces = [model.token_bytes(int(token)) for token in tokens]
    places = token_spans(text, pieces, [(field.start, field.end) for field in fields])
    return tuple(FieldSpan(*field, *place) for field, place in zip(fields, places, strict=True))


def _patches(
    old: Tokens, new: Tokens, fields: Sequence[FieldSpan], spans: Sequence[FieldSpan], changed: Mapping[str, str]
) -> tuple[Patch, ...]:
    """Return a patch per changed field if all tokens between are equal; else a single one that covers them all."""
    patches, old_at, new_at = [], 0, 0
    for field, span in zip(fields, spans, strict=True):
        first, last = span.first, span.last
        ascends = old_at <= field.first and new_at <= first  # adjacent fields may share a token
        if not ascends or old[old_at : field.first].tolist() != new[new_at:first].tolist():
            break
        if field.name in changed:
            patches.append(Patch(field.first, field.last, tuple(new[first:last].tolist())))
        elif old[field.first : field.last].tolist() != new[first:last].tolist():
            break
        old_at, new_at = field.last, last
    else:
        if old[old_at:].tolist() == new[new_at:].tolist():
            return tuple(patch for patch in patches if tuple(old[patch.first : patch.last].tolist()) != patch.tokens)
    return (_difference(old.tolist(), new.tolist()),)


def _difference(old: Sequence[int], new: Sequence[int]) -> Patch:
    """Return a patch from the first token that differs to the last, for a value that changes the tokens around it."""
    shorter = min(len(old) - 1, len(new))  # a patch replaces at least one token
    first = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    same = next((i for i in range(shorter - first) if old[-1 - i] != new[-1 - i]), shorter - first)
    return Patch(first, len(old) - same, tuple(new[first : len(new) - same]))


Placer = Callable[[KVSequence, Segment], None]  # appends a segment to a sequence, as it was compiled
# Edits a skill that is in the sequence at the segment's base, and returns the positions whose K/V changed; with a
# placer it appends the edited skill instead, and the positions do not matter.
EditOperation = Callable[[KVSequence, Segment, Change, Placer | None], Sequence[Range]]


def in_place(
    sequence: KVSequence, segment: Segment, change: Change, placer: Placer | None, also: Sequence[int] = ()
) -> Sequence[Range]:
    """Recompute the K/V of the new value in place, and move that after a value of another length. `also`: more
    positions of the segment to recompute, after the change and ascending."""
    start = segment.base
    if placer is not None:
        start = len(sequence)
        placer(sequence, segment)
    patches, more = [patch.offset(start) for patch in change.patches], [start + position for position in also]
    length = len(sequence)
    sequence.replace(patches, more)
    return changed_ranges(patches, length, more)


def from_change_on(sequence: KVSequence, segment: Segment, change: Change, placer: Placer | None) -> Sequence[Range]:
    """Decode everything from the first change on, which equals a recompute."""
    if placer is None:
        return decode_from(sequence, [patch.offset(segment.base) for patch in change.patches])
    first = change.patches[0].first
    if first:
        placer(sequence, segment.slice(0, first))
    sequence.append(change.tokens[first:], "splice", segment.name, reason=Reason.FROM_CHANGE)
    return ()


def corrected_text(sequence: KVSequence, segment: Segment, change: Change, placer: Placer | None) -> Sequence[Range]:
    """Decode the corrected text; not for sessions, where `from_change_on` has the same result."""
    sequence.append(change.tokens, "splice", segment.name, reason=Reason.NEW_VALUE)
    return ()


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


@dataclass(frozen=True, slots=True, repr=False)
class Method:
    """An edit method."""

    name: str
    edit: EditOperation | None = None  # None: no K/V changes
    in_place: bool = False  # K/V after the recomputed entries still depends on the old value
    appends_erratum: bool = False  # a sentence with the correction follows the skill
    needs_rewrite: bool = False  # the context must be able to use a part of the K/V, or to recompute it
    in_session: bool = True  # it can edit a skill in a session

    @classmethod
    def parse(cls, text: str) -> Method:
        """Return the method of that name. Raises NotesError for an unknown one, naming those known."""
        if text not in METHODS:
            raise NotesError(f"no edit method {text!r}", Help.KNOWN_METHOD(known=", ".join(METHODS)))
        return METHODS[text]

    def __repr__(self) -> str:
        return f"Method({self.name!r})"

    def __str__(self) -> str:
        return self.name

    @property
    def edits_rows(self) -> bool:
        """True if the text of the skill gets its new values."""
        return self.edit is not None

    @property
    def reaches_end(self) -> bool:
        """True if the skill gets its new values, and no KV entry depends on the old ones."""
        return self.edits_rows and not self.in_place


STALE = Method("stale", in_session=False)  # unchanged: the control
FIELD = Method("field", in_place, in_place=True, needs_rewrite=True)
# The K/V stays, so the model reads the old text and the correction, and undo is exact. Possible on every model.
ERRATUM = Method("erratum", appends_erratum=True)
# Both: later KV entries depend on the old value, but the erratum states the new one.
FIELD_ERRATUM = Method("field+erratum", in_place, in_place=True, appends_erratum=True, needs_rewrite=True)
SUFFIX = Method("suffix", from_change_on, needs_rewrite=True)
RECOMPUTE = Method("recompute", corrected_text, in_session=False)  # the reference
METHODS = {method.name: method for method in (STALE, FIELD, ERRATUM, FIELD_ERRATUM, SUFFIX, RECOMPUTE)}


def amend(
    sequence: KVSequence, segment: Segment, change: Change, method: Method, placer: Placer | None = None
) -> Sequence[Range]:
    """Apply a change to the sequence by a method that edits K/V. `placer` appends a segment to the sequence, if the
    skill is not in it yet; without it the skill is at the segment's base, and the positions whose K/V changed are
    returned. Raises UnsupportedError if the method is not possible on this model."""
    assert method.edit is not None
    check(sequence.context, method, session=placer is None)
    return method.edit(sequence, segment, change, placer)


def refusal(context: Context, method: Method, *, session: bool = False, changes: Sequence[Change] = ()) -> str | None:
    """Return why the method is not possible in this context, None if it is. `session`: the skill is in a session, where
    everything can be decoded again. `changes`: also check that the K/V after these can be moved."""
    reasons = [context.supports("rewrite")] if method.needs_rewrite and (method.in_place or not session) else []
    reasons += [context.drops] if method.in_place else []
    if method.in_place and not any(reasons):
        for patches in (change.patches for change in changes):
            ends = ((patch.last, position_map(patches)(patch.last)) for patch in patches)
            reasons += [context.can_move(at, to, 1) for at, to in ends if at != to]
    return next((reason for reason in reasons if reason), None)


def check(context: Context, method: Method, *, session: bool = False) -> None:
    """Raise UnsupportedError, naming methods that are always possible, if this one is not."""
    reason = refusal(context, method, session=session)
    if reason:
        raise UnsupportedError(f"the edit method {method.name} is not possible: {reason}", instead(session=session))


def instead(*, session: bool = False) -> Remedy:
    """Return the remedy for a method that is not possible: the methods that always are."""
    return Help.OTHER_METHOD(method=f"{ERRATUM} or {SUFFIX if session else RECOMPUTE}")


def free_cells(segment: Segment, change: Change, method: Method) -> int:
    """Return the number of free cells that the method needs temporarily: one per token recomputed in place."""
    return min(len(segment), sum(len(patch.tokens) for patch in change.patches)) if method.in_place else 0
