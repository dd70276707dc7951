"""Check refusals: an error names no flag itself, and the command line's words for it are as expected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from notes_cli.cli import COMMANDS
from notes_cli.commands.remedies import worded
from notes_cli.errors import NotesError

FLAG = re.compile(rf"(?:^|[ (`])--[a-z]|[ (`]-[a-z]{{1,3}}\b|\bnotes ({'|'.join(COMMANDS)})\b")


@contextmanager
def refused(kind: type[NotesError], match: str = "") -> Iterator[pytest.ExceptionInfo[NotesError]]:
    """The block raises an error of this kind, whose line on the command line matches."""
    with pytest.raises(kind) as caught:
        yield caught
    line = worded(caught.value)
    assert re.search(match, line), line
    assert not FLAG.search(caught.value.what) and "\n" not in line
