"""Shared by all commands: common options, settings of files, grouped help, texts from stdin and files, forced exit."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from notes_cli import output, signals
from notes_cli.errors import NotesError, reason

MAY_BE_EMPTY = ("question", "prompt", "system")  # ask has its own error for an empty question


def add_common_options(command: click.Command, *path: str) -> click.Command:
    """Add --quiet, --color and environment variables to the command at this path and its subcommands; return it.

    Variables are named like settings: `max-tokens: 3` under `ask:` is NOTES_ASK_MAX_TOKENS=3, with a value per line for
    a repeatable option. --json has none, as errors are printed before options are parsed.
    """
    if isinstance(command, click.Group):
        for name, subcommand in command.commands.items():
            add_common_options(subcommand, *path, name)
        return command
    known = {flag for parameter in command.params for flag in parameter.opts}
    if "--color" not in known:
        command = _color_option(command if "--quiet" in known else _quiet_option(command))
    for parameter in command.params:
        if parameter.name not in MAY_BE_EMPTY and not getattr(parameter, "is_flag", False):
            parameter.type = _not_empty(parameter.type)
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        if option.multiple:  # a value per line of a variable; click splits at blanks, which keys and paths may contain
            option.type = copy.copy(option.type)
            vars(option.type)["split_envvar_value"] = lambda text: list(filter(str.strip, re.split("\r?\n", text)))
        if option.envvar is None and option.name != "json_":
            flag = next(flag for flag in option.opts if flag.startswith("--"))
            option.envvar = "_".join(("notes", *path, flag[2:])).replace("-", "_").upper()
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


_color_option = click.option(
    "--color",
    type=click.Choice(output.COLOURS),
    metavar="WHEN",
    envvar="NOTES_COLOR",
    expose_value=False,
    callback=_set_colour,
    help="auto (on a terminal, unless NO_COLOR and the like say otherwise), always, never.",
)
_quiet_option = click.option(
    *("-q", "--quiet"), is_flag=True, expose_value=False, callback=_set_quiet, help="Nothing on stderr but errors."
)


def keys_of(command: click.Command) -> set[str]:
    """Return the names of a command's settings: its long and short flags without dashes."""
    if isinstance(command, click.Group):
        return set().union(*map(keys_of, command.commands.values()))
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {flag.lstrip("-") for option in options for flag in option.opts}


def settings_for(name: str, config: Mapping[str, Any], commands: Collection[str]) -> dict[str, Any]:
    """Return the settings of config.yaml for the command `name`: those under its name override those for all."""
    from notes_cli.config import by_flag  # --help needs none

    specific = config.get(name)
    common = {key: value for key, value in config.items() if not (key in commands and isinstance(value, dict))}
    specific = specific if isinstance(specific, dict) else {}
    return by_flag(common, "config.yaml") | by_flag(specific, f"{name} in config.yaml")


def defaults_of(command: click.Command, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of config.yaml by parameter of the command. They are named like flags: `ctx-size: 8192`. Raises
    NotesError for an invalid value."""
    settings = {str(key).replace("-", "_"): value for key, value in settings.items()}
    defaults = {}
    for parameter in command.params:
        for flag in parameter.opts:
            key = flag.lstrip("-").replace("-", "_")
            if key in settings and parameter.name and isinstance(parameter, click.Option):
                defaults[parameter.name] = _default(parameter, flag.lstrip("-"), settings[key])
    return defaults


def _default(option: click.Option, key: str, value: Any) -> Any:
    """Return a setting as the default of an option: a list if it is repeatable."""
    values = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in values):
        raise NotesError(f"{key} in config.yaml must be {'a list of values' if option.multiple else 'one value'}")
    if not all(values):
        raise NotesError(f"{key} in config.yaml has no value", "Give it one, or remove the line")
    try:
        for item in values:
            option.type.convert(item, None, None)
    except click.BadParameter as error:
        raise NotesError(f"{key} in config.yaml: {error.message}") from error
    return values if option.multiple else value


MODEL = ("model", "ctx_size", "threads", "gpu_layers", "mmproj")
EXPERT = (
    *("batch_size", "ubatch_size", "rpc", "image_min_tokens", "image_max_tokens", "flash_attn"),
    *("cache_type_k", "cache_type_v", "rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
    *("beyond_trained", "carry", "chat_template_file"),
)
REST = "Options"


class GroupedCommand(click.Command):
    """A command with its options in groups in help. `groups`: heading -> parameters, in order; the rest comes first."""

    def __init__(self, *arguments: Any, groups: Mapping[str, Sequence[str]] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.groups = {"Model": MODEL, "Expert": EXPERT} if groups is None else groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        records = {"help" if "--help" in item.opts else item.name: item.get_help_record(ctx) for item in options}
        grouped = {name for names in self.groups.values() for name in names}
        for title, names in {REST: [name for name in records if name not in grouped], **self.groups}.items():
            rows = [record for name in names if (record := records.get(name))]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


SHORT = 40  # characters of a value in a message


class SingleOption(click.Option):
    """An option that may be given once; click would silently take the last value."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        values = opts.get(str(self.name))
        if isinstance(values, list):
            if len(values) > 1 and not ctx.resilient_parsing:  # no error during shell completion
                flag = next(flag for flag in self.opts if flag.startswith("--"))
                first, second = (repr(str(value)[:SHORT]) for value in values[:2])
                raise click.UsageError(f"there are two values of {flag}, {first} and {second}. Leave one out", ctx)
            opts = {**opts, str(self.name): values[0]}
        return super().consume_value(ctx, opts)


MAX_BYTES = 64 << 20  # more than any context holds; an endless pipe must not fill the memory


def standard_input() -> BinaryIO:
    """Return stdin for bytes. Raises UsageError if it is closed."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: pipe something in, or name a file")
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


def end_when_late() -> None:
    """Force exit if llama.cpp has not stopped 100 ms after a signal; only in a `notes` process, not in tests."""
    from notes_cli.engine import interrupts

    if signals.working:
        interrupts.when_late(_force_exit)


def _force_exit(number: int) -> None:
    """Clean up and end the process from another thread while the main thread computes, unless that is ending too."""
    from notes_cli.engine import interrupts

    if not signals.claim(wait=False):
        return
    signals.received = signals.received or number
    output.clear()
    output.fail(signals.describe(), signals.status())
    if signals.received == signal.SIGINT:
        os._exit(signals.INTERRUPTED)
    interrupts.end_by(signals.received)
