"""Reading a prompt and writing the answers to it, as one task of the loop that tells of each word as it comes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from notes_cli.engine.decision import log_softmax
from notes_cli.engine.loop import Logits, Task, join_tasks
from notes_cli.engine.model import Model
from notes_cli.engine.sequence import KVSequence, Stopped
from notes_cli.runtime.generate import ReplyGenerator
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.prepare import PreparedRequest
from notes_cli.text.messages import ToolCall
from notes_cli.text.tools import FORCED, Calls, ToolCallFormat, ToolCallStream, form_of


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer, its log-probability, and the likeliest ones instead."""

    text: str
    spelt: bytes
    logprob: float
    likely: tuple[tuple[str, bytes, float], ...] = ()
    shown: bytes = b""  # what it adds to the answer: nothing for a control token


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What comes of an answer at a time."""

    index: int  # of the answer
    text: str
    thought: bool = False  # of the chain before it
    tokens: tuple[Token, ...] = ()  # where they were asked for


@dataclass(slots=True)
class Written:
    """An answer that is complete."""

    index: int
    stopped: Stopped
    tokens: int  # all that were written
    reasoning: int = 0  # of them, of a chain of thought
    rest: tuple[Token, ...] = ()  # that no words were told with
    calls: tuple[ToolCall, ...] = ()
    notes: Mapping[str, object] = field(default_factory=dict)  # what the reply has beside it


Hear = Callable[[TextDelta], object]


@dataclass(slots=True)
class Probabilities:
    """The tokens of an answer since words were last told."""

    model: Model
    likely: int | None
    new: list[Token] = field(default_factory=list)

    def chosen(self, token: int, logits: Logits) -> None:
        if self.likely is None:
            return
        scores = log_softmax(logits)
        best = np.argsort(-scores)[: self.likely]
        likely = tuple((*self._spelt(int(one)), float(scores[one])) for one in best)
        shown = self.model.token_bytes(token)
        self.new.append(Token(*self._spelt(token), float(scores[token]), likely, shown))

    def _spelt(self, token: int) -> tuple[str, bytes]:
        spelt = self.model.token_bytes(token, special=True)
        return spelt.decode(errors="replace"), spelt

    def take(self) -> tuple[Token, ...]:
        found, self.new = tuple(self.new), []
        return found


def writing(
    workspace: Workspace,
    prepared: PreparedRequest,
    seqs: Sequence[KVSequence],
    seed: int,
    hear: Hear,
    ended: Callable[[Written], object],
) -> Task[list[None]]:
    """The answers, each in a sequence that ends with the prompt. The seed of each is one more than that before.
    `ended` is told of each when it is complete."""
    way = _chat if prepared.request.prompt is None else _text

    def one(index: int, seq: KVSequence) -> Task[None]:
        ended((yield from way(workspace, prepared, seq, index, seed + index, hear)))

    return join_tasks([one(index, seq) for index, seq in enumerate(seqs)])


def _chat(
    workspace: Workspace, prepared: PreparedRequest, sequence: KVSequence, index: int, seed: int, hear: Hear
) -> Task[Written]:
    wanted, start = prepared.request.params, len(sequence)
    sampling = replace(wanted.sampling, seed=seed & 0xFFFFFFFF)
    told = Probabilities(workspace.model, wanted.likely)
    form = _form(workspace, prepared)
    listening = ToolCallStream(form, prepared.request.tools) if form else None

    def say(text: str) -> None:
        text = listening.feed(text) if listening else text
        if text:
            hear(TextDelta(index, text, tokens=told.take()))

    def say_thought(text: str) -> None:
        hear(TextDelta(index, text, thought=True))

    speaker = ReplyGenerator(
        *(workspace, sampling, prepared.max_tokens, wanted.max_think),
        on_text=say,
        on_reasoning=say_thought,
        stops=wanted.stops,
        on_token=told.chosen,
        grammar=wanted.grammar,
        calls=Calls(form, prepared.request.tools) if form and not wanted.must_call else None,
        opened=not prepared.request.tools,
    )
    thought = (yield from speaker.reason(sequence)) if prepared.think else None
    reply = yield from speaker.reply(sequence, thought)
    calls: tuple[ToolCall, ...] = ()
    if listening:
        rest, calls = listening.end()
        if rest:
            hear(TextDelta(index, rest, tokens=told.take()))
    reasoning = reply.thought.tokens if reply.thought else 0
    return Written(index, reply.stopped, len(sequence) - start, reasoning, told.take(), calls)


def _form(workspace: Workspace, prepared: PreparedRequest) -> ToolCallFormat | None:
    """The form that calls of tools have in the answer; None where there are no tools, or it is not known."""
    if not prepared.request.tools:
        return None
    return FORCED if prepared.request.params.must_call else form_of(workspace.model.chat_template or "")


def _text(
    workspace: Workspace, prepared: PreparedRequest, sequence: KVSequence, index: int, seed: int, hear: Hear
) -> Task[Written]:
    from notes_cli.engine.constraint import Constraint
    from notes_cli.engine.sampler import Sampler
    from notes_cli.engine.token_generator import TokenGenerator
    from notes_cli.text.reasoning import MarkSplitter

    wanted, start, model = prepared.request.params, len(sequence), workspace.model
    told, end = Probabilities(model, wanted.likely), MarkSplitter("", wanted.stops)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def say(text: str) -> None:
        if text:
            hear(TextDelta(index, text, tokens=told.take()))

    constraint = None if wanted.grammar is None else Constraint(model, wanted.grammar)
    with Sampler(replace(wanted.sampling, seed=seed & 0xFFFFFFFF), constraint) as sampler:
        writer = TokenGenerator(sequence, sampler, prepared.max_tokens)
        while writer.active and not end.found:
            (logits,) = yield [sequence]
            token = writer.choose(logits)
            if token is not None:
                told.chosen(token, logits)
                say(end.feed(decoder.decode(model.token_bytes(token))))
    say(end.feed(decoder.decode(b"", final=True)))
    say(end.flush())
    return Written(index, "end" if end.found else sequence.stopped, len(sequence) - start, rest=told.take())
