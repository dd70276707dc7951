"""What of the library is out of date, and why, as far as that can be told without loading a model.

A file whose size and times are those of when it was compiled is taken for unchanged; else its text is compared with the
one in the segment. Whether the same model gives other tokens now, or runs with another RoPE, only a compile sees.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path

from notes_cli.engine.identity import Identity
from notes_cli.errors import DamagedError, NewerError, NotesError, SkillError, reason
from notes_cli.images import read_picture
from notes_cli.library.container import SegmentInfo, open_stored
from notes_cli.library.facts import known_sha256
from notes_cli.library.profiles import Profile, Profiles
from notes_cli.library.store import Library, SegmentFile, source_text
from notes_cli.text.names import files_of
from notes_cli.text.pictures import Shown
from notes_cli.text.skill import Field, Skill, load_source, with_images
from notes_cli.text.toolset import ToolSet, load_tools

CARRIED = 16  # tokens of a skill from which on some are always left between those that are decoded anyway


class Stale(str, Enum):
    """Why a segment is out of date, as JSON documents have it."""

    TEXT = "text"  # the file says something else now
    GONE = "gone"  # the file is not there: only the segment has the text
    MODEL = "model"  # none of this name is for the model in use
    FORMAT = "format"  # a newer version of notes wrote it
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    PROFILE = "profile"  # what was measured of its model asks for more than it has


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a segment is out of date, as a word and for people."""

    kind: Stale
    what: str


def stale_reasons(
    entry: SegmentFile, entries: Sequence[SegmentFile], profiles: Profiles | None = None, weights: str | None = None
) -> list[Reason]:
    """Why a file of the library is out of date; nothing if it is not. `entries`: all of its name. `weights`: the digest
    of the model in use, None if that is not known."""
    info = entry.info
    if info is None:
        return [_unusable(entry.problem)]
    found = []
    changed = text_changed(info)
    if changed is not None:
        found.append(changed)
    here = {other.info.identity.weights for other in entries if other.info}
    if weights is not None and weights not in here:
        made = f"{info.identity.model} {info.identity.quantization}"
        found.append(Reason(Stale.MODEL, f"it was compiled for {made}, not for the model in use"))
    if profiles is not None and _measurable(info) and not info.influence and wants_influence(profiles, info.identity):
        what = "the profile of its model edits fields by their influence, which has not been measured"
        found.append(Reason(Stale.PROFILE, what))
    uncaptured = info.states and not info.carried and len(info.tokens) >= CARRIED
    if profiles is not None and uncaptured and any(one.carries for one in _profiles(profiles, info.identity)):
        what = "the profile of its model carries recurrent states through skills, which has not been captured"
        found.append(Reason(Stale.PROFILE, what))
    return found


def _measurable(info: SegmentInfo) -> bool:
    """Whether it has fields whose influence can be measured."""
    return bool(info.fields) and not info.media


def text_changed(info: SegmentInfo) -> Reason | None:
    """Whether the file that a segment's text came from says something else now, or is gone; None if neither, or if
    nobody can tell: it came from standard input, or the segment does not say."""
    source, files = info.source, files_of(info.source)
    if not files or "\\x" in source:  # spelt, as its path has a line break or is not UTF-8
        return None
    for file in files:
        try:
            found = os.stat(file)
        except (FileNotFoundError, NotADirectoryError):
            return Reason(Stale.GONE, f"its file is gone: {file}")
        except (OSError, ValueError) as error:
            return Reason(
                Stale.UNREADABLE, f"cannot read {file}: {reason(error) if isinstance(error, OSError) else error}"
            )
        if not stat.S_ISREG(found.st_mode):  # nobody waits for a pipe to be written
            return Reason(Stale.UNREADABLE, f"{file} is no regular file")
    source = source_text(source)
    now = (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if info.stamp == now:
        return None
    if info.tools:  # what a template tells of them only a model can say
        later = (bool(info.stamp) and info.stamp[:3] != now) or _written_after(found, info.created)
        return Reason(Stale.TEXT, f"the file has changed: {source}") if later else None
    try:
        skill = load_source(info.source, info.name)
        skill = with_images(skill) if info.media else skill
    except SkillError as error:
        return Reason(Stale.TEXT, f"its file cannot be compiled any more: {error.what}")
    if skill.text != info.text or [one[:2] for one in info.pictures] != [
        (one.start, one.end) for one in skill.pictures
    ]:
        what = "the text, or an image in it," if info.media else "the text"
        return Reason(Stale.TEXT, f"{what} has changed: {source}")
    if [(span.name, span.value, span.start, span.end) for span in info.fields] != list(skill.fields):
        return Reason(Stale.TEXT, f"the fields have changed: {source}")
    if skill.description != info.description:
        return Reason(Stale.TEXT, f"the description has changed: {source}")
    return None


def _written_after(found: os.stat_result, created: str) -> bool:
    """Whether a file was written after the second in which a segment was made of it."""
    try:
        made = datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return False
    return max(found.st_mtime, found.st_ctime) >= made + 1


def known_weights(model: Path, memory: Path) -> str | None:
    """The digest of a model's file if it is remembered, and the file is the same; nothing is read of it."""
    return known_sha256(model, memory)


def wants_influence(profiles: Profiles, identity: Identity) -> bool:
    """Whether what was measured of this model edits fields by their influence."""
    found = _profiles(profiles, identity)
    if not found:
        return False
    from notes_cli.editing.methods import record_of  # with it comes the engine, which takes long to load

    methods = {method for profile in found for method in profile.methods.values()}
    records = map(record_of, methods)
    return any(record is not None and record.selects is not None and record.selects.influence for record in records)


def _profiles(profiles: Profiles, identity: Identity) -> list[Profile]:
    """What was measured of this model; nothing where a profile cannot be followed."""
    try:
        names = [name for name in profiles.names() if name.startswith(f"{identity.key}-")]
        return [profiles.read(profiles.named(name)) for name in names]
    except NotesError:
        return []


def skill_from_segment(info: SegmentInfo, name: str | None = None) -> Skill:
    """The skill that a segment was compiled from, by the text and the fields that it holds. Raise SkillError for tools:
    another model's template tells of them in another way."""
    if info.tools:
        what = f"{info.name} holds tools in the form of one model's chat template"
        raise SkillError(what, "Compile their file again")
    files = open_stored(info.path).pictures if info.media else ()
    pictures = tuple(Shown(one.start, one.end, read_picture(one.data, source_text(info.source))) for one in files)
    fields = tuple(Field(span.name, span.value, span.start, span.end) for span in info.fields)
    return Skill(
        name or info.name, info.description, info.text, fields, info.source, stamp=info.stamp, pictures=pictures
    )


def from_library(library: Library, name: str, other: str | None = None) -> tuple[Skill | ToolSet, SegmentInfo, str]:
    """The skill of that name as it would be compiled now, to be called `other`: from its file if that is there, else
    from its latest segment. With that segment, and where the text was read, for people. Raise NotesError if it cannot
    be read."""
    entries = library.entries(name)
    infos = [entry.info for entry in entries if entry.info is not None]
    if not infos:
        problem = next((entry.problem for entry in entries if entry.problem is not None), None)
        raise problem or library.unknown(name, files=False)
    info = max(infos, key=lambda one: one.created)
    files = files_of(info.source)
    if files and all(map(os.path.isfile, files)):
        read = load_tools(info.source, other or name) if info.tools else load_source(info.source, other or name)
        return read, info, source_text(info.source)
    return skill_from_segment(info, other or name), info, f"the segment: {_no_file(info.source)}"


def _no_file(source: str) -> str:
    return f"{source_text(source)} is gone" if source not in ("", "-") else "it came from no file"


def _unusable(problem: NotesError | None) -> Reason:
    what = problem.what if problem else "it cannot be read"
    if isinstance(problem, NewerError):
        return Reason(Stale.FORMAT, what)
    return Reason(Stale.DAMAGED if isinstance(problem, DamagedError) else Stale.UNREADABLE, what)
