"""Tests Ollama's API and llama-server's own: the same answers as in a chat or a completion of OpenAI's.

Also keys, names and histories of other programs.
"""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notes_cli.engine.limits import ContextOptions
from notes_cli.library.store import Library
from notes_cli.runtime import generate
from notes_cli.serve import event_stream
from notes_cli.serve.llama_api import infill_tokens
from notes_cli.serve.messages_api import parse_messages
from notes_cli.serve.ollama_api import parse_generate, parse_ollama_chat
from notes_cli.serve.parsing import ChatRequest, parse_chat
from notes_cli.serve.prepare import Options
from notes_cli.serve.refusals import Refused
from notes_cli.serve.responses_api import parse_responses
from notes_cli.serve.skill_texts import Placer, SkillTexts

from ..conftest import MakeModel
from ..text.test_tools import SOURCES
from ..thinkers import Scripted
from .conftest import QUESTION, Json, Served, reply_text, started
from .test_agent import call
from .test_apis import PARAMETERS, SCHEMA
from .test_constraints import MARKS
from .test_images import ONE

ASK = {"role": "user", "content": QUESTION}
THINK = {"role": "user", "content": f"{QUESTION} Think first."}
LATE = {"splice": ["returns"], "errata": {"date": "2026-07-01"}}
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def post(served: Served, path: str, status: int = 200, /, **body: Any) -> Any:
    reply = served.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def lines(served: Served, path: str, **body: Any) -> list[Json]:
    return [json.loads(line) for line in served.http.post(path, json=body).text.splitlines()]


def of_ollama(data: Json) -> ChatRequest:
    found = parse_ollama_chat(data)
    assert found is not None
    return found


# Ollama.


@pytest.mark.parametrize(
    ("ollama", "chat"),
    [
        ({"notes": LATE}, {"notes": LATE}),
        ({"model": "any@returns:latest", "messages": [THINK]}, {"messages": [THINK], "notes": {"splice": ["returns"]}}),
        ({"messages": [THINK], "options": {"num_predict": 2.0, "num_ctx": 9}}, {"messages": [THINK], "max_tokens": 2}),
        ({"format": SCHEMA}, {"json_schema": SCHEMA}),
        ({"options": {"stop": ["ot"], "num_predict": -2}}, {"stop": "ot"}),
    ],
)
def test_ollamas_chat_answers_as_a_chat(served: Served, ollama: Json, chat: Json) -> None:
    """Whole and by lines, with counts, times and the reason."""
    wanted = served.chat(**{"messages": [ASK], **chat})
    whole = post(served, "/api/chat", **{"messages": [ASK], "stream": False, **ollama})
    *parts, last = lines(served, "/api/chat", **{"messages": [ASK], **ollama})
    assert "".join(one["message"]["content"] for one in (*parts, last)) == whole["message"]["content"]
    assert whole["message"]["content"] == reply_text(wanted) and not any(one["done"] for one in parts)
    for found in (whole, last):
        counts = found["done"], found["done_reason"], found["prompt_eval_count"], found["eval_count"]
        used = wanted["usage"]
        assert counts == (True, wanted["choices"][0]["finish_reason"], used["prompt_tokens"], used["completion_tokens"])
        assert found["total_duration"] >= found["prompt_eval_duration"] > 0


def test_ollamas_generate(served: Served) -> None:
    """With the template, without it, with log-probabilities, and with nothing to answer."""
    system = {"role": "system", "content": "Be brief."}
    asked = {"prompt": QUESTION, "system": "Be brief.", "stream": False}
    assert post(served, "/api/generate", **asked)["response"] == reply_text(served.chat([system, ASK]))
    raw = {"prompt": "The date is", "raw": True, "logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3}}
    plain = post(served, "/v1/completions", prompt="The date is", max_tokens=3)["choices"][0]["text"]
    parts = lines(served, "/api/generate", **raw)
    assert "".join(one["response"] for one in parts) == plain
    probable = [token for one in parts for token in one.get("logprobs", ())]
    assert len(probable) == 3 and all(len(one["top_logprobs"]) == 2 for one in probable)
    for path in ("/api/generate", "/api/chat"):
        assert post(served, path, model="x", keep_alive=0)["done_reason"] == "load"


def test_ollamas_messages() -> None:
    """Results belong to the calls of their tool, else to the first without one; images are as in a chat."""
    names = ("look", "hear")
    calls: list[Json] = [{"function": {"name": name, "arguments": {"x": 7}}} for name in names]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in reversed(names)]
    talk = [ASK, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls}, *results]
    assert [len(one.tool_calls) for one in of_ollama({"messages": talk}).messages] == [0, 2, 0, 0]
    _, called, *answered = of_ollama({"messages": talk}).messages
    assert [one.tool_call_id for one in answered] == [one.id for one in reversed(called.tool_calls)]
    for result in results:
        del result["tool_name"]
    _, called, *answered = of_ollama({"messages": talk}).messages
    assert [one.tool_call_id for one in answered] == [one.id for one in called.tool_calls]
    data = b64encode(ONE).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    wanted = parse_chat({"messages": [{"role": "user", "content": [url, {"type": "text", "text": QUESTION}]}]})
    assert of_ollama({"messages": [{**ASK, "images": [data]}]}).messages == wanted.messages
    single = parse_generate(lambda *_: [], {"prompt": QUESTION, "images": [data]})
    assert single is not None and single.messages == wanted.messages


def test_ollamas_options() -> None:
    """Options set the samplers and reasoning of a chat; the others are logged as ignored."""
    sampled: Json = {"temperature": 0.5, "top_k": 3.0, "repeat_penalty": 1.5, "seed": 4, "stop": ["x"]}
    given = {
        "options": {**sampled, "num_ctx": 5, "numa": True},
        "think": "high",
        "keep_alive": -1,
        "odd": 1,
        "raw": False,
    }
    found = of_ollama({"messages": [ASK], **given})
    assert found.options == parse_chat({"messages": [ASK], **sampled, "top_k": 3, "think": True}).options
    assert found.stream and found.options.think and found.ignored == ("options.num_ctx", "options.numa", "odd")
    assert not of_ollama({"messages": [ASK], "think": False}).options.think


def test_ollamas_lists(served: Served) -> None:
    """Aliases have digests of their own, as clients take names with one digest for one model."""
    models = served.http.get("/api/tags").json()["models"]
    assert [one["name"] for one in models] == [one.id for one in served.client.models.list()]
    assert len({one["digest"] for one in models}) == len(models) == 3
    [running] = served.http.get("/api/ps").json()["models"]
    length = served.http.get("/v1/models").json()["data"][0]["context_length"]
    assert (running["name"], running["digest"], running["context_length"]) == ("tiny", models[0]["digest"], length)
    shown = post(served, "/api/show", name="tiny")
    assert shown["capabilities"] == ["completion", "tools"] and shown["model_info"]["llama.context_length"] >= length
    assert shown["details"] == models[0]["details"] and served.http.get("/api/version").json()["version"]
    assert post(served, "/api/pull", model="tiny:latest") == {"status": "success"}


@pytest.mark.parametrize(
    ("path", "status", "body", "words"),
    [
        ("/api/chat", 400, {"messages": [{"role": "robot"}]}, "messages[0].role must be"),
        ("/api/chat", 400, {"messages": [ASK], "options": {"num_predict": "x"}}, "options.num_predict must be"),
        ("/api/chat", 400, {"messages": [ASK], "format": "xml"}, "format must be"),
        ("/api/chat", 400, {"messages": [{**ASK, "content": QUESTION * 9000}]}, "maximum context length"),
        ("/api/chat", 404, {"messages": [ASK], "model": "tiny@none"}, "no compiled skill"),
        ("/api/generate", 400, {"prompt": "x", "context": [1]}, "context is not supported"),
        ("/api/generate", 501, {"prompt": "x", "suffix": "y"}, "no tokens for the text between"),
        ("/api/pull", 501, {"model": "llama3"}, "downloads none"),
        ("/api/embed", 501, {"input": "x"}, "no embeddings"),
        ("/api/nothing", 404, {}, "there is no"),
    ],
)
def test_ollamas_errors_are_texts(served: Served, path: str, status: int, body: Json, words: str) -> None:
    assert words in post(served, path, status, **body)["error"]


def test_lines_while_nothing_happens(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blanks before a line keep a connection open; an error ends a stream as a line."""
    monkeypatch.setattr(event_stream, "PING", 0.05)
    release = threading.Event()
    future = served.scheduler.call(release.wait)
    threading.Timer(0.3, release.set).start()
    reply = served.http.post("/api/chat", json={"messages": [ASK], "notes": {"splice": ["returns"]}})
    assert reply.text.startswith("  ") and reply.headers["content-type"] == "application/x-ndjson"
    assert json.loads(reply.text.splitlines()[0])["message"]["content"] == "accepted" and future.result(5)
    release.clear()
    served.scheduler.call(release.wait)
    threading.Timer(0.3, release.set).start()
    [line] = lines(served, "/api/chat", messages=[{**ASK, "content": "x"}], notes={"splice": ["none"]})
    assert "no compiled skill" in line["error"]


def test_the_root_for_clients_that_check_whether_a_server_runs(served: Served, tmp_path: Path) -> None:
    """The page, or with --no-page the words of Ollama, also without a key."""
    assert served.http.get("/").text.startswith("<!doctype") and served.http.head("/").status_code == 200
    with started(tmp_path, Options(page=False, keys=("k",))) as bare:
        assert bare.http.get("/").text == "Ollama is running" and bare.http.head("/").status_code == 200
        assert "API key" in bare.http.get("/api/tags").json()["error"]
        assert bare.http.get("/v1//health").json() == {"status": "ok"}


# llama-server.


def test_a_native_completion(served: Served) -> None:
    """Whole, streamed, several, with its fields, and with what ends it."""
    asked: Json = {
        "prompt": "The date is",
        "n_predict": 4,
        "samplers": ["top_k"],
        "nsigma": 0,
        "logit_bias": [[5, False]],
    }
    choice = post(served, "/v1/completions", prompt="The date is", max_tokens=4, logit_bias={"5": -100})["choices"][0]
    whole = post(served, "/completion", **asked, n_probs=2)
    assert whole["content"] == choice["text"] and len(whole["completion_probabilities"]) == 4
    assert (whole["stop_type"], whole["tokens_predicted"], whole["timings"]["predicted_n"]) == ("limit", 4, 4)
    text = served.http.post("/completion", json={**asked, "stream": True}).text
    *parts, last = [json.loads(one.removeprefix("data: ")) for one in text.strip().split("\n\n")]
    assert "".join(one["content"] for one in parts) == choice["text"] and not any(one["stop"] for one in parts)
    assert last["stop"] and last["content"] == "" and last["tokens_evaluated"] == whole["tokens_evaluated"]
    fields = ["content", "timings/predicted_n", "none/there"]
    several = post(served, "/completions", **{**asked, "prompt": ["The date is", [5, 6]], "response_fields": fields})
    assert several[0] == {"content": choice["text"], "timings/predicted_n": 4} and len(several) == 2
    stop = choice["text"][-1]
    ended = post(served, "/completion", **asked, stop=[stop])
    assert (ended["stop_type"], ended["stopping_word"]) == ("word", stop)


def test_a_template_and_tokens(served: Served) -> None:
    """The text of a chat's prompt, completed, is its answer."""
    for notes in ({}, {"splice": ["returns"]}):
        text = post(served, "/apply-template", messages=[THINK], notes=notes)["prompt"]
        wanted = served.chat([THINK], max_tokens=8)
        if not notes:
            assert post(served, "/completion", prompt=text, n_predict=8)["content"] == reply_text(wanted)
        tokens = post(served, "/tokenize", content=text, parse_special=True)["tokens"]
        assert post(served, "/detokenize", tokens=tokens)["content"] == text and QUESTION in text
    assert post(served, "/detokenize", 400, tokens=[-1])["error"]["param"] == "tokens"


def test_props_and_slots(served: Served) -> None:
    props, slots = served.http.get("/props").json(), served.http.get("/slots?fail_on_no_slot=1").json()
    assert props["default_generation_settings"]["n_ctx"] == slots[0]["n_ctx"] == 4096
    assert props["total_slots"] == len(slots) == 16 and not any(one["is_processing"] for one in slots)
    assert props["chat_template"] and "/" not in props["model_path"]
    assert post(served, "/v1/embeddings", 501, input="x")["error"]["code"] == "no_embeddings"


@pytest.fixture(scope="module")
def coder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model with tools, and with tokens for the text between two."""
    path = make_model("llama", template=SOURCES["Qwen-Qwen2.5-7B-Instruct"], added=(*MARKS[:4], *FIM), trained=8192)
    home = tmp_path_factory.mktemp("coder")
    with started(home, context=ContextOptions(n_ctx=8192, n_threads=1), model=path) as found:
        yield found


def test_the_text_between_two(coder: Served) -> None:
    """By llama-server's route and by Ollama's suffix; what looks like a token in the texts is text."""
    workspace = coder.scheduler.workspace
    model = workspace.model
    pre, suf, mid = (model.tokenize(name, special=True).tolist() for name in FIM)
    ids = [model.tokenize(text).tolist() for text in ("ax", FIM[0], "\n\ny")]
    tokens = infill_tokens(workspace, "ax", FIM[0], [("old", "z" * 9000), ("f", "y")])
    assert tokens == [*tokens[: len(tokens) - sum(map(len, ids)) - 3], *ids[2], *pre, *ids[0], *suf, *ids[1], *mid]
    assert len(ids[1]) > 1 and len(tokens) < 60
    wanted = post(coder, "/v1/completions", prompt=infill_tokens(workspace, "a", "b"), max_tokens=5)["choices"][0][
        "text"
    ]
    assert post(coder, "/infill", input_prefix="", prompt="a", input_suffix="b", n_predict=5)["content"] == wanted
    body = {"prompt": "a", "suffix": "b", "stream": False, "options": {"num_predict": 5}}
    assert post(coder, "/api/generate", **body)["response"] == wanted
    assert "insert" in post(coder, "/api/show", model="x")["capabilities"]


def test_ollamas_calls(coder: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real, model = generate.Sampler, coder.scheduler.workspace.model
    writes = lambda *given: Scripted(model, call("look", x=7)) if given[1:] in ((), (None,)) else real(*given)  # noqa: E731
    monkeypatch.setattr(generate, "Sampler", lambda options, grammar=None, *more: writes(options, grammar))
    tool = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
    whole = post(coder, "/api/chat", messages=[ASK], tools=[tool], stream=False)
    parts = lines(coder, "/api/chat", messages=[ASK], tools=[tool])
    for message in (whole["message"], parts[-2]["message"]):
        [called] = message["tool_calls"]
        assert called["function"] == {"index": 0, "name": "look", "arguments": {"x": 7}}
    assert whole["done_reason"] == parts[-1]["done_reason"] == "stop"


# Keys, names and histories of other programs.

CHOICE = 'root ::= "yes" | "no"'


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"guided_choice": ["yes", "no"]}, {"grammar": CHOICE}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"grammar": CHOICE}),
        ({"guided_grammar": CHOICE}, {"grammar": CHOICE}),
        ({"repetition_penalty": 1.1, "top_k": -1, "stop": ""}, {"repeat_penalty": 1.1, "top_k": 0}),
        ({"cache_salt": "x"}, {"notes": {"cache_salt": "x"}}),
        *(
            (given, {"reasoning_effort": "high"})
            for given in (
                {"reasoning": {"effort": "low"}},
                {"thinking": {"type": "enabled", "budget_tokens": 5}},
                {"think": True},
                {"enable_thinking": True},
                {"chat_template_kwargs": {"enable_thinking": True, "other": 1}},
            )
        ),
        *((given, {}) for given in ({"think": False}, {"thinking": {"type": "disabled"}}, {"reasoning": {}})),
        ({"ttl": 3, "usage": {"include": True}, "options": {"a": 1}, "num_ctx": 9, "cache_control": {}}, {}),
        ({"messages": [{**ASK, "timestamp": 5, "cache_control": {}}]}, {}),
    ],
    ids=lambda given: next(iter(given), ""),
)
def test_keys_of_other_engines(given: Json, same: Json) -> None:
    """Keys with a meaning here are converted to ours, the others are ignored and logged."""
    found, wanted = parse_chat({"messages": [ASK], **given}), parse_chat({"messages": [ASK], **same})
    assert (found.options, found.messages) == (wanted.options, wanted.messages)
    assert found.notes.cache_salt == wanted.notes.cache_salt
    assert not {"num_ctx", "ttl", "options"} & given.keys() - set(found.ignored)


def test_a_tool_is_the_same_in_all_apis() -> None:
    """Also in the order of its keys: else their prompts share no prefix."""
    function = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
    tool = {"type": "function", "function": function}
    anthropic = {"name": "look", "input_schema": PARAMETERS, "description": "Looks."}
    chats = [parse_chat({"messages": [ASK], "tools": [tool]}), of_ollama({"messages": [ASK], "tools": [tool]})]
    chats += [parse_messages({"messages": [ASK], "tools": [anthropic]})]
    chats += [parse_responses({"input": "x", "tools": [{"type": "function", **function}]}, list).chat]
    assert len({json.dumps(chat.tools) for chat in chats}) == 1


def test_calls_that_a_service_executed() -> None:
    """The prompt leaves out calls that a service executed. Files, documents and search results become text."""
    yes = {"type": "text", "text": "Yes."}
    ran = [{"type": "server_tool_use", "id": "1", "name": "s", "input": {}}, {"type": "web_search_tool_result"}]
    found_text = [{"type": "search_result", "source": "s", "title": "t", "content": [yes]}]
    document = {"type": "document", "source": {"type": "content", "content": [yes]}}
    answers = [{"role": "assistant", "content": content} for content in ([*ran, yes], [yes])]
    left, plain = (parse_messages({"messages": [ASK, answer, ASK]}).messages for answer in answers)
    assert left == plain
    for block in (*found_text, document, {"type": "tool_reference", "tool_name": "Yes."}):
        [message] = parse_messages({"messages": [{"role": "user", "content": [block]}]}).messages
        assert message.text == "Yes."
    file = f"data:text/plain;base64,{b64encode(b'Yes.').decode()}"
    shell = {"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}}
    items = [{"role": "user", "content": [{"type": "input_file", "file_data": file}]}, {"type": "web_search_call"}]
    items += [shell, {"type": "local_shell_call_output", "id": "1", "output": "a"}, {"type": "compaction"}]
    asked, called, result = parse_responses({"input": items}, list).chat.messages
    assert asked.text == "Yes." and called.tool_calls[0].arguments == {"command": ["ls"]} and result.tool_call_id == "1"
    with pytest.raises(Refused, match="item_reference"):
        parse_responses({"input": [{"type": "item_reference", "id": "x"}]}, list)


@pytest.mark.parametrize("line", ["x-anthropic-billing-header: cch=1f2;", "x-anthropic-billing-header: cch=1f2;\n"])
def test_a_billing_line_is_no_part_of_the_prompt(line: str) -> None:
    """Claude Code's differs in every request; routers make a text or parts of its blocks."""
    parts = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
    wanted = parse_chat({"messages": [{"role": "system", "content": "Be brief."}, ASK]}).messages
    for content in (parts, f"{line}\nBe brief."):
        system = {"role": "system", "content": content}
        assert parse_chat({"messages": [system, ASK]}).messages == wanted
        placed = Placer(SkillTexts(Library(Path("none")), [])).place({"messages": [system, ASK]})
        assert "billing" not in json.dumps(placed.body) and "Be brief." in json.dumps(placed.body)
    assert parse_messages({"system": parts, "messages": [ASK]}).messages == wanted


def test_prompts_beyond_the_context(served: Served) -> None:
    """They are counted; the error of Messages has the numbers that clients look for."""
    long = [{"role": "user", "content": "May I return this? " * 2000}]
    assert 10_000 <= post(served, "/v1/messages/count_tokens", messages=long)["input_tokens"] < 20_000
    error = post(served, "/v1/messages", 400, messages=long, max_tokens=1)["error"]
    assert error["message"].startswith("prompt is too long: 4097 tokens > 4096 maximum")
    error = post(served, "/v1/messages", 400, messages=[ASK], max_tokens=1, thread={"type": "create"})["error"]
    assert error["details"]["error_code"] == "thread_unsupported_request"
