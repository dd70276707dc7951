"""Opens skills as segments: names in the library, segment files, and texts that are compiled on the fly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, Notice, Progress, Remedy, Say, SkillError, UnwritableError
from notes_cli.library.container import peek
from notes_cli.library.store import is_unmodified
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from notes_cli.text.skill import Skill

SkillRef = str | os.PathLike[str] | Segment  # a name of a compiled skill, a segment file or a text, or a segment


class Watch(Protocol):
    """Shows the progress of a long operation: a label, the number of tokens if known, and their unit. `later`: it may
    be short, so show it with a delay."""

    def __call__(
        self, label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False
    ) -> AbstractContextManager[Progress]: ...


def no_progress(
    label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False
) -> AbstractContextManager[Progress]:
    """Show nothing."""
    return nullcontext(lambda done, total: None)


def open_segments(
    workspace: Workspace,
    references: Sequence[SkillRef],
    say: Say,
    *,
    image: bool = False,
    dry: bool = False,
    watch: Watch = no_progress,
) -> list[Segment]:
    """Return a segment for each reference, in order: existing segments are checked, texts compiled. `image`: each must
    be an image. `dry`: do not compile; the segment has no K/V. Raises SkillError for a reference that must be an image
    and is none."""
    segments = []
    for reference in references:
        if isinstance(reference, Segment):
            workspace.check(reference)
            segment = reference
        else:
            segment = _open(workspace, os.fspath(reference), say, watch, image=image, dry=dry)
        if image and not segment.is_image:
            raise not_an_image(segment.name)
        segments.append(segment)
    return segments


def _open(workspace: Workspace, reference: str, say: Say, watch: Watch, *, image: bool, dry: bool) -> Segment:
    target = workspace.library.resolve(reference)
    if target.kind == "text":
        from notes_cli.text.skill import load_skill

        if reference == "-":
            raise NotesError("a skill cannot be spliced from standard input", Help.COMPILE())
        skill = load_skill(reference)
        if image and not skill.picture:
            raise not_an_image(skill.name)
        for warning in skill.warnings:
            say(Notice(warning, warning=True))
        return open_skill(workspace, skill, reference, say, watch, dry=dry)
    if target.path is not None:
        return workspace.open(target.path)
    path = workspace.library.find(target.name, workspace.identity, partial(workspace.compile_again, target.name))
    segment = workspace.open(path, target.name)
    warn_edited(workspace, segment, say)
    return segment


def warn_edited(workspace: Workspace, segment: Segment, say: Say) -> None:
    """Warn if the text was edited after it was compiled: the old text is spliced."""
    path = workspace.files.get(segment.name)
    if path is None or is_unmodified(segment.source, segment.stamp, path):
        return
    from notes_cli.runtime.freshness import Stale, text_changed

    changed = text_changed(peek(path))
    if changed and changed.kind is Stale.TEXT:
        say(Notice(f"{segment.name}: {changed.what}", workspace.compile_edited(segment.name), warning=True))


def not_an_image(name: str) -> SkillError:
    """Make the error for a text given as an image."""
    return SkillError(f"{name} is a text, and no image", "Splice it instead")


def open_skill(
    workspace: Workspace, skill: Skill, given: str, say: Say, watch: Watch = no_progress, *, dry: bool = False
) -> Segment:
    """Return the segment of a text or image: from the library if it is up to date, else compiled now. It is stored if
    its name is free and the library writable; a skill from another source is never replaced. `given`: the user's
    reference."""
    from notes_cli.runtime.compile import compile_skill, plan, resolve_images
    from notes_cli.runtime.recompile import compile_to_library, stale, taken

    skill = resolve_images(workspace, skill, say)
    why = taken(workspace, skill)
    if why and skill.picture:  # images often share a name: use an unambiguous one
        skill = replace(skill, name=f"{skill.name[:40]}-{skill.picture.sha256[:16]}")
        why = taken(workspace, skill)
    if dry:
        path = workspace.library.path(skill.name, workspace.identity)
        if why is None and not stale(workspace, skill, path):
            return workspace.open(path)
        say(Notice(f"{given} would be compiled first, as {skill.name}"))
        return plan(workspace, skill)
    remedy: Remedy | None = Help.KEEP_AS_OTHER(source=given)
    if why is None:
        try:
            with watch(f"compiling {skill.name}") as progress:
                compiled = compile_to_library(workspace, skill, progress=progress, say=say)
        except UnwritableError as error:
            why, remedy = error.what, error.remedy
        else:
            if compiled.reasons:
                reasons = "; ".join(compiled.reasons)
                say(Notice(f"compiled {given} as {skill.name} ({compiled.tokens} tokens): {reasons}"))
            return workspace.open(compiled.path)
    say(Notice(f"{given} is compiled for this question only: {why}", remedy))
    with watch(f"compiling {skill.name}") as progress:
        return compile_skill(workspace, skill, progress)
