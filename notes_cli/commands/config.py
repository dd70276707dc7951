"""`notes config`: show where settings come from, and allow the file of a project: `.notes/config.yaml`.

The nearest one counts, as with git and direnv; files further up are not merged. The search ends at the root of a git
repository (which is searched), and before the home folder and the root of the file system (which are not). A file is
allowed with its digest, so that a changed one must be allowed again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from notes_cli import config, output
from notes_cli.commands.terminal import defaults_of, settings_for
from notes_cli.errors import NotesError
from notes_cli.library.safe_files import check_private, replacing
from notes_cli.text.names import is_name

FILE = Path(".notes", "config.yaml")
ANSWERING = ("ask", "chat", "serve")
# setting -> commands that use it; None: all that have such an option
SETTINGS: Mapping[str, tuple[str, ...] | None] = {
    "model": None,
    "ctx-size": None,
    "splice": ANSWERING,
    "errata": ANSWERING,
    "system": ("ask", "chat"),
    "max-tokens": ("ask", "chat"),
    "temp": ("ask", "chat"),
}
FLAGS = {"errata": "erratum"}  # settings whose flag has another name
OPTIONS = {FLAGS.get(key, key) for key in SETTINGS}


@dataclass(frozen=True, slots=True)
class Project:
    path: Path  # absolute
    data: bytes

    @property
    def folder(self) -> Path:
        return self.path.parent.parent

    @property
    def allowed(self) -> bool:
        """True if the user has allowed the file with these contents. Raises NotesError if another user may have."""
        record = _record(self.path)
        if not record.exists():
            return False
        check_private(record.parent)
        return record.read_bytes() == self._line

    @property
    def refusal(self) -> str:
        why = "has changed since you allowed it" if _record(self.path).exists() else "is not allowed"
        return f"{self.path} {why}, so it is ignored. Read it, then: notes config allow"

    @property
    def _line(self) -> bytes:
        """Digest and path, as in the files of sha256sum."""
        return hashlib.sha256(self.data).hexdigest().encode() + b"  " + os.fsencode(self.path) + b"\n"

    def allow(self) -> None:
        """Record that the user allows the file. Raises NotesError for an invalid one, OSError."""
        from notes_cli.documents import read_bytes

        read_bytes(self.path)  # raises for an unreadable one
        self.settings()
        with replacing(_record(self.path)) as temporary:
            temporary.write_bytes(self._line)

    def settings(self) -> dict[str, Any]:
        """Return the settings by name; files are absolute paths. Raises NotesError for an unknown setting and an
        invalid value."""
        from notes_cli.documents import yaml_in  # importing PyYAML takes 14 ms
        from notes_cli.text.erratum import of_fields

        found = yaml_in(self.data, self.path) or {}
        if not isinstance(found, dict):
            raise NotesError(f"{self.path} must hold `setting: value` lines", config.MEND)
        settings = config.by_flag(found, self.path)
        if unknown := sorted(settings.keys() - SETTINGS):
            raise NotesError(f"a project cannot set {unknown[0]!r} ({self.path})", f"It can: {', '.join(SETTINGS)}")
        if isinstance(errata := settings.get("errata"), dict):
            self._texts("errata", [*errata.values()])
            settings["errata"] = list(map(str, of_fields(errata)))
        for key in settings.keys() & {"splice", "errata"}:
            settings[key] = self._texts(key, settings[key])
        if "splice" in settings:
            settings["splice"] = [self._skill(word) for word in settings["splice"]]
        if isinstance(model := settings.get("model"), str) and model:
            path = self.folder / os.path.expanduser(model)
            settings["model"] = str(path) if path.is_file() else model
        return settings

    def flags(self, command: str) -> dict[str, Any]:
        """Return the settings for a command, by flag without dashes."""
        used = {key: value for key, value in self.settings().items() if command in (SETTINGS[key] or (command,))}
        return {FLAGS.get(key, key): value for key, value in used.items()}

    def _texts(self, key: str, value: Any) -> list[str]:
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) and text for text in texts):
            raise NotesError(f"{key} in {self.path} must be a list of values, none of them empty", "Write [ONE, TWO]")
        if any("\0" in text for text in texts):
            raise NotesError(f"{key} in {self.path} has a zero character", config.MEND)
        return texts

    def _skill(self, word: str) -> str:
        """Return the absolute path of a file of the project; else the name of a compiled skill, as it is."""
        path = self.folder / word
        if not os.path.lexists(path) and is_name(word):
            return word
        if not path.resolve().is_relative_to(self.folder):
            raise NotesError(f"splice in {self.path}: {word} is outside of {self.folder}", "Compile it, and name it")
        return str(path)


def find_project(start: Path) -> Project | None:
    """Return the project file of a folder, or of the nearest one above it; None without one. A file that cannot be read
    is one without contents: nothing of it can be allowed."""
    try:
        here, home = start.resolve(), Path(os.path.expanduser("~")).resolve()
    except OSError:  # the working folder was removed
        return None
    for folder in (here, *here.parents):
        if folder in (home, folder.parent):
            return None
        path = folder / FILE
        if os.path.isfile(path) and path != config.paths().config.resolve():  # NOTES_HOME may be a .notes
            from notes_cli.documents import read_bytes

            try:
                return Project(path, read_bytes(path))
            except NotesError:
                return Project(path, b"")
        if os.path.exists(folder / ".git"):
            return None
    return None


def current_project() -> Project | None:
    """Return the project file of the working folder; None with NOTES_NO_PROJECT=1."""
    if os.environ.get("NOTES_NO_PROJECT"):
        return None
    try:
        return find_project(Path.cwd())
    except OSError:
        return None


def project_model() -> str | None:
    """Return the model of the working folder's project file, if that is allowed. Raises NotesError."""
    found = current_project()
    return found.settings().get("model") if found and found.allowed else None


def _record(path: Path) -> Path:
    """Return the file that records the digest of an allowed project file."""
    return config.paths().allowed / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]


folder_argument = click.argument(
    "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default=".", metavar="[FOLDER]"
)


@click.group(options_metavar="", subcommand_metavar="COMMAND ...")
def command() -> None:
    """Show where settings come from, and allow those of a project.

    A project has its settings in .notes/config.yaml, in its folder: model, ctx-size, splice, errata, system, max-tokens
    and temp (docs/your-model.md). The nearest such file counts, up to the root of the git repository. It is ignored
    until you allow it, and after each change of it. NOTES_NO_PROJECT=1 ignores it, too.

    \b
    Examples:
      notes config show
      notes config allow
    """


@command.command("show")
@click.argument("name", default="ask", metavar="[COMMAND]")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def show_command(name: str, json_: bool) -> None:
    """Show the model and the settings that a command (ask) gets here without options, and where each comes from.
    Others have their default: notes COMMAND --help.

    \b
    Examples:
      notes config show
      notes config show serve
    """
    found = current_project()
    rows = _settings(name, found)
    if json_:
        names = ("setting", "value", "from")
        file = {"project": found and str(found.path), "allowed": found and found.allowed}
        settings = [dict(zip(names, row, strict=True)) for row in rows]
        output.as_json({"version": 1, "config": str(config.paths().config), **file, "settings": settings})
        return
    text = [(setting, value if isinstance(value, str) else ", ".join(value), where) for setting, value, where in rows]
    output.table(("setting", "value", "from"), text)
    if found and not found.allowed:
        output.say(found.refusal)


def _settings(name: str, found: Project | None) -> list[tuple[str, Any, str]]:
    """Return name, value and source of a command's settings. Values are texts, or lists of texts."""
    from notes_cli.runtime.naming import default_model, model_argument

    command, names = _command(name)
    settings, paths = config.load_config(), config.paths()
    ours = defaults_of(command, settings_for(name, settings, names), "config.yaml")
    theirs = defaults_of(command, found.flags(name), str(found.path)) if found and found.allowed else {}
    rows: list[tuple[str, Any, str]] = []
    inner = command.make_context(name, [], default_map={**ours, **theirs}, resilient_parsing=True)
    for option in command.params:
        source = inner.get_parameter_source(str(option.name))
        value = inner.params.get(str(option.name))
        if option.name == "model" and value is None:
            rows.append(("model", model_argument(default_model()), "default"))
        elif source in (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP) and value != ():
            where = str(found.path) if found and option.name in theirs else str(paths.config)
            where = str(option.envvar) if source is ParameterSource.ENVIRONMENT else where
            flag = next((flag for flag in option.opts if flag.startswith("--")), option.opts[0])
            rows.append((flag.lstrip("-"), _as_text(value), where))
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


@command.command("allow")
@folder_argument
def allow_command(folder: Path) -> None:
    """Allow the .notes/config.yaml of FOLDER, or of the nearest folder above it, as it is now: notes reads it from then
    on, until it changes. Its path is printed.

    \b
    Examples:
      notes config allow
      notes config allow ~/work/shop
    """
    found = find_project(folder)
    if found is None:
        raise NotesError(f"there is no {FILE} in {folder.resolve()}, nor above it", "Write one")
    ask, _ = _command("ask")  # has all settings
    defaults_of(ask, found.flags("ask"), str(found.path))  # raises for an invalid value
    found.allow()
    output.data(str(found.path))
    output.say(f"allowed: {', '.join(found.settings()) or 'nothing, as it has no settings'}")


@command.command("disallow")
@folder_argument
def disallow_command(folder: Path) -> None:
    """Ignore the .notes/config.yaml of FOLDER, or of the nearest folder above it, from now on. Its path is printed.

    \b
    Examples:
      notes config disallow
    """
    found = find_project(folder)
    path = found.path if found else Path(os.path.realpath(folder)) / FILE
    record = _record(path)
    if not record.exists():
        raise NotesError(f"{path} is not allowed")
    record.unlink()
    output.data(str(path))
