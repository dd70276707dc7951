"""Import segments that others compiled: compare all their rows with a prefill, which checksums cannot replace.

A checksum finds damage, not forgery. A row follows from all tokens before it, in every layer, so whether a single one
is wrong only a prefill of the whole text can tell (rows.py): an import takes as long as a compile. A sample would be
quicker, but of 64 tokens in 1,500 it finds a wrong row one time in 23. Who trusts where a file came from can leave the
check out. Where the model is another one, the text is compiled instead.
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
from notes_cli.text.pictures import Shown
from notes_cli.text.skill import Field, Skill


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a segment: its rows were taken over, or its text was compiled, for these reasons."""

    name: str
    path: Path
    tokens: int
    how: str  # "rows", "text", "kept": it was there already
    reasons: tuple[str, ...] = ()  # why the text was compiled
    checked: int = 0  # tokens that were computed again
    farthest: float = 0.0  # the largest distance of their rows, relative to the length of a row
    dropped: bool = False  # the influence of its fields was measured elsewhere, and is not believed


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
    """Take a segment file into the library.

    `trust`: its rows are taken over without computing them again. `force`: in place of a text that came from elsewhere.
    Raise SegmentError for one that is damaged or not what this model computes, TakenError for a name that another text
    has.
    """
    segment = open_segment(source)
    if segment.tools:
        raise SegmentError(f"{source} holds tools as one model's template tells of them", "Compile their file")
    fields = tuple(Field(span.name, span.value, span.start, span.end) for span in segment.fields)
    pictures = tuple(Shown(one.start, one.end, read_picture(one.data, str(source))) for one in segment.pictures)
    skill = Skill(name or segment.name, segment.description, segment.text, fields, "", pictures=pictures)
    if not segment.media or workspace.has_vision:
        workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    why = differences(workspace, segment)
    if not why and not trust:
        why = ["its images are looked at again"] if segment.media else []
    if why:
        made = compile_to_library(
            workspace, skill, force=force, progress=progress, blocks=len(segment.blocks) or 1, kv=segment.kv, say=say
        )
        return Imported(skill.name, made.path, made.tokens, "text" if made.reasons else "kept", tuple(why))
    workspace.measure_rotation()
    with workspace.library.compiling(skill.name, workspace.identity, say=say) as path:
        taken_by = None if force else taken(workspace, skill)
        if taken_by:
            raise TakenError(taken_by, Help.OTHER_NAME_OR_FORCE())
        if not force and _there(path, segment):
            return Imported(skill.name, path, len(segment), "kept")
        found = RowCheck(0, 0, 0.0) if trust else _checked(workspace, source, segment, progress)
        spans = segment.fields if segment.media else field_spans(workspace.model, skill, segment.tokens)
        influence = segment.influence if trust else {}
        bare = replace(segment, source="", stamp=(), prefill=None, backend="")
        own = replace(bare, name=skill.name, fields=spans, influence=influence)
        if found.unchecked:  # how a recurrent state goes on through it
            own = replace(own, carry=None)
        write_segment(path, own, writer=f"notes {notes_cli.__version__}")
    dropped = bool(segment.influence) and not trust
    return Imported(skill.name, path, len(segment), "rows", (), found.tokens, found.farthest, dropped)


def differences(workspace: Workspace, segment: Segment) -> list[str]:
    """Why the rows of a segment are not those that its text has on this model, in words; empty if they may be."""
    found = segment.identity.differences(workspace.identity)
    if found:
        return found
    if not segment.media and not np.array_equal(segment.tokens, workspace.model.tokenize(segment.text)):
        found.append("its text gives other tokens here")
    if not np.array_equal(segment.context, workspace.left_context):
        found.append("it was compiled after a different left context")
    if segment.prefix_only != prefix_only(workspace):
        found.append("its rows are kept in another way here")
    return found


def _checked(workspace: Workspace, source: Path, segment: Segment, progress: Progress | None) -> RowCheck:
    """The rows of a file compared with a prefill. Raise SegmentError for what this model does not compute."""
    try:
        found = check_rows(workspace, segment, progress=progress)
    except EngineError as error:  # rows that are no numbers, or of other shapes
        raise SegmentError(f"{source} cannot be used: {error.what}", error.remedy) from error
    if not found.right:
        raise SegmentError(
            f"{source} does not hold what this model computes: {found.reason}. Somebody forged it, or computed it "
            "otherwise",
            Help.COMPILE_SEGMENT(path=source),
        )
    return found


def _there(path: Path, segment: Segment) -> bool:
    """Whether the library has that text, compiled for this model, already."""
    try:
        info = peek(path) if path.exists() else None
        return info is not None and (info.text, info.media) == (segment.text, segment.media)
    except SegmentError:
        return False
