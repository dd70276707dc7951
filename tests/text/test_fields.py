"""Where fields stand in a text, and what moves when a value changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.errors import SkillError
from notes_cli.text.fields import Field, Hole, fill, find_fields


def spans(text: str, fields: tuple[Field, ...]) -> dict[str, list[str]]:
    """What stands at the spans of each field."""
    found: dict[str, list[str]] = {}
    for field in fields:
        found.setdefault(field.name, []).append(text[field.start : field.end])
    return found


def test_key_value_lines_are_fields() -> None:
    """Plain lines, list items and values of several words count."""
    text, fields, warnings = find_fields("date: 2026-06-01\n- tier: gold\nship_to: New York City\n", {})
    assert spans(text, fields) == {"date": ["2026-06-01"], "tier": ["gold"], "ship_to": ["New York City"]}
    assert not warnings


@pytest.mark.parametrize(
    "line",
    [
        "See https://example.org/a: it helps",
        "https://example.org",
        "opens: ",
        "at 12:30 we close",
        "time:12",
        "Note: ask the front desk first.",
        "Remember: is it open?",
        "two words: here",
        "    code: indented",
        "9lives: cat",
        "long: " + "x" * 81,
    ],
)
def test_sentences_urls_and_code_are_no_fields(line: str) -> None:
    """Only what the rule says is taken as a field."""
    assert find_fields(line, {}) == (line, (), [])


def test_fenced_code_holds_no_fields() -> None:
    """A YAML sample in a fence is an example, not a field."""
    body = "```yaml\nhost: a\n```\nhost: b"
    text, fields, _ = find_fields(body, {})
    assert spans(text, fields) == {"host": ["b"]}


def test_every_placeholder_becomes_a_span() -> None:
    """{{date}} is replaced wherever it stands, and each place is known."""
    text, fields, _ = find_fields("Before {{date}} yes, after {{ date }} no.", {"date": "2026-06-01"})
    assert text == "Before 2026-06-01 yes, after 2026-06-01 no."
    assert spans(text, fields) == {"date": ["2026-06-01", "2026-06-01"]}


def test_a_placeholder_may_take_the_value_of_a_line() -> None:
    """A value given once in the text serves the whole text."""
    text, fields, _ = find_fields("date: 2026-06-01\nBefore {{date}} yes.", {})
    assert text == "date: 2026-06-01\nBefore 2026-06-01 yes."
    assert len(fields) == 2


def test_a_line_with_a_placeholder_is_one_span() -> None:
    """`date: {{date}}` is not counted twice, and `until: {{date}}` is the field date."""
    text, fields, _ = find_fields("date: {{date}}\nuntil: {{date}}", {"date": "1 June"})
    assert spans(text, fields) == {"date": ["1 June", "1 June"]}


def test_an_unknown_placeholder_is_an_error_that_names_the_known() -> None:
    """A typo must not reach the model."""
    with pytest.raises(SkillError, match=r"\{\{dote\}\} stands in the text.*Known fields: date"):
        find_fields("date: 1\n{{dote}}", {})


def test_a_backslash_keeps_braces() -> None:
    """Texts about templates can be written."""
    assert find_fields(r"Write \{{name}} there.", {})[0] == "Write {{name}} there."


def test_a_declared_value_is_found_where_it_stands() -> None:
    """Front matter alone is enough if the value stands once in the text, as a whole word."""
    _, fields, _ = find_fields("Pay 120 euros, not 1200.", {"amount": "120"})
    assert fields == (Field("amount", "120", 4, 7),)


@pytest.mark.parametrize(("body", "times"), [("Nothing here.", "nowhere"), ("120 or 120", "2 times")])
def test_a_declared_value_in_no_clear_place_is_refused(body: str, times: str) -> None:
    """notes does not guess which of two equal numbers is the field."""
    with pytest.raises(SkillError, match=rf"{times} in the text. Write \{{\{{amount\}}\}}"):
        find_fields(body, {"amount": "120"})


def test_a_declared_field_wins_over_a_line_of_another_name() -> None:
    """The author said what `deadline: 2026-06-01` is called."""
    text, fields, _ = find_fields("deadline: 2026-06-01", {"date": "2026-06-01"})
    assert spans(text, fields) == {"date": ["2026-06-01"]}


def test_a_line_that_contradicts_the_front_matter_is_refused() -> None:
    """Two values for one field are an error, not a choice."""
    with pytest.raises(SkillError, match="front matter says date is '1', a line of the text says '2'"):
        find_fields("date: 2", {"date": "1"})


def test_a_key_with_two_values_is_no_field() -> None:
    """A list of records is not a field; the warning says so."""
    text, fields, warnings = find_fields("status: a\nstatus: b\nplan: c", {})
    assert spans(text, fields) == {"plan": ["c"]}
    assert "'status' stands with 2 different values" in warnings[0]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("# T\n\ndate: 1 June\n\nBefore {{date}}.", "# T\n\nBefore [date].\n\ndate: 1 June"),
        ("a\n- date: {{ date }}\nb", "a\nb\n\ndate: 1 June"),  # a line that gives it by a placeholder
        ("date: 1 June\ndate: 1 June\nuntil: {{date}}", "until: [date]\n\ndate: 1 June"),  # and no field `until`
        ("Until 1 June it is free.", "Until [date] it is free.\n\ndate: 1 June"),  # its only place
        ("deadline: 1 June", "deadline: [date]\n\ndate: 1 June"),
        ("Ask for it.", "Ask for it.\n\ndate: 1 June"),  # it need not stand in the text
        (r"Write \{{date}}, {{date}}", "Write {{date}}, [date]\n\ndate: 1 June"),
        ("```\ndate: 1 June\n```\n{{date}}", "```\ndate: 1 June\n```\n[date]\n\ndate: 1 June"),  # an example
        ("date: 1 June", "date: 1 June"),  # there is nothing else
    ],
)
def test_a_hoisted_value_stands_at_the_end_alone(body: str, text: str) -> None:
    """Its lines go there, and its name takes its place everywhere else."""
    found, fields, warnings = find_fields(body, {"date": "1 June"}, ["date"])
    assert found == text and not warnings
    assert fields == (Field("date", "1 June", len(text) - 6, len(text)),)


def test_hoisted_fields_have_a_line_each() -> None:
    """In the order in which they are declared; the others stay where they are."""
    body = "tier: gold\nplan: {{plan}}\ndate: 1\nOn {{date}} by {{tier}}."
    text, fields, _ = find_fields(body, {"plan": "b", "date": "1", "tier": "gold"}, ["date", "tier"])
    assert text == "plan: b\nOn [date] by [tier].\n\ndate: 1\ntier: gold"
    assert [(field.name, field.value) for field in fields] == [("plan", "b"), ("date", "1"), ("tier", "gold")]


@pytest.mark.parametrize(
    ("body", "says"), [("date: 2", "front matter says date is '1'"), ("1 or 1", "stands 2 times in the text")]
)
def test_hoisting_does_not_guess(body: str, says: str) -> None:
    """A line that contradicts the value, and two places that may be it, are refused as for any field."""
    with pytest.raises(SkillError, match=says):
        find_fields(body, {"date": "1"}, ["date"])


LINES = ["date: 7", "a: {{date}}", "{{date}}", "x", "", "7", "```", "- date: {{date}}"]


@given(st.lists(st.sampled_from(LINES), max_size=9))
def test_whatever_is_hoisted(lines: list[str]) -> None:
    """Any text is refused or has the value in one place that is a field: its last characters."""
    try:
        text, fields, _ = find_fields("\n".join(lines).strip(), {"date": "7"}, ["date"])
    except SkillError:
        return
    assert text.endswith("date: 7") and "{{" not in text
    assert fields[-1:] == (Field("date", "7", len(text) - 1, len(text)),)
    assert [field.name for field in fields].count("date") == 1


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


@given(parts=st.lists(st.tuples(WORDS, WORDS, WORDS), max_size=6), tail=WORDS)
def test_spans_hold_their_values_after_filling(parts: list[tuple[str, str, str]], tail: str) -> None:
    """Whatever stands around, each span holds its value and nothing else of the text changes."""
    text, expected, holes, values = "", "", [], {}
    for number, (before, old, new) in enumerate(parts):
        name = f"f{number}"
        start = len(text) + len(before)
        holes.append(Hole(start, start + len(old), name))
        values[name] = new
        text += before + old
        expected += before + new
    filled, fields = fill(text + tail, holes, values)
    assert filled == expected + tail
    assert [filled[f.start : f.end] for f in fields] == [new for _, _, new in parts]
    again, same = fill(filled, [Hole(f.start, f.end, f.name) for f in fields], values)
    assert (again, same) == (filled, fields)
