"""Shared by all commands: options and their help, settings of files, texts from stdin and files, forced exit."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click

from notes_cli import output, signals
from notes_cli.errors import NotesError, reason

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
SHORT = 40  # characters of a value in a message
MAY_BE_EMPTY = ("question", "prompt", "system")  # ask has its own error for an empty question


class Option(click.Option):
    """An option of a command. `group`: its heading in help. `rare`: --help-all shows it, --help does not. `once`: two
    values are an error; click would silently take the last one."""

    def __init__(
        self, *arguments: Any, group: str = "Options", rare: bool = False, once: bool = False, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.group, self.rare, self.once = group, rare, once

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        if self.once:
            parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)
        else:
            super().add_to_parser(parser, ctx)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        values = opts.get(str(self.name))
        if self.once and isinstance(values, list):
            if len(values) > 1 and not ctx.resilient_parsing:  # no error during shell completion
                first, second = (repr(str(value)[:SHORT]) for value in values[:2])
                raise click.UsageError(
                    f"there are two values of {flag_of(self)}, {first} and {second}. Leave one out", ctx
                )
            opts = {**opts, str(self.name): values[0]}
        return super().consume_value(ctx, opts)


class Setting(Option):
    """An option of config.yaml and of a variable, which the command line refuses: the session or the segment that a
    command works on has its own."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, hidden=True, **keywords)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        if self.name in opts and opts[self.name] is not None and not ctx.resilient_parsing:
            flag = flag_of(self)
            where = f"the session or the skill has its own, else {self.envvar} or {flag[2:]}: in config.yaml holds"
            raise click.UsageError(f"{ctx.command_path} has no option {flag}: {where}", ctx)
        return super().consume_value(ctx, opts)


def option(
    flags: str, text: str, *, name: str | None = None, cls: type[Option] = Option, **how: Any
) -> Callable[[Decorated], Decorated]:
    """Return a decorator for an option with these flags, a word for its value after them, and this text in help.
    `how`: for click and `cls`."""
    value = next((word for word in flags.split() if not word.startswith("-")), None)
    return click.option(
        *flags.removesuffix(f" {value}").split(),
        *([name] if name else []),
        cls=cls,
        **{"help": text, "metavar": value, **how},
    )


row = partial(partial, option)  # an option in a table, to be applied later


def flag_of(parameter: click.Parameter) -> str:
    """Return the long flag of an option."""
    return next((flag for flag in parameter.opts if flag.startswith("--")), parameter.opts[0])


class Command(click.Command):
    """A command with its own options in groups in help; those of all commands are in `notes --help`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, rows in self.help_records(ctx, everything=HELP_ALL in ctx.meta).items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def help_records(self, ctx: click.Context, *, everything: bool) -> dict[str, list[tuple[str, str]]]:
        """Return the flags and texts of options by heading."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for item in self.params:
            if isinstance(item, Option) and (everything or not item.rare) and (record := item.get_help_record(ctx)):
                groups.setdefault(item.group, []).append(record)
        return groups

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown, every = (sum(map(len, self.help_records(ctx, everything=all_).values())) for all_ in (False, True))
        more = HELP_ALL not in ctx.meta and shown < every
        formatter.write_paragraph()
        first = f"More options: {ctx.command_path} --help-all. For all commands" if more else "Options of all commands"
        formatter.write_text(f"{first}: notes --help")


class Group(click.Group):
    """A command with subcommands."""

    command_class = Command


def common_options(command: click.Command) -> list[click.Option]:
    """Return those of COMMON that a command lacks; a group takes --help-all alone, and does not list it."""
    known = {flag for parameter in command.params for flag in parameter.opts}
    if not isinstance(command, click.Group):
        return [copy.copy(item) for item in COMMON if not known.intersection(item.opts)]
    item = copy.copy(COMMON[-1])
    item.hidden = True
    return [] if known.intersection(item.opts) else [item]


def add_common_options(command: click.Command, *path: str) -> click.Command:
    """Add COMMON and environment variables to the command at this path and its subcommands; return it.

    Variables are named like settings: `max-tokens: 3` under `ask:` is NOTES_ASK_MAX_TOKENS=3, with a value per line for
    a repeatable option. --json has none, as errors are printed before options are parsed.
    """
    if isinstance(command, click.Group):
        for name, subcommand in command.commands.items():
            add_common_options(subcommand, *path, name)
    command.params += common_options(command)
    for parameter in command.params:
        if parameter.name not in MAY_BE_EMPTY and not getattr(parameter, "is_flag", False):
            parameter.type = _not_empty(parameter.type)
        if not isinstance(parameter, click.Option):
            continue
        if parameter.multiple:  # a value per line of a variable; click splits at blanks, which keys and paths may have
            parameter.type = copy.copy(parameter.type)
            vars(parameter.type)["split_envvar_value"] = lambda text: list(filter(str.strip, re.split("\r?\n", text)))
        if parameter.envvar is None and parameter.name not in ("json_", HELP_ALL):
            parameter.envvar = "_".join(("notes", *path, flag_of(parameter)[2:])).replace("-", "_").upper()
    return command


def _not_empty(kind: click.ParamType[Any]) -> click.ParamType[Any]:
    """Return the type with "" refused: an unset variable in a script must not mean the default, the current folder, or
    no password."""
    if "convert" in vars(kind):  # done already
        return kind
    convert, wrapped = kind.convert, copy.copy(kind)

    def convert_text(value: Any, parameter: click.Parameter | None, ctx: click.Context | None) -> Any:
        return kind.fail("it is empty", parameter, ctx) if value == "" else convert(value, parameter, ctx)

    vars(wrapped)["convert"] = convert_text
    return wrapped


def _set_colour(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Set when to use colour. Environment variables override a setting of config.yaml."""
    setting = ctx.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.DEFAULT_MAP
    variables = any(os.environ.get(name) for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"))
    if value is not None and not (setting and variables):
        output.run.colour = value


def _set_quiet(_ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    output.run.quiet = output.run.quiet or value


def _help_all(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        output.result(ctx.get_help())
        ctx.exit()


HELP_ALL = "help_all"
# Options of all commands, unless a command has its own of that name. `notes --help` describes them.
COMMON = (
    click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_set_quiet,
        help="Nothing on stderr but errors and warnings.",
    ),
    click.Option(
        ["--color"],
        type=click.Choice(output.COLOURS),
        metavar="WHEN",
        envvar="NOTES_COLOR",
        expose_value=False,
        callback=_set_colour,
        help="auto (on a terminal, unless NO_COLOR and the like say otherwise), always, never.",
    ),
    click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_help_all,
        help="All options of a command.",
    ),
)


def variable_of(ctx: click.Context, parameter: click.Parameter | None) -> str:
    """Return the environment variable that an option's value came from; empty if it came from elsewhere."""
    name = parameter.name if parameter else None
    from_environment = name and ctx.get_parameter_source(name) is click.core.ParameterSource.ENVIRONMENT
    return str(parameter.envvar) if parameter and from_environment else ""


def keys_of(command: click.Command) -> set[str]:
    """Return the names of a command's settings: its long and short flags without dashes."""
    if isinstance(command, click.Group):
        return set().union(*map(keys_of, command.commands.values()))
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {flag.lstrip("-") for option in options for flag in option.opts}


def defaults_of(
    command: click.Command, name: str, config: Mapping[str, Any], commands: Collection[str]
) -> dict[str, Any]:
    """Return the settings of config.yaml for the command `name`, by parameter: those under its name override those for
    all. They are named like flags: `ctx-size: 8192`. Raises NotesError for an invalid value."""
    from notes_cli.config import by_flag  # --help needs none

    specific = config.get(name)
    common = {key: value for key, value in config.items() if not (key in commands and isinstance(value, dict))}
    settings = by_flag(common, "config.yaml")
    if isinstance(specific, dict):
        settings |= by_flag(specific, f"{name} in config.yaml")
    defaults = {}
    for parameter in command.params:
        for key in (flag.lstrip("-") for flag in parameter.opts):
            if key in settings and parameter.name and isinstance(parameter, click.Option):
                defaults[parameter.name] = _default(parameter, key, settings[key])
    return defaults


def _default(option: click.Option, key: str, value: Any) -> Any:
    """Return a setting as the default of an option: a list if it is repeatable."""
    values = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in values):
        raise NotesError(f"{key} in config.yaml must be {'a list of values' if option.multiple else 'one value'}")
    if not all(values):
        raise NotesError(f"{key} in config.yaml has no value", "Give it one, or remove the line")
    for item in values:
        converted(option, item, f"{key} in config.yaml")
    return values if option.multiple else value


def converted(option: click.Parameter, value: Any, where: str) -> Any:
    """Return a value as the option has it on the command line. Raises NotesError for an invalid one."""
    try:
        return option.type.convert(value, None, None)
    except click.BadParameter as error:
        raise NotesError(f"{where}: {error.message}") from error


MAX_BYTES = 64 << 20  # more than any context holds; an endless pipe must not fill the memory


def standard_input(*, hint: bool = True) -> BinaryIO:
    """Return stdin for bytes; on a terminal a `hint` says how to end it. Raises UsageError if it is closed."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: pipe something in, or name a file")
    if hint and sys.stdin.isatty():
        output.say("reading from the terminal; end it with Ctrl-D on a line of its own")
    return sys.stdin.buffer


def piped_text() -> str:
    """Return the stripped text on stdin. Raises UsageError unless it is UTF-8."""
    return _decode(standard_input().read(MAX_BYTES + 1), "the piped text")


def read_text(file: Path) -> str:
    """Return the stripped text of a file. Raises UsageError if it cannot be read or is not UTF-8."""
    try:
        with file.open("rb") as opened:
            return _decode(opened.read(MAX_BYTES + 1), str(file))
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {reason(error)}") from error


def _decode(data: bytes, source: str) -> str:
    if len(data) > MAX_BYTES:
        raise click.UsageError(f"{source} is longer than {MAX_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source} is not UTF-8 text (byte {error.start})") from error


@contextmanager
def ended_by_ctrl_c(*, wanted: bool = True) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end the work in the block and not the program; yield a function that says if it came.
    `wanted`: False leaves Ctrl-C as it is."""
    signals.holding = wanted
    try:
        yield lambda: wanted and signals.received != 0
    finally:
        signals.holding = False
        if wanted and signals.received == signal.SIGINT:
            signals.received = 0


def end_when_late() -> None:
    """Force exit if llama.cpp has not stopped 100 ms after a signal; only in a `notes` process, not in tests."""
    from notes_cli.engine import interrupts

    if signals.working:
        interrupts.when_late(_force_exit)


def _force_exit(number: int) -> None:
    """Clean up and end the process from another thread while the main thread computes, unless that is ending too."""
    from notes_cli.engine import interrupts

    if signals.holding or not signals.claim(wait=False):
        return
    signals.received = signals.received or number
    output.clear()
    output.fail(signals.describe(), signals.status())
    if signals.received == signal.SIGINT:
        os._exit(signals.INTERRUPTED)
    interrupts.end_by(signals.received)
