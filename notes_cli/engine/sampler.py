"""Samples the next token from logits with a sampler chain of llama.cpp, within a grammar if there is one."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.model import Model
from notes_cli.engine.native import free_once, llama
from notes_cli.errors import EngineError, GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# struct llama_token_data
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
LAST_SEED = 0xFFFFFFFE  # the next one is LLAMA_DEFAULT_SEED (include/llama.h), for which llama.cpp draws another
MOST_TOKENS = 2**20  # that penalties look back on; their memory is reserved
BREAKERS, BREAKER_BYTES = 8, 20  # each is searched for in the whole vocabulary, which takes up to 0.3 s
MIROSTAT_TOKENS = 100  # from which Mirostat 1 estimates, as in llama.cpp's common_sampler
LEAST_P = 1e-30  # of the likeliest token; below, a probability can be 0, of which typical-p takes the logarithm
# Least and greatest values of options.
RANGES = {
    "temperature": (0, 100),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (1e-6, 1e6),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repeat_last_n": (-1, MOST_TOKENS),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 100),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, 100),
    "dynatemp_exponent": (0, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "dry_allowed_length": (0, MOST_TOKENS),
    "dry_penalty_last_n": (-1, MOST_TOKENS),
    "mirostat": (0, 2),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 1),
}
VALID_BREAKERS = f"a list of at most {BREAKERS} strings of 1 to {BREAKER_BYTES} bytes"

_tokenizers: WeakKeyDictionary[Model, LLTokenizer] = WeakKeyDictionary()
_dry_samplers: WeakKeyDictionary[Model, _DrySampler] = WeakKeyDictionary()  # the latest


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Sampling options, as in llama.cpp. The same seed gives the same text on the same machine and settings.

    temperature: 0 takes the likeliest token (greedy); then only bias, penalties and DRY are used.
    top_k: Sample from this many of the likeliest tokens; 0 for all.
    top_p: Sample from the likeliest tokens with this total probability.
    min_p: Exclude tokens less likely than this fraction of the likeliest one.
    repeat_penalty: Above 1, makes recently generated tokens less likely.
    seed: Seed of the random numbers.
    frequency_penalty: Subtracted from a token's logit for each recent occurrence.
    presence_penalty: Subtracted from a token's logit if it occurred recently.
    bias: Pairs of a token and a number to add to its logit.
    repeat_last_n: Generated tokens that the three penalties count; 0 for none, -1 for all.
    typical_p: Below 1, sample from the tokens with the most typical probabilities, with this total probability.
    top_n_sigma: Above 0, exclude tokens with a logit more than this many standard deviations below the highest.
    xtc_probability: Chance of excluding all tokens that reach xtc_threshold except the least likely of them.
    xtc_threshold: Probability from which xtc_probability excludes tokens; above 0.5 it excludes none.
    dynatemp_range: Above 0, the entropy sets a temperature between temperature minus and plus this.
    dynatemp_exponent: Exponent of the normalized entropy for dynatemp_range.
    dry_multiplier: Above 0, makes tokens less likely that continue a repetition of generated tokens (DRY).
    dry_base: The logit is reduced by dry_multiplier * dry_base ** (tokens repeated - dry_allowed_length).
    dry_allowed_length: Tokens of a repetition without a penalty.
    dry_penalty_last_n: Generated tokens that are searched for repetitions; 0 for none, -1 for all.
    dry_sequence_breakers: Texts that no repetition continues across.
    mirostat: 1 or 2, a version of Mirostat; then only bias, temperature, seed and the options of Mirostat are used.
    mirostat_tau: Target surprise of Mirostat in bits.
    mirostat_eta: Learning rate of Mirostat.
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
    repeat_last_n: int = 64
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    def __post_init__(self) -> None:
        """Raises EngineError for a value that is no number or outside RANGES, and for invalid breakers."""
        for one in fields(self):
            if isinstance(one.default, tuple):
                continue
            value, whole = getattr(self, one.name), isinstance(one.default, int)
            number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool) and isfinite(value)
            if not number:
                raise EngineError(f"{one.name} is {value!r}, and no {'whole ' if whole else ''}number")
            low, high = RANGES.get(one.name, (value, value))
            if not low <= value <= high:
                raise EngineError(f"{one.name} must be a number from {low:g} to {high:g}, not {value!r}")
        if not valid_breakers(self.dry_sequence_breakers):
            raise EngineError(f"dry_sequence_breakers must be {VALID_BREAKERS}")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken: the temperature is 0, and earlier tokens change no logits."""
        penalties = self.repeat_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        return self.temperature <= 0 and not penalties and not self.dry_multiplier


def valid_breakers(texts: Any) -> bool:
    """Return True for values of dry_sequence_breakers that llama.cpp takes as they are."""
    if not isinstance(texts, (list, tuple)) or len(texts) > BREAKERS:
        return False
    try:
        return all("\0" not in text and 0 < len(text.encode()) <= BREAKER_BYTES for text in texts)
    except (AttributeError, TypeError, UnicodeEncodeError):
        return False


class Sampler(AbstractContextManager["Sampler"]):
    """A chain in the order of llama.cpp's common_sampler: penalties, DRY, top-n-sigma, top-k, typical-p, top-p, min-p,
    XTC, temperature, draw; or temperature and Mirostat.

    With a constraint the chain chooses among the tokens that it allows.
    """

    def __init__(
        self, options: SamplerOptions, constraint: Constraint | None = None, model: Model | None = None
    ) -> None:
        """`constraint` advances with the tokens of this sampler. `model`: for the breakers of DRY, which needs it.
        Raises EngineError for DRY without a model."""
        if options.dry_multiplier and model is None:
            raise EngineError("dry_multiplier needs a model: Sampler(options, model=model)")
        self.options = options
        self._constraint = constraint
        self._model = model
        self._chain: Any = None
        self._closed = False

    def _made(self, n_vocab: int) -> Any:
        """Build the chain for a vocabulary of this size."""
        options = self.options
        if options.temperature <= 0:
            parts = [*self._penalties(n_vocab), llama.llama_sampler_init_greedy()]
        elif options.mirostat:
            parts = [llama.llama_sampler_init_temp(options.temperature), self._mirostat(n_vocab)]
        else:
            parts = [*self._penalties(n_vocab), *self._draw()]
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for part in parts:
            llama.llama_sampler_chain_add(chain, part)
        return chain

    def _penalties(self, n_vocab: int) -> list[Any]:
        """Return the samplers that use earlier tokens."""
        options = self.options
        penalties = options.repeat_penalty, options.frequency_penalty, options.presence_penalty
        parts = [llama.llama_sampler_init_penalties(n_vocab, _tokens_back(options.repeat_last_n), *penalties)]
        if options.dry_multiplier and self._model is not None:
            parts.append(_dry_sampler(self._model, options))
        return parts

    def _draw(self) -> list[Any]:
        """Return the samplers that exclude tokens (llama.cpp makes empty ones of those that are off), the temperature
        and the draw."""
        options = self.options
        return [
            llama.llama_sampler_init_top_n_sigma(options.top_n_sigma),
            llama.llama_sampler_init_top_k(options.top_k),
            llama.llama_sampler_init_min_p(LEAST_P if options.typical_p < 1 else 0.0, 1),
            llama.llama_sampler_init_typical(options.typical_p, 1),
            llama.llama_sampler_init_top_p(options.top_p, 1),
            llama.llama_sampler_init_min_p(options.min_p, 1),
            llama.llama_sampler_init_xtc(options.xtc_probability, options.xtc_threshold, 1, self._seed),
            llama.llama_sampler_init_temp_ext(options.temperature, options.dynatemp_range, options.dynatemp_exponent),
            llama.llama_sampler_init_dist(self._seed),
        ]

    def _mirostat(self, n_vocab: int) -> Any:
        target = self.options.mirostat_tau, self.options.mirostat_eta
        if self.options.mirostat == 1:
            return llama.llama_sampler_init_mirostat(n_vocab, self._seed, *target, MIROSTAT_TOKENS)
        return llama.llama_sampler_init_mirostat_v2(self._seed, *target)

    @property
    def _seed(self) -> int:
        return min(self.options.seed & 0xFFFFFFFF, LAST_SEED)

    def next(self, logits: NDArray[np.float32]) -> int:
        """Sample a token from logits, [n_vocab], and apply it to the penalties and the constraint. Raises EngineError
        if the constraint allows none."""
        if self._closed:
            raise EngineError("this sampler is closed")
        if self.options.greedy:  # the chain would choose the same
            token = self.likeliest(logits)
        else:
            token = self._drawn(*self._allowed(logits))
            llama.llama_sampler_accept(self._chain, token)
        if self._constraint is not None:
            self._constraint.accept(token)
        return token

    def likeliest(self, logits: NDArray[np.float32]) -> int:
        """Return the most likely token, the first of equal ones, without applying it."""
        logits, tokens = self._allowed(logits)
        return int(logits.argmax() if tokens is None else tokens[logits[tokens].argmax()])

    def _allowed(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int32] | None]:
        """Return the logits with the bias, and the tokens that the constraint allows; None: all."""
        if self.options.bias:
            logits = logits.copy()
            for token, more in self.options.bias:
                logits[token] += more
        return logits, None if self._constraint is None else self._constraint.allowed(logits)

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

    def __exit__(self, *_: object) -> None:
        self.close()


def _tokens_back(count: int) -> int:
    return MOST_TOKENS if count < 0 else count


class _DrySampler:
    """A DRY sampler of llama.cpp, to clone, with its arguments."""

    def __init__(self, model: Model, arguments: tuple[Any, ...]) -> None:
        *numbers, texts = self.arguments = arguments
        breakers = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        self.native = llama.llama_sampler_init_dry(model.vocab, *numbers, breakers, len(texts))
        finalize(self, llama.llama_sampler_free, self.native).atexit = False


def _dry_sampler(model: Model, options: SamplerOptions) -> Any:
    """Return a DRY sampler, a clone of the latest one if that has the same options: the vocabulary is searched once."""
    last = _tokens_back(options.dry_penalty_last_n)
    numbers = options.dry_multiplier, options.dry_base, options.dry_allowed_length, last
    arguments = (*numbers, options.dry_sequence_breakers)
    sampler = _dry_samplers.get(model)
    if sampler is None or sampler.arguments != arguments:
        sampler = _dry_samplers[model] = _DrySampler(model, arguments)
    return llama.llama_sampler_clone(sampler.native)


class Constraint:
    """The state of one answer in a grammar (guidance.py).

    A token is allowed if its bytes continue a text of the grammar, which is UTF-8; of control tokens, only those that
    end an answer, where the text is complete.
    """

    def __init__(self, model: Model, grammar: str) -> None:
        """A Grammar is compiled once, which may take seconds. Raises GrammarError for an unusable grammar."""
        from llguidance import LLMatcher

        from notes_cli.guidance import Grammar, limits

        self._model = model
        matchers = grammar.matchers if isinstance(grammar, Grammar) else {}
        if model not in matchers:
            lark = LLMatcher.grammar_from_lark(grammar)
            matchers[model] = LLMatcher(_tokenizer(model), lark, log_level=0, limits=limits())
        self._matcher = matchers[model].deep_copy()
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
