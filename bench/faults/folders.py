"""Damaged folders of sessions: files cut, changed, emptied, lost, swapped between sessions, older copies put back."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.faults.frame import ACCEPTED, REFUSED, SCRATCH, Budget, Row, Verdict, chance, tried
from bench.faults.stage import ANSWER, TEXT, Stage
from notes_cli.errors import SessionError
from notes_cli.sessions.archive import check_sessions, faults
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.listing import HEAD, LEDGER

TITLE = (
    "Folders of sessions with one to three damages: files cut by any number of bytes, with changed bits, emptied, "
    "lost, longer, with blocks of zeros, swapped with those of another session or place, put back from copies of any "
    "earlier turn, alone or with others. Each is opened and checked by fsck, every tenth is shown, continued or edited."
)
FAILS = (
    "a traceback, an answer other than one clear line, a conversation that is neither the session's nor, where ledger "
    "and head are both of an earlier turn, that of then; other rows than the ledger names that fsck does not find; a "
    "refusal or a reading that changes a file; or a turn after which the conversation does not begin as it was."
)
CASES, SHARE = 5_000, 1
DEEP = 10  # every so manieth goes through the commands
Files = Mapping[str, bytes]


def run(budget: Budget, seed: int) -> Row:
    return tried(Folders(Stage.set(SCRATCH / "folders"), seed), budget, patience=60, say="folders")


class Folders:
    """Judges damages of two sessions, one of which is a fork of the other that went on otherwise."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.seed = stage, seed
        self.home = stage.home("talked")
        self.copies: dict[str, list[Files]] = {"mine": [], "other": []}  # of each session after each of its lines
        for name in _talked(stage, self.home):
            self.copies[name].append(_files(self.home / "sessions" / name))
        # Of each copy, by its ledger and head, which conversation it is.
        self.known = {
            (copy[LEDGER], copy[HEAD]): _said(self._put(stage.home("known"), "mine", copy))
            for copies in self.copies.values()
            for copy in copies
        }

        # Of the bytes of each file of rows its checksum, as the ledgers have it that were written with them.
        self.rows = {
            copy[one]: checksum
            for copies in self.copies.values()
            for copy in copies
            for one, checksum in self._put(stage.home("known"), "mine", copy).state.checksums.items()
            if one in copy
        }

    def _put(self, home: Path, name: str, files: Files) -> SessionFolder:
        folder = home / "sessions" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        home.chmod(0o700)
        folder.parent.chmod(0o700)
        for one, data in files.items():
            (folder / one).write_bytes(data)
            (folder / one).chmod(0o600)
        return Sessions(folder.parent).find(name)

    def __call__(self, number: int) -> Verdict:
        rng = chance(self.seed, number)
        name = rng.choice(("mine", "other"))
        files = dict(self.copies[name][-1])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _damage(rng, files, self.copies[name], self.copies["other" if name == "mine" else "mine"])
        home = self.stage.copied(self.home, "damaged")
        folder = home / "sessions" / name
        for path in folder.iterdir():
            path.unlink()
        for one, data in files.items():
            (folder / one).write_bytes(data)
            (folder / one).chmod(0o600)
        verdict = self._judged(folder, files)
        if number % DEEP == 0 and verdict.outcome in ("accepted", "refused"):
            verdict = self._through(rng, folder, files, verdict)
        return verdict

    def _judged(self, folder: Path, files: Files) -> Verdict:
        """Open the session and run fsck: refused, accepted, or wrong with the reason."""
        sessions = Sessions(folder.parent)
        found = [finding for finding in check_sessions(sessions) if finding.path.is_relative_to(folder)]
        try:
            stored = sessions.find(folder.name)
        except SessionError as error:
            if not str(error).isprintable() or len(str(error)) > 500:
                return Verdict("wrong", f"no clear line: {error!s:.300}")
            if (LEDGER in files or HEAD in files) and not any(finding.kind == "damaged" for finding in found):
                return Verdict("wrong", f"fsck does not find it: {error}")
            return Verdict("wrong", "a file was changed") if _files(folder) != files else REFUSED
        wrong = self._conversation(stored, files) or self._rows(stored, files)
        if not wrong and _files(folder) != files:
            wrong = "a file was changed"
        return Verdict("wrong", wrong) if wrong else ACCEPTED

    def _conversation(self, stored: SessionFolder, files: Files) -> str:
        """Why it is not one that this session had; empty if it is."""
        ledger, head = files[LEDGER][: stored.end], files.get(HEAD)
        known = [said for (one, _), said in self.known.items() if one == ledger]
        if not known or _said(stored) != known[0]:
            return "a conversation that never was"
        every = [copy for copies in self.copies.values() for copy in copies]
        beyond = any(
            copy[HEAD] == head and copy[LEDGER][len(ledger) :] for copy in every if copy[LEDGER].startswith(ledger)
        )
        return "an older conversation than its head names" if beyond else ""

    def _rows(self, stored: SessionFolder, files: Files) -> str:
        """Why rows are wrong and not found to be; empty if they are right, or found."""
        named = stored.state.checksums
        bad = [one for one in stored.kept() if one not in files or self.rows.get(files[one]) != named[one]]
        return (
            f"{bad[0]} is not what the ledger names, and fsck does not say so" if bad and not [*faults(stored)] else ""
        )

    def _through(self, rng: random.Random, folder: Path, files: Files, verdict: Verdict) -> Verdict:
        """Run one command on the damaged session: it must agree with `verdict`."""
        home = folder.parent.parent
        before = None if verdict == REFUSED else _said(Sessions(folder.parent).find(folder.name))
        commands = (
            ["session", "show", folder.name],
            ["ask", "Last?", "--session", folder.name, *self.stage.options(), *ANSWER],
            ["edit", folder.name, "--field", "tier=brass", "--method", "erratum", *self.stage.options()],
        )
        outcome = self.stage.run(arguments := list(rng.choice(commands)), home)
        what = " ".join(arguments[:2])
        if outcome.untidy:
            return Verdict("crash", f"{what}: {outcome.untidy}")
        if outcome.code:
            return Verdict("wrong", f"{what} failed and changed a file") if _files(folder) != files else verdict
        if LEDGER not in files and HEAD not in files:
            return verdict  # there was no session any more, and now there is a new one
        if before is None:
            return Verdict("wrong", f"{what} takes what cannot be read")
        after = _said(Sessions(folder.parent).find(folder.name))
        return verdict if after[0][: len(before[0])] == before[0] else Verdict("loss", f"{what} lost what there was")


def _talked(stage: Stage, home: Path) -> Iterator[str]:
    """Two conversations, the second a fork of the first; the name of each whenever a line was written."""
    home.mkdir(mode=0o700)
    text = stage.folder / "returns.txt"
    text.write_text(TEXT)
    model, ask = stage.options(), [*stage.options(), *ANSWER]
    lines: list[tuple[str, list[str]]] = [
        ("", ["compile", str(text), *model]),
        ("mine", ["ask", "May I go to Lund?", "--splice", "returns", "--session", "mine", *ask]),
        ("mine", ["ask", "And to Lund?", "--session", "mine", *ask]),
        ("other", ["session", "fork", "mine", "other"]),
        ("other", ["edit", "other", "--field", "tier=silver", "--method", "field", *model]),
        ("mine", ["edit", "mine", "--field", "tier=silver", "--method", "suffix", *model]),
        ("other", ["ask", "When?", "--session", "other", *ask]),
        ("mine", ["ask", "When?", "--session", "mine", *ask]),
        ("mine", ["session", "undo", "mine"]),
        ("mine", ["ask", "Who?", "--session", "mine", *ask]),
        ("other", ["session", "forget", "other", "2", "--method", "suffix", "-y", *model]),
        ("other", ["ask", "Who?", "--session", "other", *ask]),
    ]
    for name, arguments in lines:
        outcome = stage.run(arguments, home)
        if outcome.code:
            raise RuntimeError(f"{' '.join(arguments[:3])}: {outcome.err}")
        if name:
            yield name


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def _said(stored: SessionFolder) -> tuple[list[str], Any]:
    """The conversation of a session: questions, tokens, entries, fields, pending errata, rows and checksums."""
    state = stored.state
    return state.questions, (state.tokens, state.entries, state.fields, state.pending, state.rows, state.checksums)


# ---- damages. Each changes the files in place; `older` are copies of the session, `others` of the other one.


def _damage(rng: random.Random, files: dict[str, bytes], older: list[Files], others: list[Files]) -> None:
    one = rng.choice((LEDGER, LEDGER, LEDGER, HEAD, *files))
    data = files.get(one, b"")
    at = rng.randrange(len(data) + 1)
    donor = rng.choice((*older, *others))
    ways = (
        lambda: {one: data[:at]},
        lambda: {one: data[: -rng.choice((1, 2, 20, 100, 1000))]},
        lambda: {one: _flipped(rng, data)},
        lambda: {one: _flipped(rng, data)},
        lambda: {one: b""},
        lambda: {one: None},
        lambda: {one: data + rng.choice((b"\n", b"x", b"{}\n", b'{"op": "undo"}\n', bytes(512), data, data[at:]))},
        lambda: {one: data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]},
        lambda: {one: data[at:]},
        lambda: {one: _lines(rng, data)},
        lambda: {one: donor.get(one)},
        lambda: {one: donor.get(rng.choice([*donor]))},
        lambda: {name: donor.get(name) for name in rng.sample([*donor], rng.randrange(1, len(donor) + 1))},
        lambda: {LEDGER: donor[LEDGER], HEAD: donor[HEAD]},
    )
    for name, new in rng.choice(ways)().items():
        if new is None:
            files.pop(name, None)
        else:
            files[name] = new


def _flipped(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _lines(rng: random.Random, data: bytes) -> bytes:
    """With a line left out, doubled or moved."""
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return data
    at = rng.randrange(len(lines))
    line = lines.pop(at)
    return b"".join(rng.choice((lines, [*lines[:at], line, line, *lines[at:]], [line, *lines], [*lines, line])))
