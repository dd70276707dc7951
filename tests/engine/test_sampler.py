"""Tests of sampling: each sampler does as it is defined, and a constrained text is valid."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from notes_cli import config, guidance
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.sampler import RANGES, Constraint, Sampler, SamplerOptions
from notes_cli.errors import EngineError, GrammarError
from notes_cli.text.grammar import gbnf_grammar
from notes_cli.text.schema import calls_grammar, schema_grammar

from ..conftest import MakeModel
from ..schemas import HELD, INVALID, VALUES, random_schema
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


@cache
def pieces_of(model: Model) -> list[bytes]:
    return [model.token_bytes(token) for token in range(model.n_vocab)]


CLOSING = (b'"', b"}", b"]", b"1", b"A", b"0", b"-", b"@", b".", b"com", b"/", b":", b"b", b"D", b"M")


def written(model: Model, grammar: str, seed: int, options: SamplerOptions | None = None) -> str:
    """Generate random tokens that the grammar allows, until its end."""
    random, pieces = np.random.default_rng(seed), pieces_of(model)
    closes = np.array([piece in CLOSING for piece in pieces])
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
    for seed in range(4):
        drawn = SamplerOptions(temperature=1.0, seed=seed)
        text = written(model, grammar, seed, drawn if seed % 2 else None)
        validator.validate(json.loads(text))


@pytest.mark.parametrize(("schema", "valid", "invalid"), INVALID, ids=lambda value: json.dumps(value)[:40])
def test_what_is_not_valid_cannot_be_written(model: Model, schema: Any, valid: Any, invalid: Any) -> None:
    """A token of it is masked, or its end."""
    grammar = schema_grammar(schema)
    assert fits(model, grammar, json.dumps(valid, ensure_ascii=False))
    assert not fits(model, grammar, json.dumps(invalid, ensure_ascii=False))


def test_no_value_is_accepted_that_another_library_refuses(model: Model) -> None:
    """For random schemas that are accepted at all: a keyword that is passed over would be a wrong answer."""
    random, held, refused = Random(2), 0, 0
    for schema in [random_schema(random) for _ in range(60)]:
        try:
            grammar = schema_grammar(schema)
        except GrammarError:
            continue
        validator = VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER)
        for value in VALUES:
            valid = validator.is_valid(value)
            assert valid or not fits(model, grammar, json.dumps(value)), (schema, value)
            held, refused = held + valid, refused + (not valid)
    assert held > 100 and refused > 100


def test_the_choice_is_the_likeliest_that_is_allowed(model: Model) -> None:
    random = np.random.default_rng(1)
    grammar = gbnf_grammar('root ::= "accepted" | "refused"')
    words = b"accepted", b"refused"
    starts = [t for t, piece in enumerate(pieces_of(model)) if piece and any(word.startswith(piece) for word in words)]
    for _ in range(20):
        logits = random.normal(size=model.n_vocab).astype(np.float32)
        allowed = Constraint(model, grammar).allowed(logits).tolist()
        assert allowed == starts
        with Sampler(SamplerOptions(), Constraint(model, grammar)) as sampler:
            best = max(allowed, key=lambda token: logits[token])
            assert sampler.likeliest(logits) == best == sampler.next(logits)


@pytest.mark.parametrize("name", ["phi-3", "gpt-2"])
def test_vocabularies(name: str) -> None:
    """With byte fallback, byte-level and added tokens, exactly those are allowed whose bytes continue the text."""
    (path,) = [path for path in VOCABULARIES if path.stem == f"ggml-vocab-{name}"]
    text = "é日🙂 the word<|im_end|></s>\n  <s>"
    with Vocabulary(path) as model:
        constraint = Constraint(model, gbnf_grammar(f"root ::= {json.dumps(text, ensure_ascii=False)}"))
        logits, tokens, left = np.zeros(model.n_vocab), defaultdict(list), text.encode()
        for token in range(model.n_vocab):
            tokens[model.token_bytes(token)].append(token)
        while left:
            ahead = {t: size for size in range(1, len(left) + 1) for t in tokens[left[:size]] if not model.ends(t)}
            assert constraint.allowed(logits).tolist() == sorted(ahead)
            token = max(ahead, key=ahead.__getitem__)
            constraint.accept(token)
            left = left[ahead[token] :]
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


OPEN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}  # excludes no token
LOGITS = np.random.default_rng(3).normal(0, 1.5, 30).astype(np.float32)


TEMPERATURE, DRAW = ("temp", 1.0), ("dist", 5)
CHAINS: list[tuple[dict[str, Any], list[tuple[Any, ...]]]] = [  # samplers of llama.cpp by name, with their arguments
    ({"top_k": 3}, [("top_k", 3), TEMPERATURE, DRAW]),
    ({"top_p": 0.5}, [("top_p", 0.5, 1), TEMPERATURE, DRAW]),
    ({"min_p": 0.3}, [("min_p", 0.3, 1), TEMPERATURE, DRAW]),
    ({"typical_p": 0.5}, [("typical", 0.5, 1), TEMPERATURE, DRAW]),
    ({"top_n_sigma": 1.0}, [("top_n_sigma", 1.0), TEMPERATURE, DRAW]),
    (
        {"top_n_sigma": 1.5, "typical_p": 0.6},  # min_p first: typical-p takes logarithms
        [("top_n_sigma", 1.5), ("min_p", 1e-30, 1), ("typical", 0.6, 1), TEMPERATURE, DRAW],
    ),
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


EXCLUDING: dict[str, Any] = {"typical_p": 0.1, "top_n_sigma": 0.1, "xtc_probability": 1.0, "xtc_threshold": 0.0}


def test_at_temperature_0_no_sampler_is_used() -> None:
    for more in ({}, EXCLUDING, {"dynatemp_range": 9.0}, {"mirostat": 1}, {"mirostat": 2}):
        for penalty in (1.0, 1.0 + 1e-12):
            with Sampler(SamplerOptions(repeat_penalty=penalty, **more)) as sampler:
                assert sampler.next(LOGITS) == LOGITS.argmax()


def test_the_penalties_look_back_on_so_many_tokens() -> None:
    """Of tokens in falling order, the likeliest comes again when it is no longer counted, with -1 never."""
    logits = np.linspace(1, 0, 120, dtype=np.float32)
    for last in (0, 1, 3, 64, -1):
        with Sampler(SamplerOptions(presence_penalty=2.0, repeat_last_n=last)) as sampler:
            tokens = [sampler.next(logits) for _ in range(100)]
        period = 100 if last < 0 else last + 1
        assert tokens == [index % period for index in range(100)], last


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


def test_values_that_llama_cpp_cannot_use_are_refused() -> None:
    """It would replace some by others, and abort for some: a top_k that would wrap, DRY without a tokenizer."""
    for key, value in UNUSABLE:
        with pytest.raises(EngineError, match=f"^{key} "):
            SamplerOptions(**{key: value})
    with pytest.raises(EngineError, match="top_k is 4294967297"):
        Sampler(SamplerOptions(temperature=1.0, top_k=2**32 + 1))
    with pytest.raises(EngineError, match="dry_multiplier needs a model"):
        Sampler(SamplerOptions(dry_multiplier=0.8))
