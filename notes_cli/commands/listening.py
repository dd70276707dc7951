"""What a command prints while something takes long: notices as they come, and how far it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from notes_cli import output
from notes_cli.commands.remedies import tell

if TYPE_CHECKING:
    from notes_cli.errors import Progress
    from notes_cli.runtime.asking import Listener


def listening(quiet: bool) -> Listener:
    """Notices go to stderr, and progress unless that is to be `quiet`."""
    from notes_cli.runtime.asking import Listener

    def watch(
        label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False
    ) -> AbstractContextManager[Progress]:
        return output.progress(label, unit, hidden=quiet, later=later)

    return Listener(notice=tell, watch=watch)
