"""The examples of every `--help` run as they stand: those of `notes --help` in a fresh home, then the others.

The sample skills have their fields and headings only: `notes verify` prefills them many times.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from notes_cli import config
from notes_cli.cli import COMMANDS, cli, command_named

from .conftest import command_line, run_line, words

ONLINE = ("notes pull", "$(notes pull")  # need a network


def examples(command: click.Command) -> Iterator[str]:
    """Lines of a command's examples, then those of its subcommands."""
    _, _, block = (command.help or "").partition("Examples:\n")
    yield from re.sub(r" \\\n +", " ", block.split("\n\n")[0]).strip().splitlines()
    if isinstance(command, click.Group) and command is not cli:
        for subcommand in command.commands.values():
            yield from examples(subcommand)


def serve(line: str) -> str:
    """Run a server until it listens, and return that line."""
    server = subprocess.Popen(command_line(*words(line)[1:], "--port", "0"), stderr=subprocess.PIPE, text=True)
    with server:
        said = next((said for said in iter(server.stderr.readline, "") if "http://" in said), "")  # type: ignore[union-attr]
        server.terminate()
    return said


def short_samples(folder: Path) -> list[Path]:
    """Copies of the sample skills without their sentences."""
    for sample in config.sample_skills():
        lines = (sample / "SKILL.md").read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if re.match(r"$|---|#|- |name:|description:", line)]
        (folder / sample.name).mkdir(parents=True)
        (folder / sample.name / "SKILL.md").write_text("\n".join(kept), encoding="utf-8")
    return sorted(folder.iterdir())


@pytest.mark.process
def test_examples_of_help(tmp_path: Path, notes_on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the commands, from an empty folder; only what a network is needed for is left out."""
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SHELL", "/bin/bash")
    samples = short_samples(tmp_path / "samples")
    monkeypatch.setattr(config, "sample_skills", lambda: samples)
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
