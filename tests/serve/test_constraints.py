"""Tests constrained answers with OpenAI's client: schemas, grammars, tool calls and results, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from notes_cli import guidance
from notes_cli.engine.limits import ContextOptions
from notes_cli.runtime import generate
from notes_cli.serve.parsing import parse_chat

from ..commands.conftest import run_here
from ..conftest import MakeModel
from ..text.test_tools import SOURCES
from ..thinkers import Scripted
from .conftest import Json, Served, pieces, started

ASKED: list[Any] = [{"role": "user", "content": "Who?"}]
SCHEMA: Json = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tool(name: str, **properties: Json) -> Json:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "It does.", "parameters": parameters}}


def allowed(mode: str, *names: str) -> Json:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS: list[Any] = [
    tool("get_weather", city={"enum": ["Paris", "Rome"]}),
    tool("get_time", zone={"enum": ["UTC"]}),
    tool("add", a={"type": "integer", "minimum": 0, "maximum": 9}, b={"type": "integer", "minimum": 0, "maximum": 9}),
]
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
Script = Callable[[str], None]


@pytest.fixture(scope="module")
def qwen(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a random model with Qwen3's template and special tokens."""
    path = make_model("llama", template=SOURCES["Qwen-Qwen3-0.6B"], added=MARKS, trained=8192)
    home: Path = tmp_path_factory.mktemp("tools")
    with started(home, context=ContextOptions(n_ctx=8192, n_threads=1), model=path) as found:
        yield found


@pytest.fixture
def script(qwen: Served, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Force the model's answers to a text."""
    model = qwen.scheduler.workspace.model
    return lambda text: monkeypatch.setattr(generate, "Sampler", lambda *_: Scripted(model, text))


def create(served: Served, **given: Any) -> Any:
    return served.client.chat.completions.create(**{"model": "tiny", "messages": ASKED, "max_tokens": 300, **given})


def held(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


def test_a_line_break_of_unicode_in_a_stream(served: Served) -> None:
    """Clients that read lines as Python does, such as httpx, see whole events."""
    ends = "\u2028\u2029\x85"
    body = {"messages": ASKED, "grammar": f'root ::= "a{ends}b"', "stream": True}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        data = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert "".join(json.loads(one)["choices"][0]["delta"].get("content", "") for one in data[:-1]) == f"a{ends}b"


def test_a_grammar_that_becomes_too_ambiguous(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends only its own answer, with a logged line."""
    with monkeypatch.context() as patched:
        patched.setattr(guidance, "LIMITS", {**guidance.LIMITS, "step_max_items": 20})
        with pytest.raises(openai.BadRequestError, match=r"the grammar cannot be used: .*[Tt]oo many items"):
            create(served, extra_body={"grammar": 'root ::= [ab]? [ab]? [ab]? "c"'})
    jsonschema.validate(json.loads(create(served, response_format=held(SCHEMA)).choices[0].message.content), SCHEMA)


def test_a_session(served: Served) -> None:
    session = {"notes": {"session": "held"}}
    for word in ("one", "two"):
        found = create(served, response_format=held({"const": word}), extra_body=session)
        assert json.loads(found.choices[0].message.content) == word


def test_a_template_without_tools(served: Served) -> None:
    """The prompt describes them in a general form, and the reply has a notice; a required call is one."""
    reply = create(served, tools=TOOLS, extra_body={"notes": {"explain": True}})
    [notice] = reply.model_extra["notes"]["notices"]
    assert "has no tools: the prompt describes them in a general form" in notice
    assert reply.usage.prompt_tokens > 100
    _, calls, reason = read_reply(create(served, tools=TOOLS, tool_choice="required"), False)
    assert reason == "tool_calls" and len(calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_after_the_beginning_of_an_answer(qwen: Served, script: Script, stream: bool) -> None:
    """The text goes on, its blanks too, and a call may follow; what begins a bare call elsewhere is text here."""
    begun = {"messages": [*ASKED, {"role": "assistant", "content": "I'll"}], "tools": TOOLS, "stream": stream}
    script(' look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    text, [(_, name, arguments)], reason = read_reply(create(qwen, **begun), stream)
    assert (text, name, reason) == (" look.", "get_weather", "tool_calls")
    assert json.loads(arguments) == {"city": "Paris"}
    bare = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    script(bare)
    assert read_reply(create(qwen, **begun), stream) == (bare, [], "stop")
    script("<think>\nHm.\n</think>")
    assert read_reply(create(qwen, **begun), stream)[0] == "<think>\nHm.\n</think>"


def read_reply(reply: Any, stream: bool) -> tuple[str, list[tuple[str, str, str]], str]:
    """Return the text, the calls and the finish reason, whole or joined from chunks."""
    if not stream:
        choice = reply.choices[0]
        calls = [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]
        return choice.message.content or "", calls, choice.finish_reason
    text, reason, found = "", "", dict[int, tuple[str, str, str]]()
    for chunk in reply:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for one in choice.delta.tool_calls or ():
                key, name, before = found.get(one.index, (one.id, one.function.name, ""))
                assert key and name and one.id in (key, None)
                found[one.index] = key, name, before + (one.function.arguments or "")
    return text, [found[index] for index in sorted(found)], reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be(qwen: Served, stream: bool) -> None:
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    for choice, names in (("required", set(schemas)), ({"type": "function", "function": {"name": "add"}}, {"add"})):
        text, calls, reason = read_reply(create(qwen, tools=TOOLS, tool_choice=choice, stream=stream), stream)
        assert (text, reason, len(calls)) == ("", "tool_calls", 1) and calls[0][1] in names
        jsonschema.validate(json.loads(calls[0][2]), schemas[calls[0][1]])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_and_is_cut(qwen: Served, script: Script, stream: bool) -> None:
    """It has the beginning of its arguments; before the end of its name it is text."""
    whole, model = '{"name": "add", "arguments": {"a": 1, "b": 2}}', qwen.scheduler.workspace.model
    tokens = model.tokenize(whole)
    for limit in (2, len(tokens) - 4):
        script(whole)
        begun = b"".join(model.token_bytes(int(token)) for token in tokens[:limit]).decode()
        reply = create(qwen, tools=TOOLS, tool_choice="required", stream=stream, max_tokens=limit)
        text, calls, reason = read_reply(reply, stream)
        arguments = begun.partition('"arguments": ')[2]
        assert reason == "length" and bool(arguments) is (limit > 2)
        assert (text, [call[1:] for call in calls]) == (("", [("add", arguments)]) if arguments else (begun, []))


@pytest.mark.parametrize(("stream", "begun"), [(False, ""), (False, "I'll"), (True, "I'll")])
def test_a_call_is_of_an_allowed_tool(qwen: Served, monkeypatch: pytest.MonkeyPatch, stream: bool, begun: str) -> None:
    """Its text stays; the call that it wants is replaced by one of an allowed tool, and the tokens of it are gone."""
    model, real = qwen.scheduler.workspace.model, generate.Sampler
    wanted = ' look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

    def sampler(options: Any, constraint: Any, model: Any) -> Any:
        return real(options, constraint, model) if constraint else Scripted(model, wanted)

    monkeypatch.setattr(generate, "Sampler", sampler)
    messages = [*ASKED, {"role": "assistant", "content": begun}] if begun else ASKED
    choice = allowed("auto", "add", "get_time")
    reply = create(qwen, messages=messages, tools=TOOLS, tool_choice=choice, stream=stream, temperature=2, seed=5)
    text, [(_, name, arguments)], reason = read_reply(reply, stream)
    assert (text, reason) == (" look." if begun else "look.", "tool_calls") and name in ("add", "get_time")
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    jsonschema.validate(json.loads(arguments), schemas[name])
    if not stream:
        idle = qwen.at_context(lambda: [*qwen.scheduler.prefixes.idle_prefixes()][-1].tokens)
        tokens = idle[-reply.usage.completion_tokens :]
        written = b"".join(model.token_bytes(int(token), special=True) for token in tokens).decode()
        assert written.startswith(" look.\n{") and json.loads(written.removeprefix(" look.\n"))["name"] == name
    _, [(_, name, _)], _ = read_reply(create(qwen, messages=messages, tools=TOOLS, stream=stream), stream)
    assert name == "get_weather"


def test_arguments_that_are_no_object() -> None:
    """A model generated them earlier: the conversation continues with them."""
    kept = ('{"city": "Par', "[" * 9999, 7)
    for given, read in (
        *((one, {"arguments": one}) for one in kept),
        *(('["Paris"]', {"arguments": ["Paris"]}), ('"Paris"', {"arguments": "Paris"})),
        *((nothing, {}) for nothing in ("", " ", "null", None, "[]", [], "{}", {}, '""')),
    ):
        call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": given}}
        answer = {"role": "assistant", "tool_calls": [call]}
        messages = [*ASKED, answer, {"role": "tool", "content": "", "tool_call_id": "c"}]
        [found] = parse_chat({"messages": messages}).messages[1].tool_calls
        assert found.arguments == read


def test_keys_that_programs_add_to_a_history(qwen: Served) -> None:
    """Unknown keys are ignored in messages of the assistant and of tools; in a question they may be an image."""
    function = {"name": "get_time", "arguments": "{}", "parsed": {}}
    call = {"id": "c", "type": "function", "index": 0, "function": function}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_details": [], "function_call": None}
    part = {"type": "text", "text": "noon", "annotations": {"audience": ["user"]}}
    talk = [*ASKED, said, {"role": "tool", "tool_call_id": "c", "content": [part], "is_error": False}]
    qwen.chat(talk, max_tokens=1)
    assert "messages[0].images" in qwen.chat([{**ASKED[0], "images": ["aGk="]}], 400)["message"]


def test_tools_cost_nothing_the_second_time(qwen: Served) -> None:
    """In any order; tools that may not be called are not in the prompt."""
    first, *others = (
        create(qwen, tools=list(order), max_tokens=1, messages=[{"role": "user", "content": f"Q{number}?"}]).usage
        for number, order in enumerate(islice(permutations(TOOLS), 1, None, 2))
    )
    assert first.prompt_tokens > 500
    for one in others:
        assert one.prompt_tokens == first.prompt_tokens
        assert one.prompt_tokens_details.cached_tokens > first.prompt_tokens - 40
    assert create(qwen, tools=TOOLS, tool_choice="none", max_tokens=1).usage.prompt_tokens < 100


def test_a_compiled_set_of_tools(qwen: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its tokens is decoded, in any order; other tools, and a user's equal text, match in runs at most."""
    others = [tool("look", where={"type": "string", "description": "a place <in> [brackets]"}), *TOOLS]
    (tmp_path / "agent.json").write_text(json.dumps(others))
    monkeypatch.setenv("NOTES_HOME", str(qwen.home))
    made = run_here("compile", tmp_path / "agent.json", "-m", qwen.scheduler.workspace.model.path, "--json")
    assert made.code == 0, made.err
    count = made.json["compiled"][0]["tokens"]
    again = run_here("compile", tmp_path / "agent.json", "-m", qwen.scheduler.workspace.model.path)
    assert "up to date" in again.err
    for number, order in enumerate((others, others[::-1])):
        for notes in ({}, {"recompute": True}):
            talk = [{"role": "system", "content": f"S{number} {notes}"}, {"role": "user", "content": "Go."}]
            reply = qwen.chat(talk, tools=order, max_tokens=1, notes={"explain": True, **notes})
            spliced = [one for one in pieces(reply) if one[1] == "spliced"]
            assert spliced == ([] if notes else [("splice", "spliced", count - 1)])
            assert sum(tokens for _, _, tokens in pieces(reply)) == reply["usage"]["prompt_tokens"]
    fewer = [tool("listen"), *TOOLS]
    other = qwen.chat([{"role": "user", "content": "Go!"}], tools=fewer, max_tokens=1, notes={"explain": True})
    assert {kind for kind, how, _ in pieces(other) if how == "spliced"} == {"question"}
    text = qwen.http.get("/v1/notes/agent").json()["text"]
    said = qwen.chat([{"role": "user", "content": f"{text}"}], max_tokens=1, notes={"explain": True})
    assert {kind for kind, how, _ in pieces(said) if how == "spliced"} <= {"question"}
    refused = run_here("compile", "--from", "agent", "-m", qwen.scheduler.workspace.model.path)
    assert refused.code == 1 and "Compile their file again" in refused.err


def test_a_correction_does_not_break_into_a_loop_of_calls(qwen: Served, script: Script, tmp_path: Path) -> None:
    """Global errata wait for the next question; the client's own come with the latest result. Both keep the prefix."""
    text = "date: 2026-05-01\n\n- If the date is before 2026-06-15 then the return is accepted. " + "Ask a human. " * 4
    skill = {"name": "rules", "text": f"# Rules\n\n{text}"}
    assert '"skill"' in qwen.http.post("/v1/notes/compile", json=skill).text
    notes = {"splice": ["rules"], "explain": True}
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    talk: list[Any] = [*ASKED]

    def turn(**own: Any) -> tuple[int, int]:
        """Return the next answer, the decoded tokens of its prompt, and its errata."""
        script(call)
        reply = qwen.chat(talk, tools=TOOLS, notes={**notes, **own})
        message = reply["choices"][0]["message"]
        talk.append({"role": "assistant", "content": None, "tool_calls": message["tool_calls"]})
        talk.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "noon"})
        used = reply["usage"]
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return used["prompt_tokens"] - cached, sum(kind == "erratum" for kind, _, _ in pieces(reply))

    turn()
    late = {"skill": "rules", "field": "date", "value": "2026-07-01"}
    assert qwen.http.post("/v1/notes/errata", json=late).json()["conversations"] == 1
    decoded, errata = turn()
    assert errata == 0 and decoded < 150
    decoded, errata = turn(errata={"date": "2026-08-01"})
    assert errata == 0 and decoded < 250, "it is in the text of the result"
    script("Noon.")
    found = qwen.chat(talk, tools=TOOLS, notes={**notes, "errata": {"date": "2026-08-01"}})
    talk += [found["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    decoded, errata = turn(errata={"date": "2026-08-01"})
    assert errata == 0 and decoded < 250, "the client's own came last"
    talk += [{"role": "assistant", "content": "Ten."}, {"role": "user", "content": "And then?"}]
    late["value"] = "2026-09-01"
    assert qwen.http.post("/v1/notes/errata", json=late).json()["conversations"] >= 1
    assert turn(errata={"date": "2026-08-01"})[1] == 0, "the client's own value holds, and is stated already"
