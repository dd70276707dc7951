"""YAML of users and strangers: limits on size and nesting, and duplicate keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.documents import parse_yaml, read_yaml
from notes_cli.errors import NotesError


def bomb(levels: int) -> str:
    """Ten times as many values at each level."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]" for i in range(levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' is there already, in line 1"),
        ("x:\n  'a': 1\n  a: 3", "line 3, column 3: the key 'a' is there already, in line 2"),
        ("{a: 1, a: 1}", "the key 'a' is there already"),
        ("a: &a [*a]", "line 1, column 8: the alias *a is inside of what it names"),
        (bomb(9), "aliases stand for more than 100,000 values"),
        (bomb(9).replace("[x, x", "{k: v").replace(", x", "").replace("]", "}", 1).replace("[*", "[<<: *"), "aliases"),
        *(("[" * 100_000, "nested too deeply"), ("- " * 10_000, "nested too deeply")),
        ("a: !!python/object:os.system {}", "the tag 'tag:yaml.org,2002:python/object:os.system' is unknown"),
        *(("a: *b", "undefined alias"), ("\x00", "unacceptable character")),
    ],
)
def test_beyond_the_bounds_in_one_line(text: str, says: str) -> None:
    """The error has place and reason; no text takes long, fills the memory or causes a traceback."""
    with pytest.raises(ValueError) as caught:
        parse_yaml(text)
    assert says in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_scalars_stay_as_written(tmp_path: Path) -> None:
    """YAML would make a truth value, an octal number, minutes and a date of them. Few aliases are allowed. A file that
    is too large is not parsed: PyYAML would take minutes."""
    assert parse_yaml("[on, 012, 1:30, 2026-06-01, 1e6]") == ["on", "012", "1:30", "2026-06-01", "1e6"]
    assert parse_yaml("a: &a [1, 2]\nb: *a\nc: [*a]") == {"a": ["1", "2"], "b": ["1", "2"], "c": [["1", "2"]]}
    path = tmp_path / "big.yaml"
    path.write_text("a: b\n" * 300_000)
    with pytest.raises(NotesError, match=r"big\.yaml is larger than 1 MiB"):
        read_yaml(path)


@given(st.text("ab:&*[]{}-? !|>'\"\n#,<", max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        parse_yaml(text)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
