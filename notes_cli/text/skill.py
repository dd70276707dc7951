"""Reads skills from a text file, a folder with SKILL.md and YAML front matter, an image, or standard input.

Where a skill remains usable (an odd name, no description) it warns in `Skill.warnings`; it refuses instead of guessing.
fields.py finds the fields. A skill that agents find nearer hides a farther one of its name (agentskills.io).

Front matter is YAML between two lines of ---. Much of it is invalid and accepted by agents all the same: `description:
Plans trips: ferries and buses.` Then `name` and `description` are read line by line, with a warning that has the line.
Front matter without an end, and fields that YAML refuses, are refused instead of guessed.
"""

from __future__ import annotations

import filecmp
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import dedent
from typing import Any, BinaryIO, NamedTuple

from notes_cli.errors import Help, SkillError, reason
from notes_cli.images import SUFFIXES, Picture, looks_like_image, read_picture
from notes_cli.text import names
from notes_cli.text.fields import Field, clean_value, fences, find_fields, within
from notes_cli.text.keys import FIELD_NAME, field_name, is_name, listed
from notes_cli.text.pictures import Link, Shown, find_images, load_images

MAX_BYTES = 64 << 20  # more than any context holds; a model file is refused unread
MAX_DESCRIPTION = 1024
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
SURROGATE = re.compile(r"[\ud800-\udfff]")  # a byte that is not UTF-8, decoded with surrogateescape
# Compiled from folders without SKILL.md.
TEXTS = (".md", ".markdown", ".txt", ".pdf", ".html", ".htm", ".docx", ".epub", ".ipynb")
SETTLED = 2.0  # seconds: within a tick of a coarse clock a file may change and keep its size and times

# References to files: [text](target), and paths into the usual folders of Agent Skills.
LINK = re.compile(
    r"\[[^\]\n]{0,200}\]\([ \t]*<?(?P<target>[^()\s<>]{1,200})"
    r"|(?<![\w./-])(?P<path>(?:references|scripts|assets)/[\w./-]{1,200})"
)


@dataclass(frozen=True, slots=True)
class Skill:
    """A text to compile. `fields` has an entry for each place of a value, in order."""

    name: str
    description: str
    text: str
    fields: tuple[Field, ...]
    source: str  # file (several: a line each), "-" for standard input
    warnings: tuple[str, ...] = field(default=(), compare=False)
    # A template's block of tools as (text, True if control tokens are parsed in it), as in prompt.Run.
    runs: tuple[tuple[str, bool], ...] = ()
    # Characters of the text before which it is cut into blocks by default: before each tool, and after the last.
    cuts: tuple[int, ...] = field(default=(), compare=False)
    # stamp_of the file when it was read; empty: unknown.
    stamp: tuple[int, ...] = field(default=(), compare=False)
    # Images that the text refers to, not loaded (`with_images`).
    links: tuple[Link, ...] = ()
    # Images in the places of their placeholders in the text.
    pictures: tuple[Shown, ...] = ()

    def __repr__(self) -> str:
        return f"Skill({self.name!r}, {len(self.text)} characters, fields: {listed(list(self.values), most=5)})"

    @property
    def picture(self) -> Picture | None:
        """The image if the skill is one; None for a text."""
        whole = self.pictures and (self.pictures[0].start, self.pictures[0].end) == (0, len(self.text))
        return self.pictures[0].picture if whole else None

    @property
    def values(self) -> dict[str, str]:
        """Value of each field, by name."""
        return {place.name: place.value for place in self.fields}


def load_skill(source: str | Path, *, name: str | None = None, stdin: BinaryIO | None = None) -> Skill:
    """Read a skill from a file, a folder with SKILL.md, or "-" (then from `stdin`). A named pipe, as in shells
    <(command), is read like standard input.

    The name is `name`, else that of the front matter, else that of the folder (for SKILL.md) or the file's stem. Raises
    SkillError in one line if the file cannot be read, is not UTF-8, is empty, or has broken front matter or fields.
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
    folder = names.typed(path.absolute().parent.name) if path.name.lower() == "skill.md" else ""
    text, warnings = _text_in(data, str(path), path.suffix)
    skill = parse_skill(text, source=names.spelt(path), default=folder or path.stem, name=name)
    skill = replace(skill, stamp=stamp, warnings=(*warnings, *skill.warnings))
    if folder and not name and skill.name != folder:
        warning = f"{path}: the name {skill.name!r} differs from its folder {folder!r}"
        skill = replace(skill, warnings=(*skill.warnings, warning))
    links = find_images(skill.text, path.parent)
    skill = replace(skill, links=links)
    shown = {link.target for link in links}  # reported where it is known whether the model has a vision encoder
    linked = [target for target in linked_files(skill.text, path.parent) if target not in shown]
    if linked:
        warning = f"{path} links to {listed(linked, most=3)}: linked files are not compiled with it"
        skill = replace(skill, warnings=(*skill.warnings, warning))
    return skill


def _read_pipe(pipe: BinaryIO, where: str, name: str | None) -> Skill:
    """Read a skill from a stream without a file. `where`: its name in messages."""
    data = pipe.read(MAX_BYTES + 1)
    if looks_like_image(data):
        return read_image(data, "-", name or "stdin")
    text, warnings = _text_in(data, where)
    skill = parse_skill(text, source="-", default="stdin", name=name, where=where)
    return replace(skill, warnings=(*warnings, *skill.warnings))


def read_image(data: bytes, source: str, name: str) -> Skill:
    """Return the image in these bytes as a skill. Raises ImageError, and SkillError for an invalid name."""
    return image_skill(read_picture(data, source), _valid_name(name, source), source)


def image_skill(picture: Picture, name: str, source: str = "") -> Skill:
    """Return an image as a skill of a valid name."""
    return Skill(name, "", picture.text, (), source, pictures=(Shown(0, len(picture.text), picture),))


def with_images(skill: Skill) -> Skill:
    """Load the images that the text refers to, and put their placeholders, which contain digests, into the text.

    Fields inside of such a place are dropped. Raises ImageError for a file that is no image, or is refused.
    """
    if not skill.links:
        return skill
    usable = [link for link in skill.links if not link.why]
    text, fields, pictures = "", list[Field](), list[Shown]()
    at = 0

    def copy_until(end: int) -> None:
        nonlocal text
        offset = len(text) - at
        inside = (place for place in skill.fields if at <= place.start and place.end <= end)
        fields.extend(place._replace(start=place.start + offset, end=place.end + offset) for place in inside)
        text += skill.text[at:end]

    for link, picture in zip(usable, load_images(usable), strict=True):
        copy_until(link.start)
        pictures.append(Shown(len(text), len(text) + len(picture.text), picture))
        text += picture.text
        at = link.end
    copy_until(len(skill.text))
    # No stamp: that of the text's file does not cover the images.
    return replace(skill, text=text, fields=tuple(fields), links=(), pictures=tuple(pictures), stamp=())


def joined(skills: Sequence[Skill], name: str) -> Skill:
    """Join skills into one: their texts in this order.

    A field with different values is dropped, as in any text, with a warning. Raises SkillError for an invalid name.
    """
    values: dict[str, set[str]] = {}
    for skill in skills:
        if skill.picture:
            raise SkillError(f"{skill.source} is an image, and texts are joined", "Compile it on its own")
        for key, value in skill.values.items():
            values.setdefault(key, set()).add(value)
    conflicting = sorted(key for key, different in values.items() if len(different) > 1)
    text, fields, links = "", list[Field](), list[Link]()
    for skill in skills:
        text += "\n\n" if text else ""
        at = len(text)
        links += [replace(link, start=link.start + at, end=link.end + at) for link in skill.links]
        kept = [place for place in skill.fields if place.name not in conflicting]
        fields += [place._replace(start=place.start + at, end=place.end + at) for place in kept]
        text += skill.text
    warnings = [
        f"{key!r} has different values in {listed([s.name for s in skills])}: it is no field" for key in conflicting
    ]
    valid_name = _valid_name(name, name)
    if valid_name != names.typed(name.lower()):
        warnings.append(f"the name {name!r} may only have {names.RULE}; it becomes {valid_name!r}")
    sources = [skill.source for skill in skills]
    return Skill(
        valid_name,
        " ".join(skill.description for skill in skills if skill.description),
        text,
        tuple(fields),
        "-" if any(source in ("", "-") for source in sources) else names.BETWEEN.join(sources),
        (*(warning for skill in skills for warning in skill.warnings), *warnings),
        links=tuple(links),
    )


def load_source(source: str, name: str | None = None) -> Skill:
    """Read the skill of a source: a file, or several that were joined. Raises SkillError."""
    files = names.files_of(source)
    return joined([load_skill(file) for file in files], name or "") if len(files) > 1 else load_skill(source, name=name)


def read_card(folder: Path) -> tuple[str, str]:
    """Read name and description of the skill in a folder with a SKILL.md, without its text. Raises SkillError."""
    path = _skill_file(folder)
    try:
        with path.open("rb") as file:
            data = file.read(2 * MAX_HEADER)
    except OSError as error:
        raise SkillError(f"cannot read {path}: {reason(error)}") from error
    encoding = "utf-16" if data.startswith(UTF16) else "utf-8"
    header = read_header(_normalize_lines(data.decode(encoding, errors="replace")), str(path))
    return _valid_name(header.name or folder.absolute().name, str(path)), header.description


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return size and times of a file, and a fourth number if it changed so recently that it may change again without a
    new time."""
    recent = time.time() - max(status.st_mtime, status.st_ctime) < SETTLED
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, *((1,) if recent else ()))


def skill_file(source: str | Path) -> Path:
    """Return the file of a skill, from its path or its folder. Raises SkillError for a folder without one."""
    path = Path(source)
    return _skill_file(path) if path.is_dir() else path


def skill_sources(word: str) -> list[str]:
    """Return the sources of an argument: itself, or all skills and images in a folder, sorted by name. A folder without
    any gives its text files instead, without subfolders.

    Raises SkillError for a folder that contains none.
    """
    folder = Path(word)
    if word == "-" or not folder.is_dir() or _find_skill_file(folder):
        return [word]
    try:
        entries = list(folder.iterdir())
        files = [path for path in entries if path.is_file() and not path.name.startswith(".")]
        sources = sorted(str(inside) for inside in entries if inside.is_dir() and _find_skill_file(inside))
        sources += sorted(str(path) for path in files if path.suffix.lower() in SUFFIXES)
        sources = sources or sorted(str(path) for path in files if path.suffix.lower() in TEXTS)
    except OSError as error:
        raise SkillError(f"cannot read {folder}: {reason(error)}") from error
    if not sources:
        texts = ", ".join(TEXTS)
        raise SkillError(f"the folder {folder} has no SKILL.md, no folder with one, no text ({texts}) and no image")
    return sources


def parse_skill(text: str, *, source: str, default: str, name: str | None = None, where: str = "") -> Skill:
    """Parse a skill from the text of a file. `default`: its name if the front matter has none; `where`: its name in
    messages, if not the source."""
    where = where or source
    header = read_header(_normalize_lines(text), where)
    warnings = list(header.warnings)
    body = header.body.strip()
    if not body:
        raise SkillError(f"{where} has no text", "A skill needs something to say")
    wanted = name or header.name or default
    valid_name = _valid_name(wanted, where)
    if valid_name != names.typed(wanted.lower()):  # changes of case need no warning
        warnings.append(f"{where}: the name {wanted!r} may only have {names.RULE}; it becomes {valid_name!r}")
    if len(header.description) > MAX_DESCRIPTION:
        warnings.append(f"{where}: the description is longer than {MAX_DESCRIPTION} characters")
    try:
        body, fields, field_warnings = find_fields(body, header.fields, header.hoisted)
    except SkillError as error:
        raise SkillError(f"{where}: {error.what}", error.remedy) from None
    warnings += [f"{where}: {warning}" for warning in field_warnings]
    return Skill(valid_name, header.description, body, fields, source, tuple(warnings))


def _valid_name(wanted: str, source: str) -> str:
    """Make a valid name. Raises SkillError if no character of the word can be used."""
    name = names.name_of(wanted)
    if not name:
        raise SkillError(f"{source}: the name {wanted!r} has no letter and no digit", Help.OTHER_NAME())
    return name


def _text_in(data: bytes, source: str, suffix: str = "") -> tuple[str, list[str]]:
    """Return the text of a file, and warnings. `suffix`: of its name."""
    from notes_cli.text.formats import read_document  # not needed to splice

    if len(data) > MAX_BYTES:
        raise SkillError(f"{source} is larger than {MAX_BYTES >> 20} MiB", "Is it a text?")
    if (document := read_document(data, suffix, source)) is None:
        return _decode(data, source), []
    return document.text, [f"{source}: {document.warning}"] if document.warning else []


def _decode(data: bytes, source: str) -> str:
    if data.startswith(b"GGUF"):
        raise SkillError(f"{source} is a GGUF file, as models and compiled skills are, and no text")
    if data.startswith(UTF16):
        try:
            return data.decode("utf-16")
        except UnicodeDecodeError:
            raise SkillError(f"{source} begins as UTF-16 text, but is none", "Convert it to UTF-8 first") from None
    if b"\0" in data:
        text = f"{source} is no text: byte {data.index(0)} is 0"
        raise SkillError(text, "Is it a program's file? Take its text out first")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", errors="surrogateescape")
        header = find_header(_normalize_lines(text))
        if header and not SURROGATE.search(_normalize_lines(text), header.body):
            return data.decode("utf-8", errors="replace")  # only in the front matter, which is not compiled
        problem = f"{source} is not UTF-8 text: invalid byte at offset {error.start}"
        raise SkillError(problem, "Convert it first") from None


def _normalize_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _skill_file(folder: Path) -> Path:
    path = _find_skill_file(folder)
    if path is None:
        raise SkillError(f"the folder {folder} has no SKILL.md")
    return path


def _find_skill_file(folder: Path) -> Path | None:
    return next((folder / name for name in ("SKILL.md", "skill.md") if (folder / name).is_file()), None)


def linked_files(text: str, folder: Path) -> list[str]:
    """Return the files that a text refers to: targets of links, and paths like `scripts/x` if they exist."""
    code, files = fences(text), []
    for match in LINK.finditer(text):
        target = (match["target"] or "").partition("#")[0]
        linked = target and not target.startswith("/") and ":" not in target and not within(code, match.start())
        path = (match["path"] or "").rstrip(".")
        if linked or (path and (folder / path).is_file()):
            files.append(target or path)
    return list(dict.fromkeys(files))


# Skills in the folders of agents.

MAX_SKILLS = 2000  # in one folder


@dataclass(frozen=True, slots=True)
class Found:
    """A skill found in a folder, with its problem if it is unusable, and the skills of its name that it hides."""

    name: str
    description: str
    path: Path  # folder
    problem: SkillError | None = None
    hides: tuple[Path, ...] = ()


def find_skills(folders: Iterable[Sequence[Path]]) -> list[Found]:
    """Return all skills in these folders, sorted by name. Different skills of one name that are equally near have a
    problem.

    `folders`: nearest first, equally near ones in one list. Raises SkillError for a folder that cannot be read.
    """
    skills: dict[str, Found] = {}
    hidden: dict[str, list[Path]] = {}
    seen: set[Path] = set()  # resolved: folders of skills often link to each other
    for level in folders:
        by_name: dict[str, list[Found]] = {}
        for path in (path for folder in level for path in _skill_folders(folder)):
            real = path.resolve()
            if real not in seen:
                seen.add(real)
                skill = _read(path)
                by_name.setdefault(skill.name, []).append(skill)
        for name, same_name in by_name.items():
            if name in skills:
                hidden.setdefault(name, []).extend(skill.path for skill in same_name)
            else:
                skills[name] = same_name[0] if _are_copies(same_name) else _ambiguous(same_name)
    return [
        Found(skill.name, skill.description, skill.path, skill.problem, tuple(hidden.get(name, ())))
        for name, skill in sorted(skills.items())
    ]


def _skill_folders(folder: Path) -> list[Path]:
    """Return the folders with a SKILL.md in a folder, which may be missing."""
    try:
        paths = sorted(path for path in folder.iterdir() if (path / "SKILL.md").is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SkillError(f"cannot read {folder}: {reason(error)}") from error
    if len(paths) > MAX_SKILLS:
        raise SkillError(f"{folder} has more than {MAX_SKILLS:,} skills", "Name those that you mean")
    return paths


def _read(path: Path) -> Found:
    try:
        name, description = read_card(path)
    except SkillError as error:
        return Found(names.name_of(path.name) or path.name, "", path, error)
    return Found(name, description, path)


def _are_copies(skills: Sequence[Found]) -> bool:
    first, *copies = (skill.path / "SKILL.md" for skill in skills)
    try:
        return all(filecmp.cmp(first, copy, shallow=False) for copy in copies)
    except OSError:
        return False


def _ambiguous(skills: Sequence[Found]) -> Found:
    paths = [str(skill.path) for skill in skills]
    problem = SkillError(f"{len(paths)} skills are called {skills[0].name}: {listed(paths)}", "Name the folder")
    return Found(skills[0].name, skills[0].description, skills[0].path, problem)


MAX_HEADER = 64 << 10  # characters of front matter: PyYAML is slow
MAX_FIELDS = 1000  # declared ones, each searched for in the text
MAX_VALUE = 1000  # characters of one of them
BLANK = re.compile(r"[ \t\n\ufeff]*")
LATER = re.compile(r"^---[ \t]*\n(?:[\w-]+:.*\n){0,3}(?:name|description):[ \t]", re.M)
MAX_BEFORE = 2000  # characters: further down it is not mistaken front matter
OPENS = re.compile(r"---[ \t]*\n")  # opens front matter, or is a rule in the first line
# The closing line, of dashes or dots; the text may begin on it (---# Title).
CLOSES = re.compile(r"^(?:---+[ \t]*(?:\n|\Z)|---(?=[ \t]*[^\s-])|\.\.\.[ \t]*(?:\n|\Z))", re.M)
KEY = re.compile(r"^[\"']?(?P<key>\w[\w .-]{0,63}?)[\"']?[ \t]*[:\uff1a](?P<rest>.*)$", re.M)
TOP_KEY = re.compile(r"[\"']?(?P<key>[A-Za-z_][\w-]{0,63})[\"']?[ \t]*(?::(?=[ \t]|$)|\uff1a)[ \t]*(?P<rest>.*)")
WIDE = re.compile(r"^(?:name|description|fields)[ \t]*\uff1a", re.M)  # to YAML it is part of the key
BLOCK = re.compile(r"[|>][-+\d]*[ \t]*(?:#.*)?")
READ = ("name", "description", "fields")


class Header(NamedTuple):
    """Values of front matter, and the text after it. Without front matter only the text is set."""

    name: str = ""
    description: str = ""
    fields: Mapping[str, str] = {}  # declared values by name
    hoisted: Sequence[str] = ()  # names of those to move to the end of the text
    body: str = ""
    warnings: Sequence[str] = ()


class _Place(NamedTuple):
    """Place of front matter: its YAML in characters [start, end), the text from `body` on."""

    start: int
    end: int
    body: int


def read_header(text: str, where: str) -> Header:
    """Read the front matter of a text, whose lines end with \\n. `where`: name of the text in messages.

    Raises SkillError for front matter that is not closed or too long, and for fields that cannot be read.
    """
    first = _begin(text)
    opening = OPENS.match(text, first)
    if not opening:
        later = LATER.search(text, 0, MAX_BEFORE)
        line = text.count("\n", 0, later.start()) + 1 if later else 0
        warning = f"{where}: line {line} looks like front matter, which has to come first: it is compiled as text"
        return Header(body=text, warnings=[warning] if later and not within(fences(text), later.start()) else [])
    place = find_header(text)
    if place is None:
        line = text.count("\n", 0, first) + 1
        inside = text[opening.end() :].lstrip().split("\n", 1)[0]
        if KEY.match(inside) and not CLOSES.search(text, opening.end()):
            raise SkillError(f"{where}: the front matter that line {line} opens is not closed", "Add a line ---")
        warning = f"{where}: line {line} is ---, and no `key: value` lines follow: all of it is compiled as text"
        return Header(body=text, warnings=[warning])
    if place.end - place.start > MAX_HEADER:
        raise SkillError(f"{where}: the front matter is longer than {MAX_HEADER >> 10} KiB", "Move text below it")
    warnings = []
    if "<!--" in text[:first]:
        warnings.append(f"{where}: the comment before the front matter is not compiled")
    if "\ufffd" in text[place.start : place.end]:
        warnings.append(f"{where}: the front matter has bytes that are not UTF-8")
    # Empty lines before it keep the line numbers.
    header, problem = _parse("\n" * text.count("\n", 0, place.start) + text[place.start : place.end], where)
    if problem:
        warnings.append(f"{where}: the front matter is not valid YAML: {problem}. It is read line by line instead")
    try:
        fields, hoisted = declared(header)
    except SkillError as error:
        raise SkillError(f"{where}: {error.what}", error.remedy) from None
    description = " ".join(header.get("description", "").split())
    if not description:
        warnings.append(f"{where}: no description in the front matter")
    return Header(header.get("name", "").strip(), description, fields, hoisted, text[place.body :], warnings)


def find_header(text: str) -> _Place | None:
    """Return the place of the front matter, after blank lines and comments; None without a closed one that has a `key:
    value` line."""
    opened = OPENS.match(text, _begin(text))
    closed = opened and CLOSES.search(text, opened.end())
    if not opened or not closed:
        return None
    inner = text[opened.end() : closed.start()]
    if dedent(inner).strip() and not KEY.search(dedent(inner)):
        return None
    return _Place(opened.end(), closed.start(), closed.end())


def _begin(text: str) -> int:
    """Return the first character that is no white space, byte order mark or comment."""
    first = 0
    while True:
        first = BLANK.match(text, first).end()  # type: ignore[union-attr]
        end = text.find("-->", first) if text.startswith("<!--", first) else -1
        if end < 0:
            return first
        first = end + 3


def _parse(yaml: str, where: str) -> tuple[dict[str, Any], str]:
    """Return the values of the keys in use, and the error of the YAML. All scalars stay text."""
    from notes_cli.documents import parse_yaml  # not needed to splice

    wide = WIDE.search(yaml)
    if wide:
        line = yaml.count("\n", 0, wide.start()) + 1
        return _by_line(yaml, where), f"line {line}, column {len(wide[0])}: a full-width colon"
    try:
        header = parse_yaml(yaml)
    except ValueError as error:
        return _by_line(yaml, where), str(error)
    if header in (None, ""):
        return {}, ""
    if not isinstance(header, dict):
        return _by_line(yaml, where), "it does not consist of `key: value` lines"
    unread = [key for key in ("name", "description") if not isinstance(header.get(key, ""), str)]
    if unread:
        lines = _by_line(yaml, where)
        return header | {key: lines.get(key, "") for key in unread}, f"{unread[0]} is no text"
    return header, ""


def _by_line(yaml: str, where: str) -> dict[str, Any]:
    """Read the keys in use from front matter that YAML refuses. Of a duplicate key the last one counts."""
    lines = dedent(yaml.expandtabs()).split("\n")
    keys = [(number, match) for number, line in enumerate(lines) if (match := TOP_KEY.fullmatch(line))]
    ends = [*(number for number, _ in keys[1:]), len(lines)]
    values: dict[str, Any] = {}
    for (number, match), following in zip(keys, ends, strict=False):  # without keys `ends` has one entry more
        rest = lines[number + 1 : following]
        if match["key"] == "fields":
            values["fields"] = _fields_of(f"fields: {match['rest']}", *rest, where=f"{where}: line {number + 1}")
        elif match["key"] in READ:
            values[match["key"]] = _text_of(match["rest"], rest)
    if not names.name_of(values.get("name", "")):
        values["name"] = ""  # only brackets, without a letter: the folder's name is better
    return values


def _text_of(first: str, rest: Sequence[str]) -> str:
    """Return a text that is written plain, quoted or as a block, over several lines."""
    text = " ".join([*([] if BLOCK.fullmatch(first) else [first]), *rest]).strip()
    if text[:1] in ("'", '"'):
        mark, text = text[0], text[1:]
        text = text.removesuffix(mark).replace("\\" + mark, mark)
    return text


def _fields_of(*lines: str, where: str) -> Any:
    """Return the fields that these lines of YAML declare. Raises SkillError if they are not valid."""
    from notes_cli.documents import parse_yaml

    try:
        return parse_yaml("\n".join(lines))["fields"]
    except ValueError as error:
        raise SkillError(f"{where}: fields in the front matter: {error}", "Write values in quotes") from error


def declared(header: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the values under `fields:` in the front matter, and the names of hoisted fields. Raises SkillError."""
    entries = header.get("fields", "")
    if entries == "":
        return {}, []
    if not isinstance(entries, dict):
        raise SkillError("fields in the front matter must be `name: value` lines")
    if len(entries) > MAX_FIELDS:
        raise SkillError(f"the front matter declares more than {MAX_FIELDS:,} fields")
    values: dict[str, str] = {}
    hoisted: list[str] = []
    for name, value in entries.items():
        name = field_name(name)
        if not FIELD_NAME.fullmatch(name) and not is_name(name):
            raise SkillError(
                f"field name {name[:80]!r} must be a word of letters, digits, _ and -, or a few such words"
            )
        if name in values:
            raise SkillError(f"field {name!r} is in the front matter twice", "Keep one of them")
        if isinstance(value, dict):
            value, hoist = _mapping(name, value)
            hoisted += [name] if hoist else []
        if not isinstance(value, str):
            raise SkillError(f"the value of field {name!r} must be text or a number")
        values[name] = clean_value(name, value)
        if len(values[name]) > MAX_VALUE:
            raise SkillError(f"the value of field {name!r} is longer than {MAX_VALUE:,} characters")
    return values, hoisted


def _mapping(name: str, entry: dict[str, Any]) -> tuple[Any, bool]:
    """Return the value and `hoist` of a field that is written as `{value: ..., hoist: true}`."""
    for key in entry:
        if key not in ("value", "hoist"):
            raise SkillError(f"field {name!r} has an unknown key {key!r} in the front matter", "Known: value, hoist")
    hoist = entry.get("hoist", "false")
    if hoist not in ("true", "false"):
        raise SkillError(f"hoist of field {name!r} must be true or false, not {hoist!r}")
    if "value" not in entry:
        raise SkillError(f"field {name!r} has no value in the front matter", f"Write {{value: ..., hoist: {hoist}}}")
    return entry["value"], hoist == "true"
