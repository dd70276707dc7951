"""Batteries: decisions to measure a model by, read from YAML files. The one that ships is prompts/battery.yaml.

Each case is a skill, a question about it with its possible answers, and a field whose new value changes the
right one. It knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notes_cli.config import resource
from notes_cli.documents import read_yaml
from notes_cli.errors import NotesError
from notes_cli.text.fields import clean_value
from notes_cli.text.skill import Skill, load_skill, parse_skill

KEYS = {"text", "skill", "question", "choices", "field", "value", "right"}


@dataclass(frozen=True, slots=True)
class Case:
    """One decision. `right` are the right answers: with the value in the text, and with the new value."""

    skill: Skill
    question: str
    choices: tuple[str, ...]
    field: str
    value: str
    right: tuple[str, str]


def shipped_battery() -> list[Case]:
    """The cases that come with notes."""
    return load_battery(resource("prompts") / "battery.yaml")


def load_battery(path: Path) -> list[Case]:
    """The cases of a file, under `cases:`. Skill files are named as seen from there. Raise NotesError, with
    the number of the case, for anything that does not make a decision."""
    data = read_yaml(path)
    cases = data.get("cases") if isinstance(data, dict) else None
    if not isinstance(cases, list) or not cases:
        raise NotesError(f"{path} must hold `cases:`, a list of decisions")
    return [_case(entry, number, path) for number, entry in enumerate(cases, 1)]


def _case(entry: Any, number: int, path: Path) -> Case:
    try:
        return _read(entry, f"case-{number}", path.parent)
    except NotesError as error:
        raise NotesError(f"{path}, case {number}: {error.what}", error.remedy) from error


def _read(entry: Any, name: str, folder: Path) -> Case:
    if not isinstance(entry, dict):
        raise NotesError("it must be a mapping")
    unknown = sorted(set(entry) - KEYS)
    if unknown:
        raise NotesError(f"{unknown[0]!r} is unknown", f"Known: {', '.join(sorted(KEYS))}")
    skill = _skill(entry, name, folder)
    field, choices, right = _text(entry, "field"), _list(entry, "choices"), _list(entry, "right")
    value = clean_value(field, _text(entry, "value"))
    if field not in skill.values:
        raise NotesError(f"its text has no field {field!r}", f"Its fields: {', '.join(skill.values) or 'none'}")
    if skill.values[field] == value:
        raise NotesError(f"{field} is {value} in the text already")
    if len(choices) < 2 or len(set(choices)) < len(choices) or not all(choices):
        raise NotesError("choices must be two or more different answers")
    if len(right) != 2 or right[0] == right[1] or not set(right) <= set(choices):
        raise NotesError("right must be two different choices: with the old value, with the new one")
    return Case(skill, _text(entry, "question"), choices, field, value, (right[0], right[1]))


def _skill(entry: Mapping[str, Any], name: str, folder: Path) -> Skill:
    if ("text" in entry) == ("skill" in entry):
        raise NotesError("give it either text, or skill: a file")
    if "skill" in entry:
        return load_skill(folder / _text(entry, "skill"))
    return parse_skill(_text(entry, "text"), source="text", default=name)


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise NotesError(f"{key} is missing" if key not in entry else f"{key} must be text")
    return value.strip()


def _list(entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise NotesError(f"{key} must be a list")
    return tuple(part.strip() for part in value)
