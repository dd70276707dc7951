"""Hostile YAML: skills with front matter, config.yaml, wordings of errata, ways of reasoning, decisions."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from bench.faults.frame import ACCEPTED, FOUND, REFUSED, SCRATCH, Budget, Row, Verdict, chance, tried
from bench.faults.mutate import bytes_changed, text_changed
from notes_cli.config import load_config
from notes_cli.errors import NotesError
from notes_cli.measure.battery import load_battery
from notes_cli.text.skill import load_skill

TITLE = (
    "YAML and the texts around it (front matter of skills, config.yaml, wordings, ways of reasoning, decisions), "
    "mutated in bytes and texts, with aliases that multiply, keys twice, deep nesting, tags, huge numbers, long lines, "
    "thousands of fields and placeholders."
)
FAILS = (
    "an exception other than the one-line refusal, more than 6 GiB or 20 s of processor time, or a wrong accept: a "
    "field whose value is not where its span is."
)
CASES, SHARE = 20_000, 2
SECONDS = 20

CONFIG = "model: /models/a.gguf\nctx-size: 8192\nthreads: 2\ntemp: 0.7\nask:\n  seed: 7\n  splice: [returns, support]\n"
SKILL = (
    "---\nname: returns\ndescription: A policy.\nfields:\n  date: {value: 2026-06-01, hoist: true}\n  tier: gold\n---\n"
    "# Returns\n\nFor {{tier}} customers. amount: 40\n\ndeadline: 2026-06-15\n\n```\ncode: {{not}}\n```\n"
)
BATTERY = (
    "cases:\n  - text: |\n      # Returns\n\n      date: 2026-06-01\n\n      Before 2026-06-15 they are accepted.\n"
    "    question: May I?\n    choices: [accepted, refused]\n    field: date\n    value: 2026-07-01\n"
    "    right: [accepted, refused]\n"
)
Sound = tuple[str, str, Callable[[Path], object]]


def run(budget: Budget, seed: int) -> Row:
    folder = SCRATCH / "documents"
    folder.mkdir()
    return tried(Documents(folder, seed), budget, patience=60, memory=6 << 30, say="documents")


class Documents:
    """Judges mutants of a text of each kind."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.sound: list[Sound] = [
            ("skill.md", SKILL, lambda path: load_skill(path)),
            ("skill.md", SKILL, lambda path: load_skill(path)),
            ("config.yaml", CONFIG, load_config),
            ("battery.yaml", BATTERY, load_battery),
        ]
        for name, sound, read in self.sound:
            (folder / name).write_text(sound, encoding="utf-8")
            read(folder / name)

    def __call__(self, number: int) -> Verdict:
        rng = chance(self.seed, number)
        name, sound, read = rng.choice(self.sound)
        way = rng.randrange(10)
        if way < 2:
            data = bytes_changed(rng, sound.encode(), [other.encode() for _, other, _ in self.sound])
        elif way < 7:
            data = text_changed(rng, sound).encode(errors="replace")
        else:
            data = rng.choice(BOMBS)(rng, sound).encode(errors="replace")
        path = self.folder / name
        path.write_bytes(data)
        verdict = self._judged(path, read)
        if verdict.outcome not in ("accepted", "refused"):
            (FOUND / f"document-{number}-{name}").write_bytes(data)
        return verdict._replace(why=f"{name}: {verdict.why}") if verdict.why else verdict

    def _judged(self, path: Path, read: Callable[[Path], object]) -> Verdict:
        begun = time.process_time()
        try:
            found = read(path)
        except NotesError as error:
            said = str(error)
            if "\n" in said or len(said) > 1000:
                return Verdict("wrong", f"no clear line: {said[:300]!r}")
            return self._timed(begun, REFUSED)
        for one in getattr(found, "fields", ()):
            if found.text[one.start : one.end] != one.value or not one.value:  # type: ignore[attr-defined]
                return Verdict("wrong", f"field {one}")
        return self._timed(begun, ACCEPTED)

    def _timed(self, begun: float, verdict: Verdict) -> Verdict:
        took = time.process_time() - begun
        return Verdict("hang", f"{took:.0f} s of processor time") if took > SECONDS else verdict


# ---- bombs: texts that are small, or of the size that people have, and cost much


def _aliases(rng: random.Random, sound: str) -> str:
    """Each level names the one before many times."""
    wide, levels = rng.choice((2, 9, 50)), rng.choice((3, 9, 30))
    lines = ["a0: &a0 x"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * wide)}]")
    return _in_front(rng, sound, "\n".join(lines))


def _merges(rng: random.Random, sound: str) -> str:
    lines = ["b0: &b0 {x: 1}"]
    lines += [f"b{n}: &b{n} {{<<: [*b{n - 1}, *b{n - 1}], y{n}: 1}}" for n in range(1, rng.choice((3, 20, 60)))]
    return _in_front(rng, sound, "\n".join(lines))


def _deep(rng: random.Random, sound: str) -> str:
    depth = rng.choice((60, 500, 20_000))
    return _in_front(rng, sound, rng.choice(("x: " + "[" * depth, "x: " + "{a: " * depth, "- " * depth, "? " * depth)))


def _long(rng: random.Random, sound: str) -> str:
    size = rng.choice((10_000, 150_000, 1_500_000))
    part = rng.choice(
        ("a", "a ", "é", "{", "{{", "}}", "key: value\n", "x: y ", "{{x}} ", "- ", "# h\n", "```\n", "\\", "&a ")
    )
    return sound + part * (size // len(part))


def _fields(rng: random.Random, sound: str) -> str:
    """Many declared fields, most of which are in the text once."""
    count = rng.choice((10, 200, 2_000))
    head = "".join(f"  f{n}: value-{n}\n" for n in range(count))
    body = " ".join(f"value-{n}" for n in range(count))
    return f"---\nname: a\ndescription: b\nfields:\n{head}---\n{body}\n"


def _tags(rng: random.Random, sound: str) -> str:
    tag = rng.choice(
        ("!!python/object/apply:os.system [id]", "!!binary aGk=", "!!set {a, b}", "!!timestamp 2026-99-99")
    )
    return _in_front(rng, sound, f"x: {tag}")


def _numbers(rng: random.Random, sound: str) -> str:
    number = rng.choice(("9" * 5000, "0x" + "f" * 5000, "1e999", ".nan", "-0", "1_000", "190:20:30", "0o17", "1" * 90))
    return _in_front(rng, sound, f"{rng.choice(('ctx-size', 'x', 'temp', 'seed', 'fields'))}: {number}")


def _twice(rng: random.Random, sound: str) -> str:
    lines = sound.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return "".join([*lines[:at], lines[at], *lines[at:]])


def _in_front(rng: random.Random, sound: str, text: str) -> str:
    """As lines of the front matter, or of the file."""
    return sound.replace("---\n", f"---\n{text}\n", 1) if sound.startswith("---") else f"{text}\n{sound}"


BOMBS: tuple[Callable[[random.Random, str], str], ...] = (
    *(_aliases, _merges, _deep, _long, _fields, _tags, _numbers, _twice, _twice, _twice),
)
