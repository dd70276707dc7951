"""From characters to tokens: which tokens hold a field's value.

Pure arithmetic over the bytes of each token; it knows no tokenizer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from notes_cli.errors import SkillError


def token_span(text: str, token_bytes: Sequence[bytes], start: int, end: int) -> tuple[int, int]:
    """The tokens [first, last) that touch characters [start, end) of the text.

    `token_bytes` holds the bytes of each token of the text, in order. A tokenizer may put one blank before
    the text (SentencePiece does); anything else that does not add up to the text raises SkillError.
    """
    data = text.encode()
    joined = b"".join(token_bytes)
    if joined not in (data, b" " + data):
        raise SkillError("the tokens of this model do not give the text back, so its fields cannot be located")
    shift = len(joined) - len(data)
    first_byte = shift + len(text[:start].encode())
    last_byte = shift + len(text[:end].encode())
    ends = list(accumulate(map(len, token_bytes)))  # where each token ends, in bytes
    return bisect_right(ends, first_byte), bisect_left(ends, last_byte) + 1
