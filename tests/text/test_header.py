"""Tests front matter as users write it: invalid YAML is read line by line, and misplaced front matter is detected."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.errors import SkillError
from notes_cli.text.skill import load_skill, read_card, read_header

WANTED = ("ferry-trips", "Plans trips: ferries and buses.", "Read the tides.")


def written(tmp_path: Path, data: bytes) -> tuple[str, str, str, tuple[str, ...]]:
    """Return name, description, text and warnings of a file with these bytes, after comparing them with its card."""
    path = tmp_path / "ferry-trips" / "SKILL.md"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    skill = load_skill(path)
    assert read_card(path.parent) == (skill.name, skill.description)
    return skill.name, skill.description, skill.text, skill.warnings


@pytest.mark.parametrize(
    ("yaml", "line"),
    [
        ("name: ferry-trips\ndescription: Plans trips: ferries and buses.", 3),
        ("name: ferry-trips\ndescription\uff1aPlans trips: ferries and buses.", 3),
        ("argument-hint: [port] [day]\nname: ferry-trips\ndescription: 'Plans trips: ferries and buses.'", 2),
        ("name: ferry-trips\ndescription: >\n\tPlans trips:\n\tferries and buses.", 4),
        ("name: ferry-trips\ntool: @deck\ndescription: >-\n  Plans trips:\n  ferries and buses.", 3),
        ("name: ferry-trips\ntool: `deck`\ndescription: |\n  Plans trips: ferries\n\n  and buses.", 3),
        ("name: ferry-trips\nrate: %30\ndescription: Plans trips:\n  ferries and buses.", 3),
        ('name: ferry-trips\nbold: **deck**\ndescription: "Plans trips: ferries and buses."', 3),
        ('name: ferry-trips\ndescription: "Plans trips: ferries and buses.', 4),
        ("name: ferry-trips\ndescription: 'Plans trips:\n  ferries and buses.\nlicense: MIT", 6),
        ('name: other\nname: ferry-trips\ndescription: "Plans trips: ferries and buses."', 3),
        ("name: ferry-trips\ndescription: Plans trips:\nferries and buses.", 3),
        ('  name: ferry-trips\n  hint: [a] [b]\n  description: "Plans trips: ferries and buses."', 3),
        ('"name": "ferry-trips"\nhint: [a] b\n\'description\': "Plans trips: ferries and buses."', 3),
        ('name: ferry-trips\nmetadata: {\n  a: 1,,\n  }\ndescription: "Plans trips: ferries and buses."', 4),
        ('name: ferry-trips\na: &a [*a]\ndescription: "Plans trips: ferries and buses."', 3),
        ("name: ferry-trips\na: " + "[" * 5000 + '\ndescription: "Plans trips: ferries and buses."', 3),
        ('- item\nname: ferry-trips\ndescription: "Plans trips: ferries and buses."', 3),
    ],
)
def test_what_yaml_refuses_is_read_line_by_line(tmp_path: Path, yaml: str, line: int) -> None:
    """One warning has the line, and the text excludes the front matter."""
    name, description, text, warnings = written(tmp_path, f"---\n{yaml}\n---\nRead the tides.\n".encode())
    assert (name, description, text) == WANTED
    (warning,) = warnings
    assert f"not valid YAML: line {line}," in warning and warning.endswith("read line by line instead")


def test_a_text_in_brackets_is_a_text(tmp_path: Path) -> None:
    """YAML makes it a list, and agents read it as written."""
    name, description, _, warnings = written(
        tmp_path, b"---\nname: {{ferry-trips}}\ndescription: [Plans trips]\n---\nx"
    )
    assert (name, description) == ("ferry-trips", "[Plans trips]") and "line by line" in warnings[0]
    assert written(tmp_path, b"---\nname: ferry-trips\ndescription: [Plans]\n---\nx")[1] == "[Plans]"
    assert written(tmp_path, b"---\nname: [\n---\nx")[0] == "ferry-trips"  # of the folder
    *found, warnings = written(tmp_path, b"---\na b: c: d\n---\nx")  # nothing is readable: two warnings
    assert (*found, len(warnings)) == ("ferry-trips", "", "x", 2)


FINE = "---\nname: ferry-trips\ndescription: 'Plans trips: ferries and buses.'\n---\nRead the tides.\n"


@pytest.mark.parametrize(
    "data",
    [
        *(FINE.encode(), b"\xef\xbb\xbf" + FINE.encode(), b"\xef\xbb\xbf\r\n \n" + FINE.replace("\n", "\r\n").encode()),
        *(FINE.replace("\n", "\r").encode(), FINE.replace("---\n", "--- \t\n").encode()),
        *(FINE.replace("---\nRead", "-----\nRead").encode(), FINE.replace("---\nRead", "...\nRead").encode()),
        FINE.replace("---\nRead", "---Read").encode(),
        FINE.replace("---\nRead", "---\n---\nRead").replace("---\n---\nRead", "--- \n\nRead").encode(),
        FINE.encode("utf-16"),
    ],
)
def test_front_matter_is_found(tmp_path: Path, data: bytes) -> None:
    """It may follow a byte order mark and blank lines, with any line breaks and any spelling of its last line."""
    assert written(tmp_path, data) == (*WANTED, ())


def test_a_comment_before_it_is_left_out(tmp_path: Path) -> None:
    """A warning reports it; without front matter the comment is text. A rule in the text ends nothing."""
    text = FINE.replace("---\nRead the tides.\n", "---# Tides\n\n---\n\nRead.\n")
    assert written(tmp_path, text.encode())[2] == "# Tides\n\n---\n\nRead."
    for comment in ("<!-- x -->\n", "\ufeff<!-- x\n---\ny -->\n\n<!-- z --> \n"):
        *found, warnings = written(tmp_path, (comment + FINE).encode())
        assert tuple(found) == WANTED and "the comment before the front matter is not compiled" in warnings[0]
        broken = comment + FINE.replace("'", "")
        assert f"line {3 + comment.count(chr(10))}, column 25" in written(tmp_path, broken.encode())[3][1]
    assert written(tmp_path, b"<!-- x -->\nRead.")[2:] == ("<!-- x -->\nRead.", ())
    assert written(tmp_path, b"<!-- x\nRead.")[2:] == ("<!-- x\nRead.", ())


def test_front_matter_that_comes_too_late_or_is_not_utf8(tmp_path: Path) -> None:
    """It is compiled as text with a warning, as agents do; an example in code is not front matter. A text may begin
    with a rule."""
    for text in ("---\n\n# Tides\n\nRead.", "---\njust words\n---\nx", "---\n**Name:** x\n\nRead."):
        name, _, found, (warning,) = written(tmp_path, text.encode())
        assert (name, found) == ("ferry-trips", text) and "all of it is compiled as text" in warning
    *_, text, (warning,) = written(tmp_path, ("# Tides\n\n" + FINE).encode())
    assert text.startswith("# Tides") and "line 3 looks like front matter, which has to come first" in warning
    assert written(tmp_path, f"# Tides\n\n```\n{FINE}```\n".encode())[3] == ()
    # Bytes that are not UTF-8 are read as U+FFFD, with a warning: they are not compiled.
    data = FINE.replace("buses", "buses by Caf\u00e9").encode("latin-1")
    name, description, text, (warning,) = written(tmp_path, data)
    assert (name, text) == ("ferry-trips", "Read the tides.") and "Caf\ufffd" in description
    assert "the front matter has bytes that are not UTF-8" in warning


@pytest.mark.parametrize(
    ("yaml", "fields", "hoisted"),
    [
        ("hint: [a] [b]\nfields:\n  fee: 012\n  day: 2026-06-01", {"fee": "012", "day": "2026-06-01"}, []),
        (
            "hint: a: b\nfields:\n  # prices\n\n  fee: '@12'\n  day: {value: 1, hoist: true}",
            {"fee": "@12", "day": "1"},
            ["day"],
        ),
        ("hint: [a] b\nfields: {fee: 12}\nlicense: MIT", {"fee": "12"}, []),
        ("hint: [a] b\nfields:\nlicense: MIT", {}, []),
    ],
)
def test_declared_fields_are_read_beside_what_yaml_refuses(
    yaml: str, fields: dict[str, str], hoisted: list[str]
) -> None:
    header = read_header(f"---\n{yaml}\n---\nx", "s")
    assert (header.fields, header.hoisted, header.body) == (fields, hoisted, "x")


PARTS = [
    *("---", "--- ", "name: a", "description: b: c", "fields:", "  x: 1", "  y: {value: 2}", "<!--", "-->", ""),
    "\ufeff",
]
PARTS += ["\t- [", '"', "x", "...", "---x", "fields: {", "a b: c: d", "|", "name\uff1az", "'description': >"]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("\n".join) | st.text(max_size=200))
def test_any_front_matter_is_read_or_refused(text: str) -> None:
    """The compiled text is the end of the file, without closed front matter."""
    try:
        header = read_header(text, "s")
    except SkillError:
        return
    assert text.endswith(header.body)
    assert header.body == text or "---" in text.removesuffix(header.body)


@pytest.mark.parametrize(
    "text", ["<!-- -->" * 20_000, "\n" * 150_000, "---\n" + "a: b\n" * 9_000 + "---\nx", "---\n" * 40_000]
)
def test_long_ones_are_read_in_time(text: str) -> None:
    """Quadratic time would not end here."""
    assert text.endswith(read_header(text, "s").body)
