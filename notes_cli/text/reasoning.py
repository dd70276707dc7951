"""Describes how models reason before they answer; finds the end of reasoning and stop strings in streamed text.

Most models put their reasoning between marks of their chat template; others are prompted by a cue after the question.
prompts/reasoning.json has the differences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from notes_cli.config import resource
from notes_cli.errors import ModelError
from notes_cli.text.messages import Message, TextPart, count_markers, marker
from notes_cli.text.prompt import generation_prompt
from notes_cli.text.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning format of a model. `open` and `close` are empty for a model without marks, which has a `cue`."""

    name: str = ""
    known: Sequence[str] = ()  # texts of its chat template that identify it
    open: str = ""
    close: str = ""
    answer: str = ""  # between reasoning and answer
    direct: str = ""  # opens an answer without reasoning, if the template does not
    end: str = ""  # follows the answer
    thinking: Mapping[str, object] = field(default_factory=dict)  # variables of the template, with reasoning
    otherwise: Mapping[str, object] = field(default_factory=dict)  # and without
    cue: str = ""
    inside: re.Pattern[str] | None = None  # matches the answer in reasoning that ends with it

    def template(self, template: ChatTemplate, think: bool) -> ChatTemplate:
        """Return the template whose generation prompt opens reasoning, or an answer without it. Raises ModelError if
        the template fails."""
        template = template.with_options(self.thinking if think else self.otherwise)
        opened = self.opened(generation_prompt(template))
        with_calls = self.calling
        without_reasoning = template.with_words(
            self.closing if opened else self.direct, calling=with_calls.closing if opened else with_calls.direct
        )
        if not think:
            return without_reasoning
        return template.with_words("" if opened else self.open, self.cue, without_reasoning)

    def without_thoughts(self, template: ChatTemplate, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Remove reasoning from the texts of answers before the last question, if the template does so."""
        question = max((number for number, message in enumerate(messages) if message.role == "user"), default=0)
        mark = self.close.strip()
        found = {
            number: message.text.rpartition(mark)[2].lstrip()
            for number, message in enumerate(messages[:question])
            if mark and message.role == "assistant" and mark in message.text
        }
        if not found or self._shown(template):
            return tuple(messages)
        return tuple(
            replace(message, parts=(TextPart(found[number]),)) if number in found else message
            for number, message in enumerate(messages)
        )

    def _shown(self, template: ChatTemplate) -> bool:
        """Return True if the template shows the reasoning of an earlier answer, or takes no answer with reasoning."""
        thoughts, answer = marker(1, "thoughts"), marker(1)
        contents = (marker(0), f"{self.open.strip()}\n{thoughts}\n{self.close.strip()}\n\n{answer}", marker(2))
        roles = ("user", "assistant", "user")
        try:
            text = template.render([{"role": role, "content": one} for role, one in zip(roles, contents, strict=True)])
        except ModelError:
            return True
        counts = count_markers(text)
        return thoughts in counts or answer not in counts

    @property
    def calling(self) -> Reasoning:
        """The format if the answer may call a tool: the model itself opens the answer."""
        return replace(self, answer="" if self.answer.strip() else self.answer, direct="") if self.open else self

    @property
    def closing(self) -> str:
        """Text that ends unfinished reasoning, up to where the answer begins."""
        return self.close + self.answer

    def opened(self, text: str) -> bool:
        """Return True if the text leaves reasoning open."""
        return bool(self.open) and text.rfind(self.open.strip()) > text.rfind(self.close.strip())

    def found(self, reasoning: str) -> re.Match[str] | None:
        """Return the match of the answer at the end of the reasoning itself, in group 1."""
        if self.inside is None:
            return None
        return next(reversed([*self.inside.finditer(reasoning)]), None)


class TextStream:
    """Passes streamed text on up to the first mark, and holds back a possible beginning of one."""

    def __init__(
        self, say: Callable[[str], object], mark: str = "", also: Sequence[str] = (), *, strip: bool = False
    ) -> None:
        """`also`: other marks, matched with their blanks. `strip`: without leading blanks."""
        self.text = ""  # passed on
        self.found = ""  # the mark, stripped, or the one of `also`
        self.rest = ""  # text after the mark
        self._say, self._strip, self._held = say, strip, ""
        self._marks = [text for text in (mark.strip(), *also) if text]

    def add(self, text: str) -> None:
        """Pass on the text that certainly precedes the mark."""
        if self.found:
            self.rest += text
            return
        text = self._held + text
        places = [(place, -len(mark), mark) for mark in self._marks if (place := text.find(mark)) >= 0]
        if places:
            place, _, self.found = min(places)
            self.rest, self._held = text[place + len(self.found) :], ""
            self._pass_on(text[:place])
            return
        partial = (n for mark in self._marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
        end = len(text) - max(partial, default=0)
        self._held = text[end:]
        self._pass_on(text[:end])

    def end(self) -> None:
        """Pass on the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        self._pass_on(held)

    def _pass_on(self, text: str) -> None:
        text = text.lstrip() if self._strip and not self.text else text
        self.text += text
        if text:
            self._say(text)


class LeadingMark:
    """Detects a mark at the beginning of streamed text, holding the text back until that is known."""

    def __init__(self, mark: str) -> None:
        self.found = False
        self.rest = ""  # text after the mark
        self._mark, self._waits, self._held = mark.strip(), True, ""

    def feed(self, text: str) -> str:
        """Return text that is not the mark."""
        if not self._waits:
            return text
        self._held += text
        start = self._held.lstrip()
        if start.startswith(self._mark):
            self.found, self.rest, self._held = True, start[len(self._mark) :], ""
        elif not self._mark.startswith(start):
            self._waits = False
        return "" if self._waits else self.flush()

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def reasoning_of(source: str, name: str) -> Reasoning:
    """Return the reasoning format of the model with this chat template and name."""
    table = shipped_table()
    for entry in table["marks"]:
        texts = [text in source for text in entry.known or (entry.open.strip(), entry.close.strip())]
        if all(texts) or (any(texts) and not entry.known):
            return entry
    return next(entry for entry in table["cues"] if name.startswith(entry.name))


@cache
def shipped_table() -> Mapping[str, Sequence[Reasoning]]:
    """Return the formats in prompts/reasoning.json, whose `switches` are template variables for all models.

    marks: Formats with marks. A model has the first entry whose `known` texts (default: `open` or `close`) are all in
        its chat template. From the templates in llama.cpp's models/templates; Hunyuan and EXAONE Deep from their model
        cards.
    cues: Formats without marks, by the beginning of model names; the last entry is for all others. The shipped model
        ends its reasoning with the outcome, which `inside` matches: 49 of 50 held-out decisions were right with the
        original text, 44 with an erratum; weighing the choices after a cue gave 34 at most.
    """
    data = json.loads((resource("prompts") / "reasoning.json").read_text(encoding="utf-8"))
    table: dict[str, list[Reasoning]] = {"marks": [], "cues": []}
    for kind, formats in table.items():
        for entry in data[kind]:
            options = {way: {**data["switches"][way], **entry.get(way, {})} for way in ("thinking", "otherwise")}
            inside = re.compile(entry["inside"]) if "inside" in entry else None
            formats.append(Reasoning(**{**entry, **options, "inside": inside}))
    return table
