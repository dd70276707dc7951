"""Pieces: the entries of a sequence, and how the rows of each came about, as data. The edge words it.

Plain data; it knows neither llama.cpp nor files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

How = Literal["decoded", "spliced", "seam", "live"]


class Reason(str, Enum):
    """Why the rows of a piece came about as they did. In brackets: what `detail` holds."""

    PLAIN = ""
    # Of spliced rows.
    MOVED = "moved"  # reused, keys rotated by `moved` positions
    UNMOVED = "unmoved"  # reused at the position where they were compiled
    NOT_ROTATED = "not_rotated"  # moved without the rotation: the control [the distance]
    RESTORED = "restored"  # put back at the start of the prompt, with their left context
    RESTORED_CONTEXT = "restored_context"  # of the left context of a skill that was restored [its name]
    RESTORED_SESSION = "restored_session"  # put back from disk [name of the session]
    CARRIED = "carried"  # reused, keys rotated by `moved` positions, the state of recurrent layers carried through them
    LIVE = "live"  # rows that an earlier prompt left in the context, which begins like this one
    # Of decoded tokens.
    OTHER_CONTEXT = "other_context"  # a seam: preceded by a different context than at compile time
    NOT_SPLICED = "not_spliced"  # the skill is compiled, and is not to be spliced
    REFUSED = "refused"  # the rows cannot be placed here [why]
    INEXACT = "inexact"  # placed here the rows would not be those of a prefill, which was asked for [why]
    NEW_VALUE = "new_value"  # the corrected text
    FROM_CHANGE = "from_change"  # from the changed value on
    BLOCK = "block"  # blocks of the skill that were computed after its left context alone [their numbers]
    THOUGHT = "thought"  # a chain of thought
    THOUGHT_END = "thought_end"  # what closes a chain of thought [after how many tokens, where it was cut]
    CHOSEN = "chosen"  # an answer that was chosen, not written
    AGAIN = "again"  # decoded once more, after an edit of what precedes it


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of the sequence: `tokens` tokens from `position` on, and how their rows came about."""

    kind: str  # text, splice, erratum, question, answer
    name: str
    position: int
    tokens: int
    how: How
    reason: Reason = Reason.PLAIN
    detail: str = ""
    moved: int = 0  # positions that spliced keys were rotated by
    rewritten: int = 0  # tokens of it that were recomputed in place
    blocks: int = 0  # that the skill was compiled in, where these have not seen each other
    passed: int = 0  # tokens that a pass went over to know what to recompute
    selected: str = ""  # the edit method that the pass was for
    kept: str = ""  # what a segment's file keeps its rows as, where that is not as they were computed
    nbytes: int = 0  # of all rows of that file

    @property
    def refused(self) -> bool:
        """Whether rows that were to be placed here could not be, and were decoded instead: `detail` says why."""
        return self.reason is Reason.REFUSED

    def resized(self, tokens: int, rewritten: int) -> Piece:
        """The piece with other numbers of tokens."""
        return replace(self, tokens=tokens, rewritten=min(tokens, rewritten))
