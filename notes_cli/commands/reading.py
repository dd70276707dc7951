"""What is piped in, and what is in a file that the command line names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

import click

from notes_cli.errors import reason

MAX_BYTES = 64 << 20  # far more than any context holds: a pipe without an end is refused before it fills the memory


def standard_input() -> BinaryIO:
    """stdin for bytes. Raise UsageError where whoever started this process has closed it."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: pipe something in, or name a file")
    return sys.stdin.buffer


def piped_text() -> str:
    """The text on stdin, without blanks around it. Raise UsageError if that is none."""
    return _text(standard_input().read(MAX_BYTES + 1), "the piped text")


def text_in(file: Path) -> str:
    """The same of a file."""
    try:
        with file.open("rb") as opened:
            return _text(opened.read(MAX_BYTES + 1), str(file))
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {reason(error)}") from error


def _text(data: bytes, what: str) -> str:
    if len(data) > MAX_BYTES:
        raise click.UsageError(f"{what} is longer than {MAX_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{what} is not UTF-8 text (byte {error.start})") from error
