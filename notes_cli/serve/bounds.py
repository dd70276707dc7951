"""What no context could hold, found in the JSON of a request before any of it is read as a prompt.

Messages that are much too long cost others seconds: they are looked through for skills, rendered and tokenized in the
one thread that has the context, and all that to be refused. What is counted here takes milliseconds, and is never more
than the prompt will have: whatever may fit is let through, and counted token by token there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.model import Model
from notes_cli.serve.parsing import PROMPTS
from notes_cli.serve.refusals import too_long

TOKENS = 4096  # of the vocabulary that are looked at in one go
_WHOLE = ("gpt2", "llama", "rwkv")  # tokenizers that leave nothing of a text out
_ACROSS = re.compile(rb"\S\s*\n\n\s*\S")  # two parts of a message in one token


@dataclass(frozen=True, slots=True)
class Size:
    """What a request brings, of what is in the prompt for certain."""

    param: str
    texts: tuple[str, ...] = ()
    messages: int = 0  # each with a token at least, of its words or of the template's around them
    parts: int = 0  # of messages, each with words of its own, and calls of tools
    tokens: int = 0  # that were given as such
    tools: int = 0  # each with its name


def of_chat(data: Any) -> list[Size]:
    """Of the messages of a request, and of its corrections. What is not as it should be is passed over."""
    given = data if isinstance(data, dict) else {}
    texts: list[str] = []
    messages = parts = 0
    for message in _list(given.get("messages")):
        if not isinstance(message, dict):
            continue
        content, role = message.get("content"), message.get("role")
        found = [content] if isinstance(content, str) else [*_words(_list(content))]
        words = [text for text in map(str.strip, found) if text]
        texts += words
        if role == "tool":
            texts.append("\n\n" * (len(found) - 1))  # between its parts, blank ones too
        messages += bool(words) or role not in ("system", "developer")  # blank ones of these are left out
        parts += len(words) if role != "assistant" else bool(words)  # whose parts are put together
        parts += len(_list(message.get("tool_calls")))
    notes = given.get("notes")
    # Where both are there, a correction may be in both.
    texts += _values((notes.get("errata") or notes.get("fields")) if isinstance(notes, dict) else None)
    tools = 0 if given.get("tool_choice") == "none" else len(_list(given.get("tools")))
    return [Size("messages", tuple(texts), messages, parts), Size("tools", tools=tools)]


def _words(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, dict):
            yield from (text for key in ("text", "refusal") if isinstance(text := part.get(key), str))


def _values(errata: Any) -> Iterator[str]:
    """Of corrections what is said in any wording. One that is there twice may be said once."""
    if isinstance(errata, dict):
        yield from (one.strip() for one in errata.values() if isinstance(one, str))
        return
    listed = [one for one in _list([errata] if isinstance(errata, str) else errata) if isinstance(one, str)]
    yield from (one.partition("=")[2].strip() for one in dict.fromkeys(listed))


def of_completion(data: Any) -> list[Size]:
    """Of each prompt of a request. Blanks do not count: control tokens in a raw prompt may swallow them."""
    prompt = data.get("prompt") if isinstance(data, dict) else None
    listed = _list(prompt)
    if len(listed) > PROMPTS and not isinstance(listed[0], int):
        return []  # more than are taken
    every = [prompt] if all(isinstance(one, int) for one in listed) else listed
    return [
        Size("prompt", ("".join(one.split()),)) if isinstance(one, str) else Size("prompt", tokens=len(_list(one)))
        for one in every
    ]


def of_texts(param: str, *texts: str) -> list[Size]:
    """Of texts that are in one prompt as they are."""
    return [Size(param, texts)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class Letters:
    """How many bytes the longest token has that holds a byte. A text has at least as many tokens as there are bytes,
    each taken as that part of its longest token."""

    def __init__(self) -> None:
        self._longest: NDArray[np.float64] | None = None
        self._across = False
        self.known = False

    def learning(self, model: Model) -> Iterator[None]:
        """Look at the vocabulary, a part of it at a time: there may be hundreds of thousands of tokens."""
        longest, across = np.zeros(256), False
        for first in range(0, model.n_vocab, TOKENS):
            for token in range(first, min(first + TOKENS, model.n_vocab)):
                piece = model.token_bytes(token, special=True)
                held = list(set(piece))
                longest[held] = np.maximum(longest[held], len(piece))
                across = across or bool(_ACROSS.search(piece))
            yield
        longest[longest == 0] = np.inf  # bytes of characters that the model does not know
        self._longest = longest if model.metadata("tokenizer.ggml.model") in _WHOLE else None
        self._across, self.known = across, True

    def least(self, texts: Iterable[str]) -> int:
        """Tokens that texts have at least; 0 where that cannot be said."""
        if self._longest is None:
            return 0
        data = np.frombuffer("".join(texts).encode(), np.uint8)
        return int((np.bincount(data, minlength=256) / self._longest).sum())

    def check(self, size: Size, most: int) -> None:
        """Raise Refused for what has more tokens than that, for certain."""
        parts = 0 if self._across else size.parts
        for count, what in (
            (size.messages, "messages"),
            (parts, "parts"),
            (size.tokens, "tokens"),
            (size.tools, "tools"),
        ):
            if count > most:
                raise too_long(most, f"has {count:,} {what}", size.param)
        if (least := self.least(size.texts)) > most:
            characters = sum(map(len, size.texts))
            raise too_long(most, f"has a text of {characters:,} characters, {least} tokens or more", size.param)


def needs_letters(size: Size, most: int) -> bool:
    """Whether it could be too long at all: no token has less than a byte."""
    letters = sum(map(len, size.texts))
    return max(4 * letters, size.messages, size.parts, size.tokens, size.tools) > most
