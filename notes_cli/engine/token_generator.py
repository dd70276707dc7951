"""Samples tokens from logits, appends them to a sequence, and decides when generation stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from notes_cli.errors import EngineError

if TYPE_CHECKING:
    from notes_cli.engine.sampler import Sampler
    from notes_cli.engine.sequence import KVSequence


class TokenGenerator:
    """Generates at most `limit` tokens at the end of a sequence. The caller computes the logits and calls `choose`
    while `active` is true."""

    def __init__(self, sequence: KVSequence, sampler: Sampler, limit: int) -> None:
        self.sequence, self.sampler, self.limit = sequence, sampler, limit
        self.count = 0  # tokens generated
        self.active = limit > 0
        sequence.stopped = "length"

    def choose(self, logits: NDArray[np.float32]) -> int | None:
        """Sample the next token and append it; None if generation ends, see `sequence.stopped`. Raises EngineError
        without space for the first token."""
        seq, ends = self.sequence, self.sequence.context.model.ends
        if self.count == self.limit:  # would the next token be an end token?
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
