"""Converts requests of llama-server's own API, beside OpenAI's, to raw prompts, and answers to its JSON.

llama-server ignores unknown keys, and so does this API, with a line in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from notes_cli import __version__
from notes_cli.engine.sampler import RANGES, SamplerOptions
from notes_cli.runtime.request import Answer, Text, Token
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.parsing import IGNORED, ChatRequest, Reader, parse_completion, readers
from notes_cli.serve.prepare import ServerState
from notes_cli.serve.refusals import Refused, renaming
from notes_cli.serve.replies import AnswerEvent, Framing, Json, Reply

# Keys that parse_completion takes.
TAKEN = {"model", "prompt", "stream", "n", "stop", "seed", "max_tokens", "n_predict", "dry_sequence_breakers"}
TAKEN |= {"grammar", "json_schema", "notes", "cache_salt", *RANGES, *IGNORED}
NAMES = {"logprobs": "n_probs"}  # of keys, in errors
STOPS = {"end": "eos", "length": "limit", "context": "limit"}


def parse_native(data: Any, *, forms: bool = True) -> tuple[list[ChatRequest], tuple[str, ...]]:
    """Parse a request of /completion, to one ChatRequest per prompt and the fields that the reply shall have; none
    named: all. `forms`: as in parse_chat. Raises Refused."""
    reader = Reader(data)
    fields, probabilities = reader.texts("response_fields", 64), reader.any("n_probs")
    biases = reader.any("logit_bias")
    if isinstance(biases, list):  # of pairs
        pairs = [pair for pair in biases if isinstance(pair, list) and len(pair) == 2]
        biases = {str(token): -100 if bias is False else bias for token, bias in pairs}
    answers = reader.any("n_cmpl")
    given = reader.rest()
    body = {key: value for key, value in given.items() if key in TAKEN}
    body |= {"logit_bias": biases or None, "logprobs": probabilities or None}
    body |= {} if answers is None else {"n": answers}
    with renaming(NAMES):
        chats = parse_completion(body, forms=forms)
    ignored = tuple(key[:40] for key, value in given.items() if key not in TAKEN and value not in ([], {}, "", False))
    return [replace(chat, ignored=(*chat.ignored, *ignored)) for chat in chats], fields


def parse_infill(workspace: Workspace, data: Any, *, forms: bool = True) -> tuple[list[ChatRequest], tuple[str, ...]]:
    """Parse a request of /infill. `forms`: as in parse_chat. Raises Refused, also for a model that has no tokens for
    the text between two."""
    reader = Reader(data)
    prefix, suffix, line = (reader.text(key) for key in ("input_prefix", "input_suffix", "prompt"))
    files = readers(reader.any("input_extra") or [], "input_extra", "a list of files")
    extra = [(file.text("filename"), file.text("text")) for file in files]
    return parse_native(
        {**reader.rest(), "prompt": infill_tokens(workspace, prefix + line, suffix, extra)}, forms=forms
    )


def infill_tokens(workspace: Workspace, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
    """Return the tokens of a prompt for the text between `prefix` and `suffix`, as llama-server makes it. `files`:
    names and texts of others; the last ones that fit half the context go before. Raises Refused for a model that has no
    tokens for that, ContextLengthError for texts that do not fit."""
    model = workspace.model
    pre, suf, mid, rep, sep = map(model.infill_token, ("pre", "suf", "mid", "rep", "sep"))
    if pre is None or suf is None or mid is None:
        raise Refused(501, f"{model.name} has no tokens for the text between two (infill, suffix)", code="no_infill")

    def named(text: str, token: int | None) -> list[int]:
        return [*([] if token is None else [token]), *(int(each) for each in model.tokenize(text))]

    workspace.check_text(prefix + suffix)
    extra: list[int] = []
    room = (workspace.longest or model.n_ctx_train) // 2
    for name, text in reversed(files):
        whole = f"{name}\n{text}" if sep is not None else f"\n\n{text}"
        tokens = [] if model.exceeds(whole, room) else named(whole, sep)
        if not tokens or len(tokens) + len(extra) > room:
            break
        extra = [*tokens, *extra]
    if extra and sep is not None:
        extra = [*(named("project\n", rep) if rep is not None else []), *extra, *named("file\n", sep)]
    start = [] if model.bos is None else [model.bos]
    return [*start, *extra, *named(prefix, pre), *named(suffix, suf), mid]


@dataclass(slots=True)
class LlamaReply(Reply):
    """Formats a completion as llama-server does. `fields`: paths of the keys that a whole reply has; none: all."""

    framing: ClassVar[Framing] = "plain"
    fields: tuple[str, ...] = ()

    def whole(self) -> Json:
        replies = []
        for index, done in sorted(self.done.items()):
            deltas = self._deltas.get(index, [])
            tokens = [token for delta in deltas for token in delta.tokens]
            reply = self._last(done, "".join(delta.text for delta in deltas), [*tokens, *done.rest])
            replies.append(_selected(reply, self.fields))
        return {"replies": replies}

    def opening(self) -> Iterable[Json]:
        return ()

    def chunks(self, event: AnswerEvent) -> Iterable[Json]:
        if isinstance(event, Text):
            yield self._part(event.index, event.text, event.tokens)
        elif isinstance(event, Answer):
            yield self._last(event, "", event.rest)

    def closing(self, replies: Sequence[Reply]) -> Iterable[Json]:
        return ()

    def _part(self, index: int, text: str, tokens: Sequence[Token]) -> Json:
        logprobs = self._logprobs(tokens) if tokens else None
        shown = {"completion_probabilities": logprobs["content"]} if logprobs else {}
        return {"index": self.first + index, "content": text, "tokens": [], "stop": False, "id_slot": -1, **shown}

    def _last(self, done: Answer, text: str, tokens: Sequence[Token]) -> Json:
        counts, (prefill, generation) = done.counts, self.seconds
        cached = counts.total - counts.decoded
        return {
            **self._part(done.index, text, tokens),
            "stop": True,
            "model": self.model,
            "prompt": self.request.prompt if isinstance(self.request.prompt, str) else "",
            "tokens_predicted": done.tokens,
            "tokens_evaluated": counts.total,
            "tokens_cached": cached,
            "truncated": done.stopped == "context",
            "stop_type": "word" if done.stop else STOPS[done.stopped or "end"],
            "stopping_word": done.stop,
            "timings": {
                "cache_n": cached,
                **_timings("prompt", counts.decoded, prefill),
                **_timings("predicted", done.tokens, generation),
            },
            **self.explained(),
        }


def _timings(name: str, count: int, seconds: float) -> Json:
    each, rate = 1000 * seconds / max(1, count), count / seconds if seconds else 0.0
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": each,
        f"{name}_per_second": rate,
    }


def _selected(reply: Json, fields: Sequence[str]) -> Json:
    """Return the values at these paths, such as `timings/prompt_n`, by their paths."""
    found: Json = {}
    for path in fields:
        value: Any = reply
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found if fields else reply


def join_native(replies: Sequence[Reply]) -> Any:
    """Return the reply of one completion, or a list of several."""
    whole = [reply for each in replies for reply in each.whole()["replies"]]
    return whole[0] if len(whole) == 1 else whole


def props_json(state: ServerState) -> Json:
    """Return the reply of /props."""
    workspace, model, limit = state.workspace, state.workspace.model, state.options.max_tokens
    params = {**asdict(SamplerOptions()), "n_predict": -1 if limit is None else limit}
    return {
        "default_generation_settings": {"n_ctx": state.longest or 0, "params": params},
        "total_slots": state.options.parallel,
        "model_alias": state.names[0],
        "model_path": model.path.name,
        "modalities": {"vision": workspace.has_vision, "audio": False},
        "chat_template": workspace.chat_template,
        "bos_token": model.special_text("bos"),
        "eos_token": model.special_text("eos"),
        "build_info": f"notes {__version__}",
        "is_sleeping": False,
    }
