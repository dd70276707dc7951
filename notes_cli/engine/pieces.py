"""Defines Piece: a part of a sequence, how its K/V was made and why, as plain data.

Commands turn reasons into text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

How = Literal["decoded", "spliced", "seam", "live"]


class Reason(str, Enum):
    """Why the K/V of a piece was made in this way. In brackets: the content of `detail`."""

    PLAIN = ""
    # Spliced.
    MOVED = "moved"  # reused, keys rotated by `moved` positions
    UNMOVED = "unmoved"  # reused at the position of its compilation
    NOT_ROTATED = "not_rotated"  # moved without rotation: the control [the distance]
    RESTORED = "restored"  # restored at the start of the prompt, with its left context
    RESTORED_CONTEXT = "restored_context"  # the left context of a restored skill [its name]
    RESTORED_SESSION = "restored_session"  # restored from disk [name of the session]
    CARRIED = "carried"  # reused, keys rotated by `moved` positions, recurrent state carried through
    LIVE = "live"  # left in the context by an earlier prompt with the same prefix [its tokens of NEAR, if any]
    # reused from a text with another left context, keys rotated by `moved` positions [the text]
    NEAR = "near"
    # Decoded.
    OTHER_CONTEXT = "other_context"  # a seam: preceded by a different context than at compile time
    NOT_SPLICED = "not_spliced"  # a compiled skill for which splicing is off
    REFUSED = "refused"  # the skill's K/V cannot be placed here [why]
    INEXACT = "inexact"  # placed here, the K/V would not equal a prefill's, which was required [why]
    NEW_VALUE = "new_value"  # the corrected text
    FROM_CHANGE = "from_change"  # from the changed value on
    THOUGHT = "thought"  # reasoning
    THOUGHT_END = "thought_end"  # the end of reasoning [after how many tokens, if it was cut]
    CHOSEN = "chosen"  # an answer chosen from given ones
    AGAIN = "again"  # decoded again after an edit of its left context


@dataclass(frozen=True, slots=True)
class Piece:
    """`tokens` tokens from `position` on, and how their K/V was made."""

    kind: str  # text, splice, erratum, question, answer
    name: str
    position: int
    tokens: int
    how: How
    reason: Reason = Reason.PLAIN
    detail: str = ""
    moved: int = 0  # positions by which spliced keys were rotated
    rewritten: int = 0  # tokens recomputed in place
    blocks: int = 0  # blocks that the skill was compiled in, if they do not attend to each other
    kept: str = ""  # stored K/V types of the segment's file, if quantized
    nbytes: int = 0  # size of that file's K/V

    @property
    def refused(self) -> bool:
        """True if a splice was refused and decoded instead; `detail` has the reason."""
        return self.reason is Reason.REFUSED

    def resized(self, tokens: int, rewritten: int) -> Piece:
        """Return a copy with other numbers of tokens."""
        return replace(self, tokens=tokens, rewritten=min(tokens, rewritten))
