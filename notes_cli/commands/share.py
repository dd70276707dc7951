"""`notes export` and `notes import`: exchange compiled skills; imported K/V is computed again and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import SkillName, Target, library, model_options, open_model
from notes_cli.commands.remedies import print_callbacks, worded
from notes_cli.errors import Help, NotesError, SegmentError

if TYPE_CHECKING:
    from notes_cli.engine.segment import Identity
    from notes_cli.library.store import Library
    from notes_cli.runtime.importing import Imported


@click.command()
@click.argument("names", type=SkillName(), nargs=-1, metavar="NAME...")
@click.argument("target", type=Target(), metavar="FILE|FOLDER")
@click.option("-f", "--force", is_flag=True, help="Write over other files that are there.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def export_command(names: tuple[str, ...], target: str, force: bool, json_: bool) -> None:
    """Write compiled skills where others can import them: one into a FILE, any number into a FOLDER (one that is there,
    or ends with /), for all models they were compiled for. Every byte is checked on the way.

    Who has the file has the text. A FILE is for you alone; what is in a FOLDER can be read by whoever can read that.
    Where the text came from is not told. Segments are not signed: `notes import` recomputes some of their rows.

    \b
    Examples:
      notes export returns returns.gguf
      notes export returns support /srv/share/skills/
    """
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
    """Return the segments of a skill, or the file that `name` is."""
    target = store.resolve(name)
    if target.kind == "text":
        raise SegmentError(f"{name} is a text, not a compiled skill", Help.LIST_SKILLS())
    return [target.path] if target.path else [entry.path for entry in store.entries(target.name)]


@click.command("import")
@click.argument("sources", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE|FOLDER...")
@click.option("--name", metavar="NAME", help="Name in the library.  [default: the segment's own]")
@click.option("--trust", is_flag=True, help="Import the rows without computing them again to compare.")
@click.option("-f", "--force", is_flag=True, help="Replace a skill of that name that came from elsewhere.")
@click.option("-q", "--quiet", is_flag=True, help="Print the paths alone, and no progress.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
@model_options
def import_command(
    sources: tuple[Path, ...], name: str | None, trust: bool, force: bool, quiet: bool, json_: bool, **model: Any
) -> int:
    """Take compiled skills that others exported into the library: segment files, or all in a FOLDER.

    Checksums find damage, not forgery. So the rows of each are computed again with your model and compared, K and V of
    all tokens in all layers; what is not what your model computes is refused. That takes as long as a compile: --trust
    leaves it out. A segment of another model is compiled from its text instead, and a line says so.

    \b
    Examples:
      notes import returns.gguf
      notes import /srv/share/skills -m model.gguf
    """
    wanted = [list(group) for source in sources for group in _groups(source)]
    if name and len(wanted) > 1:
        raise click.UsageError(f"--name is for one skill, and these are {len(wanted)}")
    done: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with open_model(quiet=quiet or json_, **model) as opened:
        for group in wanted:
            source = group[0]
            try:
                source = _best_match(group, opened.workspace.identity)
                imported = opened.import_segment(
                    source, name=name, trust=trust, force=force, callbacks=print_callbacks(quiet or json_)
                )
            except NotesError as error:
                if len(wanted) == 1:
                    raise
                failed[str(source)] = worded(error)
                output.say(f"notes: {failed[str(source)]}")
                continue
            done.append(_facts(source, imported))
            if not json_:
                output.data(str(imported.path))
            if not (quiet or json_):
                output.say(_summary(imported, trust))
    if json_:
        output.as_json({"version": 1, "imported": done, "failed": failed})
    return 1 if failed else 0


def _groups(source: Path) -> list[list[Path]]:
    """Return the segment files under a path, grouped by skill."""
    from notes_cli.library.store import shared_segments

    if not source.exists():
        raise SegmentError(f"{source}: no such file or folder")
    if not source.is_dir():
        return [[source]]
    groups = list(shared_segments(source).values())
    if not groups:
        raise SegmentError(f"there are no segments in {source}", "notes export writes them")
    return groups


def _best_match(group: list[Path], identity: Identity) -> Path:
    """Return a skill's segment for this model, else the latest one."""
    from notes_cli.library.container import peek

    if len(group) == 1:
        return group[0]
    matching = [path for path in group if path.name.endswith(f".{identity.key}.gguf")]
    return matching[0] if matching else max(group, key=lambda path: peek(path).created)


def _facts(source: Path, imported: Imported) -> dict[str, Any]:
    return {
        "source": str(source),
        "name": imported.name,
        "path": str(imported.path),
        "tokens": imported.tokens,
        "how": imported.how,
        "reasons": list(imported.reasons),
        "checked": imported.checked,
        "farthest": imported.farthest,
        "influence_dropped": imported.dropped,
    }


def _summary(imported: Imported, trust: bool) -> str:
    """Return the line about an imported segment."""
    start = f"{imported.name}: {imported.tokens} tokens, "
    if imported.how == "kept":
        return start + "which the library has already"
    if imported.how == "text":
        return start + f"compiled from its text: {'; '.join(imported.reasons)}"
    checked = "imported without a check"
    if not trust:
        checked = f"imported; its rows, computed again, differ by {imported.farthest:.1%} at most"
    more = "; the influence of its fields was measured elsewhere, and is left out" if imported.dropped else ""
    return start + checked + more
