"""What every command has: --color, --quiet where it has no -q of its own, variables for options, no empty values."""

from __future__ import annotations

import copy
import re
from typing import Any

import click

from notes_cli import output

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
        command.params += [_color()] if "--quiet" in known else [_quiet(), _color()]
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


def _color() -> click.Option:
    return click.Option(
        ["--color"],
        type=click.Choice(output.COLOURS),
        metavar="WHEN",
        envvar="NOTES_COLOR",
        expose_value=False,
        callback=_coloured,
        help="auto (on a terminal, unless NO_COLOR and the like say otherwise), always, never.",
    )


def _quiet() -> click.Option:
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
