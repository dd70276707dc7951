"""Reading a prompt and writing the answers to it, as one task of the loop that tells of each word as it comes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from notes_cli.engine.decision import log_softmax
from notes_cli.engine.loop import Logits, Task, together
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook, Stopped
from notes_cli.runtime.thinking import Speaker
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.arranging import Arranged
from notes_cli.text.messages import ToolCall
from notes_cli.text.tools import FORCED, Calls, Form, Listening, form_of


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
    arranged: Arranged,
    books: Sequence[Notebook],
    seed: int,
    hear: Hear,
    ended: Callable[[Written], object],
) -> Task[list[None]]:
    """The answers, each in a notebook that ends with the prompt. The seed of each is one more than that before.
    `ended` is told of each when it is complete."""
    way = _chat if arranged.asked.prompt is None else _text

    def one(index: int, book: Notebook) -> Task[None]:
        ended((yield from way(workspace, arranged, book, index, seed + index, hear)))

    return together([one(index, book) for index, book in enumerate(books)])


def _chat(
    workspace: Workspace, arranged: Arranged, notebook: Notebook, index: int, seed: int, hear: Hear
) -> Task[Written]:
    wanted, start = arranged.asked.writing, len(notebook)
    sampling = replace(wanted.sampling, seed=seed & 0xFFFFFFFF)
    told = Probabilities(workspace.model, wanted.likely)
    form = _form(workspace, arranged)
    listening = Listening(form, arranged.asked.tools) if form else None

    def say(text: str) -> None:
        text = listening.feed(text) if listening else text
        if text:
            hear(TextDelta(index, text, tokens=told.take()))

    def say_thought(text: str) -> None:
        hear(TextDelta(index, text, thought=True))

    speaker = Speaker(
        *(workspace, sampling, arranged.max_tokens, wanted.max_think),
        say=say,
        say_thought=say_thought,
        stops=wanted.stops,
        chosen=told.chosen,
        grammar=wanted.grammar,
        calls=Calls(form, arranged.asked.tools) if form and not wanted.must_call else None,
        opened=not arranged.asked.tools,
    )
    thought = (yield from speaker.thinking(notebook)) if arranged.think else None
    reply = yield from speaker.replying(notebook, thought)
    calls: tuple[ToolCall, ...] = ()
    if listening:
        rest, calls = listening.end()
        if rest:
            hear(TextDelta(index, rest, tokens=told.take()))
    reasoning = reply.thought.tokens if reply.thought else 0
    return Written(index, reply.stopped, len(notebook) - start, reasoning, told.take(), calls)


def _form(workspace: Workspace, arranged: Arranged) -> Form | None:
    """The form that calls of tools have in the answer; None where there are no tools, or it is not known."""
    if not arranged.asked.tools:
        return None
    return FORCED if arranged.asked.writing.must_call else form_of(workspace.model.chat_template or "")


def _text(
    workspace: Workspace, arranged: Arranged, notebook: Notebook, index: int, seed: int, hear: Hear
) -> Task[Written]:
    from notes_cli.engine.constraint import Constraint
    from notes_cli.engine.sampler import Sampler
    from notes_cli.engine.writing import Writer
    from notes_cli.text.reasoning import Until

    wanted, start, model = arranged.asked.writing, len(notebook), workspace.model
    told, end = Probabilities(model, wanted.likely), Until("", wanted.stops)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def say(text: str) -> None:
        if text:
            hear(TextDelta(index, text, tokens=told.take()))

    constraint = None if wanted.grammar is None else Constraint(model, wanted.grammar)
    with Sampler(replace(wanted.sampling, seed=seed & 0xFFFFFFFF), constraint) as sampler:
        writer = Writer(notebook, sampler, arranged.max_tokens)
        while writer.goes_on and not end.found:
            (logits,) = yield [notebook]
            token = writer.choose(logits)
            if token is not None:
                told.chosen(token, logits)
                say(end.feed(decoder.decode(model.token_bytes(token))))
    say(end.feed(decoder.decode(b"", final=True)))
    say(end.flush())
    return Written(index, "end" if end.found else notebook.stopped, len(notebook) - start, rest=told.take())
