"""`notes export`: compiled skills into a file or a folder that others read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from notes_cli import output
from notes_cli.commands.options import SkillName, Target, library

if TYPE_CHECKING:
    from notes_cli.library.store import Library


@click.command()
@click.argument("names", type=SkillName(), nargs=-1, metavar="NAME...")
@click.argument("target", type=Target(), metavar="FILE|FOLDER")
@click.option("-f", "--force", is_flag=True, help="Write over other files that are there.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(names: tuple[str, ...], target: str, force: bool, json_: bool) -> None:
    """Write compiled skills where others can import them: one into a FILE, any number into a FOLDER (one that is there,
    or ends with /), for all models they were compiled for. Every byte is checked on the way.

    Who has the file has the text. A FILE is for you alone; what is in a FOLDER can be read by whoever can read that.
    Where the text came from is not told. Segments are not signed: `notes import` recomputes some of their rows.

    \b
    Examples:
      notes export returns returns.gguf
      notes export returns support /srv/share/skills/
    """
    from notes_cli.errors import SegmentError
    from notes_cli.library.store import export

    if not names:
        raise click.UsageError(f"name the FILE or FOLDER that {target} is to be written to")
    store = library()
    files = list(dict.fromkeys(path for name in names for path in _files(store, name)))
    folder = Path(target).expanduser()
    into = folder.is_dir() or target.endswith("/")
    if not into and len(files) > 1:
        which = ", ".join(map(str, files))
        raise SegmentError(f"these are {len(files)} files: {which}. Name one of them, or a folder: {target}/")
    if not into and not folder.absolute().parent.is_dir():
        raise SegmentError(f"there is no folder {folder.parent}")
    done = []
    for path in files:
        place = folder / path.name if into else folder
        written = export(path, place, force=force, shared=into)
        done.append({"path": str(place), "written": written, "bytes": place.stat().st_size})
        if not json_:
            output.data(str(place))
            if not written:
                output.say(f"{place} is there already")
    if json_:
        output.as_json({"version": 1, "exported": done})


def _files(store: Library, name: str) -> list[Path]:
    """The files of a name, or the one that it is."""
    from notes_cli.errors import Help, SegmentError

    target = store.resolve(name)
    if target.kind == "text":
        raise SegmentError(f"{name} is a text, not a compiled skill", Help.LIST_SKILLS())
    return [target.path] if target.path else [entry.path for entry in store.entries(target.name)]
