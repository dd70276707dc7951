"""Writing an answer: choose a token from logits, add it to the notebook, and know when to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from notes_cli.errors import EngineError

if TYPE_CHECKING:
    from notes_cli.engine.notebook import Notebook
    from notes_cli.engine.sampler import Sampler


class Writer:
    """An answer of at most `limit` tokens at the end of a notebook. Whoever drives it gives it the notebook's logits
    for as long as it goes on."""

    def __init__(self, notebook: Notebook, sampler: Sampler, limit: int) -> None:
        self.notebook, self.sampler, self.limit = notebook, sampler, limit
        self.count = 0  # tokens that were written
        self.goes_on = limit > 0
        notebook.stopped = "length"

    def choose(self, logits: NDArray[np.float32]) -> int | None:
        """The next token, which is in the notebook now; None where the answer ends before it: `notebook.stopped` says
        why. Raise EngineError where there is no room for the first one."""
        book, ends = self.notebook, self.notebook.context.model.ends
        if self.count == self.limit:  # has it said all?
            self.goes_on = False
            if ends(self.sampler.likeliest(logits)):
                book.stopped = "end"
            return None
        token = self.sampler.next(logits)
        if ends(token):
            self.goes_on, book.stopped = False, "end"
            return None
        if not self.count:
            book.append([token], "answer")
        else:
            try:
                book.extend([token])
            except EngineError:
                self.goes_on, book.stopped = False, "context"
                return None
        self.count += 1
        return token
