"""The stage: a tiny random model, homes with prior work, and `notes` run in forked processes.

A process is forked from this one, which has imported everything but has opened no model: what is left out is Python's
start, nothing of notes. Where that start matters (signals), `apart` executes `notes` from scratch.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.faults.frame import ROOT, traced, waited
from notes_cli import cli
from notes_cli.errors import NotesError
from notes_cli.library.container import open_segment
from notes_cli.library.store import Library
from notes_cli.sessions.folder import Sessions

TEXT = "date: 2026-06-01\ntier: gold\n\nReturns before 2026-06-15 are accepted, later ones are refused.\n"
OTHER = "hours: 9 to 5\n\nWe answer within the hours that are given, and not on Sundays.\n"
MODEL_OPTIONS = ("-c", "1024", "-t", "1")
SUMS = ("rows_checksum", "replaces")  # keys of a ledger that go by the time
ANSWER = ("-n", "2", "--temp", "0", "--seed", "1")


class Outcome(NamedTuple):
    """Outcome of a run of `notes`. `code` is negative for a signal."""

    code: int
    out: str
    err: str

    @property
    def untidy(self) -> str:
        """Return violations in the output of a run that was not killed: a traceback, silence, several lines."""
        if "Traceback" in self.err or "Traceback" in self.out:
            return f"traceback: {self.err.strip().splitlines()[-1][:300]}"
        if self.code in (0, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP):
            return ""
        if self.code not in (1, 2):
            return f"status {self.code}: {self.err[-200:]}"
        last = self.err.strip().splitlines()[-1:] or [""]
        if not last[0].startswith("notes: ") or "None" in last[0]:
            return f"status {self.code} without a clear line: {last[0]!r}"
        return ""


class Look(NamedTuple):
    """Contents of a home: segments by file name, sessions by name, and all files."""

    segments: Mapping[str, str]
    sessions: Mapping[str, tuple[Any, ...]]
    exports: Mapping[str, bytes]  # and profiles
    files: frozenset[str]
    problems: Sequence[str]


@dataclass(frozen=True)
class Stage:
    """A model and a folder to work in."""

    folder: Path
    model: Path

    @classmethod
    def set(cls, folder: Path) -> Stage:
        """Write the model, and import the modules of commands."""
        sys.path.insert(0, str(ROOT / "tests"))
        import tiny

        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        model = tiny.write_model(folder / "tiny.gguf", layers=1, embd=32, heads=2, kv_heads=1)
        old = time.time() - 3600  # a digest is remembered of a file that has settled
        os.utime(model, (old, old))
        for name in cli.COMMANDS:
            cli.command_named(name)
        for name in WARM:
            importlib.import_module(name)
        return cls(folder, model)

    def home(self, name: str) -> Path:
        return self.folder / name

    def copied(self, home: Path, name: str) -> Path:
        """A copy of a home, in place of an older one of that name."""
        new = self.folder / name
        _unlocked(new)
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(home, new)
        return new

    def options(self) -> list[str]:
        return ["-m", str(self.model), *MODEL_OPTIONS]

    def run(
        self,
        arguments: Sequence[str] | Callable[[], object],
        home: Path,
        *,
        before: Callable[[], object] | None = None,
        seconds: float = 30,
        stdin: str = "",
    ) -> Outcome:
        """Run `notes` (or any function) in a forked process, after `before` has been called there.

        Raise TimeoutError where it takes longer than `seconds`.
        """
        child, out, err = self.begin(arguments, home, before=before, stdin=stdin)
        return self.end(child, out, err, seconds)

    def begin(
        self,
        arguments: Sequence[str] | Callable[[], object],
        home: Path,
        *,
        before: Callable[[], object] | None = None,
        stdin: str = "",
        tag: str = "",
    ) -> tuple[int, Path, Path]:
        """Begin such a run; `end` waits for it. `tag` keeps the outputs of several at once apart."""
        out, err = self.folder / f"out{tag}", self.folder / f"err{tag}"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _work(arguments, home, before, (out, err), stdin)
        return child, out, err

    def end(self, child: int, out: Path, err: Path, seconds: float = 30) -> Outcome:
        status, _ = waited(child, seconds)
        return Outcome(
            os.waitstatus_to_exitcode(status), out.read_text(errors="replace"), err.read_text(errors="replace")
        )

    def apart(self, arguments: Sequence[str], home: Path, told: int | None = None) -> subprocess.Popen[str]:
        """Execute `notes` from scratch. `told`: a pipe that is closed when its first line has run."""
        environment = {**os.environ, "NOTES_HOME": str(home), "PYTHONPATH": str(ROOT)}
        begin = ["-m", "notes_cli"]
        if told is not None:
            begin = ["-c", f"import notes_cli.__main__ as begin, os; os.close({told}); begin.main()"]
        return subprocess.Popen(
            [sys.executable, *begin, *arguments],
            pass_fds=() if told is None else (told,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            cwd=home.parent,
            start_new_session=True,
        )


WARM = (
    *("gguf", "filelock", "jinja2", "xxhash", "notes_cli.engine.model", "notes_cli.engine.sequence"),
    *(
        "notes_cli.sessions.session",
        "notes_cli.runtime.generate",
        "notes_cli.runtime.recompile",
        "notes_cli.runtime.assemble",
    ),
    *("notes_cli.sessions.archive", "notes_cli.measure.calibrate", "notes_cli.measure.battery", "notes_cli.text.skill"),
)


def _work(
    arguments: Sequence[str] | Callable[[], object],
    home: Path,
    before: Callable[[], object] | None,
    streams: tuple[Path, Path],
    stdin: str,
) -> None:
    """The child's part of a run. Never returns."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(home.parent)
        os.environ["NOTES_HOME"] = str(home)
        read, write = os.pipe()
        os.write(write, stdin.encode())
        os.close(write)
        os.dup2(read, 0)
        for number, path in enumerate(streams, 1):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, number)
            os.close(handle)
        sys.stdin, sys.stdout, sys.stderr = (  # as in a new process, whatever this one has set
            io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8"),
            io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8"),
            io.TextIOWrapper(
                io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
            ),
        )
        if before is not None:
            before()
        if callable(arguments):
            arguments()
            code = 0
        else:
            sys.argv = ["notes", *arguments]
            cli.main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except NotesError as error:  # of a function, in the command line's words
        os.write(2, f"notes: {error}\n".encode())
        code = 1
    except BaseException as error:
        os.write(2, f"Traceback: {traced(error)}\n".encode())
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def look(home: Path) -> Look:
    """Read a home with the library's readers; `problems` are their errors."""
    problems = []
    segments, sessions = {}, {}
    library, kept = Library(home / "library"), Sessions(home / "sessions")
    for entry in library.entries():
        if entry.problem:
            problems.append(entry.problem)
            continue
        try:
            segment = open_segment(entry.path)
            segments[entry.path.name] = f"{segment.text}\0{segment.tokens.tolist()}"
        except NotesError as error:
            problems.append(str(error))
    for name in kept.names():
        try:
            stored = kept.find(name)
            lines = [
                {key: value for key, value in line.items() if key not in ("time", "heard", *SUMS)}
                for line in stored.lines
            ]
            rows = []
            for file in stored.kept():
                segment = open_segment(stored.folder / file)
                rows.append((file, segment.tokens.tolist(), [layer.k.tobytes() for layer in segment.layers]))
            sessions[name] = (str(lines), str(stored.state.tokens), str(rows))
        except NotesError as error:
            problems.append(f"session {name}: {error}")
    files = frozenset(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
    exports = {path.name: path.read_bytes() for path in (*home.glob("out/*.tar"), *home.glob("profiles/*.json"))}
    return Look(segments, sessions, exports, files, problems)


def temporary(files: frozenset[str]) -> list[str]:
    """Return hidden files that are neither locks nor records of uses."""
    return sorted(
        name
        for name in files
        if any(part.startswith(".") and part not in (".locks", ".uses") for part in name.split("/"))
        or (not {".locks", ".uses"} & set(name.split("/")) and name.endswith((".tmp", ".import")))
    )


def _unlocked(folder: Path) -> None:
    """Make a folder that a case has made unwritable one that can be removed."""
    if folder.is_dir():
        for root, folders, _ in os.walk(folder):
            for name in ["", *folders]:
                os.chmod(os.path.join(root, name), 0o700)
