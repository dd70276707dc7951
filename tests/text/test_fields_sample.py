"""Tests finding fields in lines like those of public skills: the labelled sample in field_lines.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from notes_cli.documents import read_yaml
from notes_cli.text.fields import find_fields
from notes_cli.text.keys import is_value

SAMPLE = read_yaml(Path(__file__).with_name("field_lines.yaml"))


def taken(sample: str | list[str]) -> bool:
    """Return True if the first line of a text has a field, or the row of a table, given as header and row."""
    if isinstance(sample, str):
        return any(field.end <= len(sample.split("\n")[0]) for field in find_fields(sample, {})[1])
    header, row = sample
    return bool(find_fields("\n".join([header, "|" + " --- |" * (header.count("|") - 1), row]), {})[1])


def test_fields_of_public_skills() -> None:
    """Every line is judged as it is labelled."""
    assert [line for line in SAMPLE["fields"] if not taken(line)] == []
    assert [line for line in SAMPLE["others"] if taken(line)] == []
    assert [text for text in SAMPLE["texts"] if find_fields(text, {}) != (text, (), [])] == []
    # A value is judged by its own words: parentheses after it do not count.
    assert is_value("12 EUR (ask the captain, he knows)") and not is_value("ask the captain (12 EUR)")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        *(("**Rate limit:** 5 per day", "Rate limit", "5 per day"), ("- **Owner**: Anna Berg", "Owner", "Anna Berg")),
        ("- **基础地址\uff1a** `https://api.example/v1`", "基础地址", "https://api.example/v1"),
        ("Model: `small-2`", "Model", "small-2"),
        ("- Contact: <https://example.org/help>", "Contact", "https://example.org/help"),
        *(('version: "2.1"', "version", "2.1"), ("Timeout: 30 seconds (default)", "Timeout", "30 seconds (default)")),
        *(("Fee: up to 30 EUR", "Fee", "up to 30 EUR"), ("Price: < 5 EUR", "Price", "< 5 EUR")),
        ("Date: Wednesday, 3 June 2026", "Date", "Wednesday, 3 June 2026"),
        ("Log: ~/.ship/log.txt", "Log", "~/.ship/log.txt"),
        *(("Fee: 12 EUR.", "Fee", "12 EUR"), ("Log: `logs/ferry.txt`.", "Log", "logs/ferry.txt")),
        ("Help: help@ferry.example", "Help", "help@ferry.example"),
        ("    - Timeout: 30 seconds", "Timeout", "30 seconds"),  # an item in another one
        ("- **Valid until**: 2026-05-11", "Valid until", "2026-05-11"),
    ],
)
def test_data_is_a_value(line: str, name: str, value: str) -> None:
    """Marks around it stay text: a corrected value gets the same marks."""
    text, fields, _ = find_fields(line, {})
    assert [(field.name, field.value) for field in fields] == [(name, value)] and text == line
    assert text[fields[0].start : fields[0].end] == value


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        (
            ["| Plan | Price |", "| Basic | 5 EUR |", "| **Large** | <https://x.example> |"],
            {"Basic": "5 EUR", "Large": "https://x.example"},
        ),
        (
            ["| Days late | Fee |", "| 1-7 | 5 EUR |", "| 8+ | 9 EUR |"],
            {"Days late 1-7": "5 EUR", "Days late 8+": "9 EUR"},
        ),
        (["| Model | Input ($/1M) |", "| gpt-4.1 | $2.00 |"], {"gpt-4.1": "$2.00"}),
        (["| Service | Owner |", "| Tides | Anna Berg |", "| Maps | - |"], {"Tides": "Anna Berg"}),
        (["| Flag | Default |", "| `--port` | `north` |"], {"port": "north"}),
        (["| File | Location |", "| Log | `logs/a|b.txt` |"], {"Log": "logs/a|b.txt"}),
        (["| Fee | Price |", "| {{fee}} | 5 EUR |", "| a | {{fee}} |", "| Is it open | 5 EUR |"], {}),
        (["| Plan | Price | Trips |", "| Basic | 5 EUR | 10 per day |"], {}),
    ],
)
def test_a_row_of_a_table_gives_its_values(rows: list[str], fields: dict[str, str]) -> None:
    """Named by the first of two cells, and its title if it is a number."""
    body = "\n".join([rows[0], "|" + " :-: |" * (rows[0].count("|") - 1), *rows[1:]])
    text, found, _ = find_fields(body, {})
    assert {field.name: field.value for field in found} == fields and text == body
    assert all(text[field.start : field.end] == field.value for field in found)


def test_a_declared_field_may_have_any_value() -> None:
    """Its line is its place, even if the value occurs again; only a line with its name must agree, and no row."""
    for value in ("ask the captain first", "no waves, no wind", "`x y`", "**x y**"):
        line = f"Some prose\nRope note: {value}\nand more: {value}"
        for declared in (value, value.strip("`*")):
            text, fields, _ = find_fields(line, {"Rope note": declared})
            assert [(field.name, field.value) for field in fields] == [("Rope note", declared)] and text == line
            assert fields[0].end < text.index("and more")
    body = "Price: 5 EUR\n\n| Fee | Was |\n| --- | --- |\n| Price | 3 EUR |"
    _, fields, _ = find_fields(body, {"Price": "5 EUR"})
    assert [(field.name, field.value, field.start) for field in fields] == [("Price", "5 EUR", 7)]
    text, fields, _ = find_fields(body, {"Price": "5 EUR"}, ["Price"])
    assert text.endswith("| Price | 3 EUR |\n\nPrice: 5 EUR") and len(fields) == 1
