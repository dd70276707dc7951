"""Constrains generated tokens to a grammar, with a bit mask by llguidance for each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.errors import EngineError, GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_tokenizers: WeakKeyDictionary[Model, LLTokenizer] = WeakKeyDictionary()


class Constraint:
    """The state of one answer in a grammar (guidance.py).

    A token is allowed if its bytes continue a text of the grammar, which is UTF-8; of control tokens, only those that
    end an answer, where the text is complete.
    """

    def __init__(self, model: Model, grammar: str) -> None:
        """Raises GrammarError for an unusable grammar."""
        from llguidance import LLMatcher

        from notes_cli.guidance import limits

        self._model = model
        self._matcher = LLMatcher(_tokenizer(model), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits())
        self._check()

    def _check(self) -> None:
        """Raise GrammarError if the text has too many parses."""
        if self._matcher.is_error():
            from notes_cli.guidance import reason

            raise GrammarError(f"the grammar cannot be used: {reason(self._matcher.get_error())}")

    def allowed(self, logits: NDArray[np.float32]) -> NDArray[np.int32]:
        """Return the allowed next tokens with a finite logit, [n_vocab]. Raises GrammarError if the text has too many
        parses, EngineError if no token is allowed."""
        mask = self._matcher.compute_bitmask()
        if not self._matcher.is_error():
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(logits), bitorder="little")
            tokens = np.flatnonzero(bits).astype(np.int32)
            tokens = tokens[np.isfinite(logits[tokens])]
            if len(tokens):
                return tokens
        elif not self._matcher.get_error().startswith("NoExtension"):
            self._check()
        raise EngineError(f"no token of {self._model.name} continues the answer as the grammar requires")

    @property
    def complete(self) -> bool:
        """True if the answer may end here."""
        return bool(self._matcher.is_accepting())

    def accept(self, token: int) -> None:
        """Advance by a token. Raises EngineError for one that is not allowed."""
        if self._model.ends(token) and self.complete:
            return
        if not self._matcher.try_consume_tokens([token]):
            self._check()
            raise EngineError(f"token {token} does not go on as the grammar demands")


def _tokenizer(model: Model) -> LLTokenizer:
    """Return the model's vocabulary for llguidance, built once."""
    if model not in _tokenizers:
        from llguidance import LLTokenizer

        vocabulary: Any = _Vocabulary(model)
        _tokenizers[model] = LLTokenizer(vocabulary, eos_token=model.end_tokens)
    return _tokenizers[model]


class _Vocabulary:
    """The bytes of all tokens, in the interface that LLTokenizer takes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, model: Model) -> None:
        vocab, kinds = model.vocab, llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        ends = set(model.end_tokens)
        if not ends:
            raise GrammarError(f"{model.name} has no token that ends an answer")
        self.eos_token_id = model.end_tokens[0]
        self.tokens = [model.token_bytes(token, special=True) for token in range(model.n_vocab)]
        self.special_token_ids = [
            token
            for token, piece in enumerate(self.tokens)
            if not piece or token in ends or llama.llama_vocab_get_attr(vocab, token) & kinds
        ]

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("grammars are made without forced tokens (guidance.py)")
