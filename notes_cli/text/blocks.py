"""Blocks: where a text may be cut into parts that are compiled apart, and which parts speak of each other.

A cut stands before a heading, a paragraph or a line, never inside of a code fence, and where a token begins.
Pure arithmetic over the bytes of each token, as in spans.py; it knows no tokenizer.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

from notes_cli.errors import SkillError
from notes_cli.text.fields import fences, within
from notes_cli.text.spans import byte_offsets

Blocks = int | Literal["headings"]  # how many, or one a heading

PLACES = {
    "headings": re.compile(r"^ {0,3}#{1,6}[ \t]+(?=\S)", re.M),
    "paragraphs": re.compile(r"(?<=\n)[ \t]*\n(?P<place>)(?![ \t]*\n)"),
    "lines": re.compile(r"\n(?P<place>)(?![ \t]*\n)"),
}


def block_starts(text: str, token_bytes: Sequence[bytes], blocks: Blocks) -> tuple[int, ...]:
    """The first token of each block, from 0 on; nothing where it is one block.

    `token_bytes` holds the bytes of each token of the text, in order. A number of blocks gives parts of about as
    many tokens each, cut between paragraphs if there are enough, else between lines; fewer where there are too
    few. Raise SkillError for a text without headings where they were asked for, and for tokens that do not give
    the text back.
    """
    if blocks == 1:
        return ()
    if blocks == "headings":
        places = _at_tokens(text, token_bytes, _places(text, "headings"))
        if not places:
            raise SkillError("there are no headings to cut it at", "Give a number of blocks instead")
        return (0, *places)
    for kind in ("paragraphs", "lines"):
        places = _at_tokens(text, token_bytes, _places(text, kind))
        if len(places) >= blocks - 1:
            break
    return (0, *_evenly(places, len(token_bytes), blocks)) if places else ()


def references(texts: Sequence[str], stands: Mapping[str, set[int]]) -> list[str]:
    """Warnings about blocks that name a field whose value stands in others.

    `texts` are those of the blocks; `stands` tells for each field in which of them its value is, counted from 0.
    """
    parts = {name: set(_words(name)) for name in stands}
    found = []
    for number, text in enumerate(texts):
        words = set(_words(text))
        for name in stands:
            if number not in stands[name] and parts[name] <= words and _names(text, name):
                found.append(
                    f"block {number + 1} refers to {name}, which stands in {_blocks(stands[name])}: decisions may "
                    "suffer; keep them in one block"
                )
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _names(text: str, name: str) -> bool:
    """Whether the text names the field, as a whole word; `ship_to` may be said `ship to`."""
    spoken = re.sub(r"[_-]", "[ _-]", re.escape(name).replace(r"\-", "-"))
    return re.search(rf"(?<![\w-]){spoken}(?![\w-])", text, re.I) is not None


def _blocks(numbers: set[int]) -> str:
    said = [str(number + 1) for number in sorted(numbers)]
    return f"block {said[0]}" if len(said) == 1 else f"blocks {', '.join(said[:-1])} and {said[-1]}"


def _places(text: str, kind: str) -> list[int]:
    """Characters before which the text may be cut, its first one left out."""
    code = fences(text)
    found = PLACES[kind].finditer(text)
    places = [match.start() if kind == "headings" else match.start("place") for match in found]
    return [place for place in places if place and not within(code, place - 1)]


def _at_tokens(text: str, token_bytes: Sequence[bytes], places: Sequence[int]) -> list[int]:
    """The tokens that begin at these characters; a place inside of a token is dropped."""
    data, joined = text.encode(), b"".join(token_bytes)
    if joined not in (data, b" " + data):  # SentencePiece puts a blank before the text
        raise SkillError("the tokens of this model do not give the text back, so it cannot be cut into blocks")
    shift = len(joined) - len(data)
    begins = [0, *accumulate(map(len, token_bytes))][:-1]  # where each token begins, in bytes
    found, at = [], byte_offsets(text)
    for place in places:
        byte = shift + at[place]
        token = bisect_left(begins, byte)
        if token < len(begins) and begins[token] == byte:
            found.append(token)
    return found


def _evenly(places: Sequence[int], total: int, blocks: int) -> list[int]:
    """Of ascending places, those that cut `total` tokens into parts as even as they allow, one after the other."""
    cuts = min(blocks - 1, len(places))
    chosen: list[int] = []
    low = 0
    for number in range(1, cuts + 1):
        high = len(places) - (cuts - number)  # as many must be left for those that follow
        target = total * number / (cuts + 1)
        low = min(range(low, high), key=lambda index: abs(places[index] - target)) + 1
        chosen.append(places[low - 1])
    return chosen
