"""Converts requests of Anthropic's Messages API to chat requests, and answers to its blocks and stream events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from notes_cli.engine.sequence import Stopped
from notes_cli.runtime.request import Answer, Text
from notes_cli.serve.parsing import ChatRequest, Reader, parse_chat, readers
from notes_cli.serve.refusals import Refused, invalid, messages_error, renaming
from notes_cli.serve.replies import AnswerEvent, Framing, Json, Reply, usage
from notes_cli.text.messages import ToolCall

# Keys that change nothing here: accounting, features of Anthropic's service, and those that are automatic.
IGNORED = {"metadata", "service_tier", "container", "context_management", "cache_control", "speed", "inference_geo"}
CHAT_ONLY = ("n", "stop", "max_completion_tokens", "n_predict", "response_format")
LEFT_OUT = ("thinking", "redacted_thinking", "server_tool_use", "mcp_tool_use")  # of earlier answers, with results
NAMES = {  # of keys, in errors
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
}
STOPS: dict[Stopped, str] = {"end": "end_turn", "length": "max_tokens", "context": "model_context_window_exceeded"}


def parse_messages(data: Any, *, forms: bool = True) -> ChatRequest:
    """Parse a request of /v1/messages. `forms`: as in parse_chat. Raises Refused."""
    reader = Reader(data)
    reader.refuse(*CHAT_ONLY)
    messages = _system(reader.any("system"))
    places = ["system"] * len(messages)
    for number, message in enumerate(readers(reader.any("messages"), "messages", "a list")):
        messages += _message(message)
        places += [f"messages[{number}]"] * (len(messages) - len(places))
    tools, skipped = _tools(reader.any("tools"))
    choice = _tool_choice(reader.any("tool_choice"))
    thinking = reader.inner("thinking")
    think = thinking.text("type") == "enabled"
    wanted = reader.inner("output_config").any("format") or reader.any("output_format")
    response_format: Json | None = None
    if wanted is not None:
        form = Reader(wanted, "output_config.format")
        if form.text("type") != "json_schema":
            raise Refused(400, "output_config.format must have the type json_schema", param="output_config.format")
        response_format = {"type": "json_schema", "json_schema": {"schema": form.any("schema")}}
    if reader.any("mcp_servers"):
        raise Refused(400, "mcp_servers is not supported", param="mcp_servers", code="unsupported_value")
    body = {
        "max_tokens": reader.whole("max_tokens", 0, 2**31 - 1),
        "stop": reader.any("stop_sequences") or None,
        "tool_choice": choice if tools else None,
        **{key: value for key, value in reader.rest().items() if key not in IGNORED},
        "messages": messages,
        "tools": tools,
        "response_format": response_format,
    }
    if think:
        body |= {"reasoning_effort": "high", "max_think": thinking.whole("budget_tokens", 1, 2**31 - 1)}
    with renaming({f"messages[{number}]": place for number, place in enumerate(places)} | NAMES):
        chat = parse_chat(body, forms=forms)
    return replace(chat, ignored=(*chat.ignored, *skipped))


def _system(data: Any) -> list[Json]:
    blocks = [{"type": "text", "text": data}] if isinstance(data, str) else (data or [])
    return [{"role": "system", "content": _parts(blocks, "system")}] if blocks else []


def _message(reader: Reader) -> list[Json]:
    """Convert a message to those of a chat: each tool result is one of its own."""
    role, content = reader.needed("role"), reader.any("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = readers(content, reader.name("content"), "a string or a list of blocks")
    if role == "assistant":
        return [_answer(blocks)]
    messages: list[Json] = []
    parts: list[Json] = []
    for block in blocks:
        kind = block.text("type")
        if kind != "tool_result":
            parts.append(_part(block, kind))
            continue
        inner = block.any("content")
        inner = inner if isinstance(inner, list) else [{"type": "text", "text": inner or ""}]
        texts = _parts(inner, block.name("content"))
        parts += [part for part in texts if part["type"] != "text"]  # templates have no images in results
        texts = [part for part in texts if part["type"] == "text"]
        messages.append({"role": "tool", "tool_call_id": block.needed("tool_use_id"), "content": texts})
    return [*messages, {"role": role, "content": parts}] if parts else messages


def _answer(blocks: Sequence[Reader]) -> Json:
    texts: list[Json] = []
    calls: list[Json] = []
    for reader in blocks:
        kind = reader.text("type")
        if kind == "tool_use":
            function = {"name": reader.needed("name"), "arguments": reader.any("input")}
            calls.append({"id": reader.needed("id"), "type": "function", "function": function})
        elif kind not in LEFT_OUT and not kind.endswith("_tool_result"):
            texts.append(_part(reader, kind))
    return {"role": "assistant", "content": texts, **({"tool_calls": calls} if calls else {})}


def _parts(blocks: Any, where: str) -> list[Json]:
    listed = readers(blocks, where, "a string or a list of blocks")
    return [_part(reader, reader.text("type")) for reader in listed]


def _part(reader: Reader, kind: str) -> Json:
    if kind in ("text", "tool_reference"):
        return {"type": "text", "text": reader.needed("text" if kind == "text" else "tool_name")}
    source = reader if kind in ("search_result", "compaction") else reader.inner("source")
    form = "content" if source is reader else source.text("type")
    if form == "content":  # a text or blocks
        inner = source.any("content")
        texts = [inner] if isinstance(inner, str) else [part.get("text", "") for part in _parts(inner, reader.where)]
        return {"type": "text", "text": "\n".join(texts)}
    if kind == "image" and form == "base64":
        url = f"data:{source.needed('media_type')};base64,{source.needed('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "document" and form == "text":
        return {"type": "text", "text": source.needed("data")}
    shown = f"{kind or 'of no type'}{' by ' + form if form else ''}"[:60]
    message = f"{reader.where} is {shown}: only text and images as base64 are supported"
    raise invalid(reader.where.rpartition("[")[0], message)


def _tools(data: Any) -> tuple[list[Json], list[str]]:
    """Convert tools to those of a chat. Returns also the types of tools that Anthropic runs, which are left out."""
    tools, skipped = [], []
    for reader in readers(data or [], "tools", "a list of tools"):
        kind = reader.text("type", "custom")
        if kind != "custom":
            skipped.append(f"tools of the type {kind[:40]!r}")
            continue
        named = {"name": reader.needed("name"), "description": reader.text("description")}
        tools.append({"type": "function", "function": {**named, "parameters": reader.any("input_schema")}})
    return tools, skipped


def _tool_choice(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    kind = data.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": data.get("name")}}
    return "required" if kind == "any" else kind


@dataclass(slots=True)
class MessagesReply(Reply):
    """Collects the content blocks of an answer, and formats it whole or as named events."""

    framing: ClassVar[Framing] = "named"
    _blocks: list[Json] = field(default_factory=list)  # the last one may be open

    def whole(self) -> Json:
        self._collect()
        return self._message(self._blocks, self._stop_reason())

    def opening(self) -> Iterable[Json]:
        return ()  # `message_start` has the tokens of the prompt, which are known at the end of its prefill

    def chunks(self, event: AnswerEvent) -> Iterable[Json]:
        if isinstance(event, Text) and event.call is not None:
            if not self._blocks or self._blocks[-1].get("id") != event.call.id:
                yield from self._end_block()
                yield self._begin_call(event.call)
            if event.text:
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        elif isinstance(event, Text):
            kind = "thinking" if event.reasoning else "text"
            if not self._blocks or self._blocks[-1]["type"] != kind:
                yield from self._end_block()
                yield self._begin_block({"type": kind, kind: "", **({"signature": ""} if event.reasoning else {})})
            self._blocks[-1][kind] += event.text
            yield self._delta({"type": f"{kind}_delta", kind: event.text})
        elif isinstance(event, Answer):
            if not self._blocks and not event.calls:
                yield self._begin_block({"type": "text", "text": ""})
            yield from self._end_block()
            streamed = {block.get("id"): block for block in self._blocks}
            for call in event.calls:
                if call.id not in streamed:
                    yield self._begin_call(call)
                    yield self._delta({"type": "input_json_delta", "partial_json": call.arguments_json})
                    yield from self._end_block()
                streamed.get(call.id, self._blocks[-1])["input"] = dict(call.arguments)
        else:
            yield {"type": "message_start", "message": self._message([], None)}

    def closing(self, replies: Sequence[Reply]) -> Iterable[Json]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self.done[0].stop or None}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(self), **self.explained()}
        yield {"type": "message_stop"}

    def failure(self, error: Refused) -> Json:
        return messages_error(error)

    def _stop_reason(self) -> str:
        done = self.done[0]
        if done.stop and not done.calls:
            return "stop_sequence"
        return "tool_use" if done.calls and done.stopped == "end" else STOPS[done.stopped or "end"]

    def _message(self, content: list[Json], reason: str | None) -> Json:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": (self.done[0].stop or None) if reason else None,
            "usage": _usage(self),
            **(self.explained() if reason else {}),
        }

    def _begin_call(self, call: ToolCall) -> Json:
        return self._begin_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})

    def _begin_block(self, block: Json) -> Json:
        self._blocks.append(block)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end_block(self) -> Iterable[Json]:
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _usage(reply: Reply) -> Json:
    """Return token counts: `input_tokens` are those that were not found in the prefix cache or a compiled skill."""
    counts = usage([reply])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }
