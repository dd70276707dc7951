"""All printing of `notes`: results on stdout, messages and progress on stderr, with control characters escaped.

Names, texts and errors are untrusted: characters that would move a cursor, colour a terminal or reverse text are
escaped. Answers, texts and paths (`data`) are escaped on a terminal only, and unchanged in a pipe. JSON escapes such
characters as \\u. Colour and progress appear on terminals, unless options or variables override that (`_coloured`).
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal

import click

from notes_cli.errors import OutputError, UnreadError
from notes_cli.text.names import human_size as human_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# C0 but tabs and line ends, DEL, C1, and lone surrogates (bytes of file names that are not UTF-8)
_CONTROL = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff"
# bidirectional controls, line separators and invisible characters, but not the joiners of scripts and emoji
_HIDDEN = r"\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_CONTROLS = re.compile(rf"[{_CONTROL}]|\r(?!\n)")
_HARMFUL = re.compile(rf"[{_CONTROL}{_HIDDEN}]|\r(?!\n)")
_JSON_HARMFUL = re.compile(rf"[{_CONTROL}{_HIDDEN}]")  # json escapes C0 itself
COLUMNS = 80  # usual width of a terminal


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean(text: str) -> str:
    """Escape characters that a terminal would act on, as \\x1b or \\u202e."""
    return _HARMFUL.sub(_escaped, text)


COLOURS = ("auto", "always", "never")


@dataclass(slots=True)
class Run:
    """Settings and state of a run of `notes`."""

    json: bool = False  # print errors as JSON on stdout, too, and no progress
    printed: bool = False  # a JSON document was printed
    colour: str = "auto"  # one of COLOURS
    quiet: bool = False  # print nothing but errors and warnings on stderr, and no progress
    warnings: list[str] = field(default_factory=list)  # so far, for JSON documents


run = Run()


def begin(*, json: bool) -> None:
    """Reset the state for a new run."""
    run.json, run.printed, run.colour, run.quiet, run.warnings = json, False, "auto", False, []


def open_streams() -> None:
    """Replace stdout and open closed standard streams, so that no other file gets their numbers: reads fail, writes to
    stdout fail, writes to stderr are lost."""
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free number
    encoding = sys.stdout.encoding if sys.stdout else "utf-8"
    sys.stdout = Stdout(open(1, "wb", closefd=False), encoding=encoding)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text that the terminal cannot show must not be an error
            stream.reconfigure(errors="surrogateescape" if stream.encoding == "utf-8" else "replace")


class Stdout(io.TextIOWrapper):
    """stdout that raises OutputError for failed writes, UnreadError for EPIPE."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._broken(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError) -> OutputError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the rest of the buffer would fail again at exit
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        if error.errno == errno.EPIPE:
            return UnreadError("nobody reads standard output")
        return OutputError(f"cannot write to standard output: {reason}")


def _write(text: str) -> None:
    # The stream is explicit: click would wrap an ASCII stdout in UTF-8. Colour is decided here.
    click.echo(text, sys.stdout, nl=False, color=True)


def flush() -> None:
    """Flush both streams. Raises OutputError if stdout cannot be written."""
    sys.stdout.flush()
    with suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.flush()


def say(message: str) -> None:
    """Print a line on stderr, unless quiet."""
    if not run.quiet:
        log(message.replace("\n", "\\n") + "\n")


def remark(message: str) -> None:
    """Print a line on stderr that a JSON document has in another form: not with --json."""
    if not run.json:
        say(message)


def warn(message: str) -> None:
    """Print a warning on stderr, even if quiet, and add it to the JSON documents that follow."""
    if run.json and message not in run.warnings:
        run.warnings.append(message)
    log(f"warning: {message}".replace("\n", "\\n") + "\n")


def error(message: str) -> None:
    """Print the error of one of several things on stderr, even if quiet."""
    log(f"notes: {message}".replace("\n", "\\n") + "\n")


def log(text: str) -> None:
    """Print a text on stderr, even if quiet."""
    with suppress(OSError):  # a closed stderr stops nothing
        click.echo(clean(text), sys.stderr, nl=False)


def fail(message: str, status: int) -> int:
    """Print an error on stderr, and as JSON on stdout if requested and no document was printed; return `status`."""
    error(message)
    if run.json and not run.printed:
        with suppress(OutputError):
            as_json({"version": 1, "error": {"message": message, "status": status}})
    return status


def result(text: str) -> None:
    """Print lines on stdout, escaped."""
    _write(clean(text) + "\n")


def data(text: str, end: str = "\n") -> None:
    """Print an answer, a text or a path on stdout: unchanged in a pipe, control characters escaped on a terminal."""
    _write((_CONTROLS.sub(_escaped, text) if terminal() else text) + end)


def read_line(prompt: str) -> str:
    """Read a line from the terminal, with editing and history. Raises EOFError at the end."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # `input` then edits lines
    return input(prompt)


def binary() -> BinaryIO:
    """Return stdout for bytes. Raises OutputError on a terminal."""
    if terminal():
        raise OutputError("bytes are not for a terminal")
    buffer: BinaryIO = sys.stdout.buffer
    return buffer


def terminal() -> bool:
    return sys.stdout.isatty()


def watched() -> bool:
    """True if stderr is a terminal, without --quiet and --json."""
    return sys.stderr.isatty() and not run.quiet and not run.json


def as_json(value: Any, indent: int | None = 2) -> None:
    """Print a JSON document on stdout, with harmful characters escaped; an object gets the warnings so far. `indent`:
    None for one line."""
    if isinstance(value, dict):
        value = {**value, "warnings": run.warnings}
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    _write(_JSON_HARMFUL.sub(lambda match: json.dumps(match[0])[1:-1].replace("\x7f", "\\u007f"), text) + "\n")
    run.printed = True


def document(facts: dict[str, Any], text: str, json_: bool) -> None:
    """Print the outcome of a command: as a JSON document, or the `text` for people."""
    if json_:
        as_json({"version": 1, **facts})
    else:
        result(text)


def asks() -> bool:
    """True if a question can be answered: stdin is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirmed(question: str, refusal: str, unchanged: str) -> bool:
    """Ask a yes/no question on stderr; the default is no, which prints `unchanged`. Raises UsageError with the
    `refusal` if stdin is not a terminal."""
    if not asks():
        raise click.UsageError(f"there is no terminal to ask on{refusal}")
    yes = click.confirm(clean(question), err=True)
    if not yes:
        say(unchanged)
    return yes


def _coloured(on_terminal: bool) -> bool:
    """True if a stream gets colour: by --color, else by no-color.org and CLICOLOR (empty variables do not count, 0 does
    not force), else on a terminal."""
    if run.colour != "auto":
        return run.colour == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return on_terminal and os.environ.get("CLICOLOR") != "0" and os.environ.get("TERM") not in ("dumb", "unknown")


def _console(*, err: bool = False, width: int | None = None) -> Console:
    from rich.console import Console

    on_terminal = (sys.stderr if err else sys.stdout).isatty()
    options = {"stderr": err, "width": width, "highlight": False, "markup": False, "emoji": False, "no_color": False}
    if not _coloured(on_terminal):
        return Console(force_terminal=on_terminal, color_system=None, **options)  # type: ignore[arg-type]
    console = Console(force_terminal=True, **options)  # type: ignore[arg-type]
    if console.color_system is None:  # TERM names no colours
        console = Console(force_terminal=True, color_system="standard", **options)  # type: ignore[arg-type]
    return console


def width(default: int) -> int:
    """Return the terminal's columns, or `default` if stdout is not a terminal."""
    return _console().width if terminal() else default


def styled(parts: Iterable[tuple[str, str]]) -> None:
    """Print a line of (text, style) parts on stdout; styles apply on a terminal with colour."""
    from rich.text import Text

    text = Text.assemble(*((clean(part), style) for part, style in parts))
    _console().print(text, soft_wrap=True)


def aside(text: str) -> None:
    """Print a part of the reasoning, or a remark, on stderr, dimmed on a terminal."""
    if not run.quiet:
        with suppress(OSError):
            _console(err=True).out(clean(text), style="dim", highlight=False, end="")


def sentence(text: str) -> None:
    """Print a line on stdout, wrapped at words on a terminal."""
    from textwrap import fill

    text = clean(text)
    if terminal():
        text = fill(text, _console().width, break_long_words=False, break_on_hyphens=False)
    _write(text + "\n")


def fitting(line: str, shorter: str) -> str:
    """Return `line` if it fits a terminal of the usual width, else `shorter`."""
    return line if len(line) <= COLUMNS else shorter


def cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(clean(text))


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    wraps: Sequence[str] | None = None,
) -> None:
    """Print a table on stdout. `right`: columns aligned to the right. `wraps`: columns that may wrap on a narrow
    terminal while the others are cut; by default all."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        fixed = wraps is not None and column not in wraps
        justify: Literal["right", "left"] = "right" if column in right else "left"
        grid.add_column(clean(column), justify=justify, overflow="ellipsis" if fixed else "fold", no_wrap=fixed)
    for row in rows:
        grid.add_row(*(clean(cell).replace("\n", " ") for cell in row))
    if terminal():
        _console().print(grid)
        return
    console = _console(width=10_000)  # in a pipe nothing is cut or wrapped
    with console.capture() as captured:
        console.print(grid)
    _write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


class _Bar:
    """A progress bar on stderr, removed when done. Several bars share one display."""

    _display: ClassVar[RichProgress | None] = None

    def __init__(self, label: str, unit: str) -> None:
        self._label, self._unit = clean(label), unit
        self._task: TaskID | None = None

    def show(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        if _Bar._display is None:
            columns = (
                *(TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[state]}")),
                *(TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn()),
            )
            # stdout may be a pipe, so it is not redirected above the bar
            _Bar._display = Progress(*columns, console=_console(err=True), transient=True, redirect_stdout=False)
            _Bar._display.start()
        self._task = _Bar._display.add_task(self._label, total=None, state="")

    def update(self, done: int, total: int) -> None:
        if done >= total:
            self.hide()
            return
        if self._task is None:
            self.show()
        assert _Bar._display is not None and self._task is not None
        speed = next(task.speed for task in _Bar._display.tasks if task.id == self._task)
        scale = 1_000_000 if self._unit == "MB" else 1
        state = f"{done / scale:,.0f}/{total / scale:,.0f} {self._unit}"
        state += f" {speed:,.0f}/s" if speed and self._unit == "tokens" else ""
        _Bar._display.update(self._task, completed=done, total=total, state=state)

    def hide(self) -> None:
        if self._task is None or _Bar._display is None:
            return
        _Bar._display.remove_task(self._task)
        self._task = None
        if not _Bar._display.tasks:
            _Bar._display.stop()
            _Bar._display = None


def clear() -> None:
    """Remove progress bars and show the cursor again, from any thread."""
    if _Bar._display is not None:
        _Bar._display.stop()


LONG = 512  # tokens whose work shows progress


@contextmanager
def progress(
    label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False, hidden: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr if it is a terminal; yield update(done, total). `tokens`: of the work, if known.
    `later`: show it from the first update on."""
    if hidden or (tokens is not None and tokens < LONG) or not watched():
        yield lambda done, total: None
        return
    bar = _Bar(label, unit)
    try:
        if not later:
            bar.show()
        yield bar.update
    finally:
        bar.hide()


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: "1 file", "2 files"."""
    return f"1 {noun}" if count == 1 else f"{count} {nouns or noun + 's'}"


def line(text: str, length: int | None = None) -> str:
    """Return an untrusted text on one line, escaped and cut to `length`."""
    text = clean(" ".join(text.split()))
    return text if length is None or len(text) <= length else text[: length - 1] + "…"
