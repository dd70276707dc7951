"""Running `notes`: in this process, which is quick, or in one of its own where signals, pipes and exits matter."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from notes_cli import output, signals
from notes_cli.cli import run

from ..limits import unprivileged_here

TEXT = """# Returns

date: 2026-06-01
tier: gold

Returns before 2026-06-15 are accepted, later ones are refused.
"""


@dataclass(frozen=True)
class Outcome:
    """Exit status, stdout and stderr of one run."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refusal(self, code: int = 1) -> str:
        """The only line of a run that was refused and printed nothing else."""
        assert (self.code, self.out, self.err.count("\n")) == (code, "", 1), self
        return self.err


Notes = Callable[..., Outcome]


class _Pipe(io.TextIOWrapper):
    """A text stream over bytes in memory; not a terminal."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", write_through=True)

    def text(self) -> str:
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]


def run_here(*arguments: object, stdin: str | bytes = b"", together: bool = False) -> Outcome:
    """Run `notes` with these arguments in this process. `together`: both streams are one, `out`."""
    out, err = _Pipe(), _Pipe()
    before = sys.stdin
    sys.stdin = _Pipe(stdin.encode() if isinstance(stdin, str) else stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out if together else err):
            code = run([str(argument) for argument in arguments])
    finally:
        sys.stdin = before
        output.begin(json=False)  # for tests of this process that run no command
    return Outcome(code, out.text(), err.text())


SHELL = "|<>;&()"  # characters of its own words, outside quotes


def words(line: str) -> list[str]:
    """The words of a line, as a shell has them."""
    found = shlex.shlex(line.replace("\\\n", ""), posix=True, punctuation_chars=SHELL)
    found.whitespace_split = True
    return list(found)


def is_operator(word: str) -> bool:
    """True for words of a shell's own, such as `|`."""
    return word != "" and set(word) <= set(SHELL)


def run_line(line: str, together: bool = False) -> Outcome:
    """Run a line in this process, or by a shell if it has more than `notes` with arguments."""
    if line.startswith("notes ") and "$" not in line and not any(map(is_operator, words(line))):
        return run_here(*words(line)[1:], together=together)
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    errors = subprocess.STDOUT if together else subprocess.PIPE
    done = subprocess.run(["bash", "-c", line], **streams, stderr=errors, text=True)
    return Outcome(done.returncode, done.stdout, done.stderr or "")


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "notes_cli", *map(str, arguments)]


def run_apart(*arguments: object, stdin: str = "") -> Outcome:
    """Run `notes` with these arguments in a process of its own."""
    done = subprocess.run(command_line(*arguments), input=stdin, capture_output=True, text=True, errors="replace")
    return Outcome(done.returncode, done.stdout, done.stderr)


class Terminal(_Pipe):
    """A stream that reports being a terminal, and collects the output."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handle SIGINT in this process as `notes` does, which ignores all signals at its end."""
    monkeypatch.setattr(signals, "working", True)
    monkeypatch.setattr(signals, "received", 0)
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signals._on_signal)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.received = 0


def on_a_terminal(arguments: Sequence[object], **environment: str) -> str:
    """Run `notes` in this process as on a terminal, and return its output on both streams."""
    shown = Terminal()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdin", _Pipe())
        code = run([str(argument) for argument in arguments])
    assert code == 0, shown.text()
    return shown.text()


def on_a_pty(arguments: Sequence[object], code: str, status: int = 0) -> str:
    """Run code and then `notes` in a process on a pseudo-terminal, and return its output."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nfrom notes_cli.__main__ import main; main()", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    # This end stays open until an end mark is read: a terminal whose last writer has left may drop its last lines.
    data, mark = b"", b"\0end of output\0"
    written = threading.Thread(target=lambda: (process.wait(), os.write(slave, mark)))
    written.start()
    while not data.endswith(mark):
        data += os.read(master, 4096)
    written.join()
    os.close(slave)
    os.close(master)
    assert process.returncode == status, data
    return data.removesuffix(mark).decode()


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_uses(found: dict[str, bytes]) -> dict[str, bytes]:
    """A snapshot without the records of uses, which each answer adds to."""
    return {path: content for path, content in found.items() if ".uses" not in Path(path).parts}


@pytest.fixture
def model(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny random model, which NOTES_MODEL names."""
    path = make_model("llama")
    monkeypatch.setenv("NOTES_MODEL", str(path))
    return path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models need one thread, and no test should depend on the number of cores."""
    monkeypatch.setenv("NOTES_THREADS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def notes(model: Path) -> Notes:
    """`notes(*arguments, stdin="")` runs in this process, with the tiny model as the default one."""
    return run_here


@pytest.fixture
def skill(tmp_path: Path) -> Path:
    """A skill text with the fields date and tier, named returns.txt."""
    path = tmp_path / "returns.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def compiled(notes: Notes, skill: Path) -> Path:
    """The skill compiled into the library as `returns`; its segment file."""
    outcome = notes("compile", skill)
    assert outcome.code == 0, outcome.err
    return Path(outcome.out.strip())


@pytest.fixture
def unprivileged() -> Notes:
    """Run `notes` without the right to pass over the modes of files, which root has."""

    def run(*arguments: object) -> Outcome:
        with unprivileged_here():
            return run_here(*arguments)

    return run
