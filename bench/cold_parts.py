"""`notes` with its parts timed: `python -m bench.cold_parts ask ...` tells on stderr what took how long.

Seconds of the processor, as JSON, for bench/cold.py. What it imports itself is next to nothing, so that all that
`notes` needs is loaded in its turn.
"""

from __future__ import annotations

import time

STARTED = time.process_time()  # Python itself

import os  # noqa: E402
import sys  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# In this order, so that each is told without what it shares with those before it.
LOADED = {
    "click": ("click",),
    "numpy": ("numpy",),
    "llama.cpp and its binding": ("notes_cli.engine.native",),
    "modules of notes, and what they need": (
        *("notes_cli.cli", "notes_cli.commands.ask", "notes_cli.commands.answering", "notes_cli.runtime.requests"),
        *("notes_cli.api", "notes_cli.explaining"),
    ),
}


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as notes_cli/__main__.py
    found = {"Python itself": STARTED}
    for part, modules in LOADED.items():
        before = time.process_time()
        for module in modules:
            __import__(module)
        found[part] = time.process_time() - before

    import json

    from notes_cli.cli import _leave, run
    from notes_cli.engine import native
    from notes_cli.engine.context import Context
    from notes_cli.engine.model import Model

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any, **more: Any) -> Any:
            before = time.process_time()
            try:
                return function(*given, **more)
            finally:
                found[part] = found.get(part, 0.0) + time.process_time() - before

        return measured

    hook = native._hook
    parts = {"notes_splice_file": "the splice", "notes_rewrite": "the prompt", "notes_append": "the answer's token"}

    def hooked(name: str, arguments: tuple[Any, ...]) -> Any:
        return (timed(parts[name], hook) if name in parts else hook)(name, arguments)

    native._hook = hooked
    Model.__init__ = timed("the weights", Model.__init__)  # type: ignore[method-assign]
    Context.__init__ = timed("the context", Context.__init__)  # type: ignore[method-assign]
    Model.close = timed("the weights given back", Model.close)  # type: ignore[method-assign]
    Context.close = timed("the cache given back", Context.close)  # type: ignore[method-assign]
    run(sys.argv[1:])
    whole = time.process_time()
    found["all else"] = whole - sum(found.values())
    print(json.dumps({"parts": found, "whole": whole}), file=sys.stderr)
    _leave(0)  # as cli.main


if __name__ == "__main__":
    main()
