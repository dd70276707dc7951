"""Hostile snapshots of sessions: read, shown, undone, forked, exported, and sometimes asked on."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.faults.frame import ACCEPTED, REFUSED, SCRATCH, Mutants, check
from bench.faults.mutate import bytes_changed, json_changed, leaves_changed
from bench.faults.parts import UnreadableError, apart
from bench.faults.stage import Stage
from notes_cli.engine.pieces import Reason
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.state import ROWS, Snapshot, SnapshotError, read_snapshot

DEEP = 20  # every twentieth goes through the commands
COMMANDS = (
    *("session show mine", "session ls --json", "session fork mine fork", "session export mine -"),
    *("ask Last? --session mine", "edit mine --field date=2026-09-09", "session compact mine"),
    *("session forget mine 1", "session undo mine", "session rm mine -y"),
)
# A home with two sessions: turns, skills, applied and pending errata, edited KV entries, an undo, a compaction, a cut,
# and text forgotten for good.
BEGUN = (
    "compile returns.txt",
    *(
        command.format(name)
        for name in ("other", "mine")
        for command in (
            "ask 'May I?' --splice returns --session {}",
            "edit {} --field tier=silver --method erratum",
            "ask 'And now?' --session {}",
            "ask 'Not this.' --session {}",
            "session undo {}",
            "edit {} --field tier=blue --method erratum",
        )
    ),
    "edit other --field date=2026-07-01 --method suffix",
    "session compact other",
    "ask Then? --session other",
    "session forget mine 1",
    "session forget other 2 --method suffix -y",
    "ask 'And then?' --session other",
    "session forget other 1",
)


@cache
def stage() -> Stage:
    """A stage for snapshots and archives."""
    made = Stage.make(SCRATCH / "snapshots")
    made.prepared("begun", BEGUN)
    return made


class Snapshots(Mutants):
    """Mutants of the last snapshots of two sessions, which have all that snapshots can have."""

    cases, share, suffix = 20_000, 2, ".json"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.home = stage().folder / "begun"
        self.sound = [last_of(self.home / "sessions" / name).read_bytes() for name in ("mine", "other")]

    def mutant(self, rng: random.Random, number: int) -> bytes:
        return snapshot_changed(rng, rng.choice(self.sound), self.sound)

    def examine(self, rng: random.Random, number: int, data: bytes) -> str:
        outcome = examined(data)
        if number % DEEP == 0:
            self._commands(rng, number // DEEP, data, outcome)
        return outcome

    def _commands(self, rng: random.Random, number: int, data: bytes, outcome: str) -> None:
        """Run commands on the damaged session. Every other one has K/V files of the tokens that it names."""
        home = stage().copied(self.home)
        folder = home / "sessions" / "mine"
        last = last_of(folder)
        last.write_bytes(data)
        if number % 2:
            agree(folder)
        for command in rng.sample(COMMANDS, 3):
            done = stage().run(command, home)
            done.check_tidy(command)
            if command.startswith(("session rm", "session undo")):
                break
            unread = outcome == REFUSED and done.code == 0 and "session ls" not in command
            check(not unread, f"{command} takes a snapshot that cannot be read")


def last_of(folder: Path) -> Path:
    """The last snapshot of a session."""
    stored = SessionFolder(folder)
    return stored.path(stored.numbers[-1])


def examined(data: bytes) -> str:
    """The reader's outcome. Raises Failed for a snapshot that contradicts itself."""
    try:
        snapshot = read_snapshot(data)
    except SnapshotError:
        return REFUSED
    contradictions(snapshot)
    return ACCEPTED


def contradictions(snapshot: Snapshot) -> None:
    """Raise Failed where tokens, rows, pieces, skills and fields contradict each other, or have other types."""
    state, header = snapshot.state, snapshot.header
    count = len(state.tokens)
    check(all(type(token) is int and 0 <= token < 1 << 31 for token in state.tokens), "a token that is none")
    check(len(state.by_position) == count, f"{len(state.by_position)} rows of {count} tokens")
    for rows in state.rows:
        named = isinstance(rows.file, str) and ROWS.fullmatch(rows.file) and rows.file in snapshot.files
        check(type(rows.first) is int and rows.first >= 0 and bool(named), f"row {rows.first!r} of {rows.file!r}")
    texts = [header.cache, header.model, *header.identity.as_dict().values()]
    texts += [text for pair in (*state.fields.items(), *state.pending.items()) for text in pair]
    for entry in state.log:
        texts += [entry.kind, entry.name, entry.text, entry.how, entry.detail]
        check(isinstance(entry.reason, Reason), f"piece {entry}")
        check(0 <= entry.position <= entry.end <= count, f"{entry.tokens} tokens at {entry.position} of {count}")
    for skill in state.skills:
        first, last = state.span(skill.name)
        for span in skill.fields:
            inside = 0 <= span.first < span.last <= last - first
            check(inside and skill.text[span.start : span.end] == span.value, f"field {span}")
    check(all(isinstance(text, str) for text in texts), "no text")


def snapshot_changed(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A mutant of a snapshot, most of them with right checksums."""
    content = parsed(data)
    if rng.random() < 0.2 or content is None:
        return bytes_changed(rng, data, others)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice((json_changed, leaves_changed))(rng, content)
    return serialized(content, rng.random() < 0.5)


def parsed(data: bytes) -> Any:
    """The JSON of a snapshot; None for bytes that are none."""
    try:
        return json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None


def serialized(content: Any, ascii_only: bool = False) -> bytes:
    """A snapshot with the right checksum."""
    line = json.dumps(content, ensure_ascii=ascii_only).encode(errors="replace")
    return line + b"\n" + sha256(line).hexdigest().encode() + b"\n"


def vouching(data: bytes, rows: Mapping[str, bytes]) -> bytes:
    """The snapshot with the checksums of these K/V files, as a forger would write it; a mutant stays as it is."""
    content = parsed(data)
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        return data
    for name in content["files"].keys() & rows.keys():
        with suppress(UnreadableError):
            content["files"][name] = apart(rows[name]).text("notes.checksum.head")
    return serialized(content)


def agree(folder: Path) -> None:
    """Write the session's tokens into its K/V files, with valid checksums, as a forger would."""
    stored = Sessions(folder.parent).find(folder.name)
    try:
        state = stored.state
    except Exception:
        return
    files = {}
    for path in folder.glob("*.gguf"):
        parts = apart(path.read_bytes())
        tensor = next(one for one in parts.tensors if one.name == b"notes.tokens")
        ids = bytearray(tensor.data)
        for token, (name, row) in zip(state.tokens, state.by_position, strict=True):
            if name == path.name and 4 * row < len(ids):
                ids[4 * row : 4 * row + 4] = token.to_bytes(4, "little")
        tensor.data = bytes(ids)
        files[path.name] = parts.seal()
        path.write_bytes(files[path.name])
    for number in stored.numbers:
        stored.path(number).write_bytes(vouching(stored.path(number).read_bytes(), files))
