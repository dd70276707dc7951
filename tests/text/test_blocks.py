"""Tests dividing a text into blocks, and locating the tokens of fields."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.errors import SkillError
from notes_cli.text.fields import Blocks, block_starts, references, token_spans

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
    return [bytes([byte]) for byte in text.encode()]


def parts(text: str, blocks: Blocks, tokens: list[bytes] | None = None) -> list[str]:
    tokens = letters(text) if tokens is None else tokens
    starts = block_starts(text, tokens, blocks) or (0,)
    assert starts[0] == 0 and all(one < other for one, other in pairwise(starts))
    return [b"".join(tokens[first:last]).decode() for first, last in pairwise((*starts, len(tokens)))]


def test_before_each_heading() -> None:
    """The text before the first heading is a block; a comment in code is not a heading."""
    found = parts(TEXT, "headings")
    assert [part.split("\n")[0] for part in found] == ["Intro.", "# One", "  ## Two"]
    assert "".join(found) == TEXT


def test_between_paragraphs_if_there_are_enough_else_between_lines() -> None:
    """Of many places, those that give nearly equal parts are chosen; there are at most as many parts as lines."""
    assert parts("a\nb\n\nc\nd", 2) == ["a\nb\n\n", "c\nd"]
    assert parts("a\nb\n\nc\nd", 3) == ["a\n", "b\n\n", "c\nd"]
    assert parts("a\n \n \nb", 2) == ["a\n \n \n", "b"]
    assert any(part.count("```") == 2 for part in parts(TEXT, 64))
    text = "\n\n".join(["four"] * 16)
    assert {len(part) for part in parts(text, 4)} == {22, 24}
    assert [len(part) for part in parts("x" * 50 + "\n1\n2\n3", 3)] == [51, 2, 3]
    assert [len(parts(text, asked)) for text, asked in (("one line", 4), ("a\nb\nc", 64), ("a\nb", 1))] == [1, 3, 1]


def test_a_place_inside_a_token_is_dropped() -> None:
    """Blocks begin where a token begins; SentencePiece's space before the text does not count."""
    assert parts("ab\ncd\nef", 3, [b"ab\nc", b"d\n", b"ef"]) == ["ab\ncd\n", "ef"]
    assert block_starts("ab\ncd", [b" ab", b"\n", b"cd"], 2) == (0, 2)
    with pytest.raises(SkillError, match="are not those of the text"):
        block_starts("ab", [b"x"], 2)
    # A tokenizer that normalises would put the field at a wrong place.
    with pytest.raises(SkillError, match="are not those of the text"):
        token_spans("A b", [b"a", b" b"], [(2, 3)])
    assert token_spans("A b", [b"a", b" b"], []) == []
    assert token_spans("a b", [b" a", b" ", b"b"], [(2, 3)]) == [(2, 3)]  # SentencePiece puts a blank before the text


@given(
    lines=st.lists(st.text("aé# `\t", max_size=6), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 60)),
    blocks=st.integers(2, 64),
)
def test_any_text_is_cut_where_tokens_begin(lines: list[str], cuts: set[int], blocks: int) -> None:
    """For any text and tokens, no block is empty, each begins a line, and there are not too many."""
    data = "\n".join(["x", *lines]).encode()
    ends = [*sorted(cut for cut in cuts if cut < len(data)), len(data)]
    tokens = [data[first:last] for first, last in pairwise([0, *ends])]
    starts = block_starts(data.decode(), tokens, blocks) or (0,)
    assert starts[0] == 0 and len(starts) <= blocks
    assert all(one < other for one, other in pairwise((*starts, len(tokens))))
    assert all(b"".join(tokens[:start]).endswith(b"\n") for start in starts[1:])


def test_blocks_that_refer_to_each_other() -> None:
    """A block that names a field, as a whole word, without having its value is warned about."""
    texts = ["date: 1\nthe date", "If the Date is over.", "update, up-to-date, dates", "ship to: see date"]
    blocks_of = {"date": {0}, "ship_to": {0, 2}}
    assert references(texts, blocks_of) == [
        "block 2 refers to date, whose value is in block 1: decisions may suffer; keep them in one block",
        "block 4 refers to date, whose value is in block 1: decisions may suffer; keep them in one block",
        "block 4 refers to ship_to, whose value is in blocks 1 and 3: decisions may suffer; keep them in one block",
    ]
    assert references(texts[:1], {"date": {0}}) == []


@given(st.data())
def test_the_span_is_the_smallest_that_covers(data: st.DataObject) -> None:
    """For any tokens, the span covers the value, and no smaller one would."""
    text = data.draw(st.text(min_size=1, max_size=30))
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=10)) - {len(raw)})
    tokens = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    ((first, last),) = token_spans(text, tokens, [(start, end)])
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    low, high = len(text[:start].encode()), len(text[:end].encode())
    assert offsets[first] <= low < offsets[first + 1]
    assert offsets[last - 1] < high <= offsets[last]
