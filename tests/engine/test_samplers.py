"""Tests of the samplers of llama.cpp: each changes the distribution as its definition requires."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from notes_cli import config
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.sampler import RANGES, Sampler, SamplerOptions
from notes_cli.errors import EngineError

OPEN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}  # excludes no token
Probabilities = NDArray[np.float64]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(config.shipped_model()) as opened:
        yield opened


def softmax(logits: NDArray[Any]) -> Probabilities:
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


def agrees(tokens: list[int], expected: Probabilities) -> bool:
    """Return True if the shares of drawn tokens are within five standard deviations of the expected ones."""
    shares = np.bincount(tokens, minlength=len(expected)) / len(tokens)
    margin = 5 * np.sqrt(expected * (1 - expected) / len(tokens))
    return bool((np.abs(shares - expected) <= margin).all())  # the margin of an excluded token is 0


def kept(probabilities: Probabilities, keep: NDArray[np.bool_]) -> Probabilities:
    return np.where(keep, probabilities, 0) / probabilities[keep].sum()


def typical(logits: NDArray[np.float32], mass: float) -> Probabilities:
    p = softmax(logits)
    surprise = -np.log(p)
    order = np.argsort(np.abs(surprise - (p * surprise).sum()))
    count = int((np.cumsum(p[order]) <= mass).sum()) + 1
    return kept(p, np.isin(np.arange(len(p)), order[:count]))


def top_n_sigma(logits: NDArray[np.float32], n: float) -> Probabilities:
    return kept(softmax(logits), logits >= logits.max() - n * logits.std())


LOGITS = np.random.default_rng(3).normal(0, 1.5, 30).astype(np.float32)


TEMPERATURE, DRAW = ("temp", 1.0), ("dist", 5)
CHAINS: list[tuple[dict[str, Any], list[tuple[Any, ...]]]] = [  # samplers of llama.cpp by name, with their arguments
    ({"top_k": 3}, [("top_k", 3), TEMPERATURE, DRAW]),
    ({"top_p": 0.5}, [("top_p", 0.5, 1), TEMPERATURE, DRAW]),
    ({"min_p": 0.3}, [("min_p", 0.3, 1), TEMPERATURE, DRAW]),
    ({"typical_p": 0.5}, [("typical", 0.5, 1), TEMPERATURE, DRAW]),
    ({"top_n_sigma": 1.0}, [("top_n_sigma", 1.0), TEMPERATURE, DRAW]),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.05}, [("xtc", 0.5, 0.05, 1, 5), TEMPERATURE, DRAW]),
    ({"dynatemp_range": 0.8, "dynatemp_exponent": 3.0}, [("temp_ext", 1.0, 0.8, 3.0), DRAW]),
    ({"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.2}, [TEMPERATURE, ("mirostat", 30, 5, 3.0, 0.2, 100)]),
    ({"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2}, [TEMPERATURE, ("mirostat_v2", 5, 3.0, 0.2)]),
    (
        {"repeat_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2, "repeat_last_n": 50},
        [("penalties", 30, 50, 1.5, 0.3, 0.2), TEMPERATURE, DRAW],
    ),
    (
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8, "seed": 9},  # the defaults
        [("top_k", 40), ("top_p", 0.95, 1), ("min_p", 0.05, 1), ("temp", 0.8), ("dist", 9)],
    ),
]


@pytest.mark.parametrize(("options", "parts"), CHAINS, ids=str)
def test_an_option_is_a_sampler_of_llama_cpp(options: dict[str, Any], parts: list[tuple[Any, ...]]) -> None:
    """The same tokens are drawn as by a chain made by hand, and others than without the option."""
    logits = np.random.default_rng(0).normal(0, 2, (300, 30)).astype(np.float32)
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for name, *arguments in parts:
        llama.llama_sampler_chain_add(chain, getattr(llama, f"llama_sampler_init_{name}")(*arguments))
    with Sampler(SamplerOptions(**{**OPEN, **options})) as sampler, Sampler(SamplerOptions(**OPEN)) as by_hand:
        by_hand._chain = chain
        tokens = [sampler.next(row) for row in logits]
        assert tokens == [by_hand.next(row) for row in logits]
    with Sampler(SamplerOptions(**OPEN)) as plain:
        assert tokens != [plain.next(row) for row in logits]


def test_samplers_apply_in_the_order_of_llama_cpp() -> None:
    """typical_p gets the tokens that top_n_sigma leaves, of which it takes no logarithm of 0."""
    logits = np.random.default_rng(3).normal(0, 1.5, 200).astype(np.float32)
    left = np.flatnonzero(top_n_sigma(logits, 1.5))
    expected = np.zeros(len(logits))
    expected[left] = typical(logits[left], 0.6)
    assert 1 < np.count_nonzero(expected) < len(left)
    with Sampler(SamplerOptions(**OPEN, top_n_sigma=1.5, typical_p=0.6)) as sampler:
        assert agrees([sampler.next(logits) for _ in range(4000)], expected)


EXCLUDING: dict[str, Any] = {"typical_p": 0.1, "top_n_sigma": 0.1, "xtc_probability": 1.0, "xtc_threshold": 0.0}


@pytest.mark.parametrize("more", [{}, EXCLUDING, {"dynatemp_range": 9.0}, {"mirostat": 1}, {"mirostat": 2}], ids=str)
@pytest.mark.parametrize("penalty", [1.0, 1.0 + 1e-12])
def test_at_temperature_0_no_sampler_is_used(more: dict[str, Any], penalty: float) -> None:
    with Sampler(SamplerOptions(repeat_penalty=penalty, **more)) as sampler:
        assert sampler.next(LOGITS) == LOGITS.argmax()


@pytest.mark.parametrize("last", [0, 1, 3, 64, -1])
def test_the_penalties_look_back_on_so_many_tokens(last: int) -> None:
    """Of tokens in falling order, the likeliest comes again when it is no longer counted, with -1 never."""
    logits = np.linspace(1, 0, 120, dtype=np.float32)
    with Sampler(SamplerOptions(presence_penalty=2.0, repeat_last_n=last)) as sampler:
        tokens = [sampler.next(logits) for _ in range(100)]
    period = 100 if last < 0 else last + 1
    assert tokens == [index % period for index in range(100)]


def continued(model: Model, lead: float, history: str = "abcdxabc", **options: Any) -> str:
    """Generate the characters of `history`, then the likeliest of "d" and, `lead` below it, "e"."""
    tokens = {text: int(model.tokenize(text)[-1]) for text in "abcdex"}
    pieces = {token: text for text, token in tokens.items()}
    with Sampler(SamplerOptions(**options), model=model) as sampler:
        for text in history:
            logits = np.zeros(model.n_vocab, np.float32)
            logits[tokens[text]] = 1000
            assert sampler.next(logits) == tokens[text]
        logits = np.zeros(model.n_vocab, np.float32)
        logits[tokens["d"]], logits[tokens["e"]] = 50, 50 - lead
        return pieces[sampler.next(logits)]


@pytest.mark.parametrize(
    ("options", "penalty"),
    [
        ({"dry_multiplier": 0.0}, 0.0),
        ({"dry_multiplier": 0.8}, 0.8 * 1.75),  # three tokens are repeated
        ({"dry_multiplier": 0.8, "dry_base": 3.0}, 0.8 * 3.0),
        ({"dry_multiplier": 0.8, "dry_allowed_length": 1}, 0.8 * 1.75**2),
        ({"dry_multiplier": 0.8, "dry_allowed_length": 4}, 0.0),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 4}, 0.0),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, 0.0),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": -1}, 0.8 * 1.75),
        ({"dry_multiplier": 0.8, "dry_sequence_breakers": ("a",)}, 0.8),
        ({"dry_multiplier": 0.8, "dry_sequence_breakers": ("c",)}, 0.0),
        ({"dry_multiplier": 0.8, "dry_sequence_breakers": ()}, 0.8 * 1.75),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_dry_penalizes_a_repetition(model: Model, options: dict[str, Any], penalty: float, temperature: float) -> None:
    """By multiplier * base ** (length - allowed length), within 0.01 of a logit; without a repetition not at all."""
    options = {**options, "temperature": temperature}
    assert continued(model, penalty + 0.01, **options) == "d"
    if penalty:
        assert continued(model, penalty - 0.01, **options) == "e"
    assert continued(model, 0.01, history="abcexabd", **options) == "d"


def test_dry_needs_the_model() -> None:
    with pytest.raises(EngineError, match="dry_multiplier needs a model"):
        Sampler(SamplerOptions(dry_multiplier=0.8))


def test_breakers_of_any_text_are_used(model: Model) -> None:
    """Also of characters that several tokens hold the bytes of."""
    for text in ("é", "日本", "🙂", "\ufffd", "\x01", "x" * 20):
        options = {"dry_multiplier": 0.8, "dry_sequence_breakers": (text,)}
        assert continued(model, 0.8 * 1.75 - 0.01, history="abcdabc", **options) == "e"


UNUSABLE: list[tuple[str, Any]] = [
    *((key, bound) for key, (low, high) in RANGES.items() for bound in (low - 1, high + 1)),
    *(("mirostat", 1.0), ("xtc_threshold", "0.1"), ("top_n_sigma", float("nan")), ("dry_sequence_breakers", "abc")),
    *(
        ("dry_sequence_breakers", wrong)
        for wrong in (("",), ("a\0b",), ("x" * 21,), ("\ud800",), (1,), tuple("abcdefghi"))
    ),
]


@pytest.mark.parametrize(("key", "value"), UNUSABLE, ids=ascii)
def test_values_that_llama_cpp_cannot_use_are_refused(key: str, value: Any) -> None:
    """It would replace some by others, and abort for some."""
    with pytest.raises(EngineError, match=f"^{key} "):
        SamplerOptions(**{key: value})


def test_top_k_does_not_wrap() -> None:
    with pytest.raises(EngineError, match="top_k is 4294967297"):
        Sampler(SamplerOptions(temperature=1.0, top_k=2**32 + 1))
