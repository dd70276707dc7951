"""Notices and errors as JSON, and back: what happened, and what would help, in nobody's words yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from notes_cli.errors import Help, NotesError, Notice, Remedy


def as_json(said: NotesError | Notice) -> dict[str, Any]:
    """What is said, with its remedy, and whether it is a warning."""
    found = {"what": said.what} | ({"warning": True} if isinstance(said, Notice) and said.warning else {})
    if said.remedy is None:
        return found
    return {**found, "help": said.remedy.help.name, "values": _plain(said.remedy.values)}


def _plain(value: Any) -> Any:
    """A value of a remedy; paths as texts."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)


def notice(told: Mapping[str, Any], model: Path) -> Notice:
    """The notice. `model`: what the user at hand calls the model of whoever told it."""
    return Notice(told["what"], _remedy(told, model), warning=told.get("warning", False))


def error(told: Mapping[str, Any], model: Path) -> NotesError:
    """The error, likewise."""
    return NotesError(told["what"], _remedy(told, model))


def _remedy(told: Mapping[str, Any], model: Path) -> Remedy | None:
    if "help" not in told:
        return None
    values = dict(told["values"])
    if "model" in values:
        values["model"] = model
    return Help[told["help"]](**values)
