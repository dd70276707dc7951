"""The decisions that `notes calibrate` measures a model by: held-out texts of world.py, and the sample skills.

    python -m training.battery > prompts/battery.yaml

Another seed than that of the experiments in bench/, so that what calibrate chooses is tested on other texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from training import world

SEED = 20261121
CASES = 36
SAMPLES = (  # of skills/: name, question, choices, field, new value, right with the old value and with the new one
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
    print("# Written by training/battery.py; texts that the training of the model that ships never saw.")
    print("cases:")
    for name, *asked in SAMPLES:
        print(entry([f"skill: ../skills/{name}"], *asked))
    for case in world.held_out(CASES, SEED):
        text = case.skills[case.target].text.split("\n")
        skill = ["text: |", *(f"  {line}" for line in text)]
        print(entry(skill, case.question, case.choices, case.field, case.new, (case.answer, case.answer_new)))


if __name__ == "__main__":
    main()
