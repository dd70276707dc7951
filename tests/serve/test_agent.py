"""Tests real clients: Pydantic AI calls tools and gets structured answers; recorded requests of others are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from notes_cli.engine.limits import ContextOptions
from notes_cli.runtime import generate
from notes_cli.serve.prepare import Options

from ..conftest import MakeModel
from ..text.test_tools import SOURCES
from ..thinkers import Scripted
from .conftest import Served, started
from .test_constraints import MARKS

Writes = Callable[..., None]


class Verdict(pydantic.BaseModel):
    """A decision."""

    decision: Literal["accepted", "refused"]
    days: int = pydantic.Field(ge=0, le=9)


@pytest.fixture(scope="module")
def qwen(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a random model with Qwen2.5's template, which has tool calls, and its special tokens."""
    path = make_model("llama", template=SOURCES["Qwen-Qwen2.5-7B-Instruct"], added=MARKS[:4], trained=8192)
    home: Path = tmp_path_factory.mktemp("agent")
    with started(home, context=ContextOptions(n_ctx=8192, n_threads=1), model=path) as found:
        yield found


@pytest.fixture
def writes(qwen: Served, monkeypatch: pytest.MonkeyPatch) -> Writes:
    """Force the model's next answers to these texts; afterwards, and under a grammar, it generates freely."""
    real, model = generate.Sampler, qwen.scheduler.workspace.model
    left: list[str] = []

    def sampler(options: Any, grammar: Any = None, *more: Any) -> Any:
        return Scripted(model, left.pop(0)) if left and grammar is None else real(options, grammar, *more)

    monkeypatch.setattr(generate, "Sampler", sampler)
    return lambda *texts: left.extend(texts)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def agent(served: Served, **given: Any) -> tuple[Agent[None, Any], list[str]]:
    """An agent of Pydantic AI with a tool, and the arguments of the tool's calls."""
    asked: list[str] = []

    def days_since(order: Literal["A-1", "A-2", "A-3"]) -> int:
        """Return how many days ago an order was made."""
        asked.append(order)
        return 12

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key="none"))
    settings: Any = {"max_tokens": 300, "seed": 3}
    more: Any = {"retries": 0, "tools": [days_since], **given}
    return Agent(model, instructions="You work for Harbor Books.", model_settings=settings, **more), asked


def test_it_calls_a_tool_and_reads_its_result(qwen: Served, writes: Writes) -> None:
    """A loop of requests reuses its prefix; the conversation continues, also with two calls at once."""
    client, asked = agent(qwen)
    writes(call("days_since", order="A-1"), "It was 12 days ago.")
    found = client.run_sync("When was A-1 ordered?")
    assert (found.output, asked) == ("It was 12 days ago.", ["A-1"])
    assert found.usage.requests == 2 and found.usage.tool_calls == 1
    assert found.usage.cache_read_tokens > 0.8 * found.usage.input_tokens / 2
    writes(call("days_since", order="A-2") + "\n" + call("days_since", order="A-3"), "Both of them then.")
    again = client.run_sync("And A-2 and A-3?", message_history=found.all_messages())
    assert again.output == "Both of them then." and sorted(asked) == ["A-1", "A-2", "A-3"]
    assert again.usage.cache_read_tokens > 0.8 * again.usage.input_tokens


@pytest.mark.parametrize("form", [NativeOutput, ToolOutput])
def test_its_answer_has_a_form(qwen: Served, writes: Writes, form: Any) -> None:
    """By a JSON schema, with a tool and after its result, or by a required call; whole and streamed."""
    client, asked = agent(qwen, output_type=form(Verdict), **({} if form is NativeOutput else {"tools": []}))
    if form is NativeOutput:
        writes(call("days_since", order="A-1"))
    found = client.run_sync("May I return A-1?")
    assert isinstance(found.output, Verdict) and asked == ["A-1"][: form is NativeOutput]

    async def streamed() -> Verdict:
        async with client.run_stream("May I return it?", message_history=found.all_messages()) as run:
            return await run.get_output()

    assert isinstance(asyncio.run(streamed()), Verdict)


@pytest.mark.parametrize(
    ("words", "stream"),
    [("I think so.", False), ("I think so.", True), (call("fly"), True), ("<tool_call> yes", False)],
)
def test_what_is_no_call_has_the_form(qwen: Served, writes: Writes, words: str, stream: bool) -> None:
    """With tools, text or a call of an unknown tool is discarded, and not streamed."""
    tool = {"type": "function", "function": {"name": "days_since", "parameters": {"type": "object", "properties": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": Verdict.model_json_schema()}}
    writes(words)
    asked: Any = {"messages": [{"role": "user", "content": "May I?"}], "max_tokens": 300, "logprobs": True}
    create: Any = qwen.client.chat.completions.create
    reply = create(model="tiny", tools=[tool], response_format=form, stream=stream, **asked)
    chunks = [chunk.choices[0] for chunk in reply] if stream else []
    text = "".join(chunk.delta.content or "" for chunk in chunks) if stream else reply.choices[0].message.content
    likely = [chunk.logprobs for chunk in chunks] if stream else [reply.choices[0].logprobs]
    Verdict.model_validate_json(text)
    assert "".join(one.token for found in likely if found for one in found.content) == text


# Requests of real clients, each answered as its API has it: recorded by `python -m bench.agents --record`, but those of
# Home Assistant, Open WebUI, llama.vim and SillyTavern, which were written by their sources.

REQUESTS = sorted((Path(__file__).parent / "requests").glob("*.jsonl"))
assert len(REQUESTS) == 21
INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
ANSWER = {"/v1/chat/completions": "choices", "/v1/responses": "output", "/v1/messages": "content"}
ANSWER |= {"/completion": "content", "/infill": "content"}
LAST = {  # of a stream
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": ("event: response.completed", "event: response.incomplete"),
    "/v1/messages": "event: message_stop",
    "/completion": 'data: {"index":0,"content":"","tokens":[],"stop":true',
}


@pytest.fixture(scope="module")
def local(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model with a template that has tools, a long context, and short answers."""
    path = make_model("llama", template=SOURCES["Qwen-Qwen2.5-7B-Instruct"], added=(*MARKS[:4], *INFILL), trained=65536)
    home, context = tmp_path_factory.mktemp("recorded"), ContextOptions(n_threads=1)
    with started(home, Options(max_tokens=8), context=context, model=path, names=("local",)) as found:
        yield found


@pytest.mark.parametrize("path", REQUESTS, ids=lambda path: path.stem)
def test_is_answered(local: Served, path: Path) -> None:
    """Streams end with their last event, and other answers have a text or a call."""
    previous = ""
    for line in path.read_text().splitlines():
        request = json.loads(line)
        body: dict[str, Any] = request["body"]
        if "previous_response_id" in body:
            body["previous_response_id"] = previous
        reply = local.http.post(request["path"], json=body)
        assert reply.status_code == 200, reply.text
        if request["path"].startswith("/api/"):
            assert json.loads(reply.text.splitlines()[-1]).get("done", request["path"] == "/api/show")
        elif body.get("stream"):
            last = reply.text.strip().split("\n\n")[-1]
            assert last.startswith(LAST[request["path"]]), last
        elif request["path"] in ANSWER:
            assert reply.json()[ANSWER[request["path"]]]
            previous = reply.json().get("id", "")
