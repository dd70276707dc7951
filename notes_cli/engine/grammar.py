"""Holding an answer to a grammar (GBNF), by llama.cpp's own grammar sampler."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import process
from notes_cli.engine.model import Model
from notes_cli.engine.native import free_once, llama
from notes_cli.errors import EngineError, GrammarError

ROOT = b"root"  # the rule that an answer is
# struct llama_token_data
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
FIRST = 256  # of the likeliest tokens that are looked at before all are


class Grammar:
    """A grammar and how far an answer has come in it. Close it, or use it as a context manager.

    Beside what the grammar says, a token must be seen as what it is read as: no control token, and no bytes that are
    not UTF-8, which llama.cpp would take for the character that they are a wrong spelling of.
    """

    def __init__(self, model: Model, text: str) -> None:
        """`text` is one that llama.cpp survives (text/grammar.py). Raise GrammarError for one that it cannot use."""
        self._sampler = None
        with process.log.collected() as lines:
            self._sampler = llama.llama_sampler_init_grammar(model.vocab, text.encode(), ROOT)
        if not self._sampler:
            raise _unusable(lines)
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The likeliest token that may come next. Raise EngineError where there is none."""
        if len(logits) > 4 * FIRST:
            first = np.argpartition(-logits, FIRST)[:FIRST]
            first = first[np.lexsort((first, -logits[first]))]
            if (found := self._likeliest(first, logits[first])) is not None:
                return found
        found = self._likeliest(np.arange(len(logits)), logits)
        if found is None:
            raise EngineError(f"no token of {self._model.name} continues the answer as the grammar requires")
        return found

    def among(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits with -inf in the place of tokens that the grammar forbids; `allows` may forbid more of them."""
        return self._applied(np.arange(len(logits)), logits)

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        if not np.isfinite(self._applied(np.array([token]), np.zeros(1, np.float32))[0]):
            return False
        if self._model.ends(token):
            return not self._decoder.getstate()[0]
        piece = self._model.token_bytes(token)
        before = self._decoder.getstate()
        try:
            self._decoder.decode(piece)
        except UnicodeDecodeError:
            return False
        finally:
            self._decoder.setstate(before)
        return bool(piece) and piece == self._model.token_bytes(token, special=True)

    def accept(self, token: int) -> None:
        """Go on after a token. Raise EngineError for one that may not come: llama.cpp would end the process. Raise
        GrammarError where the text can be read in too many ways."""
        if not self.allows(token):
            raise EngineError(f"token {token} does not go on as the grammar demands")
        if not self._model.ends(token):
            self._decoder.decode(self._model.token_bytes(token))
        with _heard():
            llama.llama_sampler_accept(self._sampler, token)

    def _likeliest(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> int | None:
        """The likeliest of these that may come, the first of several."""
        left = self._applied(tokens, logits)
        while np.isfinite(left.max(initial=-np.inf)):
            best = int(left.argmax())
            if self.allows(int(tokens[best])):
                return int(tokens[best])
            left[best] = -np.inf
        return None

    def _applied(self, tokens: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits of these tokens, -inf where the grammar forbids one. Raise GrammarError where the text can go on
        in too many ways."""
        if self._sampler is None:
            raise EngineError("this grammar is closed")
        candidates = np.zeros(len(tokens), CANDIDATE)
        candidates["id"], candidates["logit"] = tokens, logits
        data = candidates.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data, len(tokens), -1, False)
        with _heard():
            llama.llama_sampler_apply(self._sampler, ctypes.byref(array))
        left: NDArray[np.float32] = candidates["logit"].copy()
        return left

    def close(self) -> None:
        free_once(self, "_sampler", llama.llama_sampler_free)

    def __enter__(self) -> Grammar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _heard() -> Iterator[None]:
    """Raise GrammarError for what llama.cpp logs of a grammar meanwhile: it says nothing of one that can be used."""
    with process.log.collected() as lines:
        yield
    if lines:
        raise _unusable(lines)


def _unusable(lines: Iterable[str]) -> GrammarError:
    said = " ".join(lines)
    why = "a rule begins with itself" if "left recursion" in said else said or "llama.cpp gives no reason"
    return GrammarError(f"the grammar cannot be used: {why}")
