"""The command `notes`: its subcommands, loaded when named, its settings, and the one place where errors are printed.

Settings come from flags, then NOTES_* variables, then config.yaml, then defaults.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from typing import Any, NoReturn

import click

from notes_cli import __version__
from notes_cli.errors import NotesError

# name -> (module, one line for the list); the module is imported only when the command runs or is asked for help.
COMMANDS = {
    "compile": "Prefill a skill once and keep its K/V on disk.",
    "ask": "Ask a question, with skills spliced in and errata appended.",
    "session": "List, show, fork, shorten, move, take back and remove sessions.",
    "edit": "Give a field of a session another value.",
    "verify": "Compare splice and errata with a full recompute on this model.",
    "calibrate": "Measure which edit method to trust on this model.",
    "probe": "Show on which tokens of a skill a decision rests.",
    "ls": "List compiled skills.",
    "inspect": "Show what is in a compiled skill.",
    "rm": "Remove compiled skills.",
    "doctor": "Show versions, devices, CPU features and where files are.",
}


class Commands(click.Group):
    """Subcommands by name, each in its own module of notes_cli.commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"notes_cli.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"there is no command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"notes {__version__}")
        ctx.exit()


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, callback=_version, expose_value=False, is_eager=True, help="Show the version.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Compile a skill once, splice it into any prompt, correct it with one line.

    \b
    Examples:
      notes compile skills/returns                     prefill a skill once
      notes ask "May I return this?" --splice returns
      notes ask "May I return this?" --splice returns --erratum "date=2026-07-01"
      notes verify returns --erratum "date=2026-07-01"
    """
    from notes_cli.config import load_config

    name = ctx.invoked_subcommand
    command = cli.get_command(ctx, name) if name else None
    if name and command:
        ctx.default_map = {name: _defaults(command, load_config(), name)}


def _defaults(command: click.Command, config: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of config.yaml for one command, by parameter. A setting is called as its flag is: `ctx-size: 8192`;
    what stands under the name of the command goes before what stands for all."""
    if isinstance(command, click.Group):
        return {sub: _defaults(part, config, name) for sub, part in command.commands.items()}
    own = config.get(name)
    settings = {**config, **(own if isinstance(own, dict) else {})}
    settings = {str(key).replace("-", "_"): value for key, value in settings.items()}
    found = {}
    for parameter in command.params:
        for flag in parameter.opts:
            key = flag.lstrip("-").replace("-", "_")
            if key in settings and parameter.name and isinstance(parameter, click.Option):
                found[parameter.name] = _setting(parameter, key, settings[key])
    return found


def _setting(option: click.Option, key: str, value: Any) -> Any:
    """A setting as the command line would have it: a list for a repeatable option, else one value."""
    many = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in many):
        raise NotesError(f"{key} in config.yaml must be {'a list of values' if option.multiple else 'one value'}")
    if not all(many):
        raise NotesError(f"{key} in config.yaml has no value. Give it one, or remove the line")
    try:
        for one in many:
            option.type.convert(one, None, None)
    except click.BadParameter as error:
        raise NotesError(f"{key} in config.yaml: {error.message}") from error
    return many if option.multiple else value


def main() -> NoReturn:
    """Run `notes` and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `notes ls | head -1` ends quietly
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name or a text that this terminal cannot show ends nothing
            stream.reconfigure(errors="surrogateescape" if stream.encoding == "utf-8" else "replace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run with these arguments; return the exit status."""
    try:
        outcome: Any = cli.main(arguments, prog_name="notes", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "notes"
        message = " ".join(error.format_message().split())
        click.echo(f"notes: {message}{'' if message.endswith(('.', '?', ')')) else '.'} See: {path} --help", err=True)
        return 2
    except click.ClickException as error:
        click.echo(f"notes: {error.format_message()}", err=True)
        return error.exit_code
    except NotesError as error:
        if os.environ.get("NOTES_DEBUG"):
            raise
        click.echo(f"notes: {error}", err=True)
        return 1
    except (KeyboardInterrupt, click.Abort):
        click.echo("notes: interrupted", err=True)
        return 130
    except MemoryError:
        click.echo("notes: out of memory. Use a smaller context (-c) or model", err=True)
        return 1
    except UnicodeEncodeError as error:
        if os.environ.get("NOTES_DEBUG"):
            raise
        click.echo(f"notes: {error.object[:40]!r} is not UTF-8 text. Convert it first", err=True)
        return 2
    except OSError as error:
        if os.environ.get("NOTES_DEBUG"):
            raise
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"notes: {where}{error.strerror or error}", err=True)
        return 1
    return outcome if isinstance(outcome, int) else 0
