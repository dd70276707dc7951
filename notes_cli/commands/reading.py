"""What is piped in."""

from __future__ import annotations

import sys
from typing import BinaryIO

import click


def standard_input() -> BinaryIO:
    """stdin for bytes. Raise UsageError where whoever started this process has closed it."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: pipe something in, or name a file")
    return sys.stdin.buffer
