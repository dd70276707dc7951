"""How a piece or an edit came about, as ledgers keep it: as data, or as a sentence that an earlier version wrote.

A sentence that is known is turned into the data that it was made of; the edge words the data.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from notes_cli.classes import dataclass
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.sessions.lines import Line, number_of, text_of


@dataclass(frozen=True, slots=True)
class Origin:
    """Of a piece: what engine/pieces.Piece says of it. Of an edit: what it did."""

    reason: Reason = Reason.PLAIN
    detail: str = ""
    moved: int = 0
    rewritten: int = 0  # of an edit: rows that it computed
    blocks: int = 0
    passed: int = 0
    selected: str = ""
    kept: str = ""
    nbytes: int = 0
    erratum: bool = False  # of an edit: an erratum is to be said before the next question
    contradicted: bool = False  # of an edit of the text: an erratum that was said earlier comes after it
    sentence: str = ""  # in the words of an earlier version

    @classmethod
    def of(cls, piece: Piece) -> Origin:
        return cls(**{key: getattr(piece, key) for key in ("reason", *_TEXTS, *_NUMBERS)})


_TEXTS, _NUMBERS = ("detail", "selected", "kept"), ("moved", "rewritten", "blocks", "passed", "nbytes")


def as_line(origin: Origin) -> Line:
    """Its keys in a ledger; those that say nothing are left out. An older notes must find `why`, and not any words."""
    keys = ("reason", *_TEXTS, *_NUMBERS, "contradicted")
    return {"why": "", **{key: value for key, value in asdict(origin).items() if key in keys and value}}


def origin_of(line: Line) -> Origin:
    """Read back what as_line, or an earlier version, wrote. Raise KeyError, TypeError or ValueError otherwise."""
    sentence = text_of(line, "why")
    if sentence:
        return Origin(**meant(sentence), sentence=sentence)
    found: dict[str, Any] = {key: text_of(line, key) for key in _TEXTS if key in line}
    found |= {key: number_of(line, key) for key in _NUMBERS if key in line}
    reason = text_of(line, "reason") if "reason" in line else ""
    if reason in _REASONS:  # a newer version may have others
        found["reason"] = Reason(reason)
    return Origin(**found, contradicted=line.get("contradicted") is True)


_REASONS = {reason.value for reason in Reason}
_NUMBER = r"[+-]?\d{1,9}"
# What earlier versions wrote, in parts with "; " between them. Groups are named for what they say.
_REFUSED = re.compile(r"decoded: (?P<detail>.*)", re.DOTALL)  # it holds any text
_PARTS: list[tuple[re.Pattern[str], dict[str, Any]]] = [
    (re.compile(pattern.replace("#", _NUMBER)), found)
    for pattern, found in (
        (r"reused, keys rotated by (?P<moved>#) positions", {"reason": Reason.MOVED}),
        (r"reused where it was compiled", {"reason": Reason.UNMOVED}),
        (r"restored where it was compiled, at the start of the prompt", {"reason": Reason.RESTORED}),
        (r"restored with (?P<detail>.+)", {"reason": Reason.RESTORED_CONTEXT}),
        (r"repaired: what stands before is not what it was compiled behind", {"reason": Reason.OTHER_CONTEXT}),
        (r"full prefill asked for", {"reason": Reason.NOT_SPLICED}),
        (r"recomputed with the new value", {"reason": Reason.NEW_VALUE}),
        (r"decoded from the changed value on", {"reason": Reason.FROM_CHANGE}),
        (
            r"block (?P<detail>.+) of (?P<blocks>#), computed anew behind the left context alone by a pass over "
            r"(?P<passed>#) tokens",
            {"reason": Reason.BLOCK},
        ),
        (r"chain of thought", {"reason": Reason.THOUGHT}),
        (r"end of the chain(, after (?P<detail>#) tokens)?", {"reason": Reason.THOUGHT_END}),
        (r"chosen", {"reason": Reason.CHOSEN}),
        (r"compiled in (?P<blocks>#) blocks", {}),
        (r"(ranked|selected) by a pass over (?P<passed>#) tokens of the corrected text", {}),
        (r"notes compile .* spares it", {"selected": "selective"}),
        (r"(?P<rewritten>#) of them recomputed in place", {}),
        (r"(?P<rewritten>#) rows? computed again", {}),
        (r"an erratum before the next question", {"erratum": True}),
        (r"what an erratum said of it before stands behind it: .*", {"contradicted": True}),
    )
]


def meant(sentence: str) -> dict[str, Any]:
    """What a sentence of an earlier version says, by the names of Origin; of parts that are not known, nothing."""
    refused = _REFUSED.fullmatch(sentence)
    if refused:
        return {"reason": Reason.REFUSED, **refused.groupdict()}
    found: dict[str, Any] = {}
    for part in sentence.split("; "):
        for pattern, says in _PARTS:
            match = pattern.fullmatch(part)
            if match:
                groups = {key: value for key, value in match.groupdict().items() if value is not None}
                found |= says | {key: int(value) if key in _NUMBERS else value for key, value in groups.items()}
                break
    return found
