"""The command `notes`: its subcommands, loaded when named, its settings, and the one place where errors are printed.

Settings come from flags, then NOTES_* variables, then config.yaml, then defaults.
"""

from __future__ import annotations

import importlib
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
    "verify": "Compare splice and errata with a full recompute on this model.",
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

    settings = {str(key).replace("-", "_"): value for key, value in load_config().items()}
    ctx.default_map = dict.fromkeys(COMMANDS, settings)


def main() -> NoReturn:
    """Run `notes` and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `notes ls | head -1` ends quietly
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run with these arguments; return the exit status."""
    try:
        outcome: Any = cli.main(arguments, prog_name="notes", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except NotesError as error:
        if os.environ.get("NOTES_DEBUG"):
            raise
        click.echo(f"notes: {error}", err=True)
        return 1
    except (KeyboardInterrupt, click.Abort):
        click.echo("\nnotes: interrupted", err=True)
        return 130
    except MemoryError:
        click.echo("notes: out of memory. Use a smaller context (-c) or model", err=True)
        return 1
    return outcome if isinstance(outcome, int) else 0
