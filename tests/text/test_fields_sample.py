"""Measures finding fields in lines like those of public skills: the labelled sample in field_lines.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from notes_cli.documents import read_yaml
from notes_cli.text.fields import find_fields
from notes_cli.text.keys import is_value

SAMPLE = read_yaml(Path(__file__).with_name("field_lines.yaml"))


def taken(text: str) -> bool:
    """Return True if the first line of the text has a field."""
    return any(field.end <= len(text.split("\n")[0]) for field in find_fields(text, {})[1])


def rates(*parts: str) -> tuple[float, float]:
    """Return precision and recall on these parts of the sample."""
    fields = [taken(line) for part in parts for line in SAMPLE[part]["fields"]]
    others = [taken(line) for part in parts for line in SAMPLE[part]["others"]]
    return sum(fields) / (sum(fields) + sum(others)), sum(fields) / len(fields)


def test_fields_of_public_skills() -> None:
    """On the lines used to develop the rule, and on those labelled later (docs/skills.md)."""
    precision, recall = rates("drawn", "taken")
    assert precision >= 0.8 and recall >= 0.8
    precision, recall = rates("held_out")
    assert precision >= 0.8 and recall >= 0.65


@pytest.mark.parametrize(
    "line",
    [
        "Note: ask the captain first",
        "Warning: 3 steps follow",
        "Low fees (USD: 6, EUR: 2)",
        "Use good ropes: 3 of them",
        "- Prompt: |",
        "- Prompt: >",
        "- **Calm**: no waves, no wind",
        "- Speed: the ferry is fast",
        "- Crew: cooks, stewards and pilots",
        "- Anchor: look at the chain first",
        "User: hello",
        "Q: is it open? A: yes",
        "- Result: Sail -> Land",
        "- Stamp: yes",
        "Tides: <height> at <hour>",
        "| Fee | 12 EUR |",
        "1. **Fee**: 12 EUR",
        "- [ ] fee: 12 EUR",
    ],
)
def test_words_about_something_are_no_value(line: str) -> None:
    """Notes, explanations, dialog, templates, steps and tables are not values."""
    assert find_fields(line, {}) == (line, (), [])


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("**Rate limit:** 5 per day", "Rate limit", "5 per day"),
        ("- **Owner**: Anna Berg", "Owner", "Anna Berg"),
        ("- **基础地址\uff1a** `https://api.example/v1`", "基础地址", "https://api.example/v1"),
        ("Model: `small-2`", "Model", "small-2"),
        ("- Contact: <https://example.org/help>", "Contact", "https://example.org/help"),
        ('version: "2.1"', "version", "2.1"),
        ("- Formats: `gif`, `png`", "Formats", "`gif`, `png`"),
        ("- `timeout = 30`", "timeout", "30"),
        ("Timeout: 30 seconds (default)", "Timeout", "30 seconds (default)"),
        ("Fee: up to 30 EUR", "Fee", "up to 30 EUR"),
        ("Price: < 5 EUR", "Price", "< 5 EUR"),
        ("Date: Wednesday, 3 June 2026", "Date", "Wednesday, 3 June 2026"),
        ("Log: ~/.ship/log.txt", "Log", "~/.ship/log.txt"),
        ("Help: help@ferry.example", "Help", "help@ferry.example"),
    ],
)
def test_data_is_a_value(line: str, name: str, value: str) -> None:
    """Marks around it stay text: a corrected value gets the same marks."""
    text, fields, _ = find_fields(line, {})
    assert [(field.name, field.value) for field in fields] == [(name, value)] and text == line
    assert text[fields[0].start : fields[0].end] == value


@pytest.mark.parametrize("value", ["ask the captain first", "no waves, no wind", "`x y`", "**x y**"])
def test_a_declared_field_may_have_any_value(value: str) -> None:
    """Its line is its place, even if the value occurs again."""
    line = f"Some prose\nRope note: {value}\nand more: {value}"
    for declared in (value, value.strip("`*")):
        text, fields, _ = find_fields(line, {"Rope note": declared})
        assert [(field.name, field.value) for field in fields] == [("Rope note", declared)] and text == line
        assert fields[0].end < text.index("and more")


def test_a_value_is_judged_by_its_own_words() -> None:
    """Parentheses after it do not count."""
    assert is_value("12 EUR (ask the captain, he knows)") and not is_value("ask the captain (12 EUR)")
