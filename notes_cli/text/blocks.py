"""Divides a text into blocks that are compiled separately."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

from notes_cli.errors import SkillError
from notes_cli.text.fields import byte_offsets, fences, within

Blocks = int | Literal["headings"]  # a number, or one for each heading

PLACES = {
    "headings": re.compile(r"^ {0,3}#{1,6}[ \t]+(?=\S)", re.M),
    "paragraphs": re.compile(r"(?<=\n)[ \t]*\n(?P<place>)(?![ \t]*\n)"),
    "lines": re.compile(r"\n(?P<place>)(?![ \t]*\n)"),
}


def check_blocks(blocks: Blocks | None) -> None:
    """Raise SkillError for an invalid number of blocks."""
    if blocks not in (None, "headings") and (type(blocks) is not int or blocks < 1):
        raise SkillError(f"a skill is compiled in 1 block or more, or in one for each heading, not in {blocks!r}")


def block_starts(text: str, token_bytes: Sequence[bytes], blocks: Blocks) -> tuple[int, ...]:
    """Return the first token of each block, beginning with 0; empty for a single block.

    `token_bytes` as for `token_spans`. A number of blocks gives parts of about equal length in tokens, divided between
    paragraphs if there are enough, else between lines; fewer parts where there are too few places. Raises SkillError
    for an invalid number, for headings where the text has none, and for tokens whose bytes are not those of the text.
    """
    check_blocks(blocks)
    if blocks == 1:
        return ()
    if blocks == "headings":
        places = _tokens_at(text, token_bytes, _places(text, "headings"))
        if not places:
            raise SkillError("there are no headings to cut it at", "Give a number of blocks instead")
        return (0, *places)
    for kind in ("paragraphs", "lines"):
        places = _tokens_at(text, token_bytes, _places(text, kind))
        if len(places) >= blocks - 1:
            break
    return (0, *_choose_evenly(places, len(token_bytes), blocks)) if places else ()


def references(texts: Sequence[str], blocks_of: Mapping[str, set[int]]) -> list[str]:
    """Return warnings about blocks that name a field whose value is in another block.

    `texts`: those of the blocks; `blocks_of`: the blocks with the value of each field, counted from 0.
    """
    parts = {name: set(_words(name)) for name in blocks_of}
    warnings = []
    for number, text in enumerate(texts):
        words = set(_words(text))
        for name in blocks_of:
            if number not in blocks_of[name] and parts[name] <= words and _names(text, name):
                warnings.append(
                    f"block {number + 1} refers to {name}, whose value is in {_blocks(blocks_of[name])}: decisions may "
                    "suffer; keep them in one block"
                )
    return warnings


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _names(text: str, name: str) -> bool:
    """Return True if the text names the field, as a whole word; `ship_to` may be written `ship to`."""
    spelled = re.sub(r"[_-]", "[ _-]", re.escape(name).replace(r"\-", "-"))
    return re.search(rf"(?<![\w-]){spelled}(?![\w-])", text, re.I) is not None


def _blocks(numbers: set[int]) -> str:
    shown = [str(number + 1) for number in sorted(numbers)]
    return f"block {shown[0]}" if len(shown) == 1 else f"blocks {', '.join(shown[:-1])} and {shown[-1]}"


def _places(text: str, kind: str) -> list[int]:
    """Return the characters before which the text may be divided, without the first."""
    code = fences(text)
    matches = PLACES[kind].finditer(text)
    places = [match.start() if kind == "headings" else match.start("place") for match in matches]
    return [place for place in places if place and not within(code, place - 1)]


def _tokens_at(text: str, token_bytes: Sequence[bytes], places: Sequence[int]) -> list[int]:
    """Return the tokens that begin at these characters, without places inside tokens."""
    data, joined = text.encode(), b"".join(token_bytes)
    if joined not in (data, b" " + data):  # SentencePiece puts a space before the text
        raise SkillError("the bytes of this model's tokens are not those of the text, so it cannot be cut into blocks")
    shift = len(joined) - len(data)
    begins = [0, *accumulate(map(len, token_bytes))][:-1]  # of tokens, in bytes
    starts, at = [], byte_offsets(text)
    for place in places:
        byte = shift + at[place]
        token = bisect_left(begins, byte)
        if token < len(begins) and begins[token] == byte:
            starts.append(token)
    return starts


def _choose_evenly(places: Sequence[int], total: int, blocks: int) -> list[int]:
    """Choose among ascending places, from the left, those that divide `total` tokens most evenly."""
    cuts = min(blocks - 1, len(places))
    chosen: list[int] = []
    low = 0
    for number in range(1, cuts + 1):
        high = len(places) - (cuts - number)  # leaves a place for each further cut
        target = total * number / (cuts + 1)
        low = min(range(low, high), key=lambda index: abs(places[index] - target)) + 1
        chosen.append(places[low - 1])
    return chosen
