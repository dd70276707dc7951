"""Parses tool calls in answers, in the formats that chat templates teach, and compiles tools as texts.

Models generate calls in the format in which their template shows past calls. FORMS has an entry for each, identified by
text of the template; for unknown templates, answers stay text. A set of tools is compiled as the block in which a
template shows it, sorted by name, so that the order in which a client lists them does not matter.
"""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from notes_cli.errors import ModelError, NotesError, SkillError, reason
from notes_cli.text import names
from notes_cli.text.messages import NAME, ToolCall, has_mark_remains, marker, normalize_tools, split_marked
from notes_cli.text.prompt import Chunk, Run
from notes_cli.text.skill import MAX_BYTES, Skill, stamp_of
from notes_cli.text.template import ChatTemplate

Found = tuple[str, Mapping[str, Any], str]  # name, arguments, id if the model writes one
Schemas = Mapping[str, Mapping[str, Any]]  # parameters by name of the tool
Reader = Callable[[str, Schemas], Iterator[Found]]

LONGEST_OPENING = 1000  # characters before the arguments of a call
_M3 = "]<]minimax[>["
_SPACE = re.compile(r"\s*")
_STRUCTURE = re.compile(r'\\.|["{}\[\]\\]', re.S)  # of JSON


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A format of tool calls. `known`: texts of a template that has it. `begin`: begins the calls, after any text."""

    name: str
    known: Sequence[str]
    begin: str
    read: Reader
    opens: str = r"\Z."  # pattern: what precedes the arguments of a call that are JSON
    bare: str = ""  # pattern: begins an answer that is a call without `begin`
    waits: str = ""  # pattern: an answer that may still become one
    prefix: str = ""  # part of the call that the generation prompt contains
    drop: str = ""  # pattern: surrounds text that is no call
    also: str = ""  # further marks, concatenated

    @property
    def marks(self) -> str:
        """Text that must be visible in an answer to parse it, even if control tokens spell it."""
        return self.begin + self.also


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed answer: its text and its tool calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()


def form_of(source: str) -> ToolCallFormat | None:
    """Return the format of tool calls of a chat template; None if unknown."""
    return next((form for form in FORMS if all(text in source for text in form.known)), None)


def calls_in(answer: str, form: ToolCallFormat | None, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
    """Parse the calls in an answer and the text before them. Calls that are malformed, name no tool or have arguments
    that JSON cannot hold (infinite numbers, half of a surrogate pair) stay text."""
    if form is None or not tools:
        return ParsedAnswer(answer)
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    place = _calls_position(answer, form)
    if place < 0:
        return ParsedAnswer(_strip_frame(answer, form))
    try:
        parsed = [*form.read((form.prefix if place == 0 else "") + answer[place:], schemas)]
        json.dumps([arguments for _, arguments, _ in parsed], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError):
        return ParsedAnswer(answer)
    parsed = [(name, {} if arguments is None else arguments, key) for name, arguments, key in parsed]
    known = all(isinstance(name, str) and name in schemas for name, _, _ in parsed)
    if not parsed or not known or not all(isinstance(arguments, Mapping) for _, arguments, _ in parsed):
        return ParsedAnswer(answer)
    ids = [key for _, _, key in parsed if NAME.fullmatch(key)]
    if len({*ids}) < len(parsed):
        ids = [_new_id() for _ in parsed]
    calls = tuple(ToolCall(key, name, arguments) for key, (name, arguments, _) in zip(ids, parsed, strict=True))
    return ParsedAnswer(_strip_frame(answer[:place], form).strip(), calls)


def _strip_frame(text: str, form: ToolCallFormat) -> str:
    """Remove the text that the format puts around an answer without calls."""
    return re.sub(form.drop, "", text) if form.drop else text


@dataclass(frozen=True, slots=True)
class Calls:
    """Recognises answers that consist only of calls of these tools."""

    form: ToolCallFormat
    tools: Sequence[Mapping[str, Any]]

    def may_be(self, answer: str) -> bool:
        """Return True if an answer with this beginning may be calls."""
        return not may_call(answer.lstrip(), self.form)

    def are(self, answer: str) -> bool:
        """Return True if a whole answer is."""
        parsed = calls_in(answer, self.form, self.tools)
        return bool(parsed.calls) and not parsed.text

    def stream(self, *, required: bool = False) -> ToolCallStream:
        """Return a parser of an answer with calls, or of one `required` call."""
        return ToolCallStream(FORCED if required else self.form, self.tools)


class ToolCallStream:
    """Separates text from tool calls in a streamed answer."""

    def __init__(self, form: ToolCallFormat, tools: Sequence[Mapping[str, Any]]) -> None:
        self._form, self._tools = form, tools
        self._answer = ""
        self._emitted = 0  # characters of the text
        self._names = {tool.get("function", tool)["name"] for tool in tools}
        self._opens = re.compile(form.opens)
        self._begun: list[tuple[ToolCall, str]] = []  # calls whose arguments are passed on, and these
        self._read = 0  # characters of the calls
        self._depth, self._quoted = 0, False  # where it has read to: brackets of arguments, and within a string

    @property
    def call_position(self) -> int:
        """Where a call begins in the answer so far; -1 if none does."""
        return _calls_position(self._answer, self._form)

    def feed(self, text: str) -> str:
        """Return new text that is certainly not part of a call."""
        self._answer += text
        return self._new(_strip_frame(self._answer[: may_call(self._answer, self._form)], self._form).rstrip())

    def arguments(self) -> Iterator[tuple[ToolCall, str]]:
        """Yield new parts of the arguments of calls, for each call an empty one first, where they are JSON."""
        place = self.call_position
        text = (self._form.prefix if place == 0 else "") + self._answer[place:] if place >= 0 else ""
        while self._depth or self._begin(text):
            call, before = self._begun[-1]
            if not before:
                yield call, ""
            first = self._read
            self._read_arguments(text)
            if new := text[first : self._read]:
                self._begun[-1] = call, before + new
                yield call, new
            if self._depth:
                return

    def _begin(self, text: str) -> bool:
        """Begin the next call if its arguments begin in the text."""
        match = self._opens.match(text, self._read, self._read + LONGEST_OPENING)
        if match is None or match["name"] not in self._names or text[match.end() : match.end() + 1] != "{":
            return False
        self._read = match.end()
        key = match.groupdict().get("id") or ""
        fresh = NAME.fullmatch(key) and key not in {call.id for call, _ in self._begun}
        self._begun.append((ToolCall(key if fresh else _new_id(), match["name"]), ""))
        return True

    def _read_arguments(self, text: str) -> None:
        """Read on to the end of the arguments, or of the text."""
        for match in _STRUCTURE.finditer(text, self._read):
            sign = match[0]
            if sign == "\\":  # the escaped character is not generated yet
                self._read = match.start()
                return
            self._quoted ^= sign == '"'
            if not self._quoted and sign in "{}[]":
                self._depth += 1 if sign in "{[" else -1
                if not self._depth:
                    self._read = match.end()
                    return
        self._read = len(text)

    def end(self, cut: bool = False) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text held back, and the calls: also one in the form of a required call that was `cut`, and those
        whose arguments were passed on, whatever became of them."""
        parsed = calls_in(self._answer, self._form, self._tools)
        if begun := [_with_arguments(call, text) for call, text in self._begun]:
            whole = len(parsed.calls) >= len(begun)
            return self._new(parsed.text) if whole else "", (*begun, *parsed.calls[len(begun) :])
        if cut and self._form is FORCED and not parsed.calls and (call := _cut_call(self._answer, self._tools)):
            return "", (call,)
        return self._new(parsed.text), parsed.calls

    def _new(self, text: str) -> str:
        new = text[self._emitted :]
        self._emitted += len(new)
        return new


def parameters_of(tools: Sequence[Mapping[str, Any]], name: str = "") -> Schemas:
    """Return the parameters of the callable tools, or of `name` alone. Raises NotesError if it does not exist."""
    functions = [tool["function"] for tool in normalize_tools(tools) if name in ("", tool["function"]["name"])]
    if not functions:
        raise NotesError(f"there is no tool {name!r} to call" if name else "there is no tool to call")
    return {function["name"]: function["parameters"] for function in functions}


def strict_ones(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of tools with OpenAI's `strict`: their parameters must be enforced in full."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"] for function in functions if function.get("strict") is True}


def may_call(answer: str, form: ToolCallFormat) -> int:
    """Return the length of the beginning of an unfinished answer that is certainly text."""
    place = _calls_position(answer, form)
    if place >= 0:
        return place
    if form.waits and re.fullmatch(form.waits, answer, re.S):
        return 0
    kept = max((n for n in range(1, len(form.begin)) if answer.endswith(form.begin[:n])), default=0)
    return len(answer) - kept


def _calls_position(answer: str, form: ToolCallFormat) -> int:
    """Return the position of the calls in an answer; -1 without any."""
    if form.bare and re.match(form.bare, answer):
        return 0
    return answer.find(form.begin)


# Readers of calls.


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a position, after blanks, and its end."""
    start = _SPACE.match(text, at)
    return json.JSONDecoder().raw_decode(text, start.end() if start else at)


def _objects(*marks: str) -> tuple[Reader, str]:
    """Read JSON objects, single, in a list or in sequence, with these marks between or around them. Returns also what
    precedes their arguments."""
    skipped = re.compile(r"(?:\s|,|;|" + "|".join(map(re.escape, marks)) + ")*")

    def read(text: str, _: Schemas) -> Iterator[Found]:
        at = 0
        while True:
            start = skipped.match(text, at)
            at = start.end() if start else at
            if text[at : at + 1] not in ("{", "["):
                return
            value, at = _json_at(text, at)
            for call in value if isinstance(value, list) else [value]:
                yield _object(call)

    around = "|".join([r"[\s,;\[\]}]", *map(re.escape, marks)])
    name = r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*"(?P<name>[^"\\]+)"'
    return read, rf'(?:{around})*{name}\s*,\s*"(?:arguments|parameters)"\s*:\s*'


def _object(call: Any) -> Found:
    """Return a call from an object with a key for the name, or with the name as its only key."""
    for name in ("name", "tool_name"):
        if name in call:
            arguments: Any = next((call[key] for key in ("arguments", "parameters") if key in call), {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments) if arguments.strip() else None
            return call[name], arguments, str(call.get("id") or "")
    (item,) = call.items()
    return item[0], item[1], ""


def _named(pattern: str) -> tuple[Reader, str]:
    """Read names (and ids) by a pattern that ends where the arguments begin, as JSON. Returns also what precedes
    them."""
    compiled = re.compile(pattern)

    def read(text: str, _: Schemas) -> Iterator[Found]:
        at = 0
        while match := compiled.search(text, at):
            at = match.end()
            if text[at:].lstrip()[:1] == "<":  # the next mark follows: no arguments
                arguments: Any = None
            else:
                arguments, at = _json_at(text, at)
            groups = match.groupdict()
            yield match["name"], arguments, groups.get("id") or ""

    return read, rf"(?s:.*?){pattern}\s*"


def _tagged(call: str, argument: str) -> Reader:
    """Read names with bodies by one pattern, and arguments in the bodies by another: text, unless the schema of the
    tool has another type."""
    calls, arguments = re.compile(call, re.S), re.compile(argument, re.S)
    opens = re.compile(call.partition("(?P<name>")[0])

    def read(text: str, schemas: Schemas) -> Iterator[Found]:
        if len(opens.findall(text)) != len(calls.findall(text)):
            raise ValueError("a call is not whole")
        for match in calls.finditer(text):
            types = schemas.get(match["name"], {}).get("properties", {})
            values: dict[str, Any] = {
                pair["key"]: _value(pair["value"], types.get(pair["key"], {}), pair.groupdict().get("text"))
                for pair in arguments.finditer(match["body"])
            }
            yield match["name"].strip(), values, ""

    return read


def _value(text: str, schema: Any, is_text: str | None) -> Any:
    """Return an argument: text if the schema or the call has that type, else JSON if valid."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if is_text in ("true", "string") or (is_text is None and kind == "string"):
        return text
    for read in (json.loads, ast.literal_eval):  # some templates print Python literals
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError):
            continue
    return text


def _python(text: str, _: Schemas) -> Iterator[Found]:
    """Read a list of Python calls with keyword arguments."""
    match = re.search(r"\[.*\]", text, re.S)
    source = match[0] if match else ""
    try:
        tree = ast.parse(source, mode="eval").body
    except SyntaxError:  # unescaped line breaks in strings
        tree = ast.parse(source.replace("\n", "\\n"), mode="eval").body
    for call in tree.elts if isinstance(tree, ast.List) else []:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call")
        yield ast.unparse(call.func), {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}, ""


def _literal(node: ast.expr) -> Any:
    """Evaluate a Python literal, also with true, false and null."""
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(key): _literal(item) for key, item in zip(node.keys, node.values, strict=True) if key}
    return [_literal(value) for value in node.elts] if isinstance(node, ast.List) else ast.literal_eval(node)


def _gemma(text: str, _: Schemas) -> Iterator[Found]:
    """Read call:name{key:value,...}, with <|"|> around strings and bare keys."""
    for match in re.finditer(r"<\|tool_call>call:(?P<name>[\w.:/-]+)\{(?P<body>.*?)\}<tool_call\|>", text, re.S):
        parts = re.split(r'(<\|"\|>.*?<\|"\|>)', "{" + match["body"] + "}", flags=re.S)
        encoded = [
            json.dumps(part[5:-5]) if number % 2 else re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', part)
            for number, part in enumerate(parts)
        ]
        yield match["name"], json.loads("".join(encoded)), ""


def _minimax(text: str, schemas: Schemas) -> Iterator[Found]:
    """Read tags after a mark, nested for arguments: <item> for list entries, names for an object's members."""
    for match in re.finditer(f'{re.escape(_M3)}<invoke name="([^"]+)">(.*?){re.escape(_M3)}</invoke>', text, re.S):
        stack: list[tuple[str, list[tuple[str, Any]], str]] = [("", [], "")]
        for part in match[2].split(_M3)[1:]:
            tag, _, content = part.partition(">")
            if not tag.startswith("</"):
                stack.append((tag[1:], [], content))
                continue
            key, inner, content = stack.pop()
            types = schemas.get(match[1], {}).get("properties", {}).get(key, {}) if len(stack) == 1 else {}
            value = _value(content, types, None) if not inner else [member for _, member in inner]
            if inner and any(name != "item" for name, _ in inner):
                value = dict(inner)
            stack[-1][1].append((key, value))
        yield match[1], dict(stack[0][1]), ""


_INVOKE = r'<{0}invoke name="(?P<name>[^"]+)">(?P<body>.*?)</{0}invoke>'
_FUNCTION = r"<function=(?P<name>[^>]+)>(?P<body>.*?)</function>"
_GLM = r"<tool_call{0}>(?P<name>[^<\n]+)(?P<body>.*?)</tool_call{0}>"
_GLM_ARGUMENT = r"<arg_key{0}>(?P<key>.*?)</arg_key{0}>\s*<arg_value{0}>(?P<value>.*?)</arg_value{0}>"
FORMS: tuple[ToolCallFormat, ...] = (
    ToolCallFormat(
        "DeepSeek V3.2 and V4",
        ("DSML", "invoke name="),
        "<\uff5cDSML\uff5c",
        _tagged(
            _INVOKE.format("\uff5cDSML\uff5c"),
            '<\uff5cDSML\uff5cparameter name="(?P<key>[^"]+)" string="(?P<text>\\w+)">'
            "(?P<value>.*?)</\uff5cDSML\uff5cparameter>",
        ),
    ),
    ToolCallFormat(
        "muse",
        ("atem:invoke",),
        "<atem:function_calls>",
        _tagged(_INVOKE.format("atem:"), r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>'),
    ),
    ToolCallFormat("MiniMax M3", ("]<]minimax[>[",), f"{_M3}<tool_call>", _minimax),
    ToolCallFormat(
        "MiniMax M2",
        ("minimax:tool_call",),
        "<minimax:tool_call>",
        _tagged(_INVOKE.format(""), r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
    ),
    ToolCallFormat(
        "Hy3",
        ("arg_key{}", "tool_sep{}"),
        "<tool_calls:opensource>",
        _tagged(
            _GLM.format(":opensource").replace("(?P<body>", "<tool_sep:opensource>(?P<body>"),
            _GLM_ARGUMENT.format(":opensource"),
        ),
    ),
    ToolCallFormat(
        "GLM, Laguna, Ling, Spark", ("<arg_key>",), "<tool_call>", _tagged(_GLM.format(""), _GLM_ARGUMENT.format(""))
    ),
    ToolCallFormat(
        "Qwen3 Coder, Qwen3.5, Nemotron 3, StepFun",
        ("<function=", "<parameter=", "<tool_call>"),
        "<tool_call>",
        _tagged(_FUNCTION, r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"),
    ),
    ToolCallFormat(
        "Seed-OSS",
        ("<seed:tool_call>",),
        "<seed:tool_call>",
        _tagged(_FUNCTION, r"<parameter=(?P<key>[^>]+)>(?P<value>.*?)</parameter>"),
    ),
    ToolCallFormat(
        "MiniCPM5",
        ('<param name="',),
        '<function name="',
        _tagged(
            r'<function name="(?P<name>[^"]+)">(?P<body>.*?)</function>',
            r'<param name="(?P<key>[^"]+)">(?:<!\[CDATA\[)?(?P<value>.*?)(?:\]\]>)?</param>',
        ),
    ),
    ToolCallFormat(
        "Kimi K3",
        ("open_tag('call'", "open_tag('argument'"),
        "<|open|>tools<|sep|>",
        _tagged(
            r'<\|open\|>call tool="(?P<name>[^"]+)"[^<]*<\|sep\|>(?P<body>.*?)<\|close\|>call<\|sep\|>',
            r'<\|open\|>argument key="(?P<key>[^"]+)" type="(?P<text>\w+)"<\|sep\|>'
            r"(?P<value>.*?)<\|close\|>argument<\|sep\|>",
        ),
    ),
    ToolCallFormat(
        "Kimi K2",
        ("<|tool_call_argument_begin|>",),
        "<|tool_calls_section_begin|>",
        *_named(r"<\|tool_call_begin\|>functions\.(?P<name>[^<:]+):\d+<\|tool_call_argument_begin\|>"),
        also="<|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
    ),
    ToolCallFormat(
        "Solar Open",
        ("<|tool_call:args|>",),
        "<|tool_calls|>",
        *_named(r"<\|tool_call:begin\|>(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>"),
        bare=r"\s*<\|begin\|>assistant\s*<\|tool_calls\|>",  # after reasoning
        waits=r"\s*(?:<\|?b?e?g?i?n?\|?|<\|begin\|>a?s?s?i?s?t?a?n?t?\s*(?:<\|?t?o?o?l?_?c?a?l?l?s?\|?)?)",
        drop=r"^\s*(?:<\|begin\|>assistant)?\s*<\|content\|>",
        also="<|begin|><|tool_call:begin|><|tool_call:name|><|tool_call:args|><|tool_call:end|><|content|>",
    ),
    ToolCallFormat(
        "gpt-oss",
        ("<|channel|>", "functions."),
        "to=functions.",
        *_named(r"to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>"),
        bare=r"\s*(?:<\|start\|>assistant)?\s*(?:<\|channel\|>commentary)?\s*to=functions\.",
        waits=r"\s*(?:(?:<|to=)(?:(?!<\|message\|>).)*|to?)?",
        drop=r"^\s*(?:<\|start\|>assistant)?(?:<\|channel\|>\w+\s*<\|message\|>)?",
        also="<|start|><|channel|><|constrain|><|message|>",
    ),
    ToolCallFormat(
        "functionary 3.2",
        (">>>all",),
        ">>>",
        *_named(r">>>(?P<name>[\w.-]+)\n(?=\s*\{)"),
        bare=r"[\w.-]+\n\s*\{",
        waits=r"[\w.-]*(?:\n\s*)?",
        prefix=">>>",
        drop=r"^all\n",
    ),
    ToolCallFormat(
        "functionary 3.1", ("<function=", "</function>"), "<function=", *_named(r"<function=(?P<name>[^>]+)>")
    ),
    ToolCallFormat(
        "Mistral, with arguments apart",
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]",
        *_named(r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}]+?)\s*(?:\[CALL_ID\](?P<id>[^\[\]]*))?\[ARGS\]"),
        also="[CALL_ID][ARGS]",
    ),
    ToolCallFormat("Mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", *_objects("[TOOL_CALLS]")),
    ToolCallFormat("Gemma 4", ("<|tool_call>call:",), "<|tool_call>", _gemma),
    ToolCallFormat("LFM2.5", ("<|tool_call_start|>",), "<|tool_call_start|>", _python, also="<|tool_call_end|>"),
    ToolCallFormat(
        "Command R7B, Command A",
        ("<|START_ACTION|>",),
        "<|START_ACTION|>",
        *_objects("<|START_ACTION|>"),
        drop=r"^\s*<\|START_(?:RESPONSE|TEXT)\|>|<\|END_(?:RESPONSE|TEXT)\|>\s*$",
        also="<|END_ACTION|><|START_RESPONSE|><|END_RESPONSE|><|START_TEXT|><|END_TEXT|>",
    ),
    ToolCallFormat("Command R+", ("Action:", '"tool_name"'), "Action:", *_objects("Action:", "```json", "```")),
    ToolCallFormat("Granite 3.3", ("respond only with <|tool_call|>",), "<|tool_call|>", *_objects("<|tool_call|>")),
    ToolCallFormat(
        "Apertus", ("<|tools_prefix|>",), "<|tools_prefix|>", *_objects("<|tools_prefix|>"), also="<|tools_suffix|>"
    ),
    ToolCallFormat("Nemotron Nano 2", ("<TOOLCALL>",), "<TOOLCALL>", *_objects("<TOOLCALL>", "</TOOLCALL>")),
    ToolCallFormat("Apriel, MiniMax M1", ("<tool_calls>",), "<tool_calls>", *_objects("<tool_calls>", "</tool_calls>")),
    ToolCallFormat("GigaChat 3.1", ("<|function_call|>",), "<|function_call|>", *_objects("<|function_call|>")),
    ToolCallFormat(
        "GigaChat 3",
        ("function call'", "role_sep"),
        "function call<|role_sep|>",
        *_objects("function call<|role_sep|>"),
        also="<|message_sep|>",
    ),
    ToolCallFormat(
        "DeepSeek R1 and V3",
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        *_named(
            "<\uff5ctool\u2581call\u2581begin\uff5c>(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<name>[\\w.:/-]+)"
            "(?:<\uff5ctool\u2581sep\uff5c>|\\s*```json)"
        ),
        also="<\uff5ctool\u2581call\u2581begin\uff5c><\uff5ctool\u2581sep\uff5c>"
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    ToolCallFormat(
        "Hermes, Qwen, Granite 4", ("<tool_call>",), "<tool_call>", *_objects("<tool_call>", "</tool_call>")
    ),
    ToolCallFormat(
        "Llama 3",
        ('"parameters": ', "<|start_header_id|>"),
        "<|python_tag|>",
        *_objects("<|python_tag|>"),
        bare=r'\s*\{\s*"(?:name|type)"\s*:',
        waits=r'\s*(?:\{\s*(?:"\w{0,4}(?:"\s*)?)?)?',
    ),
)

# The format of an answer that must be a call, for every template.
FORCED = ToolCallFormat("JSON", (), "{", *_objects(), waits=".*")


def _cut_call(answer: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall | None:
    """Return the call in a beginning of its JSON, as calls_grammar has it; None before the end of the name."""
    match = re.match(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"(?:\s*,\s*"arguments"\s*:\s*(.*))?', answer, re.S)
    if match is None or match[1] not in [tool.get("function", tool)["name"] for tool in tools]:
        return None
    return _with_arguments(ToolCall(_new_id(), match[1]), match[2] or "")


def _with_arguments(call: ToolCall, text: str) -> ToolCall:
    """Return a call with the arguments in their JSON. If that is not whole, it stays as it is, and the arguments are as
    many of them as there are."""
    whole = _object_in(text)
    return replace(call, arguments=_beginning(text), cut=text) if whole is None else replace(call, arguments=whole)


def _object_in(text: str) -> Mapping[str, Any] | None:
    """Return an object that JSON can hold; None for another text."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value if isinstance(value, dict) else None
    return None


def _beginning(text: str) -> Mapping[str, Any]:
    """Return the object of which a text is the beginning in JSON, without an unfinished number or key."""
    closing, quoted, before = "", False, "{}"
    for match in re.finditer(r'\\.|["{}\[\],]', text, re.S):
        sign = match[0]
        quoted ^= sign == '"'
        if quoted or sign not in "{}[],":
            continue
        closing = {"{": "}", "[": "]"}.get(sign, "") + closing if sign in "{[," else closing[1:]
        before = text[: match.start() if sign == "," else match.end()] + closing
    return _object_in(text + '"' * quoted + closing) or _object_in(before) or {}


def _new_id() -> str:
    return secrets.token_hex(5)[:9]  # nine letters and digits are a valid id for every template


# Sets of tools as texts to compile.

Tools = tuple[Mapping[str, Any], ...]
SUFFIX = ".json"
CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Tools to compile under a name."""

    name: str
    tools: Tools
    source: str  # file
    stamp: tuple[int, ...] = ()  # of the file (Skill.stamp)


def in_order(tools: Iterable[Mapping[str, Any]]) -> Tools:
    """Return the tools sorted by name. Raises NotesError for an invalid one."""
    return tuple(sorted(normalize_tools(tools), key=lambda tool: str(tool["function"]["name"])))


def flat_tools(listed: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return the tools of a list, with those in OpenAI's namespaces in place of these, and the namespace of each.
    Raises NotesError for a namespace without a name or tools."""
    found: list[tuple[Any, str]] = []
    for tool in listed:
        if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
            found.append((tool, ""))
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if (
            not isinstance(name, str)
            or not isinstance(inner, list)
            or not all(isinstance(one, Mapping) for one in inner)
        ):
            raise NotesError("a namespace of tools must have a name, and a list of tools")
        found += [(one, name) for one in inner]
    return found


def name_in(namespace: str, name: str) -> str:
    """Return the name that the model sees."""
    return f"{namespace}__{name}" if namespace else name


def function_of(tool: Mapping[str, Any], namespace: str) -> Mapping[str, Any]:
    """Return a tool of OpenAI's Responses API as a function, whose name begins with the namespace. A custom tool takes
    a text, and its description ends with the form of that. Raises NotesError for one without a name."""
    if not isinstance(name := tool.get("name"), str):
        raise NotesError("a tool has no name")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
    if tool.get("type") == "custom":
        form = tool.get("format")
        definition = form.get("definition") if isinstance(form, Mapping) else None
        texts = [text for text in (tool.get("description"), definition) if isinstance(text, str) and text]
        function |= {"description": "\n\n".join(texts), "parameters": CUSTOM_INPUT}
    return {**function, "name": name_in(namespace, name)}


def _compiled_tool(tool: Any, namespace: str) -> Any:
    """Return a tool of a file as requests have it; None for one that its provider runs."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind not in (None, "function", "custom"):
        return None
    known = kind is None or "function" in tool or "input_schema" in tool or "inputSchema" in tool
    return tool if known and not namespace else function_of(tool, namespace)


def load_tools(source: str | Path, name: str | None = None) -> ToolSet:
    """Read tools from a file: a JSON list in any format of `normalize_tools`, or of the Responses API, or an object
    with it under `tools`, also in the `result` of an MCP server's reply to tools/list. Tools that a provider runs are
    left out. Raises SkillError."""
    path = Path(source)
    try:
        with path.open("rb") as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SkillError(f"cannot read {path}: {reason(error)}") from error
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SkillError(f"{path} is not JSON: {' '.join(str(error).split())[:200]}") from error
    if isinstance(value, dict) and isinstance(value.get("result"), dict):
        value = value["result"]
    listed = value.get("tools") if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        text = 'Write a JSON list of them, or {"tools": [...]}. As a text it goes to standard input, with a name'
        raise SkillError(f"{path} holds no tools", text)
    valid_name = names.name_of(name or path.stem)
    if not valid_name:
        raise SkillError(f"{path}: the name {(name or path.stem)!r} has no letter and no digit", "Give it another name")
    tools = [_compiled_tool(*item) for item in flat_tools(listed)]
    return ToolSet(valid_name, in_order(tool for tool in tools if tool is not None), str(path), stamp)


def tools_skill(template: ChatTemplate, tool_set: ToolSet) -> Skill:
    """Return a template's block for these tools as a skill, which is cut into a block for each tool. Raises ModelError
    if the template shows them in no single place."""
    tools = tool_set.tools
    runs = _tool_runs(template, tools)
    text = "".join(part for part, _ in runs)
    tool_names = [tool["function"]["name"] for tool in tools]
    if has_mark_remains(text) or not all(name in text for name in tool_names):
        raise ModelError(f"{template.name} does not tell the model of tools in one place, so they cannot be compiled")
    description = f"Tools: {', '.join(tool_names)}"
    cuts = _cuts(text, lambda some: "".join(part for part, _ in _tool_runs(template, some)), tools)
    return Skill(
        *(tool_set.name, description, text, (), tool_set.source), runs=tuple(runs), cuts=cuts, stamp=tool_set.stamp
    )


def _tool_runs(template: ChatTemplate, tools: Tools) -> Sequence[tuple[str, bool]]:
    """Return the part of a prompt that is there only with these tools."""
    messages = [{"role": role, "content": marker(number)} for number, role in enumerate(("system", "user"))]
    marks = [marker(0), marker(1)]
    with_tools = template.with_tools(tools)
    plain = template.cut(messages, marks)
    rendered = with_tools.cut_text(with_tools.render_marked(lambda _: messages), marks)
    return split_marked(max((_added(*both) for both in zip(plain, rendered, strict=True)), key=len)) or []


def _cuts(text: str, text_of: Callable[[Tools], str], tools: Tools) -> tuple[int, ...]:
    """Return where each tool begins in the text of all, and where the last one ends: what the texts of fewer tools have
    in common with it shows that."""
    if len(tools) < 2:
        return ()
    without_first, fewer = text_of(tools[1:]), [text_of(tools[:count]) for count in range(1, len(tools))]
    first = len(without_first) - _common_prefix(text[::-1], without_first[::-1])
    others = [_common_prefix(text, one) for one in fewer]
    end = len(text) - len(fewer[-1]) + others[-1]
    return tuple(sorted({cut for cut in (first, *others, end) if 0 < cut < len(text)}))


def _added(plain: str, longer: str) -> str:
    """Return the part of one text that another lacks, without surrounding blanks."""
    first = _common_prefix(plain, longer)
    last = _common_prefix(plain[first:][::-1], longer[first:][::-1])
    return longer[first : len(longer) - last].strip()


def _common_prefix(one: str, two: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def with_splice(chunks: Sequence[Chunk], text: str, name: str) -> tuple[list[Chunk], tuple[Run, ...]] | None:
    """Replace a text in the chunks by a splice, unless it is only a user's. Returns the chunks and the runs of that
    text; None if it is not in there."""
    for number, chunk in enumerate(chunks):
        place = -1 if chunk.kind == "splice" else chunk.text.find(text)
        if place < 0:
            continue
        before, rest = _split_runs(chunk.runs, place)
        inside, after = _split_runs(rest, len(text))
        if not any(run.special for run in inside):
            continue
        pieces = [Chunk("text", before), Chunk("splice", name=name), replace(chunk, runs=after)]
        return [
            *chunks[:number],
            *(piece for piece in pieces if piece.runs or piece.name),
            *chunks[number + 1 :],
        ], inside
    return None


def _split_runs(runs: Sequence[Run], place: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    before: list[Run] = []
    for number, run in enumerate(runs):
        if place < len(run.text):
            head = [Run(run.text[:place], run.special)] if place else []
            return (*before, *head), (Run(run.text[place:], run.special), *runs[number + 1 :])
        before.append(run)
        place -= len(run.text)
    return tuple(before), ()
