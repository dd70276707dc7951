"""Hostile YAML: skills with front matter, config.yaml, batteries of decisions."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from bench.faults.frame import ACCEPTED, Mutants, check, refused
from bench.faults.mutate import bytes_changed, text_changed
from notes_cli.config import load_config
from notes_cli.errors import NotesError
from notes_cli.measure.battery import load_battery
from notes_cli.text.skill import Skill, load_skill

SECONDS = 20  # of processor time
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
PARTS = ("a", "a ", "é", "{", "{{", "}}", "key: value\n", "x: y ", "{{x}} ", "- ", "# h\n", "```\n", "\\", "&a ")
TAGS = ("!!python/object/apply:os.system [id]", "!!binary aGk=", "!!set {a, b}", "!!timestamp 2026-99-99")
VALUES = ("9" * 5000, "0x" + "f" * 5000, "1e999", ".nan", "-0", "1_000", "190:20:30", "0o17", "1" * 90)
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "skill.md": (SKILL, load_skill),
    "config.yaml": (CONFIG, load_config),
    "battery.yaml": (BATTERY, load_battery),
}


class Documents(Mutants):
    """Mutants of a text of each kind, and texts that are small, or of a usual size, and cost much."""

    cases, share, memory, patience = 20_000, 2, 6 << 30, 150  # the time of the processor is limited, too

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.home = self.folder()
        for name, (sound, read) in READERS.items():
            (self.home / name).write_text(sound, encoding="utf-8")
            read(self.home / name)

    @staticmethod
    def kind(number: int) -> str:
        return ("skill.md", "skill.md", "config.yaml", "battery.yaml")[number % 4]

    def mutant(self, rng: random.Random, number: int) -> bytes:
        sound, _ = READERS[self.kind(number)]
        way = rng.randrange(10)
        if way < 2:
            return bytes_changed(rng, sound.encode(), [other.encode() for other, _ in READERS.values()])
        return (text_changed(rng, sound) if way < 7 else costly(rng, sound)).encode(errors="replace")

    def examine(self, rng: random.Random, number: int, data: bytes) -> str:
        path, (_, read) = self.home / self.kind(number), READERS[self.kind(number)]
        path.write_bytes(data)
        started = time.process_time()
        try:
            found, outcome = read(path), ACCEPTED
        except NotesError as error:
            found, outcome = None, refused(error)
        took = time.process_time() - started
        check(took <= SECONDS, f"{took:.0f} s of processor time", "hang")
        if isinstance(found, Skill):
            for one in found.fields:
                check(one.value and found.text[one.start : one.end] == one.value, f"field {one}")
        return outcome


def costly(rng: random.Random, sound: str) -> str:
    """The text with something that may cost much: in its front matter, or at the beginning of the file."""
    wide, levels, deep = rng.choice((2, 9, 50)), rng.choice((3, 9, 30)), rng.choice((60, 500, 20_000))
    aliases = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * wide)}]" for n in range(1, levels)]
    merges = [f"b{n}: &b{n} {{<<: [*b{n - 1}, *b{n - 1}], y{n}: 1}}" for n in range(1, 2 * levels)]
    many = range(deep // 10)  # declared fields, most of which are in the text once
    listed, named = "".join(f"  f{n}: value-{n}\n" for n in many), " ".join(f"value-{n}" for n in many)
    part, lines = rng.choice(PARTS), sound.splitlines(keepends=True)
    line = rng.choice(lines)
    heads = (
        "\n".join(["a0: &a0 x", *aliases]),  # each level names the one before many times
        "\n".join(["b0: &b0 {x: 1}", *merges]),
        rng.choice(("x: " + "[" * deep, "x: " + "{a: " * deep, "- " * deep, "? " * deep)),
        f"x: {rng.choice(TAGS)}",
        f"{rng.choice(('ctx-size', 'x', 'temp', 'seed', 'fields'))}: {rng.choice(VALUES)}",
    )
    head = rng.choice(heads)
    whole = sound.replace("---\n", f"---\n{head}\n", 1) if sound.startswith("---") else f"{head}\n{sound}"
    declared = f"---\nname: a\ndescription: b\nfields:\n{listed}---\n{named}\n"
    long = sound + part * (rng.choice((10_000, 150_000, 1_500_000)) // len(part))
    return rng.choice((*[whole] * 5, declared, long, *[sound.replace(line, line * 2, 1)] * 3))  # a key twice
