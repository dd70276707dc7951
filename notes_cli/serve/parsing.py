"""Parses the JSON of requests to ChatRequest, with all checks that need no model.

Unknown keys are refused, as by OpenAI's API, unless they are null. Keys of that API that change nothing here are
ignored; those of other engines are mapped to ours, or ignored with a line in the log.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from notes_cli.engine.sampler import RANGES, VALID_BREAKERS, SamplerOptions, valid_breakers
from notes_cli.errors import ImageError, NotesError
from notes_cli.images import read_picture
from notes_cli.runtime.generate import DEFAULT_MAX_THINK, check_choices
from notes_cli.runtime.prefix_cache import REUSES, Reuse
from notes_cli.runtime.request import UNLIMITED, Request
from notes_cli.runtime.resolve import parse_method
from notes_cli.serve.refusals import Refused, invalid
from notes_cli.text.erratum import of_fields
from notes_cli.text.grammar import gbnf_grammar
from notes_cli.text.messages import PLACES, Conversation, ImagePart, Message, TextPart, ToolCall, as_given
from notes_cli.text.schema import calls_grammar, schema_grammar
from notes_cli.text.tools import in_order, parameters_of, strict_ones

T = TypeVar("T")

# Ignored keys: accounting, caching that is automatic here, features of OpenAI's service.
IGNORED = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("verbosity", "cache_prompt", "id_slot", "timings_per_token", "return_progress", "parallel_tool_calls"),
}
# Keys of other engines, gateways and services that are ignored and logged: cache policies, how a model is loaded, other
# samplers, and what a reply has beside its answer.
NEEDLESS = {
    *("n_keep", "n_discard", "n_cache_reuse", "sse_ping_interval", "backend_sampling", "verbose", "keep_alive"),
    *("adaptive_decay", "adaptive_target", "request_id", "priority", "prompt_cache_options", "cache_control", "ttl"),
    *("num_ctx", "n_ctx", "num_gpu", "num_thread", "num_batch", "num_keep", "options", "draft_model", "usage"),
    *("provider", "models", "route", "transforms", "plugins", "prediction", "web_search_options", "extra_body"),
    *("truncate_prompt_tokens", "spaces_between_special_tokens", "add_special_tokens", "skip_special_tokens"),
    *("logits_processors", "mm_processor_kwargs", "vllm_xargs", "include_stop_str_in_output", "detokenize"),
    *("stop_token_ids", "bad_words", "min_tokens", "ignore_eos", "length_penalty", "samplers", "min_keep", "n_probs"),
    *("tfs_z", "typical", "top_a", "n_indent", "t_max_predict_ms", "t_max_prompt_ms", "post_sampling_probs"),
    *("return_tokens", "return_token_ids", "return_tokens_as_token_ids", "continuous_usage_stats", "response_fields"),
    *("grammar_lazy", "grammar_triggers", "preserved_tokens", "parse_tool_calls", "include_reasoning"),
    *("reasoning_format", "reasoning_control", "thinking_budget_tokens", "reasoning_budget_tokens", "thinking_budget"),
}
# Keys of which any other value asks for another kind of answer: ignored and logged with one of these values or an empty
# one, and refused with any other.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("functions", "function_call", "audio", "lora", "documents"), ()),
    "modalities": (["text"],),
    "n_cmpl": (1,),
    **dict.fromkeys(("use_beam_search", "early_stopping", "continue_final_message"), (False,)),
    "add_generation_prompt": (True,),
}
DRAWN = -1  # for a random seed
EFFORTS, NO_EFFORTS = ("low", "medium", "high", "xhigh", "max"), ("", "none", "minimal")  # of reasoning
MOST_CHOICES = 16  # n
PROMPTS = 128  # of one request
MOST_STOPS = 16
OTHER_KEYS = {  # options of Request that notes.ask has no keys for: messages, other keys, and the answer's form
    *("question", "system", "images", "results", "splice", "errata", "memory", "recompute", "exact"),
    *("think", "max_think", "max_tokens", "sampling", "json_schema", "grammar", "stops", "likely"),
    *("conversation", "tools", "tool_choice", "allowed", "call_grammar", "must_call"),
}
LONGEST_STOP = 1000  # characters, as each is searched for after every token
MOST_ANSWERS = 256  # choices of notes.ask
MOST_BIASES = 1024  # logit_bias
MOST_LIKELY = 20  # top_logprobs


@dataclass(frozen=True, slots=True)
class NotesParams:
    """The key `notes` of a request."""

    splice: tuple[str, ...] = ()
    errata: tuple[str, ...] = ()
    session: str | None = None
    memory: str | None = None
    explain: bool = False
    cache_salt: str = ""
    match: bool = True  # match texts in messages with compiled skills
    recompute: bool = False  # decode everything, for comparisons
    exact: bool = False  # splice only K/V that equals that of a prefill
    reuse: Reuse | None = None  # None: the server's
    ask: Mapping[str, Any] | None = None  # further options of Request, for the prompt of `notes ask`; None: a chat
    given: frozenset[str] = frozenset()  # its keys that are not null

    @property
    def private(self) -> bool:
        """True if the request is not compared with the library's texts."""
        return bool(self.cache_salt) or not self.match


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request to either endpoint: messages and tools, or a raw prompt."""

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    echo: bool = False
    options: Request = field(default_factory=lambda: Request(""))  # those of generation
    answers: int = 1
    notes: NotesParams = field(default_factory=NotesParams)
    stream: bool = False
    usage: bool = False  # at the end of the stream
    ignored: tuple[str, ...] = ()  # its keys of NEEDLESS and NEUTRAL
    prefill: str = ""  # beginning of the answer, the text of a last message of the assistant
    shared: str = ""  # beginning of the question that other requests have too (decisions.py)
    size: int = 0  # bytes of its body
    client: str = ""  # `client_of` its API key; "" for all requests if the server has one key or none

    @property
    def salt(self) -> str:
        """Separates its prompts and conversations from others. `client` has one length for all requests, so no
        `cache_salt` of a client makes it that of another."""
        return self.client + self.notes.cache_salt

    @property
    def private_images(self) -> bool:
        """True if its images are not kept in the library, where other clients would find them."""
        return bool(self.client) or self.notes.private


class Reader:
    """Takes the keys of a JSON object one by one; `end` refuses the remaining ones."""

    def __init__(self, data: Any, where: str = "") -> None:
        if not isinstance(data, dict):
            raise Refused(400, f"{where or 'the body'} must be a JSON object", param=where or None)
        self._data = dict(data)
        self.where = where
        self.ignored: list[str] = []  # keys of NEEDLESS and NEUTRAL

    def name(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def wrong(self, key: str, wanted: str, value: Any) -> Refused:
        shown = json.dumps(value, ensure_ascii=False)[:64]
        return invalid(self.name(key), f"{self.name(key)} must be {wanted}, not {shown}")

    def has(self, key: str) -> bool:
        return key in self._data

    def any(self, key: str) -> Any:
        return self._data.pop(key, None)

    def take(self, key: str, wanted: str, is_valid: Callable[[Any], bool], default: T) -> T:
        """Take a value, or the default for null. Raises Refused for an invalid one."""
        value = self._data.pop(key, None)
        if value is None:
            return default
        if not is_valid(value):
            raise self.wrong(key, wanted, value)
        return value  # type: ignore[no-any-return]

    def flag(self, key: str, default: bool = False) -> bool:
        return self.take(key, "true or false", lambda value: isinstance(value, bool), default)

    def one_of(self, key: str, options: Sequence[str], default: str | None = None) -> Any:
        wanted = f"{', '.join(options[:-1])} or {options[-1]}"
        return self.take(key, wanted, lambda value: value in options, default)

    def text(self, key: str, default: str = "") -> str:
        return self.take(key, "a string", lambda value: isinstance(value, str), default)

    def required(self, key: str) -> Any:
        """Take a value that is not null."""
        if (value := self.any(key)) is None:
            raise invalid(self.name(key), f"{self.name(key)} is missing")
        return value

    def needed(self, key: str) -> str:
        """Take a required string, which may be empty."""
        self._data[key] = self.required(key)
        return self.text(key)

    def inner(self, key: str) -> Reader:
        """Take an object, which null leaves empty."""
        return Reader(self.any(key) or {}, self.name(key))

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int | None:
        def is_valid(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

        return self.take(key, f"a whole number from {low} to {high:,}", is_valid, default)

    def number(self, key: str, low: float, high: float, default: float) -> float:
        def is_valid(value: Any) -> bool:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return number and low <= value <= high  # False for NaN and infinity

        return float(self.take(key, f"a number from {low:g} to {high:g}", is_valid, default))

    def texts(self, key: str, most: int) -> tuple[str, ...]:
        """Take a list of strings, or a string as a list of one."""
        value = self._data.pop(key, None)
        if value is None or value == "":
            return ()
        texts = [value] if isinstance(value, str) else value
        is_valid = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
        if not is_valid or len(texts) > most:
            raise self.wrong(key, f"a string or a list of at most {most} strings, none of them empty", value)
        return tuple(texts)

    def listed(self, key: str, things: str, least: int, most: int) -> list[Reader]:
        """Take a list of objects. Raises Refused for another value, or a list of another length."""
        value, wanted = self.any(key), f"a list of {least} to {most} {things}"
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise self.wrong(key, wanted, value)
        return readers(value, self.name(key), wanted)

    def rest(self) -> dict[str, Any]:
        """Take the remaining keys that are not null."""
        rest, self._data = self._data, {}
        return {key: value for key, value in rest.items() if value is not None}

    def ignore_needless(self) -> None:
        """Ignore the keys of NEEDLESS, and those of NEUTRAL with a neutral value."""
        for key, value in list(self._data.items()):
            empty = value in ([], {}) or value in NEUTRAL.get(key, ())
            if key in NEEDLESS or (key in NEUTRAL and empty):
                del self._data[key]
                self.ignored.append(key)

    def refuse(self, *keys: str) -> None:
        """Raises Refused for one of these keys that is not null."""
        for key in keys:
            if self._data.get(key) is not None:
                name = self.name(key)[:80]
                raise Refused(400, f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")

    def end(self, ignored: Collection[str] = ()) -> None:
        """Raises Refused for a remaining key that is not null, except the `ignored` ones."""
        self.refuse(*(key for key in self._data if key not in ignored))


def readers(data: Any, where: str, wanted: str) -> list[Reader]:
    """Return readers of the objects in a list. Raises Refused for another value."""
    if not isinstance(data, list):
        raise invalid(where, f"{where} must be {wanted}")
    return [Reader(item, f"{where}[{number}]") for number, item in enumerate(data)]


def parse_chat(data: Any, *, forms: bool = True) -> ChatRequest:
    """Parse a request of /v1/chat/completions. `forms`: grammars and schemas are accepted. Raises Refused."""
    reader = Reader(data)
    model, stream, usage = reader.text("model"), reader.flag("stream"), _usage(reader)
    messages, prefill = _messages(reader)
    tools, calls = _tools(reader, forms)
    logprobs, likely = reader.flag("logprobs"), reader.whole("top_logprobs", 0, MOST_LIKELY)
    if likely and not logprobs:
        raise Refused(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    likely = (likely or 0) if logprobs else None
    options, answers = _generation(reader, ("max_completion_tokens", "max_tokens", "n_predict"), likely)
    notes = parse_notes(reader.any("notes"), reader.text("cache_salt"))
    options = replace(options, **{"grammar": _grammar(reader, forms), **calls})
    if prefill:
        _check_prefill(options, notes)
    reader.ignore_needless()
    reader.end(IGNORED)
    chat = ChatRequest(model, messages, tools, options=options, answers=answers, notes=notes)
    return replace(chat, stream=stream, usage=usage, prefill=prefill, ignored=tuple(reader.ignored))


def parse_completion(data: Any, *, forms: bool = True) -> list[ChatRequest]:
    """Parse a request of /v1/completions, to one ChatRequest per prompt. `forms`: as above. Raises Refused."""
    reader = Reader(data)
    model, stream, usage, echo = reader.text("model"), reader.flag("stream"), _usage(reader), reader.flag("echo")
    prompts = _prompts(reader.any("prompt"))
    likely = reader.whole("logprobs", 0, MOST_LIKELY)
    options, answers = _generation(reader, ("max_tokens", "n_predict"), likely, chat=False)
    if (best := reader.whole("best_of", 1, MOST_CHOICES)) not in (None, answers):
        raise reader.wrong("best_of", "as many as n", best)
    if reader.any("suffix"):
        raise Refused(400, "suffix is not supported: give the whole prompt", param="suffix")
    options = replace(options, grammar=_grammar(reader, forms))
    notes = parse_notes(reader.any("notes"), reader.text("cache_salt"))
    if notes.splice or notes.errata or notes.session or notes.ask is not None:
        raise Refused(400, "skills are spliced into messages: use /v1/chat/completions", param="notes")
    if echo and likely is not None and options.max_tokens == 0:
        message = (
            "logprobs are those of the answer, and with max_tokens 0 there is none: those of a prompt are not returned"
        )
        raise Refused(400, message, param="logprobs", code="unsupported_value")
    reader.ignore_needless()
    reader.end(IGNORED)
    how: dict[str, Any] = {"stream": stream, "usage": usage, "ignored": tuple(reader.ignored)}
    chat = ChatRequest(model, echo=echo, options=options, answers=answers, notes=notes, **how)
    return [replace(chat, prompt=prompt) for prompt in prompts]


def _usage(reader: Reader) -> bool:
    inner = reader.inner("stream_options")
    usage = inner.flag("include_usage")
    inner.ignore_needless()
    inner.end({"include_obfuscation"})
    return usage


def _generation(
    reader: Reader, limit_keys: Sequence[str], likely: int | None, *, chat: bool = True
) -> tuple[Request, int]:
    """Return the options of generation, and the number of answers."""
    limits = [reader.whole(key, -1, 2**31 - 1) for key in limit_keys]
    most = next((limit for limit in limits if limit is not None), None)
    think = _thinks(reader) and chat
    stops = reader.texts("stop", MOST_STOPS)
    if (longest := max(map(len, stops), default=0)) > LONGEST_STOP:
        raise invalid("stop", f"stop has {longest:,} characters: {LONGEST_STOP:,} at most")
    options = Request(
        "",
        sampling=_sampling(reader),
        max_tokens=UNLIMITED if most is None or most < 0 else most,
        stops=stops,
        likely=likely,
        think=think,
        max_think=(reader.whole("max_think", 0, 2**31 - 1, DEFAULT_MAX_THINK) or 0) if chat else 0,
    )
    return options, reader.whole("n", 1, MOST_CHOICES, 1) or 1


def _thinks(reader: Reader) -> bool:
    """Return True if one of the keys of OpenAI, OpenRouter, Anthropic, Ollama, Qwen or vLLM asks for reasoning."""
    found = False
    reasoning, thinking, template = map(reader.inner, ("reasoning", "thinking", "chat_template_kwargs"))
    for inner, key in ((reader, "reasoning_effort"), (reasoning, "effort"), (reader, "think")):
        wanted = "none, minimal, low, medium or high"
        value = inner.take(key, wanted, lambda value: isinstance(value, bool) or value in (*EFFORTS, *NO_EFFORTS), None)
        found |= value is True or value in EFFORTS
    for inner, key in ((reader, "enable_thinking"), (template, "enable_thinking"), (reasoning, "enabled")):
        found |= inner.flag(key)
    found |= thinking.text("type") in ("enabled", "adaptive")
    reader.ignored += [inner.name(key) for inner in (reasoning, thinking, template) for key in inner.rest()]
    return found


def _bias(reader: Reader) -> tuple[tuple[int, float], ...]:
    """Parse `logit_bias`, an object from tokens to numbers. The tokens are checked later."""
    biases = reader.any("logit_bias")
    if biases is None:
        return ()
    inner = Reader(biases, "logit_bias")
    if len(biases) > MOST_BIASES:
        raise Refused(400, f"logit_bias has {len(biases):,} tokens: {MOST_BIASES} at most", param="logit_bias")
    parsed = []
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise Refused(400, f"logit_bias is by tokens, not by {key[:40]!r}", param="logit_bias")
        parsed.append((int(key), inner.number(key, -100, 100, 0.0)))
    return tuple(parsed)


def _sampling(reader: Reader) -> SamplerOptions:
    """Parse the options of SamplerOptions, by their names there; its bias is `logit_bias`."""
    base = SamplerOptions()
    parsed: dict[str, Any] = {}
    for key, (low, high) in RANGES.items():
        default = getattr(base, key)
        if isinstance(default, int):
            least = int(low) - (key == "top_k")  # all tokens in vLLM: -1
            parsed[key] = max(int(low), reader.whole(key, least, int(high), default) or 0)
        else:
            name = "repetition_penalty" if key == "repeat_penalty" and reader.has("repetition_penalty") else key
            parsed[key] = reader.number(name, low, high, default)
    breakers = reader.take("dry_sequence_breakers", VALID_BREAKERS, valid_breakers, base.dry_sequence_breakers)
    seed = reader.whole("seed", -(2**63), 2**63 - 1)
    drawn = DRAWN if seed is None else seed & 0xFFFFFFFF
    return SamplerOptions(**parsed, seed=drawn, bias=_bias(reader), dry_sequence_breakers=tuple(breakers))


def _grammar(reader: Reader, forms: bool) -> str | None:
    """Return the constraint of the answer, from `response_format`, `json_schema`, `grammar` or a key of vLLM. Raises
    Refused."""
    wanted, grammar = reader.any("response_format"), reader.text("grammar") or None
    schema, outputs = reader.any("json_schema"), reader.inner("structured_outputs")
    for inner, prefix in ((reader, "guided_"), (outputs, "")):  # vLLM's
        given = inner.any(f"{prefix}json")
        schema, grammar = schema if given is None else given, inner.text(f"{prefix}grammar") or grammar
        if choices := inner.texts(f"{prefix}choice", MOST_ANSWERS):
            grammar = "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    outputs.end()
    if wanted is not None:
        form = Reader(wanted, "response_format")
        kind = form.one_of("type", ("text", "json_object", "json_schema"), "")
        if not kind:
            raise form.wrong("type", "text, json_object or json_schema", kind)
        if kind == "json_schema":
            inner = Reader(form.any("json_schema"), "response_format.json_schema")
            schema = inner.required("schema")
            inner.end({"name", "description", "strict"})
        elif kind == "json_object":
            schema = form.any("schema")
            schema = {"type": "object"} if schema is None else schema
        form.end()
    if schema is not None and grammar is not None:
        raise Refused(400, "an answer can be held to a JSON schema or to a grammar, not to both", param="grammar")
    if not forms and (schema is not None or grammar is not None):
        raise no_forms()
    with _refusing("grammar" if schema is None else "response_format"):
        if schema is not None:
            return schema_grammar(schema)
        return gbnf_grammar(grammar) if grammar else None


def no_forms() -> Refused:
    """Return the refusal of a grammar or schema with --no-forms, for untrusted clients: they cost time."""
    return Refused(400, "this server holds answers to no grammar and no schema", code="no_forms")


def parse_notes(data: Any, salt: str = "") -> NotesParams:
    """Parse the key `notes` of a request. `salt`: its `cache_salt`, where `notes` has none. Raises Refused."""
    if data is None:
        return NotesParams(cache_salt=salt)
    reader = Reader(data, "notes")
    given = frozenset(key for key, value in data.items() if value is not None)
    ask = _ask(reader) if reader.flag("ask") else None
    errata, fields = reader.any("errata"), reader.any("fields")
    if isinstance(errata, dict):
        errata = list(of_fields(_values(reader, "errata", errata)))
    params = NotesParams(
        splice=reader.texts("splice", 64),
        errata=(
            *Reader({"errata": errata}, "notes").texts("errata", 256),
            *(() if fields is None else of_fields(_values(reader, "fields", fields))),
        ),
        session=reader.text("session") or None,
        memory=reader.text("memory") or None,
        explain=reader.flag("explain"),
        cache_salt=reader.text("cache_salt", salt),
        match=reader.flag("match", True),
        recompute=reader.flag("recompute"),
        exact=reader.flag("exact"),
        reuse=reader.one_of("reuse", REUSES),
        ask=ask,
        given=given,
    )
    reader.end()
    if params.memory and params.session is None and ask is None:
        raise Refused(400, "notes.memory goes with notes.session or notes.ask", param="notes.memory")
    return params


def _ask(reader: Reader) -> dict[str, Any]:
    """Parse the options that go with `ask`: those of Request that have no other key, by their types. Raises Refused."""
    takes: dict[Any, Callable[[str], Any]] = {  # by name or type
        "place": lambda name: reader.one_of(name, PLACES),
        "choices": lambda name: _choices(reader.texts(name, MOST_ANSWERS)),
        "bool": reader.flag,
        "int | None": lambda name: reader.whole(name, 0, 2**31 - 1),
        "str | None": lambda name: reader.text(name) or None,
        "Sequence[str]": lambda name: reader.texts(name, 64),
        "Mapping[str, str]": lambda name: _values(reader, name, {} if (values := reader.any(name)) is None else values),
        "Method | None": lambda name: parse_method(reader.text(name) or None),
    }
    parsed: dict[str, Any] = {}
    for option in fields(Request):
        if option.name not in OTHER_KEYS:
            with _refusing(f"notes.{option.name}"):
                take = takes[option.name if option.name in takes else option.type]
                parsed[option.name] = take(option.name)
    return parsed


def _choices(choices: tuple[str, ...]) -> tuple[str, ...] | None:
    if choices:
        check_choices(choices)
    return choices or None


def _values(reader: Reader, key: str, values: Any) -> dict[str, str]:
    """Check the new values of fields, and convert them to text: numbers and booleans as in JSON. Raises Refused."""
    valid = isinstance(values, dict) and all(name.strip() and "=" not in name for name in values)
    if not valid or not all(isinstance(value, (str, int, float)) for value in values.values()):
        also = ", or a list of field=value" if key == "errata" else ""
        raise reader.wrong(key, f"an object of fields and texts{also}", values)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def _tools(reader: Reader, forms: bool) -> tuple[tuple[Mapping[str, Any], ...], dict[str, Any]]:
    """Parse the tools and their choice; return them with the options of generation for calls. The tools are ordered by
    name, so that their order does not change the prefix, and all are in the prompt, whichever may be called."""
    none: list[Any] = []
    listed = reader.take("tools", "a list of tools", lambda value: isinstance(value, list), none)
    with _refusing("tools"):
        tools = in_order(listed)
        for tool in tools:
            as_given(tool)
    choice, allowed = reader.any("tool_choice"), tools
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, choice = _allowed(choice, tools)
    if choice == "none":
        return (), {}
    required = choice not in (None, "auto")
    if not required and allowed == tools:
        return tools, {"allowed": tools}
    if not forms:
        raise no_forms()
    name = ""
    if required and choice != "required":
        named = Reader(choice if isinstance(choice, dict) else {"type": choice}, "tool_choice")
        if named.any("type") != "function":
            wanted = "none, auto, required, or a function with its name"
            raise invalid("tool_choice", f"tool_choice must be {wanted}")
        name = Reader(named.any("function"), "tool_choice.function").needed("name")
    with _refusing("tool_choice"):
        parameters = parameters_of(allowed, name)
    with _refusing("tools"):
        grammar = calls_grammar(parameters, strict_ones(listed))
    how = {"must_call": True, "grammar": grammar} if required else {"call_grammar": grammar}
    return tools, {"allowed": allowed, **how}


def _allowed(choice: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """Return the tools of `tool_choice` allowed_tools, and its mode, auto or required."""
    where = "tool_choice.allowed_tools"
    reader = Reader(choice.get("allowed_tools"), where)
    mode, listed = reader.one_of("mode", ("auto", "required"), "auto"), reader.any("tools")
    entries = readers(listed or None, reader.name("tools"), "a list of tools")
    names = {Reader(entry.any("function"), entry.name("function")).needed("name") for entry in entries}
    allowed = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if unknown := names - {tool["function"]["name"] for tool in allowed}:
        raise invalid("tool_choice", f"{where} has {min(unknown)[:64]!r}, which is none of the tools")
    return allowed, mode


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    try:
        yield
    except Refused:
        raise
    except NotesError as error:
        message = re.sub(r"\bmessage (\d+)\b", lambda match: f"messages[{int(match[1]) - 1}]", str(error))
        raise invalid(param, message) from error


def _prompts(data: Any) -> list[str | tuple[int, ...]]:
    tokens = isinstance(data, list) and data and all(map(_is_token, data))
    prompts = [data] if tokens or isinstance(data, str) else data
    if isinstance(prompts, list) and len(prompts) > PROMPTS:
        raise invalid("prompt", f"prompt must be {PROMPTS} prompts at most, not {len(prompts):,}")
    parsed = [
        tuple(item) if isinstance(item, list) and all(map(_is_token, item)) else item
        for item in (prompts if isinstance(prompts, list) else ())
    ]
    if not parsed or not all(isinstance(item, (str, tuple)) for item in parsed):
        raise invalid("prompt", "prompt must be a string, tokens, or a list of these")
    return parsed


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


# Messages.

BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n*")  # of Claude Code; it differs in every request
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_IGNORED_IN_MESSAGES = {
    *("refusal", "reasoning_content", "reasoning", "annotations", "audio", "name", "id"),
    *("timestamp", "created_at", "metadata", "cache_control"),
}


def _messages(reader: Reader) -> tuple[tuple[Message, ...], str]:
    """Parse the messages. Returns also the text of a last one of the assistant, which is continued."""
    data, wanted = reader.any("messages"), _wants_prefill(reader)
    messages = list(map(_message, readers(data or None, "messages", "a list of one message or more")))
    prefill = ""
    if len(messages) > 1 and _is_text(messages[-1]) and wanted is not False:
        if _is_text(messages[-2]):
            raise Refused(400, "messages ends with two of the assistant: one can be continued", param="messages")
        prefill = messages.pop().text
    elif wanted:
        raise Refused(400, "the last message is no text of the assistant that can be continued", param="messages")
    with _refusing("messages"):  # checks them as sent, before blank ones are removed and skills added
        Conversation(tuple(map(_without_images, messages)))
    messages = [message for message in messages if message.role != "system" or not message.empty] or messages[:1]
    first = next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))
    if first > 1:  # some clients send several system messages
        messages[:first] = [Message("system", tuple(part for message in messages[:first] for part in message.parts))]
    return tuple(messages), prefill


def _wants_prefill(reader: Reader) -> bool | None:
    """Return whether a last message of the assistant is continued by vLLM's keys; None without them."""
    goes_on, anew = (
        reader.take(key, "true or false", lambda value: isinstance(value, bool), None)
        for key in ("continue_final_message", "add_generation_prompt")
    )
    if goes_on is not None and goes_on is anew:
        raise invalid("add_generation_prompt", "continue_final_message and add_generation_prompt must not be equal")
    return goes_on if anew is None else not anew


def _is_text(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls


def _check_prefill(options: Request, notes: NotesParams) -> None:
    """Raises Refused for parameters that do not go with the beginning of an answer."""
    does_not_go = {
        "reasoning_effort": options.think,
        "tool_choice": options.must_call,
        "response_format": options.grammar is not None,
        "notes.session": notes.session is not None,
        "notes.ask": notes.ask is not None,
    }
    if (key := next((key for key, given in does_not_go.items() if given), None)) is not None:
        message = f"{key} does not go with a last message of the assistant, which is the beginning of the answer"
        raise invalid(key, message)


def _without_images(message: Message) -> Message:
    text = TextPart("image")
    return replace(message, parts=tuple(part if isinstance(part, TextPart) else text for part in message.parts))


def _message(reader: Reader) -> Message:
    role = reader.text("role")
    if role not in _ROLES:
        raise reader.wrong("role", f"one of {', '.join(_ROLES)}", role)
    has_content, content = reader.has("content"), reader.any("content")
    parts = _parts(content, reader.name("content"), images=role in ("user", "system", "developer"))
    calls = _calls(reader.any("tool_calls"), reader.name("tool_calls"))
    if reader.any("function_call"):
        name = reader.name("function_call")
        raise Refused(400, f"{name} is not supported: use tool_calls", param=name)
    call = reader.text("tool_call_id")
    if role not in ("assistant", "tool"):  # programs add their own keys to these
        reader.end(_IGNORED_IN_MESSAGES)
    if not parts and role != "assistant":
        if role == "user" or not has_content:
            where = reader.name("content")
            raise invalid(where, f"{where.removesuffix('.content')} has no content")
        parts = (TextPart(""),)
    if role == "assistant":  # the parts of an answer are one text
        parts = (TextPart("".join(part.text for part in parts if isinstance(part, TextPart))),) if parts else ()
    elif role != "tool":  # drops blank parts, except the last, which is the question
        if role != "user":
            parts = tuple(TextPart(BILLING.sub("", one.text)) if isinstance(one, TextPart) else one for one in parts)
        last = len(parts) - 1
        parts = tuple(
            part
            for number, part in enumerate(parts)
            if number == last or not isinstance(part, TextPart) or part.text.strip()
        )
    return Message(_ROLES[role], parts, calls, call)


def _parts(content: Any, where: str, images: bool = False) -> tuple[TextPart | ImagePart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    parts: list[TextPart | ImagePart] = []
    for number, reader in enumerate(readers(content, where, "a string or a list of parts")):
        kind = reader.text("type")
        if kind == "image_url" and images:
            parts.append(_image(reader))
        elif kind in ("text", "refusal"):
            parts.append(TextPart(reader.needed(kind)))
        else:
            raise Refused(400, f"{where}[{number}] is {kind[:40] or 'of no type'}: only text is supported", param=where)
        if images:
            reader.end({"cache_control"})
    return tuple(parts)


def _image(reader: Reader) -> ImagePart:
    """Parse an image of OpenAI's API, which must be a data URL, as nothing is fetched."""
    inner = Reader(reader.any("image_url"), reader.name("image_url"))
    url, name = inner.text("url"), inner.name("url")
    inner.end({"detail"})
    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise invalid(name, f"{name} must be data:image/...;base64,...: no image is fetched from elsewhere")
    try:
        return ImagePart(read_picture(b64decode(data, validate=True), name))
    except ValueError as error:
        raise invalid(name, f"{name} is not base64: {error}") from error
    except ImageError as error:
        raise invalid(name, str(error)) from error


def _calls(data: Any, where: str) -> tuple[ToolCall, ...]:
    calls = []
    for call in readers([] if data is None else data, where, "a list"):
        function = Reader(call.any("function"), call.name("function"))
        name, arguments = function.text("name"), function.any("arguments")
        calls.append(ToolCall(call.text("id"), name, _arguments(arguments)))
    return tuple(calls)


def _arguments(data: Any) -> Mapping[str, Any]:
    """Parse the arguments of an earlier call: an object, or its JSON. Blank, null and an empty list are no arguments.
    Anything else, as a model may have generated it, becomes one argument, so that the conversation can continue."""
    arguments = data
    if isinstance(data, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(data) if data.strip() else None
            json.dumps(parsed, ensure_ascii=False).encode()  # ValueError for half of a surrogate pair
            arguments = parsed
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments in (None, [], "") else {"arguments": arguments}
