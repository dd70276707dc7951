"""Compiling: prefill a skill once, behind the left context it will mostly have, and keep its rows.

Only the skill's own rows are kept: its first token is then no attention sink, and the segment fits anywhere. Where rows
cannot be moved, those of the left context are kept with them, and the segment fits the start of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import notes_cli
from notes_cli.editing.influence import influence
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook, Progress
from notes_cli.engine.segment import FieldSpan, Segment, Tokens
from notes_cli.errors import SegmentError, UnsupportedError
from notes_cli.library.container import peek, write_segment
from notes_cli.library.store import changes
from notes_cli.text.skill import Skill
from notes_cli.text.spans import token_span
from notes_cli.work.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Compiled:
    """Where the segment is, how many tokens it has, and why it was compiled: nothing if it was up to date."""

    path: Path
    tokens: int
    reasons: tuple[str, ...]


def compile_skill(
    workspace: Workspace, skill: Skill, progress: Progress | None = None, *, measure: Progress | None = None
) -> Segment:
    """Prefill the skill and read its rows. Raise UnsupportedError where this model's rows cannot be kept.

    `measure`: also measure the influence of each field, a prefill a field; it is told how many are done.
    """
    if measure is not None:  # another value may be longer
        tokens = len(workspace.left_context) + len(workspace.model.tokenize(skill.text))
        workspace.make_room(tokens + 8 * len(skill.fields))
    segment = plan(workspace, skill)
    with workspace.compiler() as context:
        notebook = Notebook(context)
        notebook.append(segment.context)
        notebook.flush()
        notebook.append(segment.tokens)
        notebook.flush(progress)
        dtype = "f32" if "f32" in segment.identity.kv_type else "f16"
        rows = context.read(0, segment.first, len(notebook) - segment.first, base=segment.first, dtype=dtype)
        segment = replace(segment, layers=rows)
        if measure is not None:
            segment = replace(segment, influence=_influence(context, segment, measure))
    return segment


def _influence(context: Context, segment: Segment, measure: Progress) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    names = dict.fromkeys(span.name for span in segment.fields)
    for name in names:
        found[name] = influence(context, segment, name)
        measure(len(found), len(names))
    return found


def plan(workspace: Workspace, skill: Skill) -> Segment:
    """What compiling the skill would give, without its rows: enough to lay out a dry run."""
    tokens, left = workspace.model.tokenize(skill.text), workspace.left_context
    workspace.make_room(len(left) + len(tokens))
    check_support(workspace, skill.name)
    fields = field_spans(workspace.model, skill, tokens)
    return Segment(
        *(skill.name, skill.description, skill.text, tokens, len(left), left, fields, workspace.identity),
        layers=(),
        whole=_whole(workspace),
    )


def _whole(workspace: Workspace) -> bool:
    """Whether rows of this model cannot be moved, so that they are kept with those of the left context."""
    return workspace.context.supports("splice") is not None


def check_support(workspace: Workspace, name: str) -> None:
    """Raise UnsupportedError where this model's rows can neither be moved nor put back."""
    for operation in ("read", "restore"):
        reason = workspace.context.supports(operation)
        if reason:
            raise UnsupportedError(f"{name} cannot be compiled for {workspace.model.name}: {reason}")


def compile_to_library(
    workspace: Workspace,
    skill: Skill,
    *,
    force: bool = False,
    progress: Progress | None = None,
    output: Path | None = None,
    measure: Progress | None = None,
) -> Compiled:
    """Compile the skill into the library (or to `output`) unless what is there is up to date.

    Raise SegmentError if `output` is a file that is no segment, unless `force` says to write over it.
    """
    workspace.make_room(len(workspace.left_context) + len(workspace.model.tokenize(skill.text)))
    if output is not None:
        if output.exists() and not force:
            _check_is_segment(output)
        return _compile_to(workspace, skill, output, force, progress, measure)
    check_support(workspace, skill.name)
    with workspace.library.compiling(skill.name, workspace.identity) as path:
        return _compile_to(workspace, skill, path, force, progress, measure)


def _compile_to(
    workspace: Workspace,
    skill: Skill,
    path: Path,
    force: bool,
    progress: Progress | None,
    measure: Progress | None,
) -> Compiled:
    reasons = ["it was asked for"] if force else stale(workspace, skill, path, measured=measure is not None)
    if not reasons:
        return Compiled(path, len(peek(path).tokens), ())
    segment = compile_skill(workspace, skill, progress, measure=measure)
    write_segment(path, segment, writer=f"notes {notes_cli.__version__}")
    return Compiled(path, len(segment), tuple(reasons))


def _check_is_segment(path: Path) -> None:
    """A model or a text that is named as the output by mistake must not be lost."""
    try:
        peek(path)
    except SegmentError as error:
        raise SegmentError(
            f"{path} is there and is no sound segment. Choose another file, or write over it with -f"
        ) from error


def stale(workspace: Workspace, skill: Skill, path: Path, *, measured: bool = False) -> list[str]:
    """Why the file at `path` is not this skill compiled for this workspace, in words; empty if it is.

    `measured`: the influence of its fields must be there, too.
    """
    if not path.exists():
        return ["it has not been compiled yet"]
    try:
        card = peek(path)
    except SegmentError as error:
        return [str(error)]
    return changes(
        card,
        text=skill.text,
        description=skill.description,
        fields=skill.fields,
        identity=workspace.identity,
        context=workspace.left_context,
        whole=_whole(workspace),
        influence=measured,
    )


def field_spans(model: Model, skill: Skill, tokens: Tokens) -> tuple[FieldSpan, ...]:
    """The tokens in which each field's value stands. Raise SkillError where they do not give the text back."""
    pieces = [model.piece(int(token)) for token in tokens]
    return tuple(FieldSpan(*field, *token_span(skill.text, pieces, field.start, field.end)) for field in skill.fields)
