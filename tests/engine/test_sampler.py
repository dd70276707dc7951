"""Tests of sampling: the argmax is what the chain takes, and a constrained text that ends by itself is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from notes_cli import config, guidance
from notes_cli.engine.model import Model
from notes_cli.engine.sampler import Constraint, Sampler, SamplerOptions
from notes_cli.errors import EngineError, GrammarError
from notes_cli.text.grammar import gbnf_grammar
from notes_cli.text.schema import calls_grammar, schema_grammar

from ..conftest import MakeModel
from ..schemas import HELD, INVALID
from ..zoo import MODELS
from .test_tokens import VOCABULARIES, Vocabulary


def test_the_likeliest_is_what_the_chain_takes() -> None:
    """Also where several are as likely. A penalty that changes nothing has the chain asked."""
    random = np.random.default_rng(0)
    with Sampler(SamplerOptions()) as plain, Sampler(SamplerOptions(repeat_penalty=1.0 + 1e-12)) as chain:
        for _ in range(50):
            logits = random.integers(0, 40, 200).astype(np.float32)
            assert plain.next(logits) == chain.next(logits)


VALIDATOR = jsonschema.Draft202012Validator


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The model that ships: 1,536 tokens, most of several characters."""
    with Model(config.shipped_model()) as opened:
        yield opened


def written(model: Model, grammar: str, seed: int, options: SamplerOptions | None = None) -> str:
    """Generate random tokens that the grammar allows, until its end."""
    random = np.random.default_rng(seed)
    pieces = [model.token_bytes(token) for token in range(model.n_vocab)]
    closing = (b'"', b"}", b"]", b"1", b"A", b"0", b"-", b"@", b".", b"com", b"/", b":", b"b", b"D", b"M")
    closes = np.array([piece in closing for piece in pieces])
    length, text = int(random.integers(1, 40)), b""
    with Sampler(options or SamplerOptions(), Constraint(model, grammar)) as sampler:
        for count in range(3000):
            logits = random.normal(0, 3, model.n_vocab).astype(np.float32)
            if count > length:
                logits[model.end_tokens] += 12
                logits[closes] += 10
            token = sampler.next(logits)
            if model.ends(token):
                return text.decode()
            text += pieces[token]
    raise AssertionError(f"no end: {text[:200]!r}")


def fits(model: Model, grammar: str, text: str) -> bool:
    """Return True if the grammar accepts the tokens of a text, and allows its end."""
    constraint = Constraint(model, grammar)
    logits = np.zeros(model.n_vocab, np.float32)
    for token in model.tokenize(text).tolist():
        if token not in constraint.allowed(logits):
            with pytest.raises(EngineError, match="does not go on"):
                constraint.accept(token)
            return False
        constraint.accept(token)
    ends = set(constraint.allowed(logits).tolist()) & {*model.end_tokens}
    assert bool(ends) == constraint.complete
    return constraint.complete


@pytest.mark.parametrize("schema", HELD, ids=lambda schema: json.dumps(schema)[:60])
def test_all_that_is_written_is_valid(model: Model, schema: Any) -> None:
    """It parses, and another library finds nothing against the schema; greedily and drawn."""
    grammar = schema_grammar(schema)
    validator = VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER)
    for seed in range(6):
        drawn = SamplerOptions(temperature=1.0, seed=seed)
        text = written(model, grammar, seed, drawn if seed % 2 else None)
        validator.validate(json.loads(text))


@pytest.mark.parametrize(("schema", "valid", "invalid"), INVALID, ids=lambda value: json.dumps(value)[:40])
def test_what_is_not_valid_cannot_be_written(model: Model, schema: Any, valid: Any, invalid: Any) -> None:
    """A token of it is masked, or its end."""
    grammar = schema_grammar(schema)
    assert fits(model, grammar, json.dumps(valid, ensure_ascii=False))
    assert not fits(model, grammar, json.dumps(invalid, ensure_ascii=False))


def test_the_choice_is_the_likeliest_that_is_allowed(model: Model) -> None:
    random = np.random.default_rng(1)
    grammar = gbnf_grammar('root ::= "accepted" | "refused"')
    for _ in range(20):
        logits = random.normal(size=model.n_vocab).astype(np.float32)
        allowed = Constraint(model, grammar).allowed(logits).tolist()
        starts = [t for t in range(model.n_vocab) if (piece := model.token_bytes(t)) and starts_one(piece)]
        assert allowed == starts
        with Sampler(SamplerOptions(), Constraint(model, grammar)) as sampler:
            best = max(allowed, key=lambda token: logits[token])
            assert sampler.likeliest(logits) == best == sampler.next(logits)


def starts_one(piece: bytes) -> bool:
    return any(word.startswith(piece) for word in (b"accepted", b"refused"))


@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2"])
def test_vocabularies(name: str) -> None:
    """With byte fallback, byte-level and added tokens, exactly those are allowed whose bytes continue the text."""
    (path,) = [path for path in VOCABULARIES if path.stem == f"ggml-vocab-{name}"]
    text = "é日🙂 the word<|im_end|></s>\n  <s>"
    with Vocabulary(path) as model:
        constraint = Constraint(model, gbnf_grammar(f"root ::= {json.dumps(text, ensure_ascii=False)}"))
        logits, pieces = np.zeros(model.n_vocab), [model.token_bytes(token) for token in range(model.n_vocab)]
        left = text.encode()
        while left:
            fitting = [t for t, piece in enumerate(pieces) if piece and left.startswith(piece) and not model.ends(t)]
            assert constraint.allowed(logits).tolist() == fitting
            token = max(fitting, key=lambda one: len(pieces[one]))
            constraint.accept(token)
            left = left[len(pieces[token]) :]
        assert constraint.allowed(logits).tolist() == model.end_tokens


def test_a_control_token_is_no_text(make_model: MakeModel) -> None:
    """<|im_start|> would fit into a JSON string unnoticed."""
    with Model(make_model()) as model:
        constraint, logits = Constraint(model, gbnf_grammar(r'root ::= "\"" [^"]* "\""')), np.zeros(model.n_vocab)
        control = int(model.tokenize("<|im_start|>", special=True)[0])
        constraint.accept(int(model.tokenize('"')[0]))
        assert control not in constraint.allowed(logits)
        with pytest.raises(EngineError, match="does not go on as the grammar demands"):
            constraint.accept(control)


def test_bytes_that_are_no_text(make_model: MakeModel) -> None:
    """0xC1 begins no character, and a text does not end within one."""
    with Model(make_model()) as model:
        token = {model.token_bytes(token, special=True): token for token in range(model.n_vocab)}
        constraint, logits = Constraint(model, gbnf_grammar("root ::= [a-z]* [^a-z]*")), np.zeros(model.n_vocab)
        assert token[b"\xc1"] not in constraint.allowed(logits)
        constraint.accept(token[b"\xc3"])
        allowed = {*constraint.allowed(logits).tolist()}
        assert token[b"\xa9"] in allowed and not allowed & {token[b"a"], *model.end_tokens}
        constraint.accept(token[b"\xa9"])
        assert {*model.end_tokens} <= {*constraint.allowed(logits).tolist()}


def test_what_cannot_go_on(make_model: MakeModel) -> None:
    """One line, for logits that leave nothing, and for a grammar whose texts have no end."""
    with Model(make_model()) as model:
        constraint = Constraint(model, gbnf_grammar('root ::= "a"'))
        with pytest.raises(EngineError, match="no token of tiny llama continues the answer"):
            constraint.allowed(np.full(model.n_vocab, -np.inf, np.float32))
        with pytest.raises(GrammarError, match="no token of tiny llama continues the answer"):
            Constraint(model, gbnf_grammar("root ::= root")).allowed(np.zeros(model.n_vocab))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('root ::= s\ns ::= s2 s2 | "a"\ns2 ::= "a" s s | "a" s | "a"', id="in threes and twos"),
        pytest.param('root ::= "a" root | ', id="the end of each rule is that of all before it"),
    ],
)
def test_too_many_ways_to_read_a_text(model: Model, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line after a counted amount of work, where others would take minutes and all memory for one token."""
    monkeypatch.setattr(guidance, "LIMITS", {**guidance.LIMITS, "max_items_in_row": 100, "step_max_items": 2000})
    constraint, logits = Constraint(model, gbnf_grammar(text)), np.zeros(model.n_vocab)
    token = int(model.tokenize("a")[0])
    with pytest.raises(GrammarError, match=r"cannot be used: .*[Tt]oo many items|row has .* items") as caught:
        for _ in range(200):
            assert token in constraint.allowed(logits)
            constraint.accept(token)
    assert "\n" not in str(caught.value)


# The files of llama.cpp's folder grammars/.
OWN = ("arithmetic", "c", "chess", "english", "japanese", "json", "json_arr", "list")


@pytest.mark.parametrize("name", OWN)
def test_grammars_of_llama_cpp(model: Model, name: str) -> None:
    text = (MODELS.parent / "llama.cpp" / "grammars" / f"{name}.gbnf").read_text(encoding="utf-8")
    random, constraint = np.random.default_rng(0), Constraint(model, gbnf_grammar(text))
    with Sampler(SamplerOptions(), constraint) as sampler:
        for _ in range(100):
            if model.ends(sampler.next(random.normal(0, 3, model.n_vocab).astype(np.float32))):
                break


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        ('root ::= [a-z]* "b"', ["b", "ab", "abab"], ["", "a", "bA"]),  # the longest match would never end
        ('root ::= "abcd" | [a-z] "bx"', ["abcd", "abx"], ["abc", "ab"]),
        ('root ::= [0-9]+ ("." [0-9]+)? "."', ["5.", "5.1."], ["5", "5.1"]),
        (
            r'root ::= "\u00e9\x41\U0001F642" [^\]\x5E-a\-"]',
            ["éA🙂z", "éA🙂é"],
            ["éA🙂-", "éA🙂^", "éA🙂a", "éA🙂]", "éA"],
        ),
        (
            'root ::= ("ab"{2} | "c"{1,2} | "d"{2,} | )',
            ["abab", "c", "cc", "dd", "dddd", ""],
            ["ab", "ccc", "d", "abb"],
        ),
        ('root ::= a-b | a\na ::= # none\n  "x" |\n  (\n "y"\n )\na-b ::= "z" .', ["x", "y", "zä"], ["z", "zzz"]),
        ('root ::= "(" root? ")" | root "+"', ["()", "(())", "()++", "(()+)+"], ["(", "+", "(("]),
        ('root ::= A a\nA ::= "1"\na ::= "2"', ["12"], ["11", "21"]),
    ],
)
def test_gbnf(model: Model, grammar: str, valid: list[str], invalid: list[str]) -> None:
    made = gbnf_grammar(grammar)
    assert [text for text in valid if not fits(model, made, text)] == []
    assert [text for text in invalid if fits(model, made, text)] == []


def test_calls(model: Model) -> None:
    numbers = {"$defs": {"N": {"type": "integer"}}, "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
    grammar = calls_grammar({"add": numbers, "now": {}, "say": {"properties": {"text": {"type": "string"}}}})
    assert fits(model, grammar, '{"name": "add", "arguments": {"n": 3}}')
    assert fits(model, grammar, '{"name": "now", "arguments": {}}')
    for name, arguments in (("add", "{}"), ("no", "{}"), ("now", '{"n": 3}')):
        assert not fits(model, grammar, f'{{"name": "{name}", "arguments": {arguments}}}')
    names = {json.loads(written(model, grammar, seed))["name"] for seed in range(12)}
    assert names == {"add", "now", "say"}
