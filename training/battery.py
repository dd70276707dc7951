"""The decisions that `notes calibrate` measures a model by: policies in the words of the sample skills, and those.

    python -m training.battery > prompts/battery.yaml

Their words are ones that any model knows; which field decides what, limits and outcomes are drawn. Another seed than
that of the experiments in bench/, so that what calibrate chooses is tested on other texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from notes_cli.text.skill import load_skill
from training.tiny import world

SEED = "battery 20261123"
CASES = 36
LEVEL = world.Level(
    rules=(1, 3), rows=(2, 4), spare=(0, 0), fillers=(0, 1), heading=0.8, kinds=world.KINDS, below=0.0, sample=1.0
)
SKILLS = Path(__file__).parent.parent / "tests" / "skills"
SAMPLES = (  # of SKILLS: name, question, choices, field, new value, right with the old value and with the new one
    ("returns", "May I return this?", ("accepted", "refused"), "date", "2026-07-01", ("accepted", "refused")),
    ("returns", "What is the shipping?", ("free", "reduced", "full"), "tier", "silver", ("free", "reduced")),
    ("returns", "Which approval applies?", ("manual", "automatic"), "amount", "620", ("automatic", "manual")),
    ("support", "Do I get support?", ("weekly", "daily", "priority"), "plan", "team", ("daily", "priority")),
)


def quoted(text: object) -> str:
    """A YAML scalar or flow list; JSON is one."""
    return json.dumps(text, ensure_ascii=False)


def entry(skill: Sequence[str], question: str, choices: object, field: str, value: str, right: object) -> str:
    """One case in YAML."""
    lines = [*skill, f"question: {quoted(question)}", f"choices: {quoted(choices)}", f"field: {field}"]
    lines += [f"value: {quoted(value)}", f"right: {quoted(right)}"]
    return "\n".join(line.rstrip() for line in ("  - " + "\n    ".join(lines)).split("\n"))


def main() -> None:
    print("# Decisions that `notes calibrate` measures a model by (measure/battery.py says what a case holds).")
    print("# Written by training/battery.py.")
    print("cases:")
    for name, *asked in SAMPLES:
        text = load_skill(SKILLS / name).text
        print(entry(["text: |", *(f"  {line}" for line in text.split("\n"))], *asked))
    for case in world.cases(CASES, LEVEL, SEED, held=False):
        skill = ["text: |", *(f"  {line}" for line in case.draft.text().split("\n"))]
        print(entry(skill, case.question, case.rule.choices, case.rule.field, case.new, case.right))


if __name__ == "__main__":
    main()
