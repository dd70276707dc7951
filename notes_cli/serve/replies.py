"""What a client reads: answers in the shapes of OpenAI's API, whole or in chunks."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from notes_cli.engine.sequence import Stopped
from notes_cli.explanations import explanation
from notes_cli.serve.answering import TextDelta, Token, Written
from notes_cli.serve.jobs import Begun
from notes_cli.serve.parsing import ChatRequest

_REASONS: dict[Stopped, str] = {"end": "stop", "length": "length", "context": "length"}
Json = dict[str, Any]


@dataclass(slots=True)
class Reply:
    """One request's reply, as it comes. `first` is the index of its first choice, where several prompts share one."""

    request: ChatRequest
    model: str
    first: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    begun: Begun | None = None
    written: dict[int, Written] = field(default_factory=dict)
    _words: dict[int, list[TextDelta]] = field(default_factory=dict)
    _places: dict[int, Places] = field(default_factory=dict)  # of tokens, for the log-probabilities of completions

    @property
    def chat(self) -> bool:
        return self.request.prompt is None

    @property
    def echo(self) -> str:
        prompt = self.request.prompt
        return prompt if self.request.echo and isinstance(prompt, str) else ""

    def hear(self, told: Begun | TextDelta | Written) -> None:
        """What was told by the scheduler."""
        if isinstance(told, Begun):
            self.begun = told
        elif isinstance(told, TextDelta):
            self._words.setdefault(told.index, []).append(told)
        else:
            self.written[told.index] = told

    # Whole.

    def whole(self) -> Json:
        choices = [self._choice(index) for index in range(self.request.params.choices)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage([self]), **self.explained()}

    def _choice(self, index: int) -> Json:
        words, written = self._words.get(index, []), self.written[index]
        text = "".join(one.text for one in words if not one.thought)
        tokens = [token for one in words for token in one.tokens] + list(written.rest)
        shared = {"index": self.first + index, "finish_reason": reason(written)}
        if not self.chat:
            return {**shared, "text": self.echo + text, "logprobs": self._completed(index, tokens)}
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if written.calls:
            message |= {"content": text or None, "tool_calls": calls(written)}
        if thought := "".join(one.text for one in words if one.thought):
            message["reasoning_content"] = thought
        return {**shared, "message": message, "logprobs": self._logprobs(tokens)}

    # In chunks.

    def opening(self) -> Iterable[Json]:
        """The chunks before any word."""
        for index in range(self.request.params.choices):
            if self.chat:
                yield self._chunk(index, {"role": "assistant", "content": ""})
            elif self.echo:
                yield self._chunk(index, self.echo)

    def chunks(self, told: Begun | TextDelta | Written) -> Iterable[Json]:
        """What comes of an answer at a time, and its end."""
        if isinstance(told, Written):
            if told.calls:
                listed = [{"index": number, **call} for number, call in enumerate(calls(told))]
                yield self._chunk(told.index, {"tool_calls": listed})
            last = self._chunk(told.index, {} if self.chat else "", told.rest, reason(told))
            whole = len(self.written) == self.request.params.choices and not self.request.usage
            yield {**last, **self.explained()} if whole else last
        elif isinstance(told, TextDelta) and self.chat:
            key = "reasoning_content" if told.thought else "content"
            yield self._chunk(told.index, {key: told.text}, told.tokens)
        elif isinstance(told, TextDelta):
            yield self._chunk(told.index, told.text, told.tokens)

    def closing(self, replies: Sequence[Reply]) -> Iterable[Json]:
        """The last chunk, of all replies, which has no choice: what was used, where that was asked for, and what the
        prompt was made of."""
        if self.request.usage:
            kind = "chat.completion.chunk" if self.chat else "text_completion"
            yield {**self._head(kind), "choices": [], "usage": usage(replies), **self.explained()}

    def _chunk(self, index: int, delta: Json | str, tokens: Sequence[Token] = (), reason: str | None = None) -> Json:
        shared = {"index": self.first + index, "finish_reason": reason}
        if self.chat:
            choice = {**shared, "delta": delta, "logprobs": self._logprobs(tokens) if tokens else None}
            return {**self._head("chat.completion.chunk"), "choices": [choice]}
        choice = {**shared, "text": delta, "logprobs": self._completed(index, tokens) if tokens else None}
        return {**self._head("text_completion"), "choices": [choice]}

    # Parts.

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        return {"id": prefix + self.id, "object": kind, "created": self.created, "model": self.model}

    def explained(self) -> Json:
        """The key `notes`, where it was asked for."""
        told: Json = {name: value for one in self.written.values() for name, value in one.notes.items()}
        if self.request.notes.explain and self.begun:
            pieces = explanation(self.begun.pieces, asdict(self.begun.counts), self.begun.notices)
            told = {**told, **pieces, "ms": {"prompt": round(1000 * self.begun.seconds, 3)}, **told}
        return {"notes": told} if told else {}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self.request.params.likely is None:
            return None
        return {
            "content": [
                {
                    **_likely(one.text, one.spelt, one.logprob),
                    "top_logprobs": [_likely(*other) for other in one.likely],
                }
                for one in tokens
            ],
            "refusal": None,
        }

    def _completed(self, index: int, tokens: Sequence[Token]) -> Json | None:
        if self.request.params.likely is None:
            return None
        places = self._places.setdefault(index, Places(len(self.echo)))
        return {
            "tokens": [_key(one.spelt) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [_by_key(one) for one in tokens],
            "text_offset": [places.next(one.shown) for one in tokens],
        }


class Places:
    """Where the tokens of a text begin in it, in characters. A token in the middle of a character is where that is."""

    def __init__(self, start: int) -> None:
        self._place, self._open = start, b""  # bytes of a character that is not complete

    def next(self, token: bytes) -> int:
        """Where the next token is."""
        first = self._open + token[:1]
        lost = bool(self._open and _decoded(first)[0]) and not _whole(first)  # it does not go on with what is open,
        place = self._place + lost  # which is U+FFFD then
        text, self._open = _decoded(self._open + token)
        self._place += len(text)
        return place


def _decoded(data: bytes) -> tuple[str, bytes]:
    """The characters that bytes are for certain, what is none as U+FFFD, and the bytes of one that may follow."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(data), decoder.getstate()[0]


def _whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _by_key(token: Token) -> dict[str, float]:
    """The likeliest tokens and their log-probabilities; of two that are spelt alike, that of the likelier one."""
    found: dict[str, float] = {}
    for _, spelt, logprob in token.likely:
        found.setdefault(_key(spelt), logprob)
    return found


def _key(spelt: bytes) -> str:
    """A token as completions name it: its text, or its bytes where it is a part of a character."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def reason(written: Written) -> str:
    """Why an answer ends."""
    return "tool_calls" if written.calls and written.stopped == "end" else _REASONS[written.stopped]


def calls(written: Written) -> list[Json]:
    """The tools that an answer calls."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in written.calls
    ]


def usage(replies: Sequence[Reply]) -> Json:
    """The tokens of some prompts and their answers."""
    read = [one.begun for one in replies if one.begun]
    written = [each for one in replies for each in one.written.values()]
    prompt, answers = sum(one.tokens for one in read), sum(one.tokens for one in written)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in read), "notes": gain(replies)},
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning for one in written)},
    }


def gain(replies: Sequence[Reply]) -> dict[str, int]:
    """What splicing did for some prompts: tokens that were spliced and decoded, and the milliseconds of prefill that
    this saved, where all of them are known. Whole numbers, as clients expect them of a usage."""
    read = [one.begun for one in replies if one.begun]
    found = {
        "spliced_tokens": sum(one.counts.spliced for one in read),
        "decoded_tokens": sum(one.counts.decoded for one in read),
    }
    times = [one.saved for one in read if one.saved is not None]
    return {**found, "saved_ms": round(1000 * sum(times))} if len(times) == len(read) else found


def headers(replies: Sequence[Reply]) -> dict[str, str]:
    """The same as headers of a response."""
    return {f"x-notes-{name.replace('_', '-')}": str(number) for name, number in gain(replies).items()}


def joined(replies: Sequence[Reply]) -> Json:
    """The replies to several prompts as one."""
    whole = [one.whole() for one in replies]
    return {**whole[0], "choices": [choice for one in whole for choice in one["choices"]], "usage": usage(replies)}


def _likely(text: str, spelt: bytes, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(spelt)}
