"""Finds the images that the text of a skill refers to, `![what it shows](photo.jpg)` as in Markdown, and loads them.

Paths are relative to the folder of the skill's file and cannot leave it, so that an untrusted text cannot read other
files. Nothing is fetched. Code, comments and escaped marks are text. Only `load_images` reads files.
"""

from __future__ import annotations

import re
import stat
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from notes_cli.errors import ImageError
from notes_cli.images import MAX_BYTES, SUFFIXES, Picture, load_picture
from notes_cli.text.fields import Span, fences, within

MOST = 256  # images in one text
IMAGE = re.compile(
    r"(?<!\\)!\[[^\[\]\n]{0,500}\]\([ \t]*"
    r"(?:<(?P<angled>[^<>\n]{1,500})>|(?P<bare>(?:[^\s()<>]|\([^\s()<>]{0,100}\)){1,500}))"
    r"(?:[ \t]+(?:\"[^\"\n]{0,500}\"|'[^'\n]{0,500}'))?[ \t]*\)"
)
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:|//")
TICKS = re.compile(r"`+")


@dataclass(frozen=True, slots=True)
class Link:
    """A reference to an image in characters [start, end). `why`: reason why its file is not loaded, else empty."""

    start: int
    end: int
    target: str  # as written
    path: str = ""
    why: str = ""

    @property
    def address(self) -> bool:
        """True if the target is a URL."""
        return ADDRESS.match(self.target) is not None


@dataclass(frozen=True, slots=True)
class Shown:
    """An image in the place of characters [start, end) of a text."""

    start: int
    end: int
    picture: Picture


def find_images(text: str, folder: Path) -> tuple[Link, ...]:
    """Return the images that a text refers to, in order."""
    matches = list(IMAGE.finditer(text))
    if not matches:
        return ()
    literal = _literal(text)
    links = []
    for match in matches:
        if not within(literal, match.start()):
            target = match["angled"] or match["bare"]
            links.append(Link(*match.span(), target, *_file(target, folder)))
    return tuple(links)


def load_images(links: Sequence[Link]) -> list[Picture]:
    """Load the images of usable links, each file once. Raises ImageError for files that are no images, too many, or too
    large."""
    if len(links) > MOST:
        raise ImageError(f"a text shows {len(links)} images, more than {MOST}", "Make several skills of it")
    pictures: dict[str, Picture] = {}
    for link in links:
        if link.path not in pictures:
            pictures[link.path] = load_picture(Path(link.path))
            if sum(len(picture.data) for picture in pictures.values()) > MAX_BYTES:
                raise ImageError(f"the images of a text are larger than {MAX_BYTES >> 20} MiB", "Make them smaller")
    return [pictures[link.path] for link in links]


def _file(target: str, folder: Path) -> tuple[str, str]:
    """Resolve a target to a file, or to the reason why it is not loaded; the other is empty."""
    if ADDRESS.match(target):
        return "", "it is an address, and nothing is fetched"
    path = next((path for path in (folder / target, folder / unquote(target)) if _exists(path)), None)
    if path is None:
        return "", "there is no such file beside it"
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            return "", "its file is outside of the skill's folder"
        if not stat.S_ISREG(real.stat().st_mode):
            return "", "it is not a regular file"
    except (OSError, ValueError, RuntimeError):  # Python before 3.13: RuntimeError for circular links
        return "", "its file cannot be read"
    return (str(path), "") if path.suffix.lower() in SUFFIXES else ("", f"it is none of {', '.join(SUFFIXES)}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        return False


def _literal(text: str) -> list[Span]:
    """Return the spans that are not Markdown: fenced code, code spans, comments. In order."""
    blocks = _merged([*fences(text), *_comments(text)])
    return _merged([*blocks, *_code(text, blocks)])


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            start, last = merged.pop()
            end = max(end, last)
        merged.append((start, end))
    return merged


def _comments(text: str) -> Iterator[Span]:
    start = text.find("<!--")
    while start >= 0:
        end = text.find("-->", start + 4)
        if end < 0:
            return
        yield start, end + 3
        start = text.find("<!--", end + 3)


def _code(text: str, blocks: Sequence[Span]) -> Iterator[Span]:
    """Yield code spans, within paragraphs: the same number of backticks on both sides."""
    ticks = [match.span() for match in TICKS.finditer(text) if not within(blocks, match.start())]
    lengths: dict[int, list[int]] = {}
    for start, end in ticks:
        lengths.setdefault(end - start, []).append(start)
    done = 0
    for start, end in ticks:
        if start < done:
            continue
        same = lengths[end - start]
        index = bisect_left(same, end)
        if index < len(same) and "\n\n" not in text[end : same[index]]:
            done = same[index] + end - start
            yield start, done
