"""Damaged folders of sessions: files cut, changed, emptied, lost, swapped between sessions, older copies put back."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.faults.frame import ACCEPTED, REFUSED, Kind, chance, check, refused
from bench.faults.stage import Stage
from notes_cli.errors import SessionError
from notes_cli.sessions.archive import check_sessions, faults
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.listing import HEAD, LEDGER

DEEP = 10  # every tenth goes through the commands
Files = Mapping[str, bytes]
TURNS = (  # two conversations, the second a fork of the first
    "ask 'May I go to Lund?' --splice returns --session mine",
    "ask 'And to Lund?' --session mine",
    "session fork mine other",
    "edit other --field tier=silver --method field",
    "edit mine --field tier=silver --method suffix",
    "ask When? --session other",
    "ask When? --session mine",
    "session undo mine",
    "ask Who? --session mine",
    "session forget other 2 --method suffix -y",
    "ask Who? --session other",
)


class Folders(Kind):
    """Two sessions with one to three damages."""

    cases = 5_000

    def __init__(self, seed: int, stage: Stage | None = None) -> None:
        super().__init__(seed)
        self.stage = stage = stage or Stage.make(self.folder())
        self.home = stage.prepared("talked", ["compile returns.txt"])
        self.copies: dict[str, list[Files]] = {"mine": [], "other": []}  # of each session after each of its changes
        for turn in TURNS:
            outcome = stage.run(turn, self.home)
            assert outcome.code == 0, outcome.err
            for name, copies in self.copies.items():
                files = files_of(self.home / "sessions" / name)
                if files and (not copies or files != copies[-1]):
                    copies.append(files)
        self.every = [copy for copies in self.copies.values() for copy in copies]
        self.known: dict[bytes, object] = {}  # the conversation of each ledger
        self.rows: dict[bytes, str] = {}  # the checksum of each file of rows, as ledgers have it
        for copy in self.every:
            folder = stage.folder / "known" / "sessions" / "mine"
            put(folder, copy)
            stored = Sessions(folder.parent).find("mine")
            self.known[copy[LEDGER]] = conversation(stored)
            self.rows |= {copy[one]: digest for one, digest in stored.state.checksums.items() if one in copy}

    def judge(self, number: int) -> str:
        rng = chance(self.seed, number)
        name, other = rng.choice((("mine", "other"), ("other", "mine")))
        files = dict(self.copies[name][-1])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            damage(rng, files, [*self.copies[name], *self.copies[other]])
        folder = self.stage.copied(self.home, "damaged") / "sessions" / name
        put(folder, files)
        outcome = self._opened(folder, files)
        if number % DEEP == 0:
            self._command(rng, folder, files, outcome)
        return outcome

    def _opened(self, folder: Path, files: Files) -> str:
        """Open the session and run fsck."""
        sessions = Sessions(folder.parent)
        found = [finding for finding in check_sessions(sessions) if finding.path.is_relative_to(folder)]
        outcome = ACCEPTED
        try:
            self._check(sessions.find(folder.name), files)
        except SessionError as error:
            outcome = refused(error)
            damaged = any(finding.kind == "damaged" for finding in found)
            check(damaged or not {LEDGER, HEAD} & {*files}, f"fsck does not find it: {error}")
        check(files_of(folder) == files, "a file was changed")
        return outcome

    def _check(self, stored: SessionFolder, files: Files) -> None:
        """Raise Failed for a conversation that never was, or that is older than its head, or for wrong rows."""
        ledger = files[LEDGER][: stored.end]
        check(self.known.get(ledger) == conversation(stored), "a conversation that never was")
        beyond = [copy for copy in self.every if copy[LEDGER].startswith(ledger) and copy[LEDGER] != ledger]
        older = any(copy[HEAD] == files.get(HEAD) for copy in beyond)
        check(not older, "an older conversation than its head names")
        named = stored.state.checksums
        bad = [one for one in stored.kept() if one not in files or self.rows.get(files[one]) != named[one]]
        check(
            not bad or [*faults(stored)], f"{bad} are not the rows that the ledger names, and fsck does not report it"
        )

    def _command(self, rng: random.Random, folder: Path, files: Files, outcome: str) -> None:
        """Run one command on the damaged session: it must agree with the outcome."""
        sessions, name = Sessions(folder.parent), folder.name
        before = None if outcome == REFUSED else conversation(sessions.find(name))[0]
        show, ask = f"session show {name}", f"ask Last? --session {name}"
        command = rng.choice((show, ask, f"edit {name} --field tier=brass --method erratum"))
        done = self.stage.run(command, folder.parent.parent)
        done.check_tidy(command)
        if done.code:
            check(files_of(folder) == files, f"{command} failed and changed a file")
        elif LEDGER in files or HEAD in files:  # else there was no session any more, and now there is a new one
            check(before is not None, f"{command} takes a session that cannot be read")
            after = conversation(sessions.find(name))[0]
            check(after[: len(before or ())] == before, f"{command} lost a part of the conversation", "loss")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def put(folder: Path, files: Files) -> None:
    """Put files in place of those of a session."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in (folder.parent.parent, folder.parent, folder):
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)


def conversation(stored: SessionFolder) -> tuple[list[str], Any]:
    """The questions of a session; and its tokens, entries, fields, pending errata, rows and checksums."""
    state = stored.state
    return state.questions, (state.tokens, state.entries, state.fields, state.pending, state.rows, state.checksums)


def damage(rng: random.Random, files: dict[str, bytes], copies: list[Files]) -> None:
    """Change, remove or replace some of the files. `copies`: of this session and of the other one."""
    one, donor = rng.choice((LEDGER, LEDGER, LEDGER, HEAD, *files)), rng.choice(copies)
    data = files.get(one, b"")
    at, cut = rng.randrange(len(data) + 1), rng.choice((1, 2, 20, 100, 1000))
    flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if at < len(data) else data
    more = rng.choice((b"\n", b"x", b"{}\n", b'{"op": "undo"}\n', bytes(512), data, data[at:]))
    lines = data.splitlines(keepends=True) or [b""]
    line = lines.pop(rng.randrange(len(lines)))
    moved = rng.choice((lines, [line, line, *lines], [line, *lines], [*lines, line]))
    zeros = data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]
    some = rng.sample([*donor], rng.randrange(1, len(donor) + 1))
    changes: tuple[dict[str, bytes | None], ...] = (
        *({one: new} for new in (data[:at], data[:-cut], flipped, flipped, b"", None, data + more, zeros, data[at:])),
        {one: b"".join(moved)},
        {one: donor.get(one)},
        {one: donor[rng.choice([*donor])]},
        {name: donor.get(name) for name in some},
        {LEDGER: donor[LEDGER], HEAD: donor[HEAD]},
    )
    for name, new in rng.choice(changes).items():
        if new is None:
            files.pop(name, None)
        else:
            files[name] = new
