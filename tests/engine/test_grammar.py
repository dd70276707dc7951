"""Answers that are held to a grammar: each text that ends by itself is valid, whatever the logits say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from notes_cli import config
from notes_cli.engine import native
from notes_cli.engine.grammar import Grammar
from notes_cli.engine.model import Model
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.errors import EngineError, GrammarError
from notes_cli.text.grammar import check_grammar
from notes_cli.text.schema import schema_grammar

from ..conftest import MakeModel
from ..zoo import MODELS
from .schemas import TAKEN

STEPS = 1 << 28  # that one call may make (native/notes_grammar.h)


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
        with pytest.raises(EngineError, match="no token of tiny llama continues the answer"):
            grammar.choose(np.full(model.n_vocab, -np.inf, np.float32))


@pytest.mark.parametrize("text", ['root ::= root "a" | "b"', 'root ::= x "a"\nx ::= | root'])
def test_left_recursion(model: Model, text: str) -> None:
    """An error in one line."""
    with pytest.raises(GrammarError, match="a rule begins with itself"):
        Grammar(model, text)


def spelt(model: Model, text: str) -> list[int]:
    """A text in tokens of one character each: most of its ways are then open for long."""
    return [int(token) for character in text for token in model.tokenize(character)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('root ::= s\ns ::= s2 s2 | "a"\ns2 ::= "a" s s | "a" s | "a"', id="in threes and twos"),
        pytest.param('root ::= "a" root x | "a" root y | "z"\nx ::= "b"\ny ::= "b"', id="one of two ends each time"),
        pytest.param('root ::= a root "x" | "z"\na ::= b\nb ::= "" | "y"', id="what begins a rule may be empty"),
    ],
)
def test_too_many_ways_to_read_a_text(model: Model, text: str) -> None:
    """One line after a counted number of steps, where llama.cpp would take minutes and all memory for one token."""
    check_grammar(text)
    with (
        pytest.raises(GrammarError, match=r"the grammar cannot be used: it can be read in too many ways \(more than"),
        Grammar(model, text) as grammar,
    ):
        for token in spelt(model, "a" * 200):
            grammar.among(np.zeros(model.n_vocab, np.float32))
            assert native.grammar_steps() <= STEPS
            grammar.accept(token)
            assert native.grammar_steps() <= STEPS
    assert STEPS < native.grammar_steps() < STEPS + STEPS // 64


def test_a_grammar_that_failed_is_as_it_was(model: Model) -> None:
    """The token was not accepted, and one that can be read in fewer ways still is."""
    with Grammar(model, 'root ::= s "b" | "a"+ "c"\ns ::= s2 s2 | "a"\ns2 ::= "a" s s | "a" s | "a"') as grammar:
        [token] = spelt(model, "a")
        accepted = 0
        with pytest.raises(GrammarError, match="too many ways"):
            while accepted < 200:
                grammar.accept(token)
                accepted += 1
        assert accepted > 2 and grammar.allows(spelt(model, "c")[0])


def most_steps(model: Model, grammar: Grammar, tokens: list[int]) -> int:
    """The steps of the largest call while all tokens of the model are tried before each of these."""
    most = 0
    for token in tokens:
        assert np.isfinite(grammar.among(np.zeros(model.n_vocab, np.float32))[token])
        most = max(most, native.grammar_steps())
        grammar.accept(token)
        most = max(most, native.grammar_steps())
    return most


def test_deep_nesting_is_not_many_ways(model: Model) -> None:
    """JSON in JSON, 50 deep, and a thousand values of which one is to be given: a thirtieth of the steps there may
    be, for this vocabulary."""
    deep = "[" * 50 + '{"a": "b"}' + "]" * 50
    with Grammar(model, schema_grammar(True)) as grammar:
        assert most_steps(model, grammar, [int(token) for token in model.tokenize(deep)]) < STEPS // 30
        assert any(grammar.allows(end) for end in model.end_tokens)
    names = [f"name {number}" for number in range(1000)]
    with Grammar(model, schema_grammar({"enum": names})) as grammar:
        assert most_steps(model, grammar, [int(token) for token in model.tokenize('"name 777"')]) < STEPS // 30
        assert any(grammar.allows(end) for end in model.end_tokens)


# The files of llama.cpp's folder grammars/.
OWN = ("arithmetic", "c", "chess", "english", "japanese", "json", "json_arr", "list")


@pytest.mark.parametrize("name", OWN)
def test_grammars_of_llama_cpp(model: Model, name: str) -> None:
    """They need a thousandth of the steps that there may be, whatever is written."""
    text = (MODELS.parent / "llama.cpp" / "grammars" / f"{name}.gbnf").read_text(encoding="utf-8")
    check_grammar(text)
    random, most = np.random.default_rng(0), 0
    with Grammar(model, text) as grammar:
        for _ in range(100):
            left = grammar.among(random.normal(0, 3, model.n_vocab).astype(np.float32))
            most = max(most, native.grammar_steps())
            token = next((int(one) for one in np.argsort(-left)[:50] if grammar.allows(int(one))), None)
            if token is None or model.ends(token):
                break
            grammar.accept(token)
            most = max(most, native.grammar_steps())
    assert 0 < most < STEPS // 300


def test_many_ways_to_one_rule(model: Model) -> None:
    """The search for left recursion visits a rule once: there are 2 to the 60 ways to the last of these. It still finds
    what it is for."""
    rules = [f"r{number} ::= r{number + 1} | r{number + 1}" for number in range(60)]
    for last, found in (('r60 ::= "a"', False), ('r60 ::= "a" | r30 "b"', True)):
        text = "\n".join(["root ::= r0", *rules, last])
        if found:
            with pytest.raises(GrammarError, match="a rule begins with itself"):
                Grammar(model, text)
        else:
            with Grammar(model, text) as grammar:
                assert grammar.allows(spelt(model, "a")[0])


@pytest.mark.parametrize(
    "values",
    [
        [f"City number {number} of the region" for number in range(1500)],
        [*range(5000)],
        [{"a": number} for number in range(1500)],
        [f"{'ab' * (number % 7)}{number}" for number in range(1200)],
        ["", *(f"é{number}" for number in range(1100)), "é", '"', "\\"],
    ],
    ids=["cities", "numbers", "objects", "prefixes", "marks"],
)
def test_many_values(model: Model, values: list[Any]) -> None:
    """What they begin with alike is written once, so that a text can go on in few ways: each can be written and ends
    there, and nothing else."""
    text = schema_grammar({"enum": values})
    check_grammar(text)
    end = next(token for token in range(model.n_vocab) if model.ends(token))
    for value in values[::97] + values[-3:]:
        tokens = spelt(model, json.dumps(value, ensure_ascii=False))
        with Grammar(model, text) as grammar:
            for token in tokens:
                assert grammar.allows(token)
                grammar.accept(token)
            assert grammar.allows(end)
    with Grammar(model, text) as grammar:
        assert not grammar.allows(spelt(model, "~")[0])
