"""`notes rm`, `export` and `import`: remove and exchange compiled skills.

The texts of skills are not touched; imported K/V is computed again and compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import (
    SKILLS,
    Target,
    compiled_files,
    json_option,
    library,
    model_settings,
    open_model,
    own_sessions,
)
from notes_cli.commands.remedies import collecting, print_callbacks
from notes_cli.commands.terminal import Command, option
from notes_cli.errors import NotesError, SegmentError
from notes_cli.explanations import attributes
from notes_cli.output import counted
from notes_cli.text.names import parse_age, parse_size, typed

if TYPE_CHECKING:
    from notes_cli.engine.segment import Identity
    from notes_cli.library.check import LibraryFile
    from notes_cli.runtime.recompile import Imported


def with_unit(parse: Callable[[str], float]) -> Callable[[Any], float]:
    """Return the type of an option with a unit, by a function of text/names.py."""

    def convert(value: Any) -> float:
        try:
            return parse(value) if isinstance(value, str) else value
        except NotesError as error:
            raise click.BadParameter(str(error)) from error

    return convert


@click.command(cls=Command)
@click.argument("names", shell_complete=SKILLS, nargs=-1, metavar="[NAME...]")
@option("--stale", "Those whose text has changed or whose file is gone, and damaged ones.", is_flag=True)
@option("--older-than AGE", "What was not used, nor compiled, for so long: 30d, 12h.", type=with_unit(parse_age))
@option("--max-size SIZE", "The least recently used, until all take no more: 20GB.", type=with_unit(parse_size))
@option("--learned", "All texts that servers have learned by themselves.", is_flag=True)
@option("--dry-run", "Show what would be removed, and remove nothing.", is_flag=True)
@option("-y --yes", "Do not ask.", is_flag=True)
@json_option
def rm_command(
    names: tuple[str, ...],
    stale: bool,
    older_than: float | None,
    max_size: int | None,
    learned: bool,
    dry_run: bool,
    yes: bool,
    json_: bool,
) -> int:
    """Remove compiled skills: those that are named, for all models they were compiled for, or those that an option
    chooses. The texts are not touched, and can be compiled again.

    What an option chooses is shown first, and it asks, on a terminal also before it removes a named skill whose text a
    session keeps. What another process uses or compiles stays. So does, unless
    --stale says that its file is gone, a text that is nowhere else: it came from standard input, or its file is not
    there any more. That goes by name only.

    \b
    Examples:
      notes rm fees shop
      notes rm --older-than 30d --dry-run
      notes rm --max-size 10GB
      notes rm --stale -y
    """
    from notes_cli.library import check

    store = library(learned=learned)
    files = check.library_files(store.folder)
    stayed: list[LibraryFile] = []
    chosen = stale or older_than is not None or max_size is not None
    if bool(names) + chosen + learned != 1:
        which = "--stale, --older-than AGE, --max-size SIZE or --learned"
        raise click.UsageError(f"give the NAMEs of skills, or say which: {which}")
    if names:
        names = tuple(dict.fromkeys(map(typed, names)))
        for name in names:  # all or nothing: a typing error removes nothing
            if name not in store.names():
                raise SegmentError(f"there is no compiled skill {name!r}. See: notes ls")
        removed = [file for name in names for file in files if file.name == name]
        if _warn_of_sessions(names) and output.asks() and not (yes or dry_run) and not _confirmed(removed):
            return 1
        for name in () if dry_run else names:
            store.remove(name)
    else:
        outdated = files if learned else _outdated(files) if stale else []
        removed, stayed = check.select_files(files, outdated, older_than, max_size)
        for file in stayed:
            output.say(f"{file} stays: its text is nowhere else. To remove it: notes rm {file.name}")
        if removed and not dry_run:
            if not yes and not _confirmed(removed):
                return 1
            if learned:  # also what a server has open, which forgets it
                for name in {file.name for file in removed}:
                    store.remove(name)
            else:
                done = check.remove_files(removed, store.folder, outdated)
                for file, why in done.spared:
                    output.say(f"{file} stays: {why}")
                removed, stayed = [*done.removed], [*stayed, *(file for file, _ in done.spared)]
    paths = [str(file.path) for file in removed]
    if json_:
        outcome = {"removed": [] if dry_run else paths, "would_remove": paths if dry_run else []}
        size = sum(file.nbytes for file in removed)
        output.as_json({"version": 1, **outcome, "stayed": [str(file.path) for file in stayed], "bytes": size})
        return 0
    for path in paths:
        output.data(path)
    if dry_run and not names:
        _print_files(removed)
    elif not names:
        output.say(f"removed {_count_files(removed)}" if removed else "there is nothing to remove")
    return 0


def _warn_of_sessions(skills: Sequence[str]) -> bool:
    """Name the sessions that keep the texts of these skills; return True if there are any."""
    sessions, found = own_sessions(), False
    for name in sessions.names():
        with suppress(NotesError):  # a damaged session
            for skill in sorted({skill.name for skill in sessions.find(name).state.skills}.intersection(skills)):
                output.warn(f"session {name} keeps the text of {skill}. To remove it there: notes session rm {name}")
                found = True
    return found


def _confirmed(files: Sequence[LibraryFile]) -> bool:
    count = _count_files(files)
    if output.asks():
        _print_files(files)
    return output.confirmed(
        f"Remove {count}?", f". Repeat with -y to remove {count}, or --dry-run", "nothing was removed"
    )


def _outdated(files: Sequence[LibraryFile]) -> list[LibraryFile]:
    """Return files that are damaged, or whose text is gone or has changed. Raises SegmentError for one that this user
    may not read: it may be up to date."""
    from notes_cli.runtime.freshness import Stale, stale_reasons

    for file in files:
        if not os.access(file.path, os.R_OK):
            remedy = f"Change its permissions, or remove it: notes rm {file.name}"
            raise SegmentError(f"{file.path} cannot be read, so it is not known to be stale", remedy)
    kinds = {Stale.TEXT, Stale.GONE, Stale.DAMAGED}
    entries = library().entries()
    outdated = {entry.path for entry in entries if kinds & {reason.kind for reason in stale_reasons(entry, [entry])}}
    return [file for file in files if file.path in outdated]


def _print_files(files: Sequence[LibraryFile]) -> None:
    for file in files:
        output.say(str(file))
    output.say(f"in all {_count_files(files)}")


def _count_files(files: Sequence[LibraryFile]) -> str:
    return f"{counted(len(files), 'file')}, {output.human_size(sum(file.nbytes for file in files))}"


@click.command(cls=Command)
@click.argument("names", shell_complete=SKILLS, nargs=-1, metavar="NAME...")
@click.argument("target", type=Target(), metavar="FILE|FOLDER")
@option("-f --force", "Write over other files that are there.", is_flag=True)
@json_option
def export_command(names: tuple[str, ...], target: str, force: bool, json_: bool) -> None:
    """Write compiled skills where others can import them: one into a FILE, any number into a FOLDER (one that is there,
    or ends with /), for all models they were compiled for. Every byte is checked on the way.

    Who has the file has the text. A FILE is for you alone; what is in a FOLDER can be read by whoever can read that.
    The place of the text is left out. Segments are not signed: `notes import` recomputes some of their rows.

    \b
    Examples:
      notes export style-guide style-guide.gguf
      notes export store-handbook style-guide shared/
    """
    from notes_cli.library.store import export

    if not names:
        raise click.UsageError(f"name the FILE or FOLDER that {target} is to be written to")
    files = list(dict.fromkeys(path for name in names for path in compiled_files(name)))
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


@click.command("import", cls=Command)
@click.argument("sources", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE|FOLDER...")
@option("--name NAME", "Name in the library.  [default: the segment's own]")
@option("--trust", "Import the rows without computing them again to compare.", is_flag=True)
@option("-f --force", "Replace a skill of that name that came from elsewhere.", is_flag=True)
@json_option
@model_settings("--model")
def import_command(
    sources: tuple[Path, ...], name: str | None, trust: bool, force: bool, json_: bool, **model: Any
) -> int:
    """Take compiled skills that others exported into the library: segment files, or all in a FOLDER.

    Checksums find damage, not forgery. So the rows of each are computed again with your model and compared, K and V of
    all tokens in all layers; what is not what your model computes is refused. That takes as long as a compile: --trust
    leaves it out. A segment of another model is compiled from its text instead, and a line says so.

    \b
    Examples:
      notes import style-guide.gguf
      notes import shared/
    """
    wanted = [list(group) for source in sources for group in _groups(source)]
    if name and len(wanted) > 1:
        raise click.UsageError(f"--name is for one skill, and these are {len(wanted)}")
    done: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with open_model(**model) as opened:
        for group in wanted:
            source = _best_match(group, opened.workspace.identity)
            with collecting(failed, str(source), several=len(wanted) > 1):
                imported = opened.import_segment(
                    source, name=name, trust=trust, force=force, callbacks=print_callbacks()
                )
                facts = attributes(imported, "tokens", "how", "reasons", "checked", "farthest")
                done.append({"source": str(source), "name": imported.name, "path": str(imported.path), **facts})
                if not json_:
                    output.data(str(imported.path))
                output.remark(_summary(imported, trust))
    if json_:
        output.as_json({"version": 1, "imported": done, "failed": failed})
    return 1 if failed else 0


def _groups(source: Path) -> list[list[Path]]:
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
    """Return a skill's segment for this model, else the latest one that can be read."""
    from notes_cli.library.container import peek

    def created(path: Path) -> str:
        with suppress(NotesError):
            return peek(path).created
        return ""

    matching = (path for path in group if path.name.endswith(f".{identity.key}.gguf"))
    return next(matching, None) or max(group, key=created)


def _summary(imported: Imported, trust: bool) -> str:
    start = f"{imported.name}: {imported.tokens} tokens, "
    if imported.how == "kept":
        return start + "which the library has already"
    if imported.how == "text":
        return start + f"compiled from its text: {'; '.join(imported.reasons)}"
    checked = "imported without a check"
    if not trust:
        checked = f"imported; its rows, computed again, differ by {imported.farthest:.1%} at most"
    return start + checked
