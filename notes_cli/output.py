"""What people see: the one door for all that `notes` prints. Results go to stdout, everything else to stderr.

Names, texts and errors may be anybody's: what would move a cursor, colour a terminal or turn text round is shown, not
sent. An answer, a text or a path (`data`) is that in a terminal only; a pipe gets it as it is. JSON spells such
characters out. Colour and progress are for terminals, unless a user says otherwise (`_coloured`).
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal

import click

from notes_cli.errors import OutputError, UnreadError
from notes_cli.text.sizes import human_size as human_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# What a terminal obeys: C0 but tabs and line ends, DEL, C1, and the bytes that file names keep as lone surrogates.
_CONTROL = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff"
# What turns text round, breaks lines, or is not seen at all; the joiners that scripts and emoji need are none of it.
_HIDDEN = r"\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_OBEYED = re.compile(rf"[{_CONTROL}]|\r(?!\n)")
_HARMFUL = re.compile(rf"[{_CONTROL}{_HIDDEN}]|\r(?!\n)")
_SPELT = re.compile(rf"[{_CONTROL}{_HIDDEN}]")  # in JSON, where C0 is spelt already
COLUMNS = 80  # of a terminal, as most are


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean(text: str) -> str:
    """A text that does nothing to a terminal: harmful characters as \\x1b or \\u202e."""
    return _HARMFUL.sub(_visible, text)


@dataclass(slots=True)
class _Run:
    """What holds for this call of `notes`."""

    json: bool = False  # errors are to be JSON, too
    printed: bool = False  # a JSON document
    colour: str = "auto"
    quiet: bool = False  # nothing is told but errors


_run = _Run()


def begin(*, json: bool) -> None:
    """A call of `notes` begins. `json`: an error is one JSON document on stdout, beside its line on stderr."""
    _run.json, _run.printed = json, False
    _run.colour, _run.quiet = "auto", False


def want_json() -> None:
    """A setting asks for JSON."""
    _run.json = True


COLOURS = ("auto", "always", "never")


def colour(when: str, *, setting: bool = False) -> None:
    """When there is colour, one of COLOURS. Variables of the user's environment win over a `setting`."""
    if not (setting and any(os.environ.get(name) for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"))):
        _run.colour = when


def hush() -> None:
    """Tell nothing but errors, and show no progress."""
    _run.quiet = True


def open_streams() -> None:
    """Take the standard streams. One that is closed is opened, so that no file of ours gets its number: nothing can be
    read from it; writing to stdout is an error; what goes to stderr is lost."""
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest number that is free
    encoding = sys.stdout.encoding if sys.stdout else "utf-8"
    sys.stdout = Stdout(open(1, "wb", closefd=False), encoding=encoding)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name or a text that this terminal cannot show ends nothing
            stream.reconfigure(errors="surrogateescape" if stream.encoding == "utf-8" else "replace")


class Stdout(io.TextIOWrapper):
    """stdout, which raises OutputError where it cannot take what is printed."""

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
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what waits in the buffer would fail again at the exit
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        if error.errno == errno.EPIPE:
            return UnreadError("nobody reads standard output")
        return OutputError(f"cannot write to standard output: {reason}")


def _write(text: str) -> None:
    # The stream is named: of an ASCII one that it looks up itself click makes UTF-8. Colour is decided here.
    click.echo(text, sys.stdout, nl=False, color=True)


def flush() -> None:
    """Have all of it out. Raise OutputError where stdout cannot take it."""
    sys.stdout.flush()
    with suppress(OSError, ValueError):  # nobody is there to be told
        sys.stderr.flush()


def say(message: str) -> None:
    """A line for people, on stderr."""
    if not _run.quiet:
        _say(message)


def _say(message: str) -> None:
    _tell(clean(message).replace("\n", "\\n") + "\n")


def page(text: str) -> None:
    """Lines for people, on stderr."""
    _tell(clean(text) + "\n")


def log(text: str) -> None:
    """A part of llama.cpp's log, on stderr."""
    _tell(clean(text))


def _tell(text: str) -> None:
    with suppress(OSError):  # nobody is there to be told, and that is no reason to stop
        click.echo(text, sys.stderr, nl=False)


def fail(message: str, status: int) -> int:
    """An error: a line on stderr and, where JSON is asked for and nothing was printed, a document. The exit status."""
    _say(f"notes: {message}")
    if _run.json and not _run.printed:
        with suppress(OutputError):
            as_json({"version": 1, "error": {"message": message, "status": status}})
    return status


def result(text: str) -> None:
    """Lines for people or scripts, on stdout."""
    _write(clean(text) + "\n")


def data(text: str, end: str = "\n") -> None:
    """An answer, a text or a path, on stdout: in a pipe as it is, on a terminal without what it would obey."""
    _write((_OBEYED.sub(_visible, text) if terminal() else text) + end)


def binary() -> BinaryIO:
    """stdout for bytes. Raise OutputError on a terminal."""
    if terminal():
        raise OutputError("bytes are not for a terminal")
    buffer: BinaryIO = sys.stdout.buffer
    return buffer


def terminal() -> bool:
    """Whether stdout is one."""
    return sys.stdout.isatty()


def watched() -> bool:
    """Whether stderr is one: somebody may like to see how far something is."""
    return sys.stderr.isatty()


def shows(characters: str) -> bool:
    """Whether stdout's encoding has all of these."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def as_json(value: Any) -> None:
    """One JSON document on stdout; harmful characters are spelt out in it, which changes no value."""
    _json(value, indent=2)


def json_line(value: Any) -> None:
    """A JSON value on a line of stdout, at once."""
    _json(value)


def _json(value: Any, indent: int | None = None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    _write(_SPELT.sub(lambda found: json.dumps(found[0])[1:-1].replace("\x7f", "\\u007f"), text) + "\n")
    _run.printed = True


def confirm(question: str) -> bool:
    """Ask on the terminal, through stderr; no is the default."""
    return click.confirm(clean(question), err=True)


def _coloured(shown: bool) -> bool:
    """Whether there is colour on a stream that is a terminal (`shown`) or none: as this call says, else as no-color.org
    and CLICOLOR have it, where an empty variable says nothing, and 0 does not force."""
    if _run.colour != "auto":
        return _run.colour == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return shown and os.environ.get("CLICOLOR") != "0" and os.environ.get("TERM") not in ("dumb", "unknown")


def _console(*, err: bool = False, width: int | None = None) -> Console:
    from rich.console import Console

    shown = (sys.stderr if err else sys.stdout).isatty()
    kept = {"stderr": err, "width": width, "highlight": False, "markup": False, "emoji": False, "no_color": False}
    if not _coloured(shown):
        return Console(force_terminal=shown, color_system=None, **kept)  # type: ignore[arg-type]
    console = Console(force_terminal=True, **kept)  # type: ignore[arg-type]
    if console.color_system is None:  # of a terminal that does not say what it can
        console = Console(force_terminal=True, color_system="standard", **kept)  # type: ignore[arg-type]
    return console


def width(elsewhere: int) -> int:
    """Columns of the terminal; `elsewhere` where stdout is none."""
    return _console().width if terminal() else elsewhere


def styled(parts: Iterable[tuple[str, str]]) -> None:
    """A line on stdout of texts and their styles, which a terminal with colour gets."""
    from rich.text import Text

    shown = Text.assemble(*((clean(text), style) for text, style in parts))
    _console().print(shown, soft_wrap=True)


def aside(text: str) -> None:
    """A part of what a model says beside its answer: on stderr, dimmed on a terminal."""
    if _run.quiet:
        return
    with suppress(OSError):
        _console(err=True).out(clean(text), style="dim", highlight=False, end="")


def remark(text: str, *, always: bool = False) -> None:
    """A line on stderr beside a result, dimmed on a terminal. None where a pipe or a file gets the result, unless it is
    `always` wanted."""
    if always or (terminal() and watched()):
        aside(text + "\n")


def sentence(text: str) -> None:
    """A line on stdout for people, which a terminal gets in lines of whole words."""
    from textwrap import fill

    text = clean(text)
    if terminal():
        text = fill(text, _console().width, break_long_words=False, break_on_hyphens=False)
    _write(text + "\n")


def fitting(line: str, shorter: str) -> str:
    """A line where it fits a terminal of the usual width, else a shorter one that says less."""
    return line if len(line) <= COLUMNS else shorter


def cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    from rich.cells import cell_len

    return cell_len(clean(text))


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    wraps: Sequence[str] | None = None,
) -> None:
    """A table on stdout, for people; a script should ask for --json. `wraps`: columns that take several lines where a
    terminal is too narrow, in whole words; all that must, without it."""
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
    console = _console(width=10_000)  # a pipe has no width: nothing may be cut or wrapped for want of columns
    with console.capture() as captured:
        console.print(grid)
    _write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


class _Bar:
    """A progress bar on stderr, there until all is done. Several may be there at once: they share one display."""

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
            # stdout may be a pipe: nothing that goes there may be drawn above the bar instead
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
        state = f"{amount(done, self._unit)}/{amount(total, self._unit)} {self._unit}"
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
    """Take the progress bars away and show the cursor again; for another thread than the one that shows them."""
    if _Bar._display is not None:
        _Bar._display.stop()


@contextmanager
def progress(
    label: str, unit: str = "tokens", hidden: bool = False, later: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with speed and ETA on stderr, shown on a terminal only; yields update(done, total).

    `later`: it is not there before the first update.
    """
    if hidden or _run.quiet or not watched():
        yield lambda done, total: None
        return
    bar = _Bar(label, unit)
    try:
        if not later:
            bar.show()
        yield bar.update
    finally:
        bar.hide()


def amount(count: int, unit: str) -> str:
    return f"{count / 1e6:,.0f}" if unit == "MB" else f"{count:,}"


def line(text: str, length: int | None = None) -> str:
    """A text on one line, its beginning if it is longer; it may be anybody's."""
    return _cut(clean(" ".join(text.split())), length)


def spelt(text: str, length: int) -> str:
    """The beginning of a text with all its blanks, line breaks written out, and no control character (no SVG may)."""
    return _cut("".join(part if part.isprintable() else "." for part in text.replace("\n", "\\n")), length)


def _cut(text: str, length: int | None) -> str:
    return text if length is None or len(text) <= length else text[: length - 1] + "…"
