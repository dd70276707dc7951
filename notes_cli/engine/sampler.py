"""Samples the next token from logits with a sampler chain of llama.cpp, within a grammar if there is one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import native
from notes_cli.engine.model import Model
from notes_cli.engine.native import free_once, llama
from notes_cli.errors import EngineError, GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# struct llama_token_data
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
LAST_SEED = 0xFFFFFFFE  # the next one is LLAMA_DEFAULT_SEED (include/llama.h), for which llama.cpp draws another

_tokenizers: WeakKeyDictionary[Model, LLTokenizer] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Sampling options, as in llama.cpp. The same seed gives the same text on the same machine and settings.

    temperature: 0 takes the likeliest token (greedy); then top_k, top_p, min_p and seed are not used.
    top_k: Sample from this many of the likeliest tokens; 0 for all.
    top_p: Sample from the likeliest tokens with this total probability.
    min_p: Exclude tokens less likely than this fraction of the likeliest one.
    repeat_penalty: Above 1, makes recently generated tokens less likely.
    seed: Seed of the random numbers.
    frequency_penalty: Subtracted from a token's logit for each recent occurrence.
    presence_penalty: Subtracted from a token's logit if it occurred recently.
    bias: Pairs of a token and a number to add to its logit.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()  # (token, value added to its logit)

    def __post_init__(self) -> None:
        """Raises EngineError for a value that is no number."""
        for one in fields(self):
            value, whole = getattr(self, one.name), one.name in ("top_k", "seed")
            number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool) and isfinite(value)
            if not number and one.name != "bias":
                raise EngineError(f"{one.name} is {value!r}, and no {'whole ' if whole else ''}number")

    @property
    def penalizes(self) -> bool:
        """True if earlier tokens change the logits."""
        return self.repeat_penalty != 1.0 or bool(self.frequency_penalty) or bool(self.presence_penalty)


class Sampler:
    """A chain in the order of llama.cpp's command line: penalties, top-k, top-p, min-p, temperature, draw.

    With a constraint the chain chooses among the tokens that it allows.
    """

    def __init__(self, options: SamplerOptions, constraint: Constraint | None = None) -> None:
        """`constraint` advances with the tokens of this sampler."""
        self.options = options
        self._constraint = constraint
        native.fits(options.top_k, "top_k")
        self._chain: Any = None
        self._closed = False

    def _made(self, n_vocab: int) -> Any:
        """Build the chain for a vocabulary of this size."""
        options = self.options
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        parts = []
        if options.penalizes:
            penalties = options.repeat_penalty, options.frequency_penalty, options.presence_penalty
            parts.append(llama.llama_sampler_init_penalties(n_vocab, 64, *penalties))
        if options.temperature <= 0:
            parts.append(llama.llama_sampler_init_greedy())
        else:
            parts += [
                llama.llama_sampler_init_top_k(options.top_k),
                llama.llama_sampler_init_top_p(options.top_p, 1),
                llama.llama_sampler_init_min_p(options.min_p, 1),
                llama.llama_sampler_init_temp(options.temperature),
                llama.llama_sampler_init_dist(min(options.seed & 0xFFFFFFFF, LAST_SEED)),
            ]
        for part in parts:
            llama.llama_sampler_chain_add(chain, part)
        return chain

    def next(self, logits: NDArray[np.float32]) -> int:
        """Sample a token from logits, [n_vocab], and apply it to the penalties and the constraint. Raises EngineError
        if the constraint allows none."""
        if self._closed:
            raise EngineError("this sampler is closed")
        logits = self._biased(logits)
        tokens = None if self._constraint is None else self._constraint.allowed(logits)
        if self.options.temperature <= 0 and not self.options.penalizes:  # the chain would choose the same
            token = _likeliest(logits, tokens)
        else:
            token = self._drawn(logits, tokens)
            llama.llama_sampler_accept(self._chain, token)
        if self._constraint is not None:
            self._constraint.accept(token)
        return token

    def likeliest(self, logits: NDArray[np.float32]) -> int:
        """Return the most likely token, without applying it."""
        logits = self._biased(logits)
        return _likeliest(logits, None if self._constraint is None else self._constraint.allowed(logits))

    def _biased(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.options.bias:
            logits = logits.copy()
            for token, more in self.options.bias:
                logits[token] += more
        return logits

    def _drawn(self, logits: NDArray[np.float32], tokens: NDArray[np.int32] | None) -> int:
        """Return the token that the chain selects, of these tokens or of all."""
        self._chain = self._chain or self._made(len(logits))
        ids = np.arange(len(logits), dtype=np.int32) if tokens is None else tokens
        candidates = np.zeros(len(ids), CANDIDATE)
        candidates["id"], candidates["logit"] = ids, logits[ids]
        data = candidates.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data, len(ids), -1, False)
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def close(self) -> None:
        self._closed = True
        free_once(self, "_chain", llama.llama_sampler_free)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _likeliest(logits: NDArray[np.float32], tokens: NDArray[np.int32] | None) -> int:
    """Return the most likely of these tokens, or of all; the first of equal ones."""
    return int(logits.argmax() if tokens is None else tokens[logits[tokens].argmax()])


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
        parses or no continuation, EngineError if no allowed token has a finite logit."""
        mask = self._matcher.compute_bitmask()
        what = f"no token of {self._model.name} continues the answer as the grammar requires"
        if self._matcher.is_error():
            if not self._matcher.get_error().startswith("NoExtension"):
                self._check()
            raise GrammarError(what)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(logits), bitorder="little")
        tokens = np.flatnonzero(bits).astype(np.int32)
        if not len(tokens):
            raise GrammarError(what)
        tokens = tokens[np.isfinite(logits[tokens])]
        if not len(tokens):
            raise EngineError(what)
        return tokens

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
