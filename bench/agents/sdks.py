"""Use one Python SDK against a server, in the ways that its users do: `python sdks.py NAME BASE MODEL`.

It runs in a virtual environment of its own, which has that SDK and not this project.
"""

from __future__ import annotations

import sys
from typing import Any

BASE, MODEL = sys.argv[2:4] if len(sys.argv) == 4 else ("", "")
QUESTION = "Which colour has the sky?"
TOOL_SCHEMA = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 8}}, "required": ["place"]}


def openai() -> None:
    """Chat, a stream with tools, a forced call with its result, responses in two turns and as a stream."""
    from openai import OpenAI

    client = OpenAI()
    ask: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": TOOL_SCHEMA}}]
    assert client.chat.completions.create(model=MODEL, messages=ask, max_tokens=8).choices[0].message.content
    usage = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=ask, tools=tools, stream=True, stream_options=usage)
    )  # type: ignore[call-overload]
    assert chunks[-1].usage.completion_tokens
    called = client.chat.completions.create(model=MODEL, messages=ask, tools=tools, tool_choice="required").choices[0]
    [call] = called.message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "blue"}
    client.chat.completions.create(model=MODEL, messages=[*ask, called.message, result], tools=tools)
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=8)
    client.responses.create(model=MODEL, input="Why?", previous_response_id=first.id, max_output_tokens=8)
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        assert [event.type for event in stream][-1] in ("response.completed", "response.incomplete")


def agents() -> None:
    """An agent with a tool, in the default mode: responses, streamed and not."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def weather(place: str) -> str:
        """The weather at a place."""
        return "sunny"

    agent = Agent(name="a", instructions="Be brief.", model=MODEL, tools=[weather])
    assert Runner.run_sync(agent, QUESTION).final_output


def _nested() -> type[Any]:
    from pydantic import BaseModel, Field

    class Colour(BaseModel):
        name: str = Field(max_length=8)

    class Sky(BaseModel):
        colours: list[Colour] = Field(min_length=1, max_length=2)

    return Sky


def pydantic_ai() -> None:
    """An output of nested types, which is a forced call of a tool; through chat and through responses."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    for model in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(model(MODEL, provider=OpenAIProvider(base_url=f"{BASE}/v1")), output_type=_nested())
        assert agent.run_sync(QUESTION).output.colours


def instructor() -> None:
    """Nested types as a tool and as a JSON schema."""
    import instructor as library
    from openai import OpenAI

    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(OpenAI(), mode=mode)
        ask: list[Any] = [{"role": "user", "content": QUESTION}]
        assert client.chat.completions.create(model=MODEL, messages=ask, response_model=_nested()).colours


def litellm() -> None:
    """Through chat and through Anthropic's messages."""
    import litellm as library

    ask = [{"role": "user", "content": QUESTION}]
    for model, base in ((f"openai/{MODEL}", f"{BASE}/v1"), (f"anthropic/{MODEL}", BASE)):
        assert library.completion(model, messages=ask, api_base=base, max_tokens=8).choices[0].message.content


def langchain() -> None:
    """Chat and responses, with a bound tool, and a nested form of the answer."""
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        model = ChatOpenAI(model=MODEL, use_responses_api=responses)
        assert model.bind_tools([{"name": "weather", "parameters": TOOL_SCHEMA}]).invoke(QUESTION)
        assert model.with_structured_output(_nested(), method="json_schema").invoke(QUESTION).colours


def ollama() -> None:
    """Chat with a tool and its result, streams, a form of the answer, a prompt with its template and without."""
    from ollama import Client

    client, ask = Client(BASE), [{"role": "user", "content": QUESTION}]
    assert client.show(MODEL).capabilities and client.ps().models[0].context_length
    tools = [{"type": "function", "function": {"name": "weather", "parameters": TOOL_SCHEMA}}]
    options = {"num_ctx": 4096, "temperature": 0.5, "num_predict": 8}
    assert client.chat(MODEL, ask, tools=tools, think=False, options=options).message.content
    call = {"function": {"name": "weather", "arguments": {"place": "here"}}}
    called = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    parts = list(client.chat(MODEL, [*ask, *called], tools=tools, stream=True, options=options))
    assert parts[-1].done and parts[-1].eval_count
    assert client.chat(MODEL, ask, format=_nested().model_json_schema()).message.content
    for raw in (False, True):
        assert client.generate(MODEL, QUESTION, raw=raw, options=options, keep_alive="5m").response


if __name__ == "__main__":
    globals()[sys.argv[1]]()
