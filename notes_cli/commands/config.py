"""`notes config show`: the settings of a command, and where each comes from."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from notes_cli import config, output
from notes_cli.commands.options import json_option
from notes_cli.commands.terminal import Group, defaults_of, flag_of


@click.group(cls=Group, options_metavar="", subcommand_metavar="COMMAND ...")
def command() -> None:
    """Show where settings come from: flags, variables, config.yaml.

    \b
    Examples:
      notes config show
    """


@command.command("show")
@click.argument("name", default="ask", metavar="[COMMAND]")
@json_option
def show_command(name: str, json_: bool) -> None:
    """Show the model and the settings that a command (ask) gets without options, and where each comes from. Others have
    their default: notes COMMAND --help.

    \b
    Examples:
      notes config show
      notes config show serve
    """
    rows = _settings(name)
    if json_:
        settings = [dict(zip(("setting", "value", "from"), row, strict=True)) for row in rows]
        output.as_json({"version": 1, "config": str(config.paths().config), "settings": settings})
        return
    text = [(setting, value if isinstance(value, str) else ", ".join(value), where) for setting, value, where in rows]
    output.table(("setting", "value", "from"), text)


def _settings(name: str) -> list[tuple[str, Any, str]]:
    """Return name, value and source of a command's settings. Values are texts, or lists of texts."""
    from notes_cli.runtime.naming import default_model, model_argument

    command, names = _command(name)
    defaults = defaults_of(command, name, config.load_config(), names)
    rows: list[tuple[str, Any, str]] = []
    inner = command.make_context(name, [], default_map=defaults, resilient_parsing=True)
    for option in command.params:
        source = inner.get_parameter_source(str(option.name))
        value = inner.params.get(str(option.name))
        if option.name == "model" and value is None:
            rows.append(("model", model_argument(default_model()), "default"))
        elif source in (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP) and value != ():
            where = str(option.envvar if source is ParameterSource.ENVIRONMENT else config.paths().config)
            rows.append((flag_of(option).lstrip("-"), _as_text(value), where))
    return rows


def _command(name: str) -> tuple[click.Command, list[str]]:
    """Return a command of `notes` with settings, and the names of all commands. Raises UsageError."""
    context = click.get_current_context().find_root()
    assert isinstance(context.command, click.Group)
    names, command = context.command.list_commands(context), context.command.get_command(context, name)
    if command is None or isinstance(command, click.Group):
        raise click.UsageError(f"{name!r} is no command with settings. There are {', '.join(names)}")
    return command, names


def _as_text(value: Any) -> str | list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else str(value)
