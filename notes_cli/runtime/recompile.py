"""Keeping what is compiled: in the library or another file, compiled again where it is out of date.

Who compiles a text that is there already, unchanged and for the same model, gets what is there. What would be lost
stays: a skill of another source, a file that is no segment, images where the projector was forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import notes_cli
from notes_cli.engine.context import Context
from notes_cli.engine.segment import Segment, check_stored_type
from notes_cli.errors import (
    DamagedError,
    Help,
    Progress,
    Say,
    SegmentError,
    TakenError,
    UnsupportedError,
    UnwritableError,
)
from notes_cli.library.container import SegmentInfo, open_segment, peek, write_segment
from notes_cli.library.store import came_from, changes, source_text
from notes_cli.library.unfinished import begun_path, begun_rows, forget_begun
from notes_cli.runtime.compile import (
    UNCAPTURED,
    captures_state,
    check_support,
    compile_skill,
    plan,
    prefix_only,
    recorded_source,
    resolve_images,
    reusable_blocks,
    shared_prefix_length,
)
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.blocks import Blocks, check_blocks
from notes_cli.text.names import files_of
from notes_cli.text.skill import Skill

NEW = "it has not been compiled yet"


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
    seconds: float | None = None  # that their prefill took; None: none was, or it is not known

    def __repr__(self) -> str:
        return f"Compiled({self.path.name!r}, {self.tokens} tokens, {'; '.join(self.reasons) or 'up to date'})"


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
    check_blocks(blocks)
    if kv is not None:
        check_stored_type(kv)
    check_support(workspace, skill.name)
    skill = resolve_images(workspace, skill, say, output, force=force)
    if not skill.pictures or workspace.has_vision:
        spare = 0 if measure is None else 8 * len(skill.fields)  # another value may be longer
        workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)), spare)
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
    if begins and (part := begun_rows(path)) is not None:
        planned = plan(workspace, skill, blocks, kv)
        known = max(
            known, part, key=lambda one: shared_prefix_length(workspace.context, planned, one)
        )  # the first of equals
    writer = f"notes {notes_cli.__version__}"

    def keep(part: Segment) -> None:
        with suppress(UnwritableError):  # the compile itself will say so
            write_segment(begun_path(path), part, writer=writer)

    segment = compile_skill(
        *(workspace, skill, progress),
        measure=measure,
        blocks=blocks,
        kv=kv,
        known=known,
        keep=keep if begins else None,
    )
    write_segment(path, segment, writer=writer)
    forget_begun(path)
    return _made(workspace.context, path, segment, known, tuple(reasons))


def _made(context: Context, path: Path, segment: Segment, known: Segment | None, reasons: tuple[str, ...]) -> Compiled:
    """What was done for a segment of which `known` was there."""
    blocks, fresh, decoded = 1, 1, len(segment) - shared_prefix_length(context, segment, known)
    if segment.blocks:
        parts = zip(segment.spans, reusable_blocks(context, segment, known)[0], strict=True)
        new = [last - first for (first, last), part in parts if part is None]
        blocks, fresh, decoded = len(segment.blocks), len(new), sum(new)
    seconds = segment.prefill.seconds if segment.prefill else None
    if seconds is not None and known is not None and known.prefill and decoded < len(segment):
        seconds = max(0.0, seconds - known.prefill.share(len(segment) - decoded)) if decoded else None
    return Compiled(path, len(segment), reasons, blocks, fresh, decoded, kv=segment.kv, seconds=seconds)


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


def taken(workspace: Workspace, skill: Skill) -> str | None:
    """Why the skill's name is not its: the library has another text of that name, and it came from elsewhere. None if
    it may have it. The file for this model decides; where there is none, those for others."""
    path = workspace.library.path(skill.name, workspace.identity)
    infos = [entry.info for entry in workspace.library.entries(skill.name) if entry.info]
    infos = [info for info in infos if info.path == path] or infos
    if not infos or _belongs(skill, infos):
        return None
    there, here = source_text(infos[0].source), source_text(recorded_source(skill))
    return f"the library has a skill {skill.name} already, from {there}; this one is from {here}"


def _belongs(skill: Skill, infos: Iterable[SegmentInfo]) -> bool:
    """Whether nothing of another source is lost if the skill takes the place of these."""
    return any(info.text == skill.text or came_from(info, recorded_source(skill)) for info in infos)


def _move_along(workspace: Workspace, skill: Skill, path: Path) -> None:
    """Where the same text is now that its file is gone, or if it is not known where it was, it came from."""
    source, old = recorded_source(skill), peek(path).source
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
            f"{source_text(recorded_source(skill))}",
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
    skill = resolve_images(workspace, skill, output=path)
    here = bool(skill.pictures) and workspace.has_vision
    # Without a projector images are what they were, if their bytes are.
    places = [(one.start, one.end) for one in info.pictures]
    same = info.text == skill.text and places == [(one.start, one.end) for one in skill.pictures]
    tokens = info.tokens if skill.pictures and not here and same else workspace.tokens_of(skill)
    found = []
    if here and info.projector != workspace.image_encoding.projector:
        found.append(
            "the projector, or its limits, have changed" if info.media else "an image in it was text until now"
        )
    workspace.refresh_capabilities()
    if info.prefix_only and not info.carried and not skill.pictures and captures_state(workspace.context, len(tokens)):
        found.append(UNCAPTURED)
    return found + changes(
        info,
        text=skill.text,
        tokens=tokens,
        description=skill.description,
        fields=skill.fields,
        identity=workspace.identity,
        context=workspace.left_context,
        prefix_only=prefix_only(workspace),
        influence=measured,
        blocks=None if blocks is None else plan(workspace, skill, blocks).blocks,
        kv=kv,
    )
