"""`notes rm`, `notes prune` and `notes fsck`: remove compiled skills; check and repair the files of notes.

The texts of skills are not touched, and fsck repairs without loss only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from notes_cli import output
from notes_cli.commands.options import SkillName, library
from notes_cli.commands.remedies import advice, worded
from notes_cli.errors import NotesError, reason, with_advice

if TYPE_CHECKING:
    from notes_cli.library.check import Finding, OnChecked
    from notes_cli.library.tidy import LibraryFile
    from notes_cli.sessions.folder import Sessions


@click.command()
@click.argument("names", type=SkillName(), nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, expose_value=False, help="Changes nothing: it never asks.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def rm_command(names: tuple[str, ...], dry_run: bool, json_: bool) -> None:
    """Remove compiled skills, for all models they were compiled for, without asking. The texts are not touched, and
    can be compiled again.

    \b
    Examples:
      notes rm returns
      notes ls -q | xargs notes rm
    """
    from notes_cli.errors import SegmentError
    from notes_cli.text.names import typed

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


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A size with a unit, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from notes_cli.text.sizes import parse_size

        try:
            return parse_size(str(value))
        except NotesError as error:
            self.fail(str(error), param, ctx)


class Age(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """An age with a unit, in seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from notes_cli.text.sizes import parse_age

        try:
            return value if isinstance(value, float) else parse_age(str(value))
        except NotesError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option("--older-than", type=Age(), metavar="AGE", help="What was not used, nor compiled, for so long: 30d, 12h.")
@click.option("--max-size", type=Size(), metavar="SIZE", help="The least recently used, until all take no more: 20GB.")
@click.option("--stale", is_flag=True, help="Those whose text has changed or whose file is gone, and damaged ones.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option(*("-y", "--yes"), is_flag=True, help="Do not ask.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
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
    from notes_cli.library import tidy

    store = library()
    if older_than is None and max_size is None and not stale:
        max_size = store.max_size
        if max_size is None:
            raise click.UsageError("say what may go: --older-than AGE, --max-size SIZE or --stale")
    files = tidy.library_files(store.folder)
    outdated = _outdated(files) if stale else []
    chosen, last_copies = tidy.select_files(files, outdated, older_than, max_size)
    for file in last_copies:
        output.say(f"{file} stays: its text is nowhere else. To remove it: notes rm {file.name}")
    if chosen and not dry_run and not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise click.UsageError(
                f"there is no terminal to ask on. Repeat with -y to remove {_count_files(chosen)}, or --dry-run"
            )
        _print_files(chosen)
        if not output.confirm(f"Remove {_count_files(chosen)}?"):
            output.say("nothing was removed")
            return 1
    done = tidy.Tidied([], [], 0) if dry_run or not chosen else tidy.remove_files(chosen, store.folder, outdated)
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
    """Return files that are damaged, or whose text is gone or has changed."""
    from notes_cli.runtime.freshness import Stale, stale_reasons

    kinds = {Stale.TEXT, Stale.GONE, Stale.DAMAGED}
    entries = library().entries()
    outdated = {entry.path for entry in entries if kinds & {reason.kind for reason in stale_reasons(entry, [entry])}}
    return [file for file in files if file.path in outdated]


def _print_files(files: Sequence[LibraryFile]) -> None:
    for file in files:
        output.say(str(file))
    output.say(f"in all {_count_files(files)}")


def _count_files(files: Sequence[LibraryFile]) -> str:
    size = output.human_size(sum(file.nbytes for file in files))
    return f"{'1 file' if len(files) == 1 else f'{len(files)} files'}, {size}"


_Listed = TypeVar("_Listed")


@dataclass(slots=True)
class _Outcome:
    """A finding of fsck and the outcome of its repair."""

    finding: Finding
    mended: str | None = None
    failed: str | None = None


@click.command()
@click.option("--repair", is_flag=True, help="Mend what can be mended: damaged files are set aside, leftovers removed.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def fsck_command(repair: bool, json_: bool) -> int:
    """Check every file of the library, the sessions and the profiles. Report damaged files, leftovers of killed
    processes, unused files, and files that others can read. The exit status is 1 if a problem remains.

    --repair moves damaged segments and profiles into .damaged/ beside them, removes leftovers, and takes from others
    the rights to what is yours. What cannot be made again, and what another process uses, is never touched. Each line
    says what compiles or measures again what was lost.

    \b
    Examples:
      notes fsck
      notes fsck --repair
    """
    from notes_cli import config
    from notes_cli.library.tidy import library_files
    from notes_cli.sessions.folder import Sessions

    paths = config.paths()
    sessions = Sessions(paths.sessions)
    segments, names = _if_readable(lambda: library_files(paths.library)), _if_readable(sessions.names)
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
            _mend(outcome)
    left = [outcome for outcome in outcomes if outcome.mended is None and outcome.finding.kind != "busy"]
    if json_:
        checked = {"segments": len(segments), "bytes": size, "sessions": len(names)}
        output.as_json({"version": 1, "checked": checked, "findings": list(map(_facts, outcomes)), "pass": not left})
        return 1 if left else 0
    for outcome in outcomes:
        output.result(_line(outcome, repair))
    count = f"{_count(len(segments), 'segment')}, {output.human_size(size)}, and {_count(len(names), 'session')}"
    problems = _count(len(left), "problem") if left else "no problems"
    mendable = not repair and any(outcome.finding.mend for outcome in left)
    more = ". Mend what can be: notes fsck --repair" if mendable else ""
    output.say(f"checked {count}: {problems}{' left' if repair and left else ''}{more}")
    return 1 if left else 0


def _if_readable(list_items: Callable[[], list[_Listed]]) -> list[_Listed]:
    """Return the items of a folder; none if it cannot be read, which is a finding."""
    try:
        return list_items()
    except NotesError:
        return []


def _findings(sessions: Sessions, on_read: OnChecked) -> Iterator[Finding]:
    """Yield the findings of all folders; a folder that cannot be read is one."""
    from notes_cli import config
    from notes_cli.library.check import Finding, check_library, check_memory, check_profiles
    from notes_cli.sessions.archive import check_sessions

    paths = config.paths()
    for folder, findings in (
        (paths.library, check_library(paths.library, on_read)),
        (paths.sessions, check_sessions(sessions)),
        (paths.profiles, check_profiles(paths.profiles)),
        (paths.models, check_memory(paths.models)),
    ):
        try:
            yield from findings
        except NotesError as error:
            yield Finding("permission", folder, error.what, error.remedy)


def _mend(outcome: _Outcome) -> None:
    if outcome.finding.mend is None:
        return
    try:
        outcome.mended = outcome.finding.mend()
    except NotesError as error:
        outcome.failed = worded(error)
    except OSError as error:
        outcome.failed = reason(error)


def _facts(outcome: _Outcome) -> dict[str, object]:
    finding = outcome.finding
    return {
        "kind": finding.kind,
        "path": str(finding.path),
        "what": finding.what,
        "remedy": advice(finding.remedy) or None,
        "mendable": finding.mend is not None,
        "mended": outcome.mended,
        "failed": outcome.failed,
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


def _count(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
