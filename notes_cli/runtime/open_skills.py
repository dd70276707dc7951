"""From words of a user to segments: names of the library, segment files, and texts that are compiled now."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, Notice, Progress, Remedy, Say, SkillError, UnwritableError
from notes_cli.library.container import peek
from notes_cli.library.store import untouched
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from notes_cli.text.skill import Skill

SkillRef = str | os.PathLike[str] | Segment  # a name of a compiled skill, a segment file or a text, or a segment


class Watch(Protocol):
    """Shows how far something has come that takes long: what is done, how many tokens it will take, if that is known,
    and in which unit it is counted. `later`: it may be over before it is worth showing."""

    def __call__(
        self, label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False
    ) -> AbstractContextManager[Progress]: ...


def no_progress(
    label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False
) -> AbstractContextManager[Progress]:
    """Shows nothing."""
    return nullcontext(lambda done, total: None)


def open_segments(
    workspace: Workspace,
    wanted: Sequence[SkillRef],
    say: Say,
    *,
    image: bool = False,
    dry: bool = False,
    watch: Watch = no_progress,
) -> list[Segment]:
    """A segment for each, in order: one at hand is checked, a text is compiled now.

    `image`: each must be an image. `dry`: a text is not compiled; its segment has no rows. `watch` shows how far
    compiling has come. Raise SkillError for what is no image and must be one.
    """
    segments = []
    for one in wanted:
        if isinstance(one, Segment):
            workspace.check(one)
            segment = one
        else:
            segment = _open(workspace, os.fspath(one), say, watch, image=image, dry=dry)
        if image and not segment.is_image:
            raise not_an_image(segment.name)
        segments.append(segment)
    return segments


def _open(workspace: Workspace, given: str, say: Say, watch: Watch, *, image: bool, dry: bool) -> Segment:
    target = workspace.library.resolve(given)
    if target.kind == "text":
        return _open_text(workspace, given, say, watch, image=image, dry=dry)
    if target.path is not None:
        return workspace.open(target.path)
    path = workspace.library.find(target.name, workspace.identity, workspace.compile_again(target.name))
    segment = workspace.open(path, target.name)
    warn_edited(workspace, segment, say)
    return segment


def warn_edited(workspace: Workspace, segment: Segment, say: Say) -> None:
    """Tell where the text has been edited since it was compiled: what is spliced is what it said then."""
    path = workspace.file_of(segment.name)
    if path is None or untouched(segment.source, segment.stamp, path):
        return
    from notes_cli.runtime.freshness import Stale, text_changed

    changed = text_changed(peek(path))
    if changed and changed.kind is Stale.TEXT:
        say(Notice(f"{segment.name}: {changed.what}", workspace.compile_edited(segment.name), warning=True))


def not_an_image(name: str) -> SkillError:
    """What to raise for what is to be shown as an image and is none."""
    return SkillError(f"{name} is a text, and no image", "Splice it instead")


def _open_text(workspace: Workspace, given: str, say: Say, watch: Watch, *, image: bool, dry: bool) -> Segment:
    from notes_cli.text.skill import load_skill

    if given == "-":
        raise NotesError("a skill cannot be spliced from standard input", Help.COMPILE())
    skill = load_skill(given)
    if image and not skill.picture:
        raise not_an_image(skill.name)
    for warning in skill.warnings:
        say(Notice(warning, warning=True))
    return open_skill(workspace, skill, given, say, watch, dry=dry)


def open_skill(
    workspace: Workspace, skill: Skill, given: str, say: Say, watch: Watch = no_progress, *, dry: bool = False
) -> Segment:
    """A text's or an image's segment: that of the library if it is up to date, else compiled now. It is kept where its
    name is free and the library can be written to; what came from elsewhere is never replaced. `given`: what the user
    calls it."""
    from notes_cli.runtime.compile import compile_skill, plan, resolve_images
    from notes_cli.runtime.recompile import compile_to_library, stale, taken

    skill = resolve_images(workspace, skill, say)
    why = taken(workspace, skill)
    if why and skill.picture:  # pictures of one name are many: this one has a name of its own
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
