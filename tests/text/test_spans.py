"""From characters to tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notes_cli.errors import SkillError
from notes_cli.text.spans import byte_offsets, token_spans


def test_a_value_and_the_tokens_that_touch_it() -> None:
    """A token that holds a part of the value belongs to it."""
    tokens = [b"date", b": 20", b"26", b"-06", b"\n"]
    assert token_spans("date: 2026-06\n", tokens, [(6, 13), (0, 4)]) == [(1, 4), (0, 1)]


def test_a_leading_blank_of_the_tokenizer() -> None:
    """SentencePiece puts a blank before the text."""
    assert token_spans("a b", [b" a", b" ", b"b"], [(2, 3)]) == [(2, 3)]


def test_tokens_of_another_text_are_refused() -> None:
    """A tokenizer that normalises would put the field at a wrong place."""
    with pytest.raises(SkillError, match="are not those of the text"):
        token_spans("A b", [b"a", b" b"], [(2, 3)])
    assert token_spans("A b", [b"a", b" b"], []) == []


@given(st.data())
def test_the_span_is_the_smallest_that_covers(data: st.DataObject) -> None:
    """However the bytes are cut, the tokens cover the value, and no fewer would."""
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


@given(st.text(max_size=30))
def test_where_each_character_begins(text: str) -> None:
    """In bytes of UTF-8."""
    assert list(byte_offsets(text)) == [len(text[:end].encode()) for end in range(len(text) + 1)]
