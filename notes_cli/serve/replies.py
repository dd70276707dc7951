"""Formats answers as JSON of OpenAI's API, whole or in chunks."""

from __future__ import annotations

import codecs
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from notes_cli.engine.sequence import Stopped
from notes_cli.errors import Notice
from notes_cli.explanations import explanation
from notes_cli.runtime.request import Answer, Event, Prefilled, Text, Token
from notes_cli.serve.parsing import ChatRequest
from notes_cli.serve.refusals import Refused, error_body

_REASONS: dict[Stopped, str] = {"end": "stop", "length": "length", "context": "length"}
AnswerEvent = Prefilled | Text | Answer
Json = dict[str, Any]
# Of a stream: server-sent events, with [DONE] at their end, without it, or named by their key `type`; or a JSON a line.
Framing = Literal["done", "plain", "named", "lines"]


@dataclass(slots=True)
class Reply:
    """Collects the events of one prompt and formats its reply. `first`: index of its first choice in the response."""

    framing: ClassVar[Framing] = "done"
    request: ChatRequest
    model: str
    first: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    begun: float = field(default_factory=time.perf_counter)
    prefill: Prefilled | None = None
    notes: Json = field(default_factory=dict)  # of the reply's key `notes`
    done: dict[int, Answer] = field(default_factory=dict)  # by choice, as are the next three
    _notices: list[str] = field(default_factory=list)
    _deltas: dict[int, list[Text]] = field(default_factory=dict)
    _called: dict[int, list[str]] = field(default_factory=dict)  # ids of calls whose arguments are streamed
    _offsets: dict[int, TokenOffsets] = field(default_factory=dict)  # for the log-probabilities of completions

    @property
    def chat(self) -> bool:
        return self.request.prompt is None

    @property
    def echo(self) -> str:
        prompt = self.request.prompt
        return prompt if self.request.echo and isinstance(prompt, str) else ""

    def add(self, event: Event | Json) -> None:
        """Add an event. JSON is for the key `notes`."""
        if isinstance(event, dict):
            self.notes |= event
        elif isinstance(event, Notice):
            self._notices.append(str(event))
        elif isinstance(event, Prefilled):
            self.prefill = event
            self._notices += [event.missed] if event.missed else []
        elif isinstance(event, Answer):
            self.done[event.index] = event
        elif event.call is None:
            self._deltas.setdefault(event.index, []).append(event)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the prefill, and since its end."""
        prefill = self.prefill.seconds if self.prefill else 0.0
        return prefill, max(0.0, time.perf_counter() - self.begun - prefill)

    # Whole replies.

    def whole(self) -> Json:
        choices = [self._choice(index) for index in range(self.request.answers)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage([self]), **self.explained()}

    def _choice(self, index: int) -> Json:
        deltas, done = self._deltas.get(index, []), self.done[index]
        text = "".join(delta.text for delta in deltas if not delta.reasoning)
        tokens = [token for delta in deltas for token in delta.tokens] + list(done.rest)
        shared = {"index": self.first + index, **_finished(done)}
        if not self.chat:
            return {**shared, "text": self.echo + text, "logprobs": self._completion_logprobs(index, tokens)}
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if done.calls:
            message |= {"content": text or None, "tool_calls": tool_calls(done)}
        if reasoning := "".join(delta.text for delta in deltas if delta.reasoning):
            message["reasoning_content"] = reasoning
        return {**shared, "message": message, "logprobs": self._logprobs(tokens)}

    # Chunks.

    def opening(self) -> Iterable[Json]:
        for index in range(self.request.answers):
            if self.chat:
                yield self._chunk(index, {"role": "assistant", "content": ""})
            elif self.echo:
                yield self._chunk(index, self.echo)

    def chunks(self, event: AnswerEvent) -> Iterable[Json]:
        if isinstance(event, Answer):
            calls = [{"index": number, **call} for number, call in enumerate(tool_calls(event))]
            if calls := calls[len(self._called.get(event.index, [])) :]:
                yield self._chunk(event.index, {"tool_calls": calls})
            last = self._chunk(event.index, {} if self.chat else "", event.rest, _finished(event))
            complete = len(self.done) == self.request.answers and not self.request.usage
            yield {**last, **self.explained()} if complete else last
        elif isinstance(event, Text) and event.call is not None:
            call, called = event.call, self._called.setdefault(event.index, [])
            delta: Json = {"index": len(called), "id": call.id, "type": "function"}
            delta["function"] = {"name": call.name, "arguments": event.text}
            if call.id in called:
                delta = {"index": called.index(call.id), "function": {"arguments": event.text}}
            else:
                called.append(call.id)
            yield self._chunk(event.index, {"tool_calls": [delta]})
        elif isinstance(event, Text):
            key = "reasoning_content" if event.reasoning else "content"
            yield self._chunk(event.index, {key: event.text} if self.chat else event.text, event.tokens)

    def _collect(self) -> None:
        """Take all events, for a reply that is built by its chunks."""
        events: list[AnswerEvent] = [*self._deltas.get(0, []), self.done[0]]
        for event in events:
            deque(self.chunks(event), maxlen=0)

    def failure(self, error: Refused) -> Json:
        return error_body(error)

    def closing(self, replies: Sequence[Reply]) -> Iterable[Json]:
        """Yield the chunk of all replies with usage and pieces, and no choice, if usage was requested."""
        if self.request.usage:
            kind = "chat.completion.chunk" if self.chat else "text_completion"
            yield {**self._head(kind), "choices": [], "usage": usage(replies), **self.explained()}

    def _chunk(self, index: int, delta: Json | str, tokens: Sequence[Token] = (), finished: Json | None = None) -> Json:
        shared = {"index": self.first + index, **(finished or {"finish_reason": None})}
        choice: Json = {**shared, "delta" if self.chat else "text": delta, "logprobs": None}
        if tokens:
            choice["logprobs"] = self._logprobs(tokens) if self.chat else self._completion_logprobs(index, tokens)
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [choice]}

    # Parts.

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        return {"id": prefix + self.id, "object": kind, "created": self.created, "model": self.model}

    def explained(self) -> Json:
        """Return the key `notes`, if requested."""
        notes = self.notes
        if self.request.notes.explain and self.prefill:
            pieces = explanation(self.prefill.pieces, asdict(self.prefill.counts), self._notices)
            notes = {**notes, **pieces, "ms": {"prompt": round(1000 * self.prefill.seconds, 3)}, **notes}
        return {"notes": notes} if notes else {}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self.request.options.likely is None:
            return None
        content = []
        for token in tokens:
            likely = [_logprob(*alternative) for alternative in token.likely]
            content.append({**_logprob(token.text, token.raw, token.logprob), "top_logprobs": likely})
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, index: int, tokens: Sequence[Token]) -> Json | None:
        if self.request.options.likely is None:
            return None
        offsets = self._offsets.setdefault(index, TokenOffsets(len(self.echo)))
        return {
            "tokens": [_token_key(token.raw) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likely_by_key(token) for token in tokens],
            "text_offset": [offsets.next(token.shown) for token in tokens],
        }


class TokenOffsets:
    """Computes the offsets of tokens in their text, in characters; of a token inside a character, the character's."""

    def __init__(self, start: int) -> None:
        self._offset, self._incomplete = start, b""  # bytes of an incomplete character

    def next(self, token: bytes) -> int:
        first = self._incomplete + token[:1]
        # The incomplete character becomes U+FFFD if the token does not continue it.
        broken = bool(self._incomplete and _decode(first)[0]) and not is_utf8(first)
        offset = self._offset + broken
        text, self._incomplete = _decode(self._incomplete + token)
        self._offset += len(text)
        return offset


def _decode(data: bytes) -> tuple[str, bytes]:
    """Decode UTF-8, with U+FFFD for invalid bytes; return also the bytes of an incomplete character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(data), decoder.getstate()[0]


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _likely_by_key(token: Token) -> dict[str, float]:
    """Return log-probabilities of the likeliest tokens; of two with the same bytes, that of the likelier one."""
    logprobs: dict[str, float] = {}
    for _, raw, logprob in token.likely:
        logprobs.setdefault(_token_key(raw), logprob)
    return logprobs


def _token_key(raw: bytes) -> str:
    """Return a token as the completions API names it: its text, or its bytes if they are part of a character."""
    return raw.decode() if is_utf8(raw) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finished(done: Answer) -> Json:
    """Return why an answer ended: also vLLM's `stop_reason`, the stop sequence, if one did it."""
    reason = "tool_calls" if done.calls and done.stopped == "end" else _REASONS[done.stopped or "end"]
    return {"finish_reason": reason, **({"stop_reason": done.stop} if done.stop else {})}


def tool_calls(done: Answer) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
        for call in done.calls
    ]


def usage(replies: Sequence[Reply]) -> Json:
    """Return the token counts of prompts and their answers."""
    prefills = [reply.prefill for reply in replies if reply.prefill]
    done = [answer for reply in replies for answer in reply.done.values()]
    prompt = sum(prefill.counts.total for prefill in prefills)
    answers = sum(answer.tokens + answer.reasoning for answer in done)
    cached = sum(prefill.counts.total - prefill.counts.decoded for prefill in prefills)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": cached, "notes": gain(replies)},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning for answer in done)},
    }


def response_usage(replies: Sequence[Reply]) -> Json:
    """Return the same counts as in the Responses and Decisions APIs."""
    counts = usage(replies)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }


def gain(replies: Sequence[Reply]) -> dict[str, int]:
    """Return the spliced and the decoded prompt tokens, and the milliseconds of prefill that splicing saved, if known
    for all prompts. Integers, as clients expect in `usage`."""
    prefills = [reply.prefill for reply in replies if reply.prefill]
    counts = {
        "spliced_tokens": sum(prefill.counts.spliced for prefill in prefills),
        "decoded_tokens": sum(prefill.counts.decoded for prefill in prefills),
    }
    times = [prefill.saved for prefill in prefills if prefill.saved is not None]
    return {**counts, "saved_ms": round(1000 * sum(times))} if len(times) == len(prefills) else counts


def headers(replies: Sequence[Reply]) -> dict[str, str]:
    return {f"x-notes-{name.replace('_', '-')}": str(number) for name, number in gain(replies).items()}


def join_replies(replies: Sequence[Reply]) -> Json:
    whole = [reply.whole() for reply in replies]
    if len(whole) == 1:
        return whole[0]
    return {**whole[0], "choices": [choice for reply in whole for choice in reply["choices"]], "usage": usage(replies)}


def _logprob(text: str, raw: bytes, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}
