"""Stores compiled and imported skills in the library or another file, and recompiles them only where they are outdated.

Nothing irreplaceable is overwritten: a skill from another source, a file that is no segment, or images when no
projector is given.

All K/V of an imported segment is compared with a prefill. A checksum detects damage, not forgery. K/V depends on all
earlier tokens in every layer, so only a prefill of the whole text can verify it (check_rows.py), and an import takes as
long as a compile. A sample would be faster, but of 64 tokens in 1,500 it detects a wrong row one time in 23. `trust`
skips the check. For another model the text is compiled instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import notes_cli
from notes_cli.editing.methods import field_spans
from notes_cli.engine.context import Context
from notes_cli.engine.segment import Segment, quantized
from notes_cli.errors import (
    DamagedError,
    EngineError,
    Help,
    Progress,
    Say,
    SegmentError,
    TakenError,
    UnwritableError,
)
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.library.segment_files import checkpoint_path, remove_checkpoint
from notes_cli.library.store import has_source, source_text
from notes_cli.runtime.check_rows import RowCheck, check_rows
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
from notes_cli.runtime.freshness import as_skill
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.fields import Blocks, check_blocks
from notes_cli.text.names import files_of
from notes_cli.text.skill import Skill

NEW = "it has not been compiled yet"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of a compile: file, number of tokens, and reasons, which are empty if it was up to date."""

    path: Path
    tokens: int
    reasons: tuple[str, ...]
    blocks: int = 1
    fresh: int = 0  # blocks prefilled; the others were reused
    decoded: int = 0  # tokens prefilled
    warnings: tuple[str, ...] = ()  # about blocks that refer to each other
    kv: str = "f16"  # stored K/V types
    seconds: float | None = None  # of the prefill; None without one, or if unknown

    def __repr__(self) -> str:
        return f"Compiled({self.path.name!r}, {self.tokens} tokens, {'; '.join(self.reasons) or 'up to date'})"


def compile_to_library(
    workspace: Workspace,
    skill: Skill,
    *,
    force: bool = False,
    progress: Progress | None = None,
    output: Path | None = None,
    blocks: Blocks | None = None,
    kv: str | None = None,
    say: Say | None = None,
    wait: float = -1,
) -> Compiled:
    """Compile the skill into the library (or to `output`) unless the existing file is up to date. `blocks`: 1 for one
    block; None to keep the present number, or one. `kv`: stored K/V types; None to keep the present ones, or f16. `say`
    gets a notice when another process holds the lock, for `wait` seconds, negative: without limit. Raises
    CompilingError after that, SegmentError if `output` is a file that is no segment, TakenError if the existing file is
    from another source and `force` is not set; UnwritableError if writing fails."""
    check_blocks(blocks)
    if kv is not None:
        quantized(kv)  # raises for another type
    check_support(workspace, skill.name)
    skill = resolve_images(workspace, skill, say, output, force=force)
    if not skill.pictures or workspace.has_vision:
        workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    if output is not None:
        if output.exists() and not force:
            _check_output(skill, output)
        return _compile_to(workspace, skill, output, force, progress, blocks, kv, begins=False)
    path = workspace.library.path(skill.name, workspace.identity)
    if not force and not stale(workspace, skill, path, blocks=blocks, kv=kv):
        _update_source(workspace, skill, path)  # otherwise nothing is written: the library may be read-only
        return _up_to_date(path)
    with workspace.library.compiling(skill.name, workspace.identity, wait, say):
        why = None if force else taken(workspace, skill)
        if why:
            raise TakenError(why, Help.OTHER_NAME_OR_FORCE())
        return _compile_to(workspace, skill, path, force, progress, blocks, kv, begins=not force)


def _compile_to(
    workspace: Workspace,
    skill: Skill,
    path: Path,
    force: bool,
    progress: Progress | None,
    blocks: Blocks | None,
    kv: str | None,
    *,
    begins: bool,
) -> Compiled:
    """`begins`: resume from a checkpoint and write checkpoints. Only in the library: next to a user's file they would
    be left behind, or could be another user's."""
    reasons = ["it was asked for"] if force else stale(workspace, skill, path, blocks=blocks, kv=kv)
    if not reasons:
        return _up_to_date(path)
    known = None if force else _existing(path)
    kv = kv or ("f16" if skill.pictures else _stored_type(path))
    if blocks is None and known and not (skill.cuts and known.blocks):
        blocks = max(1, len(known.blocks))
    if begins and (part := _checkpoint(path)) is not None:
        planned = plan(workspace, skill, blocks, kv)
        known = max(
            known, part, key=lambda candidate: shared_prefix_length(workspace.context, planned, candidate)
        )  # the first of equals
    writer = f"notes {notes_cli.__version__}"

    def keep(part: Segment) -> None:
        with suppress(UnwritableError):  # the compile itself will say so
            write_segment(checkpoint_path(path), part, writer=writer)

    segment = compile_skill(
        *(workspace, skill, progress),
        blocks=blocks,
        kv=kv,
        known=known,
        keep=keep if begins else None,
    )
    write_segment(path, segment, writer=writer)
    remove_checkpoint(path)
    return _result(workspace.context, path, segment, known, tuple(reasons))


def _result(
    context: Context, path: Path, segment: Segment, known: Segment | None, reasons: tuple[str, ...]
) -> Compiled:
    """Make the result of a compile that reused `known`."""
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


def _existing(path: Path) -> Segment | None:
    """Open the existing segment, None if it is missing or damaged."""
    try:
        return open_segment(path) if path.exists() else None
    except DamagedError:
        return None


def _checkpoint(path: Path) -> Segment | None:
    """Open the checkpoint of a segment file, None if it is missing or unusable."""
    part = checkpoint_path(path)
    with suppress(OSError, SegmentError):
        return open_segment(part) if part.is_file() and not part.is_symlink() else None
    return None


def _stored_type(path: Path) -> str:
    """Return the stored K/V types of the existing file."""
    try:
        return peek(path).kv if path.exists() else "f16"
    except DamagedError:
        return "f16"


def taken(workspace: Workspace, skill: Skill) -> str | None:
    """Return why the skill cannot have its name: the library has a skill of this name from another source. None if it
    can. The file for this model decides, else those for other models."""
    path = workspace.library.path(skill.name, workspace.identity)
    infos = [entry.info for entry in workspace.library.entries(skill.name) if entry.info]
    infos = [info for info in infos if info.path == path] or infos
    if not infos or _is_same_source(skill, infos):
        return None
    library_source, own_source = source_text(infos[0].source), source_text(recorded_source(skill))
    return f"the library has a skill {skill.name} already, from {library_source}; this one is from {own_source}"


def _is_same_source(skill: Skill, infos: Iterable[Segment]) -> bool:
    """True if replacing these segments loses no other source."""
    return any(info.text == skill.text or has_source(info, recorded_source(skill)) for info in infos)


def _update_source(workspace: Workspace, skill: Skill, path: Path) -> None:
    """Update the source of a segment whose text moved to another file, or had no known source."""
    source, old = recorded_source(skill), peek(path).source
    if source in ("", "-", old) or any(map(os.path.lexists, files_of(old))):
        return
    with suppress(SegmentError), workspace.library.compiling(skill.name, workspace.identity, wait=0):
        info, segment = peek(path), open_segment(path)
        if segment.text == skill.text:
            segment = replace(segment, source=source, stamp=skill.stamp)
            write_segment(path, segment, writer=info.writer, created=info.created)


def _check_output(skill: Skill, path: Path) -> None:
    """Protect a file given as output by mistake: a model, a text, another skill."""
    if not path.is_file():
        raise SegmentError(f"{path} is there already and is no regular file", "Choose another file")
    try:
        info = peek(path)
    except DamagedError as error:
        text = f"{path} is there already and is not a sound segment"
        raise SegmentError(text, Help.OTHER_FILE_OR_FORCE()) from error
    if not _is_same_source(skill, [info]):
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
    blocks: Blocks | None = None,
    kv: str | None = None,
) -> list[str]:
    """Return reasons why the file is not this skill compiled for this workspace; empty if it is. `blocks`,
    `kv`: required values; None for any."""
    if not path.exists():
        return [NEW]
    try:
        info = peek(path)
    except DamagedError as error:
        return [error.what]
    skill = resolve_images(workspace, skill, output=path)
    with_encoder = bool(skill.pictures) and workspace.has_vision
    # Without a vision encoder, equal image files count as unchanged.
    image_spans = [(image.start, image.end) for image in info.pictures]
    same = info.text == skill.text and image_spans == [(image.start, image.end) for image in skill.pictures]
    tokens = info.tokens if skill.pictures and not with_encoder and same else workspace.tokens_of(skill)
    reasons = []
    if with_encoder and info.projector != workspace.image_encoding.projector:
        reasons.append(
            "the projector, or its limits, have changed" if info.media else "an image in it was text until now"
        )
    workspace.refresh_capabilities()
    uncaptured = info.prefix_only and info.carry is None and not skill.pictures
    if uncaptured and captures_state(workspace.context, len(tokens)):
        reasons.append(UNCAPTURED)
    reasons += info.identity.differences(workspace.identity)
    if info.text != skill.text:
        reasons.append("the text has changed")
    elif [(span.name, span.value, span.start, span.end) for span in info.fields] != list(skill.fields):
        reasons.append("the fields have changed")
    if info.text == skill.text and not np.array_equal(info.tokens, tokens):
        reasons.append("its text gives different tokens now")
    if info.description != skill.description:
        reasons.append("the description has changed")
    if not np.array_equal(info.context, workspace.left_context):
        reasons.append("it was compiled after a different left context")
    if info.prefix_only != prefix_only(workspace):
        reasons.append("its rows can be moved now" if info.prefix_only else "its rows cannot be moved any more")
    if blocks is not None and info.text == skill.text and info.blocks != plan(workspace, skill, blocks).blocks:
        how = f"{len(info.blocks)} blocks" if info.blocks else "one block"
        reasons.append(f"it was compiled in {how}")
    if kv not in (None, info.kv):
        reasons.append(f"its rows are kept as {info.kv}, not as {kv}")
    return reasons


@dataclass(frozen=True, slots=True)
class Imported:
    """Result of an import: K/V imported, or the text compiled for these reasons."""

    name: str
    path: Path
    tokens: int
    how: str  # "rows", "text", or "kept" if it existed already
    reasons: tuple[str, ...] = ()  # why the text was compiled
    checked: int = 0  # tokens recomputed
    farthest: float = 0.0  # largest distance of their rows, relative to a row's length


def import_segment(
    workspace: Workspace,
    source: Path,
    *,
    name: str | None = None,
    trust: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
) -> Imported:
    """Import a segment file into the library. `trust`: take its K/V without recomputing it. `force`: replace a text
    from another source. Raises SegmentError for a file that is damaged or differs from what this model computes,
    TakenError for a name in use by another text."""
    segment = open_segment(source)
    if segment.tools:
        raise SegmentError(f"{source} holds tools as one model's template tells of them", "Compile their file")
    skill = replace(as_skill(segment, segment.pictures, str(source)), name=name or segment.name)
    if not segment.media or workspace.has_vision:
        workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    why = differences(workspace, segment)
    if not why and not trust:
        why = ["its images are looked at again"] if segment.media else []
    if why:
        compiled = compile_to_library(
            workspace, skill, force=force, progress=progress, blocks=len(segment.blocks) or 1, kv=segment.kv, say=say
        )
        return Imported(skill.name, compiled.path, compiled.tokens, "text" if compiled.reasons else "kept", tuple(why))
    workspace.measure_rotation()
    with workspace.library.compiling(skill.name, workspace.identity, say=say) as path:
        taken_by = None if force else taken(workspace, skill)
        if taken_by:
            raise TakenError(taken_by, Help.OTHER_NAME_OR_FORCE())
        if not force and _is_in_library(path, segment):
            return Imported(skill.name, path, len(segment), "kept")
        check = RowCheck(0, 0, 0.0) if trust else _verify(workspace, source, segment, progress)
        spans = (
            segment.fields if segment.media else field_spans(workspace.model, skill.text, skill.fields, segment.tokens)
        )
        anonymous = replace(segment, source="", stamp=(), prefill=None, backend="")
        imported = replace(anonymous, name=skill.name, fields=spans)
        if check.unchecked:  # its state transitions
            imported = replace(imported, carry=None)
        write_segment(path, imported, writer=f"notes {notes_cli.__version__}")
    return Imported(skill.name, path, len(segment), "rows", (), check.tokens, check.farthest)


def differences(workspace: Workspace, segment: Segment) -> list[str]:
    """Return reasons why a segment's K/V cannot be what this model computes for its text; empty if it may be."""
    reasons = segment.identity.differences(workspace.identity)
    if reasons:
        return reasons
    if not segment.media and not np.array_equal(segment.tokens, workspace.model.tokenize(segment.text)):
        reasons.append("its text gives other tokens here")
    if not np.array_equal(segment.context, workspace.left_context):
        reasons.append("it was compiled after a different left context")
    if segment.prefix_only != prefix_only(workspace):
        reasons.append("its rows are kept in another way here")
    return reasons


def _verify(workspace: Workspace, source: Path, segment: Segment, progress: Progress | None) -> RowCheck:
    """Compare the file's K/V with a prefill. Raises SegmentError for a mismatch."""
    try:
        check = check_rows(workspace, segment, progress)
    except EngineError as error:  # NaN, or other shapes
        raise SegmentError(f"{source} cannot be used: {error.what}", error.remedy) from error
    if not check.right:
        raise SegmentError(
            f"{source} does not hold what this model computes: {check.reason}. Somebody forged it, or computed it "
            "otherwise",
            Help.COMPILE_SEGMENT(path=source),
        )
    return check


def _is_in_library(path: Path, segment: Segment) -> bool:
    """True if the library has the same text, compiled for this model."""
    try:
        info = peek(path) if path.exists() else None
        return info is not None and (info.text, info.media) == (segment.text, segment.media)
    except SegmentError:
        return False
