"""`notes rm`, `prune`, `fsck`, `export` and `import`: remove, check, repair and exchange the files of notes.

The texts of skills are not touched; fsck repairs without loss only; imported K/V is computed again and compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import config, output
from notes_cli.commands.options import SkillName, Target, json_option, library, model_options, open_model
from notes_cli.commands.remedies import advice, print_callbacks, worded
from notes_cli.errors import Help, NotesError, SegmentError, reason, with_advice
from notes_cli.explanations import attributes
from notes_cli.output import counted
from notes_cli.text.names import parse_age, parse_size, typed

if TYPE_CHECKING:
    from notes_cli.engine.segment import Identity
    from notes_cli.library.check import Finding, LibraryFile, OnChecked
    from notes_cli.library.store import Library
    from notes_cli.runtime.recompile import Imported
    from notes_cli.sessions.folder import Sessions


@click.command()
@click.argument("names", type=SkillName(), nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, expose_value=False, help="Changes nothing: it never asks.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@json_option
def rm_command(names: tuple[str, ...], dry_run: bool, json_: bool) -> None:
    """Remove compiled skills, for all models they were compiled for, without asking. The texts are not touched, and
    can be compiled again.

    \b
    Examples:
      notes rm returns
      notes ls -q | xargs notes rm
    """
    store = library()
    known = set(store.names())
    names = tuple(dict.fromkeys(map(typed, names)))
    for name in names:  # all or nothing: a typing error removes nothing
        if name not in known:
            raise SegmentError(f"there is no compiled skill {name!r}. See: notes ls")
    if dry_run:
        files = [str(entry.path) for entry in store.entries() if entry.name in names]
    else:
        files = [str(path) for name in names for path in store.remove(name)]
    if json_:
        output.as_json({"version": 1, "removed": [] if dry_run else files, "would_remove": files if dry_run else []})
    else:
        for file in files:
            output.data(file)


def with_unit(parse: Callable[[str], float]) -> Callable[[Any], float]:
    """Return the type of an option with a unit, by a function of text/names.py."""

    def convert(value: Any) -> float:
        try:
            return parse(value) if isinstance(value, str) else value
        except NotesError as error:
            raise click.BadParameter(str(error)) from error

    return convert


@click.command()
@click.option(
    "--older-than",
    type=with_unit(parse_age),
    metavar="AGE",
    help="What was not used, nor compiled, for so long: 30d, 12h.",
)
@click.option(
    "--max-size",
    type=with_unit(parse_size),
    metavar="SIZE",
    help="The least recently used, until all take no more: 20GB.",
)
@click.option("--stale", is_flag=True, help="Those whose text has changed or whose file is gone, and damaged ones.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option(*("-y", "--yes"), is_flag=True, help="Do not ask.")
@json_option
def prune_command(
    older_than: float | None, max_size: int | None, stale: bool, dry_run: bool, yes: bool, json_: bool
) -> int:
    """Remove compiled skills by a rule, the least recently used first. It shows them and asks first.

    Without a rule it keeps the library within `cache:` `max_size:` of config.yaml, as every compile does. What another
    process uses or compiles stays. So does, unless --stale says that its file is gone, a text that is nowhere else: it
    came from standard input, or its file is not there any more. `notes rm NAME` removes that.

    \b
    Examples:
      notes prune --older-than 30d --dry-run
      notes prune --max-size 10GB
      notes prune --stale -y
    """
    from notes_cli.library import check

    store = library()
    if older_than is None and max_size is None and not stale:
        max_size = store.max_size
        if max_size is None:
            raise click.UsageError("say what may go: --older-than AGE, --max-size SIZE or --stale")
    files = check.library_files(store.folder)
    outdated = _outdated(files) if stale else []
    chosen, last_copies = check.select_files(files, outdated, older_than, max_size)
    for file in last_copies:
        output.say(f"{file} stays: its text is nowhere else. To remove it: notes rm {file.name}")
    if chosen and not dry_run and not yes:
        count = _count_files(chosen)
        if output.asks():
            _print_files(chosen)
        refusal = f". Repeat with -y to remove {count}, or --dry-run"
        if not output.confirmed(f"Remove {count}?", refusal, "nothing was removed"):
            return 1
    done = check.Tidied([], [], 0) if dry_run or not chosen else check.remove_files(chosen, store.folder, outdated)
    for file, why in done.spared:
        output.say(f"{file} stays: {why}")
    removed = chosen if dry_run else done.removed
    if json_:
        paths = [str(file.path) for file in removed]
        outcome = {"removed": [] if dry_run else paths, "would_remove": paths if dry_run else []}
        stayed = [str(file.path) for file in (*last_copies, *(file for file, _ in done.spared))]
        output.as_json({"version": 1, **outcome, "stayed": stayed, "bytes": sum(file.nbytes for file in removed)})
        return 0
    for file in removed:
        output.data(str(file.path))
    if not removed:
        output.say("there is nothing to remove")
    elif dry_run:
        _print_files(removed)
    else:
        output.say(f"removed {_count_files(removed)}")
    return 0


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


@dataclass(slots=True)
class _Outcome:
    finding: Finding
    mended: str | None = None
    failed: str | None = None


@click.command()
@click.option("--repair", is_flag=True, help="Mend what can be mended: damaged files are set aside, leftovers removed.")
@json_option
def fsck_command(repair: bool, json_: bool) -> int:
    """Check every file of the library and the sessions. Report damaged files, leftovers of killed
    processes, unused files, and files that others can read. The exit status is 1 if a problem remains.

    --repair moves damaged segments into .damaged/ beside them, removes leftovers, and takes from others
    the rights to what is yours. What cannot be made again, and what another process uses, is never touched. Each line
    says what compiles again what was lost.

    \b
    Examples:
      notes fsck
      notes fsck --repair
    """
    from notes_cli.library.check import library_files
    from notes_cli.sessions.folder import Sessions

    paths = config.paths()
    sessions = Sessions(paths.sessions)
    segments: list[LibraryFile] = []
    names: list[str] = []
    with suppress(NotesError):  # a folder that cannot be read is a finding
        segments = library_files(paths.library)
    with suppress(NotesError):
        names = sessions.names()
    size = sum(segment.nbytes for segment in segments)
    with output.progress("checking", "MB", hidden=json_) as update:
        read = 0

        def on_read(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            update(min(read, size), size)

        outcomes = [_Outcome(finding) for finding in _findings(sessions, on_read)]
    if repair:
        for outcome in outcomes:
            if outcome.finding.mend is not None:
                try:
                    outcome.mended = outcome.finding.mend()
                except (NotesError, OSError) as error:
                    outcome.failed = worded(error) if isinstance(error, NotesError) else reason(error)
    left = [outcome for outcome in outcomes if outcome.mended is None and outcome.finding.kind != "busy"]
    if json_:
        checked = {"segments": len(segments), "bytes": size, "sessions": len(names)}
        output.as_json({"version": 1, "checked": checked, "findings": list(map(_facts, outcomes)), "pass": not left})
        return 1 if left else 0
    for outcome in outcomes:
        output.result(_line(outcome, repair))
    count = f"{counted(len(segments), 'segment')}, {output.human_size(size)}, and {counted(len(names), 'session')}"
    problems = counted(len(left), "problem") if left else "no problems"
    mendable = not repair and any(outcome.finding.mend for outcome in left)
    more = ". Mend what can be: notes fsck --repair" if mendable else ""
    output.say(f"checked {count}: {problems}{' left' if repair and left else ''}{more}")
    return 1 if left else 0


def _findings(sessions: Sessions, on_read: OnChecked) -> Iterator[Finding]:
    """Yield the findings of all folders; a folder that cannot be read is one."""
    from notes_cli.library.check import Finding, check_library, check_memory
    from notes_cli.sessions.archive import check_sessions

    paths = config.paths()
    for folder, findings in (
        (paths.library, check_library(paths.library, on_read)),
        (paths.sessions, check_sessions(sessions)),
        (paths.models, check_memory(paths.models)),
    ):
        try:
            yield from findings
        except NotesError as error:
            yield Finding("permission", folder, error.what, error.remedy)


def _facts(outcome: _Outcome) -> dict[str, object]:
    finding = outcome.finding
    return {
        "kind": finding.kind,
        "path": str(finding.path),
        "what": finding.what,
        "remedy": advice(finding.remedy) or None,
        "mendable": finding.mend is not None,
        **attributes(outcome, "mended", "failed"),
    }


def _line(outcome: _Outcome, repair: bool) -> str:
    finding = outcome.finding
    path = "" if str(finding.path) in finding.what else f"{finding.path}: "
    done = f"; {outcome.mended}" if outcome.mended else ""
    if outcome.failed:
        done = f"; it was not mended: {outcome.failed}"
    later = finding.mend is not None and not repair and finding.kind == "damaged"
    remedy = "" if later else advice(finding.remedy)
    return output.line(f"{finding.kind}: {with_advice(f'{path}{finding.what}{done}', remedy)}")


@click.command()
@click.argument("names", type=SkillName(), nargs=-1, metavar="NAME...")
@click.argument("target", type=Target(), metavar="FILE|FOLDER")
@click.option("-f", "--force", is_flag=True, help="Write over other files that are there.")
@json_option
def export_command(names: tuple[str, ...], target: str, force: bool, json_: bool) -> None:
    """Write compiled skills where others can import them: one into a FILE, any number into a FOLDER (one that is there,
    or ends with /), for all models they were compiled for. Every byte is checked on the way.

    Who has the file has the text. A FILE is for you alone; what is in a FOLDER can be read by whoever can read that.
    The place of the text is left out. Segments are not signed: `notes import` recomputes some of their rows.

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
@json_option
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
            facts = attributes(imported, "tokens", "how", "reasons", "checked", "farthest")
            named = {"source": str(source), "name": imported.name, "path": str(imported.path)}
            done.append({**named, **facts})
            if not json_:
                output.data(str(imported.path))
            if not (quiet or json_):
                output.say(_summary(imported, trust))
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
    """Return a skill's segment for this model, else the latest one."""
    from notes_cli.library.container import peek

    if len(group) == 1:
        return group[0]
    matching = (path for path in group if path.name.endswith(f".{identity.key}.gguf"))
    return next(matching, None) or max(group, key=lambda path: peek(path).created)


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
