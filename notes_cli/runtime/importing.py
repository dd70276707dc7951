"""Taking over segments that others compiled: what checksums cannot tell is computed again, in samples.

A checksum finds damage, not forgery. So the rows of the file are placed where they were compiled, some tokens, drawn by
chance, are decoded again in their places, and their new rows are compared with those of the file: a row is checked
against all those before it. Where the model is another one, the text is compiled instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import notes_cli
from notes_cli.editing.change import field_spans
from notes_cli.engine.segment import LayerRows, Segment, floats
from notes_cli.errors import EngineError, Help, Progress, Say, SegmentError, TakenError
from notes_cli.images import read_picture
from notes_cli.library.container import open_segment, peek, write_segment
from notes_cli.runtime.compiling import pinned
from notes_cli.runtime.keeping import compile_to_library, taken
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.pictures import Shown
from notes_cli.text.skill import Field, Skill

SAMPLES = 64  # tokens that are computed again
# A row's distance from the one computed here, relative to its length, of the layer where that is largest. What another
# build or device computes differs by rounding (with flash attention and without, 0.012 on average on the model that
# ships: tests/runtime/test_importing.py); an expert that is chosen by a hair's breadth may be another one.
FARTHEST = 0.5  # of any row
MEAN = 0.1  # over the rows


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a segment: its rows were taken over, or its text was compiled, for these reasons."""

    name: str
    path: Path
    tokens: int
    how: str  # "rows", "text", "kept": it was there already
    reasons: tuple[str, ...] = ()  # why the text was compiled
    checked: int = 0  # tokens that were computed again
    farthest: float = 0.0  # the largest relative distance of their rows
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

    `trust`: its rows are taken over without computing any of them again. `force`: in place of a text that came from
    elsewhere. Raise SegmentError for one that is damaged or not what this model computes, TakenError for a name that
    another text has.
    """
    segment = open_segment(source)
    if segment.tools:
        raise SegmentError(f"{source} holds tools as one model's template tells of them", "Compile their file")
    fields = tuple(Field(span.name, span.value, span.start, span.end) for span in segment.fields)
    pictures = tuple(Shown(one.start, one.end, read_picture(one.data, str(source))) for one in segment.pictures)
    skill = Skill(name or segment.name, segment.description, segment.text, fields, "", pictures=pictures)
    if not segment.media or workspace.sees:
        workspace.make_room(len(workspace.left_context) + len(workspace.tokens_of(skill)))
    why = differences(workspace, segment)
    if not why and not trust:
        why = ["rows of an image cannot be checked one by one"] if segment.media else _uncheckable(workspace)
    if why:
        made = compile_to_library(
            workspace, skill, force=force, progress=progress, blocks=len(segment.blocks) or 1, kv=segment.kv, say=say
        )
        return Imported(skill.name, made.path, made.tokens, "text" if made.reasons else "kept", tuple(why))
    workspace.measure_rotation()
    drawn = [] if trust else draw(len(segment))
    try:
        errors = recomputed(workspace, segment, drawn) if drawn else np.zeros(1, np.float32)
    except EngineError as error:  # rows that are no numbers, or of other shapes
        raise SegmentError(f"{source} cannot be used: {error.what}", error.remedy) from error
    farthest = float(errors.max())
    if not (farthest <= FARTHEST and float(errors.mean()) <= MEAN):  # NaN is not
        raise SegmentError(
            f"{source} does not hold what this model computes: of {len(drawn)} tokens computed again the rows are off "
            f"by {errors.mean():.2g} on average, {farthest:.2g} at most. Somebody forged it, or computed it otherwise",
            Help.COMPILE_SEGMENT(path=source),
        )
    with workspace.library.compiling(skill.name, workspace.identity, say=say) as path:
        taken_by = None if force else taken(workspace, skill)
        if taken_by:
            raise TakenError(taken_by, Help.OTHER_NAME_OR_FORCE())
        if not force and _there(path, segment):
            return Imported(skill.name, path, len(segment), "kept")
        spans = segment.fields if segment.media else field_spans(workspace.model, skill, segment.tokens)
        influence = segment.influence if trust else {}
        own = replace(segment, name=skill.name, fields=spans, influence=influence, source="", stamp=(), prefill=None)
        write_segment(path, own, writer=f"notes {notes_cli.__version__}")
    dropped = bool(segment.influence) and not trust
    return Imported(skill.name, path, len(segment), "rows", (), len(drawn), farthest, dropped)


def differences(workspace: Workspace, segment: Segment) -> list[str]:
    """Why the rows of a segment are not those that its text has on this model, in words; empty if they may be."""
    found = segment.identity.differences(workspace.identity)
    if found:
        return found
    if not segment.media and not np.array_equal(segment.tokens, workspace.model.tokenize(segment.text)):
        found.append("its text gives other tokens here")
    if not np.array_equal(segment.context, workspace.left_context):
        found.append("it was compiled after a different left context")
    if segment.pinned != pinned(workspace):
        found.append("its rows are kept in another way here")
    return found


def draw(tokens: int) -> list[int]:
    """Tokens to compute again, ascending: nobody can know beforehand which."""
    count = min(SAMPLES, tokens)
    return sorted(secrets.SystemRandom().sample(range(tokens), count))


def recomputed(workspace: Workspace, segment: Segment, drawn: Sequence[int]) -> NDArray[np.float32]:
    """Of each of these tokens: how far its rows in the file are from those computed now, the largest over the layers,
    relative to their length, [len(drawn)]."""
    errors: list[float] = []
    left = len(segment.context)
    for first, last in segment.spans:  # of one that was compiled in blocks each has seen the left context alone
        here = [token for token in drawn if first <= token < last]
        if not here:
            continue
        part = segment.slice(first, last)
        with workspace.scratch(left + len(part)) as notebook:
            notebook.append(segment.context)
            notebook.flush()
            notebook.splice(part)
            notebook.rewrite([left + token - first for token in here], segment.tokens[here])
            rows = notebook.context.read(notebook.sequence, left, len(part), base=part.base, dtype=segment.row_type)
        places = [token - first for token in here]
        errors += _farthest(part.layers, rows, places).tolist()
    return np.array(errors, np.float32)


def _farthest(there: Sequence[LayerRows], here: Sequence[LayerRows], places: Sequence[int]) -> NDArray[np.float32]:
    worst = np.zeros(len(places), np.float32)
    for old, new in zip(there, here, strict=True):
        for before, now in ((old.k, new.k), (old.v, new.v)):
            a, b = floats(before[places]), floats(now[places])
            if not a.size:
                continue
            length = np.maximum(np.linalg.norm(b, axis=1), 1e-6)
            # NaN, of rows that are no numbers, stays
            worst = np.maximum(worst, np.linalg.norm(a - b, axis=1) / length)
    return worst


def _uncheckable(workspace: Workspace) -> list[str]:
    """Why no rows of this model can be computed again in place, in words."""
    for operation in ("splice", "rewrite"):
        why = workspace.context.supports(operation)
        if why:
            return [f"its rows cannot be checked on this model: {why}"]
    return []


def _there(path: Path, segment: Segment) -> bool:
    """Whether the library has that text, compiled for this model, already."""
    try:
        info = peek(path) if path.exists() else None
        return info is not None and (info.text, info.media) == (segment.text, segment.media)
    except SegmentError:
        return False
