"""Texts of our own that are shown to models, from prompts/: what `notes verify` puts before skills."""

from __future__ import annotations

import yaml

from notes_cli.config import resource


def verify_system() -> str:
    """System text that makes skills stand elsewhere than where they were compiled."""
    return str(yaml.safe_load((resource("prompts") / "verify.yaml").read_text(encoding="utf-8"))["system"])
