"""Where a text is cut into blocks, and which of them refer to each other."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.errors import SkillError
from notes_cli.text.blocks import Blocks, block_starts, references

TEXT = """Intro.

# One

a: 1
b: 2

```
# no heading
```

  ## Two
last line"""


def letters(text: str) -> list[bytes]:
    """A token a byte."""
    return [bytes([byte]) for byte in text.encode()]


def parts(text: str, blocks: Blocks, tokens: list[bytes] | None = None) -> list[str]:
    """The text, cut."""
    tokens = letters(text) if tokens is None else tokens
    starts = block_starts(text, tokens, blocks) or (0,)
    assert starts[0] == 0 and all(one < other for one, other in pairwise(starts))
    return [b"".join(tokens[first:last]).decode() for first, last in pairwise((*starts, len(tokens)))]


def test_before_each_heading() -> None:
    """The text before the first one is a block; a comment in code is not a heading."""
    found = parts(TEXT, "headings")
    assert [part.split("\n")[0] for part in found] == ["Intro.", "# One", "  ## Two"]
    assert "".join(found) == TEXT


@pytest.mark.parametrize("text", ["# Only one\n\ntext", "no heading"])
def test_without_headings(text: str) -> None:
    """There is nothing to cut at: the message offers a number instead."""
    with pytest.raises(SkillError, match="no headings to cut it at"):
        block_starts(text, letters(text), "headings")


def test_between_paragraphs_if_there_are_enough_else_between_lines() -> None:
    """Paragraphs are not cut if there are enough of them for the blocks, and code never is."""
    assert parts("a\nb\n\nc\nd", 2) == ["a\nb\n\n", "c\nd"]
    assert parts("a\nb\n\nc\nd", 3) == ["a\n", "b\n\n", "c\nd"]
    assert parts("a\n \n \nb", 2) == ["a\n \n \n", "b"]
    assert any(part.count("```") == 2 for part in parts(TEXT, 64))


def test_parts_are_even() -> None:
    """Of many places, those that give nearly equal parts are taken."""
    text = "\n\n".join(["four"] * 16)
    assert {len(part) for part in parts(text, 4)} == {22, 24}
    assert [len(part) for part in parts("x" * 50 + "\n1\n2\n3", 3)] == [51, 2, 3]


@pytest.mark.parametrize(("text", "asked", "found"), [("one line", 4, 1), ("a\nb\nc", 64, 3), ("a\nb", 1, 1)])
def test_fewer_than_asked_for(text: str, asked: int, found: int) -> None:
    """As many as there are lines."""
    assert len(parts(text, asked)) == found


def test_a_place_inside_a_token_is_dropped() -> None:
    """A cut is made where a token begins; SentencePiece's space before the text does not count."""
    assert parts("ab\ncd\nef", 3, [b"ab\nc", b"d\n", b"ef"]) == ["ab\ncd\n", "ef"]
    assert block_starts("ab\ncd", [b" ab", b"\n", b"cd"], 2) == (0, 2)
    with pytest.raises(SkillError, match="are not those of the text"):
        block_starts("ab", [b"x"], 2)


@given(
    lines=st.lists(st.text("aé# `\t", max_size=6), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 60)),
    blocks=st.integers(2, 64),
)
def test_any_text_is_cut_where_tokens_begin(lines: list[str], cuts: set[int], blocks: int) -> None:
    """Whatever the text and its tokens: joined, the blocks are the text; none is empty, and none is one too many."""
    data = "\n".join(["x", *lines]).encode()
    ends = [*sorted(cut for cut in cuts if cut < len(data)), len(data)]
    tokens = [data[first:last] for first, last in pairwise([0, *ends])]
    starts = block_starts(data.decode(), tokens, blocks) or (0,)
    assert starts[0] == 0 and len(starts) <= blocks
    assert all(one < other for one, other in pairwise((*starts, len(tokens))))
    for start in starts[1:]:
        assert b"".join(tokens[:start]).endswith(b"\n")


def test_blocks_that_refer_to_each_other() -> None:
    """A warning for a field that a block without its value names, as a whole word."""
    texts = ["date: 1\nthe date", "If the Date is over.", "update, up-to-date, dates", "ship to: see date"]
    blocks_of = {"date": {0}, "ship_to": {0, 2}}
    assert references(texts, blocks_of) == [
        "block 2 refers to date, whose value is in block 1: decisions may suffer; keep them in one block",
        "block 4 refers to date, whose value is in block 1: decisions may suffer; keep them in one block",
        "block 4 refers to ship_to, whose value is in blocks 1 and 3: decisions may suffer; keep them in one block",
    ]
    assert references(texts[:1], {"date": {0}}) == []
