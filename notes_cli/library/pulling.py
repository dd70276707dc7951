"""Downloads of models from Hugging Face into its cache, by huggingface_hub: only where a user asks for one.

What was begun is gone on with the next time. Nothing here is imported by any other command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notes_cli.engine.source import part_names
from notes_cli.errors import ModelError, NotesError, reason
from notes_cli.library.hub import STORE, bases
from notes_cli.library.named import Named, files, parse

USUAL = "Q4_K_M"  # what is meant where a name has no quantization and there are several, as for llama.cpp
_REPO = re.compile(r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?(\w[\w.-]*/\w[\w.-]*)/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a name means in a repository: its files, and their bytes as far as the repository tells."""

    repo: str
    model: Named
    files: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        """What to call it from now on."""
        return self.model.name


def choose(word: str) -> Choice:
    """Ask Hugging Face what the name means. Raise ModelError for what it does not have, NotesError where it cannot be
    asked."""
    base, tag = parse(word.removeprefix("https://").removeprefix("http://"))
    match = _REPO.fullmatch(base)
    if match is None:
        what = "is no name of a repository on Hugging Face (USER/REPO or USER/REPO:QUANTIZATION)"
        raise ModelError(f"{word} {what}", "Models of Ollama are fetched by: ollama pull NAME")
    repo = match[1]
    with _asking(repo):
        info = _library().HfApi().model_info(repo, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return chosen(repo, tag, sizes)


def chosen(repo: str, tag: str | None, sizes: Mapping[str, int]) -> Choice:
    """The model that a tag means among the files of a repository, with the bytes of each."""
    user, name = repo.split("/")
    there = list(files(STORE, bases(user, name), map(Path, sorted(sizes)), lambda path: ""))
    if not there:
        raise ModelError(f"{repo} has no GGUF files", "Look for a repository whose name ends in GGUF")
    meant = [one for one in there if one.called(repo, tag)]
    if tag is None and len(meant) > 1:
        meant = [one for one in there if USUAL.casefold() in one.tags] or meant
    choices = [Choice(repo, one, (own := _own(one.path, sizes)), sum(sizes[file] for file in own)) for one in meant]
    if len(choices) != 1:
        known = ", ".join(one.tag for one in there)
        if not choices:
            raise ModelError(f"{repo} has no {tag}. It has {known}")
        names = ", ".join(one.name for one in choices)
        raise ModelError(f"{repo}{f':{tag}' if tag else ''} means several files", f"Name one of {names}")
    return choices[0]


def _own(path: Path, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """All files of a model of which this is the first."""
    names = [path.with_name(name).as_posix() for name in part_names(path.name)]
    missing = [name for name in names if name not in sizes]
    if missing:
        raise ModelError(f"the repository lacks {missing[0]}, a part of {path.name}")
    return tuple(names)


def fetch(choice: Choice, *, show: bool) -> Path:
    """Download what is not there yet, and return the (first) file in the cache. `show`: bars on standard error. Raise
    NotesError."""
    library = _library()
    (library.utils.enable_progress_bars if show else library.utils.disable_progress_bars)()
    paths = []
    with _asking(choice.repo):
        for file in choice.files:
            paths.append(Path(library.hf_hub_download(choice.repo, file)))
    return paths[0]


def refuse_offline(*names: str) -> None:
    """Raise NotesError if one of these variables is set."""
    for name in names:
        if os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off"):
            raise NotesError(f"{name} is set: nothing is fetched", "Unset it")


def _library() -> Any:
    refuse_offline("NOTES_OFFLINE", "HF_HUB_OFFLINE")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise NotesError("downloads need huggingface_hub", "Install it: pip install huggingface_hub") from error
    return huggingface_hub


@contextmanager
def _asking(repo: str) -> Iterator[None]:
    """What goes wrong meanwhile, in one line."""
    errors = _library().errors
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise NotesError("HF_HUB_OFFLINE is set: nothing is fetched", "Unset it") from error
    except errors.GatedRepoError as error:
        what = f"{repo} asks who you are (its licence must be accepted at https://huggingface.co/{repo})"
        raise ModelError(what, "Then run: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        what = f"Hugging Face has no {repo}, or it is private"
        raise ModelError(what, "For a private one run: hf auth login") from error
    except errors.HfHubHTTPError as error:
        raise NotesError(f"Hugging Face refuses {repo}: {_first_line(error)}", "Try again later") from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise NotesError(f"cannot reach Hugging Face for {repo}: {_first_line(error)}", _AGAIN) from error
    except (errors.HFValidationError, errors.EntryNotFoundError) as error:
        raise ModelError(f"{repo}: {_first_line(error)}") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise NotesError(f"cannot fetch {repo}: {where}{reason(error)}", _AGAIN) from error


_AGAIN = "Run it again: what was fetched is kept"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
