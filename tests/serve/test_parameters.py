"""Tests parameters of other servers: those that change no answer are ignored, and the others are refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from notes_cli.engine.sampler import RANGES, SamplerOptions
from notes_cli.serve.messages_api import parse_messages
from notes_cli.serve.parsing import DRAWN, ChatRequest, parse_chat, parse_completion
from notes_cli.serve.refusals import Refused
from notes_cli.serve.responses_api import parse_responses

from .conftest import QUESTION, Json, Served, reply_text, started

ASK: list[Json] = [{"role": "user", "content": QUESTION}]

# From clients of llama-server, vLLM, Ollama and OpenAI, with their default values.
DEFAULTS: list[Json] = [
    {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "repeat_last_n": 64},
    {"top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "dynatemp_range": 0.0, "min_keep": 0},
    {"dry_multiplier": 0.0, "dry_base": 1.75, "dry_sequence_breakers": ["\n"], "ignore_eos": False, "lora": []},
    {"dry_multiplier": 0, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "dynatemp_exponent": 1, "top_n_sigma": 0},
    {"n_keep": 4, "n_probs": 0, "t_max_predict_ms": -1, "reasoning_format": "auto", "thinking_budget_tokens": -1},
    {"repetition_penalty": 1.0, "min_tokens": 0, "stop_token_ids": [], "skip_special_tokens": True, "priority": 3},
    {"add_generation_prompt": True, "continue_final_message": False, "include_reasoning": True, "request_id": "1"},
    {"keep_alive": "5m", "think": False, "prompt_cache_options": {"ttl": 1}, "stream_options": None},
    {"logit_bias": {}, "functions": None, "modalities": ["text"], "prediction": None},
    dict.fromkeys(("guided_json", "structured_outputs", "moderation", "web_search_options", "temprature", "options")),
]


@pytest.mark.parametrize("given", DEFAULTS, ids=lambda given: next(iter(given)))
def test_what_changes_nothing_is_ignored(served: Served, given: Json) -> None:
    """The answer is that of a request without it, over both endpoints."""
    assert reply_text(served.chat(ASK, notes={"splice": ["returns"]}, **given)) == "accepted"
    plain, same = (
        served.http.post("/v1/completions", json={"prompt": "The date is", "max_tokens": 4, **more}).json()
        for more in ({}, given)
    )
    assert same["choices"] == plain["choices"]


def test_no_alternatives_without_probabilities(served: Served) -> None:
    """0 is the default of OpenAI's Responses API, which its clients repeat."""
    reply = served.http.post("/v1/responses", json={"input": "x", "top_logprobs": 0, "max_output_tokens": 1})
    assert reply.status_code == 200, reply.text


def test_null_is_no_value_anywhere(served: Served) -> None:
    keys = ("temperature", "max_tokens", "stop", "tools", "tool_choice", "response_format", "logit_bias", "n", "seed")
    more = dict.fromkeys((*keys, "stream", "logprobs", "grammar", "chat_template_kwargs", "mirostat", "n_keep", "x"))
    words = [{"type": "text", "text": QUESTION, "cache_control": None, "x": None}]
    user = {"role": "user", "content": words, "name": None, "tool_calls": None, "x": None}
    notes = {"splice": ["returns"], "errata": None, "fields": None, "session": None, "match": None, "x": None}
    assert reply_text(served.chat([user], notes=notes, **more)) == "accepted"
    inner = {"response_format": {"type": "text", "json_schema": None}, "chat_template_kwargs": {"x": None}}
    assert reply_text(served.chat([user], notes=notes, **inner)) == "accepted"


def test_the_log(library: None, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]) -> None:
    """A line per new key that is ignored, and one per request with its tokens; none for what monitors request."""
    with started(tmp_path_factory.mktemp("logged")) as served:
        capfd.readouterr()  # the last line of the server before
        for _ in range(2):
            served.chat(ASK, n_keep=4, min_keep=0, moderation=None, max_tokens=1)
        served.http.post("/v1/completions", json={"prompt": "a", "n_keep": 4, "priority": 1, "max_tokens": 1})
        served.chat(ASK, 400, keep_alive=1, min_keep=2)
        with served.http.stream("POST", "/v1/messages", json={"messages": ASK, "max_tokens": 1, "stream": True}) as got:
            got.read()
        served.http.get("/health")
        served.http.get("/v1/none")
    log = [re.sub(r"[\d,]+ ms", "N ms", line) for line in capfd.readouterr().err.splitlines()]
    assert [line for line in log if "ignored" in line] == ["ignored: n_keep, min_keep", "ignored: priority"]
    requests = [re.sub(r"\(\d+ reused", "(R reused", line) for line in log if line.startswith(("POST", "GET"))]
    assert sorted(requests) == [  # a stream's line may come after that of the next request
        "GET /v1/none 404, N ms",
        *["POST /v1/chat/completions 200, prompt 13 tokens (R reused, N ms), answer 1, N ms"] * 2,
        "POST /v1/chat/completions 400, N ms",
        "POST /v1/completions 200, prompt 1 tokens (R reused, N ms), answer 1, N ms",
        "POST /v1/messages 200, prompt 13 tokens (R reused, N ms), answer 1, N ms",
    ]


def test_pieces_of_tokens(served: Served) -> None:
    """As in llama-server: a text, or the bytes if they are not UTF-8."""
    ask = {"content": "is 漢", "with_pieces": True}
    found = served.http.post("/tokenize", json=ask).json()["tokens"]
    plain = served.http.post("/tokenize", json={"content": "is 漢"}).json()["tokens"]
    assert [one["id"] for one in found] == plain
    spelt = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in found]
    assert b"".join(spelt) == "is 漢".encode() and {type(one["piece"]) for one in found} == {str, list}


USER: list[Json] = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize("bound", [0, 1], ids=["lowest", "highest"])
@pytest.mark.parametrize(
    "parse",
    [
        lambda more: parse_chat({"messages": USER, **more}),
        lambda more: parse_completion({"prompt": "?", **more})[0],
        lambda more: parse_responses({"input": "?", **more}, list).chat,
        lambda more: parse_messages({"messages": USER, "max_tokens": 9, **more}),
    ],
    ids=["chat", "completion", "responses", "messages"],
)
def test_every_api_takes_the_samplers_of_llama_cpp(parse: Callable[[Json], ChatRequest], bound: int) -> None:
    """By its names; what a request does not have, or has as null, is off."""
    options: Json = {key: bounds[bound] for key, bounds in RANGES.items()}
    breakers = ("\n", "é")[bound:]
    parsed = parse({**options, "dry_sequence_breakers": list(breakers)})
    assert parsed.options.sampling == SamplerOptions(**options, dry_sequence_breakers=breakers, seed=DRAWN)
    assert parse({}).options.sampling == parse(dict.fromkeys(options)).options.sampling == SamplerOptions(seed=DRAWN)
    assert not parsed.ignored


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, bound) for key, (low, high) in RANGES.items() for bound in (low - 1, high + 1)),
        *(("mirostat", 1.5), ("typical_p", "0.9"), ("dry_sequence_breakers", "\n"), ("dry_sequence_breakers", [""])),
        *(("dry_sequence_breakers", ["x" * 21]), ("dry_sequence_breakers", list("abcdefghi"))),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(Refused, match=f"^{key} must be .* from .*, not|^{key} must be a list .* not") as refused:
        parse_chat({"messages": USER, key: value})
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, key, "invalid_value")
