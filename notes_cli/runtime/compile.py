"""Compiling: prefill a skill once, after the left context it will mostly have, and keep its rows.

Only the skill's own rows are kept: its first token is then no attention sink, and the segment fits anywhere. Where rows
cannot be moved, those of the left context are kept with them, and the segment fits the start of a prompt.

Tokens that were compiled before, after the same ones, are taken from the file that is there, rows unchanged: a change
near the end of a text is a prefill of its end, and a compile that was interrupted or killed goes on. Rows that a file
keeps quantized are no source: what comes after them would be computed from what was rounded.

In blocks, each part is prefilled after the left context alone and moved to its place. It has not seen the parts before
it; in return, a change of the text is a prefill of the parts that it is in: the others are taken from the file that is
there, and rounded once more if they move. No token at a block's start is repaired: it would depend on the block before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.change import field_spans
from notes_cli.editing.selecting import influence, prefill
from notes_cli.engine import recurrent
from notes_cli.engine.context import Context
from notes_cli.engine.segment import BLOCK, Carry, FieldSpan, ImageFile, LayerRows, Prefill, Segment, quantized
from notes_cli.engine.sequence import KVSequence
from notes_cli.engine.vision import ImageEmbeddings
from notes_cli.errors import EngineError, Help, Notice, Progress, Say, SegmentError, SkillError, UnsupportedError
from notes_cli.library.container import peek, small
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.blocks import Blocks, block_starts, references
from notes_cli.text.keys import listed
from notes_cli.text.names import BETWEEN, files_of, spelt
from notes_cli.text.skill import Skill, with_images
from notes_cli.text.toolset import ToolSet, tools_skill

KEEP = 20.0  # seconds of a prefill after which what is there is kept, for a compile that is interrupted
FIRST = (32, 96)  # tokens of the first batches, for a bar that moves and knows a speed before a whole micro-batch
COST = 50.0  # times as long as that takes must have passed since
PROBE = 8  # tokens after rows that were rounded, whose logits tell whether those are as good
NEAR = 0.99  # their cosine to those after the rows as they were computed, at least (docs/LOG.md)
# Tokens that are decoded where a recurrent state is carried through a skill: the more, the less of what follows depends
# on what preceded it when it was compiled. At least what a convolution reaches back over; of a short skill a quarter.
SEAM = 16
UNTRUSTED = (
    "this model has recurrent layers, whose state is carried through skills only where that was measured to hold"
)
UNCAPTURED = "what carrying the state of recurrent layers through it takes was not captured when it was compiled"
MOVES = 8  # times that the rows of a block are moved, each a rounding, before it is computed again (docs/LOG.md)


def compile_skill(
    workspace: Workspace,
    skill: Skill,
    progress: Progress | None = None,
    *,
    measure: Progress | None = None,
    blocks: Blocks | None = None,
    kv: str = "f16",
    known: Segment | None = None,
    keep: Callable[[Segment], object] | None = None,
) -> Segment:
    """Prefill the skill and read its rows.

    `progress` is told tokens done and in all. `measure`: also measure the influence of each field, a prefill a field;
    it is told how many are done. `blocks`: in so many parts, or one a heading, each on its own. `kv`: what its file is
    to keep the rows as. What `known` has, blocks or the first tokens, is taken from there, unless it is quantized.
    `keep` is given what there is now and then, where it takes long: a segment of the first tokens, to be `known` if
    this is interrupted. Raise UnsupportedError where this model's rows cannot be kept, or not so, EngineError for more
    tokens than it was trained for.
    """
    skill = resolve_images(workspace, skill)
    spare = 0 if measure is None else 8 * len(skill.fields)  # another value may be longer
    workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)), spare)
    if workspace.context.supports("read") is None:
        workspace.measure_rotation()
    segment = plan(workspace, skill, blocks, kv)
    longest = len(segment.context) + len(segment) + 8 * len(skill.fields)  # another value may be longer
    with workspace.scratch_after(segment.context, longest) as sequence:
        clock = _Clock(sequence, known, _taken_over(sequence.context, segment, known))
        if segment.blocks:
            there, moves = reusable_blocks(sequence.context, segment, known)
            segment = replace(segment, layers=_in_blocks(sequence, segment, there, progress), moves=moves)
        else:
            segment = _in_one(sequence, segment, known, progress, keep, workspace.encode_images, clock)
        # Capturing a state takes time that a prefill does not.
        took = None if segment.carry else clock.prefill(len(segment))
        segment = replace(segment, prefill=took, backend=sequence.context.backend)
        kept = small(segment)
        if kept is not segment:
            _check_near(sequence, kept)
        if measure is not None:
            segment = replace(segment, influence=_influence(sequence, segment, measure))
    return replace(segment, layers=kept.layers)


class _Clock:
    """Measures the prefill of a segment, of which `there` tokens come from `known` with their share of its time."""

    def __init__(self, sequence: KVSequence, known: Segment | None, there: int) -> None:
        self._sequence, self._before = sequence, sequence.seconds["decode"]
        self._known, self._there = known, there

    def prefill(self, tokens: int) -> Prefill | None:
        """That of the first `tokens` tokens; None where a part was computed elsewhere, or with other threads."""
        seconds, threads = self._sequence.seconds["decode"] - self._before, self._sequence.context.threads
        if self._there and self._known is not None:
            part = self._known.prefill
            if part is None or part.threads != threads:
                return None
            seconds += part.share(self._there)
        return Prefill(round(seconds, 6), tokens, threads)


def _taken_over(context: Context, segment: Segment, known: Segment | None) -> int:
    """How many tokens of the segment have the rows that they would get in `known`."""
    if not segment.blocks:
        return shared_prefix_length(context, segment, known)
    return sum(len(part) for part in reusable_blocks(context, segment, known)[0] if part is not None)


def _check_near(sequence: KVSequence, kept: Segment) -> None:
    """Raise UnsupportedError where rounding the rows of the segment that the sequence ends with changes much of what
    comes after it: of some models a few numbers of K are so large that those beside them are lost."""
    again = [int(token) for token in kept.tokens[-PROBE:]][: sequence.room]
    if not again:
        return
    exact = sequence.lookahead(again)
    sequence.truncate(0)
    sequence.append(kept.context)
    if kept.prefix_only:
        sequence.restore(kept)
    else:
        sequence.splice(kept)
    found = sequence.lookahead(again)
    lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(found, axis=1)
    near = float(((exact * found).sum(axis=1) / lengths).mean())
    if not near >= NEAR:  # NaN is not
        raise UnsupportedError(
            f"{kept.name} cannot be kept as {kept.kv}: the logits after it would have a cosine of {near:.3f} to those "
            f"after its rows as they were computed, less than {NEAR:g}",
            Help.KEEP_AS_COMPUTED(),
        )


def _in_one(
    sequence: KVSequence,
    segment: Segment,
    known: Segment | None,
    progress: Progress | None,
    keep: Callable[[Segment], object] | None,
    look: Callable[[Segment], ImageEmbeddings],
    clock: _Clock,
) -> Segment:
    if segment.pictures:
        sequence.append_image(look(segment))
        sequence.flush(progress)
        return replace(segment, layers=_read(sequence, segment))
    if segment.prefix_only and captures_state(sequence.context, len(segment)):
        return _carried(sequence, segment, progress)
    there = shared_prefix_length(sequence.context, segment, known)
    if there and known:
        sequence.splice(known.slice(0, there))
    sequence.append(segment.tokens[there:])
    told = _keeping(sequence, segment, keep, progress, clock) if keep and not segment.prefix_only else progress
    sequence.flush(told, FIRST if len(sequence.pending) > 2 * sum(FIRST) else ())
    return replace(segment, layers=_read(sequence, segment))


def _carried(sequence: KVSequence, segment: Segment, progress: Progress | None) -> Segment:
    """The rows of a segment whose model has recurrent layers, and how their state goes on through it, where its graph
    can be captured."""
    seam, end = _ends(sequence.context, len(segment))
    sequence.append(segment.tokens[:seam])
    sequence.flush()
    carry = None
    with recurrent.capturing(sequence.context, sequence.seq_id) as found:
        sequence.append(segment.tokens[seam:end])
        sequence.flush(progress)
        with suppress(EngineError):  # then it can be restored, as without it
            carry = Carry.of(seam, len(segment) - end, found())
    sequence.append(segment.tokens[end:])
    sequence.flush()
    return replace(segment, layers=_read(sequence, segment), carry=carry)


def _ends(context: Context, tokens: int) -> tuple[int, int]:
    """Between which of a segment's tokens a state is carried; the others are decoded wherever it is."""
    first, last = recurrent.margins(context)
    return max(first, min(SEAM, tokens // 4)), tokens - last


def captures_state(context: Context, tokens: int) -> bool:
    """Whether a compile of so many tokens captures how they change the state of recurrent layers: where it is going to
    be carried through them. It takes a part of the time and bytes that nobody else should have to spend."""
    if not context.carries or context.supports("carry") is not None:
        return False
    seam, end = _ends(context, tokens)
    return seam < end


def _keeping(
    sequence: KVSequence,
    segment: Segment,
    keep: Callable[[Segment], object],
    progress: Progress | None,
    clock: _Clock,
) -> Progress:
    """Progress that has what is there kept now and then."""
    kept, cost = time.monotonic(), 0.0

    def told(done: int, total: int) -> None:
        nonlocal kept, cost
        if progress:
            progress(done, total)
        now = time.monotonic()
        if done < total and now - kept > max(KEEP, COST * cost):
            count = len(sequence) - len(sequence.pending) - segment.base
            rows, took = _read(sequence, segment, count), clock.prefill(count)
            part = replace(segment, text="", tokens=segment.tokens[:count], fields=(), layers=rows, kv="f16")
            keep(replace(part, prefill=took, backend=sequence.context.backend))
            kept = time.monotonic()
            cost = kept - now

    return told


def _read(sequence: KVSequence, segment: Segment, count: int | None = None) -> tuple[LayerRows, ...]:
    """The rows of the segment, which the sequence ends with, or of its first `count` tokens."""
    first, seq_id = segment.first, sequence.seq_id
    end = len(sequence) if count is None else segment.base + count
    if segment.axes is not None:  # rows share positions
        rows, axes = sequence.context.read_axes(seq_id, first, end - first, base=first, dtype=segment.row_type)
        if (axes[segment.base - first :] != segment.axes + segment.base).any():
            raise EngineError(f"the rows of {segment.name} are not where they were to be")
        return rows
    return sequence.context.read(seq_id, first, end - first, base=first, dtype=segment.row_type)


def shared_prefix_length(context: Context, segment: Segment, known: Segment | None) -> int:
    """How many first tokens of the segment have the rows that they would get in `known`."""
    if known is None or known.blocks or segment.blocks or segment.prefix_only or not _alike(context, known, segment):
        return 0
    same = min(len(known), len(segment))
    differ = np.flatnonzero(known.tokens[:same] != segment.tokens[:same])
    return int(differ[0]) if len(differ) else same


def _in_blocks(
    sequence: KVSequence, segment: Segment, known: Sequence[Segment | None], progress: Progress | None
) -> tuple[LayerRows, ...]:
    """Prefill the blocks that are not known, put all of them side by side, and read the whole."""
    parts = [segment.tokens[first:last] for first, last in segment.spans]
    new = [tokens for tokens, part in zip(parts, known, strict=True) if part is None]
    plain = replace(segment, fields=(), influence={}, blocks=(), moves=())
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
    """For each block one of the known segment with the same tokens, compiled in the same way, that can be placed here;
    and how often its rows will have been moved. Beyond MOVES it is better computed again."""
    if known is None or not _alike(context, known, segment):
        return [None] * len(segment.blocks), (0,) * len(segment.blocks)
    counts = known.moves or (0,) * len(known.spans)
    found = {
        known.tokens[first:last].tobytes(): (known.slice(first, last), count)
        for (first, last), count in zip(known.spans, counts, strict=True)
    }
    there: list[Segment | None] = []
    moves = []
    for first, last in segment.spans:
        part, count = found.get(segment.tokens[first:last].tobytes(), (None, 0))
        if part is not None:
            count += part.base != segment.base + first
            if count > MOVES or context.can_move(part.base, segment.base + first, len(part)) is not None:
                part, count = None, 0
        there.append(part)
        moves.append(count)
    return there, tuple(moves)


def _alike(context: Context, known: Segment, segment: Segment) -> bool:
    """True if both segments have the same KV entries where their tokens are the same."""
    if known.backend != context.backend:
        return False
    same_left = np.array_equal(known.context, segment.context)
    same = same_left and known.base == segment.base and not known.prefix_only and not any(quantized(known.kv))
    same = same and not known.media and not segment.media  # whose tokens do not tell which images they are of
    return same and not known.identity.differences(segment.identity)


def _influence(sequence: KVSequence, segment: Segment, measure: Progress) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    names = dict.fromkeys(span.name for span in segment.fields)
    for name in names:
        found[name] = influence(sequence, segment, name)
        measure(len(found), len(names))
    return found


def plan(workspace: Workspace, skill: Skill, blocks: Blocks | None = None, kv: str = "f16") -> Segment:
    """What compiling the skill would give, without its rows: enough for a dry run. Raise UnsupportedError where this
    model's rows cannot be kept so."""
    skill, left = resolve_images(workspace, skill), workspace.left_context
    seen = _seen(workspace, skill)
    tokens = seen.tokens if seen else workspace.tokens_of(skill)
    if workspace.grows:  # else what is planned need not fit: a prompt that does not says what all of it takes
        workspace.make_room(len(left) + len(tokens))
    check_support(workspace, skill.name)
    has = f"{skill.name} {'is' if skill.picture else 'has'} an image"
    if seen and blocks not in (None, 1):
        raise SkillError(f"{has}, and is compiled in no blocks")
    if seen and any(quantized(kv)):  # what rounding does to its rows, the check of compile_skill cannot tell
        raise UnsupportedError(
            f"{has} and cannot be kept as {kv}: how near its rows stay has not been measured",
            Help.KEEP_IMAGE_AS_COMPUTED(),
        )
    _check_kept(workspace, skill.name, kv)
    fields = _fields_beside(workspace, skill) if seen else field_spans(workspace.model, skill, tokens)
    segment = Segment(
        *(skill.name, skill.description, skill.text, tokens, len(left), left, fields, workspace.identity),
        layers=(),
        prefix_only=prefix_only(workspace),
        source=recorded_source(skill),
        tools=bool(skill.runs),
        stamp=skill.stamp,
        kv=kv,
        media=seen.media if seen else (),
        axes=seen.axes if seen else None,
        projector=workspace.image_encoding.projector if seen else "",
        pictures=tuple(ImageFile(one.start, one.end, one.picture.data) for one in skill.pictures),
    )
    if segment.prefix_only and segment.axes is not None:
        why = workspace.context.supports("splice")
        raise UnsupportedError(f"{has}, whose rows cannot be put back on this model: {why}")
    return segment if blocks in (None, 1) else _cut(workspace, segment, blocks)


def _seen(workspace: Workspace, skill: Skill) -> ImageEmbeddings | None:
    """A skill with images as a whole, these not looked at; None without any."""
    if not skill.pictures:
        return None
    from notes_cli.engine.vision import join_parts

    return join_parts([part for *_, part in workspace.image_encoding.split(skill)])


def _fields_beside(workspace: Workspace, skill: Skill) -> tuple[FieldSpan, ...]:
    """The tokens that hold each field's value, in the texts between images."""
    found: list[FieldSpan] = []
    row = 0
    for start, end, part in workspace.image_encoding.split(skill):
        if not part.media:
            inside = (one for one in skill.fields if start <= one.start < end)
            own = tuple(one._replace(start=one.start - start, end=one.end - start) for one in inside)
            text = replace(skill, text=skill.text[start:end], fields=own, pictures=())
            for span in field_spans(workspace.model, text, part.tokens):
                place = span.start + start, span.end + start, span.first + row, span.last + row
                found.append(FieldSpan(span.name, span.value, *place))
        row += len(part.tokens)
    return tuple(found)


def _cut(workspace: Workspace, segment: Segment, blocks: Blocks) -> Segment:
    """The plan in blocks. Raise UnsupportedError where rows cannot be moved, SkillError without a place to cut."""
    pieces = [workspace.model.token_bytes(int(token)) for token in segment.tokens]
    try:
        starts = block_starts(segment.text, pieces, blocks)
    except SkillError as error:
        raise SkillError(f"{segment.name}: {error.what}", error.remedy) from None
    segment = replace(segment, blocks=starts)
    for first, last in segment.spans:
        reason = workspace.context.can_move(segment.base, segment.base + first, last - first)
        if reason:
            raise UnsupportedError(f"{segment.name} cannot be compiled in blocks: {reason}")
    return segment


def block_warnings(workspace: Workspace, skill: Skill, blocks: Blocks) -> list[str]:
    """What is to be said before the skill is compiled in blocks. Raises what `plan` raises."""
    segment = plan(workspace, skill, blocks)
    texts = [workspace.model.text(segment.tokens[first:last]) for first, last in segment.spans]
    within: dict[str, set[int]] = {}
    for field in segment.fields:
        at = {number for number, (first, last) in enumerate(segment.spans) if first <= field.first < last}
        within.setdefault(field.name, set()).update(at)
    warnings = references(texts, within)
    if blocks != "headings" and len(texts) < blocks:
        warnings.insert(0, f"{_blocks(len(texts))}, not {blocks}: there is no other line to cut the text at")
    return warnings


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def prefix_only(workspace: Workspace) -> bool:
    """Whether rows of this model cannot be moved, so that they are kept with those of the left context."""
    return workspace.context.supports("splice") is not None


def placement_limits(workspace: Workspace, tokens: int, *, carried: bool = False) -> str | None:
    """Where alone a skill of so many tokens can be placed on this model, in a sentence; None: anywhere. `carried`: how
    it changes the state of recurrent layers has been captured."""
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
    """Raise UnsupportedError where this model's rows can neither be moved nor put back."""
    for operation in ("read", "restore"):
        reason = workspace.context.supports(operation)
        if reason:
            raise UnsupportedError(f"{name} cannot be compiled for {workspace.model.name}: {reason}")


def _check_kept(workspace: Workspace, name: str, kv: str) -> None:
    """Raise SegmentError for a type that there is not, UnsupportedError where this model's rows cannot have it."""
    if not any(quantized(kv)):
        return
    layers = [layer for layer in workspace.context.layers if layer.part == "attention"]
    found = [(layer.layer, (layer.n_embd_k, layer.n_embd_v)) for layer in layers]
    sizes = [(number, size) for number, both in found for size, q8_0 in zip(both, quantized(kv), strict=True) if q8_0]
    odd = next(((number, size) for number, size in sizes if size % BLOCK), None)
    if odd:
        why = f"those of layer {odd[0]} have {odd[1]} numbers, and q8_0 takes {BLOCK} at a time"
    elif not any(size for _, size in sizes):
        why = "it keeps no V, which is part of K" if found else "it has none"
    else:
        return
    raise UnsupportedError(f"{name}: rows of {workspace.model.name} cannot be kept as {kv}: {why}")


def skill_of(workspace: Workspace, found: Skill | ToolSet) -> Skill:
    """A skill as it is; of tools what this model is told of them, as a text to be compiled."""
    return tools_skill(workspace.template, found) if isinstance(found, ToolSet) else found


def resolve_images(
    workspace: Workspace,
    skill: Skill,
    say: Say | None = None,
    output: Path | None = None,
    *,
    force: bool = False,
) -> Skill:
    """The skill with the images that its text refers to in their places, where the model sees; else the text as it is.

    What was compiled with images (in the library, or at `output`) is not compiled without them but by `force`: who
    forgets to name the projector loses nothing. `say` is told what is left as text, and why. Raise ImageError for a
    file that is no image, or is refused.
    """
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
            what = f"{name} shows {link.target[:200]}, which is compiled as the text it is: {link.why}"
            say(Notice(what, warning=True))
    return with_images(skill)


def _has_images(path: Path) -> bool:
    """Whether a segment there was compiled with images."""
    try:
        return path.exists() and bool(peek(path).media)
    except SegmentError:
        return False


def recorded_source(skill: Skill) -> str:
    """Where the skill's text came from, as a segment keeps it: an absolute path (in which a line break, and what is not
    UTF-8, is spelt), or several, "-" for standard input, or "" where that is not known."""
    if skill.source in ("", "-"):
        return skill.source
    path = BETWEEN.join(spelt(os.path.abspath(file)) for file in files_of(skill.source))
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")
