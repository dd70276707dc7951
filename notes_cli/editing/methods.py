"""The edit methods, a record each: how a skill with new values comes into a sequence. The reference is `recompute`.

They are named as in the paper (arXiv:2606.17107, Operation 1). What a method does not edit still holds what the model
concluded from the old value. A further method is one more record in METHODS, and a function in ways.py where it edits
in a way that there is not yet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Literal

from notes_cli.editing.operations import Way, by_blocks, corrected_text, from_change_on, in_place, unchanged
from notes_cli.editing.select_tokens import Selection
from notes_cli.errors import Help, NotesError

Needs = tuple[Literal["rewrite", "splice"], ...]  # operations that a context must support


class Edits(Enum):
    """The rows that are computed again."""

    NOTHING = "nothing"
    FIELD = "the field's own"
    SELECTED = "the field's own, and selected ones after it"
    BLOCK = "those of the blocks that the field is in"
    FROM_CHANGE = "everything from the field on"
    ALL = "everything"


class Cost(IntEnum):
    """The tokens that are decoded, the fewest first."""

    FEW = 1  # however long the skill
    AFTER = 2  # those after the field
    ALL = 3


@dataclass(frozen=True, slots=True)
class Record:
    """All that there is to know of an edit method."""

    name: str
    edits: Edits
    way: Way  # the function that edits
    cost: Cost
    appends_erratum: bool = False  # a sentence that says the correction follows the skill
    selects: Selection | None = None  # how the tokens are selected that are computed again with the field
    needs: Needs = ()  # where the skill is placed with its change
    session_needs: Needs | None = None  # for a skill that is in a session already; None: it makes no sense there
    needs_blocks: bool = False  # the skill must be compiled in blocks
    # Among the methods that a calibration chooses from, the higher the safer; 0: it is not one of them.
    safety: int = 0

    @property
    def in_session(self) -> bool:
        """Whether it makes sense for a skill that is in a session already."""
        return self.session_needs is not None

    @property
    def edits_rows(self) -> bool:
        """Whether the text of the skill gets its new values."""
        return self.edits is not Edits.NOTHING

    @property
    def in_place(self) -> bool:
        """Whether rows are computed again where they are, and those after them hold what the old value has left."""
        return self.edits in (Edits.FIELD, Edits.SELECTED)

    @property
    def exact(self) -> bool:
        """Whether all rows are those of a prefill of the text that is there afterwards."""
        return self.edits in (Edits.NOTHING, Edits.FROM_CHANGE, Edits.ALL)

    @property
    def reaches_end(self) -> bool:
        """Whether no row is left that has seen the old value."""
        return self.edits in (Edits.FROM_CHANGE, Edits.ALL)


_REWRITE: Needs = ("rewrite",)
_RECORDS = (
    # As it was compiled.
    Record("stale", Edits.NOTHING, unchanged, Cost.FEW),
    # The field's tokens are computed in place. All rows after them hold what was concluded from the old value.
    Record("field", Edits.FIELD, in_place, Cost.FEW, needs=_REWRITE, session_needs=_REWRITE, safety=1),
    # These, and the K tokens after them on which the field has the highest effect: fewer rows are left as they were.
    Record(
        *("selective", Edits.SELECTED, in_place, Cost.FEW),
        selects=Selection(influence=True),
        needs=_REWRITE,
        session_needs=_REWRITE,
        safety=2,
    ),
    # These, and the K tokens after them whose rows deviate most in the first two layers, as CacheBlend chooses: in the
    # first one no token has seen another's value yet. llama.cpp cannot stop there, so it costs a whole pass here.
    Record(
        *("blend", Edits.SELECTED, in_place, Cost.FEW),
        selects=Selection(layers=2),
        needs=_REWRITE,
        session_needs=_REWRITE,
    ),
    # As it was compiled, and a sentence after it. All rows stay: the old text and its correction are both there to be
    # read, and it can be taken back.
    Record("erratum", Edits.NOTHING, unchanged, Cost.FEW, appends_erratum=True, session_needs=(), safety=4),
    # Both: rows hold what was concluded from the old value, but the new one is said.
    Record(
        *("field+erratum", Edits.FIELD, in_place, Cost.FEW),
        appends_erratum=True,
        needs=_REWRITE,
        session_needs=_REWRITE,
        safety=3,
    ),
    # Everything from the field on is decoded, which equals a recompute. In a prompt the rows before it must be of use
    # without those after it; in a session all is decoded where they are not.
    Record("suffix", Edits.FROM_CHANGE, from_change_on, Cost.AFTER, needs=_REWRITE, session_needs=(), safety=5),
    # The block with the field is computed alone, as when it was compiled, and takes the old one's place. Equal to
    # compiling the corrected text in the same blocks.
    Record("block", Edits.BLOCK, by_blocks, Cost.FEW, needs=("splice",), needs_blocks=True),
    # The corrected text is decoded. In a session `suffix` comes to the same.
    Record("recompute", Edits.ALL, corrected_text, Cost.ALL, safety=6),
)
METHODS = {record.name: record for record in _RECORDS}
DEFAULT_K = 16
_COUNT = re.compile("[1-9][0-9]{0,8}")  # of tokens


@dataclass(frozen=True, slots=True)
class Method:
    """An edit method by name; `k`: how many tokens after a change are computed again with it, if it selects any."""

    name: str = "erratum"
    k: int = DEFAULT_K

    @classmethod
    def parse(cls, text: str, *, also: Sequence[str] = ()) -> Method:
        """`selective@32`, `erratum`, ... Raise NotesError for a method that does not exist, naming those that do, and
        what else the caller takes in the place of one."""
        name, at, k = text.partition("@")
        record = METHODS.get(name)
        if record is None or (at and not (record.selects and _COUNT.fullmatch(k))):
            counted = ", ".join(f"{one.name}@K" for one in METHODS.values() if one.selects)
            known = f"{', '.join([*METHODS, *also])} ({counted})"
            raise NotesError(f"no edit method {text!r}", Help.KNOWN_METHOD(known=known))
        return cls(name, int(k) if at else DEFAULT_K)

    def __str__(self) -> str:
        return f"{self.name}@{self.k}" if self.record.selects else self.name

    @property
    def record(self) -> Record:
        return METHODS[self.name]


# Methods that code refers to: the control, the field alone, the erratum (possible on every model), the default, the
# exact one, and the reference.
STALE, FIELD, ERRATUM, FIELD_ERRATUM = Method("stale"), Method("field"), Method(), Method("field+erratum")
SUFFIX, RECOMPUTE = Method("suffix"), Method("recompute")


def record_of(text: str) -> Record | None:
    """The record of a method as a ledger or a piece names it, None if another version wrote it."""
    return METHODS.get(text.partition("@")[0])


def calibrated() -> list[Method]:
    """The methods that a calibration chooses from, the safest first."""
    records = sorted(METHODS.values(), key=lambda record: -record.safety)
    return [Method(record.name) for record in records if record.safety]
