"""Generates the answers to a prefilled prompt, as a task of the decode loop that emits text deltas."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from notes_cli.engine.model import Model
from notes_cli.engine.pieces import Piece
from notes_cli.engine.sampler import Constraint, Sampler
from notes_cli.engine.sequence import KVSequence, Logits, Stopped, Task, TokenGenerator
from notes_cli.runtime.generate import ReplyGenerator, log_softmax
from notes_cli.runtime.request import Counts
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.prepare import PreparedRequest
from notes_cli.text.messages import ToolCall
from notes_cli.text.reasoning import MarkSplitter
from notes_cli.text.tools import FORCED, Calls, ToolCallFormat, ToolCallStream, form_of


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer with its log-probability and its likeliest alternatives."""

    text: str  # of `raw`
    raw: bytes  # a control token has its name here
    logprob: float
    likely: tuple[tuple[str, bytes, float], ...] = ()  # text, raw bytes, log-probability
    shown: bytes = b""  # added to the answer's text; empty for a control token


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer or of its reasoning."""

    index: int  # of the answer
    text: str
    reasoning: bool = False
    tokens: tuple[Token, ...] = ()  # if log-probabilities were requested


@dataclass(slots=True)
class AnswerDone:
    index: int
    stopped: Stopped
    tokens: int  # all generated tokens
    reasoning: int = 0  # of these, reasoning tokens
    rest: tuple[Token, ...] = ()  # tokens after the last delta
    calls: tuple[ToolCall, ...] = ()
    notes: Mapping[str, object] = field(default_factory=dict)  # the key `notes` of the reply
    stop: str = ""  # the stop sequence that ended it


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The end of a prefill: token counts and pieces of the prompt."""

    counts: Counts
    pieces: tuple[Piece, ...]
    seconds: float  # since the request arrived
    notices: tuple[str, ...] = ()
    saved: float | None = None  # seconds of prefill (runtime/assemble.py)

    @property
    def cached(self) -> int:
        return self.counts.total - self.counts.decoded


OnDelta = Callable[[TextDelta], object]


@dataclass(slots=True)
class TokenRecorder:
    """Collects the tokens of an answer between two deltas, with `likely` alternatives each; None: collects nothing."""

    model: Model
    likely: int | None
    new: list[Token] = field(default_factory=list)

    def chosen(self, token: int, logits: Logits) -> None:
        if self.likely is None:
            return
        scores = log_softmax(logits)
        best = np.argsort(-scores)[: self.likely]
        likely = tuple((*self._text(int(candidate)), float(scores[candidate])) for candidate in best)
        self.new.append(Token(*self._text(token), float(scores[token]), likely, self.model.token_bytes(token)))

    def _text(self, token: int) -> tuple[str, bytes]:
        raw = self.model.token_bytes(token, special=True)
        return raw.decode(errors="replace"), raw

    def take(self) -> tuple[Token, ...]:
        tokens, self.new = tuple(self.new), []
        return tokens


def generate_answers(
    workspace: Workspace,
    prepared: PreparedRequest,
    seqs: Sequence[KVSequence],
    seed: int,
    on_delta: OnDelta,
    on_done: Callable[[AnswerDone], object],
) -> Task[None]:
    """Generate one answer in each sequence, all of which end with the prompt. Seeds count up from `seed`."""
    generate = _chat if prepared.request.prompt is None else _completion

    def answer(index: int, seq: KVSequence) -> Task[None]:
        on_done((yield from generate(workspace, prepared, seq, index, seed + index, on_delta)))

    return _join([answer(index, seq) for index, seq in enumerate(seqs)])


def _join(tasks: Sequence[Task[None]]) -> Task[None]:
    """Run several tasks as one. If one fails, all do."""
    awaited: dict[int, Sequence[KVSequence]] = dict.fromkeys(range(len(tasks)), ())
    try:
        while awaited:
            for number in list(awaited):
                try:
                    awaited[number] = next(tasks[number])
                except StopIteration:
                    del awaited[number]
            if awaited:
                yield [sequence for sequences in awaited.values() for sequence in sequences]
    finally:
        for task in tasks:
            task.close()


def _chat(
    workspace: Workspace, prepared: PreparedRequest, sequence: KVSequence, index: int, seed: int, on_delta: OnDelta
) -> Task[AnswerDone]:
    params, start = prepared.request.params, len(sequence)
    sampling = replace(params.sampling, seed=seed & 0xFFFFFFFF)
    recorder = TokenRecorder(workspace.model, params.likely)
    form = _call_format(workspace, prepared)
    tools = prepared.request.allowed
    call_parser = ToolCallStream(form, tools) if form else None

    def on_text(text: str) -> None:
        text = call_parser.feed(text) if call_parser else text
        if text:
            on_delta(TextDelta(index, text, tokens=recorder.take()))

    def on_reasoning(text: str) -> None:
        on_delta(TextDelta(index, text, reasoning=True))

    def call_begins() -> int:
        """Return where a call begins; what follows is one in the form of a required call."""
        nonlocal call_parser
        place = call_parser.call_position if call_parser else -1
        if place >= 0:
            call_parser = ToolCallStream(FORCED, tools)
            recorder.take()
        return place

    generator = ReplyGenerator(
        *(workspace, sampling, prepared.max_tokens, params.max_think),
        on_text=on_text,
        on_reasoning=on_reasoning,
        stops=params.stops,
        on_token=recorder.chosen,
        grammar=params.grammar,
        calls=Calls(form, tools) if form and not params.must_call else None,
        opened=not prepared.request.tools,
        prefilled=bool(prepared.request.prefill),
        call_begins=call_begins if params.call_grammar else None,
        call_grammar=params.call_grammar,
    )
    thought = (yield from generator.reason(sequence)) if prepared.think else None
    reply = yield from generator.reply(sequence, thought)
    calls: tuple[ToolCall, ...] = ()
    if call_parser:
        rest, calls = call_parser.end(cut=reply.stopped != "end")
        if rest:
            on_delta(TextDelta(index, rest, tokens=recorder.take()))
    reasoning = reply.thought.tokens if reply.thought else 0
    return AnswerDone(index, reply.stopped, len(sequence) - start, reasoning, recorder.take(), calls, stop=reply.stop)


def _call_format(workspace: Workspace, prepared: PreparedRequest) -> ToolCallFormat | None:
    """Return the format of tool calls in the answer; None without tools, or if the model's format is unknown."""
    if not prepared.request.tools:
        return None
    if prepared.request.prefill and (form := form_of(workspace.template.tool_source)):
        return replace(form, bare="", waits="", prefix="")  # a call does not begin the answer
    return FORCED if prepared.request.params.must_call else form_of(workspace.template.tool_source)


def _completion(
    workspace: Workspace, prepared: PreparedRequest, sequence: KVSequence, index: int, seed: int, on_delta: OnDelta
) -> Task[AnswerDone]:
    params, start, model = prepared.request.params, len(sequence), workspace.model
    recorder, until_stop = TokenRecorder(model, params.likely), MarkSplitter("", params.stops)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def emit(text: str) -> None:
        if text:
            on_delta(TextDelta(index, text, tokens=recorder.take()))

    constraint = None if params.grammar is None else Constraint(model, params.grammar)
    with Sampler(replace(params.sampling, seed=seed & 0xFFFFFFFF), constraint, model) as sampler:
        generator = TokenGenerator(sequence, sampler, prepared.max_tokens)
        while generator.active and not until_stop.found:
            logits = yield from sequence.next_logits()
            token = generator.choose(logits)
            if token is not None:
                recorder.chosen(token, logits)
                emit(until_stop.feed(decoder.decode(model.token_bytes(token))))
    emit(until_stop.feed(decoder.decode(b"", final=True)))
    emit(until_stop.flush())
    stopped: Stopped = "end" if until_stop.found else sequence.stopped
    return AnswerDone(index, stopped, len(sequence) - start, rest=recorder.take(), stop=until_stop.mark)
