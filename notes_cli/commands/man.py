"""`notes man`: manual pages, made from the commands' own help."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from notes_cli import __version__, output


@click.command()
@click.argument("words", nargs=-1, metavar="[COMMAND...]")
@click.option("--install", is_flag=True, help="Write all pages for this user, to ~/.local/share/man.")
@click.option(
    "--write", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", help="Write all pages into FOLDER."
)
@click.option("-q", "--quiet", is_flag=True, help="Print the path alone.")
def command(words: tuple[str, ...], install: bool, write: Path | None, quiet: bool) -> None:
    """Show the manual page of notes, or of one of its commands: as text on a terminal, with the
    variable of each option, its source in a pipe.

    \b
    Examples:
      notes man session fork
      notes man ask | man -l -
      notes man --install         then: man notes-ask, if ~/.local/bin is in PATH
    """
    pages = dict(_pages())
    folder = _own() if install else write
    if folder is not None:
        if words:
            raise click.UsageError("all pages are written: leave out the COMMAND")
        _write(folder, pages)
        output.data(str(folder))
        if not quiet:
            output.say(f"{len(pages)} pages. Read one: man {'' if install else f'-M {folder.parent} '}notes-ask")
        return
    name = "-".join(("notes", *words))
    if name not in pages:
        raise click.UsageError(f"there is no command {' '.join(words)!r}. Leave it out for a list of all")
    if output.terminal():
        output.result(_shown(_context(words)))
    else:
        output.data(pages[name], end="")


def _shown(context: click.Context) -> str:
    """The help of a command, with the variable of each option."""
    options = [one for one in context.command.params if isinstance(one, click.Option) and not one.show_envvar]
    for option in options:
        option.show_envvar = True
    try:
        return context.get_help()
    finally:
        for option in options:
            option.show_envvar = False


def _own() -> Path:
    from notes_cli.config import home_folder

    return Path(os.environ.get("XDG_DATA_HOME") or home_folder() / ".local" / "share") / "man" / "man1"


def _write(folder: Path, pages: dict[str, str]) -> None:
    from notes_cli.errors import NotesError, reason

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, page in pages.items():
            (folder / f"{name}.1").write_text(page, encoding="utf-8")
    except OSError as error:
        raise NotesError(f"cannot write {error.filename or folder}: {reason(error)}") from error


def _context(words: tuple[str, ...]) -> click.Context:
    """That of a command by its words."""
    context = click.get_current_context().find_root()
    for word in words:
        group = context.command
        found = group.get_command(context, word) if isinstance(group, click.Group) else None
        assert found is not None
        context = click.Context(found, parent=context, info_name=word)
    return context


def _pages(words: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Name and source of the page of a command, and of those below it."""
    context = _context(words)
    yield "-".join(("notes", *words)), page(context)
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from _pages((*words, name))


def page(context: click.Context) -> str:
    """The source of a manual page, in man(7)'s macros."""
    command, path = context.command, context.command_path
    title = path.replace(" ", "-")
    text = cleandoc(command.help or "").replace("\b\n", "\b")
    blocks = [block for block in text.split("\n\n") if block.strip()]
    first = _line(blocks[0]) if blocks else ""
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f'.TH "{title.upper()}" 1 "" "notes {__version__}" "notes"', ".SH NAME"]
    lines += [rf"{_safe(title)} \- {_safe(first.split('. ')[0].rstrip('.:'))}", ".SH SYNOPSIS"]
    lines += [rf"\fB{_safe(path)}\fR {_safe(usage)}", ".SH DESCRIPTION"]
    for block in blocks:
        if block.startswith("\b"):
            title, _, body = block[1:].partition("\n")
            lines += [f".SH {_safe(title.strip().rstrip(':').upper())}", ".nf", _safe(body), ".fi"]
        else:
            lines += [".PP", _safe(_line(block))]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            told = child.get_short_help_str(200) if child else ""
            lines += [".TP", rf"\fB{_safe(title_of(path, name))}\fR(1)", _safe(told)]
    lines.append(".SH OPTIONS")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option):
            lines += [".TP", rf"\fB{_safe(record[0])}\fR", _safe(_line(record[1]))]
            if isinstance(parameter.envvar, str):
                lines[-1] += f" Variable: {parameter.envvar}{', a line for each' if parameter.multiple else ''}."
    lines += [".SH EXIT STATUS", "0: done; 1: failed or refused; 2: wrong usage; 130: interrupted."]
    return "\n".join(lines) + "\n"


def title_of(path: str, name: str) -> str:
    """What the page of a command below `path` is called."""
    return f"{path} {name}".replace(" ", "-")


def _line(text: str) -> str:
    return " ".join(text.split())


def _safe(text: str) -> str:
    """A text that troff takes for nothing else."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)
