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


def table(*rows: str) -> str:
    return "\n".join([rows[0], "|" + " :-: |" * (rows[0].count("|") - 1), *rows[1:]])


FIELDS: dict[str, dict[str, str]] = {
    # Keys of several words, in any script, with a Chinese colon; the name is spelled as in the text.
    "date: 2026-06-01\n- tier: gold\nship_to: New York": {"date": "2026-06-01", "tier": "gold", "ship_to": "New York"},
    "Rückgabefrist: 30 Tage": {"Rückgabefrist": "30 Tage"},
    "Ru\u0308ckgabefrist: 30 Tage": {"Rückgabefrist": "30 Tage"},  # the same letters, written apart
    "Größe: L\nstraße: Am Hang": {"Größe": "L", "straße": "Am Hang"},
    "日期: 2026-06-01": {"日期": "2026-06-01"},
    "日期\uff1a2026-06-01\n等级\uff1a金牌": {"日期": "2026-06-01", "等级": "金牌"},
    "date\uff1a2026-06-01": {"date": "2026-06-01"},
    "# Shop\n\nDelivery time: 3 days\nOpening hours: Monday to Friday\n\nWe ship.": {
        "Delivery time": "3 days",
        "Opening hours": "Monday to Friday",
    },
    "- Delivery time: 3 days\n- Ask first.\n- Opening hours: 9 to 5": {
        "Delivery time": "3 days",
        "Opening hours": "9 to 5",
    },
    "День: 1 июня\nЖдём дней: 30": {"День": "1 июня", "Ждём дней": "30"},
    "तिथि: 5": {"तिथि": "5"},
    "تاريخ: 2026-06-01": {"تاريخ": "2026-06-01"},
    "배송 기간: 3일": {"배송 기간": "3일"},
    "Délai de livraison: 3 jours": {"Délai de livraison": "3 jours"},
    "Price (EUR): 30": {"Price (EUR)": "30"},
    "Délai\u202f: 3 jours": {"Délai": "3 jours"},
    # Marks around data stay text: a corrected value gets the same ones.
    "**Rate limit:** 5 per day": {"Rate limit": "5 per day"},
    "- **Owner**: Anna Berg": {"Owner": "Anna Berg"},
    "- **基础地址\uff1a** `https://api.example/v1`": {"基础地址": "https://api.example/v1"},
    "Model: `small-2`": {"Model": "small-2"},
    'version: "2.1"': {"version": "2.1"},
    "- Contact: <https://example.org/help>": {"Contact": "https://example.org/help"},
    "Timeout: 30 seconds (default)": {"Timeout": "30 seconds (default)"},
    "Fee: up to 30 EUR": {"Fee": "up to 30 EUR"},
    "Price: < 5 EUR": {"Price": "< 5 EUR"},
    "Date: Wednesday, 3 June 2026": {"Date": "Wednesday, 3 June 2026"},
    "Log: ~/.ship/log.txt": {"Log": "~/.ship/log.txt"},
    "Log: `logs/ferry.txt`.": {"Log": "logs/ferry.txt"},
    "Fee: 12 EUR.": {"Fee": "12 EUR"},
    "Help: help@ferry.example": {"Help": "help@ferry.example"},
    "    - Timeout: 30 seconds": {"Timeout": "30 seconds"},  # an item in another one
    "- **Valid until**: 2026-05-11": {"Valid until": "2026-05-11"},
    "Pay day: the 27th\nWait time: 5 days": {"Pay day": "the 27th", "Wait time": "5 days"},
    "Responsible person: Dr. Farida Nasser": {"Responsible person": "Dr. Farida Nasser"},
    "Owner: J. R. Miller": {"Owner": "J. R. Miller"},
    # Records, named by their name, else by their first line. One alone is none, nor are such with a sentence as name.
    "- name: Desk lamp\n  state: off\n  Peak use: 40 W\n- name: Heater\n  state: off": {
        "Desk lamp state": "off",
        "Desk lamp Peak use": "40 W",
        "Heater state": "off",
    },
    "- id: 4\n  name: Lamp\n  state: off\n\n- id: 5\n  name: Heater\n  state: on": {
        "Lamp id": "4",
        "Lamp state": "off",
        "Heater id": "5",
        "Heater state": "on",
    },
    "- name: Lamp\n  state: off\n- other: 4": {"name": "Lamp", "state": "off", "other": "4"},
    "- step: Open it, slowly.\n  state: off\n- step: Shut it: now.\n  state: off": {"state": "off"},
    # Rows of tables, named by the first of two cells, and its title if it is a number.
    table("| Plan | Price |", "| Basic | 5 EUR |", "| **Large** | <https://x.example> |"): {
        "Basic": "5 EUR",
        "Large": "https://x.example",
    },
    table("| Days late | Fee |", "| 1-7 | 5 EUR |", "| 8+ | 9 EUR |"): {
        "Days late 1-7": "5 EUR",
        "Days late 8+": "9 EUR",
    },
    table("| Model | Input ($/1M) |", "| gpt-4.1 | $2.00 |"): {"gpt-4.1": "$2.00"},
    table("| Service | Owner |", "| Tides | Anna Berg |", "| Maps | - |"): {"Tides": "Anna Berg"},
    table("| Flag | Default |", "| `--port` | `north` |"): {"port": "north"},
    table("| File | Location |", "| Log | `logs/a|b.txt` |"): {"Log": "logs/a|b.txt"},
    table("| Fee | Price |", "| {{fee}} | 5 EUR |", "| a | {{fee}} |", "| Is it open | 5 EUR |"): {},
    table("| Plan | Price | Trips |", "| Basic | 5 EUR | 10 per day |"): {},
}


@pytest.mark.parametrize("body", FIELDS)
def test_fields_as_people_write_them(body: str) -> None:
    text, found, warnings = find_fields(body, {})
    assert {field.name: field.value for field in found} == FIELDS[body] and text == body
    assert not warnings or "{{" in body
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
