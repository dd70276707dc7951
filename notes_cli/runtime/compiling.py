"""Compiling: prefill a skill once, after the left context it will mostly have, and keep its rows.

Only the skill's own rows are kept: its first token is then no attention sink, and the segment fits anywhere. Where rows
cannot be moved, those of the left context are kept with them, and the segment fits the start of a prompt.

Tokens that were compiled before, after the same ones, are taken from the file that is there, rows unchanged: a change
near the end of a text is a prefill of its end, and a compile that was interrupted or killed goes on.

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
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.segment import LayerRows, Segment
from notes_cli.errors import (
    DamagedError,
    Help,
    Progress,
    Say,
    SegmentError,
    SkillError,
    TakenError,
    UnsupportedError,
    UnwritableError,
)
from notes_cli.library import begun
from notes_cli.library.container import SegmentInfo, open_segment, peek, write_segment
from notes_cli.library.store import came_from, changes, source_text
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.blocks import Blocks, block_starts, references
from notes_cli.text.names import BETWEEN, files_of
from notes_cli.text.skill import Skill
from notes_cli.text.toolset import ToolSet, tools_skill

KEEP = 20.0  # seconds of a prefill after which what is there is kept, for a compile that is interrupted
COST = 50.0  # times as long as that takes must have passed since
NEW = "it has not been compiled yet"
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


def compile_skill(
    workspace: Workspace,
    skill: Skill,
    progress: Progress | None = None,
    *,
    measure: Progress | None = None,
    blocks: Blocks | None = None,
    known: Segment | None = None,
    keep: Callable[[Segment], object] | None = None,
) -> Segment:
    """Prefill the skill and read its rows.

    `progress` is told tokens done and in all. `measure`: also measure the influence of each field, a prefill a field;
    it is told how many are done. `blocks`: in so many parts, or one a heading, each on its own. What `known` has,
    blocks or the first tokens, is taken from there. `keep` is given what there is now and then, where it takes long: a
    segment of the first tokens, to be `known` if this is interrupted. Raise UnsupportedError where this model's rows
    cannot be kept, EngineError for more tokens than it was trained for.
    """
    workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    if workspace.context.supports("read") is None:
        workspace.measure_rotation()
    if measure is not None:  # another value may be longer
        tokens = len(workspace.left_context) + len(workspace.tokens_of(skill))
        workspace.make_room(tokens + 8 * len(skill.fields))
    segment = plan(workspace, skill, blocks)
    longest = len(segment.context) + len(segment) + 8 * len(skill.fields)  # another value may be longer
    with workspace.scratch(longest) as notebook:
        if segment.blocks:
            reused, moves = _reused(notebook.context, segment, known)
            segment = replace(segment, layers=_in_blocks(notebook, segment, reused, progress), moves=moves)
        else:
            segment = replace(segment, layers=_in_one(notebook, segment, known, progress, keep))
        if measure is not None:
            segment = replace(segment, influence=_influence(notebook, segment, measure))
    return segment


def _in_one(
    notebook: Notebook,
    segment: Segment,
    known: Segment | None,
    progress: Progress | None,
    keep: Callable[[Segment], object] | None,
) -> tuple[LayerRows, ...]:
    notebook.append(segment.context)
    notebook.flush()
    there = _shared(segment, known)
    if there and known:
        notebook.splice(known.slice(0, there))
    notebook.append(segment.tokens[there:])
    notebook.flush(_keeping(notebook, segment, keep, progress) if keep and not segment.pinned else progress)
    return _read(notebook, segment)


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
            keep(replace(segment, text="", tokens=segment.tokens[:count], fields=(), layers=rows))
            kept = time.monotonic()
            cost = kept - now

    return told


def _read(notebook: Notebook, segment: Segment, count: int | None = None) -> tuple[LayerRows, ...]:
    """The rows of the segment, which the notebook ends with, or of its first `count` tokens."""
    first, sequence = segment.first, notebook.sequence
    end = len(notebook) if count is None else segment.base + count
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
    same = same_left and known.base == segment.base and not known.pinned
    return same and not known.identity.differences(segment.identity)


def _influence(notebook: Notebook, segment: Segment, measure: Progress) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    names = dict.fromkeys(span.name for span in segment.fields)
    for name in names:
        found[name] = influence(notebook, segment, name)
        measure(len(found), len(names))
    return found


def plan(workspace: Workspace, skill: Skill, blocks: Blocks | None = None) -> Segment:
    """What compiling the skill would give, without its rows: enough for a dry run."""
    tokens, left = workspace.tokens_of(skill), workspace.left_context
    workspace.make_room(len(left) + len(tokens))
    check_support(workspace, skill.name)
    fields = field_spans(workspace.model, skill, tokens)
    segment = Segment(
        *(skill.name, skill.description, skill.text, tokens, len(left), left, fields, workspace.identity),
        layers=(),
        pinned=pinned(workspace),
        source=origin(skill),
        tools=bool(skill.runs),
        stamp=skill.stamp,
    )
    return segment if blocks in (None, 1) else _cut(workspace, segment, blocks)


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


def allowed(workspace: Workspace, tokens: int) -> str:
    """Where a skill of so many tokens can be placed on this model, in a sentence."""
    context, base = workspace.context, len(workspace.left_context)
    reason = context.supports("splice")
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
    say: Say | None = None,
    wait: float = -1,
) -> Compiled:
    """Compile the skill into the library (or to `output`) unless what is there is up to date.

    `blocks`: 1 for one block; None for as many as there are, or one. `say` is told when another process is waited for,
    for `wait` seconds, negative: for ever. Raise CompilingError where that takes longer, SegmentError if `output` is a
    file that is no segment, TakenError if what is there holds the text of another source, unless `force` says to write
    over it; UnwritableError if the disk refuses.
    """
    workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    if output is not None:
        if output.exists() and not force:
            _check_output(skill, output)
        return _compile_to(workspace, skill, output, force, progress, measure, blocks, begins=False)
    check_support(workspace, skill.name)
    path = workspace.library.path(skill.name, workspace.identity)
    if not force and not stale(workspace, skill, path, measured=measure is not None, blocks=blocks):
        _move_along(workspace, skill, path)  # else nothing is written: the library may be read-only
        return _up_to_date(path)
    with workspace.library.compiling(skill.name, workspace.identity, wait, say):
        why = None if force else taken(workspace, skill)
        if why:
            raise TakenError(why, Help.OTHER_NAME_OR_FORCE())
        return _compile_to(workspace, skill, path, force, progress, measure, blocks, begins=not force)


def _compile_to(
    workspace: Workspace,
    skill: Skill,
    path: Path,
    force: bool,
    progress: Progress | None,
    measure: Progress | None,
    blocks: Blocks | None,
    *,
    begins: bool,
) -> Compiled:
    """`begins`: goes on with what an interrupted compile has left, and leaves that itself. Not beside a file of the
    user's, where nobody would remove it, and another user may have put it."""
    measured = measure is not None
    reasons = ["it was asked for"] if force else stale(workspace, skill, path, measured=measured, blocks=blocks)
    if not reasons:
        return _up_to_date(path)
    known = None if force else _known(path)
    if blocks is None and known:
        blocks = max(1, len(known.blocks))
    if begins and (part := begun.kept(path)) is not None:
        planned = plan(workspace, skill, blocks)
        known = max(known, part, key=lambda one: _shared(planned, one))  # the first of equals
    writer = f"notes {notes_cli.__version__}"

    def keep(part: Segment) -> None:
        with suppress(UnwritableError):  # the compile itself will say so
            write_segment(begun.beside(path), part, writer=writer)

    segment = compile_skill(
        workspace, skill, progress, measure=measure, blocks=blocks, known=known, keep=keep if begins else None
    )
    write_segment(path, segment, writer=writer)
    begun.forget(path)
    return _made(workspace.context, path, segment, known, tuple(reasons))


def _made(context: Context, path: Path, segment: Segment, known: Segment | None, reasons: tuple[str, ...]) -> Compiled:
    """What was done for a segment of which `known` was there."""
    if not segment.blocks:
        return Compiled(path, len(segment), reasons, fresh=1, decoded=len(segment) - _shared(segment, known))
    parts = zip(segment.spans, _reused(context, segment, known)[0], strict=True)
    fresh = [last - first for (first, last), part in parts if part is None]
    return Compiled(path, len(segment), reasons, len(segment.blocks), len(fresh), sum(fresh))


def _up_to_date(path: Path) -> Compiled:
    info = peek(path)
    return Compiled(path, len(info.tokens), (), max(1, len(info.blocks)))


def _known(path: Path) -> Segment | None:
    """What was compiled before, if there is anything and it is sound."""
    try:
        return open_segment(path) if path.exists() else None
    except DamagedError:
        return None


def origin(skill: Skill) -> str:
    """Where the skill's text came from, as a segment keeps it: an absolute path (one that is not UTF-8 is spelt), or
    several, "-" for standard input, or "" where that is not known."""
    if skill.source in ("", "-"):
        return skill.source
    path = BETWEEN.join(map(os.path.abspath, files_of(skill.source)))
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
    workspace: Workspace, skill: Skill, path: Path, *, measured: bool = False, blocks: Blocks | None = None
) -> list[str]:
    """Why the file at `path` is not this skill compiled for this workspace, in words; empty if it is.

    `measured`: the influence of its fields must be there, too. `blocks`: it must be compiled in these; None: in any.
    """
    if not path.exists():
        return [NEW]
    try:
        info = peek(path)
    except DamagedError as error:
        return [error.what]
    return changes(
        info,
        text=skill.text,
        tokens=workspace.tokens_of(skill),
        description=skill.description,
        fields=skill.fields,
        identity=workspace.identity,
        context=workspace.left_context,
        pinned=pinned(workspace),
        influence=measured,
        blocks=None if blocks is None else plan(workspace, skill, blocks).blocks,
    )
