"""Computes how new field values change a skill: the corrected text and tokens, and the token patches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from notes_cli.engine.model import Model
from notes_cli.engine.positions import Patch, position_map
from notes_cli.engine.segment import FieldSpan, Segment, Tokens
from notes_cli.errors import UnsupportedError
from notes_cli.text.fields import Field, Hole, clean_value, fill, token_spans


@dataclass(frozen=True, slots=True)
class Change:
    """New values for fields of a segment. Positions count from the segment's first token."""

    fields: tuple[str, ...]
    text: str  # the corrected text
    tokens: Tokens  # of the corrected text, as a compile of it would have them
    patches: tuple[Patch, ...]  # from the segment's tokens to these
    spans: tuple[FieldSpan, ...]  # of all fields in the corrected text

    @property
    def inside(self) -> frozenset[int]:
        """Positions of the segment's tokens that are replaced."""
        return frozenset(position for patch in self.patches for position in range(patch.first, patch.last))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Adjacent changed blocks of a segment: tokens [first, last) become `tokens`."""

    blocks: range  # their numbers, from 1
    first: int
    last: int
    start: int  # position in the corrected text
    tokens: Tokens


def stretches(segment: Segment, change: Change) -> list[Stretch]:
    """Return the blocks with changes, in order. A patch across a block boundary merges both blocks."""
    spans, shift = segment.spans, position_map(change.patches)
    begins = [first for first, _ in spans]
    runs: list[tuple[int, int]] = []
    for patch in change.patches:
        first, last = (bisect_right(begins, position) - 1 for position in (patch.first, patch.last - 1))
        if runs and runs[-1][1] >= first:
            first = runs.pop()[0]
        runs.append((first, last))
    changed = []
    for first, last in runs:
        begin, end = spans[first][0], spans[last][1]
        tokens = change.tokens[shift(begin) : shift(end)]
        changed.append(Stretch(range(first + 1, last + 2), begin, end, shift(begin), tokens))
    return changed


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
