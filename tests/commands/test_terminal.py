"""`notes` as a process: signals, pipes, colour, start-up, and streams."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from notes_cli.cli import COMMANDS

from .conftest import Notes, command_line, run_apart

ENDLESS = (
    "-n",
    "100000",
    "-c",
    "110000",
    "--beyond-trained",
)  # far longer than any test waits: it ends by the signal or the closed pipe


def test_the_answer_is_alone_on_stdout(model: Path, skill: Path) -> None:
    """In a real process: the answer on stdout; compiles and the cut on stderr."""
    asked = run_apart("ask", "Why?", "--splice", skill, "-n", 5, "--json")
    assert asked.code == 0 and asked.json["tokens"]["answer"] == 5
    assert [line.split()[0] for line in asked.err.splitlines()] == ["compiled", "the"]
    again = run_apart("ask", "--splice", "returns", "-n", 5, stdin="Why?")
    assert (again.code, again.out.strip()) == (0, asked.json["answer"])
    assert again.err == "the answer was cut after 5 tokens. Let it have more: -n 10\n"


def test_interrupted_generation_keeps_what_was_printed(model: Path) -> None:
    """Ctrl-C during the answer: exit 130; the partial answer ends its line; one line on stderr."""
    process = subprocess.Popen(
        command_line("ask", "Why?", *ENDLESS), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    begun = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate()
    assert process.returncode == 130
    assert begun and rest.endswith(b"\n")
    assert errors.decode().split() == ["notes:", "interrupted"]


def test_a_closed_pipe_ends_quietly(model: Path) -> None:
    """`notes ask ... | head -c 1`: no traceback, no message, and the process ends."""
    script = f"{shlex.join(command_line('ask', 'Why', *ENDLESS))} < /dev/null | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True)
    assert done.stderr == b""
    assert done.stdout.endswith(b"141\n")


def test_ls_into_rm(notes: Notes, compiled: Path) -> None:
    """`notes ls -q | xargs notes rm -y` empties the library."""
    script = f"{shlex.join(command_line('ls', '-q'))} | xargs {shlex.join(command_line('rm', '-y'))}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{compiled}\n", "")
    assert not compiled.exists()


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "-h"] for name in COMMANDS)])
def test_help_needs_neither_numpy_nor_llama(arguments: list[str]) -> None:
    """Help is there at once: nothing heavy is imported; every option has a line."""
    code = (
        "import sys; from notes_cli.cli import run; status = run(sys.argv[1:]); "
        "print(*sorted({'numpy', 'notes_cli.lib', 'gguf', 'rich', 'jinja2'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    loaded = done.stderr.splitlines()[-1]
    assert loaded == ""
    shown = done.stdout + done.stderr
    assert "Usage: notes" in shown and "--help" in shown
    assert done.returncode == (0 if arguments else 2)
    assert max(map(len, shown.splitlines())) <= 80


def test_ls_needs_no_llama(home: Path) -> None:
    """Listing loads no model and no llama.cpp."""
    code = "import sys; from notes_cli.cli import run; run(['ls', '--json']); print('notes_cli.lib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\nFalse\n"
