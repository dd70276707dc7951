"""`notes` as a process: signals at any instant, pipes, closed streams, start-up."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from notes_cli.cli import COMMANDS, run
from notes_cli.output import Stdout

from .conftest import Notes, Terminal, command_line, on_a_pty, run_here, snapshot

ENDLESS = ("-n", "100000", "-c", "110000", "--beyond-trained")  # far longer than any test waits


def test_a_closed_pipe_ends_quietly(model: Path) -> None:
    """`notes ask ... | head -c 1`: no traceback, no message, and the process ends."""
    script = f"{shlex.join(command_line('ask', 'Why', *ENDLESS))} < /dev/null | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True)
    assert done.stderr == b""
    assert done.stdout.endswith(b"141\n")


def test_help_needs_neither_numpy_nor_llama(home: Path) -> None:
    """Help and the list are there at once: nothing heavy is imported."""
    code = (
        "import sys; from notes_cli.cli import run; "
        "statuses = {run([*line.split(), '-h']) for line in ['', *sys.argv[1:]]}; "
        "print(*statuses, *sorted({'numpy', 'notes_cli.lib', 'gguf', 'rich', 'jinja2'} & set(sys.modules))); "
        "run(['ls', '--json']); print('notes_cli.lib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True)
    assert (
        done.stdout.splitlines()[-3:] == ["0", "[]", "False"] and done.stdout.count("Usage: notes") == len(COMMANDS) + 1
    )
    bare = run_here()
    assert bare.code == 2 and "Usage: notes" in bare.err


INTERRUPTED = (130, "", "notes: interrupted\n")
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal was closed"}
STATUS = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGHUP: -signal.SIGHUP}


def stopped(number: int, after: float, *arguments: object) -> tuple[int, str, str]:
    """Return status, stdout and stderr of `notes` after a signal, seconds after its first line has run."""
    begin = "import notes_cli.__main__ as start, sys; sys.stderr.write('begun'); sys.stderr.flush(); start.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", begin, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr and process.stderr.read(5) == "begun"
    time.sleep(after)
    process.send_signal(number)
    out, err = process.communicate()
    return process.returncode, out, err


def run_with(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`notes` begun in a process that has run this code first."""
    begin = f"import sys\n{code}\nfrom notes_cli.__main__ import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", begin, *map(str, arguments)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


# Raises a signal at the n-th Python event (a call, a line, a return, in callbacks too) after `notes` has begun.
STEPPED = """
import os, signal, threading
def trace(frame, event, argument, left=[{at}]):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return trace
import notes_cli.signals
install = notes_cli.signals.install
def begin():
    install()
    notes_cli.signals.install = install
    sys.settrace(trace)
notes_cli.signals.install = begin
"""


@pytest.mark.parametrize("at", [1, 900, 20_000, 90_000, 200_000])
def test_interrupted_at_any_step(model: Path, skill: Path, home: Path, at: int) -> None:
    """From the first line on, in imports, callbacks and finalizers: one line and 130, or all was done before."""
    done = run_with(STEPPED.format(at=at), "compile", skill, "-q")
    whole = done.returncode == 0 and len(list((home / "library").glob("*.gguf"))) == 1 and done.stderr == ""
    assert whole or (done.returncode, done.stderr) == (130, "notes: interrupted\n")
    assert not [path for path in snapshot(home) if path.endswith(".tmp")]


@pytest.mark.parametrize(
    ("number", "after"),
    [*((signal.SIGINT, after) for after in (0.0, 0.1, 0.3, 0.7)), *((signal.SIGTERM, 0.2), (signal.SIGHUP, 0.7))],
)
def test_stopped_at_any_time(model: Path, number: signal.Signals, after: float) -> None:
    """The same in real time. After SIGTERM and SIGHUP the process ends by the signal."""
    code, _, err = stopped(number, after, "ask", "Why?", *ENDLESS)
    assert code == STATUS[number] and err == f"notes: {WORDS[number]}\n"


# Places where an exception of a signal handler is lost or comes at a bad time; strike() raises the signal once.
STRIKE = """
import ctypes, os, signal
import notes_cli.signals
import notes_cli.engine.native as process
import notes_cli.engine.sequence as sequence
notes_cli.signals.install()
from notes_cli.engine.native import llama
sent = []
def strike(*_):
    if not sent:
        sent.append(1)
        os.kill(os.getpid(), signal.{signal})
    return True
def before(owner, name, action):
    wrapped = getattr(owner, name)
    setattr(owner, name, lambda *given: (action(), wrapped(*given))[1])
def after(owner, name):
    wrapped = getattr(owner, name)
    setattr(owner, name, lambda *given: (wrapped(*given), strike())[0])
class Struck:
    __del__ = strike
    def __getattr__(self, name):
        strike()
def asked_by_c():  # whose caller drops the exception
    ctypes.pythonapi.PyObject_HasAttrString(ctypes.py_object(Struck()), b"any")
log, step = llama.llama_log_callback(strike), llama.llama_progress_callback(strike)
"""
PLACES = {
    "llama.cpp's log": (signal.SIGINT, "llama.llama_log_set(log, None)"),
    "the progress of a load": (signal.SIGTERM, "process.loading = lambda shown: step"),
    "a finalizer": (signal.SIGTERM, "before(sequence.KVSequence, 'check_intact', lambda: Struck() and None)"),
    "a call from C": (signal.SIGINT, "before(sequence.KVSequence, 'check_intact', asked_by_c)"),
    "after a context was freed": (signal.SIGINT, "after(llama, 'llama_free')"),
    "after a model was freed": (signal.SIGTERM, "after(llama, 'llama_model_free')"),
}


@pytest.mark.parametrize("place", PLACES)
def test_stopped_where_exceptions_are_lost(model: Path, place: str) -> None:
    """The interrupt is raised again until it propagates; nothing is freed twice."""
    limit = ["-n", "3"] if "freed" in place else ENDLESS
    number, code = PLACES[place]
    done = run_with(STRIKE.format(signal=number.name) + code, "ask", "Why?", *limit)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (STATUS[number], f"notes: {WORDS[number]}")


def test_what_is_put_away_is_not_interrupted_again(model: Path) -> None:
    """An interrupt that propagates is not raised again, however long cleanup takes, also in a generator."""
    code = """
import os, signal, sys, time
import notes_cli.runtime.workspace as workspace
def cleanup():
    try:
        yield
    finally:
        time.sleep(0.2)
        sys.stderr.write("cleaned\\n")
closed = []
def close(self):
    if not closed:
        closed.append(self)
        going = cleanup()
        next(going)
        going.close()
workspace.Workspace.close = close
import notes_cli.engine.sequence as sequence
sequence.KVSequence.check_intact = lambda *given: os.kill(os.getpid(), signal.SIGINT)
"""
    done = run_with(code, "ask", "Why?")
    assert (done.returncode, done.stderr) == (130, "cleaned\nnotes: interrupted\n")


# llama.cpp computes without end, and no signal wakes it: a mutex that is locked already, waited for outside of Python.
STUCK = """
import ctypes, os, signal, threading
import notes_cli.engine.native as native
hook, mutex = native._hook, ctypes.create_string_buffer(256)
def endless(name, arguments):
    if name != "notes_append":
        return hook(name, arguments)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.{number})).start()
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
native._hook = endless
"""


STOPS = "import notes_cli.engine.sequence as sequence, os, signal\n"
STOPS += "sequence.KVSequence.check_intact = lambda *given: os.kill(os.getpid(), signal.{number})"


@pytest.mark.parametrize(
    ("code", "number"), [(STUCK, signal.SIGINT), (STUCK, signal.SIGTERM), (STOPS, signal.SIGHUP)], ids=[*"123"]
)
def test_an_interrupt_under_json_is_json(model: Path, code: str, number: signal.Signals) -> None:
    """With the shell's status. The process does not wait for a computation that does not stop."""
    done = run_with(code.format(number=number.name), "ask", "Why?", "--json")
    assert (done.returncode, done.stderr) == (STATUS[number], f"notes: {WORDS[number]}\n")
    error = {"message": WORDS[number], "status": 128 + number}
    assert json.loads(done.stdout) == {"version": 1, "error": error, "warnings": []}


def test_a_computation_that_does_not_stop_on_a_terminal(model: Path, skill: Path) -> None:
    """The progress bar is removed, and the cursor is shown again."""
    shown = on_a_pty(["compile", skill], STUCK.format(number="SIGINT"), 130)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l") and shown.count("interrupted") == 1


def test_a_second_one_ends_at_once(model: Path) -> None:
    """Also while the first is being dealt with: here by a cleanup that never ends."""
    code = """
import os, signal, time
import notes_cli.runtime.workspace as workspace
def close(self):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
workspace.Workspace.close = close
import notes_cli.engine.sequence as sequence
def flush(self, *given):
    os.kill(os.getpid(), signal.SIGINT)
sequence.KVSequence.check_intact = flush
"""
    done = run_with(code, "ask", "Why?")
    assert (done.returncode, done.stdout, done.stderr) == INTERRUPTED


def test_nohup_and_background_jobs_go_on(model: Path) -> None:
    script = 'trap "" INT HUP; echo begun; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, "-", *command_line("ask", "Why?", "-n", "3")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout and process.stdout.read(6) == b"begun\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGHUP)
    assert process.communicate()[0].strip() and process.returncode == 0


def commands(skill: Path, folder: Path) -> list[list[object]]:
    ask = ["--question", "Why?", "--choices", "a,b"]
    return [
        ["compile", skill],
        ["ask", "Why?", "-n", 2],
        ["ask", "Why?", "-n", 2, "--json"],
        ["ask", "Why?", "--splice", "returns", "--explain"],
        ["verify", "returns", *ask],
        ["edit", "mine", "--field", "tier=b"],
        ["session", "ls"],
        ["session", "show", "mine"],
        ["session", "fork", "mine", "other"],
        ["session", "undo", "mine"],
        ["session", "compact", "mine"],
        ["session", "export", "mine", folder / "mine.tar", "-f"],
        ["ls"],
        ["inspect", "returns"],
        ["doctor"],
    ]


class FullDisk(io.RawIOBase):
    full = True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)


def test_a_result_that_could_not_be_printed_is_a_failure(
    notes: Notes, compiled: Path, skill: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every command, in one line without a traceback."""
    assert notes("ask", "Why?", "--splice", "returns", "--session", "mine", "-n", 2).code == 0
    for arguments in commands(skill, tmp_path):
        errors = io.StringIO()
        disk = FullDisk()
        monkeypatch.setattr(sys, "stdin", Terminal())
        stdout = Stdout(io.BufferedWriter(disk), encoding="utf-8")
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(errors):
            code = run([*map(str, arguments)])
        disk.full = False
        stdout.close()
        assert code == 1 and "Traceback" not in errors.getvalue(), arguments
        last = errors.getvalue().splitlines()[-1]
        assert last.startswith("notes: cannot write to standard output:"), (arguments, last)


@pytest.mark.parametrize("how", [">&-", ">&- 2>&- <&-", "> /dev/full", "2> /dev/full", "| head -c 1"])
def test_streams_that_are_closed_or_full(model: Path, how: str) -> None:
    """No traceback. A lost message is no failure, nor an early reader."""
    for arguments in (["--help"], ["ask", "Why?", "-n", 2], ["doctor"]):
        script = f'"$@" {how}; exit ${{PIPESTATUS[0]}}'
        done = subprocess.run(
            ["bash", "-c", script, "-", *command_line(*arguments)], capture_output=True, stdin=subprocess.DEVNULL
        )
        error = done.stderr.decode()
        assert "Traceback" not in error and "ignored" not in error, (arguments, error)
        if how in (">&-", "> /dev/full"):
            assert done.returncode == 1 and error.splitlines()[-1].startswith("notes: cannot write to standard output:")
        elif ">&- " in how:
            assert done.returncode == 1
        else:
            assert done.returncode in ((0, 141) if "head" in how else (0,)), (arguments, error)


def test_a_closed_stream_is_no_file_of_ours(model: Path, skill: Path, home: Path) -> None:
    """With stdout and stderr closed, nothing that is printed ends up in a file that was opened in their place."""
    os.utime(skill, (2**32, 2**32))  # the stamp of a file that may still change is marked as such, now and later
    assert run_here("compile", skill, "-v").code == 0
    before = snapshot(home / "library")
    subprocess.run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *command_line("compile", skill, "-v", "--force")])
    after = snapshot(home / "library")
    assert [len(data) for data in after.values()] == [len(data) for data in before.values()]
    assert os.listdir(home / "library") and run_here("inspect", "returns").code == 0


AT_EXIT = "import atexit; atexit.register(lambda: sys.stderr.write('called'))"
THREAD = "import threading, time; wait = lambda: (time.sleep(0.5), sys.stderr.write('waited for'))"
THREAD += "; threading.Thread(target=wait).start()"
BUFFERED = "from notes_cli import output; begin = output.begin"
BUFFERED += "; output.begin = lambda **given: (begin(**given), sys.stdout.buffer.write(b'first '))"


def test_what_is_left_to_do_at_the_end_is_done() -> None:
    """Python's slow shutdown is skipped; exit handlers and threads that still compute are not."""
    done = run_with(f"{THREAD}\n{AT_EXIT}", "ls", "--json")
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, [], "waited forcalled")
    failed = run_with(AT_EXIT, "inspect", "none")
    assert failed.returncode == 1 and failed.stderr.endswith("called")


def test_bytes_that_wait_are_written_at_the_end() -> None:
    done = run_with(BUFFERED, "doctor", "config")
    assert done.returncode == 0 and done.stdout.startswith("first ")
