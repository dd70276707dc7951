"""A model that another program keeps: what it is called there, and its file. Nothing is ever written there.

A name is one or more words with a tag, as in `qwen3:0.6b` or `user/repo:Q4_K_M`. Names are compared, never put together
to a path: what a user types reaches no file but those that a store lists.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from notes_cli.errors import reason

Tell = Callable[[str], object]  # is told of what cannot be read

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-[0-9]{5}")
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")
DOWNLOADING = (".incomplete", ".downloadInProgress")  # how Hugging Face and llama.cpp end a file until it is whole
_UNFINISHED = (*DOWNLOADING, ".part", ".partial")
_BESIDE = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # as llama.cpp tells them from models


@dataclass(frozen=True, slots=True)
class Named:
    """A model of a store."""

    store: str
    bases: tuple[str, ...]  # what it is called without its tag; the first is shown
    tag: str  # "" for none
    path: Path
    problem: str = ""  # why it cannot be used
    tags: frozenset[str] = frozenset()  # all tags that it answers to, in lower case

    @property
    def name(self) -> str:
        """What to type for it."""
        return f"{self.bases[0]}:{self.tag}" if self.tag else self.bases[0]

    def called(self, base: str, tag: str | None) -> bool:
        """Whether a name means this model, None being any tag."""
        known = {name.casefold() for name in self.bases}
        return base.casefold() in known and (tag is None or tag.casefold() in self.tags)


def parse(word: str) -> tuple[str, str | None]:
    """The base and the tag of a name."""
    base, colon, tag = word.rpartition(":")
    return (base, tag) if colon and "/" not in tag else (word, None)


def listed(folder: Path, tell: Tell) -> list[str]:
    """The names in a folder, none if it is not there."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        tell(unreadable(error))
        return []


def unreadable(error: OSError) -> str:
    """What to tell of a folder that cannot be read."""
    return f"cannot read {error.filename}: {reason(error)}"


def fault(path: Path, within: Path | None = None) -> str:
    """Why a file of a store cannot be a model, "" if it can. `within`: links may not leave this folder."""
    try:
        real = path.resolve(strict=True)
        if within is not None and not real.is_relative_to(within.resolve()):
            return f"it is a link to {real}, outside of {within}"
        return "" if stat.S_ISREG(real.stat().st_mode) else f"{path} is not a regular file"
    except FileNotFoundError:
        return f"its file is missing ({path})"
    except RuntimeError:  # Python before 3.13, of links in a circle
        return f"{path} is a link that leads nowhere"
    except OSError as error:
        return f"{path} cannot be read ({reason(error)})"


def files(
    store: str, bases: tuple[str, ...], paths: Iterable[Path], check: Callable[[Path], str] = fault
) -> Iterator[Named]:
    """The models among files that share a base: one for the parts of a split one; what belongs beside a model is none.

    Their tags are the quantizations that end their names, or their whole names where that would be one for two.
    """
    stems = {}
    for path in paths:
        name = path.name
        unfinished = next((end for end in _UNFINISHED if name.endswith(f".gguf{end}")), "")
        stem = name.removesuffix(unfinished).removesuffix(".gguf")
        part = _PART.fullmatch(stem)
        if stem == name or any(word in name for word in _BESIDE) or (part and part["number"] != "00001"):
            continue
        stems[path] = part["stem"] if part else stem, unfinished
    shown = Counter(_shown(stem) for stem, _ in stems.values())
    for path, (stem, unfinished) in stems.items():
        tag = _shown(stem) if shown[_shown(stem)] == 1 else stem
        ends = {stem, *(stem[at.end() :] for at in re.finditer("[-.]", stem))}
        problem = "its download has not been finished" if unfinished else check(path)
        yield Named(store, bases, tag, path, problem, frozenset(end.casefold() for end in ends))


def _shown(stem: str) -> str:
    """The quantization at the end of a file's name, else the name."""
    found = _TAG.search(stem)
    return found[1] if found else stem
