"""Imports segments that others compiled, after comparing all their K/V with a prefill.

A checksum detects damage, not forgery. K/V depends on all earlier tokens in every layer, so only a prefill of the whole
text can verify it (check_rows.py), and an import takes as long as a compile. A sample would be faster, but of 64 tokens
in 1,500 it detects a wrong row one time in 23. `trust` skips the check. For another model the text is compiled instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import notes_cli
from notes_cli.editing.change import field_spans
from notes_cli.engine.segment import Segment
from notes_cli.errors import EngineError, Help, Progress, Say, SegmentError, TakenError
from notes_cli.images import read_picture
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.runtime.check_rows import RowCheck, check_rows
from notes_cli.runtime.compile import prefix_only
from notes_cli.runtime.recompile import compile_to_library, taken
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.fields import Field
from notes_cli.text.pictures import Shown
from notes_cli.text.skill import Skill


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
    dropped: bool = False  # the influence of fields was dropped: it was measured elsewhere


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
    fields = tuple(Field(span.name, span.value, span.start, span.end) for span in segment.fields)
    pictures = tuple(Shown(image.start, image.end, read_picture(image.data, str(source))) for image in segment.pictures)
    skill = Skill(name or segment.name, segment.description, segment.text, fields, "", pictures=pictures)
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
        influence = segment.influence if trust else {}
        anonymous = replace(segment, source="", stamp=(), prefill=None, backend="")
        imported = replace(anonymous, name=skill.name, fields=spans, influence=influence)
        if check.unchecked:  # its state transitions
            imported = replace(imported, carry=None)
        write_segment(path, imported, writer=f"notes {notes_cli.__version__}")
    dropped = bool(segment.influence) and not trust
    return Imported(skill.name, path, len(segment), "rows", (), check.tokens, check.farthest, dropped)


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
        check = check_rows(workspace, segment, progress=progress)
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
