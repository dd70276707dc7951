"""Prints the packages that tests need, by pyproject.toml: pip would build the project to install them."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = [
    one for name in ("dev", "documents", "images", "pull", "serve") for one in project["optional-dependencies"][name]
]
print(*project["dependencies"], *(one for one in extras if not one.startswith("notes-cli")), sep="\n")
