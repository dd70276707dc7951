"""Ends `notes` where a computation is late in stopping.

What it computes is in memory alone, and files are replaced or added to as a whole: nothing is lost.
"""

from __future__ import annotations

import os
import signal

from notes_cli import output, stops
from notes_cli.engine import interrupts


def end_when_late() -> None:
    """From now on the first signal ends `notes` in a tenth of a second, whatever llama.cpp computes; not a process that
    only calls a command, as tests do."""
    if stops.working:
        interrupts.when_late(_end)


def _end(number: int) -> None:
    """As the main thread would, unless it is at it. This runs while that computes."""
    if not stops.claim(wait=False):
        return
    stops.received = stops.received or number
    output.clear()
    output.fail(stops.word(), stops.status())
    if stops.received == signal.SIGINT:
        os._exit(stops.INTERRUPTED)
    interrupts.end_by(stops.received)
