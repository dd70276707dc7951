"""Rendering Jinja in a separate process, within limits of time, memory and length.

A chat template is a program that comes with a model, so anybody may have written it. Jinja's sandbox keeps it from
reaching anything; it does not keep `10**(10**7)`, nested loops or a list of lists of lists from using up all time and
memory, some of it in one instruction that cannot be interrupted. So a child process renders: the system enforces its
limits, and ends it beyond them. It is started with the first template and serves all that follow, one line of JSON each
way.
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
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import subprocess

    import jinja2

SECONDS = 2  # of processor time for one text; the templates that ship with llama.cpp take milliseconds
PATIENCE = 120  # seconds of the clock for one text, however busy the machine is
MEMORY = 512 << 20  # bytes of address space that the child may have
MAX_SOURCE = 1 << 20  # characters of a template
MAX_TEXT = 4 << 20  # characters of what it renders
MAX_FORM, MAX_FORMS = 40, 8  # characters of a form of the time that is known again, and how many of them
_CHILD = "import sys; sys.path[:] = {!r}; from notes_cli.text.rendering import serve; serve()"


class RenderError(Exception):
    """A template that cannot be read, fails, or exceeds the limits; the message is a clause of one line."""


class Rendering(NamedTuple):
    """What came of a template: a text, or what is wrong with it."""

    text: str = ""
    error: str = ""
    times: Mapping[str, str] = {}  # what it printed of today's time, by the form of strftime
    steady: bool = False  # whether all else will be the same another time

    @property
    def result(self) -> str:
        """The text. Raise RenderError where there is none."""
        if self.error:
            raise RenderError(self.error)
        return self.text


def render(source: str, variables: Mapping[str, Any], now: datetime | None = None) -> Rendering:
    """What a template renders. `variables` are values that JSON has; `now` is the date to print, else today.

    Raise RenderError where nothing can be rendered here.
    """
    if len(source) > MAX_SOURCE:
        return Rendering(error=f"cannot be read: it is longer than {MAX_SOURCE:,} characters")
    request = {"source": source, "variables": variables, "now": now.isoformat() if now else None}
    with _lock:
        return Rendering(**_ask(json.dumps(request).encode() + b"\n"))


@cache
def code_stamp() -> str:
    """What changes when Jinja or this module is replaced by another version; "" where that cannot be told. Importing
    Jinja for its version would take longer than most templates."""
    from importlib.util import find_spec

    try:
        found = find_spec("jinja2")
        return repr([(os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in (found.origin, __file__)])  # type: ignore[union-attr, arg-type]
    except (OSError, AttributeError, TypeError, ValueError):  # a package without files
        return ""


# ---- the parent's side

_lock = threading.Lock()
_child: subprocess.Popen[bytes] | None = None
_owner = 0  # the process that started it: after a fork the child is the parent's


def start_rendering() -> None:
    """Start the child without waiting for it. If that fails, `render` reports it."""
    with _lock, contextlib.suppress(RenderError):
        _started()


def _started() -> subprocess.Popen[bytes]:
    """The child, which is started if there is none. Raise RenderError if it cannot be started."""
    global _child, _owner
    if _child is not None and _owner == os.getpid() and _child.poll() is None:
        return _child
    import subprocess  # most commands start nothing

    command = [sys.executable, "-I", "-c", _CHILD.format(sys.path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        # In its own session: Ctrl-C is sent to the parent only, which ends the child.
        _child = subprocess.Popen(command, **pipes, start_new_session=True)
    except OSError as error:
        raise RenderError(f"cannot be rendered: {sys.executable} does not start ({error.strerror})") from error
    _owner = os.getpid()
    return _child


def _ask(request: bytes) -> dict[str, Any]:
    child = _started()
    assert child.stdin is not None and child.stdout is not None
    late = threading.Timer(PATIENCE, child.kill)
    late.daemon = True
    late.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # then there is no line to read either
            child.stdin.write(request)
            child.stdin.flush()
        line = child.stdout.readline()
    except BaseException:  # an interrupt: the line that is still to come must not be taken for the next reply
        _end(child)
        raise
    finally:
        late.cancel()
    if line.endswith(b"\n"):
        reply: dict[str, Any] = json.loads(line)
        return reply
    return {"error": f"failed: {_why(_end(child))}"}


def _end(child: subprocess.Popen[bytes]) -> int:
    """End the child and return its status; below 0 it is the signal that had ended it."""
    global _child
    from subprocess import TimeoutExpired

    _child = None
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    child.stdout.close()
    try:
        return child.wait(0.2)  # it has ended already, unless it was interrupted
    except TimeoutExpired:
        child.kill()
        return child.wait()


def _why(status: int) -> str:
    if status == -getattr(signal, "SIGXCPU", 0):
        return f"it takes more than {SECONDS} seconds"
    if status == -getattr(signal, "SIGKILL", 0):
        return f"it takes more than {PATIENCE} seconds, or more memory than the system has"
    return f"the process that renders it ended ({signal.Signals(-status).name if status < 0 else f'status {status}'})"


@atexit.register
def _stop() -> None:
    if _child is not None and _owner == os.getpid():
        _end(_child)


# ---- the child's side


def serve() -> None:
    """Answer requests until the parent is gone."""
    grant = _bounds()
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


def _bounds() -> Callable[[], None]:
    """Limit the memory of this process; return the function that grants it SECONDS more of processor time."""
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


class _Today:
    """What the text at hand tells of the present time."""

    def __init__(self) -> None:
        self.times: dict[str, str] = {}
        self.odd = False  # in a form that nobody writes: with a number it may ask for a gigabyte of blanks

    def tell(self, form: str) -> str:
        told = datetime.now().strftime(form)
        self.odd |= len(form) > MAX_FORM or any(map(str.isdigit, form)) or len(self.times) == MAX_FORMS
        self.times[form] = told
        return told


_today = _Today()


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    """A Rendering, as JSON has it."""
    global _today
    _today = _Today()
    source = request["source"]
    try:
        template = _template(source, request["now"])
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # of jinja2, or of Python about the code that jinja2 made
        return {"error": f"cannot be read: {_line(error)}"}
    if "datetime" in source:
        request["variables"].setdefault("datetime", template.globals["strftime_now"]("%b %d %Y"))
    steady = not any(word in source for word in ("random", "lipsum"))
    try:
        found = {"text": template.render(request["variables"])}
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the template is a program of others: whatever it raises is its own error
        found = {"error": f"failed: {_line(error)}"}
        import jinja2  # it is there already

        steady &= isinstance(error, jinja2.TemplateError)  # any other may be one of this installation
    if len(found.get("text", "")) > MAX_TEXT:
        return {"error": f"failed: it renders more than {MAX_TEXT:,} characters"}
    return {**found, "times": _today.times, "steady": steady and not _today.odd}


@lru_cache(maxsize=8)
def _template(source: str, now: str | None) -> jinja2.Template:
    """The template, with the functions that llama.cpp and Hugging Face provide."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import SandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`: marks the text of a model, for training. Here its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.fromisoformat(now).strftime(form) if now else _today.tell(form)

    env = SandboxedEnvironment(  # some templates append to lists, which are those of one request
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = fail
    env.globals["strftime_now"] = strftime_now
    return env.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """As Jinja's own, which escapes HTML, but models were not trained on that; and as llama.cpp's, which takes more."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **{"default": _json, **more})


def _json(value: Any) -> Any:
    """JSON's stand-in for values that it lacks: null for what is undefined, lists for what filters return."""
    import jinja2  # it is there already

    return None if isinstance(value, jinja2.Undefined) else [*value]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
