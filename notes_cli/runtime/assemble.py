"""Assembles a prompt in a sequence: appends its parts, and splices each skill's K/V wherever that is valid."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from notes_cli.editing.methods import amend
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import Segment, Tokens, quantized
from notes_cli.engine.sequence import KVSequence, Task, run, skill_batches
from notes_cli.errors import Help, NotesError, Notice, Say, UnsupportedError
from notes_cli.runtime.prompt import Prompt, rendered
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.names import name_of

if TYPE_CHECKING:
    from notes_cli.engine.context import Context
    from notes_cli.runtime.token_runs import PlacedRun

APART = 64  # more pending tokens than this before the question are decoded separately from it, at no extra cost
_OTHER_LEFT = "preceded by a different context than at compile time"


def assemble(
    workspace: Workspace,
    prompt: Prompt,
    *,
    rotate: bool = True,
    dry: bool = False,
    room: int = 0,
    counted: bool = False,
    **changes: Any,
) -> KVSequence:
    """Assemble the prompt, with these `changes` of its fields, in a new sequence of the workspace, with capacity for
    `room` more tokens. `rotate=False` places K/V without rotating keys: the control, with wrong results by design.
    `dry`: compute nothing. `counted`: record the use of skills and the time saved."""
    prompt = replace(prompt, **changes) if changes else prompt
    prompt = prompt if prompt.chunks else rendered(workspace, prompt)
    workspace.make_room(prompt.cells, room)
    return run(assemble_task(workspace, prompt, rotate=rotate, dry=dry, counted=counted))


def assemble_task(
    workspace: Workspace,
    prompt: Prompt,
    *,
    rotate: bool = True,
    dry: bool = False,
    begun: KVSequence | None = None,
    counted: bool = False,
    runs: list[PlacedRun] | None = None,
    states: Sequence[int] = (),
) -> Task[KVSequence]:
    """As `assemble`, as a task of a loop without growing the context, for a prompt that is rendered: tokens before a
    splice are decoded together with those of other tasks. `begun`: a sequence with a prefix of the prompt; it is closed
    on failure. `runs`: of its texts after that prefix; each is taken out once it is placed, as its K/V takes memory.
    `states`: numbers of tokens after which the recurrent state is kept (`KVSequence.states`)."""
    names = {placed.source.segment.name for placed in runs or ()}
    by_name = {segment.name: segment for segment in prompt.segments}
    if prompt.splice:
        for segment in prompt.segments:  # again: a larger context may rotate differently (LongRoPE)
            workspace.check(segment)

    start = 0 if begun is None else len(begun)
    how: dict[str, Any] = {"rotate": rotate, "dry": dry}
    how |= {"seam": prompt.seam, "strict": prompt.strict, "exact": prompt.exact}
    sequence = workspace.sequence(dry=dry) if begun is None else begun
    try:
        present, last = start, len(prompt.chunks) - 1
        for number, (chunk, ids) in enumerate(zip(prompt.chunks, prompt.tokens, strict=True)):
            sequence.keep_states(states)
            # Many tokens pending before the question are decoded separately, few together with it, as where prompts
            # share that prefix (runtime/prefix_cache.py).
            if number == last and sequence.undivided > APART:
                sequence.divide()
            skipped, present = min(present, len(ids)), max(0, present - len(ids))
            ids = ids[skipped:]
            if not len(ids):
                continue
            if chunk.kind != "splice":
                yield from append_text(workspace, sequence, ids, runs or [], chunk.kind, chunk.name)
                continue
            segment, changed = by_name[chunk.name], prompt.changes.get(chunk.name)
            if segment.media and (not prompt.splice or chunk.name in prompt.decoded):
                if len(ids) < len(segment):  # `begun` ends within it
                    raise NotesError(f"{chunk.name} is an image, which is there as a whole or not")
                while sequence.pending and not dry:
                    yield [sequence]
                embeddings = workspace.encode_images(segment, dry=dry)
                sequence.append_image(embeddings, chunk.kind, chunk.name, reason=Reason.NOT_SPLICED)
            elif not prompt.splice or chunk.name in prompt.decoded:
                sequence.append_skill(ids, chunk.kind, chunk.name, Reason.NOT_SPLICED, present=skipped)
            elif changed and prompt.method.edits_rows:
                amend(sequence, segment, changed, prompt.method, partial(place_segment, workspace, **how))
            else:
                yield from place_segment_task(workspace, sequence, segment, **how)
        sequence.keep_states(states)
    except BaseException:
        sequence.close()
        raise
    if prompt.splice and not dry:
        pieces = [piece for piece in sequence.pieces if piece.position >= start] if counted else ()
        record_uses(workspace, prompt.segments, pieces)
        for name in names:
            near = [piece.tokens for piece in sequence.pieces if piece.reason is Reason.NEAR and piece.detail == name]
            workspace.used(name, sum(near))
    return sequence


def append_text(
    workspace: Workspace,
    sequence: KVSequence,
    tokens: Tokens,
    runs: list[PlacedRun],
    kind: str = "text",
    name: str = "",
) -> Task[None]:
    """Append a text, as a task of the scheduler. The K/V of its runs is placed, the rest is decoded, and so are the
    first tokens of each (`Source.seam`), among them the first token of a prompt, an attention sink, whose K/V is of no
    use elsewhere. The runs are taken out of the list."""
    while len(tokens):
        ahead = len(tokens) if not runs else min(len(tokens), runs[0].run.first - len(sequence))
        sequence.append(tokens[:ahead], kind, name)
        tokens = tokens[ahead:]
        if not len(tokens):
            return
        placed = runs.pop(0)
        count, base, layers = len(placed.run), placed.base, None
        position = sequence.position(len(sequence))
        seam = placed.source.seam
        if seam < count and placed.refusal(workspace, position) is None:
            with suppress(NotesError):  # a damaged file
                layers = [] if sequence.dry else placed.rows(seam)
        if layers is None:
            sequence.append(tokens[:count], kind, name)
        else:
            sequence.append(tokens[:seam], kind, name, "seam", Reason.OTHER_CONTEXT)
            while sequence.pending and not sequence.dry:
                yield [sequence]
            sequence.place(tokens[seam:count], layers, base + seam, kind, name, placed.source.segment.name)
        tokens = tokens[count:]


def record_uses(workspace: Workspace, segments: Sequence[Segment], pieces: Sequence[Piece]) -> None:
    """Record the use of each segment's file, with the tokens whose K/V came from it, its left context included."""
    for segment in segments:
        tokens = sum(piece.tokens for piece in _spliced_pieces(pieces, segment.name))
        workspace.used(segment.name, tokens, saved_seconds(pieces, [segment]))


def saved_seconds(pieces: Sequence[Piece], segments: Sequence[Segment]) -> float | None:
    """Return the seconds that a prefill of the spliced tokens took on this machine when they were compiled; None if
    unknown, as for sessions restored from disk. Tokens recomputed by an edit do not count as saved."""
    if any(piece.reason is Reason.RESTORED_SESSION for piece in pieces):
        return None
    total = 0.0
    for segment in segments:
        placed = _spliced_pieces(pieces, segment.name)
        count = sum(piece.tokens - piece.rewritten for piece in placed)
        if count > 0 and segment.prefill is None:
            return None
        total += segment.prefill.share(count) if count > 0 and segment.prefill else 0.0
    return total


def _spliced_pieces(pieces: Sequence[Piece], name: str) -> list[Piece]:
    all_spliced = [piece for piece in pieces if piece.how == "spliced"]
    left = [piece for piece in all_spliced if piece.reason is Reason.RESTORED_CONTEXT and piece.detail == name]
    return left + [piece for piece in all_spliced if piece.kind == "splice" and piece.name == name]


def place_segment(workspace: Workspace, sequence: KVSequence, segment: Segment, **how: Any) -> None:
    """As `place_segment_task`, at once."""
    run(place_segment_task(workspace, sequence, segment, **how))


def place_segment_task(
    workspace: Workspace,
    sequence: KVSequence,
    segment: Segment,
    *,
    seam: int,
    rotate: bool = True,
    strict: bool = False,
    exact: bool = False,
    dry: bool = False,
) -> Task[None]:
    """Append a segment to a sequence by the best valid way: restored, spliced, or decoded with the reason recorded.
    `strict`: raise UnsupportedError instead of decoding. `exact`: decode it also where its K/V would differ from a
    prefill's."""
    same_left = np.array_equal(sequence.tokens, segment.context)
    context = sequence.context
    inexact = _inexact(context, segment, same_left) if exact else None
    decoded = Reason.INEXACT if inexact else Reason.REFUSED  # if it has to be decoded
    if inexact:
        refusal: str | None = inexact
    elif segment.prefix_only and same_left:
        sequence.restore(segment)
        return
    elif segment.prefix_only:
        reason = _carry_refusal(sequence, segment)
        refusal = f"{_OTHER_LEFT}; {reason}" if reason else None
    else:
        refusal = context.can_move(segment.base, sequence.position(len(sequence)), segment.positions)
    if refusal is None and segment.carry:
        yield from sequence.carry_task(segment, rotate=rotate)
    elif refusal is None:
        yield from sequence.splice_task(segment, seam=0 if same_left else seam, rotate=rotate)
    elif strict:
        raise UnsupportedError(
            f"{segment.name} cannot be spliced here: {refusal}", Help.NOT_STRICT(tokens=len(segment))
        )
    elif segment.media:
        while sequence.pending and not sequence.dry:
            yield [sequence]
        sequence.append_image(workspace.encode_images(segment, dry=dry), "splice", segment.name, decoded, refusal)
    else:
        sequence.append_skill(segment.tokens, "splice", segment.name, decoded, refusal)


def _inexact(context: Context, segment: Segment, same_left: bool) -> str | None:
    """Return why a segment's K/V, placed at the sequence's end, would differ from a prefill's by more than batching
    does; None if it would not. `same_left`: the sequence equals the segment's left context."""
    if not same_left:
        return _OTHER_LEFT
    if segment.blocks:
        return f"compiled in {len(segment.blocks)} blocks, which have not seen each other"
    if any(quantized(segment.kv)):
        return f"its rows are kept as {segment.kv}"
    if context.compile_options.cache != context.options.cache:
        return "the cache keeps rows in another type than they were computed in"
    if not segment.backend:
        return "it is not known what computed its rows"
    if segment.backend != context.backend:
        return f"its rows were computed with {segment.backend}, and this context has {context.backend}"
    batches = skill_batches(segment.base, len(segment), context.n_ubatch, context.threads)
    if segment.batches != batches and not (segment.media or segment.carry):
        return "its rows were computed by other threads, or in other batches than those of a prefill here"
    return None


def _carry_refusal(sequence: KVSequence, segment: Segment) -> str | None:
    """None if the state of recurrent layers can be carried through this segment here, else the reason it cannot."""
    from notes_cli.engine import recurrent
    from notes_cli.runtime.compile import UNCAPTURED, UNTRUSTED  # rarely needed

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
    """Warn of each skill that was decoded instead of spliced: name, tokens, reason, remedy."""
    tokens: dict[tuple[str, str], int] = {}
    for piece in sequence.pieces:
        if piece.refused:
            key = piece.name, piece.detail
            tokens[key] = tokens.get(key, 0) + piece.tokens
    leading = _leading_skills(sequence.pieces) if tokens else []
    joint_name = name_of("-".join(leading))
    joint_remedy = Help.COMPILE_TOGETHER(names=leading, name=joint_name) if len(leading) > 1 else None
    for (name, why), count in tokens.items():
        remedy = joint_remedy if joint_remedy and name in leading else Help.STRICT()
        say(Notice(f"{name} is not spliced, its {count} tokens are decoded: {why}", remedy, warning=True))


def _leading_skills(pieces: Sequence[Piece]) -> list[str]:
    """Return the skills at the beginning of a prompt whose first was restored: compiled as one, all could be."""
    opening = takewhile(lambda piece: piece.kind in ("text", "splice"), pieces)
    skills = [piece for piece in opening if piece.kind == "splice"]
    restored = bool(skills) and skills[0].reason is Reason.RESTORED
    return list(dict.fromkeys(piece.name for piece in skills)) if restored else []
