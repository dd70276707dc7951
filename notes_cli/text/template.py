"""Chat templates: messages rendered in the form that the model was trained on, and cut where texts belong.

`cut` renders markers in the place of texts and cuts the result at them: what remains is the template's own. So no text
of a user passes through Jinja, is trimmed by it, or is mistaken for a special token. (The strings of tools do pass
through it, between marks: messages.py.) It knows no tokens and no skills.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, Protocol

from notes_cli.errors import ModelError
from notes_cli.text.messages import (
    Way,
    as_given,
    blurred,
    checked_tools,
    marked,
    marked_where_different,
    marker,
    markers_in,
    neutral,
    no_text,
    sealed,
    stretches,
    unmarked,
    unsealed,
    without_marks,
)
from notes_cli.text.rendering import RenderError, Rendering, code_stamp, render

Rendered = Mapping[str, Any]  # a message as templates take it: role, content, and what tools need

# For a model without a template: a base model, which knows no roles, gets a short text that asks for an answer.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% elif m.role == 'user' %}{{ 'Question: ' + m.content + '\n' }}"
    "{% else %}{{ 'Answer: ' + m.content + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)
JOIN = "\n\n"  # between system content and question if a template has no system role
_PLAIN = {"role", "content"}  # of a message without calls and results


class LeftOutError(ModelError):
    """The template shows the model no tools."""


class Memory(Hashable, Protocol):
    """What templates have rendered, from one process to the next (library/facts.py)."""

    def find(self, key: str) -> Rendering | None:
        """What is known by that key, and would be the same now."""

    def keep(self, key: str, rendering: Rendering) -> None:
        """Remember one more."""


class ChatTemplate:
    """The chat template of one model.

    `source` is the Jinja text, empty for a model without one (then PLAIN); `bos` and `eos` are the texts of
    those tokens; `options` are variables a template may know (such as enable_thinking); `now` fixes the
    date that some templates print; `name` is used in errors; `memory` saves rendering the same again.

    Methods that render raise ModelError, in one line, if the source is not valid Jinja, fails, or takes more than
    rendering.py allows.
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        *,
        options: Mapping[str, object] | None = None,
        now: datetime | None = None,
        name: str = "the model's chat template",
        memory: Memory | None = None,
    ) -> None:
        self.name = name
        self._memory = memory
        self.eos = eos
        self._source, self._now = source or PLAIN, now
        self._known = {
            "tools": None,
            "functions": "",
            "documents": None,
            **(options or {}),
            "bos_token": bos,
            "eos_token": eos,
        }
        self.cue = ""  # follows the question
        self.reply = ""  # opens the answer, after the template's own words
        self.calling: str | None = None  # opens it where it may be a call of a tool, if that is something else
        self.earlier = self  # the template for earlier turns, whose answers are opened in another way
        self._tools: Sequence[Mapping[str, Any]] = []  # as they were given

    def with_options(self, options: Mapping[str, object]) -> ChatTemplate:
        """The same template with other variables."""
        other = copy.copy(self)
        other.__dict__.pop("folds_system", None)
        other._known = {**self._known, **options}
        other.earlier = other
        return other

    def with_words(
        self, reply: str, cue: str = "", earlier: ChatTemplate | None = None, calling: str | None = None
    ) -> ChatTemplate:
        """The same template with our words after the question and before the answer (`calling`: one that may call a
        tool); `earlier` is that of earlier turns."""
        other = copy.copy(self)
        other.cue, other.reply, other.calling = cue, reply, calling
        other.earlier = earlier or other
        return other

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """The same template with definitions of these tools, in the form that Conversation takes.

        Raise NotesError for tools that are not valid, and LeftOutError if the template leaves one out.
        """
        if not tools:
            return self
        given = [as_given(tool) for tool in checked_tools(tools)]
        safe = [marked(tool) for tool in given]
        named = {marker(number, "tool"): tool["function"]["name"] for number, tool in enumerate(safe)}
        probes = [
            tool | {"function": tool["function"] | {"name": mark}} for tool, mark in zip(safe, named, strict=True)
        ]
        shown = self._knowing(probes)._render([{"role": "user", "content": marker(0)}], True)
        there = markers_in(shown)
        left_out = [name for mark, name in named.items() if mark not in there]
        if left_out:
            raise LeftOutError(
                f"{self.name} does not tell the model of tools (left out: {', '.join(left_out)})",
                "Describe them in the system text, or use a model that was trained to call tools",
            )
        other = self._with_tools(given).for_calls()
        if self.earlier is not self:
            other.earlier = self.earlier._with_tools(given)
        return other

    def for_calls(self) -> ChatTemplate:
        """The same template with the words before an answer that may call a tool."""
        other = copy.copy(self)
        other.reply = self.reply if self.calling is None else self.calling
        return other

    def _with_tools(self, tools: Sequence[Mapping[str, Any]], way: Way = marked) -> ChatTemplate:
        if not tools:
            return self
        other = self._knowing([way(tool) for tool in tools])
        other._tools = tools
        return other

    def _knowing(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """The same template with these tools, also by the name that Firefunction's has for them."""
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return self.with_options({"tools": tools, "functions": functions})

    def render(self, messages: Sequence[Rendered], add_generation_prompt: bool = True) -> str:
        """The whole conversation as text. Raise ModelError if the template refuses or fails.

        A template without a system role gets the system content at the head of the first user message.
        """
        text = self._render(_folded(messages) if self.folds_system else messages, add_generation_prompt)
        return text + self.reply if add_generation_prompt else text

    def render_marked(self, messages: Callable[[Way], Sequence[Rendered]]) -> str:
        """The text of messages, with marks around strings of tools, calls and results (messages.py). `messages` makes
        the messages, with such strings passed in one of three ways.

        Raise ModelError also where it cannot be found out which characters of the text are from such strings.
        """
        text = self.render(messages(marked))
        if marked(self._tools) == self._tools and messages(marked) == messages(as_given):
            return text

        def passed(way: Way) -> str:
            return self._with_tools(self._tools, way).render(messages(way))

        given = passed(as_given)
        found, expected = stretches(text), stretches(passed(neutral))
        own, others = ([part for part, own in each or () if own] for each in (found, expected))
        if found is not None and without_marks(text) == given and own == others:
            return text
        # A template that looks at the ends of a text, or takes it apart, prints something else where there are marks.
        plain = passed(unmarked)
        apart = marked_where_different(plain, passed(blurred)) if without_marks(plain) == given else None
        if apart is None:
            raise ModelError(
                f"{self.name} takes apart what is in tools, calls or results, so it cannot be told from its own words"
            )
        return apart

    def cut(self, messages: Sequence[Rendered], markers: Sequence[str]) -> list[str]:
        """Render messages whose contents are the markers; return the template's texts before, between and after them.

        The result has one entry more than `markers`. Raise ModelError if the template drops, changes,
        repeats or reorders a marker.
        """
        return self.cut_text(self.render(messages), markers)

    @cached_property
    def folds_system(self) -> bool:
        """Whether system content must be put into the first user message, because the template has no place for it.

        So it is if the template fails or drops the content, and also if it moves it away from the beginning of the
        conversation (as some Mistral templates do after the first turn): a spliced skill must stay where it is.
        """
        contents = [marker(i) for i in range(4)]
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            self.cut_text(self._render(messages, True), contents)
        except ModelError:
            # Folding can only help if the system message is at fault: any other error is raised from here.
            self.cut_text(self._render(_folded(messages), True), contents)
            return True
        return False

    def _render(self, messages: Sequence[Rendered], add_generation_prompt: bool) -> str:
        talk = {"messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        # Markers alone are remembered: tools, calls and results are texts of somebody.
        plain = self._known["tools"] is None and all(m.keys() == _PLAIN and no_text(m["content"]) for m in messages)
        memory = self._memory if plain else None
        try:
            return self._text(self._known | talk, memory)
        except RenderError as error:
            if self._known["tools"] is None and "tools" in self._source:  # some loop over them
                with contextlib.suppress(RenderError):
                    return self._text(self._known | talk | {"tools": []}, memory)
            raise ModelError(f"{self.name} {error}") from error

    def _text(self, variables: Mapping[str, object], memory: Memory | None) -> str:
        return _rendered(self._source, json.dumps(variables), self._now, int(time.time()), memory)

    def cut_text(self, rendered: str, markers: Sequence[str]) -> list[str]:
        """As `cut`, for a text that is rendered already."""
        chunks: list[str] = []
        known, at = markers_in(rendered), 0
        for mark in markers:
            count = known[mark] or rendered.count(mark)  # most are known: there may be very many of them
            place = rendered.find(mark, at) if count == 1 else -1
            if place < 0:
                fault = {0: "drops or changes", 1: "reorders"}.get(count, "repeats")
                raise ModelError(
                    f"{self.name} {fault} the content of a message, so it, or a skill in it, cannot be there"
                )
            chunks.append(rendered[at:place])
            at = place + len(mark)
        return [*chunks, rendered[at:]]


@lru_cache(maxsize=32)
def _rendered(source: str, variables: str, now: datetime | None, _second: int, memory: Memory | None) -> str:
    """What a template renders of variables in JSON. As markers stand for texts, it is the same for many questions;
    after a second it is rendered again, as some templates tell the time."""
    seal = sealed(variables) if memory and code_stamp() else None
    if memory is None or seal is None:
        return render(source, json.loads(variables), now).result
    key = hashlib.sha256(repr((code_stamp(), source, seal, now)).encode(errors="replace")).hexdigest()
    if found := memory.find(key):
        return found._replace(text=unsealed(found.text), error=unsealed(found.error)).result
    found = render(source, json.loads(variables), now)
    text, error = sealed(found.text), sealed(found.error)
    if found.steady and text is not None and error is not None:
        memory.keep(key, found._replace(text=text, error=error))
    return found.result


def _folded(messages: Sequence[Rendered]) -> Sequence[Rendered]:
    """The messages with the content of a leading system message at the beginning of the first user message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    head, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": head["content"]}, *rest]
    return [{"role": "user", "content": head["content"] + JOIN + rest[0]["content"]}, *rest[1:]]
