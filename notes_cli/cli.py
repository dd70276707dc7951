"""The command `notes`: loads subcommands on demand, applies settings, prints errors and sets the exit status.

Precedence of settings: flags, NOTES_* variables, config.yaml, defaults.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, NoReturn

import click

from notes_cli import __version__, output, signals
from notes_cli.commands.terminal import COMMON, add_common_options, common_options, defaults_of, keys_of, variable_of
from notes_cli.errors import NotesError, OutputError, UnreadError

FAILED, USAGE, UNREAD = 1, 2, 141
SECTIONS = ("models", "defaults", "cache")  # of config.yaml, that are not settings of commands

# name -> line in the list of commands; the module is imported only when the command runs or shows its help
COMMANDS = {
    "compile": "Prefill a skill once and keep its K/V on disk.",
    "ask": "Ask a question, with skills spliced in and errata appended.",
    "chat": "Talk with a model: a session, with skills and corrections.",
    "serve": "Answer over HTTP: OpenAI's and Anthropic's endpoints, with skills.",
    "session": "List, show, fork, undo, compact, forget, export, import and remove sessions.",
    "edit": "Give a field of a session another value.",
    "verify": "Compare splice and errata with a full recompute on this model.",
    "bench": "Measure how fast a splice is here, beside a prefill.",
    "ls": "List compiled skills, and which of them are out of date.",
    "inspect": "Show the contents of a compiled skill.",
    "rm": "Remove compiled skills, by name, or by age, size and state.",
    "export": "Write compiled skills into a file or a folder for others.",
    "import": "Take compiled skills that others exported into the library.",
    "models": "List the models on this machine that have a name.",
    "pull": "Download a model from Hugging Face.",
    "init": "Copy the sample skills and a commented config.yaml to begin with.",
    "config": "Show where settings come from.",
    "completion": "Let a shell complete commands, skills, models and fields.",
    "doctor": "Show versions, devices, where files are, and what is wrong.",
}

# Commands that share a module, where they are called `NAME_command`; others are `command` in a module of their name.
MODULES = {
    **dict.fromkeys(("rm", "export", "import"), "maintain"),
    **dict.fromkeys(("ls", "inspect"), "ls"),
    **dict.fromkeys(("models", "pull"), "models"),
    **dict.fromkeys(("init", "completion", "doctor"), "setup"),
    **dict.fromkeys(("session", "edit"), "session"),
}

# Names of these commands in other programs.
SYNONYMS = {
    **dict.fromkeys(("run", "query", "prompt", "generate"), "ask"),
    **dict.fromkeys(("list", "skills"), "ls"),
    **dict.fromkeys(("remove", "delete", "del", "uninstall", "gc", "clean", "prune"), "rm"),
    **dict.fromkeys(("install", "download", "fetch"), "pull"),
    **dict.fromkeys(("show", "info", "cat"), "inspect"),
    "settings": "config",
    **dict.fromkeys(("new", "start", "samples"), "init"),
    **dict.fromkeys(("add", "build", "prefill"), "compile"),
    **dict.fromkeys(("server", "api"), "serve"),
    **dict.fromkeys(
        ("version", "env", "status", "check", "repair", "fsck", "cache", "where", "dir", "paths"), "doctor"
    ),
    **dict.fromkeys(("sessions", "history"), "session"),
    **dict.fromkeys(("benchmark", "speed"), "bench"),
}


class Commands(click.Group):
    """Subcommands by name, each in its own module of notes_cli.commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return command_named(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = SYNONYMS.get(args[0]) or next(iter(difflib.get_close_matches(args[0], COMMANDS, n=1)), None)
            hint = f" Did you mean {near}?" if near else f" Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"there is no command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        with formatter.section("Options of all commands"):
            formatter.write_dl([record for item in COMMON if (record := item.get_help_record(ctx))])


def command_named(name: str) -> click.Command:
    module = importlib.import_module(f"notes_cli.commands.{MODULES.get(name, name)}")
    command: click.Command = getattr(module, f"{name}_command" if name in MODULES else "command")
    return add_common_options(command, name)


def _version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    native = ""
    with suppress(NotesError, OSError):  # `notes doctor` explains it
        from notes_cli.engine import devices

        versions = devices.versions()
        native = f" (llama.cpp of llama-cpp-python {versions['built from']}, native interface {versions['interface']})"
    output.result(f"notes {__version__}{native}")
    ctx.exit()


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--version", is_flag=True, callback=_version, expose_value=False, is_eager=True, help="Show the version.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Compile a skill once, splice it into any prompt, correct it with one line.

    \b
    Examples:
      notes init                            # sample skills in skills/
      notes compile store-handbook          # prefill a skill once
      notes ask "Which carrier delivers?" --splice store-handbook
      notes ask "Which carrier delivers?" --splice store-handbook \\
        --erratum "Carrier=Kestrel Freight"
    """
    from notes_cli.config import aliases, load_config

    name, arguments = ctx.invoked_subcommand, ctx.obj or []
    command = cli.get_command(ctx, name) if name else None
    if not name or not command or {"-h", "--help", "--help-all"} & set(arguments):  # help works with broken settings
        return
    subcommand = ""
    if isinstance(command, click.Group):
        subcommand = next((word for word in arguments if word in command.commands), "")
        command = command.commands.get(subcommand, command)
    defaults: dict[str, Any] = {}
    if settings := load_config():
        aliases(settings)
        if "cache" in settings:
            from notes_cli.runtime.naming import max_size

            max_size(settings)
        for section in SECTIONS:
            settings.pop(section, None)
        _check_settings(settings, name)
        defaults = defaults_of(command, name, settings, COMMANDS)
    ctx.default_map = {name: {subcommand: defaults} if subcommand else defaults}
    output.run.json = output.run.json or bool(defaults.get("json_"))


cli.params += common_options(cli)


def _check_settings(settings: dict[str, Any], running: str) -> None:
    """Raise NotesError for a setting that no command has, as a typo must not mean the default. Other commands than the
    running one are imported only for keys that it does not have."""
    for key, value in settings.items():
        if key in COMMANDS and (isinstance(value, dict) or not _is_known(key, running)):
            if not isinstance(value, dict):
                raise NotesError(f"{key} in config.yaml must hold settings of notes {key}, a line each")
            for subkey in value:
                if not _is_known(subkey, key, others=()):
                    raise _unknown_setting(subkey, keys_of(command_named(key)), f" for notes {key}")
        elif key not in COMMANDS and not _is_known(key, running):
            known = {subkey for name in COMMANDS for subkey in keys_of(command_named(name))}
            raise _unknown_setting(key, known | COMMANDS.keys(), "")


def _is_known(key: object, running: str, others: Iterable[str] = COMMANDS) -> bool:
    return any(str(key).replace("_", "-") in keys_of(command_named(name)) for name in (running, *others))


def _unknown_setting(key: object, known: Collection[str], where: str) -> NotesError:
    import difflib

    near = difflib.get_close_matches(str(key).replace("_", "-"), known, n=1)
    hint = f"Did you mean {near[0]}?" if near else "Settings are named like the flags, without --"
    return NotesError(f"there is no setting {key!r}{where} in config.yaml", hint)


def main() -> NoReturn:
    """Run `notes` and exit: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C; SIGTERM and SIGHUP by the signal."""
    signals.install()
    output.open_streams()
    try:
        signals.begin()
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        signals.end()
    signals.ignore()
    if signals.received:
        signals.end(say=False)
    if status == UNREAD:
        signals.end_unread()
    _exit(status)


def _exit(status: int) -> NoReturn:
    """End the process without Python's slow shutdown; everything is written and closed."""
    if sum(not thread.daemon for thread in threading.enumerate()) > 1:  # wait for threads that still compute
        sys.exit(status)
    atexit._run_exitfuncs()
    with suppress(OutputError):  # an error was printed already
        output.flush()
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Run a command line, print its errors, and return the exit status."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    output.begin(json="--json" in options)
    try:
        outcome = _invoke(arguments)
        output.flush()  # its errors set the status
        status = outcome if isinstance(outcome, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except Exception as error:
        if not signals.received and os.environ.get("NOTES_DEBUG") and not isinstance(error, click.ClickException):
            raise
        status = _interrupted() if signals.received else _failed(error, arguments)
    else:
        if signals.received:  # KeyboardInterrupt could not be raised
            status = _interrupted()
    return status


def _invoke(arguments: list[str]) -> Any:
    """Run the command and return its result. `click.Command.main` would print an empty line on an interrupt."""
    if "_NOTES_COMPLETE" in os.environ:  # a shell completes a command line
        from click.shell_completion import add_completion_class

        from notes_cli.commands.setup import BashLine

        add_completion_class(BashLine, "bash")
        return cli.main(arguments, prog_name="notes", standalone_mode=False)
    try:
        with cli.make_context("notes", list(arguments), obj=arguments) as context:
            return cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code


def _interrupted() -> int:
    signals.claim()
    if signals.received:
        signals.ignore()
    return output.fail(signals.describe(), signals.status())


def _command_path(arguments: list[str]) -> str:
    """Return the command and subcommand in these arguments; click's error for a missing value has no context."""
    words: list[str] = ["notes"]
    command: click.Command = cli
    for word in arguments:
        subcommand = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        if subcommand is None:
            break
        words, command = [*words, word], subcommand
    return " ".join(words)


def _failed(error: Exception, arguments: list[str]) -> int:
    """Print an error in one line (what, which value, what to do) and return the exit status."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        output.log(error.format_message() + "\n")
        return USAGE
    if isinstance(error, click.UsageError):
        if isinstance(error, click.BadParameter) and error.ctx and (variable := variable_of(error.ctx, error.param)):
            error.param_hint = variable
        path = error.ctx.command_path if error.ctx else _command_path(arguments)
        message = " ".join(error.format_message().split())
        return output.fail(f"{message}{'' if message.endswith(('.', '?', '?)')) else '.'} See: {path} --help", USAGE)
    if isinstance(error, click.ClickException):
        return output.fail(error.format_message(), error.exit_code)
    if isinstance(error, UnreadError):
        return UNREAD
    if isinstance(error, NotesError):
        from notes_cli.commands.remedies import is_usage, worded

        return output.fail(worded(error), USAGE if is_usage(error) else FAILED)
    if isinstance(error, MemoryError):
        return output.fail("out of memory. Use a smaller context (-c) or model", FAILED)
    if isinstance(error, UnicodeEncodeError):
        return output.fail(f"{error.object[:40]!r} is not UTF-8 text. Convert it first", USAGE)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return output.fail(f"{where}{error.strerror or error}", FAILED)
    raise error
