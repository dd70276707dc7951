"""Hostile ledgers of sessions: read, shown, undone, forked, exported, and sometimes asked on."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from bench.faults.frame import ACCEPTED, REFUSED, SCRATCH, Mutants, check
from bench.faults.mutate import bytes_changed, json_changed, leaves_changed, list_changed
from bench.faults.parts import UnreadableError, apart
from bench.faults.stage import Stage
from notes_cli.engine.pieces import Reason
from notes_cli.sessions import HEAD, LEDGER
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.state import ROWS, Ledger, LedgerError, chain, read_ledger

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
    """A stage for ledgers and archives."""
    made = Stage.make(SCRATCH / "ledgers")
    made.prepared("begun", BEGUN)
    return made


class Ledgers(Mutants):
    """Mutants of two ledgers that have all that ledgers can have."""

    cases, share, suffix = 20_000, 2, ".jsonl"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.home = stage().folder / "begun"
        self.sound = [(self.home / "sessions" / name / LEDGER).read_bytes() for name in ("mine", "other")]

    def mutant(self, rng: random.Random, number: int) -> bytes:
        return ledger_changed(rng, rng.choice(self.sound), self.sound)

    def examine(self, rng: random.Random, number: int, data: bytes) -> str:
        outcome = examined(data)
        if number % DEEP == 0:
            self._commands(rng, number // DEEP, data, outcome)
        return outcome

    def _commands(self, rng: random.Random, number: int, data: bytes, outcome: str) -> None:
        """Run commands on the damaged ledger. Every other one has K/V files of the tokens that it names."""
        home = stage().copied(self.home)
        folder = home / "sessions" / "mine"
        (folder / LEDGER).write_bytes(data)
        (folder / HEAD).unlink()
        if number % 2:
            agree(folder)
        for command in rng.sample(COMMANDS, 3):
            done = stage().run(command, home)
            done.check_tidy(command)
            if command.startswith("session rm"):
                break
            reads = "session ls" not in command and (folder / LEDGER).exists()
            unread = outcome == REFUSED and done.code == 0 and reads
            check(not unread, f"{command} takes a ledger that cannot be read")


def examined(data: bytes) -> str:
    """The reader's outcome. Raises Failed for a ledger that contradicts itself."""
    try:
        ledger = read_ledger(data)
    except LedgerError:
        return REFUSED
    contradictions(ledger)
    return ACCEPTED


def contradictions(ledger: Ledger) -> None:
    """Raise Failed where tokens, rows, pieces, skills and fields contradict each other, or have other types."""
    state, header = ledger.state, ledger.header
    count = len(state.tokens)
    check(all(type(token) is int and 0 <= token < 1 << 31 for token in state.tokens), "a token that is none")
    check(len(state.rows) == count, f"{len(state.rows)} rows of {count} tokens")
    for name, row in state.rows:
        named = isinstance(name, str) and (not name or ROWS.fullmatch(name))
        check(type(row) is int and row >= 0 and named, f"row {row!r} of {name!r}")
    texts = [header.cache, header.model, *header.identity.as_dict().values()]
    texts += [text for pair in (*state.values.items(), *state.pending.items()) for text in pair]
    ranges: list[tuple[Any, Any]] = []
    for entry in state.entries:
        origin = entry.origin
        texts += [entry.kind, entry.name, entry.text, entry.how, origin.detail]
        numbers = (origin.moved, origin.rewritten, origin.blocks)
        check(all(type(number) is int for number in numbers) and isinstance(origin.reason, Reason), f"piece {entry}")
        ranges.append((entry.position, entry.tokens))
    for skill in state.skills:
        texts.append(skill.name)
        ranges.append((skill.position, skill.tokens))
        for span in skill.fields:
            inside = 0 <= span.first < span.last <= skill.tokens
            check(inside and skill.text[span.start : span.end] == span.value, f"field {span}")
    check(all(isinstance(text, str) for text in texts) and isinstance(header.prefix_only, bool), "no text")
    for position, tokens in ranges:
        check(type(position) is int and type(tokens) is int, f"position {position!r}, {tokens!r} tokens")
        check(0 <= position <= position + tokens <= count, f"{tokens} tokens at {position} of {count}")
    check(all(ROWS.fullmatch(name) for name in ledger.kept), f"rows {ledger.kept}")


def ledger_changed(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A mutant of a ledger, most of them with right checksums."""
    lines = parsed(data)
    if rng.random() < 0.2 or not lines:
        return bytes_changed(rng, data, others)
    more = [{"op": "undo", "time": "2026-06-01T12:00:00Z"}, *parsed(rng.choice(others))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        inside = rng.choice((json_changed, leaves_changed))
        lines = list_changed(rng, lines, inside, more) if lines else [{}]
    return serialized(lines, rng.random() < 0.5)


def parsed(data: bytes) -> list[Any]:
    """The lines of a ledger without their checksums; none for bytes that are no JSON lines."""
    try:
        lines = [json.loads(line) for line in data.splitlines()]
    except (ValueError, RecursionError):
        return []
    for line in lines:
        if isinstance(line, dict):
            line.pop("checksum", None)
    return lines


def serialized(lines: Sequence[Any], ascii_only: bool = False) -> bytes:
    """Lines with right checksums."""
    return chain(json.dumps(line, ensure_ascii=ascii_only).encode(errors="replace") for line in lines)


def vouching(data: bytes, rows: Mapping[str, bytes]) -> bytes:
    """The ledger with the checksums of these K/V files, as a forger would write it; a mutant stays as it is."""
    lines = parsed(data)
    if not lines or not all(isinstance(line, dict) for line in lines):
        return data
    for line in lines:
        name = line.get("rows")
        if isinstance(name, str) and name in rows:
            with suppress(UnreadableError):
                line["rows_checksum"] = apart(rows[name]).text("notes.checksum.head")
    return serialized(lines)


def agree(folder: Path) -> None:
    """Write the ledger's tokens into the session's K/V files, with valid checksums, as a forger would."""
    try:
        stored = Sessions(folder.parent).find(folder.name)
    except Exception:
        return
    files = {}
    for path in folder.glob("*.gguf"):
        parts = apart(path.read_bytes())
        tensor = next(one for one in parts.tensors if one.name == b"notes.tokens")
        ids = bytearray(tensor.data)
        for token, (name, row) in zip(stored.state.tokens, stored.state.rows, strict=False):
            if name == path.name and 4 * row < len(ids):
                ids[4 * row : 4 * row + 4] = token.to_bytes(4, "little")
        tensor.data = bytes(ids)
        files[path.name] = parts.seal()
        path.write_bytes(files[path.name])
    (folder / LEDGER).write_bytes(vouching((folder / LEDGER).read_bytes(), files))
