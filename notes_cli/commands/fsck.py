"""`notes fsck`: check every file that notes keeps, and mend what can be mended without a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import click

from notes_cli import output
from notes_cli.commands.remedies import advice, worded
from notes_cli.errors import NotesError, reason, told

if TYPE_CHECKING:
    from notes_cli.library.check import Finding, Told
    from notes_cli.sessions.folder import Sessions

_Listed = TypeVar("_Listed")


@dataclass(slots=True)
class _Outcome:
    """What came of a finding."""

    finding: Finding
    mended: str | None = None
    failed: str | None = None


@click.command()
@click.option("--repair", is_flag=True, help="Mend what can be mended: damaged files are set aside, leftovers removed.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(repair: bool, json_: bool) -> int:
    """Read every file of the library, the sessions and the profiles, and report what is damaged, left over by a process
    that was killed, without use, or open to others. The exit status is 1 if anything is left to do.

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
    segments, names = _if_ours(lambda: library_files(paths.library)), _if_ours(sessions.names)
    size = sum(one.nbytes for one in segments)
    with output.progress("checking", "MB", hidden=json_) as update:
        read = 0

        def told_size(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            update(min(read, size), size)

        found = [_Outcome(one) for one in _findings(sessions, told_size)]
    if repair:
        for outcome in found:
            _mend(outcome)
    left = [one for one in found if one.mended is None and one.finding.kind != "busy"]
    if json_:
        checked = {"segments": len(segments), "bytes": size, "sessions": len(names)}
        output.as_json({"version": 1, "checked": checked, "findings": list(map(_facts, found)), "pass": not left})
        return 1 if left else 0
    for outcome in found:
        output.result(_line(outcome, repair))
    count = f"{_count(len(segments), 'segment')}, {output.human_size(size)}, and {_count(len(names), 'session')}"
    problems = _count(len(left), "problem") if left else "no problems"
    more = ". Mend what can be: notes fsck --repair" if not repair and any(one.finding.mend for one in left) else ""
    output.say(f"checked {count}: {problems}{' left' if repair and left else ''}{more}")
    return 1 if left else 0


def _if_ours(listed: Callable[[], list[_Listed]]) -> list[_Listed]:
    """What is in a folder; nothing where it may not be looked at, which is a finding."""
    try:
        return listed()
    except NotesError:
        return []


def _findings(sessions: Sessions, told_size: Told) -> Iterator[Finding]:
    """All there are; a folder that may not be looked at is one."""
    from notes_cli import config
    from notes_cli.library.check import Finding, check_library, check_memory, check_profiles
    from notes_cli.sessions.check import check_sessions

    paths = config.paths()
    for folder, found in (
        (paths.library, check_library(paths.library, told_size)),
        (paths.sessions, check_sessions(sessions)),
        (paths.profiles, check_profiles(paths.profiles)),
        (paths.models, check_memory(paths.models)),
    ):
        try:
            yield from found
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
    one = outcome.finding
    return {
        "kind": one.kind,
        "path": str(one.path),
        "what": one.what,
        "remedy": advice(one.remedy) or None,
        "mendable": one.mend is not None,
        "mended": outcome.mended,
        "failed": outcome.failed,
    }


def _line(outcome: _Outcome, repair: bool) -> str:
    one = outcome.finding
    path = "" if str(one.path) in one.what else f"{one.path}: "
    done = f"; {outcome.mended}" if outcome.mended else ""
    if outcome.failed:
        done = f"; it was not mended: {outcome.failed}"
    later = one.mend is not None and not repair and one.kind == "damaged"
    return output.line(f"{one.kind}: {told(f'{path}{one.what}{done}', '' if later else advice(one.remedy))}")


def _count(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
