"""Renders chat templates, and splits the result at markers so that the text of users never passes through Jinja.

Jinja therefore cannot trim it, and nothing in it is read as a special token. (Strings of tools do pass through Jinja,
between marks: messages.py.)
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from notes_cli.errors import ModelError
from notes_cli.text.messages import (
    Encode,
    as_given,
    count_markers,
    marked,
    marked_neutral,
    marked_where_different,
    marker,
    normalize_tools,
    split_marked,
    unmarked,
    unmarked_neutral,
    without_marks,
)
from notes_cli.text.rendering import RenderError, render

Rendered = Mapping[str, Any]  # a message for a template: role, content, calls

# For a model without a template: a base model knows no roles, and gets a short text that asks for an answer.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% elif m.role == 'user' %}{{ 'Question: ' + m.content + '\n' }}"
    "{% else %}{{ 'Answer: ' + m.content + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)
# Precedes a template that has no tools, in a conversation with some: it describes them at the beginning of the first
# message, as a system text changes more often, and puts calls and results into the text of messages.
GENERIC_TOOLS = """
{%- set tag = namespace(messages=[], tools="") %}
{%- if tools %}
    {%- set tag.tools = "You may call functions. Each is described by a line of JSON:\n<tools>\n" %}
    {%- for tool in tools %}{% set tag.tools = tag.tools + (tool | tojson) + "\n" %}{% endfor %}
    {%- set tag.tools = tag.tools + "</tools>\nTo call one, answer with its name and its arguments as JSON:\n" %}
    {%- set tag.tools = tag.tools + '<tool_call>\n{"name": "...", "arguments": {}}\n</tool_call>\n' %}
    {%- set tag.tools = tag.tools + "Its result follows as <tool_response>. If no call is needed, answer in words." %}
{%- endif %}
{%- for message in messages %}
    {%- set role, content = message.role, message.content or "" %}
    {%- if tag.tools and role in ("system", "user") %}
        {%- set content = tag.tools + "\n\n" + content %}
        {%- set tag.tools = "" %}
    {%- endif %}
    {%- set turn = namespace(content=content) %}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function %}
        {%- set arguments = function.arguments %}
        {%- set arguments = arguments if arguments is string else arguments | tojson %}
        {%- set turn.content = turn.content + ("\n" if turn.content else "") + '<tool_call>\n{"name": "' %}
        {%- set turn.content = turn.content + function.name + '", "arguments": ' + arguments + "}\n</tool_call>" %}
    {%- endfor %}
    {%- set last = tag.messages[-1] if tag.messages else {} %}
    {%- set text = "<tool_response>\n" + content + "\n</tool_response>" if role == "tool" else turn.content %}
    {%- if last.role == "user" and (role == "tool" or (role == "user" and last.results)) %}
        {%- set text = last.content + "\n" + text %}
        {%- set tag.messages = tag.messages[:-1] %}
    {%- endif %}
    {%- set shown_role = "user" if role == "tool" else role %}
    {%- set tag.messages = tag.messages + [{"role": shown_role, "content": text, "results": role == "tool"}] %}
{%- endfor %}
{%- set messages = tag.messages %}
{{- "" }}"""
JOIN = "\n\n"  # between system content and question if a template has no system role
_PLAIN = {"role", "content"}  # of a message without calls and results
_TOOLS = re.compile(r"tools\b|\bfunctions\b|\btool_calls\b")  # variables of templates that have tools or calls


class LeftOutError(ModelError):
    """The template does not show tools to the model."""


class ChatTemplate:
    """The chat template of a model.

    `source` is the Jinja text, empty for a model without one (then PLAIN); `bos` and `eos` are the texts of those
    tokens; `now` fixes the date that some templates print; `name` is for errors.

    Methods that render raise ModelError, in one line, if the source is not valid Jinja, fails, or exceeds the limits of
    rendering.py.
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        *,
        now: datetime | None = None,
        name: str = "the model's chat template",
    ) -> None:
        self.name = name
        self.eos = eos
        self._source, self._now = source or PLAIN, now
        self.generic_tools = _TOOLS.search(source) is None  # describes tools by GENERIC_TOOLS
        self._variables: dict[str, object] = {
            "tools": None,
            "functions": "",
            "documents": None,
            "bos_token": bos,
            "eos_token": eos,
        }
        self.cue = ""  # follows the question
        self.reply = ""  # opens the answer, after the template's text
        self.calling: str | None = None  # opens an answer that may call a tool, if different
        self.earlier = self  # the template for earlier turns, whose answers open differently
        self._tools: Sequence[Mapping[str, Any]] = []  # as passed by the caller

    @property
    def tool_source(self) -> str:
        """The Jinja text for conversations with tools, which shows the form of calls."""
        return GENERIC_TOOLS + self._source if self.generic_tools else self._source

    def with_options(self, options: Mapping[str, object]) -> ChatTemplate:
        """Return the template with other variables."""
        template = copy.copy(self)
        template.__dict__.pop("folds_system", None)
        template._variables = {**self._variables, **options}
        template.earlier = template
        return template

    def with_words(
        self, reply: str, cue: str = "", earlier: ChatTemplate | None = None, calling: str | None = None
    ) -> ChatTemplate:
        """Return the template with additional text after the question (`cue`) and before the answer (`reply`; `calling`
        where the answer may call a tool). `earlier`: the template for earlier turns."""
        template = copy.copy(self)
        template.cue, template.reply, template.calling = cue, reply, calling
        template.earlier = earlier or template
        return template

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Return the template with definitions of these tools, in the format of Conversation.

        Raises NotesError for invalid tools, and LeftOutError if the template leaves one out.
        """
        if not tools:
            return self
        definitions = [as_given(tool) for tool in normalize_tools(tools)]
        encoded = [marked(tool) for tool in definitions]
        names = {marker(number, "tool"): tool["function"]["name"] for number, tool in enumerate(encoded)}
        probes = [
            tool | {"function": tool["function"] | {"name": mark}} for tool, mark in zip(encoded, names, strict=True)
        ]
        rendered = self._with_definitions(probes)._render([{"role": "user", "content": marker(0)}], True)
        counts = count_markers(rendered)
        left_out = [name for mark, name in names.items() if mark not in counts]
        if left_out:
            raise LeftOutError(
                f"{self.name} does not tell the model of tools (left out: {', '.join(left_out)})",
                "Describe them in the system text, or use a model that was trained to call tools",
            )
        template = self._with_tools(definitions).for_calls()
        if self.earlier is not self:
            template.earlier = self.earlier._with_tools(definitions)
        return template

    def for_calls(self) -> ChatTemplate:
        """Return the template with the text before an answer that may call a tool."""
        return self.opening(self.reply if self.calling is None else self.calling)

    def opening(self, reply: str) -> ChatTemplate:
        """Return the template with other text before the answer."""
        template = copy.copy(self)
        template.reply = reply
        return template

    def _with_tools(self, tools: Sequence[Mapping[str, Any]], encode: Encode = marked) -> ChatTemplate:
        if not tools:
            return self
        template = self._with_definitions([encode(tool) for tool in tools])
        template._tools = tools
        return template

    def _with_definitions(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Return the template with these tools, also under Firefunction's name for them."""
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return self.with_options({"tools": tools, "functions": functions})

    def render(self, messages: Sequence[Rendered], add_generation_prompt: bool = True) -> str:
        """Render a conversation. Raises ModelError if the template refuses or fails.

        Without a system role the system content goes to the beginning of the first user message.
        """
        text = self._render(_folded(messages) if self.folds_system else messages, add_generation_prompt)
        return text + self.reply if add_generation_prompt else text

    def render_marked(self, messages: Callable[[Encode], Sequence[Rendered]]) -> str:
        """Render messages with marks around strings of tools, calls and results (messages.py). `messages` makes the
        messages with such strings encoded.

        Raises ModelError also if the characters of such strings cannot be distinguished from the template's.
        """
        text = self.render(messages(marked))
        if marked(self._tools) == self._tools and messages(marked) == messages(as_given):
            return text

        def passed(encode: Encode) -> str:
            return self._with_tools(self._tools, encode).render(messages(encode))

        plain = passed(as_given)
        parts, expected = split_marked(text), split_marked(passed(marked_neutral))
        own, own_expected = ([part for part, own in split or () if own] for split in (parts, expected))
        if parts is not None and without_marks(text) == plain and own == own_expected:
            return text
        # Marks change the output of a template that tests the ends of a text or splits it.
        text = passed(unmarked)
        with_marks = marked_where_different(text, passed(unmarked_neutral)) if without_marks(text) == plain else None
        if with_marks is None:
            raise ModelError(
                f"{self.name} takes apart what is in tools, calls or results, so it cannot be kept apart from its words"
            )
        return with_marks

    def cut(self, messages: Sequence[Rendered], markers: Sequence[str]) -> list[str]:
        """Render messages whose contents are the markers, and return the template's text before, between and after
        them: one entry more than `markers`.

        Raises ModelError if the template drops, changes, repeats or reorders a marker.
        """
        return self.cut_text(self.render(messages), markers)

    @cached_property
    def folds_system(self) -> bool:
        """True if system content must go to the first user message, as the template has no place for it.

        This is so if the template fails or drops the content, and also if it moves it from the beginning of the
        conversation (as some of Mistral do after the first turn): a spliced skill must keep its place.
        """
        contents = [marker(i) for i in range(4)]
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            self.cut_text(self._render(messages, True), contents)
        except ModelError:
            # Folding helps only if the system message is at fault: other errors are raised here.
            self.cut_text(self._render(_folded(messages), True), contents)
            return True
        return False

    def _render(self, messages: Sequence[Rendered], add_generation_prompt: bool) -> str:
        known = self._variables
        variables = known | {"messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        no_tools = known["tools"] is None and all(m.keys() == _PLAIN and m["role"] != "tool" for m in messages)
        source, second = self._source if no_tools else self.tool_source, int(time.time())
        try:
            return _rendered(source, json.dumps(variables), self._now, second)
        except RenderError as error:
            if known["tools"] is None and "tools" in self._source:  # some templates loop over them
                with contextlib.suppress(RenderError):
                    return _rendered(source, json.dumps(variables | {"tools": []}), self._now, second)
            raise ModelError(f"{self.name} {error}") from error

    def cut_text(self, rendered: str, markers: Sequence[str]) -> list[str]:
        """As `cut`, for text that is already rendered."""
        chunks: list[str] = []
        counts, at = count_markers(rendered), 0
        for mark in markers:
            count = counts[mark] or rendered.count(mark)  # most are counted: there may be very many
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
def _rendered(source: str, variables: str, now: datetime | None, _second: int) -> str:
    """Render a template with variables in JSON. Markers replace texts, so many questions share a rendering; it is
    repeated after a second, as some templates print the time."""
    return render(source, variables, now)


def _folded(messages: Sequence[Rendered]) -> Sequence[Rendered]:
    """Move the content of a leading system message to the beginning of the first user message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    head, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": head["content"]}, *rest]
    return [{"role": "user", "content": head["content"] + JOIN + rest[0]["content"]}, *rest[1:]]
