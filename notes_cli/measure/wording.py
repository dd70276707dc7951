"""Texts of our own that are shown to models, from prompts/: what `notes verify` puts before skills."""

from __future__ import annotations

from functools import cache

from notes_cli.config import resource
from notes_cli.documents import read_yaml


@cache
def verify_system() -> str:
    """System text that moves skills away from where they were compiled."""
    return str(read_yaml(resource("prompts") / "verify.yaml")["system"])
