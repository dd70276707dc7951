"""Answers that are held to a grammar: each text that ends by itself is valid, whatever the logits say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from notes_cli import config
from notes_cli.engine.grammar import Grammar
from notes_cli.engine.model import Model
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.errors import EngineError, GrammarError
from notes_cli.text.schema import schema_grammar

from ..conftest import MakeModel
from .schemas import TAKEN


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The model that ships: 1,536 tokens, most of several characters."""
    with Model(config.shipped_model()) as opened:
        yield opened


def written(model: Model, grammar: str, random: np.random.Generator, options: SamplerOptions | None = None) -> str:
    """A text of random tokens that the grammar allows, which comes to its end after a while."""
    pieces = [model.token_bytes(token) for token in range(model.n_vocab)]
    ends = np.array([model.ends(token) for token in range(model.n_vocab)])
    closes = np.array([piece in (b'"', b"}", b"]", b"1", b"A", b"0", b"-", b"@", b".", b"com") for piece in pieces])
    length, text = int(random.integers(1, 40)), b""
    with Sampler(options or SamplerOptions(), Grammar(model, grammar)) as sampler:
        for count in range(5000):
            logits = random.normal(0, 3, model.n_vocab).astype(np.float32)
            logits[ends] += 12 if count > length else 0
            logits[closes] += 10 if count > length else 0
            token = sampler.next(logits)
            if model.ends(token):
                return text.decode()
            text += pieces[token]
    raise AssertionError(f"no end: {text[:200]!r}")


@pytest.mark.parametrize("schema", TAKEN, ids=str)
def test_all_that_is_written_is_valid(model: Model, schema: Any) -> None:
    """It parses, and another library finds nothing against the schema; greedily and drawn."""
    random, grammar = np.random.default_rng(0), schema_grammar(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for number in range(8):
        drawn = SamplerOptions(temperature=1.0, seed=number)
        text = written(model, grammar, random, drawn if number % 2 else None)
        validator.validate(json.loads(text))


def test_without_a_grammar_it_is_not(model: Model) -> None:
    """The control: the same logits give no JSON then."""
    logits = np.random.default_rng(0).normal(0, 3, model.n_vocab).astype(np.float32)
    with Sampler(SamplerOptions()) as sampler:
        assert model.token_bytes(sampler.next(logits))[:1] not in b"{"


def test_the_choice_is_the_likeliest_that_is_allowed(model: Model) -> None:
    """Also where the first hundreds are not."""
    random = np.random.default_rng(1)
    with Grammar(model, 'root ::= "accepted" | "refused"') as grammar:
        for _ in range(20):
            logits = random.normal(size=model.n_vocab).astype(np.float32)
            allowed = [token for token in range(model.n_vocab) if grammar.allows(token)]
            assert allowed and grammar.choose(logits) == max(allowed, key=lambda token: logits[token])


def test_the_same_seed_gives_the_same_text(model: Model) -> None:
    """And another seed another one."""
    texts = [
        written(model, schema_grammar(True), np.random.default_rng(3), SamplerOptions(temperature=1.0, seed=seed))
        for seed in (1, 1, 2, 3)
    ]
    assert texts[0] == texts[1] and len(set(texts)) > 1


def test_a_control_token_is_no_text(make_model: MakeModel) -> None:
    """<|im_start|> would fit into a string of JSON, and nobody would see it."""
    with Model(make_model()) as model, Grammar(model, r'root ::= "\"" [^"]* "\""') as grammar:
        control = int(model.tokenize("<|im_start|>", special=True)[0])
        assert model.token_bytes(control, special=True) == b"<|im_start|>"
        grammar.accept(int(model.tokenize('"')[0]))
        assert not grammar.allows(control)
        logits = np.zeros(model.n_vocab, np.float32)
        logits[control] = 9
        assert grammar.choose(logits) != control


def test_bytes_that_are_no_text(make_model: MakeModel) -> None:
    """llama.cpp reads 0xC1 0xA1 as an `a`, which it is not in UTF-8, and ends in the middle of a character."""
    with Model(make_model()) as model:
        token = {model.token_bytes(token, special=True): token for token in range(model.n_vocab)}
        with Grammar(model, "root ::= [a-z]* [^a-z]*") as grammar:
            assert not grammar.allows(token[b"\xc1"])
            grammar.accept(token[b"\xc3"])
            assert grammar.allows(token[b"\xa9"]) and not grammar.allows(token[b"a"])
            assert not any(grammar.allows(end) for end in model.end_tokens)
            grammar.accept(token[b"\xa9"])
            assert any(grammar.allows(end) for end in model.end_tokens)


def test_what_cannot_go_on(make_model: MakeModel) -> None:
    """Refused, where llama.cpp would end the process."""
    with Model(make_model()) as model, Grammar(model, 'root ::= "a"') as grammar:
        with pytest.raises(EngineError, match="does not go on as the grammar demands"):
            grammar.accept(int(model.tokenize("b")[0]))
        with pytest.raises(EngineError, match="no token of tiny llama goes on"):
            grammar.choose(np.full(model.n_vocab, -np.inf, np.float32))


@pytest.mark.parametrize("text", ['root ::= root "a" | "b"', 'root ::= x "a"\nx ::= | root'])
def test_left_recursion(model: Model, text: str) -> None:
    """An error in one line."""
    with pytest.raises(GrammarError, match="a rule begins with itself"):
        Grammar(model, text)
