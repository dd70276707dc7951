"""Runs a command of `notes` in this process and writes which types, lines and functions of the package it uses.

    python -m bench.traced OUTPUT [--chat PORT] COMMAND [ARGUMENT...]

OUTPUT gets JSON: the exit status, the types of which an object is passed to or returned by a function of the package,
the executed lines of its functions, these functions (file, first line), and the number of its modules. With --chat the
command is a server at PORT, to which a second chat is traced.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[1] / "notes_cli")
QUESTION = json.dumps({"messages": [{"role": "user", "content": "May I?"}], "max_tokens": 2}).encode()


class Trace:
    """A trace function (sys.settrace)."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.types: set[str] = set()
        self.lines: set[tuple[str, int]] = set()
        self.functions: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not self.on or not _ours(code):
            return None
        if code.co_name[0] != "<":  # no comprehensions
            self.functions.add((code.co_filename, code.co_firstlineno))
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        for name in code.co_varnames[:count]:
            self._add(frame.f_locals.get(name))
        return self._inside

    def _inside(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        elif event == "return":
            self._add(argument)
        return self._inside

    def _add(self, value: object) -> None:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not isinstance(value, type) and name.startswith("notes_cli.") and ".lib." not in name:
            self.types.add(name)

    def write(self, path: str, status: int) -> None:
        self.on = False
        modules = [name for name in [*sys.modules] if name.partition(".")[0] == "notes_cli"]
        found = [status, sorted(self.types), sorted(self.lines), sorted(self.functions), len(modules)]
        Path(path).write_text(json.dumps(found), encoding="utf-8")


def _ours(code: CodeType) -> bool:
    """True for a function of the package, not for its modules, classes and binding."""
    return code.co_filename.startswith(PACKAGE) and "/lib/" not in code.co_filename and bool(code.co_flags & 1)


def chat(trace: Trace, port: int, path: str) -> None:
    """Send two chats to the server of this process, trace the second, and end the process."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", QUESTION, {"Content-Type": "application/json"}
    )
    status = 1
    for _ in range(600):
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                reply.read()
        except OSError:  # not listening yet
            time.sleep(0.1)
            continue
        if trace.on:
            status = 0
            break
        time.sleep(1)  # in the same second the second one would find its prompt rendered
        trace.on = True
    trace.write(path, status)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    path, *arguments = sys.argv[1:]
    port = int(arguments[1]) if arguments[0] == "--chat" else None
    trace = Trace(on=port is None)
    from notes_cli.cli import run

    threading.settrace(trace)
    sys.settrace(trace)
    if port is not None:
        threading.Thread(target=chat, args=(trace, port, path), daemon=True).start()
        run(arguments[2:])
    else:
        trace.write(path, run(arguments))


if __name__ == "__main__":
    main()
