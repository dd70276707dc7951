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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import notes_cli
from notes_cli.editing.change import field_spans
from notes_cli.editing.influence import influence
from notes_cli.editing.prefill import prefill
from notes_cli.engine.context import Context
from notes_cli.engine.eye import Seen
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import BLOCK, Carry, FieldSpan, LayerRows, Pictured, Segment, quantized
from notes_cli.errors import (
    DamagedError,
    EngineError,
    Help,
    Notice,
    Progress,
    Say,
    SegmentError,
    SkillError,
    TakenError,
    UnsupportedError,
    UnwritableError,
)
from notes_cli.library import begun
from notes_cli.library.container import SegmentInfo, open_segment, peek, small, write_segment
from notes_cli.library.store import came_from, changes, source_text
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.blocks import Blocks, block_starts, references
from notes_cli.text.keys import listed
from notes_cli.text.names import BETWEEN, files_of, spelt
from notes_cli.text.skill import Skill, with_images
from notes_cli.text.toolset import ToolSet, tools_skill

KEEP = 20.0  # seconds of a prefill after which what is there is kept, for a compile that is interrupted
COST = 50.0  # times as long as that takes must have passed since
NEW = "it has not been compiled yet"
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


@dataclass(frozen=True, slots=True)
class Compiled:
    """Where the segment is, how many tokens it has, and why it was compiled: nothing if it was up to date."""

    path: Path
    tokens: int
    reasons: tuple[str, ...]
    blocks: int = 1
    fresh: int = 0  # blocks that were prefilled; the others were there already
    decoded: int = 0  # tokens that were prefilled
    warnings: tuple[str, ...] = ()  # of blocks that refer to each other
    kv: str = "f16"  # what its rows are kept as


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
    skill = meant(workspace, skill)
    workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    if workspace.context.supports("read") is None:
        workspace.measure_rotation()
    if measure is not None:  # another value may be longer
        tokens = len(workspace.left_context) + len(workspace.tokens_of(skill))
        workspace.make_room(tokens + 8 * len(skill.fields))
    segment = plan(workspace, skill, blocks, kv)
    longest = len(segment.context) + len(segment) + 8 * len(skill.fields)  # another value may be longer
    with workspace.scratch_after(segment.context, longest) as notebook:
        if segment.blocks:
            reused, moves = _reused(notebook.context, segment, known)
            segment = replace(segment, layers=_in_blocks(notebook, segment, reused, progress), moves=moves)
        else:
            segment = _in_one(notebook, segment, known, progress, keep, workspace.look)
        kept = small(segment)
        if kept is not segment:
            _check_near(notebook, kept)
        if measure is not None:
            segment = replace(segment, influence=_influence(notebook, segment, measure))
    return replace(segment, layers=kept.layers)


def _check_near(notebook: Notebook, kept: Segment) -> None:
    """Raise UnsupportedError where rounding the rows of the segment that the notebook ends with changes much of what
    comes after it: of some models a few numbers of K are so large that those beside them are lost."""
    again = [int(token) for token in kept.tokens[-PROBE:]][: notebook.room]
    if not again:
        return
    exact = notebook.lookahead(again)
    notebook.truncate(0)
    notebook.append(kept.context)
    if kept.pinned:
        notebook.restore(kept)
    else:
        notebook.splice(kept)
    found = notebook.lookahead(again)
    lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(found, axis=1)
    near = float(((exact * found).sum(axis=1) / lengths).mean())
    if not near >= NEAR:  # NaN is not
        raise UnsupportedError(
            f"{kept.name} cannot be kept as {kept.kv}: the logits after it would have a cosine of {near:.3f} to those "
            f"after its rows as they were computed, less than {NEAR:g}",
            Help.KEEP_AS_COMPUTED(),
        )


def _in_one(
    notebook: Notebook,
    segment: Segment,
    known: Segment | None,
    progress: Progress | None,
    keep: Callable[[Segment], object] | None,
    look: Callable[[Segment], Seen],
) -> Segment:
    if segment.pictures:
        notebook.show(look(segment))
        notebook.flush(progress)
        return replace(segment, layers=_read(notebook, segment))
    if segment.pinned and captured(notebook.context, len(segment)):
        return _carried(notebook, segment, progress)
    there = _shared(segment, known)
    if there and known:
        notebook.splice(known.slice(0, there))
    notebook.append(segment.tokens[there:])
    notebook.flush(_keeping(notebook, segment, keep, progress) if keep and not segment.pinned else progress)
    return replace(segment, layers=_read(notebook, segment))


def _carried(notebook: Notebook, segment: Segment, progress: Progress | None) -> Segment:
    """The rows of a segment whose model has recurrent layers, and how their state goes on through it, where its graph
    can be captured."""
    seam, end = _ends(notebook.context, len(segment))
    notebook.append(segment.tokens[:seam])
    notebook.flush()
    carry = None
    with notebook.context.capturing(notebook.sequence) as found:
        notebook.append(segment.tokens[seam:end])
        notebook.flush(progress)
        with suppress(EngineError):  # then it can be restored, as without it
            carry = Carry.of(seam, len(segment) - end, found())
    notebook.append(segment.tokens[end:])
    notebook.flush()
    return replace(segment, layers=_read(notebook, segment), carry=carry)


def _ends(context: Context, tokens: int) -> tuple[int, int]:
    """Between which of a segment's tokens a state is carried; the others are decoded wherever it is."""
    first, last = context.margins
    return max(first, min(SEAM, tokens // 4)), tokens - last


def captured(context: Context, tokens: int) -> bool:
    """Whether a compile of so many tokens captures how they change the state of recurrent layers: where it is going to
    be carried through them. It takes a part of the time and bytes that nobody else should have to spend."""
    if not context.carries or context.supports("carry") is not None:
        return False
    seam, end = _ends(context, tokens)
    return seam < end


def _keeping(
    notebook: Notebook, segment: Segment, keep: Callable[[Segment], object], progress: Progress | None
) -> Progress:
    """Progress that has what is there kept now and then."""
    kept, cost = time.monotonic(), 0.0

    def told(done: int, total: int) -> None:
        nonlocal kept, cost
        if progress:
            progress(done, total)
        now = time.monotonic()
        if done < total and now - kept > max(KEEP, COST * cost):
            count = len(notebook) - len(notebook.pending) - segment.base
            rows = _read(notebook, segment, count)
            keep(replace(segment, text="", tokens=segment.tokens[:count], fields=(), layers=rows, kv="f16"))
            kept = time.monotonic()
            cost = kept - now

    return told


def _read(notebook: Notebook, segment: Segment, count: int | None = None) -> tuple[LayerRows, ...]:
    """The rows of the segment, which the notebook ends with, or of its first `count` tokens."""
    first, sequence = segment.first, notebook.sequence
    end = len(notebook) if count is None else segment.base + count
    if segment.axes is not None:  # rows share positions
        rows, axes = notebook.context.read_axes(sequence, first, end - first, base=first, dtype=segment.row_type)
        if (axes[segment.base - first :] != segment.axes + segment.base).any():
            raise EngineError(f"the rows of {segment.name} are not where they were to be")
        return rows
    return notebook.context.read(sequence, first, end - first, base=first, dtype=segment.row_type)


def _shared(segment: Segment, known: Segment | None) -> int:
    """How many first tokens of the segment have the rows that they would get in `known`."""
    if known is None or known.blocks or segment.blocks or segment.pinned or not _alike(known, segment):
        return 0
    same = min(len(known), len(segment))
    differ = np.flatnonzero(known.tokens[:same] != segment.tokens[:same])
    return int(differ[0]) if len(differ) else same


def _in_blocks(
    notebook: Notebook, segment: Segment, known: Sequence[Segment | None], progress: Progress | None
) -> tuple[LayerRows, ...]:
    """Prefill the blocks that are not known, put all of them side by side, and read the whole."""
    parts = [segment.tokens[first:last] for first, last in segment.spans]
    new = [tokens for tokens, part in zip(parts, known, strict=True) if part is None]
    plain = replace(segment, fields=(), influence={}, blocks=(), moves=())
    rows = prefill(notebook, segment.context, new, segment.row_type, progress) if new else iter(())
    blocks = [
        part or replace(plain, tokens=tokens, layers=next(rows)) for tokens, part in zip(parts, known, strict=True)
    ]
    notebook.truncate(0)
    notebook.append(segment.context)
    for block in blocks:
        notebook.splice(block)
    return _read(notebook, segment)


def _reused(context: Context, segment: Segment, known: Segment | None) -> tuple[list[Segment | None], tuple[int, ...]]:
    """For each block one of the known segment with the same tokens, compiled in the same way, that can be placed here;
    and how often its rows will have been moved. Beyond MOVES it is better computed again."""
    if known is None or not _alike(known, segment):
        return [None] * len(segment.blocks), (0,) * len(segment.blocks)
    counts = known.moves or (0,) * len(known.spans)
    found = {
        known.tokens[first:last].tobytes(): (known.slice(first, last), count)
        for (first, last), count in zip(known.spans, counts, strict=True)
    }
    reused: list[Segment | None] = []
    moves = []
    for first, last in segment.spans:
        part, count = found.get(segment.tokens[first:last].tobytes(), (None, 0))
        if part is not None:
            count += part.base != segment.base + first
            if count > MOVES or context.can_move(part.base, segment.base + first, len(part)) is not None:
                part, count = None, 0
        reused.append(part)
        moves.append(count)
    return reused, tuple(moves)


def _alike(known: Segment, segment: Segment) -> bool:
    same_left = np.array_equal(known.context, segment.context)
    same = same_left and known.base == segment.base and not known.pinned and not any(quantized(known.kv))
    same = same and not known.media and not segment.media  # whose tokens do not tell which images they are of
    return same and not known.identity.differences(segment.identity)


def _influence(notebook: Notebook, segment: Segment, measure: Progress) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    names = dict.fromkeys(span.name for span in segment.fields)
    for name in names:
        found[name] = influence(notebook, segment, name)
        measure(len(found), len(names))
    return found


def plan(workspace: Workspace, skill: Skill, blocks: Blocks | None = None, kv: str = "f16") -> Segment:
    """What compiling the skill would give, without its rows: enough for a dry run. Raise UnsupportedError where this
    model's rows cannot be kept so."""
    skill, left = meant(workspace, skill), workspace.left_context
    seen = _seen(workspace, skill)
    tokens = seen.tokens if seen else workspace.tokens_of(skill)
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
        pinned=pinned(workspace),
        source=origin(skill),
        tools=bool(skill.runs),
        stamp=skill.stamp,
        kv=kv,
        media=seen.media if seen else (),
        axes=seen.axes if seen else None,
        projector=workspace.projector if seen else "",
        pictures=tuple(Pictured(one.start, one.end, one.picture.data) for one in skill.pictures),
    )
    if segment.pinned and segment.axes is not None:
        why = workspace.context.supports("splice")
        raise UnsupportedError(f"{has}, whose rows cannot be put back on this model: {why}")
    return segment if blocks in (None, 1) else _cut(workspace, segment, blocks)


def _seen(workspace: Workspace, skill: Skill) -> Seen | None:
    """A skill with images as a whole, these not looked at; None without any."""
    if not skill.pictures:
        return None
    from notes_cli.engine.eye import joined

    return joined([part for *_, part in workspace.stretches(skill)])


def _fields_beside(workspace: Workspace, skill: Skill) -> tuple[FieldSpan, ...]:
    """The tokens that hold each field's value, in the texts between images."""
    found: list[FieldSpan] = []
    row = 0
    for start, end, part in workspace.stretches(skill):
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


def pinned(workspace: Workspace) -> bool:
    """Whether rows of this model cannot be moved, so that they are kept with those of the left context."""
    return workspace.context.supports("splice") is not None


def allowed(workspace: Workspace, tokens: int, *, carried: bool = False) -> str:
    """Where a skill of so many tokens can be placed on this model, in a sentence. `carried`: how it changes the state
    of recurrent layers has been captured."""
    context, base = workspace.context, len(workspace.left_context)
    reason = context.supports("splice")
    if reason and context.supports("carry") is None:
        _ = workspace.identity  # and with it whether a state may be carried
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
    if all(layer.rope < 0 for layer in context.layers):
        return "It can be spliced anywhere, as it is"
    return f"It can be spliced anywhere; keys that move are rounded to {context.options.type_k} once more"


def check_support(workspace: Workspace, name: str) -> None:
    """Raise UnsupportedError where this model's rows can neither be moved nor put back."""
    for operation in ("read", "restore"):
        reason = workspace.context.supports(operation)
        if reason:
            raise UnsupportedError(f"{name} cannot be compiled for {workspace.model.name}: {reason}")


def _check_kept(workspace: Workspace, name: str, kv: str) -> None:
    """Raise UnsupportedError where this model's rows cannot be kept in that type."""
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


def compile_to_library(
    workspace: Workspace,
    skill: Skill,
    *,
    force: bool = False,
    progress: Progress | None = None,
    output: Path | None = None,
    measure: Progress | None = None,
    blocks: Blocks | None = None,
    kv: str | None = None,
    say: Say | None = None,
    wait: float = -1,
) -> Compiled:
    """Compile the skill into the library (or to `output`) unless what is there is up to date.

    `blocks`: 1 for one block; None for as many as there are, or one. `kv`: what its file keeps rows as; None for as it
    does now, or f16. `say` is told when another process is waited for, for `wait` seconds, negative: for ever. Raise
    CompilingError where that takes longer, SegmentError if `output` is a file that is no segment, TakenError if what is
    there holds the text of another source, unless `force` says to write over it; UnwritableError if the disk refuses.
    """
    check_support(workspace, skill.name)
    skill = meant(workspace, skill, say, output, force=force)
    if not skill.pictures or workspace.sees:
        workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    if measure is not None and skill.pictures:
        what = f"{skill.name} has an image, and the influence of its fields cannot be measured"
        raise UnsupportedError(what, "Leave that out, and correct it by errata")
    if output is not None:
        if output.exists() and not force:
            _check_output(skill, output)
        return _compile_to(workspace, skill, output, force, progress, measure, blocks, kv, begins=False)
    path = workspace.library.path(skill.name, workspace.identity)
    if not force and not stale(workspace, skill, path, measured=measure is not None, blocks=blocks, kv=kv):
        _move_along(workspace, skill, path)  # else nothing is written: the library may be read-only
        return _up_to_date(path)
    with workspace.library.compiling(skill.name, workspace.identity, wait, say):
        why = None if force else taken(workspace, skill)
        if why:
            raise TakenError(why, Help.OTHER_NAME_OR_FORCE())
        return _compile_to(workspace, skill, path, force, progress, measure, blocks, kv, begins=not force)


def meant(
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
    if not workspace.sees and (
        force or not _has_images(output or workspace.library.path(skill.name, workspace.identity))
    ):
        files = [link for link in skill.links if not link.address]
        if say and files:
            remedy = None if all(link.why for link in files) else Help.NAME_PROJECTOR(model=workspace.model.name)
            targets = listed([link.target[:200] for link in files], most=3)
            say(Notice(f"warning: {name} shows {targets}: that is compiled as the text it is", remedy))
        return replace(skill, links=())
    for link in skill.links:
        if say and link.why:
            say(Notice(f"warning: {name} shows {link.target[:200]}, which is compiled as the text it is: {link.why}"))
    return with_images(skill)


def _has_images(path: Path) -> bool:
    """Whether a segment there was compiled with images."""
    try:
        return path.exists() and bool(peek(path).media)
    except SegmentError:
        return False


def _compile_to(
    workspace: Workspace,
    skill: Skill,
    path: Path,
    force: bool,
    progress: Progress | None,
    measure: Progress | None,
    blocks: Blocks | None,
    kv: str | None,
    *,
    begins: bool,
) -> Compiled:
    """`begins`: goes on with what an interrupted compile has left, and leaves that itself. Not beside a file of the
    user's, where nobody would remove it, and another user may have put it."""
    measured = measure is not None
    reasons = ["it was asked for"] if force else stale(workspace, skill, path, measured=measured, blocks=blocks, kv=kv)
    if not reasons:
        return _up_to_date(path)
    known = None if force else _known(path)
    kv = kv or ("f16" if skill.pictures else _kept(path))
    if blocks is None and known:
        blocks = max(1, len(known.blocks))
    if begins and (part := begun.kept(path)) is not None:
        planned = plan(workspace, skill, blocks, kv)
        known = max(known, part, key=lambda one: _shared(planned, one))  # the first of equals
    writer = f"notes {notes_cli.__version__}"

    def keep(part: Segment) -> None:
        with suppress(UnwritableError):  # the compile itself will say so
            write_segment(begun.beside(path), part, writer=writer)

    segment = compile_skill(
        *(workspace, skill, progress),
        measure=measure,
        blocks=blocks,
        kv=kv,
        known=known,
        keep=keep if begins else None,
    )
    write_segment(path, segment, writer=writer)
    begun.forget(path)
    return _made(workspace.context, path, segment, known, tuple(reasons))


def _made(context: Context, path: Path, segment: Segment, known: Segment | None, reasons: tuple[str, ...]) -> Compiled:
    """What was done for a segment of which `known` was there."""
    if not segment.blocks:
        return Compiled(
            path, len(segment), reasons, fresh=1, decoded=len(segment) - _shared(segment, known), kv=segment.kv
        )
    parts = zip(segment.spans, _reused(context, segment, known)[0], strict=True)
    fresh = [last - first for (first, last), part in parts if part is None]
    return Compiled(path, len(segment), reasons, len(segment.blocks), len(fresh), sum(fresh), kv=segment.kv)


def _up_to_date(path: Path) -> Compiled:
    info = peek(path)
    return Compiled(path, len(info.tokens), (), max(1, len(info.blocks)), kv=info.kv)


def _known(path: Path) -> Segment | None:
    """What was compiled before, if there is anything and it is sound."""
    try:
        return open_segment(path) if path.exists() else None
    except DamagedError:
        return None


def _kept(path: Path) -> str:
    """What the rows that are there are kept as."""
    try:
        return peek(path).kv if path.exists() else "f16"
    except DamagedError:
        return "f16"


def origin(skill: Skill) -> str:
    """Where the skill's text came from, as a segment keeps it: an absolute path (in which a line break, and what is not
    UTF-8, is spelt), or several, "-" for standard input, or "" where that is not known."""
    if skill.source in ("", "-"):
        return skill.source
    path = BETWEEN.join(spelt(os.path.abspath(file)) for file in files_of(skill.source))
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def taken(workspace: Workspace, skill: Skill) -> str | None:
    """Why the skill's name is not its: the library has another text of that name, and it came from elsewhere. None if
    it may have it. The file for this model decides; where there is none, those for others."""
    path = workspace.library.path(skill.name, workspace.identity)
    infos = [entry.info for entry in workspace.library.entries(skill.name) if entry.info]
    infos = [info for info in infos if info.path == path] or infos
    if not infos or _belongs(skill, infos):
        return None
    there, here = source_text(infos[0].source), source_text(origin(skill))
    return f"the library has a skill {skill.name} already, from {there}; this one is from {here}"


def _belongs(skill: Skill, infos: Iterable[SegmentInfo]) -> bool:
    """Whether nothing of another source is lost if the skill takes the place of these."""
    return any(info.text == skill.text or came_from(info, origin(skill)) for info in infos)


def _move_along(workspace: Workspace, skill: Skill, path: Path) -> None:
    """Where the same text is now that its file is gone, or if it is not known where it was, it came from."""
    source, old = origin(skill), peek(path).source
    if source in ("", "-", old) or any(map(os.path.lexists, files_of(old))):
        return
    with suppress(SegmentError), workspace.library.compiling(skill.name, workspace.identity, wait=0):
        info, segment = peek(path), open_segment(path)
        if segment.text == skill.text:
            segment = replace(segment, source=source, stamp=skill.stamp)
            write_segment(path, segment, writer=info.writer, created=info.created)


def _check_output(skill: Skill, path: Path) -> None:
    """What is named as the output by mistake must not be lost: a model, a text, another skill."""
    if not path.is_file():
        raise SegmentError(f"{path} is there already and is no regular file", "Choose another file")
    try:
        info = peek(path)
    except DamagedError as error:
        what = f"{path} is there already and is not a sound segment"
        raise SegmentError(what, Help.OTHER_FILE_OR_FORCE()) from error
    if not _belongs(skill, [info]):
        raise TakenError(
            f"{path} holds the skill {info.name}, from {source_text(info.source)}; this one is from "
            f"{source_text(origin(skill))}",
            Help.OTHER_FILE_OR_FORCE(),
        )


def stale(
    workspace: Workspace,
    skill: Skill,
    path: Path,
    *,
    measured: bool = False,
    blocks: Blocks | None = None,
    kv: str | None = None,
) -> list[str]:
    """Why the file at `path` is not this skill compiled for this workspace, in words; empty if it is.

    `measured`: the influence of its fields must be there, too. `blocks`: it must be compiled in these; None: in any.
    `kv` likewise of what its rows are kept as.
    """
    if not path.exists():
        return [NEW]
    try:
        info = peek(path)
    except DamagedError as error:
        return [error.what]
    skill = meant(workspace, skill, output=path)
    here = bool(skill.pictures) and workspace.sees
    # Without a projector images are what they were, if their bytes are.
    places = [(one.start, one.end) for one in info.pictures]
    same = info.text == skill.text and places == [(one.start, one.end) for one in skill.pictures]
    tokens = info.tokens if skill.pictures and not here and same else workspace.tokens_of(skill)
    found = []
    if here and info.projector != workspace.projector:
        found.append(
            "the projector, or its limits, have changed" if info.media else "an image in it was text until now"
        )
    _ = workspace.identity  # and with it whether a state is carried
    if info.pinned and not info.carried and not skill.pictures and captured(workspace.context, len(tokens)):
        found.append(UNCAPTURED)
    return found + changes(
        info,
        text=skill.text,
        tokens=tokens,
        description=skill.description,
        fields=skill.fields,
        identity=workspace.identity,
        context=workspace.left_context,
        pinned=pinned(workspace),
        influence=measured,
        blocks=None if blocks is None else plan(workspace, skill, blocks).blocks,
        kv=kv,
    )
