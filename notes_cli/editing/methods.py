"""Defines and applies the edit methods, which update the K/V of a skill for new field values.

They are named as in the paper (arXiv:2606.17107, Operation 1); the reference is `recompute`. KV entries that a method
does not recompute still depend on the old value. To add a method, add it to METHODS, with a function if it edits in a
new way (bench/methods.py adds three). A function appends the edited skill to a prompt being assembled; K/V that the
edit would discard is not spliced. Sessions edit skills that are in the sequence already (sessions/session_kv.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.pieces import Reason
from notes_cli.engine.positions import Patch, position_map
from notes_cli.engine.segment import FieldSpan, Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Remedy, SkillError, UnsupportedError
from notes_cli.text.erratum import Fielded
from notes_cli.text.fields import Field, Hole, clean_value, fill, token_spans

S = TypeVar("S", bound=Fielded)


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


def with_quoted(
    model: Model, errata: Sequence[str], values: Mapping[str, str], skills: Sequence[S]
) -> tuple[tuple[str, ...], dict[str, str], list[S]]:
    """Return errata, and new values by field, with a field for each that names its place by the text there, and the
    skills with these fields. Raises SkillError as `name_quoted` does, and for a place in a skill with an image."""
    from notes_cli.text.quotations import name_quoted

    errata, values, added = name_quoted(errata, values, skills)

    def named(skill: S) -> S:
        if skill.name not in added:
            return skill
        if getattr(skill, "media", ()):
            raise SkillError(f"{skill.name} has an image, and only its fields can be corrected")
        tokens = skill.tokens if isinstance(skill, Segment) else model.tokenize(skill.text)
        return replace(skill, fields=field_spans(model, skill.text, added[skill.name], tokens))  # type: ignore[type-var]

    return errata, values, [*map(named, skills)]


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
EditOperation = Callable[[KVSequence, Segment, Change, Placer], None]  # appends the edited skill


def in_place(sequence: KVSequence, segment: Segment, change: Change, placer: Placer, also: Sequence[int] = ()) -> None:
    """Recompute the K/V of the new value in place, and move that after a value of another length. `also`: more
    positions of the segment to recompute, after the change and ascending."""
    start = len(sequence)
    placer(sequence, segment)
    sequence.replace([patch.offset(start) for patch in change.patches], [start + position for position in also])


def from_change_on(sequence: KVSequence, segment: Segment, change: Change, placer: Placer) -> None:
    """Decode everything from the first change on, which equals a recompute."""
    first = change.patches[0].first
    if first:
        placer(sequence, segment.slice(0, first))
    sequence.append(change.tokens[first:], "splice", segment.name, reason=Reason.FROM_CHANGE)


def corrected_text(sequence: KVSequence, segment: Segment, change: Change, placer: Placer) -> None:
    """Decode the corrected text."""
    sequence.append(change.tokens, "splice", segment.name, reason=Reason.NEW_VALUE)


@dataclass(frozen=True, slots=True, repr=False)
class Method:
    """An edit method."""

    name: str
    edit: EditOperation | None = None  # None: no K/V changes
    in_place: bool = False  # K/V after the recomputed entries still depends on the old value
    appends_erratum: bool = False  # a sentence with the correction follows the skill
    needs_rewrite: bool = False  # the context must be able to use a part of the K/V, or to recompute it
    in_session: bool = False  # it can edit a skill in a session, in place or by decoding what follows again

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


STALE = Method("stale")  # unchanged: the control
FIELD = Method("field", in_place, in_place=True, needs_rewrite=True, in_session=True)
# The K/V stays, so the model reads the old text and the correction, and undo is exact. Possible on every model.
ERRATUM = Method("erratum", appends_erratum=True, in_session=True)
# Both: later KV entries depend on the old value, but the erratum states the new one.
FIELD_ERRATUM = Method(
    "field+erratum", in_place, in_place=True, appends_erratum=True, needs_rewrite=True, in_session=True
)
SUFFIX = Method("suffix", from_change_on, needs_rewrite=True, in_session=True)
RECOMPUTE = Method("recompute", corrected_text)  # the reference
METHODS = {method.name: method for method in (STALE, FIELD, ERRATUM, FIELD_ERRATUM, SUFFIX, RECOMPUTE)}


def amend(sequence: KVSequence, segment: Segment, change: Change, method: Method, placer: Placer) -> None:
    """Append a skill with its new values, by a method that edits K/V. Raises UnsupportedError, naming
    methods that are always possible, if this one is not on this model."""
    assert method.edit is not None
    if reason := refusal(sequence.context, method):
        raise UnsupportedError(f"the edit method {method.name} is not possible: {reason}", instead())
    method.edit(sequence, segment, change, placer)


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


def instead(*, session: bool = False) -> Remedy:
    """Return the remedy for a method that is not possible: the methods that always are."""
    return Help.OTHER_METHOD(method=f"{ERRATUM} or {SUFFIX if session else RECOMPUTE}")


def free_cells(segment: Segment, change: Change, method: Method) -> int:
    """Return the number of free cells that the method needs temporarily: one per token recomputed in place."""
    return min(len(segment), sum(len(patch.tokens) for patch in change.patches)) if method.in_place else 0
