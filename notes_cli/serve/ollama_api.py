"""Converts requests of Ollama's API to chat requests, and answers and facts about the model to its JSON.

Ollama ignores what it does not know, and so does this API, with a line in the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, ClassVar

from notes_cli.engine.sampler import RANGES
from notes_cli.runtime.request import Answer, Text, Token
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.parsing import ChatRequest, Reader, parse_chat, parse_completion, readers
from notes_cli.serve.prepare import ServerState
from notes_cli.serve.refusals import Refused, ollama_error, renaming
from notes_cli.serve.replies import AnswerEvent, Framing, Json, Reply
from notes_cli.text.messages import ToolCall

SAMPLING = {"seed", "stop", *RANGES}  # of `options`
NAMES = {"max_tokens": "options.num_predict", "response_format": "format", "prompt": "prompt"}  # of keys, in errors
NAMES |= {key: f"options.{key}" for key in SAMPLING}
MOST_IMAGES = 64  # of a message
BILLION = 1_000_000_000  # nanoseconds in a second, parameters in a B
FOREVER = "2100-01-01T00:00:00Z"  # when the model is unloaded

Infill = Callable[[str, str], list[int]]  # returns the tokens of a prompt for the text between two


def parse_ollama_chat(data: Any, *, forms: bool = True) -> ChatRequest | None:
    """Parse a request of /api/chat. `forms`: as in parse_chat. Returns None without messages, by which clients load a
    model. Raises Refused."""
    reader = Reader(data)
    messages = _messages(readers(reader.any("messages") or [], "messages", "a list"))
    tools = reader.any("tools") or None
    if not messages:
        return None
    body, ignored = _body(reader)
    with renaming(NAMES):
        chat = parse_chat({**body, "messages": messages, "tools": tools}, forms=forms)
    return replace(chat, ignored=(*chat.ignored, *ignored))


def parse_generate(infill: Infill, data: Any, *, forms: bool = True) -> ChatRequest | None:
    """Parse a request of /api/generate: a chat of one question, or with `raw` or `suffix` a prompt without template.
    Returns None without a prompt. Raises Refused."""
    reader = Reader(data)
    prompt, suffix, raw = reader.text("prompt"), reader.text("suffix"), reader.flag("raw")
    system, images = reader.text("system"), reader.any("images")
    for key in ("template", "context"):
        if reader.any(key):
            raise Refused(400, f"{key} is not supported: send messages to /api/chat", param=key)
    if not prompt and not suffix and not images:
        return None
    body, ignored = _body(reader)
    with renaming(NAMES):
        if raw or suffix:
            body["logprobs"] = (body.pop("top_logprobs") or 0) if body["logprobs"] else None
            del body["think"]
            [chat] = parse_completion({**body, "prompt": infill(prompt, suffix) if suffix else prompt}, forms=forms)
        else:
            first = [{"role": "system", "content": system}] if system else []
            question = {"role": "user", "content": prompt, "images": images}
            messages = _messages(readers([*first, question], "messages", "a list"))
            chat = parse_chat({**body, "messages": messages}, forms=forms)
    return replace(chat, ignored=(*chat.ignored, *ignored))


def _body(reader: Reader) -> tuple[Json, list[str]]:
    """Convert the keys that both have to those of a chat. Returns also the ignored ones."""
    options, form = reader.inner("options").rest(), reader.any("format")
    limit = _whole(options.pop("num_predict", None))
    schema = {"type": "json_schema", "json_schema": {"schema": form}} if isinstance(form, dict) else None
    body = {
        "model": reader.text("model").removesuffix(":latest"),
        "stream": reader.flag("stream", True),
        "response_format": {"type": "json_object"} if form == "json" else schema,
        "max_tokens": -1 if isinstance(limit, int) and limit < 0 else limit,  # -2 fills the context
        **{key: reader.any(key) for key in ("think", "logprobs", "top_logprobs", "notes")},
        **{key: _whole(value) for key, value in options.items() if key in SAMPLING},
    }
    if form and not body["response_format"]:
        raise Refused(400, 'format must be "json" or a JSON schema', param="format")
    reader.any("keep_alive")  # the model is always loaded
    ignored = [f"options.{key}" for key in options if key not in SAMPLING]
    return body, [name[:40] for name in (*ignored, *(key for key, value in reader.rest().items() if value))]


def _whole(value: object) -> object:
    """Return a number without fraction as an integer, which clients do not tell apart."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _messages(data: Sequence[Reader]) -> list[Json]:
    """Convert messages to those of a chat. A result has the name of its tool, seldom the id of its call."""
    messages: list[Json] = []
    waiting: list[tuple[str, str]] = []  # id and tool of calls without a result yet
    for number, reader in enumerate(data):
        content, images, name = reader.text("content"), reader.any("images"), reader.text("tool_name")
        message: Json = {"role": reader.needed("role"), "content": content}
        for call in readers(reader.any("tool_calls") or [], reader.name("tool_calls"), "a list"):
            identity, function = call.text("id") or f"call{number:03d}{len(waiting):02d}", call.inner("function")
            waiting.append((identity, function.text("name")))
            called = {"name": waiting[-1][1], "arguments": function.any("arguments")}
            message.setdefault("tool_calls", []).append({"id": identity, "type": "function", "function": called})
        if message["role"] == "tool":
            answered = next((call for call in waiting if call[1] == name), (waiting or [("", "")])[0])
            waiting = [call for call in waiting if call is not answered]
            message["tool_call_id"] = reader.text("tool_call_id") or answered[0]
        if images:
            encoded = Reader({"images": images}, reader.where).texts("images", MOST_IMAGES)
            urls = [{"url": f"data:image;base64,{data}"} for data in encoded]
            texts = [{"type": "text", "text": content}] if content else []
            message["content"] = [*({"type": "image_url", "image_url": url} for url in urls), *texts]
        messages.append(message)
    return messages


@dataclass(slots=True)
class OllamaReply(Reply):
    """Formats an answer as an object, or as several, one a line. `generated`: of /api/generate."""

    framing: ClassVar[Framing] = "lines"
    generated: bool = False

    def whole(self) -> Json:
        deltas, done = self._deltas.get(0, []), self.done[0]
        text, thinking = ("".join(one.text for one in deltas if one.reasoning is kind) for kind in (False, True))
        tokens = [token for delta in deltas for token in delta.tokens]
        return {**self._object(text, thinking, (*tokens, *done.rest), done.calls), **self._end(done)}

    def opening(self) -> Iterable[Json]:
        return ()

    def chunks(self, event: AnswerEvent) -> Iterable[Json]:
        if isinstance(event, Text) and event.call is None:
            yield self._object(*(("", event.text) if event.reasoning else (event.text, "")), event.tokens)
        elif isinstance(event, Answer):
            if event.calls:
                yield self._object("", calls=event.calls)
            yield {**self._object("", tokens=event.rest), **self._end(event)}

    def closing(self, replies: Sequence[Reply]) -> Iterable[Json]:
        return ()

    def failure(self, error: Refused) -> Json:
        return ollama_error(error)

    def _object(
        self, text: str, thinking: str = "", tokens: Sequence[Token] = (), calls: Sequence[ToolCall] = ()
    ) -> Json:
        thoughts = {"thinking": thinking} if thinking else {}
        logprobs = self._logprobs(tokens) if tokens else None
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        called = [
            {"id": call.id, "function": {"index": index, **function}}
            for index, (call, function) in enumerate(zip(calls, functions, strict=True))
        ]
        message = {"role": "assistant", "content": text, **thoughts, **({"tool_calls": called} if calls else {})}
        return {
            **head(self.model),
            **({"response": text, **thoughts} if self.generated else {"message": message}),
            "done": False,
            **({"logprobs": logprobs["content"]} if logprobs else {}),
        }

    def _end(self, done: Answer) -> Json:
        prefill, generation = self.seconds
        return {
            "done": True,
            "done_reason": "stop" if done.stopped == "end" else "length",
            "total_duration": int(BILLION * (prefill + generation)),
            "load_duration": 0,
            "prompt_eval_count": done.counts.total,
            "prompt_eval_duration": int(BILLION * prefill),
            "eval_count": done.tokens + done.reasoning,
            "eval_duration": int(BILLION * generation),
            **self.explained(),
        }


def head(model: str) -> Json:
    return {"model": model, "created_at": datetime.now(timezone.utc).isoformat()}


def loaded(model: str, generated: bool) -> Json:
    """Return the reply to a request without a question."""
    answer: Json = {"response": ""} if generated else {"message": {"role": "assistant", "content": ""}}
    return {**head(model), **answer, "done": True, "done_reason": "load"}


def model_json(state: ServerState, name: str, started: int) -> Json:
    """Return a model of the lists. Clients take names with one digest for one model, so one with skills has its own."""
    workspace, digest = state.workspace, state.workspace.weights
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(started, timezone.utc).isoformat(),
        "size": sum(source.path.stat().st_size for source in workspace.model.sources),
        "digest": digest if name in state.names else hashlib.sha256(f"{digest} {name}".encode()).hexdigest(),
        "details": _details(workspace),
        "context_length": state.longest,
        "expires_at": FOREVER,
        "size_vram": 0,
    }


def show_json(workspace: Workspace) -> Json:
    """Return the reply of /api/show."""
    model, architecture = workspace.model, workspace.model.architecture
    keys = ("context_length", "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv")
    found = {f"{architecture}.{key}": model.metadata(f"{architecture}.{key}") or "" for key in keys}
    infill = all(model.infill_token(name) is not None for name in ("pre", "suf", "mid"))
    able = {"tools": True, "thinking": bool(workspace.reasoning.open), "vision": workspace.has_vision, "insert": infill}
    return {
        "modelfile": "",
        "parameters": "",
        "template": workspace.chat_template,
        "details": _details(workspace),
        "model_info": {
            "general.architecture": architecture,
            "general.parameter_count": model.parameters,
            **{key: int(value) for key, value in found.items() if value.isdecimal()},
        },
        "capabilities": ["completion", *(name for name, holds in able.items() if holds)],
    }


def _details(workspace: Workspace) -> Json:
    model = workspace.model
    count = model.parameters
    size = f"{count / BILLION:.1f}B" if count >= BILLION else f"{count / 1_000_000:.2f}M"
    family = {"family": model.architecture, "families": [model.architecture]}
    return {
        "parent_model": "",
        "format": "gguf",
        **family,
        "parameter_size": size,
        "quantization_level": model.quantization,
    }
