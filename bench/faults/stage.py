"""Run `notes` in forked processes, on a tiny random model and in homes with prior work.

A process is forked from this one, which has imported everything but has opened no model: only Python's start is left
out. `execute` starts a new Python.
"""

from __future__ import annotations

import importlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.faults.frame import ROOT, Failed, traced, waited
from notes_cli import cli
from notes_cli.errors import NotesError
from notes_cli.library.container import open_segment
from notes_cli.library.metadata import to_json
from notes_cli.library.store import Library
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.state import SnapshotError, read_snapshot

sys.path.append(str(ROOT / "tests"))
import tiny  # type: ignore[import-not-found]

TEXT = "date: 2026-06-01\ntier: gold\n\nReturns before 2026-06-15 are accepted, later ones are refused.\n"
OTHER = "hours: 9 to 5\n\nWe answer within the hours that are given, and not on Sundays.\n"
VARYING = ("time", "created", "files", "read_at")  # what differs between runs in a snapshot
IMPORTED = (
    *("gguf", "filelock", "jinja2", "xxhash", "notes_cli.engine.model", "notes_cli.engine.sequence"),
    *("notes_cli.sessions.session", "notes_cli.sessions.archive", "notes_cli.runtime.generate", "notes_cli.text.skill"),
    *("notes_cli.runtime.recompile", "notes_cli.runtime.assemble"),
    "notes_cli.measure.verify",
)
Command = str | Callable[[Path], object]  # a command line in which HOME is the home, or a function of the home


class Outcome(NamedTuple):
    """Outcome of a run of `notes`. `code` is negative for a signal."""

    code: int
    out: str
    err: str

    def check_tidy(self, what: str = "") -> None:
        """Raise Failed for a traceback, or an error without one clear line, of a run that was not killed."""
        if "Traceback" in self.err or "Traceback" in self.out:
            raise Failed(f"{what}: {self.err.strip()[-300:]}", "crash")
        if self.code in (0, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP):
            return
        last = self.err.strip().splitlines()[-1:] or [""]
        if self.code not in (1, 2) or not last[0].startswith("notes: ") or "None" in last[0]:
            raise Failed(f"{what}: status {self.code} without a clear line: {last[0]!r}", "crash")


class Contents(NamedTuple):
    """Contents of a home: segments by file name, sessions by name, exports and config.yaml, and all files."""

    segments: Mapping[str, str]
    sessions: Mapping[str, tuple[str, ...]]
    exports: Mapping[str, bytes]
    files: frozenset[str]
    problems: Sequence[str]

    @property
    def temporary(self) -> list[str]:
        """Hidden files that are neither locks nor the access log, and unfinished ones."""
        parts = {name: [part for part in name.split("/") if part not in (".locks", ".uses")] for name in self.files}
        hidden = {name for name in parts if any(part[0] == "." for part in parts[name])}
        unfinished = {name for name in parts if name.endswith((".tmp", ".import")) and parts[name] == name.split("/")}
        return sorted(hidden | unfinished)


@dataclass(frozen=True)
class Stage:
    """A model and a folder to work in, which is the working folder of all runs."""

    folder: Path
    model: Path

    @classmethod
    def make(cls, folder: Path) -> Stage:
        """Write the model and two texts, and import the modules of commands."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        (folder / "returns.txt").write_text(TEXT)
        (folder / "support.txt").write_text(OTHER)
        model = tiny.write_model(folder / "tiny.gguf", layers=1, embd=32, heads=2, kv_heads=1)
        old = time.time() - 3600  # digests are stored of files that are older than a moment
        os.utime(model, (old, old))
        for name in cli.COMMANDS:
            cli.command_named(name)
        for name in IMPORTED:
            importlib.import_module(name)
        return cls(folder, model)

    def prepared(self, name: str, commands: Sequence[str]) -> Path:
        """A home in which these commands have run, made once."""
        home = self.folder / name
        if not home.exists():
            (home / "out").mkdir(parents=True, mode=0o700)
            home.chmod(0o700)
            for command in commands:
                outcome = self.run(command, home)
                if outcome.code:
                    raise RuntimeError(f"{command}: {outcome.err}")
        return home

    def copied(self, home: Path, name: str = "home") -> Path:
        """A copy of a home, in place of an older one of that name."""
        new = self.folder / name
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(home, new)
        return new

    def arguments(self, command: str, home: Path) -> list[str]:
        """The words of a command, with options of an answer for `ask`."""
        words = [word.replace("HOME", str(home)) for word in shlex.split(command)]
        return [*words, "-n", "2", "--temp", "0", "--seed", "1"] if words[0] == "ask" else words

    def variables(self, home: Path) -> dict[str, str]:
        model = {"NOTES_MODEL": str(self.model), "NOTES_CTX_SIZE": "1024", "NOTES_THREADS": "1"}
        return {**model, "NOTES_HOME": str(home)}

    def run(
        self, command: Command, home: Path, before: Callable[[], object] | None = None, seconds: float = 30
    ) -> Outcome:
        """Run a command in a forked process, after `before` has been called there. Raises Failed if it takes longer."""
        return self.end(self.begin(command, home, before), seconds=seconds)

    def begin(self, command: Command, home: Path, before: Callable[[], object] | None = None) -> int:
        """Begin such a run, and return its process; `end` waits for it."""
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            self._work(command, home, before)
        return child

    def end(self, child: int, seconds: float = 30) -> Outcome:
        code, _ = waited(child, seconds)
        return Outcome(code, *((self.folder / name).read_text(errors="replace") for name in ("out", "err")))

    def execute(self, command: str, home: Path) -> subprocess.Popen[bytes]:
        """Run a command in a new Python."""
        words = [sys.executable, "-m", "notes_cli", *self.arguments(command, home)]
        environment = {**os.environ, **self.variables(home), "PYTHONPATH": str(ROOT)}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, env=environment, cwd=self.folder, start_new_session=True, **streams)

    def _work(self, command: Command, home: Path, before: Callable[[], object] | None) -> None:
        """The child's part of a run. Never returns."""
        code = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(self.folder)
            os.environ.update(self.variables(home))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, name in enumerate(("out", "err"), 1):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
            sys.stdout, sys.stderr = (  # as in a new process
                io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", write_through=True),
                io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True),
            )
            if before is not None:
                before()
            if callable(command):
                command(home)
                code = 0
            else:
                sys.argv = ["notes", *self.arguments(command, home)]
                cli.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1 if error.code else 0
        except NotesError as error:  # of a function, as the command line prints it
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


def contents(home: Path) -> Contents:
    """Read a home with the library's readers; `problems` are their errors."""
    problems, segments, sessions = [], {}, {}
    for entry in Library(home / "library").entries():
        try:
            segment = open_segment(entry.path)
            segments[entry.path.name] = f"{segment.text}\0{segment.tokens.tolist()}"
        except NotesError as error:
            problems.append(str(error))
    kept = Sessions(home / "sessions")
    for name in kept.names():
        try:
            stored = kept.find(name)
            history = []
            for number in stored.in_force:
                snapshot = to_json(read_snapshot(stored.path(number).read_bytes()))
                parts = [*snapshot.pop("state", {}).items(), *snapshot.items()]
                history.append({key: value for key, value in parts if key not in VARYING})
            rows: list[Any] = []
            for file in stored.kept():
                segment = open_segment(stored.folder / file)
                rows.append((file, segment.tokens.tolist(), [layer.k.tobytes() for layer in segment.layers]))
            sessions[name] = (str(history), str(stored.state.tokens), str(rows))
        except (NotesError, SnapshotError) as error:
            problems.append(f"session {name}: {error}")
    files = frozenset(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
    exports = {path.name: path.read_bytes() for path in (*home.glob("out/*.tar"), *home.glob("config.yaml"))}
    return Contents(segments, sessions, exports, files, problems)
