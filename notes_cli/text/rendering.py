"""Renders Jinja templates in a child process, with limits on time, memory and output.

Chat templates are programs from untrusted model files. Jinja's sandbox isolates them, but does not stop `10**(10**7)`,
nested loops or nested lists from exhausting time and memory, some of it in a single uninterruptible instruction. A
child process renders them, so that the system enforces the limits and ends it beyond them. It starts with the first
template and serves all others, one line of JSON in each direction. A second one renders large variables, for which
small ones do not wait.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

    import jinja2

SECONDS = 2  # CPU seconds a text; the templates of llama.cpp take milliseconds
PATIENCE = 120  # wall-clock seconds a text, on a busy machine
MEMORY = 512 << 20  # bytes of address space of the child
MAX_SOURCE = 1 << 20  # characters of a template
MAX_TEXT = 4 << 20  # characters of output
LARGE = 1 << 18  # characters of variables
_CHILD = "import sys; sys.path[:] = {!r}; from notes_cli.text.rendering import serve; serve()"


class RenderError(Exception):
    """A template is invalid, fails, or exceeds the limits; the message is a clause of one line."""


def render(source: str, variables: str, now: datetime | None = None) -> str:
    """Render a template. `variables`: a JSON object; `now`: the date to print, else today. Raises RenderError."""
    if len(source) > MAX_SOURCE:
        raise RenderError(f"cannot be read: it is longer than {MAX_SOURCE:,} characters")
    request = {"source": source, "variables": variables, "now": now.isoformat() if now else None}
    line = (_large if len(variables) > LARGE else _usual).ask(json.dumps(request).encode() + b"\n")
    reply: dict[str, str] = json.loads(line)
    if "error" in reply:
        raise RenderError(reply["error"])
    return reply["text"]


# ---- parent


class _Renderer:
    """A child process, started when it is needed. Threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process that started it; after a fork the child remains the parent's

    def ask(self, line: bytes) -> bytes:
        """Return the line that the child answers. Raises RenderError if it ends before."""
        with self._lock:
            child = self._start()
            assert child.stdin is not None and child.stdout is not None
            late = threading.Timer(PATIENCE, child.kill)
            late.daemon = True
            late.start()
            try:
                with contextlib.suppress(BrokenPipeError):  # readline then returns nothing
                    child.stdin.write(line)
                    child.stdin.flush()
                reply = child.stdout.readline()
            except BaseException:  # an interrupt: a late line must not become the next reply
                self._end(child)
                raise
            finally:
                late.cancel()
            if not reply.endswith(b"\n"):
                raise RenderError(f"failed: {_describe_exit(self._end(child))}")
            return reply

    def start(self) -> None:
        """Start the child without waiting for it. If that fails, `ask` reports it."""
        with self._lock, contextlib.suppress(RenderError):
            self._start()

    def end_at_exit(self) -> None:
        if self._child is not None and self._owner == os.getpid():
            self._end(self._child)

    def _start(self) -> subprocess.Popen[bytes]:
        """Return the child, started if necessary. Raises RenderError if it cannot be started."""
        if self._child is not None and self._owner == os.getpid() and self._child.poll() is None:
            return self._child
        import subprocess  # most commands start nothing

        command = [sys.executable, "-I", "-c", _CHILD.format(sys.path)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            # In its own session: Ctrl-C is sent to the parent only, which ends the child.
            self._child = subprocess.Popen(command, **pipes, start_new_session=True)
        except OSError as error:
            raise RenderError(f"cannot be rendered: {sys.executable} does not start ({error.strerror})") from error
        self._owner = os.getpid()
        return self._child

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        """End the child and return its status; below 0 the signal that ended it."""
        from subprocess import TimeoutExpired

        self._child = None
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        child.stdout.close()
        try:
            return child.wait(0.2)  # it has ended, unless interrupted
        except TimeoutExpired:
            child.kill()
            return child.wait()


_usual, _large = _Renderer(), _Renderer()
start_rendering = _usual.start
atexit.register(_usual.end_at_exit)
atexit.register(_large.end_at_exit)


def _describe_exit(status: int) -> str:
    if status == -getattr(signal, "SIGXCPU", 0):
        return f"it takes more than {SECONDS} seconds"
    if status == -getattr(signal, "SIGKILL", 0):
        return f"it takes more than {PATIENCE} seconds, or more memory than the system has"
    return f"the process that renders it ended ({signal.Signals(-status).name if status < 0 else f'status {status}'})"


# ---- child


def serve() -> None:
    """Serve requests until the parent closes the pipe."""
    grant = _limit_resources()
    with contextlib.suppress(ImportError):  # `_reply` reports it
        import jinja2.ext  # with all of jinja2, while the parent loads its model
        import jinja2.sandbox  # noqa: F401
    for line in sys.stdin.buffer:
        grant()
        try:
            reply = _reply(json.loads(line))
        except MemoryError:
            reply = {"error": f"failed: it takes more than {MEMORY >> 20} MiB of memory"}
        except RecursionError:
            reply = {"error": "failed: it is nested too deeply"}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit_resources() -> Callable[[], None]:
    """Limit the memory of this process; return a function that allows SECONDS more of CPU time."""
    try:
        import resource
    except ImportError:  # Windows: only PATIENCE limits it
        return lambda: None
    for kind, bound in (("RLIMIT_AS", MEMORY), ("RLIMIT_CORE", 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS cannot limit the memory
            resource.setrlimit(getattr(resource, kind), (bound, resource.getrlimit(getattr(resource, kind))[1]))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def grant() -> None:
        seconds = int(time.process_time()) + 1 + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if most < 0 else min(seconds, most), most))

    return grant


def _reply(request: dict[str, Any]) -> dict[str, str]:
    source, variables = request["source"], json.loads(request["variables"])
    try:
        template = _template(source, request["now"])
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # from jinja2, or from Python for the code that jinja2 generates
        return {"error": f"cannot be read: {_line(error)}"}
    if "datetime" in source:
        variables.setdefault("datetime", template.globals["strftime_now"]("%b %d %Y"))
    try:
        text = template.render(variables)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # a template may raise anything
        return {"error": f"failed: {_line(error)}"}
    if len(text) > MAX_TEXT:
        return {"error": f"failed: it renders more than {MAX_TEXT:,} characters"}
    return {"text": text}


@lru_cache(maxsize=128)  # some 100 kB each
def _template(source: str, now: str | None) -> jinja2.Template:
    """Compile a template with the functions that llama.cpp and Hugging Face provide."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import SandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks text of the model for training: its body is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return (datetime.fromisoformat(now) if now else datetime.now()).strftime(form)

    env = SandboxedEnvironment(  # not immutable: some templates append to lists, which belong to one request
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = fail
    env.globals["strftime_now"] = strftime_now
    return env.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Like tojson of llama.cpp: without the HTML escapes of Jinja, which models were not trained on, and with more
    options."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **{"default": _json, **more})


def _json(value: Any) -> Any:
    """Convert values that JSON lacks: undefined to null, iterators of filters to lists."""
    import jinja2  # imported already

    return None if isinstance(value, jinja2.Undefined) else [*value]


def _line(error: Exception) -> str:
    """Return the message as a line without control characters: a template may raise any text."""
    line = " ".join(str(error).split())[:200]
    return "".join(letter if letter.isprintable() else "?" for letter in line) or type(error).__name__
