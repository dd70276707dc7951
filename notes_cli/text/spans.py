"""From characters to tokens: which tokens hold a field's value.

Pure arithmetic over the bytes of each token; it knows no tokenizer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from notes_cli.errors import SkillError


def token_spans(text: str, token_bytes: Sequence[bytes], places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each place, characters [start, end) of the text, the tokens [first, last) that touch it.

    `token_bytes` holds the bytes of each token of the text, in order. A tokenizer may put one space before
    the text (SentencePiece does). Raise SkillError for bytes that are not those of the text.
    """
    if not places:
        return []
    data = text.encode()
    joined = b"".join(token_bytes)
    if joined not in (data, b" " + data):
        raise SkillError("the bytes of this model's tokens are not those of the text, so its fields cannot be located")
    shift, at = len(joined) - len(data), byte_offsets(text)
    ends = list(accumulate(map(len, token_bytes)))  # where each token ends, in bytes
    return [(bisect_right(ends, shift + at[start]), bisect_left(ends, shift + at[end]) + 1) for start, end in places]


def byte_offsets(text: str) -> Sequence[int]:
    """The byte at which each character of a text begins, and the byte after the last one."""
    return range(len(text) + 1) if text.isascii() else [0, *accumulate(len(char.encode()) for char in text)]
