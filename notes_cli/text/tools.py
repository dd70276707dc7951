"""Calls of tools in answers, read back from the forms that chat templates teach.

A template shows past calls in one form, and models were trained to write theirs in it. FORMS has an entry for each,
told by what is in the template's source; where none is known answers stay texts. It knows texts only.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from notes_cli.errors import NotesError
from notes_cli.text.messages import NAME, ToolCall, normalize_tools

Found = tuple[str, Mapping[str, Any], str]  # the name, the arguments, and an id, if the model gives one
Schemas = Mapping[str, Mapping[str, Any]]  # the parameters of each tool, by its name
Reader = Callable[[str, Schemas], Iterator[Found]]

_M3 = "]<]minimax[>["
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Form:
    """One form of calls. `known`: texts of a template that has it. `begin`: what calls begin with, after any text."""

    name: str
    known: Sequence[str]
    begin: str
    read: Reader
    bare: str = ""  # a pattern of the beginning of an answer that is a call without `begin`
    waits: str = ""  # a pattern of an answer that may still become one
    prefix: str = ""  # what the template has written of it, before the model goes on
    drop: str = ""  # a pattern of what is around a text that is no call
    also: str = ""  # marks beside `begin` that it may consist of, one after the other

    @property
    def marks(self) -> str:
        """What must be seen of an answer to read it, also where the vocabulary has control tokens for it."""
        return self.begin + self.also


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer says: its text, and the tools that it calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()


def form_of(source: str) -> Form | None:
    """The form of calls that a chat template teaches; None where it is not known."""
    return next((form for form in FORMS if all(text in source for text in form.known)), None)


def calls_in(answer: str, form: Form | None, tools: Sequence[Mapping[str, Any]]) -> Said:
    """The calls in an answer and the text beside them. What cannot be read, or names no tool, stays text."""
    if form is None or not tools:
        return Said(answer)
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    place = _place(answer, form)
    if place < 0:
        return Said(_bare_text(answer, form))
    try:
        found = [*form.read((form.prefix if place == 0 else "") + answer[place:], schemas)]
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError):
        return Said(answer)
    found = [(name, {} if given is None else given, key) for name, given, key in found]
    if not found or not all(_is_call(name, given, schemas) for name, given, _ in found):
        return Said(answer)
    ids = [key for _, _, key in found if NAME.fullmatch(key)]
    if len({*ids}) < len(found):  # nine letters and digits are an id for every template
        ids = [secrets.token_hex(5)[:9] for _ in found]
    calls = tuple(ToolCall(key, name, given) for key, (name, given, _) in zip(ids, found, strict=True))
    return Said(_bare_text(answer[:place], form).strip(), calls)


def _is_call(name: Any, given: Any, schemas: Schemas) -> bool:
    return isinstance(name, str) and name in schemas and isinstance(given, Mapping)


def _bare_text(text: str, form: Form) -> str:
    """A text without the words that the form has around it."""
    return re.sub(form.drop, "", text) if form.drop else text


@dataclass(frozen=True, slots=True)
class Calls:
    """Answers that are calls of some tools, in a form, and nothing else."""

    form: Form
    tools: Sequence[Mapping[str, Any]]

    def may_be(self, answer: str) -> bool:
        """Whether an answer that begins so may be calls."""
        return not may_call(answer.lstrip(), self.form)

    def are(self, answer: str) -> bool:
        """Whether a whole answer is."""
        said = calls_in(answer, self.form, self.tools)
        return bool(said.calls) and not said.text


class Listening:
    """An answer that may call tools, as it comes."""

    def __init__(self, form: Form, tools: Sequence[Mapping[str, Any]]) -> None:
        self._form, self._tools = form, tools
        self._answer = ""
        self._told = 0  # characters

    def feed(self, text: str) -> str:
        """What is certainly text, and new."""
        self._answer += text
        return self._new(_bare_text(self._answer[: may_call(self._answer, self._form)], self._form).rstrip())

    def end(self) -> tuple[str, tuple[ToolCall, ...]]:
        """What of the text was held back, and the calls."""
        said = calls_in(self._answer, self._form, self._tools)
        return self._new(said.text), said.calls

    def _new(self, text: str) -> str:
        new = text[self._told :]
        self._told += len(new)
        return new


def parameters_of(tools: Sequence[Mapping[str, Any]], name: str = "") -> Schemas:
    """The parameters of the tools that may be called, or of the one that must be. Raise NotesError if it is not
    there."""
    functions = [tool["function"] for tool in normalize_tools(tools) if name in ("", tool["function"]["name"])]
    if not functions:
        raise NotesError(f"there is no tool {name!r} to call" if name else "there is no tool to call")
    return {one["name"]: one["parameters"] for one in functions}


def strict_ones(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of the tools whose parameters must be enforced as they are, as OpenAI's interface has it."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"] for function in functions if function.get("strict") is True}


def may_call(answer: str, form: Form) -> int:
    """How much of the beginning of an answer is certainly text, while more of it comes."""
    place = _place(answer, form)
    if place >= 0:
        return place
    if form.waits and re.fullmatch(form.waits, answer, re.S):
        return 0
    kept = max((n for n in range(1, len(form.begin)) if answer.endswith(form.begin[:n])), default=0)
    return len(answer) - kept


def _place(answer: str, form: Form) -> int:
    """Where the calls of an answer begin; -1 without any."""
    if form.bare and re.match(form.bare, answer):
        return 0
    return answer.find(form.begin)


# What calls consist of.


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, blanks before it left out, and where it ends."""
    start = _SPACE.match(text, at)
    return json.JSONDecoder().raw_decode(text, start.end() if start else at)


def _objects(*marks: str) -> Reader:
    """JSON objects, single, in a list, or one after the other, between and after these marks."""
    skipped = re.compile(r"(?:\s|,|;|" + "|".join(map(re.escape, marks)) + ")*")

    def read(text: str, _: Schemas) -> Iterator[Found]:
        at = 0
        while True:
            start = skipped.match(text, at)
            at = start.end() if start else at
            if text[at : at + 1] not in ("{", "["):
                return
            value, at = _json_at(text, at)
            for one in value if isinstance(value, list) else [value]:
                yield _object(one)

    return read


def _object(one: Any) -> Found:
    """A call as an object: with names of its keys that differ, or the name as the only key."""
    for name in ("name", "tool_name"):
        if name in one:
            given: Any = next((one[key] for key in ("arguments", "parameters") if key in one), {})
            if isinstance(given, str):
                given = json.loads(given) if given.strip() else None
            return one[name], given, str(one.get("id") or "")
    (only,) = one.items()
    return only[0], only[1], ""


def _named(pattern: str, strip: str = "") -> Reader:
    """A name (and an id) in a pattern, which ends where the arguments begin, as JSON."""
    found = re.compile(pattern)

    def read(text: str, _: Schemas) -> Iterator[Found]:
        at = 0
        while match := found.search(text, at):
            at = match.end()
            if text[at:].lstrip()[:1] == "<":  # the next mark comes at once: there are no arguments
                given: Any = None
            else:
                given, at = _json_at(text, at)
            groups = match.groupdict()
            yield match["name"].removeprefix(strip), given, groups.get("id") or ""

    return read


def _tagged(call: str, argument: str) -> Reader:
    """Names in one pattern with a body, arguments in another: texts, unless the tool's schema says otherwise."""
    calls, arguments = re.compile(call, re.S), re.compile(argument, re.S)
    opens = re.compile(call.partition("(?P<name>")[0])

    def read(text: str, schemas: Schemas) -> Iterator[Found]:
        if len(opens.findall(text)) != len(calls.findall(text)):
            raise ValueError("a call is not whole")
        for match in calls.finditer(text):
            types = schemas.get(match["name"], {}).get("properties", {})
            given: dict[str, Any] = {
                one["key"]: _value(one["value"], types.get(one["key"], {}), one.groupdict().get("text"))
                for one in arguments.finditer(match["body"])
            }
            yield match["name"].strip(), given, ""

    return read


def _value(text: str, schema: Any, is_text: str | None) -> Any:
    """An argument: a text where the schema or the call says so, else JSON if it is."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if is_text in ("true", "string") or (is_text is None and kind == "string"):
        return text
    for read in (json.loads, ast.literal_eval):  # some templates print True, and lists as Python does
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError):
            continue
    return text


def _python(text: str, _: Schemas) -> Iterator[Found]:
    """A list of calls as Python writes them, with keywords."""
    match = re.search(r"\[.*\]", text, re.S)
    source = match[0] if match else ""
    try:
        tree = ast.parse(source, mode="eval").body
    except SyntaxError:  # line ends in texts are not escaped
        tree = ast.parse(source.replace("\n", "\\n"), mode="eval").body
    for call in tree.elts if isinstance(tree, ast.List) else []:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call")
        yield ast.unparse(call.func), {str(one.arg): _literal(one.value) for one in call.keywords}, ""


def _literal(node: ast.expr) -> Any:
    """A value, with the words of JSON, too."""
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(key): _literal(one) for key, one in zip(node.keys, node.values, strict=True) if key}
    return [_literal(one) for one in node.elts] if isinstance(node, ast.List) else ast.literal_eval(node)


def _gemma(text: str, _: Schemas) -> Iterator[Found]:
    """call:name{key:value,...}, where <|"|> is around texts, and keys are bare."""
    for match in re.finditer(r"<\|tool_call>call:(?P<name>[\w.:/-]+)\{(?P<body>.*?)\}<tool_call\|>", text, re.S):
        parts = re.split(r'(<\|"\|>.*?<\|"\|>)', "{" + match["body"] + "}", flags=re.S)
        spelled = [
            json.dumps(part[5:-5]) if number % 2 else re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', part)
            for number, part in enumerate(parts)
        ]
        yield match["name"], json.loads("".join(spelled)), ""


def _minimax(text: str, schemas: Schemas) -> Iterator[Found]:
    """Tags after a mark, also within arguments: <item> for each of a list, names for an object's."""
    for match in re.finditer(f'{re.escape(_M3)}<invoke name="([^"]+)">(.*?){re.escape(_M3)}</invoke>', text, re.S):
        open_: list[tuple[str, list[tuple[str, Any]], str]] = [("", [], "")]
        for part in match[2].split(_M3)[1:]:
            tag, _, said = part.partition(">")
            if not tag.startswith("</"):
                open_.append((tag[1:], [], said))
                continue
            key, inner, said = open_.pop()
            types = schemas.get(match[1], {}).get("properties", {}).get(key, {}) if len(open_) == 1 else {}
            value = _value(said, types, None) if not inner else [one for _, one in inner]
            if inner and any(name != "item" for name, _ in inner):
                value = dict(inner)
            open_[-1][1].append((key, value))
        yield match[1], dict(open_[0][1]), ""


_INVOKE = r'<{0}invoke name="(?P<name>[^"]+)">(?P<body>.*?)</{0}invoke>'
_FUNCTION = r"<function=(?P<name>[^>]+)>(?P<body>.*?)</function>"
_GLM = r"<tool_call{0}>(?P<name>[^<\n]+)(?P<body>.*?)</tool_call{0}>"
_GLM_ARGUMENT = r"<arg_key{0}>(?P<key>.*?)</arg_key{0}>\s*<arg_value{0}>(?P<value>.*?)</arg_value{0}>"
FORMS: tuple[Form, ...] = (
    Form(
        "DeepSeek V3.2 and V4",
        ("DSML", "invoke name="),
        "<\uff5cDSML\uff5c",
        _tagged(
            _INVOKE.format("\uff5cDSML\uff5c"),
            '<\uff5cDSML\uff5cparameter name="(?P<key>[^"]+)" string="(?P<text>\\w+)">'
            "(?P<value>.*?)</\uff5cDSML\uff5cparameter>",
        ),
    ),
    Form(
        "muse",
        ("atem:invoke",),
        "<atem:function_calls>",
        _tagged(_INVOKE.format("atem:"), r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>'),
    ),
    Form(
        "MiniMax M3",
        ("]<]minimax[>[",),
        f"{_M3}<tool_call>",
        _minimax,
    ),
    Form(
        "MiniMax M2",
        ("minimax:tool_call",),
        "<minimax:tool_call>",
        _tagged(_INVOKE.format(""), r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
    ),
    Form(
        "Hy3",
        ("arg_key{}", "tool_sep{}"),
        "<tool_calls:opensource>",
        _tagged(
            _GLM.format(":opensource").replace("(?P<body>", "<tool_sep:opensource>(?P<body>"),
            _GLM_ARGUMENT.format(":opensource"),
        ),
    ),
    Form("GLM, Laguna, Ling, Spark", ("<arg_key>",), "<tool_call>", _tagged(_GLM.format(""), _GLM_ARGUMENT.format(""))),
    Form(
        "Qwen3 Coder, Qwen3.5, Nemotron 3, StepFun",
        ("<function=", "<parameter=", "<tool_call>"),
        "<tool_call>",
        _tagged(_FUNCTION, r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"),
    ),
    Form(
        "Seed-OSS",
        ("<seed:tool_call>",),
        "<seed:tool_call>",
        _tagged(_FUNCTION, r"<parameter=(?P<key>[^>]+)>(?P<value>.*?)</parameter>"),
    ),
    Form(
        "MiniCPM5",
        ('<param name="',),
        '<function name="',
        _tagged(
            r'<function name="(?P<name>[^"]+)">(?P<body>.*?)</function>',
            r'<param name="(?P<key>[^"]+)">(?:<!\[CDATA\[)?(?P<value>.*?)(?:\]\]>)?</param>',
        ),
    ),
    Form(
        "Kimi K3",
        ("open_tag('call'", "open_tag('argument'"),
        "<|open|>tools<|sep|>",
        _tagged(
            r'<\|open\|>call tool="(?P<name>[^"]+)"[^<]*<\|sep\|>(?P<body>.*?)<\|close\|>call<\|sep\|>',
            r'<\|open\|>argument key="(?P<key>[^"]+)" type="(?P<text>\w+)"<\|sep\|>'
            r"(?P<value>.*?)<\|close\|>argument<\|sep\|>",
        ),
    ),
    Form(
        "Kimi K2",
        ("<|tool_call_argument_begin|>",),
        "<|tool_calls_section_begin|>",
        _named(r"<\|tool_call_begin\|>functions\.(?P<name>[^<:]+):\d+<\|tool_call_argument_begin\|>"),
        also="<|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
    ),
    Form(
        "Solar Open",
        ("<|tool_call:args|>",),
        "<|tool_calls|>",
        _named(
            r"<\|tool_call:begin\|>(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>",
        ),
        bare=r"\s*<\|begin\|>assistant\s*<\|tool_calls\|>",  # after a chain of thought, as the template has it
        waits=r"\s*(?:<\|?b?e?g?i?n?\|?|<\|begin\|>a?s?s?i?s?t?a?n?t?\s*(?:<\|?t?o?o?l?_?c?a?l?l?s?\|?)?)",
        drop=r"^\s*(?:<\|begin\|>assistant)?\s*<\|content\|>",
        also="<|begin|><|tool_call:begin|><|tool_call:name|><|tool_call:args|><|tool_call:end|><|content|>",
    ),
    Form(
        "gpt-oss",
        ("<|channel|>", "functions."),
        "to=functions.",
        _named(r"to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>"),
        bare=r"\s*(?:<\|start\|>assistant)?\s*(?:<\|channel\|>commentary)?\s*to=functions\.",
        waits=r"\s*(?:(?:<|to=)(?:(?!<\|message\|>).)*|to?)?",
        drop=r"^\s*(?:<\|start\|>assistant)?(?:<\|channel\|>\w+\s*<\|message\|>)?",
        also="<|start|><|channel|><|constrain|><|message|>",
    ),
    Form(
        "functionary 3.2",
        (">>>all",),
        ">>>",
        _named(r">>>(?P<name>[\w.-]+)\n(?=\s*\{)"),
        bare=r"[\w.-]+\n\s*\{",
        waits=r"[\w.-]*(?:\n\s*)?",
        prefix=">>>",
        drop=r"^all\n",
    ),
    Form("functionary 3.1", ("<function=", "</function>"), "<function=", _named(r"<function=(?P<name>[^>]+)>")),
    Form(
        "Mistral, with arguments apart",
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]",
        _named(r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}]+?)\s*(?:\[CALL_ID\](?P<id>[^\[\]]*))?\[ARGS\]"),
        also="[CALL_ID][ARGS]",
    ),
    Form("Mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", _objects("[TOOL_CALLS]")),
    Form("Gemma 4", ("<|tool_call>call:",), "<|tool_call>", _gemma),
    Form("LFM2.5", ("<|tool_call_start|>",), "<|tool_call_start|>", _python, also="<|tool_call_end|>"),
    Form(
        "Command R7B, Command A",
        ("<|START_ACTION|>",),
        "<|START_ACTION|>",
        _objects("<|START_ACTION|>"),
        drop=r"^\s*<\|START_(?:RESPONSE|TEXT)\|>|<\|END_(?:RESPONSE|TEXT)\|>\s*$",
        also="<|END_ACTION|><|START_RESPONSE|><|END_RESPONSE|><|START_TEXT|><|END_TEXT|>",
    ),
    Form("Command R+", ("Action:", '"tool_name"'), "Action:", _objects("Action:", "```json", "```")),
    Form("Granite 3.3", ("respond only with <|tool_call|>",), "<|tool_call|>", _objects("<|tool_call|>")),
    Form("Apertus", ("<|tools_prefix|>",), "<|tools_prefix|>", _objects("<|tools_prefix|>"), also="<|tools_suffix|>"),
    Form("Nemotron Nano 2", ("<TOOLCALL>",), "<TOOLCALL>", _objects("<TOOLCALL>", "</TOOLCALL>")),
    Form("Apriel, MiniMax M1", ("<tool_calls>",), "<tool_calls>", _objects("<tool_calls>", "</tool_calls>")),
    Form(
        "GigaChat 3.1",
        ("<|function_call|>",),
        "<|function_call|>",
        _objects("<|function_call|>"),
    ),
    Form(
        "GigaChat 3",
        ("function call'", "role_sep"),
        "function call<|role_sep|>",
        _objects("function call<|role_sep|>"),
        also="<|message_sep|>",
    ),
    Form(
        "DeepSeek R1 and V3",
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        _named(
            "<\uff5ctool\u2581call\u2581begin\uff5c>(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<name>[\\w.:/-]+)"
            "(?:<\uff5ctool\u2581sep\uff5c>|\\s*```json)"
        ),
        also="<\uff5ctool\u2581call\u2581begin\uff5c><\uff5ctool\u2581sep\uff5c>"
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    Form(
        "Hermes, Qwen, Granite 4",
        ("<tool_call>",),
        "<tool_call>",
        _objects("<tool_call>", "</tool_call>"),
    ),
    Form(
        "Llama 3",
        ('"parameters": ', "<|start_header_id|>"),
        "<|python_tag|>",
        _objects("<|python_tag|>"),
        bare=r'\s*\{\s*"(?:name|type)"\s*:',
        waits=r'\s*(?:\{\s*(?:"\w{0,4}(?:"\s*)?)?)?',
    ),
)

# An answer that must be a call is written in this form, whatever the template's is.
FORCED = Form("JSON", (), "{", _objects(), waits=".*")
