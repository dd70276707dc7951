"""Callbacks of tests."""

from __future__ import annotations

from collections.abc import Callable

from notes_cli.runtime.request import Callbacks


def on(kind: type, use: Callable[..., object]) -> Callbacks:
    """Return callbacks that pass events of one kind on."""
    return Callbacks(lambda event: use(event) if isinstance(event, kind) else None)
