"""Hostile ledgers of sessions: read, shown, taken back, forked, exported, and now and then gone on with."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from bench.faults.frame import ACCEPTED, FOUND, REFUSED, SCRATCH, Budget, Row, Verdict, chance, tried
from bench.faults.mutate import bytes_changed, text_changed, twisted
from bench.faults.parts import UnreadableError, apart
from bench.faults.stage import ANSWER, TEXT, Stage
from notes_cli.engine.pieces import Reason
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.ledger import Ledger, LedgerError, chain, read_ledger
from notes_cli.sessions.lines import ROWS
from notes_cli.sessions.listing import HEAD, LEDGER

TITLE = (
    "Ledgers of sessions, mutated in their bytes, in the JSON of a line (other types, numbers out of range, parts left "
    "out or doubled), in the order of their lines, and with other token ids in the ledger and its rows alike, most "
    "with right checksums; each is read, every twentieth is shown, taken back, forked, exported and asked on."
)
FAILS = (
    "a traceback, a signal, more than 10 s, an answer other than one clear line, or a wrong accept: a ledger is taken "
    "whose tokens, rows, pieces, skills and fields contradict each other, or have other types than docs/format.md says."
)
CASES, SHARE = 20_000, 2
DEEP = 20  # every so manieth goes through the commands


def run(budget: Budget, seed: int) -> Row:
    return tried(Ledgers(ground(), seed), budget, patience=60, say="ledgers")


@cache
def ground() -> Stage:
    """A stage for ledgers and archives."""
    return Stage.set(SCRATCH / "ground")


class Ledgers:
    """Judges mutants of two ledgers that have all that ledgers can have."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.seed = stage, seed
        self.home = begun(stage)
        self.sound = [(self.home / "sessions" / name / LEDGER).read_bytes() for name in ("mine", "other")]

    def __call__(self, number: int) -> Verdict:
        rng = chance(self.seed, number)
        data = lied(rng, rng.choice(self.sound), self.sound)
        verdict = judged(data)
        if number % DEEP == 0 and verdict.outcome in ("accepted", "refused"):
            verdict = self._through(rng, number // DEEP, data, verdict)
        if verdict.outcome not in ("accepted", "refused"):
            (FOUND / f"ledger-{number}.jsonl").write_bytes(data)
        return verdict

    def _through(self, rng: random.Random, number: int, data: bytes, verdict: Verdict) -> Verdict:
        """Run one command on the damaged ledger. Every other ledger has rows of the tokens that it names."""
        home = self.stage.copied(self.home, "home")
        folder = home / "sessions" / "mine"
        (folder / LEDGER).write_bytes(data)
        (folder / HEAD).unlink()
        if number % 2:
            agree(folder)
        commands: Sequence[list[str]] = (
            ["session", "show", "mine"],
            ["session", "ls", "--json"],
            ["session", "fork", "mine", "fork"],
            ["session", "export", "mine", "-"],
            ["ask", "Last?", "--session", "mine", *self.stage.options(), *ANSWER],
            ["edit", "mine", "--field", "date=2026-09-09", *self.stage.options()],
            ["session", "compact", "mine", *self.stage.options()],
            ["session", "forget", "mine", "1", *self.stage.options()],
            ["session", "undo", "mine"],
            ["session", "rm", "mine", "-y"],
        )
        for arguments in rng.sample(commands, 3):
            outcome = self.stage.run(arguments, home)
            if outcome.untidy:
                return Verdict("crash", f"{' '.join(arguments[:2])}: {outcome.untidy}")
            if (
                verdict == REFUSED
                and outcome.code == 0
                and arguments[1] not in ("ls", "rm")
                and (folder / LEDGER).exists()
            ):
                return Verdict("wrong", f"{' '.join(arguments[:2])} takes a ledger that cannot be read")
            if arguments[1] == "rm":
                break
        return verdict


def begun(stage: Stage) -> Path:
    """Return a home with two sessions: turns, skills, applied and pending errata, edited KV entries, an undo, a
    compaction, a cut, and text forgotten for good."""
    home = stage.home("begun")
    if home.exists():
        return home
    home.mkdir(mode=0o700)
    text = stage.folder / "returns.txt"
    text.write_text(TEXT)
    model, ask = stage.options(), [*stage.options(), *ANSWER]
    lines = [["compile", str(text), *model]]
    for name in ("other", "mine"):
        lines += [
            ["ask", "May I?", "--splice", "returns", "--session", name, *ask],
            ["edit", name, "--field", "tier=silver", "--method", "erratum", *model],
            ["ask", "And now?", "--session", name, *ask],
            ["ask", "Not this.", "--session", name, *ask],
            ["session", "undo", name],
            ["edit", name, "--field", "tier=blue", "--method", "erratum", *model],
        ]
    lines += [
        ["edit", "other", "--field", "date=2026-07-01", "--method", "suffix", *model],
        ["session", "compact", "other", *model],
        ["ask", "Then?", "--session", "other", *ask],
        ["session", "forget", "mine", "1", *model],
        ["session", "forget", "other", "2", "--method", "suffix", "-y", *model],
        ["ask", "And then?", "--session", "other", *ask],
        ["session", "forget", "other", "1", *model],
    ]
    for arguments in lines:
        outcome = stage.run(arguments, home)
        if outcome.code:
            raise RuntimeError(f"{' '.join(arguments[:3])}: {outcome.err}")
    return home


def judged(data: bytes) -> Verdict:
    """Judge a ledger by the reader's result and its consistency."""
    try:
        ledger = read_ledger(data)
    except LedgerError:
        return REFUSED
    why = contradicted(ledger)
    return Verdict("wrong", why) if why else ACCEPTED


def contradicted(ledger: Ledger) -> str:
    """Return contradictions within a ledger."""
    state, header = ledger.state, ledger.header
    count = len(state.tokens)
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in state.tokens):
        return "a token that is none"
    if len(state.rows) != count:
        return f"{len(state.rows)} rows of {count} tokens"
    for name, row in state.rows:
        if type(row) is not int or row < 0 or not isinstance(name, str) or (name and not ROWS.fullmatch(name)):
            return f"row {row!r} of {name!r}"
    texts = (header.cache, header.model, *header.identity.as_dict().values())
    if not all(isinstance(text, str) for text in texts) or not isinstance(header.prefix_only, bool):
        return "the first line"
    for entry in state.entries:
        origin = entry.origin
        words = (entry.kind, entry.name, entry.text, entry.how, origin.detail, origin.selected)
        numbers = (origin.moved, origin.rewritten, origin.blocks, origin.passed)
        if (
            not all(isinstance(word, str) for word in words)
            or not all(type(number) is int for number in numbers)
            or not isinstance(origin.reason, Reason)
            or not 0 <= entry.position <= entry.position + entry.tokens <= count
        ):
            return f"piece {entry}"[:200]
    for skill in state.skills:
        if type(skill.position) is not int or type(skill.tokens) is not int or not isinstance(skill.name, str):
            return f"skill {skill}"[:200]
        if not 0 <= skill.position <= skill.position + skill.tokens <= count:
            return f"skill at {skill.position} with {skill.tokens} of {count} tokens"
        for span in skill.fields:
            if not 0 <= span.first < span.last <= skill.tokens or skill.text[span.start : span.end] != span.value:
                return f"field {span}"
    if not all(isinstance(text, str) for pair in (*state.values.items(), *state.pending.items()) for text in pair):
        return "a value that is not text"
    if not all(ROWS.fullmatch(name) for name in ledger.kept):
        return f"rows {ledger.kept}"
    return ""


def lied(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A mutant of a ledger."""
    way = rng.randrange(10)
    if way < 2:
        return bytes_changed(rng, data, others)
    lines = opened(data)
    if not lines:
        return bytes_changed(rng, data, others)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        if way < 6:
            lines[at] = twisted(rng, lines[at])
        elif way == 6:
            _retold(rng, lines)
        elif way == 7:
            lines = _reordered(rng, lines, opened(rng.choice(others)) or lines)
        elif way == 8:
            lines[at] = _renumbered(rng, lines[at])
        else:
            lines[at] = _reworded(rng, lines[at])
    return chain(json.dumps(line, ensure_ascii=rng.random() < 0.5).encode(errors="replace") for line in lines)


def opened(data: bytes) -> list[Any]:
    """Parse the lines of a ledger without their checksums; an empty list for bytes that are no JSON lines."""
    try:
        lines = [json.loads(line) for line in data.splitlines()]
    except (ValueError, RecursionError):
        return []
    for line in lines:
        if isinstance(line, dict):
            line.pop("checksum", None)
    return lines


def vouching(data: bytes, rows: Mapping[str, bytes]) -> bytes:
    """Return the ledger with the checksums of these K/V files, as a forger would write it; a mutant stays as it is."""
    lines = opened(data)
    if not all(isinstance(line, dict) for line in lines):
        return data
    for line in lines:
        name = line.get("rows")
        if isinstance(name, str) and name in rows:
            with suppress(UnreadableError):
                line["rows_checksum"] = apart(rows[name]).text("notes.checksum.head")
    return chain(json.dumps(line, ensure_ascii=False).encode(errors="replace") for line in lines) if lines else data


def _reordered(rng: random.Random, lines: list[Any], others: list[Any]) -> list[Any]:
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.randrange(5)
    if way == 0:
        lines[at], lines[other] = lines[other], lines[at]
    elif way == 1:
        lines.insert(at, lines[other])
    elif way == 2:
        del lines[at]
    elif way == 3:
        lines.insert(at, rng.choice(others))
    else:
        lines.insert(at, {"op": "undo", "time": "2026-06-01T12:00:00Z"})
    return lines or [{}]


def _retold(rng: random.Random, lines: list[Any]) -> None:
    """Other token ids, each a number that could be one."""
    parts = [
        part for line in lines if isinstance(line, dict) for key in ("pieces", "patches") for part in line.get(key, ())
    ]
    ids = rng.choice([part["tokens"] for part in parts if part.get("tokens")] or [[0]])
    ids[rng.randrange(len(ids))] = rng.choice((0, 258, 259, 260, 4096, 1 << 16, (1 << 31) - 1, rng.getrandbits(31)))


def _renumbered(rng: random.Random, value: Any) -> Any:
    """Every whole number in a value a little off, with some luck one of them."""
    if isinstance(value, list):
        return [_renumbered(rng, one) for one in value]
    if isinstance(value, dict):
        return {key: _renumbered(rng, one) for key, one in value.items()}
    if type(value) is int and rng.random() < 0.02:
        return rng.choice((value + 1, value - 1, -value, value << 32, 0, float(value), str(value), 1 << 31, 10**30))
    return value


def _reworded(rng: random.Random, value: Any) -> Any:
    if isinstance(value, list):
        return [_reworded(rng, one) for one in value]
    if isinstance(value, dict):
        return {key: _reworded(rng, one) for key, one in value.items()}
    return text_changed(rng, value) if isinstance(value, str) and rng.random() < 0.1 else value


def agree(folder: Path) -> None:
    """Write the ledger's tokens into the session's K/V files, with valid checksums, as a forger would."""
    try:
        stored = Sessions(folder.parent).find(folder.name)
    except Exception:
        return
    for path in folder.glob("*.gguf"):
        parts = apart(path.read_bytes())
        tensor = parts.tensor("notes.tokens")
        assert tensor is not None
        ids = [tensor.data[at : at + 4] for at in range(0, len(tensor.data), 4)]
        for token, (name, row) in zip(stored.state.tokens, stored.state.rows, strict=False):
            if name == path.name and row < len(ids):
                ids[row] = token.to_bytes(4, "little")
        tensor.data = b"".join(ids)
        path.write_bytes(parts.seal())
    files = {path.name: path.read_bytes() for path in folder.glob("*.gguf")}
    (folder / LEDGER).write_bytes(vouching((folder / LEDGER).read_bytes(), files))
