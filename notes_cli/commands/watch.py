"""`notes watch`: compile skills again whenever their files change."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import Number, SkillSource, library, model_options, open_model
from notes_cli.commands.remedies import print_callbacks, worded
from notes_cli.commands.terminal import GroupedCommand
from notes_cli.errors import NotesError, SkillError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notes_cli.api import Model
    from notes_cli.runtime.file_watch import FileStamp
    from notes_cli.runtime.recompile import Compiled
    from notes_cli.runtime.request import Callbacks
    from notes_cli.runtime.sources import Source, Sources
    from notes_cli.text.skill import Skill
    from notes_cli.text.tools import ToolSet


@click.command(cls=GroupedCommand)
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
    on stdout; a text that cannot be compiled is reported, and the watch goes on. A skill whose file is gone stays.

    \b
    Examples:
      notes watch
      notes watch skills/ notes.md
      notes watch --all --json
    """
    from notes_cli.runtime.file_watch import Files, Watched, file_stamp
    from notes_cli.runtime.sources import Sources

    watched, files = Watched(), Files()
    files.add(_files(sources, all_))
    if not files.paths:
        raise NotesError("there is nothing to watch", "Name a SOURCE: notes watch skills/")
    with open_model(quiet=quiet or json_, **model) as opened:

        def update(path: Path, stamp: FileStamp, *, first: bool = False) -> None:
            """Compile the skills that depend on a file, and mark it as handled, with the images in its text that no
            other skill depends on."""
            images = _images(opened, path)
            files.set_images(path, images)
            skills = files.skills(path)
            _compile(opened, Sources(library()), skills, path, json_, named=not (sources or all_), first=first)
            exclusive = {image: seen for image, seen in images.items() if set(files.skills(image)) <= set(skills)}
            for handled, seen in {**exclusive, path: stamp}.items():
                watched.mark_handled(handled, seen)

        for path in files.paths:
            update(path, file_stamp(path), first=True)
        if not quiet:
            count = len(files.paths)
            output.say(f"watching {count} {'file' if count == 1 else 'files'}; Ctrl-C ends it")
        while True:
            time.sleep(interval)
            with suppress(NotesError):  # a folder that is being replaced
                files.add(_files(sources, all_))
            for path, stamp in watched.changed(files.paths):
                if stamp is None:
                    _print_event(json_, event="gone", source=str(path))
                    watched.mark_handled(path, stamp)
                else:
                    update(path, stamp)


def _files(sources: tuple[str, ...], all_: bool) -> dict[Path, list[str]]:
    """Return the files to watch, each with the words for its skills (a file may have several names). Raises NotesError
    for a source that is not a file."""
    from notes_cli.runtime.sources import Sources
    from notes_cli.text.names import files_of
    from notes_cli.text.skill import skill_file, skill_sources

    words = Sources(library())
    files: dict[Path, list[str]] = {}
    for source in sources:
        for word in skill_sources(source):
            path = skill_file(word) if Path(word).exists() else _file(words.read(word).skill)
            files.setdefault(path.absolute(), []).append(word)
    if all_:
        for skill in words.agent_skills().values():
            if not skill.problem:
                files.setdefault(skill.path / "SKILL.md", []).append(str(skill.path))
    if not sources and not all_:
        for entry in words.library.entries():
            if entry.info is not None and len(files_of(entry.info.source)) == 1:
                files.setdefault(Path(entry.info.source), []).append(entry.name)
    return files


def _images(model: Model, path: Path) -> dict[Path, FileStamp]:
    """Return the images in a text and their stamps, if the model has vision."""
    from notes_cli.runtime.file_watch import file_stamp
    from notes_cli.text.skill import load_skill

    with suppress(NotesError):  # tools, or an unreadable text, which the compile reports
        links = load_skill(path).links if model.workspace.has_vision else ()
        images = [Path(link.path).absolute() for link in links if not link.why]
        return {image: file_stamp(image) for image in images}
    return {}


def _file(skill: Skill | ToolSet) -> Path:
    """Return the file of a skill in the library. Raises SkillError for several files."""
    from notes_cli.text.names import files_of

    files = files_of(skill.source)
    if len(files) > 1:
        raise SkillError(f"{skill.name} was compiled of {len(files)} files together", "Run: notes compile --stale")
    return Path(skill.source)


def _compile(
    model: Model, words: Sources, skills: Sequence[str], path: Path, json_: bool, *, named: bool, first: bool = False
) -> None:
    """Compile the skills that depend on a file, and print events. `named`: the words are names in the library, not
    files. `first`: print nothing for skills that are up to date."""
    done = set[str]()
    for word in skills:
        try:
            source = words.library_skill(word) if named else words.read(word)
            name = source.skill.name
            if name in done:  # two words for one skill
                continue
            done.add(name)
            compiled = _compile_as_before(model, words, source, print_callbacks(json_))
        except NotesError as error:
            _print_event(json_, event="failed", source=str(path), error=worded(error))
            continue
        if compiled.reasons or not first:
            event = "compiled" if compiled.reasons else "up_to_date"
            facts = {"name": name, "path": str(compiled.path), "reasons": list(compiled.reasons)}
            _print_event(json_, event=event, source=str(path), **facts)


def _compile_as_before(model: Model, words: Sources, source: Source, callbacks: Callbacks) -> Compiled:
    """Bring a skill up to date with the options of its segment."""
    from notes_cli.commands.compile import shape_of
    from notes_cli.runtime.compile import skill_of
    from notes_cli.runtime.sources import Shape

    previous = words.readable_skill(source.skill.name)
    shape = shape_of(model, words, previous or source, Shape(None, kv=None))
    return model.bring_up_to_date(
        skill_of(model.workspace, source.skill),
        influence=shape.influence,
        blocks=shape.blocks,
        kv=shape.kv,
        callbacks=callbacks,
    )


def _print_event(json_: bool, *, event: str, source: str, **facts: Any) -> None:
    """Print an event on a line of stdout."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if json_:
        defaults: dict[str, Any] = {"name": None, "path": None, "reasons": [], "error": None}
        output.json_line({"version": 1, "time": now, "event": event, "source": source, **defaults, **facts})
        return
    text = event.replace("_", " ")
    if "name" in facts:
        text += f" {facts['name']}" + (f" ({'; '.join(facts['reasons'])})" if facts["reasons"] else "")
    more = f": {facts['error']}" if "error" in facts else ""
    output.result(output.line(f"{now} {text}: {source}{more}"))
