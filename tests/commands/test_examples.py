"""The examples of every `--help` run as they stand: those of `notes --help` in a fresh home, then the others."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from notes_cli.cli import COMMANDS, cli, command_named

from .conftest import Outcome, command_line, run_here

ONLINE = ("notes pull", "$(notes pull")  # need a network


def examples(command: click.Command) -> Iterator[str]:
    """Lines of a command's examples, then those of its subcommands."""
    _, _, block = (command.help or "").partition("Examples:\n")
    yield from re.sub(r" \\\n +", " ", block.split("\n\n")[0]).strip().splitlines()
    if isinstance(command, click.Group) and command is not cli:
        for subcommand in command.commands.values():
            yield from examples(subcommand)


def run_line(line: str) -> Outcome:
    """Run a line in this process, or by a shell if it has more than `notes` with arguments."""
    words = shlex.split(line, comments=True)
    if words[0] == "notes" and not set("|<>$") & set(line):
        return run_here(*words[1:])
    done = subprocess.run(["bash", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return Outcome(done.returncode, done.stdout, done.stderr)


def serve(line: str) -> str:
    """Run a server until it listens, and return that line."""
    words = shlex.split(line, comments=True)
    server = subprocess.Popen(command_line(*words[1:], "--port", "0"), stderr=subprocess.PIPE, text=True)
    with server:
        said = next((said for said in iter(server.stderr.readline, "") if "http://" in said), "")  # type: ignore[union-attr]
        server.terminate()
    return said


@pytest.mark.process
def test_examples_of_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the commands, from an empty folder; only what a network is needed for is left out."""
    (tmp_path / "here").mkdir()
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "notes"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m notes_cli "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.chdir(tmp_path / "here")
    lines = [line.strip() for command in (cli, *map(command_named, COMMANDS)) for line in examples(command)]
    offline = [line for line in lines if not any(word in line for word in ONLINE)]
    assert len(offline) > 70
    for line in offline:
        if line.startswith("notes serve"):
            assert "http://" in serve(line), line
            continue
        done = run_line(line)
        assert done.code == 0 or (done.code == 1 and line.startswith("notes verify")), (line, done)
