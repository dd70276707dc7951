"""Every script that a figure comes from can be started: what it imports is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = ("torch", "tokenizers", "playwright", "diskcache", "pyte")  # not for everybody who tests
NAMES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("bench", "training")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "__main__.py"
]


@pytest.mark.parametrize("name", NAMES)
def test_it_imports(name: str) -> None:
    """But for packages of others that are not installed."""
    try:
        importlib.import_module(name.removesuffix(".__init__"))
    except ModuleNotFoundError as error:
        assert (error.name or "").partition(".")[0] in EXTRAS
