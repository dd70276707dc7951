"""Tests refusals of a request: the status, the message and the place, without any effect on others."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from notes_cli.engine.sampler import RANGES, SamplerOptions
from notes_cli.serve.messages_api import parse_messages
from notes_cli.serve.parsing import DRAWN, ChatRequest, parse_chat, parse_completion
from notes_cli.serve.prepare import Options
from notes_cli.serve.refusals import Refused
from notes_cli.serve.responses_api import parse_responses
from notes_cli.serve.server import CUT_OFF
from notes_cli.text.erratum import OfField

from .conftest import QUESTION, Json, Served, reply_text, started
from .test_constraints import TOOLS, allowed, held

ASK: Json = {"role": "user", "content": QUESTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NAMELESS = {**CALL, "function": {"name": "", "arguments": "{}"}}
LAST: Json = {"role": "assistant", "content": "The date"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
CHOICES = ["accepted", "refused"]
OPTIONS = [{"value": "accepted"}, {"value": "refused"}]
CHOICE: Json = {"type": "choice", "name": "return", "instructions": QUESTION, "choices": OPTIONS}
CHAT, RAW, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
DECISIONS, COMPILE = "/v1/decisions", "/v1/notes/compile"
BODIES: dict[str, Json] = {  # requests that are answered without the changes below
    CHAT: {"messages": [ASK]},
    RAW: {"prompt": "a", "max_tokens": 1},
    RESPONSES: {"input": "x"},
    DECISIONS: {"input": "x", "questions": [CHOICE]},
    COMPILE: {"name": "a", "text": "# Rules\n\nBe kind."},
    "/tokenize": {"content": "x"},
}


def ask(**notes: Any) -> Json:
    return {"notes": {"ask": True, **notes}}


def user(content: Any) -> list[Json]:
    return [{"role": "user", "content": content}]


def question(**changes: Any) -> Json:
    return {"questions": [{**CHOICE, **changes}]}


def form(kind: str) -> Json:
    return {"text": {"format": {"type": kind, "name": "x"}}}


BEGUN = {"messages": [ASK, LAST]}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
NO_TEXT = [{"type": "input_audio"}]
OTHERS: Json = json.loads(  # of other servers, which would change an answer
    """{"functions": [{"name": "f"}], "documents": ["x"], "lora": [{"id": 1}], "use_beam_search": true,
    "modalities": ["audio"], "guided_regex": "a+", "frequenzy": 1}"""
)
REFUSED: list[tuple[str, Json, str, str]] = [  # path, changed keys, `param`, keyword of the message
    (CHAT, {"messages": []}, "messages", ""),
    (CHAT, {"messages": [1]}, "messages[0]", ""),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", ""),
    (CHAT, {"messages": user(None)}, "messages[0].content", ""),
    (CHAT, {"messages": user([{"type": "text"}])}, "messages[0].content[0].text", ""),
    (CHAT, {"messages": user([{"type": "image_url"}])}, "messages[0].content[0].image_url", ""),
    (CHAT, {"messages": [ASK, {**ASK, "tool_calls": [CALL]}]}, "messages", "messages[1] calls a tool, which only"),
    (CHAT, {"messages": [ASK, {"role": "assistant", "tool_calls": [NAMELESS]}, ASK]}, "messages", "messages[1] calls"),
    (
        CHAT,  # counted as sent: before skills are added
        {
            "messages": [{"role": "system", "content": ""}, ASK, {"role": "assistant", "tool_calls": [NAMELESS]}],
            "notes": {"splice": ["returns"]},
        },
        "messages",
        "messages[2] calls",
    ),
    (CHAT, {"messages": [LAST]}, "messages", "nothing to answer"),
    (CHAT, {"messages": [ASK, LAST, LAST]}, "messages", "ends with two of the assistant"),
    (CHAT, {"messages": [ASK, {**LAST, "tool_calls": [CALL]}]}, "messages", "nothing to answer"),
    (CHAT, {**BEGUN, "continue_final_message": False}, "messages", "nothing to answer"),
    (CHAT, {**BEGUN, "add_generation_prompt": True}, "messages", "nothing to answer"),
    (CHAT, {"continue_final_message": True}, "messages", "no text of the assistant"),
    (CHAT, {"add_generation_prompt": False}, "messages", "no text of the assistant"),
    (CHAT, {**BEGUN, "continue_final_message": 1}, "continue_final_message", "true or false"),
    (CHAT, {**BEGUN, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "equal"),
    (CHAT, {**BEGUN, "reasoning_effort": "low"}, "reasoning_effort", "beginning of the answer"),
    (CHAT, {**BEGUN, "response_format": {"type": "json_object"}}, "response_format", "beginning of the answer"),
    (CHAT, {**BEGUN, "tools": TOOLS, "tool_choice": "required"}, "tool_choice", "beginning of the answer"),
    (CHAT, {**BEGUN, "notes": {"session": "x"}}, "notes.session", "beginning of the answer"),
    (CHAT, {**BEGUN, **ask()}, "notes.ask", "beginning of the answer"),
    (RESPONSES, {"input": [ASK, LAST]}, "input", "nothing to answer"),
    (CHAT, {"temperature": -1}, "temperature", ""),
    (CHAT, {"temperature": int("9" * 400)}, "temperature", ""),
    (CHAT, {"n": 10**9}, "n", ""),
    (CHAT, {"stop": [""]}, "stop", ""),
    (CHAT, {"seed": 1.5}, "seed", ""),
    (CHAT, {"top_logprobs": 1}, "top_logprobs", ""),
    (RAW, {"stop": ["b", "a" * 1001]}, "stop", ""),
    (RAW, {"prompt": [5] * 5000}, "prompt", ""),
    (RAW, {"echo": True, "logprobs": 2, "max_tokens": 0}, "logprobs", ""),
    ("/tokenize", {"content": None}, "content", ""),
    *((CHAT, {key: value}, key, "Unknown") for key, value in OTHERS.items()),
    # Forms and tools.
    (CHAT, {"response_format": held({"if": {}})}, "response_format", "uses 'if'"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or json_schema"),
    (CHAT, {"grammar": "root ::= x"}, "grammar", "there is no rule x"),
    (CHAT, {"grammar": "root ::= root"}, "", "no token of"),
    (CHAT, {"grammar": "root ::= " + "(" * 30}, "grammar", "nested more than 20 deep"),
    (CHAT, {"grammar": "x", "response_format": {"type": "json_object"}}, "grammar", "not to both"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools", ""),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools", "is not a function with a name"),
    (CHAT, {"tools": [3]}, "tools", ""),
    (CHAT, {"tools": [*TOOLS, TOOLS[0]]}, "tools", "two tools of the name get_weather"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "there is no tool to call"),
    (CHAT, {"tools": TOOLS, "tool_choice": "often"}, "tool_choice", "must be none, auto, required"),
    (
        CHAT,
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
        "missing",
    ),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "'fly'"),
    (CHAT, {"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", "must be a list"),
    (CHAT, {"tools": TOOLS, "tool_choice": allowed("x", "add")}, "tool_choice.allowed_tools.mode", "must be"),
    (CHAT, {"tools": TOOLS, "tool_choice": allowed("auto", "fly")}, "tool_choice", "'fly', which is none"),
    (CHAT, {"tools": TOOLS, "notes": {"session": "held"}}, "messages", "a session keeps its messages"),
    # `notes`.
    (CHAT, {"notes": {"sprice": ["returns"]}}, "notes.sprice", "Unknown"),
    (CHAT, {"notes": {"reuse": "bold"}}, "notes.reuse", "exact, compiled or learned"),
    (CHAT, {"notes": {"errata": ["colour=red"], "splice": ["returns"]}}, "notes", "colour"),
    (CHAT, {"notes": {"choices": CHOICES}}, "notes.choices", ""),  # needs `ask`
    (CHAT, {"notes": {"memory": "returns"}}, "notes.memory", ""),  # needs `ask` or a session
    (CHAT, ask(choices=CHOICES, wnat=1), "notes.wnat", ""),
    (CHAT, {"notes": {"ask": 1}}, "notes.ask", ""),
    (CHAT, ask(place="here"), "notes.place", ""),
    (CHAT, ask(seam=-1), "notes.seam", ""),
    (CHAT, ask(method="nonsense"), "notes.method", ""),
    (CHAT, ask(choices=["yes", "yes"]), "notes.choices", ""),
    (CHAT, ask(fields=["date=1"]), "notes.fields", ""),
    (CHAT, {**ask(), "n": 2}, "n", ""),
    (CHAT, {**ask(), "stop": "x"}, "stop", ""),
    (CHAT, {**ask(), "messages": [ASK, LAST, ASK]}, "messages", ""),
    (COMPILE, {"text": "a b\n" * 4000}, "text", ""),  # its length shows only by counting
    (COMPILE, {"text": "---\nname: x\n---\n"}, "text", ""),
    (COMPILE, {"text": " "}, "text", ""),
    (COMPILE, {"name": ""}, "name", ""),
    (COMPILE, {"path": "/etc/passwd"}, "path", ""),
    # The Responses API.
    (RESPONSES, {"input": None}, "input", ""),
    (RESPONSES, {"input": [{"content": "x"}]}, "input[0].role", ""),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type", ""),
    (RESPONSES, {"input": user([{"type": "input_file"}])}, "input[0].content[0].type", ""),
    (RESPONSES, {"input": [ASK, {"role": "robot", "content": "x"}]}, "input[1].role", "must be one of"),
    (RESPONSES, {"input": [{"type": "reasoning"}]}, "input", ""),
    (RESPONSES, {"input": "May I return this? " * 20_000}, "input", ""),
    (RESPONSES, {"n": 2}, "n", ""),
    (RESPONSES, {"inputs": 2}, "inputs", ""),
    (RESPONSES, {"background": True}, "background", ""),
    (RESPONSES, {"tools": "all"}, "tools", ""),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", ""),
    (RESPONSES, {"metadata": {"a": [1, 1e999]}}, "metadata.a[1]", ""),
    (RESPONSES, {"instructions": 5}, "instructions", ""),
    (RESPONSES, {"text": {"format": []}}, "text.format", ""),
    (RESPONSES, form("json_schema"), "text.format.schema", ""),
    (RESPONSES, {"reasoning": {"effort": "most"}}, "reasoning.effort", ""),
    (RESPONSES, {"tools": [TOOL], "tool_choice": {"type": "function", "name": 5}}, "tool_choice.name", ""),
    # Decisions.
    (DECISIONS, {"input": None}, "input", "must be a string"),
    (DECISIONS, {"input": [{"role": "assistant", "content": "x"}]}, "input[0].role", "must be user"),
    (DECISIONS, {"input": user(NO_TEXT)}, "input[0].content[0].type", "input_text"),
    (DECISIONS, {"input": "A customer brings a book. " * 9000}, "input", "maximum context length"),
    (DECISIONS, {"questions": []}, "questions", "1 to 128 questions"),
    (DECISIONS, {"questions": [CHOICE] * 129}, "questions", "1 to 128 questions"),
    (DECISIONS, question(type="box"), "questions[0].type", "predicate, choice or score"),
    (DECISIONS, question(choices=OPTIONS[:1]), "questions[0].choices", "a list of 2 to 256 options"),
    (DECISIONS, question(choices=None), "questions[0].choices", "2 to 256 options"),
    (DECISIONS, question(choices=[{"value": str(n)} for n in range(257)]), "questions[0].choices", "2 to 256"),
    (DECISIONS, question(choices=[OPTIONS[0]] * 2), "questions[0]", "two or more different"),
    (DECISIONS, question(choices=[{"value": 1}, OPTIONS[0]]), "questions[0].choices[0].value", "boolean"),
    (DECISIONS, {"questions": [{"type": "score", "instructions": "x"}]}, "questions[0].levels", "2 to 256 options"),
    (DECISIONS, question(instructions=""), "questions[0]", "no instructions"),
    (DECISIONS, question(weight=2), "questions[0].weight", "Unknown"),
    (DECISIONS, {"stream": True}, "stream", "not streamed"),
    (DECISIONS, {"notes": {"session": "x"}}, "notes.session", "does not go with"),
    (DECISIONS, {"temperature": 1}, "temperature", "Unknown"),
]
NOT_FOUND: list[tuple[str, Json, str, str]] = [
    (CHAT, {"model": "gpt-5@nothing"}, "notes.splice", "no compiled skill"),
    (CHAT, {"notes": {"splice": ["return"]}}, "notes.splice", "no compiled skill"),
    (CHAT, {"notes": {"splice": ["../../x"]}}, "notes.splice", "no compiled skill"),
    (CHAT, {"notes": {"splice": ["/etc/passwd"]}}, "notes.splice", "no compiled skill"),
    (CHAT, ask(memory="return"), "notes.memory", ""),
    (RESPONSES, {"previous_response_id": "resp_none"}, "previous_response_id", ""),
]


@pytest.mark.parametrize(
    ("status", "path", "given", "param", "word"),
    [(400, *one) for one in REFUSED] + [(404, *one) for one in NOT_FOUND],
)
def test_what_is_refused(served: Served, status: int, path: str, given: Json, param: str, word: str) -> None:
    """The error names the parameter."""
    body = json.dumps({**BODIES[path], **given}).replace("Infinity", "1e999")
    reply = served.http.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"] or "") == param and error["message"] and word in error["message"], error


def test_what_is_refused_is_answered_otherwise(served: Served) -> None:
    """The control: requests without the changes of the table; the error is one of OpenAI's client."""
    for path, body in BODIES.items():
        assert path == COMPILE or served.http.post(path, json=body).status_code == 200, path
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.chat.completions.create(model="tiny@nothing", messages=[ASK])  # type: ignore[list-item]
    assert caught.value.code == "skill_not_found"


def test_a_correction_that_would_leave_no_room(own: Served) -> None:
    """Refused with the limit, as each prompt with the skill would have it."""

    def correct(field: str, value: str) -> Any:
        return own.http.post("/v1/notes/errata", json={"field": field, "value": value})

    for value, says in (("1" * 2000, "tokens: 256 at most"), ("1" * 100_000, "maximum context length is 4096 tokens")):
        reply = correct("date", value)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "value"
        assert says in reply.json()["error"]["message"]
    assert reply_text(own.ask(splice=["returns"])) == "accepted"
    text = "".join(f"k{number}: v\n" for number in range(9)) + "\n- If the k1 is v then the fee is normal.\n"
    assert own.http.post("/v1/notes/compile", json={"name": "many", "text": text}).status_code == 200
    replies = [correct(f"k{number}", "~" * 200) for number in range(9)]
    assert [one.status_code for one in replies][:2] == [200, 200] and replies[-1].status_code == 400, replies[0].text
    assert "the corrections of many would have" in replies[-1].json()["error"]["message"]
    assert own.chat([ASK], notes={"splice": ["many"]}, max_tokens=1)["choices"]
    assert correct("k8", "v").status_code == 200, "what the text says is taken back, always"


def test_more_prompts_than_ever_wait(library: Path) -> None:
    """Not with 429, as trying again would not help."""
    with started(library, Options(parallel=2, queue=2)) as served:
        reply = served.http.post("/v1/completions", json={"prompt": [QUESTION] * 5, "max_tokens": 1})
        assert reply.status_code == 400 and "Retry-After" not in reply.headers
        assert "5 prompts" in reply.json()["error"]["message"]
        assert served.http.post("/v1/completions", json={"prompt": [QUESTION] * 4, "max_tokens": 1}).status_code == 200


def test_new_values_of_fields() -> None:
    """Converted to text as in JSON; those of `fields` are added to the errata."""
    notes = {"errata": {"a": True, "b": 3, "c": 1.5, "d": "True"}, "fields": {"date": "2026-07-01"}}
    found = parse_chat({"messages": [ASK], "notes": notes}).notes.errata
    assert found == ("a=true", "b=3", "c=1.5", "d=True", "date=2026-07-01") and isinstance(found[-1], OfField)
    for key in ("errata", "fields"):
        for given in ({"date=x": "y"}, {"": "y"}, {"date": None}, {"date": []}):
            with pytest.raises(Exception, match=rf"notes.{key} must be an object of fields and texts"):
                parse_chat({"messages": [ASK], "notes": {key: given}})


def test_a_single_question_leaves_nothing_for_others(served: Served) -> None:
    """Its sequence is closed, and K/V that was edited in place is in no other prompt."""
    free = served.at_context(lambda: served.scheduler.workspace.context.n_free)
    notes: Json = {"ask": True, "splice": ["returns"], "fields": {"date": "2026-07-01"}, "method": "field"}
    served.chat([ASK], notes=notes)
    assert served.at_context(lambda: served.scheduler.workspace.context.n_free) == free
    assert reply_text(served.ask(splice=["returns"])) == "accepted"


def test_a_client_that_is_cut_off_is_no_news(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn logs it as an error of the application; its other messages are logged."""
    log = logging.getLogger("uvicorn.error")
    log.error(f"{CUT_OFF}.")
    log.error("something else")
    assert [one.getMessage() for one in caplog.records if one.name == log.name] == ["something else"]


# Parameters of other servers: those that change no answer are ignored.

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
    assert reply_text(served.chat([ASK], notes={"splice": ["returns"]}, **given)) == "accepted"
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
    """A line per new key that is ignored, and one per request with its tokens, or why it was refused; none for what
    monitors request."""
    with started(tmp_path_factory.mktemp("logged")) as served:
        capfd.readouterr()  # the last line of the server before
        for _ in range(2):
            served.chat([ASK], n_keep=4, min_keep=0, moderation=None, max_tokens=1)
        served.http.post("/v1/completions", json={"prompt": "a", "n_keep": 4, "priority": 1, "max_tokens": 1})
        served.chat([ASK], 400, keep_alive=1, documents=[2])
        with served.http.stream(
            "POST", "/v1/messages", json={"messages": [ASK], "max_tokens": 1, "stream": True}
        ) as got:
            got.read()
        served.http.get("/health")
        served.http.get("/v1/none")
    log = [re.sub(r"[\d,]+ ms", "N ms", line) for line in capfd.readouterr().err.splitlines()]
    assert [line for line in log if "ignored" in line] == ["ignored: n_keep, min_keep", "ignored: priority"]
    requests = [re.sub(r"\(\d+ reused", "(R reused", line) for line in log if line.startswith(("POST", "GET"))]
    requests = [line.partition(". There are /health")[0] for line in requests]
    assert sorted(requests) == [  # a stream's line may come after that of the next request
        "GET /v1/none 404, N ms: there is no '/v1/none' here",
        *["POST /v1/chat/completions 200, prompt 13 tokens (R reused, N ms), answer 1, N ms"] * 2,
        "POST /v1/chat/completions 400, N ms: Unknown parameter: 'documents'.",
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
        *((key, bound) for key, (low, high) in RANGES.items() for bound in (low - 2, high + 1)),
        *(("mirostat", 1.5), ("typical_p", "0.9"), ("dry_sequence_breakers", "\n"), ("dry_sequence_breakers", [""])),
        *(("dry_sequence_breakers", ["x" * 21]), ("dry_sequence_breakers", list("abcdefghi"))),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(Refused, match=f"^{key} must be .* from .*, not|^{key} must be a list .* not") as refused:
        parse_chat({"messages": USER, key: value})
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, key, "invalid_value")
