"""`notes watch`: compile skills again whenever their files change."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.listening import listening
from notes_cli.commands.options import Number, SkillSource, library, model_options, open_model
from notes_cli.commands.remedies import worded
from notes_cli.errors import NotesError, SkillError

if TYPE_CHECKING:
    from notes_cli.api import Model
    from notes_cli.runtime.wanted import Words
    from notes_cli.runtime.watching import Look
    from notes_cli.text.skill import Skill
    from notes_cli.text.toolset import ToolSet

Files = dict[Path, dict[str, None]]  # the words of the skills that each is of, in order


@click.command()
@click.argument("sources", type=SkillSource(), nargs=-1, metavar="[SOURCE...]")
@click.option("--all", "all_", is_flag=True, help="Also every Agent Skill of the project and of the user.")
@click.option(
    "--interval",
    type=Number(0.05, 3600, kind=float),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks at the files.",
)
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
@click.option("--json", "json_", is_flag=True, help="Each event as a line of JSON (docs/json.md).")
@model_options
def command(sources: tuple[str, ...], all_: bool, interval: float, quiet: bool, json_: bool, **model: Any) -> None:
    """Compile skills again whenever their files change, until Ctrl-C.

    Without SOURCE these are the skills of the library that came from files. A SOURCE is what `notes compile` takes; of
    a folder of skills, those that are added later, too. What is out of date is compiled at once. Each event is a line
    on stdout; a text that cannot be compiled is told, and the watch goes on. A skill whose file is gone stays compiled.

    \b
    Examples:
      notes watch
      notes watch skills/ notes.md
      notes watch --all --json
    """
    from notes_cli.runtime.wanted import Words
    from notes_cli.runtime.watching import Watched, look_at

    watched = Watched()
    files = _files(sources, all_)
    if not files:
        raise NotesError("there is nothing to watch", "Name a SOURCE: notes watch skills/")
    with open_model(quiet=quiet or json_, **model) as opened:

        def brought(path: Path, look: Look, *, first: bool = False) -> None:
            """A file, and with it the images that its text shows, is up to date as it was at this look."""
            shown = _images(opened, path)
            _add(files, dict.fromkeys(shown, files[path]))
            for word in list(files[path]):
                _compile(opened, Words(library()), word, path, json_, first=first)
            for one, seen in {**shown, path: look}.items():
                watched.handled(one, seen)

        for path in list(files):
            brought(path, look_at(path), first=True)
        if not quiet:
            output.say(f"watching {len(files)} {'file' if len(files) == 1 else 'files'}; Ctrl-C ends it")
        while True:
            time.sleep(interval)
            with suppress(NotesError):  # a folder that is being replaced
                _add(files, _files(sources, all_))
            for path, look in watched.changed(files):
                if look is None:
                    _tell(json_, event="gone", source=str(path))
                    watched.handled(path, look)
                else:
                    brought(path, look)


def _add(files: Files, more: Files) -> None:
    for path, words in more.items():
        files[path] = files.get(path, {}) | words


def _files(sources: tuple[str, ...], all_: bool) -> Files:
    """The files to watch, each with the words that mean its skills. Raise NotesError for what is no file."""
    from notes_cli.runtime.wanted import Words
    from notes_cli.text.names import files_of
    from notes_cli.text.skill import skill_file, skill_sources

    words = Words(library())
    found: Files = {}
    for source in sources:
        for word in skill_sources(source):
            path = skill_file(word) if Path(word).exists() else _file(words.read(word).skill)
            _add(found, {path.absolute(): {word: None}})
    if all_:
        _add(found, {one.path / "SKILL.md": {str(one.path): None} for one in words.found().values() if not one.problem})
    if not sources and not all_:
        for entry in words.library.entries():
            if entry.info is not None and len(files_of(entry.info.source)) == 1:
                _add(found, {Path(entry.info.source): {entry.name: None}})
    return found


def _images(model: Model, path: Path) -> dict[Path, Look]:
    """The images that the text in a file shows, if the model sees, as they are now."""
    from notes_cli.runtime.watching import look_at
    from notes_cli.text.skill import load_skill

    with suppress(NotesError):  # tools, or a text that cannot be read, of which others tell
        links = load_skill(path).links if model.workspace.sees else ()
        found = [Path(link.path).absolute() for link in links if not link.why]
        return {image: look_at(image) for image in found}
    return {}


def _file(skill: Skill | ToolSet) -> Path:
    """The one file of a skill of the library. Raise SkillError for one that was joined of several."""
    from notes_cli.text.names import files_of

    files = files_of(skill.source)
    if len(files) > 1:
        raise SkillError(f"{skill.name} was compiled of {len(files)} files together", "Run: notes compile --stale")
    return Path(skill.source)


def _compile(model: Model, words: Words, word: str, path: Path, json_: bool, *, first: bool = False) -> None:
    """Bring the skill of a file up to date, and tell what was done. `first`: not that there was nothing to do."""
    from notes_cli.commands.compile import shape_of
    from notes_cli.runtime.compiling import skill_of
    from notes_cli.runtime.wanted import Shape

    try:
        wanted = words.read(word)
        kept = words.known(wanted.skill.name)
        shape = shape_of(model, words, kept or wanted, Shape(None, kv=None))
        compiled = model.bring_up_to_date(
            skill_of(model.workspace, wanted.skill),
            influence=shape.influence,
            blocks=shape.blocks,
            kv=shape.kv,
            listener=listening(json_),
        )
    except NotesError as error:
        _tell(json_, event="failed", source=str(path), error=worded(error))
        return
    if compiled.reasons or not first:
        event = "compiled" if compiled.reasons else "up_to_date"
        facts = {"name": wanted.skill.name, "path": str(compiled.path), "reasons": list(compiled.reasons)}
        _tell(json_, event=event, source=str(path), **facts)


def _tell(json_: bool, *, event: str, source: str, **facts: Any) -> None:
    """A line on stdout, at once."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if json_:
        none: dict[str, Any] = {"name": None, "path": None, "reasons": [], "error": None}
        output.json_line({"version": 1, "time": now, "event": event, "source": source, **none, **facts})
        return
    what = event.replace("_", " ")
    if "name" in facts:
        what += f" {facts['name']}" + (f" ({'; '.join(facts['reasons'])})" if facts["reasons"] else "")
    more = f": {facts['error']}" if "error" in facts else ""
    output.result(output.line(f"{now} {what}: {source}{more}"))
