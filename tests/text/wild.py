"""Chat templates of llama.cpp, and rendering them by Jinja alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from notes_cli.text import rendering

DAY = datetime(2026, 6, 1)
WILD = sorted((Path(__file__).parents[2] / "build/zoo/llama.cpp/models/templates").glob("*.jinja"))
_compiled = cache(rendering._template.__wrapped__)


def plainly(source: str, messages: Sequence[dict[str, Any]], prompt: bool, tools: object = None) -> str | None:
    """Render by Jinja alone, in this process and without limits; None if the template refuses."""
    known = {"tools": tools, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}
    known |= {"functions": "", "datetime": DAY.strftime("%b %d %Y")}
    template = None
    for given in (known, known | {"tools": []})[: 2 if tools is None else 1]:  # some templates loop over missing tools
        try:
            template = template or _compiled(source, DAY.isoformat())
            return template.render(given, messages=messages, add_generation_prompt=prompt)
        except Exception:
            continue
    return None
