"""Writing an answer: choose a token from logits, add it to the sequence, and know when to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from notes_cli.errors import EngineError

if TYPE_CHECKING:
    from notes_cli.engine.sampler import Sampler
    from notes_cli.engine.sequence import KVSequence


class TokenGenerator:
    """An answer of at most `limit` tokens at the end of a sequence. Whoever drives it gives it the sequence's logits
    for as long as it goes on."""

    def __init__(self, sequence: KVSequence, sampler: Sampler, limit: int) -> None:
        self.sequence, self.sampler, self.limit = sequence, sampler, limit
        self.count = 0  # tokens that were written
        self.active = limit > 0
        sequence.stopped = "length"

    def choose(self, logits: NDArray[np.float32]) -> int | None:
        """The next token, which is in the sequence now; None where the answer ends before it: `sequence.stopped` says
        why. Raise EngineError where there is no room for the first one."""
        seq, ends = self.sequence, self.sequence.context.model.ends
        if self.count == self.limit:  # has it said all?
            self.active = False
            if ends(self.sampler.likeliest(logits)):
                seq.stopped = "end"
            return None
        token = self.sampler.next(logits)
        if ends(token):
            self.active, seq.stopped = False, "end"
            return None
        if not self.count:
            seq.append([token], "answer")
        else:
            try:
                seq.extend([token])
            except EngineError:
                self.active, seq.stopped = False, "context"
                return None
        self.count += 1
        return token
