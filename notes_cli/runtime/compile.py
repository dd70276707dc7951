"""Compiles skills: prefills a text once after the left context that it usually has, and returns its K/V as a segment.

Only the skill's own K/V is kept: its first token is then no attention sink, and the segment fits anywhere. Where K/V
cannot be moved, that of the left context is kept with it, and the segment fits the start of a prompt only.

Tokens already compiled after the same prefix are taken from the existing file unchanged: a change near the end of a
text costs a prefill of its end, and an interrupted compile resumes. Quantized K/V is not reused: later tokens would be
computed from rounded values.

In blocks, each part is prefilled after the left context alone and moved to its place, so it does not attend to the
parts before it; in return, a changed text costs a prefill of the changed parts only. Other blocks are taken from the
existing file, and rounded once more if they move. No token at a block's start is recomputed: it would depend on the
block before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from notes_cli.editing.methods import field_spans
from notes_cli.engine import recurrent
from notes_cli.engine.context import Context
from notes_cli.engine.segment import (
    BLOCK,
    Carry,
    FieldSpan,
    ImageFile,
    LayerRows,
    MicroBatches,
    Prefill,
    Segment,
    Tokens,
    cut_batches,
    micro_batches,
    quantized,
)
from notes_cli.engine.sequence import KVSequence
from notes_cli.engine.vision import ImageEmbeddings
from notes_cli.errors import EngineError, Help, Notice, Progress, Say, SegmentError, SkillError, UnsupportedError
from notes_cli.library.container import peek, small
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.fields import Blocks, block_starts, block_starts_at, references
from notes_cli.text.keys import listed
from notes_cli.text.names import BETWEEN, files_of, spelt
from notes_cli.text.skill import Skill, with_images
from notes_cli.text.tools import ToolSet, tools_skill

KEEP = 20.0  # seconds of prefill after which a checkpoint is written
COST = 50.0  # a checkpoint is due after this many times the duration of the last
PROBE = 8  # tokens whose logits after rounded K/V are checked
NEAR = 0.99  # minimum cosine of those logits and the ones after unrounded K/V (docs/LOG.md)
# Tokens decoded where recurrent state is carried through a skill: more of them reduce the effect of the left context at
# compile time. At least the reach of a convolution; a quarter of a short skill.
SEAM = 16
UNTRUSTED = (
    "this model has recurrent layers, whose state is carried through skills only where that was measured to hold"
)
UNCAPTURED = "what carrying the state of recurrent layers through it takes was not captured when it was compiled"
MOVES = 8  # moves of a block's K/V, each a rounding, before it is recomputed (docs/LOG.md)


def compile_skill(
    workspace: Workspace,
    skill: Skill,
    progress: Progress | None = None,
    *,
    blocks: Blocks | None = None,
    kv: str = "f16",
    known: Segment | None = None,
    keep: Callable[[Segment], object] | None = None,
) -> Segment:
    """Prefill the skill and read its K/V.

    `progress`: (tokens done, total). `blocks`: number of parts, or "headings". `kv`: stored K/V types. `known`: an
    existing segment to reuse blocks or first tokens from, unless it is quantized. `keep`: called during long prefills
    with a checkpoint, a segment of the first tokens, to be passed as `known` after an interruption.

    Raises UnsupportedError where this model's K/V cannot be kept, or not as `kv`, EngineError for more tokens than the
    model was trained for.
    """
    skill = resolve_images(workspace, skill)
    workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    if workspace.context.supports("read") is None:
        workspace.measure_rotation()
    segment = replace(plan(workspace, skill, blocks, kv), backend=workspace.context.backend)
    with workspace.scratch_after(segment.context, len(segment.context) + len(segment)) as sequence:
        clock = _PrefillTimer(sequence, known, _reused_tokens(sequence.context, segment, known))
        if segment.blocks:
            known_blocks, moves = reusable_blocks(sequence.context, segment, known)
            segment = replace(segment, layers=compile_blocks(sequence, segment, known_blocks, progress), moves=moves)
            parts = [part or last - first for part, (first, last) in zip(known_blocks, segment.spans, strict=True)]
            segment = replace(segment, batches=_batches(sequence, segment, parts))
        else:
            segment = _compile_whole(sequence, segment, known, progress, keep, workspace.encode_images, clock)
        # Capturing a state takes extra time.
        prefill_time = None if segment.carry else clock.prefill(len(segment))
        segment = replace(segment, prefill=prefill_time)
        stored = small(segment)
        if stored is not segment:
            _check_rounding(sequence, stored)
    return replace(segment, layers=stored.layers)


class _PrefillTimer:
    """Measures the prefill time of a segment, of which `there` tokens come from `known` with their share of its
    time."""

    def __init__(self, sequence: KVSequence, known: Segment | None, there: int) -> None:
        self._sequence, self._before = sequence, sequence.seconds["decode"]
        self._known, self._there = known, there

    def prefill(self, tokens: int) -> Prefill | None:
        """Return the time of the first `tokens` tokens; None if a part was computed elsewhere, or with other
        threads."""
        seconds, threads = self._sequence.seconds["decode"] - self._before, self._sequence.context.threads
        if self._there and self._known is not None:
            part = self._known.prefill
            if part is None or part.threads != threads:
                return None
            seconds += part.share(self._there)
        return Prefill(round(seconds, 6), tokens, threads)


def _reused_tokens(context: Context, segment: Segment, known: Segment | None) -> int:
    """Return how many tokens of the segment take their K/V from `known`."""
    if not segment.blocks:
        return shared_prefix_length(context, segment, known)
    return sum(len(part) for part in reusable_blocks(context, segment, known)[0] if part is not None)


def _check_rounding(sequence: KVSequence, stored: Segment) -> None:
    """Raise UnsupportedError if quantizing the segment at the sequence's end changes the next tokens' logits too much:
    in some models a few values of K are so large that their neighbours are lost."""
    probe = [int(token) for token in stored.tokens[-PROBE:]][: sequence.room]
    if not probe:
        return
    exact = sequence.lookahead(probe)
    sequence.truncate(0)
    sequence.append(stored.context)
    if stored.prefix_only:
        sequence.restore(stored)
    else:
        sequence.splice(stored)
    rounded = sequence.lookahead(probe)
    lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(rounded, axis=1)
    cosine = float(((exact * rounded).sum(axis=1) / lengths).mean())
    if not cosine >= NEAR:  # excludes NaN
        raise UnsupportedError(
            f"{stored.name} cannot be kept as {stored.kv}: the logits after it would have a cosine of {cosine:.3f} to "
            f"those after its rows as they were computed, less than {NEAR:g}",
            Help.KEEP_AS(types="f16, or f16/q8_0 for V alone"),
        )


def _compile_whole(
    sequence: KVSequence,
    segment: Segment,
    known: Segment | None,
    progress: Progress | None,
    keep: Callable[[Segment], object] | None,
    look: Callable[[Segment], ImageEmbeddings],
    clock: _PrefillTimer,
) -> Segment:
    if segment.pictures:
        sequence.append_image(look(segment))
        sequence.flush(progress)
        return replace(segment, layers=_read(sequence, segment))
    if segment.prefix_only and captures_state(sequence.context, len(segment)):
        return _compile_recurrent(sequence, segment, progress)
    count = shared_prefix_length(sequence.context, segment, known)
    shared = [known.slice(0, count)] if count and known else []
    for part in shared:
        sequence.splice(part)
    sequence.append_skill(segment.tokens[count:], present=count)
    on_progress = (
        _with_checkpoints(sequence, segment, shared, keep, progress, clock)
        if keep and not segment.prefix_only
        else progress
    )
    sequence.flush(on_progress)
    batches = _batches(sequence, segment, [*shared, len(segment) - count])
    return replace(segment, layers=_read(sequence, segment), batches=batches)


def _compile_recurrent(sequence: KVSequence, segment: Segment, progress: Progress | None) -> Segment:
    """Compile a segment with recurrent layers, and capture its state transitions where the graph allows it."""
    seam, end = _carry_range(sequence.context, len(segment))
    sequence.append(segment.tokens[:seam])
    sequence.flush()
    carry = None
    with recurrent.capturing(sequence.context, sequence.seq_id) as captured_transitions:
        sequence.append(segment.tokens[seam:end])
        sequence.flush(progress)
        with suppress(EngineError):  # then it can only be restored
            carry = Carry.of(seam, len(segment) - end, captured_transitions())
    sequence.append(segment.tokens[end:])
    sequence.flush()
    batches = _batches(sequence, segment, [len(segment)])
    return replace(segment, layers=_read(sequence, segment), carry=carry, batches=batches)


def _carry_range(context: Context, tokens: int) -> tuple[int, int]:
    """Return the range of tokens through which state is carried; the others are decoded in place."""
    first, last = recurrent.margins(context)
    return max(first, min(SEAM, tokens // 4)), tokens - last


def captures_state(context: Context, tokens: int) -> bool:
    """True if a compile of so many tokens captures state transitions: only if they will be used, as they take time and
    space."""
    if not context.carries or context.supports("carry") is not None:
        return False
    seam, end = _carry_range(context, tokens)
    return seam < end


def _with_checkpoints(
    sequence: KVSequence,
    segment: Segment,
    shared: Sequence[Segment],
    keep: Callable[[Segment], object],
    progress: Progress | None,
    clock: _PrefillTimer,
) -> Progress:
    """Wrap progress so that it also writes checkpoints. `shared`: segments that were placed, not decoded."""
    last, cost = time.monotonic(), 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal last, cost
        if progress:
            progress(done, total)
        now = time.monotonic()
        if done < total and now - last > max(KEEP, COST * cost):
            count = len(sequence) - len(sequence.pending) - segment.base
            rows, took = _read(sequence, segment, count), clock.prefill(count)
            part = replace(segment, text="", tokens=segment.tokens[:count], fields=(), layers=rows, kv="f16")
            part = replace(part, batches=_batches(sequence, part, [*shared, count - sum(map(len, shared))]))
            keep(replace(part, prefill=took))
            last = time.monotonic()
            cost = last - now

    return on_progress


def _read(sequence: KVSequence, segment: Segment, count: int | None = None) -> tuple[LayerRows, ...]:
    """Read the K/V of the segment at the sequence's end, or of its first `count` tokens."""
    first, seq_id = segment.first, sequence.seq_id
    end = len(sequence) if count is None else segment.base + count
    if segment.axes is not None:  # rows share positions
        rows, axes = sequence.context.read_axes(seq_id, first, end - first, base=first, dtype=segment.row_type)
        if (axes[segment.base - first :] != segment.axes + segment.base).any():
            raise EngineError(f"the rows of {segment.name} are not where they were to be")
        return rows
    return sequence.context.read(seq_id, first, end - first, base=first, dtype=segment.row_type)


def _batches(sequence: KVSequence, segment: Segment, parts: Sequence[Segment | int]) -> tuple[MicroBatches, ...]:
    """Return how the rows of a segment were computed; empty if that is not known. `parts` of its tokens, in order: a
    segment that was placed, or the number of tokens that the sequence decoded."""
    decoded = micro_batches(sequence.flushed, sequence.context.n_ubatch, sequence.context.threads)
    at = sum(sequence.flushed) - sum(part for part in parts if isinstance(part, int))
    result = cut_batches(decoded, 0, segment.base)
    for part in parts:
        if isinstance(part, int):
            result += cut_batches(decoded, at, at + part)
            at += part
        else:
            result += part.batches
    return result if sum(batch.rows for batch in result) == segment.base + len(segment) else ()


def shared_prefix_length(context: Context, segment: Segment, known: Segment | None) -> int:
    """Return how many leading tokens of the segment have the same K/V in `known`."""
    if known is None or known.blocks or segment.blocks or segment.prefix_only or not _same_kv(context, known, segment):
        return 0
    same = min(len(known), len(segment))
    differ = np.flatnonzero(known.tokens[:same] != segment.tokens[:same])
    return int(differ[0]) if len(differ) else same


def prefill(
    sequence: KVSequence, left: Tokens, parts: Sequence[Tokens], dtype: str, progress: Progress | None = None
) -> Iterator[tuple[LayerRows, ...]]:
    """Yield the K/V of each part, decoded after `left` alone, in a scratch sequence, which is cleared. `progress`
    counts the tokens of all parts. Several parts need a context that can truncate."""
    total, done = sum(map(len, parts)), 0

    def update(count: int, _: int) -> None:
        if progress:
            progress(done + count, total)

    sequence.truncate(0)
    sequence.append(left)
    sequence.flush()
    for number, tokens in enumerate(parts):
        if number:
            sequence.truncate(len(left))
        sequence.append(tokens)
        sequence.flush(update)
        done += len(tokens)
        # The whole sequence: a recurrent state cannot be read for a part of it.
        rows = sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype=dtype)
        yield tuple(layer if layer.part == "state" else layer.cut(slice(len(left), None)) for layer in rows)


def compile_blocks(
    sequence: KVSequence, segment: Segment, known: Sequence[Segment | None], progress: Progress | None
) -> tuple[LayerRows, ...]:
    """Prefill the blocks that are not known, splice all of them together, and read the whole."""
    parts = [segment.tokens[first:last] for first, last in segment.spans]
    new = [tokens for tokens, part in zip(parts, known, strict=True) if part is None]
    plain = replace(segment, fields=(), blocks=(), moves=())
    rows = prefill(sequence, segment.context, new, segment.row_type, progress) if new else iter(())
    blocks = [
        part or replace(plain, tokens=tokens, layers=next(rows)) for tokens, part in zip(parts, known, strict=True)
    ]
    sequence.truncate(0)
    sequence.append(segment.context)
    for block in blocks:
        sequence.splice(block)
    return _read(sequence, segment)


def reusable_blocks(
    context: Context, segment: Segment, known: Segment | None
) -> tuple[list[Segment | None], tuple[int, ...]]:
    """Return, per block, an equal block of `known` that can be placed here or None, and the number of moves of its K/V.
    Beyond MOVES a block is recomputed."""
    if known is None or not _same_kv(context, known, segment):
        return [None] * len(segment.blocks), (0,) * len(segment.blocks)
    counts = known.moves or (0,) * len(known.spans)
    by_tokens = {
        known.tokens[first:last].tobytes(): (known.slice(first, last), count)
        for (first, last), count in zip(known.spans, counts, strict=True)
    }
    blocks: list[Segment | None] = []
    moves = []
    for first, last in segment.spans:
        part, count = by_tokens.get(segment.tokens[first:last].tobytes(), (None, 0))
        if part is not None:
            count += part.base != segment.base + first
            if count > MOVES or context.can_move(part.base, segment.base + first, len(part)) is not None:
                part, count = None, 0
        blocks.append(part)
        moves.append(count)
    return blocks, tuple(moves)


def _same_kv(context: Context, known: Segment, segment: Segment) -> bool:
    """True if equal tokens have equal K/V in both segments."""
    if known.backend != context.backend:
        return False
    same_left = np.array_equal(known.context, segment.context)
    same = same_left and known.base == segment.base and not known.prefix_only and not any(quantized(known.kv))
    same = same and not known.media and not segment.media  # their tokens do not identify the images
    return same and not known.identity.differences(segment.identity)


def plan(workspace: Workspace, skill: Skill, blocks: Blocks | None = None, kv: str = "f16") -> Segment:
    """Return the segment that compiling would give, without K/V. Raises UnsupportedError where this model's K/V cannot
    be kept as `kv`."""
    skill, left = resolve_images(workspace, skill), workspace.left_context
    embeddings = None
    if skill.pictures:
        from notes_cli.engine.vision import join_parts

        embeddings = join_parts([part for *_, part in workspace.image_encoding.split(skill)])  # only measured
    tokens = embeddings.tokens if embeddings else workspace.tokens_of(skill)
    if workspace.grows:  # with a fixed size the prompt's own error is more helpful
        workspace.make_room(len(left) + len(tokens))
    check_support(workspace, skill.name)
    subject = f"{skill.name} {'is' if skill.picture else 'has'} an image"
    if embeddings and blocks not in (None, 1):
        raise SkillError(f"{subject}, and is compiled in no blocks")
    if embeddings and any(quantized(kv)):  # the check in compile_skill does not cover images
        raise UnsupportedError(
            f"{subject} and cannot be kept as {kv}: how near its rows stay has not been measured",
            Help.KEEP_AS(types="f16"),
        )
    _check_kept(workspace, skill.name, kv)
    if embeddings:
        fields = _fields_between_images(workspace, skill)
    else:
        fields = field_spans(workspace.model, skill.text, skill.fields, tokens)
    segment = Segment(
        *(skill.name, skill.description, skill.text, tokens, len(left), left, fields, workspace.identity),
        layers=(),
        prefix_only=prefix_only(workspace),
        source=recorded_source(skill),
        tools=bool(skill.runs),
        stamp=skill.stamp,
        kv=kv,
        media=embeddings.media if embeddings else (),
        axes=embeddings.axes if embeddings else None,
        projector=workspace.image_encoding.projector if embeddings else "",
        pictures=tuple(ImageFile(shown.start, shown.end, shown.picture.data) for shown in skill.pictures),
    )
    if segment.prefix_only and segment.axes is not None:
        why = workspace.context.supports("splice")
        raise UnsupportedError(f"{subject}, whose rows cannot be put back on this model: {why}")
    if blocks is None and skill.cuts:
        with suppress(SkillError, UnsupportedError):  # then it is compiled as a whole
            return _in_blocks(workspace, segment, lambda pieces: block_starts_at(skill.text, pieces, skill.cuts))
    if blocks in (None, 1):
        return segment
    return _in_blocks(workspace, segment, lambda pieces: block_starts(skill.text, pieces, blocks))


def _fields_between_images(workspace: Workspace, skill: Skill) -> tuple[FieldSpan, ...]:
    """Return the token spans of fields in the texts between images."""
    spans: list[FieldSpan] = []
    row = 0
    for start, end, part in workspace.image_encoding.split(skill):
        if not part.media:
            inside = (field_ for field_ in skill.fields if start <= field_.start < end)
            fields = [field_._replace(start=field_.start - start, end=field_.end - start) for field_ in inside]
            for span in field_spans(workspace.model, skill.text[start:end], fields, part.tokens):
                where = span.start + start, span.end + start, span.first + row, span.last + row
                spans.append(FieldSpan(span.name, span.value, *where))
        row += len(part.tokens)
    return tuple(spans)


def _in_blocks(workspace: Workspace, segment: Segment, starts: Callable[[list[bytes]], tuple[int, ...]]) -> Segment:
    """Divide the plan into blocks, whose first tokens `starts` computes from the bytes of all tokens. Raises
    UnsupportedError where K/V cannot be moved, SkillError without a place to cut."""
    pieces = [workspace.model.token_bytes(int(token), special=segment.tools) for token in segment.tokens]
    try:
        segment = replace(segment, blocks=starts(pieces))
    except SkillError as error:
        raise SkillError(f"{segment.name}: {error.what}", error.remedy) from None
    for first, last in segment.spans:
        reason = workspace.context.can_move(segment.base, segment.base + first, last - first)
        if reason:
            raise UnsupportedError(f"{segment.name} cannot be compiled in blocks: {reason}")
    return segment


def block_warnings(workspace: Workspace, skill: Skill, blocks: Blocks) -> list[str]:
    """Return warnings about compiling a skill in blocks. Raises as `plan`."""
    segment = plan(workspace, skill, blocks)
    texts = [workspace.model.text(segment.tokens[first:last]) for first, last in segment.spans]
    within: dict[str, set[int]] = {}
    for field in segment.fields:
        at = {number for number, (first, last) in enumerate(segment.spans) if first <= field.first < last}
        within.setdefault(field.name, set()).update(at)
    warnings = references(texts, within)
    if blocks != "headings" and len(texts) < blocks:
        have = f"{len(texts)} block{'s' * (len(texts) != 1)}"
        warnings.insert(0, f"{have}, not {blocks}: there is no other line to cut the text at")
    return warnings


def prefix_only(workspace: Workspace) -> bool:
    """True if this model's K/V cannot be moved, so that it is kept with that of the left context."""
    return workspace.context.supports("splice") is not None


def placement_limits(workspace: Workspace, tokens: int, *, carried: bool = False) -> str | None:
    """Describe where a skill of so many tokens can be placed on this model; None: anywhere. `carried`: its state
    transitions were captured."""
    context, base = workspace.context, len(workspace.left_context)
    reason = context.supports("splice")
    if reason and context.supports("carry") is None:
        workspace.refresh_capabilities()
        if context.carries and carried:
            return "It can be restored at the start of a prompt, and the state of recurrent layers carried through it"
        reason = UNCAPTURED if context.carries else UNTRUSTED
    if reason:
        return f"It can be restored at the start of a prompt, and is decoded elsewhere: {reason}"
    reach = max(context.n_ctx, workspace.longest or 0)
    places = (base + (1 << power) for power in range(reach.bit_length()))
    moves = (context.can_move(base, place, tokens) for place in places)
    reason = next((reason for reason in moves if reason), None)
    if reason:
        return f"It can be spliced at some distances, and is decoded at others: {reason}"
    return None


def check_support(workspace: Workspace, name: str) -> None:
    """Raise UnsupportedError where this model's K/V can neither be moved nor restored."""
    for operation in ("read", "restore"):
        reason = workspace.context.supports(operation)
        if reason:
            raise UnsupportedError(f"{name} cannot be compiled for {workspace.model.name}: {reason}")


def _check_kept(workspace: Workspace, name: str, kv: str) -> None:
    """Raise SegmentError for an unknown stored type, UnsupportedError for one that this model's K/V cannot have."""
    if not any(quantized(kv)):
        return
    layers = [layer for layer in workspace.context.layers if layer.part == "attention"]
    sizes_of = [(layer.layer, (layer.n_embd_k, layer.n_embd_v)) for layer in layers]
    sizes = [
        (layer_, size) for layer_, both in sizes_of for size, q8_0 in zip(both, quantized(kv), strict=True) if q8_0
    ]
    odd = next(((layer_, size) for layer_, size in sizes if size % BLOCK), None)
    if odd:
        why = f"those of layer {odd[0]} have {odd[1]} numbers, and q8_0 takes {BLOCK} at a time"
    elif not any(size for _, size in sizes):
        why = "it keeps no V, which is part of K" if sizes_of else "it has none"
    else:
        return
    raise UnsupportedError(f"{name}: rows of {workspace.model.name} cannot be kept as {kv}: {why}")


def skill_of(workspace: Workspace, source: Skill | ToolSet) -> Skill:
    """Return a skill as it is; a tool set as the text that this model's template makes of it."""
    return tools_skill(workspace.template, source) if isinstance(source, ToolSet) else source


def resolve_images(
    workspace: Workspace,
    skill: Skill,
    say: Say | None = None,
    output: Path | None = None,
    *,
    force: bool = False,
) -> Skill:
    """Return the skill with the images that its text links to, if a vision encoder is loaded; else with its text
    unchanged. A skill compiled with images (in the library, or at `output`) is not replaced by one without except by
    `force`, so that omitting --mmproj loses nothing. `say` gets a notice of links left as text. Raises ImageError for a
    file that is no image, or is refused."""
    if not skill.links:
        return skill
    name = files_of(skill.source)[0] if files_of(skill.source) else skill.name
    if not workspace.has_vision and (
        force or not _has_images(output or workspace.library.path(skill.name, workspace.identity))
    ):
        files = [link for link in skill.links if not link.address]
        if say and files:
            remedy = None if all(link.why for link in files) else Help.NAME_PROJECTOR(model=workspace.model.name)
            targets = listed([link.target[:200] for link in files], most=3)
            say(Notice(f"{name} shows {targets}: that is compiled as the text it is", remedy, warning=True))
        return replace(skill, links=())
    for link in skill.links:
        if say and link.why:
            text = f"{name} shows {link.target[:200]}, which is compiled as the text it is: {link.why}"
            say(Notice(text, warning=True))
    return with_images(skill)


def _has_images(path: Path) -> bool:
    """True if the file has a segment that was compiled with images."""
    try:
        return path.exists() and bool(peek(path).media)
    except SegmentError:
        return False


def recorded_source(skill: Skill) -> str:
    """Return the source for a segment: an absolute path (line breaks and invalid UTF-8 escaped), or several, "-" for
    standard input, "" if unknown."""
    if skill.source in ("", "-"):
        return skill.source
    path = BETWEEN.join(spelt(os.path.abspath(file)) for file in files_of(skill.source))
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")
