"""What all commands share: options, help in groups, piped texts, and the end after Ctrl-C."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from notes_cli import output, stops
from notes_cli.errors import reason

MAY_BE_EMPTY = ("question", "prompt", "system")  # parameters that are texts: ask says itself that there is no question


def give(command: click.Command, *path: str) -> click.Command:
    """The command called by these words, with what it need not know of; those below it, too. Once is enough.

    An option that has no variable gets one that is called as the setting in config.yaml: `max-tokens: 3` under `ask:`
    is NOTES_ASK_MAX_TOKENS=3. Only --json, by which errors are printed before options are read, has none. That of a
    repeatable option has a value in each of its lines.
    """
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            give(one, *path, name)
        return command
    known = {flag for parameter in command.params for flag in parameter.opts}
    if "--color" not in known:
        command.params += [_color_option()] if "--quiet" in known else [_quiet_option(), _color_option()]
    for parameter in command.params:
        if parameter.name not in MAY_BE_EMPTY and not getattr(parameter, "is_flag", False):
            parameter.type = _refusing_nothing(parameter.type)
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        if option.multiple:
            option.type = _of_lines(option.type)
        if option.envvar is None and option.name != "json_":
            flag = next(flag for flag in option.opts if flag.startswith("--"))
            option.envvar = "_".join(("notes", *path, flag[2:])).replace("-", "_").upper()
    return command


def _refusing_nothing(kind: click.ParamType[Any]) -> click.ParamType[Any]:
    """The same type, for which "" is no value: a variable of a script that is not set must not mean the default, the
    folder where it runs, or no password."""
    if "convert" in vars(kind):  # it is one already
        return kind
    convert, refusing = kind.convert, copy.copy(kind)

    def given(value: Any, parameter: click.Parameter | None, ctx: click.Context | None) -> Any:
        return kind.fail("it is empty", parameter, ctx) if value == "" else convert(value, parameter, ctx)

    vars(refusing)["convert"] = given
    return refusing


def _of_lines(kind: click.ParamType[Any]) -> click.ParamType[Any]:
    """The same type, for which a variable has a value in each of its lines: a key, a path and a correction may have
    blanks, at which click would part them."""
    lined = copy.copy(kind)
    vars(lined)["split_envvar_value"] = lambda given: [line for line in re.split("\r?\n", given) if line.strip()]
    return lined


def _color_option() -> click.Option:
    return click.Option(
        ["--color"],
        type=click.Choice(output.COLOURS),
        metavar="WHEN",
        envvar="NOTES_COLOR",
        expose_value=False,
        callback=_coloured,
        help="auto (on a terminal, unless NO_COLOR and the like say otherwise), always, never.",
    )


def _quiet_option() -> click.Option:
    return click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_hushed,
        help="Nothing on stderr but errors.",
    )


def _coloured(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None and parameter.name:
        source = ctx.get_parameter_source(parameter.name)
        output.colour(value, setting=source is click.core.ParameterSource.DEFAULT_MAP)


def _hushed(_ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        output.hush()


MODEL = ("model", "ctx_size", "threads", "gpu_layers", "mmproj")
EXPERT = (
    *("batch_size", "ubatch_size", "rpc", "image_min_tokens", "image_max_tokens", "flash_attn"),
    *("cache_type_k", "cache_type_v", "rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
    *("beyond_trained", "carry"),
)
REST = "Options"


class Grouped(click.Command):
    """A command whose help has its options in groups. `groups`: parameters by heading, in their order; all others come
    first."""

    def __init__(self, *given: Any, groups: Mapping[str, Sequence[str]] | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.groups = {"Model": MODEL, "Expert": EXPERT} if groups is None else groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        records = {"help" if "--help" in one.opts else one.name: one.get_help_record(ctx) for one in options}
        listed = {name for names in self.groups.values() for name in names}
        for title, names in {REST: [name for name in records if name not in listed], **self.groups}.items():
            found = [record for name in names if (record := records.get(name))]
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)


SHORT = 40  # characters of a value in a message


class Once(click.Option):
    """An option of one value that refuses a second one. Click itself takes the last, as for settings it should."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        given = opts.get(str(self.name))
        if isinstance(given, list):
            if len(given) > 1 and not ctx.resilient_parsing:  # a shell that completes the line is told nothing
                flag = next(flag for flag in self.opts if flag.startswith("--"))
                first, second = (repr(str(value)[:SHORT]) for value in given[:2])
                raise click.UsageError(f"there are two values of {flag}, {first} and {second}. Leave one out", ctx)
            opts = {**opts, str(self.name): given[0]}
        return super().consume_value(ctx, opts)


MAX_BYTES = 64 << 20  # far more than any context holds: a pipe without an end is refused before it fills the memory


def standard_input() -> BinaryIO:
    """stdin for bytes. Raise UsageError where whoever started this process has closed it."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: pipe something in, or name a file")
    return sys.stdin.buffer


def piped_text() -> str:
    """The text on stdin, without blanks around it. Raise UsageError if that is none."""
    return _decoded(standard_input().read(MAX_BYTES + 1), "the piped text")


def text_in(file: Path) -> str:
    """The same of a file."""
    try:
        with file.open("rb") as opened:
            return _decoded(opened.read(MAX_BYTES + 1), str(file))
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {reason(error)}") from error


def _decoded(data: bytes, what: str) -> str:
    if len(data) > MAX_BYTES:
        raise click.UsageError(f"{what} is longer than {MAX_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{what} is not UTF-8 text (byte {error.start})") from error


def end_when_late() -> None:
    """From now on the first signal ends `notes` in a tenth of a second, whatever llama.cpp computes; not a process that
    only calls a command, as tests do."""
    from notes_cli.engine import interrupts

    if stops.working:
        interrupts.when_late(_end_late)


def _end_late(number: int) -> None:
    """As the main thread would, unless it is at it. This runs while that computes."""
    from notes_cli.engine import interrupts

    if not stops.claim(wait=False):
        return
    stops.received = stops.received or number
    output.clear()
    output.fail(stops.word(), stops.status())
    if stops.received == signal.SIGINT:
        os._exit(stops.INTERRUPTED)
    interrupts.end_by(stops.received)
