"""Tests where a text has its fields, and how they move when a value changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.errors import SkillError
from notes_cli.text.fields import Field, Hole, clean_value, fill, find_fields, token_spans


@pytest.mark.parametrize("end", "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
def test_a_line_ends_where_a_value_does(end: str) -> None:
    """No value contains any line break of str.splitlines, from any source, so that each can be set again."""
    for text in (f"date: 2026-06-01{end}More.", f"Delivery time: 3 days{end}fee: 12", f"日期\uff1a2026{end}x: 3"):
        assert find_fields(text, {})[1] == ()
    with pytest.raises(SkillError, match="more than one line"):
        clean_value("date", f"2026-06-01{end}More")


LONG = 150_000
HUGE = {
    "fields": "".join(f"key{i}: value {i}\n" for i in range(7000)),
    "names": "".join(f"Key x{i}y: value {i}\n" for i in range(7000)),
    "one field": "date: 1\n" * 18_000,
    "placeholders": "date: 1\n" + "{{date}} " * 15_000,
    "braces": "{{a" * 50_000 + "{{" + "b" * LONG,
    "near names": "".join(f"key{i}: {i}\n" for i in range(3000)) + "".join(f"{{{{yek{i}}}}} " for i in range(6000)),
    "fences": "```\na: b\n```\n" * 12_000 + "```\n" * 9_999 + "`" * LONG,
    "blanks": "a:" + " " * LONG + "x\nb: y" + " " * LONG + "z" + "\n" * LONG + "\t" * LONG,
    "tables": "| a | b |\n| - | - |\n" + "".join(f"| k{i} | {i} |\n" for i in range(9000)) + "|" * LONG + "`|" * LONG,
    "headings": "a: 1\na: 2\n" + "# " * LONG + "\n" + "# x\na: 3\n" * 9000 + "#" + " " * LONG + "**" * LONG,
    "colons": "日期\uff1a" * 50_000 + ": " * LONG,
}


@pytest.mark.parametrize("name", HUGE)
def test_long_texts_are_read_in_time(name: str) -> None:
    """Quadratic time would not end here."""
    text, fields, _ = find_fields(HUGE[name].strip(), {})
    assert all(text[field.start : field.end] == field.value for field in fields[:100])
    starts = token_spans(text, [bytes([byte]) for byte in text.encode()], [field[2:] for field in fields])
    assert len(starts) == len(fields)
    if name == "fields":  # declared ones are searched for, hoisted ones too
        values = {f"f{i}": f"{i}x" for i in range(1000)}
        body = "".join(f"{i}x {'w ' * 60}\n" for i in range(1000))
        assert len(find_fields(body, values)[1]) == len(find_fields(body, values, values)[1]) == 1000


@pytest.mark.parametrize(
    ("body", "declared", "text", "spans"),
    [
        ("```yaml\nhost: a\n```\nhost: b", {}, None, [("host", "b")]),  # an example in a fence is no field
        (
            "Before {{date}}, after {{ date }}.",
            {"date": "1 May"},
            "Before 1 May, after 1 May.",
            [("date", "1 May")] * 2,
        ),
        ("date: 1 May\nBefore {{date}}.", {}, "date: 1 May\nBefore 1 May.", [("date", "1 May")] * 2),
        ("date: {{date}}\nuntil: {{date}}", {"date": "1 June"}, None, [("date", "1 June")] * 2),
        ("Ship time: 3\n\nIn {{Ship  time}}.", {}, "Ship time: 3\n\nIn 3.", [("Ship time", "3")] * 2),
        ("On {{ 日期 }}.", {"日期": "1 June"}, "On 1 June.", [("日期", "1 June")]),
        (r"Write \{{name}} there.", {}, "Write {{name}} there.", []),
        ("deadline: 1 June", {"date": "1 June"}, "deadline: 1 June", [("date", "1 June")]),  # the author's name for it
        ("Pay 120 euros, not 1200.", {"amount": "120"}, "Pay 120 euros, not 1200.", [("amount", "120")]),
    ],
)
def test_placeholders_and_declared_values(
    body: str, declared: dict[str, str], text: str | None, spans: list[tuple[str, str]]
) -> None:
    """A placeholder anywhere is a span of its field; a declared value is one where it stands as a whole word."""
    found, fields, _ = find_fields(body, declared)
    assert text in (found, None)
    assert [(field.name, field.value) for field in fields] == spans
    assert [found[field.start : field.end] for field in fields] == [value for _, value in spans]


@pytest.mark.parametrize(
    ("body", "declared"),
    [
        *(("date: 1\n{{dote}}", {}), ("date: 1\n{{daet}}", {}), ("1 June, {{deadlines}}", {"deadline": "1 June"})),
        ("1 June, {{deadlne}}", {"deadline": "1 June"}),
    ],
)
def test_a_placeholder_that_is_nearly_a_field_is_a_typo(body: str, declared: dict[str, str]) -> None:
    """It must not reach the model; the error names the field, and the escape."""
    with pytest.raises(SkillError, match=r"\{\{d\w+\}\} is in the text.*Did you mean 'd.*Known fields: d") as caught:
        find_fields(body, declared)
    assert r"Write \{{" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "apiVersion: v1\nname: {{ .Release.Name }}\nimage: {{ .Values.image | quote }}\n{{- if .Values.x }}\n{{ end }}",
        "date: 1\n<li v-for='item in items'>{{ item }} on {{ user.name }}</li>",
        "items: 3\n{% for item in items %}{{ item }}{{ loop.index }}{% endfor %}",
        *("tier: gold\n{{#each tiers}}{{this}}{{/each}} {{{raw}}} {{ }} {{}} {{ a | b }}", "f: 1\n{{x}} {{g}} {{end}}"),
    ],
)
def test_the_braces_of_others_stay(body: str) -> None:
    """Jinja, Vue, Helm and Handlebars in a skill are text; one warning names the first, counts the rest, and has the
    escape. Escaped ones are not mentioned."""
    text, fields, warnings = find_fields(body, {})
    assert text == body and all(text[field.start : field.end] == field.value for field in fields)
    assert len(warnings) <= 1
    for warning in warnings:
        assert "as it is" in warning or "as they are" in warning
        assert r"write \{{" in warning and "\n" not in warning
    _, _, (warning,) = find_fields("{{a}} {{b}} {{a}} {{c}} {{d}} {{e}}", {})
    assert warning.startswith("{{a}}, {{b}}, {{c}} and 2 more stay as they are")
    assert find_fields(r"\{{a}}", {}) == ("{{a}}", (), [])


@pytest.mark.parametrize(
    ("body", "hoisted", "says"),
    [
        ("Nothing here.", [], r"nowhere in the text. Write \{\{date\}\}"),
        ("1 or 1", [], r"2 times in the text. Write \{\{date\}\}"),
        *(("1 or 1", ["date"], "occurs 2 times in the text"), ("date: 2", [], "date is '1', .* '2'")),
        ("date: 2", ["date"], "front matter says date is '1'"),
    ],
)
def test_a_declared_value_has_one_place(body: str, hoisted: list[str], says: str) -> None:
    """Neither of two equal numbers is guessed to be the field, and a line that contradicts it is refused."""
    with pytest.raises(SkillError, match=says):
        find_fields(body, {"date": "1"}, hoisted)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("# T\n\ndate: 1 June\n\nBefore {{date}}.", "# T\n\nBefore [date].\n\ndate: 1 June"),
        ("a\n- date: {{ date }}\nb", "a\nb\n\ndate: 1 June"),  # a line that gives it by a placeholder
        ("date: 1 June\ndate: 1 June\nuntil: {{date}}", "until: [date]\n\ndate: 1 June"),  # and no field `until`
        ("Until 1 June it is free.", "Until [date] it is free.\n\ndate: 1 June"),  # its only place
        ("deadline: 1 June", "deadline: [date]\n\ndate: 1 June"),
        ("Ask for it.", "Ask for it.\n\ndate: 1 June"),  # it need not be in the text
        (r"Write \{{date}}, {{date}}", "Write {{date}}, [date]\n\ndate: 1 June"),
        ("```\ndate: 1 June\n```\n{{date}}", "```\ndate: 1 June\n```\n[date]\n\ndate: 1 June"),  # an example
        ("date: 1 June", "date: 1 June"),  # there is nothing else
    ],
)
def test_a_hoisted_value_stands_at_the_end_alone(body: str, text: str) -> None:
    """Its lines move there, and its name replaces it everywhere else."""
    found, fields, warnings = find_fields(body, {"date": "1 June"}, ["date"])
    assert found == text and not warnings
    assert fields == (Field("date", "1 June", len(text) - 6, len(text)),)


def test_a_key_with_two_values_is_no_field() -> None:
    """A list of records is not a field, which a warning reports. Hoisted fields have a line each, in the order of
    their declaration; the others stay."""
    _, fields, warnings = find_fields("status: a\nstatus: b\nplan: c", {})
    assert [(field.name, field.value) for field in fields] == [("plan", "c")]
    assert warnings == ["no fields, as they have several values in the text: 'status'"]
    (warning,) = find_fields("a: 1\na: 2\nb: 1\nb: 2\nb: 3\n", {})[2]
    assert warning.endswith("several values in the text: 'a', 'b'")
    body = "tier: gold\nplan: {{plan}}\ndate: 1\nOn {{date}} by {{tier}}."
    text, fields, _ = find_fields(body, {"plan": "b", "date": "1", "tier": "gold"}, ["date", "tier"])
    assert text == "plan: b\nOn [date] by [tier].\n\ndate: 1\ntier: gold"
    assert [(field.name, field.value) for field in fields] == [("plan", "b"), ("date", "1"), ("tier", "gold")]


LINES = ["date: 7", "a: {{date}}", "{{date}}", "x", "", "7", "```", "- date: {{date}}"]


@given(st.lists(st.sampled_from(LINES), max_size=9))
def test_whatever_is_hoisted(lines: list[str]) -> None:
    """Any text is refused, or its last characters are the only place of the value and a field."""
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
    """In any text each span holds its value, and the rest does not change."""
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
