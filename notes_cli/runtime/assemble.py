"""From a prompt to a sequence: each of its parts comes to the end of it, a skill by its rows wherever that is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from notes_cli.editing.amend import amend, free_cells, prepare
from notes_cli.engine.loop import Task, run
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import Segment, quantized
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Notice, Say, UnsupportedError
from notes_cli.runtime.prompt import Parts, Prompt, parts_of
from notes_cli.runtime.settings import DEFAULT_SEAM, repair
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from notes_cli.engine.context import Context
    from notes_cli.engine.vision import ImageEmbeddings

APART = 64  # pending tokens before what is asked that are decoded apart from it: more take as long by themselves
_OTHER_LEFT = "preceded by a different context than at compile time"


class AssembleOptions(TypedDict):
    """How skills come to a prompt; `assemble` says what each of these is."""

    seam: int
    splice: bool
    strict: bool
    exact: bool
    counted: bool


def assemble(
    workspace: Workspace,
    prompt: Prompt,
    *,
    seam: int = DEFAULT_SEAM,
    splice: bool = True,
    rotate: bool = True,
    dry: bool = False,
    room: int = 0,
    strict: bool = False,
    exact: bool = False,
    parts: Parts | None = None,
    counted: bool = False,
) -> KVSequence:
    """Put the prompt into a fresh sequence of the workspace, with room for `room` more tokens.

    `splice=False` decodes the very same tokens instead: the full recompute that everything is compared with.
    `rotate=False` places rows without turning them: the control that must go wrong. `dry` computes nothing. `strict`:
    raise UnsupportedError for a skill whose rows cannot be placed, which is decoded otherwise (`warn_unspliced`).
    `exact`: place rows only where they are those of a prefill of the whole prompt, and decode all others.
    `parts`: these of the prompt's, if not all. `counted`: somebody asks, so that what is spliced, and saved, goes into
    the records of uses.
    """
    parts = parts_of(workspace, prompt) if parts is None else parts
    workspace.make_room(parts.count + temporary_cells(prompt, parts), room)
    going = assemble_task(
        *(workspace, prompt, parts),
        seam=seam,
        splice=splice,
        rotate=rotate,
        dry=dry,
        strict=strict,
        exact=exact,
        counted=counted,
    )
    return run(going)


def assemble_task(
    workspace: Workspace,
    prompt: Prompt,
    parts: Parts,
    *,
    seam: int = DEFAULT_SEAM,
    splice: bool = True,
    rotate: bool = True,
    dry: bool = False,
    strict: bool = False,
    exact: bool = False,
    begun: KVSequence | None = None,
    counted: bool = False,
) -> Task[KVSequence]:
    """`assemble` as a task of a loop, in the room that there is: what precedes a splice is decoded with what others
    decode. `begun`: a sequence with the first tokens of it already, up to the beginning or the end of a skill or to
    anywhere between; it is closed where this fails."""
    by_name = {segment.name: segment for segment in prompt.segments}
    if splice:
        for segment in prompt.segments:  # again: a larger context may rotate otherwise (LongRoPE)
            workspace.check(segment)

    try:
        prepared = {
            name: prepare(workspace.scratch, by_name[name], changed, prompt.method, dry=dry)
            for name, changed in (parts.changes.items() if splice else ())
            if name not in prompt.decoded
        }
    except NotesError as error:
        workspace.advise(error)
        raise
    place = SegmentPlacer(seam, rotate, strict, exact, partial(workspace.encode_images, dry=dry))
    sequence = workspace.sequence(dry=dry) if begun is None else begun
    try:
        there, last = len(sequence), len(parts.chunks) - parts.asking
        for number, (chunk, ids) in enumerate(parts.all_chunks, -1):  # BOS is the one before the first
            if number == last:
                divide_before_question(sequence)
            done, there = min(there, len(ids)), max(0, there - len(ids))
            ids = ids[done:]
            if not len(ids):
                continue
            if chunk.kind != "splice":
                sequence.append(ids, chunk.kind, chunk.name)
                continue
            segment, changed = by_name[chunk.name], parts.changes.get(chunk.name)
            if segment.media and (not splice or chunk.name in prompt.decoded):
                if len(ids) < len(segment):  # a sequence that begins within it
                    raise NotesError(f"{chunk.name} is an image, which is there as a whole or not")
                if sequence.pending and not dry:
                    yield [sequence]
                seen = workspace.encode_images(segment, dry=dry)
                sequence.append_image(seen, chunk.kind, chunk.name, reason=Reason.NOT_SPLICED)
            elif not splice or chunk.name in prompt.decoded:
                text = changed.tokens if changed and prompt.method.record.edits_rows else segment.tokens
                sequence.append(text[done:], chunk.kind, chunk.name, reason=Reason.NOT_SPLICED)
            elif changed and prompt.method.record.edits_rows:
                amend(sequence, segment, changed, prompt.method, prepared[chunk.name], place)
            else:
                yield from place.task(sequence, segment)
    except BaseException:
        sequence.close()
        raise
    if splice and not dry:
        for segment in prompt.segments:
            pieces = sequence.pieces if counted else ()
            workspace.used(segment.name, spliced_tokens(pieces, segment.name), saved_seconds(pieces, [segment]))
    return sequence


def divide_before_question(sequence: KVSequence) -> None:
    """Mark the beginning of the question for batching. Many tokens that are pending before it are decoded apart from
    it, few together with it: as for the same prompt whose beginning several questions share (runtime/batch.py)."""
    if len(sequence.pending) > APART:
        sequence.divide()


def spliced_tokens(pieces: Sequence[Piece], name: str) -> int:
    """Tokens whose rows a prompt got from the segment of this name, those of its left context among them."""
    return sum(one.tokens for one in _placed(pieces, name))


def saved_seconds(pieces: Sequence[Piece], segments: Sequence[Segment]) -> float | None:
    """Seconds that a prefill of what these segments brought into a prompt takes on this machine, as it took when they
    were compiled; None if that is not known, as of the rows that a session keeps on disk. What an edit computed again,
    or went over, was not saved."""
    if any(one.reason is Reason.RESTORED_SESSION for one in pieces):
        return None
    total = 0.0
    for segment in segments:
        placed = _placed(pieces, segment.name)
        count = sum(one.tokens - max(one.rewritten, one.passed if one.selected else 0) for one in placed)
        if count > 0 and segment.prefill is None:
            return None
        total += segment.prefill.share(count) if count > 0 and segment.prefill else 0.0
    return total


def _placed(pieces: Sequence[Piece], name: str) -> list[Piece]:
    there = [one for one in pieces if one.how == "spliced"]
    left = [one for one in there if one.reason is Reason.RESTORED_CONTEXT and one.detail == name]
    return left + [one for one in there if one.kind == "splice" and one.name == name]


def temporary_cells(prompt: Prompt, parts: Parts) -> int:
    """Cells that are needed while the prompt is assembled, and free again afterwards."""
    by_name = {segment.name: segment for segment in prompt.segments}
    return sum(free_cells(by_name[name], changed, prompt.method) for name, changed in parts.changes.items())


@dataclass(frozen=True, slots=True)
class SegmentPlacer:
    """How a segment comes to a sequence's end, the best that is right: restored, spliced, or decoded where its rows
    cannot be placed, and why. `strict`: raise UnsupportedError instead of decoding it. `exact`: decode it also where
    its rows would not be those of a prefill. `look` at the images of a segment where its rows cannot be placed."""

    seam: int
    rotate: bool = True
    strict: bool = False
    exact: bool = False
    encode_images: Callable[[Segment], ImageEmbeddings] | None = None

    def __call__(self, sequence: KVSequence, segment: Segment) -> None:
        run(self.task(sequence, segment))

    def task(self, sequence: KVSequence, segment: Segment) -> Task[None]:
        """The same as a task of a loop."""
        same_left = np.array_equal(sequence.tokens, segment.context)
        context = sequence.context
        inexact = _inexact(context, segment, same_left) if self.exact else None
        decoded = Reason.INEXACT if inexact else Reason.REFUSED  # if it has to be
        if inexact:
            refusal: str | None = inexact
        elif segment.prefix_only and same_left:
            sequence.restore(segment)
            return
        elif segment.prefix_only:
            reason = _uncarried(sequence, segment)
            refusal = f"{_OTHER_LEFT}; {reason}" if reason else None
        else:
            refusal = context.can_move(segment.base, sequence.position(len(sequence)), segment.positions)
        if refusal is None and segment.carry:
            sequence.open_carry(segment)
            if sequence.pending and not sequence.dry:
                yield [sequence]
            sequence.carry(segment, rotate=self.rotate)
        elif refusal is None:
            seam = 0 if same_left else self.seam
            sequence.open_splice(segment, seam)
            if sequence.pending and not sequence.dry:
                yield [sequence]
            sequence.splice(segment, seam=seam, rotate=self.rotate, opened=True)
        elif self.strict:
            raise UnsupportedError(
                f"{segment.name} cannot be spliced here: {refusal}", Help.NOT_STRICT(tokens=len(segment))
            )
        elif segment.media:
            if self.encode_images is None:
                raise UnsupportedError(f"{segment.name} has an image, and cannot be spliced here: {refusal}")
            if sequence.pending and not sequence.dry:
                yield [sequence]
            sequence.append_image(self.encode_images(segment), "splice", segment.name, decoded, refusal)
        else:
            sequence.append(segment.tokens, "splice", segment.name, reason=decoded, detail=refusal)


def _inexact(context: Context, segment: Segment, same_left: bool) -> str | None:
    """Why the rows of a segment, placed at a sequence's end, would not be those of a prefill of what is there, but for
    the last bits that the size of a batch decides; None if they would. `same_left`: what is there is what preceded the
    segment when it was compiled."""
    if not same_left:
        return _OTHER_LEFT
    if segment.blocks:
        return f"compiled in {len(segment.blocks)} blocks, which have not seen each other"
    if any(quantized(segment.kv)):
        return f"its rows are kept as {segment.kv}"
    if context.compile_options != context.options:
        return "the cache keeps rows in another type than they were computed in"
    if not segment.backend:
        return "it is not known what computed its rows"
    if segment.backend != context.backend:
        return f"its rows were computed with {segment.backend}, and this context has {context.backend}"
    return None


def _uncarried(sequence: KVSequence, segment: Segment) -> str | None:
    """None if the state of recurrent layers can be carried through this segment here, else the reason it cannot."""
    from notes_cli.engine import recurrent
    from notes_cli.runtime.compile import UNCAPTURED, UNTRUSTED  # what most prompts never say

    context = sequence.context
    if context.supports("carry") is not None:
        return context.supports("splice") or "its rows can be moved if it is compiled again"
    if not context.carries:
        return UNTRUSTED
    if segment.carry is None:
        return UNCAPTURED
    seam = segment.carry.seam
    position = sequence.position(len(sequence)) + seam
    return recurrent.can_carry(context, segment.base + seam, position, len(segment) - seam - segment.carry.tail)


def warn_unspliced(sequence: KVSequence, say: Say) -> None:
    """Warn of each skill that was to be spliced and is decoded: which, how many tokens, why, and what helps."""
    tokens: dict[tuple[str, str], int] = {}
    for piece in sequence.pieces:
        if piece.refused:
            key = piece.name, piece.detail
            tokens[key] = tokens.get(key, 0) + piece.tokens
    chain = _chain(sequence.pieces)
    together = repair("together", chain) if len(chain) > 1 else None
    for (name, why), count in tokens.items():
        remedy = together if together and name in chain else Help.STRICT()
        say(Notice(f"{name} is not spliced, its {count} tokens are decoded: {why}", remedy, warning=True))


def _chain(pieces: Sequence[Piece]) -> list[str]:
    """The skills with which a prompt begins, if the first of them was restored: as one all of them could be."""
    opening = takewhile(lambda piece: piece.kind in ("text", "splice"), pieces)
    skills = [piece for piece in opening if piece.kind == "splice"]
    restored = bool(skills) and skills[0].reason is Reason.RESTORED
    return list(dict.fromkeys(piece.name for piece in skills)) if restored else []
