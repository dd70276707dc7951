"""Skills: reading a text file, a SKILL.md with YAML front matter, a folder that holds one, or standard input.

The reader is lenient where a skill is still usable (an odd name, no description) and warns in `Skill.warnings`; it
refuses what it would have to guess. fields.py finds the fields. It knows no tokens.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from notes_cli.errors import Help, SkillError, reason
from notes_cli.images import SUFFIXES, Picture, looks_like_image, read_picture
from notes_cli.text import names
from notes_cli.text.fields import Field, Hole, clean_value, fences, fill, find_fields, within
from notes_cli.text.header import MAX_HEADER, find_header, read_header
from notes_cli.text.keys import listed
from notes_cli.text.pictures import Link, Shown, find_images, load_images

MAX_BYTES = 64 << 20  # far more than any context holds; a model file given by mistake is refused, not read
MAX_DESCRIPTION = 1024
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
SURROGATE = re.compile(r"[\ud800-\udfff]")  # a byte that is not UTF-8, in a text that was decoded around it
TEXTS = (".md", ".markdown", ".txt")  # files of a folder that is compiled without a SKILL.md
SETTLED = 2.0  # seconds: a file may change again within one tick of a coarse clock, and keep its size and times

# Files that a text refers to: [text](target), and paths into the usual folders of Agent Skills.
LINK = re.compile(
    r"\[[^\]\n]{0,200}\]\([ \t]*<?(?P<target>[^()\s<>]{1,200})"
    r"|(?<![\w./-])(?P<path>(?:references|scripts|assets)/[\w./-]{1,200})"
)

__all__ = [
    "Field",
    "Skill",
    "image_skill",
    "joined",
    "linked_files",
    "load_skill",
    "load_source",
    "parse_skill",
    "read_card",
    "read_image",
    "skill_file",
    "skill_sources",
    "stamp_of",
    "with_images",
    "with_values",
]


@dataclass(frozen=True, slots=True)
class Skill:
    """A text to compile. `fields` has one entry for each place that holds a value, in order."""

    name: str
    description: str
    text: str
    fields: tuple[Field, ...]
    source: str  # the file it was read from (each of several on a line), "-" for standard input
    warnings: tuple[str, ...] = field(default=(), compare=False)
    # What a template tells of tools: the text in runs, each with whether control tokens in it are such (prompt.Run).
    runs: tuple[tuple[str, bool], ...] = ()
    # What of the file does not stay if it changes (stamp_of), as it was when the text was read; empty: not known.
    stamp: tuple[int, ...] = field(default=(), compare=False)
    # Images that the text refers to; none of them has been looked at (`with_images`).
    links: tuple[Link, ...] = ()
    # Images in the place of what stands for them in the text: equal texts are equal bytes.
    pictures: tuple[Shown, ...] = ()

    def __repr__(self) -> str:
        return f"Skill({self.name!r}, {len(self.text)} characters, fields: {listed(list(self.values), most=5)})"

    @property
    def picture(self) -> Picture | None:
        """The image that all of it is, None of a text."""
        whole = self.pictures and (self.pictures[0].start, self.pictures[0].end) == (0, len(self.text))
        return self.pictures[0].picture if whole else None

    @property
    def values(self) -> dict[str, str]:
        """Value of each field, by name."""
        return {found.name: found.value for found in self.fields}


def load_skill(source: str | Path, *, name: str | None = None, stdin: BinaryIO | None = None) -> Skill:
    """Read a skill from a file, a folder with SKILL.md, or "-" (then from `stdin`). A pipe that has a name, as a shell
    gives one for <(command), is read like standard input.

    The name is `name`, else that of the front matter, else that of the folder (for SKILL.md) or the file's stem.
    Raise SkillError in one line if the file cannot be read, is not UTF-8, is empty, or has broken front matter or
    fields.
    """
    if str(source) == "-":
        if stdin is None:
            raise SkillError("nothing to read on standard input", "Pipe the text in, or name a file")
        return _read_pipe(stdin, "standard input", name)
    path = skill_file(source)
    try:
        if path.is_fifo():
            with path.open("rb") as pipe:
                return _read_pipe(pipe, str(path), name)
        with path.open("rb") as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise SkillError(f"no such file: {path}") from None
    except OSError as error:
        raise SkillError(f"cannot read {path}: {reason(error)}") from error
    if looks_like_image(data) or path.suffix.lower() in SUFFIXES:
        return replace(read_image(data, names.spelt(path), name or path.stem), stamp=stamp)
    folder = path.absolute().parent.name if path.name.lower() == "skill.md" else ""
    skill = parse_skill(_decode(data, str(path)), source=names.spelt(path), default=folder or path.stem, name=name)
    skill = replace(skill, stamp=stamp)
    if folder and not name and skill.name != folder:
        warning = f"{path}: the name {skill.name!r} differs from its folder {folder!r}"
        skill = replace(skill, warnings=(*skill.warnings, warning))
    links = find_images(skill.text, path.parent)
    skill = replace(skill, links=links)
    shown = {link.target for link in links}  # of these is told where it is known whether the model sees
    linked = [target for target in linked_files(skill.text, path.parent) if target not in shown]
    if linked:
        warning = f"{path} links to {listed(linked, most=3)}: linked files are not compiled with it"
        skill = replace(skill, warnings=(*skill.warnings, warning))
    return skill


def _read_pipe(pipe: BinaryIO, where: str, name: str | None) -> Skill:
    """The skill in what can be read once and came from no file. `where`: what messages call it."""
    data = pipe.read(MAX_BYTES + 1)
    if looks_like_image(data):
        return read_image(data, "-", name or "stdin")
    return parse_skill(_decode(data, where), source="-", default="stdin", name=name, where=where)


def read_image(data: bytes, source: str, name: str) -> Skill:
    """A skill that is the image in these bytes. Raise ImageError, and SkillError for a name that can be none."""
    return image_skill(read_picture(data, source), _called(name, source), source)


def image_skill(picture: Picture, name: str, source: str = "") -> Skill:
    """A skill that is an image, by a name that is one."""
    return Skill(name, "", picture.text, (), source, pictures=(Shown(0, len(picture.text), picture),))


def with_images(skill: Skill) -> Skill:
    """The skill with the images that its text refers to in their places; what stands for each names its bytes.

    A field whose value would be in such a place is none. Raise ImageError for a file that is no image, or is refused.
    """
    if not skill.links:
        return skill
    taken = [link for link in skill.links if not link.why]
    text, fields, shown = "", list[Field](), list[Shown]()
    at = 0

    def told(end: int) -> None:
        nonlocal text
        by = len(text) - at
        inside = (one for one in skill.fields if at <= one.start and one.end <= end)
        fields.extend(one._replace(start=one.start + by, end=one.end + by) for one in inside)
        text += skill.text[at:end]

    for link, picture in zip(taken, load_images(taken), strict=True):
        told(link.start)
        shown.append(Shown(len(text), len(text) + len(picture.text), picture))
        text += picture.text
        at = link.end
    told(len(skill.text))
    # No stamp: the text's own file does not tell whether one of the images has changed.
    return replace(skill, text=text, fields=tuple(fields), links=(), pictures=tuple(shown), stamp=())


def joined(skills: Sequence[Skill], name: str) -> Skill:
    """One skill of several: their texts in this order, so that what comes later is read after what comes before.

    A field to which two of them give different values is none of the whole, as in any text, with a warning. Raise
    SkillError for a name that is none.
    """
    values: dict[str, set[str]] = {}
    for skill in skills:
        if skill.picture:
            raise SkillError(f"{skill.source} is an image, and texts are joined", "Compile it on its own")
        for key, value in skill.values.items():
            values.setdefault(key, set()).add(value)
    several = sorted(one for one, found in values.items() if len(found) > 1)
    text, fields, links = "", list[Field](), list[Link]()
    for skill in skills:
        text += "\n\n" if text else ""
        at = len(text)
        links += [replace(link, start=link.start + at, end=link.end + at) for link in skill.links]
        fields += [
            one._replace(start=one.start + at, end=one.end + at) for one in skill.fields if one.name not in several
        ]
        text += skill.text
    warnings = [
        f"{one!r} has different values in {listed([s.name for s in skills])}: it is no field" for one in several
    ]
    called = _called(name, name)
    if called != names.typed(name.lower()):
        warnings.append(f"the name {name!r} may only have {names.RULE}; it becomes {called!r}")
    sources = [skill.source for skill in skills]
    return Skill(
        called,
        " ".join(skill.description for skill in skills if skill.description),
        text,
        tuple(fields),
        "-" if any(source in ("", "-") for source in sources) else names.BETWEEN.join(sources),
        (*(warning for skill in skills for warning in skill.warnings), *warnings),
        links=tuple(links),
    )


def load_source(source: str, name: str | None = None) -> Skill:
    """The skill whose text came from this source: a file, or several that were joined. Raise SkillError."""
    files = names.files_of(source)
    return joined([load_skill(file) for file in files], name or "") if len(files) > 1 else load_skill(source, name=name)


def read_card(folder: Path) -> tuple[str, str]:
    """Name and description of the skill in a folder with a SKILL.md, without its text. Raise SkillError."""
    path = _skill_file(folder)
    try:
        with path.open("rb") as file:
            data = file.read(2 * MAX_HEADER)
    except OSError as error:
        raise SkillError(f"cannot read {path}: {reason(error)}") from error
    encoding = "utf-16" if data.startswith(UTF16) else "utf-8"
    header = read_header(_lines(data.decode(encoding, errors="replace")), str(path))
    return _called(header.name or folder.absolute().name, str(path)), header.description


def stamp_of(found: os.stat_result) -> tuple[int, ...]:
    """Size and times of a file, and a fourth number where it has changed so lately that it may change again and keep
    them."""
    young = time.time() - max(found.st_mtime, found.st_ctime) < SETTLED
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, *((1,) if young else ()))


def skill_file(source: str | Path) -> Path:
    """The file of a skill that is named by it or by its folder. Raise SkillError for a folder without one."""
    path = Path(source)
    return _skill_file(path) if path.is_dir() else path


def skill_sources(word: str) -> list[str]:
    """The sources that a word of the user means: itself, or each skill and each image in a folder, sorted by name. A
    folder without skills and images has each text in it instead, but none of those in the folders below.

    Raise SkillError for a folder that is no skill and contains none.
    """
    folder = Path(word)
    if word == "-" or not folder.is_dir() or _file_in(folder):
        return [word]
    try:
        entries = list(folder.iterdir())
        files = [path for path in entries if path.is_file() and not path.name.startswith(".")]
        found = sorted(str(inside) for inside in entries if inside.is_dir() and _file_in(inside))
        found += sorted(str(path) for path in files if path.suffix.lower() in SUFFIXES)
        found = found or sorted(str(path) for path in files if path.suffix.lower() in TEXTS)
    except OSError as error:
        raise SkillError(f"cannot read {folder}: {reason(error)}") from error
    if not found:
        texts = ", ".join(TEXTS)
        raise SkillError(f"the folder {folder} has no SKILL.md, no folder with one, no text ({texts}) and no image")
    return found


def parse_skill(text: str, *, source: str, default: str, name: str | None = None, where: str = "") -> Skill:
    """Make a skill from the text of a file. `default` is its name if the front matter has none; `where` is what
    messages call the text, if not by its source."""
    where = where or source
    header = read_header(_lines(text), where)
    warnings = list(header.warnings)
    body = header.body.strip()
    if not body:
        raise SkillError(f"{where} has no text", "A skill needs something to say")
    wanted = name or header.name or default
    called = _called(wanted, where)
    if called != names.typed(wanted.lower()):  # a change to lower case needs no warning
        warnings.append(f"{where}: the name {wanted!r} may only have {names.RULE}; it becomes {called!r}")
    if len(header.description) > MAX_DESCRIPTION:
        warnings.append(f"{where}: the description is longer than {MAX_DESCRIPTION} characters")
    try:
        body, fields, more = find_fields(body, header.fields, header.hoisted)
    except SkillError as error:
        raise SkillError(f"{where}: {error.what}", error.remedy) from None
    warnings += [f"{where}: {warning}" for warning in more]
    return Skill(called, header.description, body, fields, source, tuple(warnings))


def with_values(skill: Skill, values: Mapping[str, str]) -> Skill:
    """The corrected skill: new values in every place of their fields, and spans to match. The old one is not changed.

    Raise SkillError for a field that the skill does not have, and for a value that is empty or has several lines.
    """
    had = skill.values
    for name in values:
        if name not in had:
            raise SkillError(f"{skill.name} has no field {name!r}", f"Its fields: {listed(list(had))}")
    new = had | {name: clean_value(name, value) for name, value in values.items()}
    text, fields = fill(skill.text, [Hole(found.start, found.end, found.name) for found in skill.fields], new)
    return replace(skill, text=text, fields=fields)


def _called(wanted: str, source: str) -> str:
    """The name of a skill. Raise SkillError if no part of the word can be one."""
    name = names.name_of(wanted)
    if not name:
        raise SkillError(f"{source}: the name {wanted!r} has no letter and no digit", Help.OTHER_NAME())
    return name


def _decode(data: bytes, source: str) -> str:
    if len(data) > MAX_BYTES:
        raise SkillError(f"{source} is larger than {MAX_BYTES >> 20} MiB", "Is it a text?")
    if data.startswith(b"GGUF"):
        raise SkillError(f"{source} is a GGUF file, as models and compiled skills are, and no text")
    if data.startswith(UTF16):
        try:
            return data.decode("utf-16")
        except UnicodeDecodeError:
            raise SkillError(f"{source} begins as UTF-16 text, but is none", "Convert it to UTF-8 first") from None
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", errors="surrogateescape")
        header = find_header(_lines(text))
        if header and not SURROGATE.search(_lines(text), header.body):
            return data.decode("utf-8", errors="replace")  # in the front matter alone, which is not compiled
        what = f"{source} is not UTF-8 text: invalid byte at offset {error.start}"
        raise SkillError(what, "Convert it first") from None


def _lines(text: str) -> str:
    """The text with \\n at the ends of its lines."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _skill_file(folder: Path) -> Path:
    path = _file_in(folder)
    if path is None:
        raise SkillError(f"the folder {folder} has no SKILL.md")
    return path


def _file_in(folder: Path) -> Path | None:
    return next((folder / name for name in ("SKILL.md", "skill.md") if (folder / name).is_file()), None)


def linked_files(text: str, folder: Path) -> list[str]:
    """The files beside a skill that its text refers to: targets of links, and paths like `scripts/x` if they exist."""
    code, found = fences(text), []
    for match in LINK.finditer(text):
        target = (match["target"] or "").partition("#")[0]
        linked = target and not target.startswith("/") and ":" not in target and not within(code, match.start())
        path = (match["path"] or "").rstrip(".")
        if linked or (path and (folder / path).is_file()):
            found.append(target or path)
    return list(dict.fromkeys(found))
