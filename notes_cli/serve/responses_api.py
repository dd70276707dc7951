"""Converts requests of OpenAI's Responses API to chat requests, and answers to its items and stream events."""

from __future__ import annotations

import copy
import json
import secrets
import threading
import time
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from notes_cli.errors import NotesError
from notes_cli.runtime.request import Answer, Text, Token
from notes_cli.serve.parsing import ChatRequest, Reader, parse_chat, readers
from notes_cli.serve.refusals import Refused, invalid, renaming
from notes_cli.serve.replies import AnswerEvent, Framing, Json, Reply, response_usage, tool_calls
from notes_cli.text.messages import ToolCall
from notes_cli.text.tools import flat_tools, function_of, name_in

# Keys that change nothing here: features of OpenAI's service, and those that are automatic.
IGNORED = {"truncation", "max_tool_calls", "client_metadata", "include", "context_management"}
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # type of part: its key
CHAT_ONLY = ("messages", "n", "max_tokens", "max_completion_tokens", "n_predict", "response_format")
CALLED = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}  # their arguments
# Items that are no part of the prompt: earlier reasoning, what OpenAI ran, and what only OpenAI can read.
LEFT_OUT = ("reasoning", "compaction", "web_search_call", "file_search_call", "code_interpreter_call", "mcp_list_tools")
LOGPROBS = "message.output_text.logprobs"  # of `include`
KEPT = 1024  # responses
KEPT_BYTES = 64 << 20  # of their messages
NAMES = {  # of keys, in errors
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}


class ResponseStore:
    """The messages of recent responses by client and id, for `previous_response_id`, in memory only. Any thread may use
    it. `client`: as in ChatRequest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: OrderedDict[tuple[str, str], str] = OrderedDict()  # JSON of the whole conversation
        self._bytes = 0

    def keep(self, client: str, identity: str, messages: Sequence[Json]) -> None:
        text = json.dumps(messages)
        with self._lock:
            self._messages[client, identity] = text
            self._bytes += len(text)
            while self._messages and (len(self._messages) > KEPT or self._bytes > KEPT_BYTES):
                self._bytes -= len(self._messages.popitem(last=False)[1])

    def messages(self, client: str, identity: str) -> list[Json]:
        """Return the messages of a response with those before it. Raises Refused for an unknown one, and for that
        of another client."""
        with self._lock:
            if (client, identity) not in self._messages:
                message = f"there is no response {identity[:80]!r}: the server keeps the last {KEPT:,}, until it ends"
                raise Refused(404, message, param="previous_response_id", code="previous_response_not_found")
            self._messages.move_to_end((client, identity))
            return list(json.loads(self._messages[client, identity]))


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request of the Responses API: the chat request, and values that its response repeats."""

    chat: ChatRequest
    messages: list[Json]  # of the chat, without the instructions
    tools: Mapping[str, Json]  # by the name that the model sees: type, name and namespace for the client
    repeated: Json
    store: bool


def parse_responses(data: Any, earlier: Callable[[str], list[Json]], *, forms: bool = True) -> ResponsesRequest:
    """Parse a request of /v1/responses. `earlier`: returns the messages of a response by its id. `forms`: as in
    parse_chat. Raises Refused."""
    reader = Reader(data)
    reader.refuse(*CHAT_ONLY)
    for key in ("background", "conversation", "prompt"):
        if reader.any(key):
            raise Refused(400, f"{key} is not supported", param=key, code="unsupported_value")
    instructions, previous = reader.text("instructions"), reader.text("previous_response_id")
    new, places = _messages(reader.any("input"))
    messages = [*(earlier(previous) if previous else ()), *new]
    tools, for_client, skipped = _tools(reader.any("tools"))
    choice, store_it = _tool_choice(reader.any("tool_choice"), tools), reader.any("store") is not False
    reasoning, text = reader.inner("reasoning"), reader.inner("text")
    include = reader.texts("include", 16)
    limit = reader.whole("max_output_tokens", 1, 2**31 - 1)
    first = [{"role": "system", "content": instructions}] if instructions else []
    body = {
        "add_generation_prompt": True,  # a last message of the assistant is a finished item
        **{key: value for key, value in reader.rest().items() if key not in IGNORED},
        "messages": [*first, *messages],
        "tools": tools,
        "tool_choice": choice,
        "max_completion_tokens": limit,
        "reasoning_effort": reasoning.text("effort") or None,
        "response_format": _format(text.any("format")),
    }
    if LOGPROBS in include:
        body["logprobs"] = True
    before = len(first) + len(messages) - len(new)
    with renaming({f"messages[{number}]": place for number, place in enumerate(places, before)} | NAMES):
        chat = parse_chat(body, forms=forms)
    repeated = {
        "instructions": instructions or None,
        "max_output_tokens": limit,
        "metadata": data.get("metadata") or {},
        "parallel_tool_calls": data.get("parallel_tool_calls", True),
        "previous_response_id": previous or None,
        "reasoning": {"effort": (data.get("reasoning") or {}).get("effort")},
        "store": store_it,
        "temperature": chat.options.sampling.temperature,
        "text": data.get("text") or {"format": {"type": "text"}},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": data.get("tools") or [],
        "top_p": chat.options.sampling.top_p,
        "truncation": "disabled",
    }
    chat = replace(chat, ignored=(*chat.ignored, *skipped))
    return ResponsesRequest(chat, messages, for_client, repeated, store_it)


def _messages(data: Any) -> tuple[list[Json], list[str]]:
    """Convert the input, a text or items, to messages of a chat. Returns also the key of the item of each message."""
    if isinstance(data, str):
        return [{"role": "user", "content": data}], ["input"]
    messages: list[Json] = []
    places: list[str] = []
    for number, reader in enumerate(readers(data or None, "input", "a string, or a list of one item or more")):
        kind = reader.text("type", "message")
        if kind == "message":
            messages.append({"role": reader.needed("role"), "content": _content(reader.any("content"), reader)})
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            key = CALLED[kind]
            arguments = {"input": reader.text(key)} if kind == "custom_tool_call" else reader.any(key)
            name = "local_shell" if kind == "local_shell_call" else reader.needed("name")
            call = {"name": name_in(reader.text("namespace"), name), "arguments": arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": reader.needed("call_id"), "type": "function", "function": call})
        elif kind.removesuffix("_output") in CALLED:
            content = _content(reader.any("output"), reader, "output")
            messages.append(
                {"role": "tool", "tool_call_id": reader.text("call_id") or reader.needed("id"), "content": content}
            )
        elif kind not in LEFT_OUT:
            raise Refused(400, f"{reader.name('type')} {kind[:40]!r} is not supported", param=reader.name("type"))
        places += [f"input[{number}]"] * (len(messages) - len(places))
    return messages, places


def _content(data: Any, item: Reader, key: str = "content") -> str | list[Json]:
    if isinstance(data, str):
        return data
    parts: list[Json] = []
    for reader in readers(data, item.name(key), "a string or a list of parts"):
        kind = reader.text("type")
        if kind == "input_file" and (text := _file_text(reader)) is not None:
            parts.append({"type": "text", "text": text})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": reader.needed("image_url")}})
        elif kind in TEXTS:
            name = TEXTS[kind]
            parts.append({"type": name, name: reader.needed(name)})
        else:
            message = f"{reader.name('type')} is {kind[:40] or 'missing'}: only text and images are supported"
            raise Refused(400, message, param=reader.name("type"))
    return parts


def _file_text(reader: Reader) -> str | None:
    """Return the text of a file that is sent as data; None for one of another type."""
    head, _, data = reader.text("file_data").partition(";base64,")
    with suppress(ValueError):
        return b64decode(data, validate=True).decode() if head.startswith("data:text/") else None
    return None


def _tools(data: Any) -> tuple[list[Json], dict[str, Json], list[str]]:
    """Convert tools to those of a chat. Returns also what their calls have for the client, by the name that the model
    sees, and the types of tools that are left out: those that OpenAI runs."""
    tools: list[Json] = []
    for_client: dict[str, Json] = {}
    skipped: list[str] = []
    readers(data or [], "tools", "a list of tools")  # refuses anything else
    try:
        for tool, namespace in flat_tools(data or []):
            if (kind := tool.get("type")) not in ("function", "custom"):
                skipped.append(f"tools of the type {str(kind)[:40]!r}")
                continue
            function = function_of(tool, namespace)
            more = {"namespace": namespace} if namespace else {}
            for_client[function["name"]] = {"type": kind, "name": tool["name"], **more}
            tools.append({"type": "function", "function": function})
    except NotesError as error:
        raise invalid("tools", str(error)) from error
    return tools, for_client, skipped


def _tool_choice(data: Any, tools: Sequence[Json]) -> Any:
    if not isinstance(data, dict):
        return data if tools else None
    kind = data.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": data.get("name")}}
    if kind == "allowed_tools" and isinstance(data.get("tools"), list):
        named = [{"type": "function", "function": tool} for tool in data["tools"]]
        return {"type": kind, kind: {"mode": data.get("mode"), "tools": named}}
    return data


def _format(data: Any) -> Json | None:
    if not isinstance(data, dict) or data.get("type") != "json_schema":
        return data  # type: ignore[no-any-return]
    return {"type": "json_schema", "json_schema": {key: value for key, value in data.items() if key != "type"}}


@dataclass(slots=True)
class ResponsesReply(Reply):
    """Collects the output items of a response, and formats it whole or as named events."""

    framing: ClassVar[Framing] = "named"
    asked: ResponsesRequest | None = None
    kept: ResponseStore | None = None
    _items: list[Json] = field(default_factory=list)  # the last one may be unfinished
    _number: int = 0  # of events
    _waits: bool = False  # calls are not streamed any more

    # Whole.

    def whole(self) -> Json:
        self._collect()
        return self._response("completed")

    def _response(self, status: str, error: Json | None = None) -> Json:
        assert self.asked is not None
        cut = status == "completed" and self.done[0].stopped != "end"
        finished = status in ("completed", "failed")
        response = {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if finished else None,
            "status": "incomplete" if cut else status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.model,
            "output": list(self._items) if finished else [],
            **self.asked.repeated,
            "usage": response_usage([self]) if status == "completed" else None,
            **(self.explained() if finished else {}),
        }
        if status == "completed" and self.kept is not None and self.asked.store:  # for the next request
            text = "".join(delta.text for delta in self._deltas.get(0, []) if not delta.reasoning)
            calls = tool_calls(self.done[0])
            answer = {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}
            self.kept.keep(self.request.client, response["id"], [*self.asked.messages, answer])
        return response

    # Events.

    def opening(self) -> Iterable[Json]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def chunks(self, event: AnswerEvent) -> Iterable[Json]:
        if isinstance(event, Text) and event.call is not None:
            yield from self._stream_call(event.call, event.text)
        elif isinstance(event, Text):
            kind = "reasoning" if event.reasoning else "message"
            if not self._items or self._items[-1]["type"] != kind:
                yield from self._end_item()
                yield from self._begin_item(kind)
            part = self._items[-1]["content"][0]
            part["text"] += event.text
            more = {} if event.reasoning else {"logprobs": self._token_logprobs(event.tokens)}
            if more:
                part["logprobs"] += more["logprobs"]
            yield self._inner_event(f"{part['type']}.delta", delta=event.text, **more)
        elif isinstance(event, Answer):
            if not self._items and not event.calls:
                yield from self._begin_item("message")
            streamed = {item["call_id"] for item in self._items if "call_id" in item}
            if not streamed:
                yield from self._end_item("completed" if event.stopped == "end" or event.calls else "incomplete")
            for call in event.calls:
                if call.id not in streamed:
                    yield from self._begin_call(call)
                    yield from self._add_arguments(call.arguments_json, call.arguments)
                if self._items[-1].get("call_id") == call.id:
                    yield from self._end_item("completed" if call.cut is None else "incomplete")

    def closing(self, replies: Sequence[Reply]) -> Iterable[Json]:
        response = self._response("completed")
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: Refused) -> Json:
        body = {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", response=self._response("failed", body))

    def _event(self, kind: str, **values: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return event

    def _item_event(self, step: str) -> Json:
        """Return the beginning or end of the last item, which later deltas do not change."""
        item = copy.deepcopy(self._items[-1])
        return self._event(f"response.output_item.{step}", output_index=len(self._items) - 1, item=item)

    def _inner_event(self, kind: str, **values: Any) -> Json:
        """Return an event of the contents of the last item."""
        item, at = self._items[-1], len(self._items) - 1
        index = {"content_index": 0} if "content" in item else {}
        return self._event(f"response.{kind}", item_id=item["id"], output_index=at, **index, **values)

    def _begin_item(self, kind: str) -> Iterable[Json]:
        item: Json = {"id": f"{kind[:3]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item["role"], part = "assistant", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item["summary"], part = [], {"type": "reasoning_text", "text": ""}
        self._items.append(item)
        yield self._item_event("added")
        item["content"] = [part]
        yield self._inner_event("content_part.added", part=dict(part))

    def _end_item(self, status: str = "completed") -> Iterable[Json]:
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        if "content" in item:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._inner_event(f"{part['type']}.done", text=part["text"], **more)
            yield self._inner_event("content_part.done", part=dict(part))
        elif item["type"] == "custom_tool_call":
            yield self._inner_event("custom_tool_call_input.done", input=item["input"])
        else:
            yield self._inner_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        yield self._item_event("done")

    def _stream_call(self, call: ToolCall, text: str) -> Iterable[Json]:
        """Add a part of a call's arguments. The text of a custom tool, and the calls after it, come at the end."""
        assert self.asked is not None
        if not self._items or self._items[-1].get("call_id") != call.id:
            self._waits |= self.asked.tools[call.name]["type"] == "custom"
            if self._waits:
                return
            yield from self._begin_call(call)
        if text and not self._waits:
            yield from self._add_arguments(text)

    def _begin_call(self, call: ToolCall) -> Iterable[Json]:
        assert self.asked is not None
        yield from self._end_item()
        tool = self.asked.tools[call.name]
        custom = tool["type"] == "custom"
        item = {"id": f"fc_{secrets.token_hex(12)}", "status": "in_progress", "call_id": call.id, **tool}
        item |= {"type": "custom_tool_call", "input": ""} if custom else {"type": "function_call", "arguments": ""}
        self._items.append(item)
        yield self._item_event("added")

    def _add_arguments(self, text: str, arguments: Mapping[str, Any] | None = None) -> Iterable[Json]:
        """Add JSON to the arguments of the last call. `arguments`: all of them, for a custom tool."""
        item = self._items[-1]
        if item["type"] == "custom_tool_call":
            item["input"] = str((arguments or {}).get("input", ""))
            yield self._inner_event("custom_tool_call_input.delta", delta=item["input"])
        else:
            item["arguments"] += text
            yield self._inner_event("function_call_arguments.delta", delta=text)

    def _token_logprobs(self, tokens: Sequence[Token]) -> list[Json]:
        logprobs = self._logprobs(tokens)
        return logprobs["content"] if logprobs else []
