"""Tests joining skills: the order of texts, the places of fields, and contradictions."""

from __future__ import annotations

from pathlib import Path

from notes_cli.text.skill import joined, load_skill, load_source, parse_skill


def test_texts_are_in_order_and_fields_where_they_are() -> None:
    """Each span has its value; contradicting values are no field, which a warning reports."""
    first = parse_skill("date: 2026-06-01\ntier: gold\n\nFirst.", source="-", default="a")
    second = parse_skill("---\nname: b\ndescription: B.\n---\ntier: basic\nplan: team", source="-", default="b")
    both = joined([first, second], "ab")
    assert both.text == f"{first.text}\n\n{second.text}" and (both.name, both.description) == ("ab", "B.")
    assert both.values == {"date": "2026-06-01", "plan": "team"} and both.source == "-"
    assert all(both.text[one.start : one.end] == one.value for one in both.fields)
    assert len(both.warnings) == 1 and "'tier' has different values in a, b" in both.warnings[0]


def test_it_is_read_again_from_its_files(tmp_path: Path) -> None:
    """Its source names the files."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"This is {name}.")
    skills = [load_skill(tmp_path / f"{name}.txt") for name in ("b", "a")]
    both = joined(skills, "ab")
    (tmp_path / "a.txt").write_text("This is new.")
    again = load_source(both.source, "ab")
    assert again.name == "ab" and again.text == "This is b.\n\nThis is new." and again.source == both.source
    assert load_source(str(tmp_path / "a.txt")).text == "This is new."
