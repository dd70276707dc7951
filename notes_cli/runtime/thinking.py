"""Thinking: the model writes a chain of thought before its answer, and the answer is told from it.

A prompt with `think` ends where the chain begins. The chain ends by its mark, by an end token, or at a limit; what must
precede the answer is put there, so that the notebook ends where the answer begins. Everything here is a task of a loop
(engine/loop.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from notes_cli.classes import dataclass
from notes_cli.engine.decision import Decision, deciding
from notes_cli.engine.grammar import Grammar
from notes_cli.engine.loop import Logits, Task
from notes_cli.engine.notebook import Notebook, Stopped
from notes_cli.engine.pieces import Reason
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.writing import Writer
from notes_cli.errors import EngineError, Help, UnsupportedError
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.reasoning import Begins, Reasoning, Until

if TYPE_CHECKING:
    from notes_cli.text.tools import Calls

THINK = 512  # tokens of a chain, if nothing else is said
ROOM = 64  # tokens that are kept free after a chain, for its end and an answer
OUTCOME = 24  # tokens in which a chain that was cut short comes to its answer

Say = Callable[[str], None]
Chosen = Callable[[int, Logits], None]


@dataclass(frozen=True, slots=True)
class Thought:
    """A chain of thought: its text without marks, how many tokens it takes, and whether it ended by itself.

    `answer`: what it ends with, where the model puts its answer into the chain (else empty, and the answer follows).
    `rest`: the beginning of an answer that came in one token with the closing mark. `stopped`: why it ended.
    """

    text: str
    tokens: int
    finished: bool
    answer: str = ""
    rest: str = ""
    stopped: Stopped = "end"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said: the answer, its tokens, the chain before it, if there was one, and why the answer ends."""

    text: str
    tokens: int
    thought: Thought | None = None
    stopped: Stopped = "end"


def thinking(
    workspace: Workspace,
    notebook: Notebook,
    options: SamplerOptions,
    limit: int,
    say: Say | None = None,
    *,
    begun: str = "",
    calls: bool = False,
) -> Task[Thought]:
    """Write a chain of at most `limit` tokens; the notebook is left where the answer begins.

    `say` gets the text as it comes; `begun` is the chain's text that is there already. `calls`: the answer may call
    tools. Raise EngineError where the context has no room for a chain and its end.
    """
    reasoning, start = workspace.reasoning.calling if calls else workspace.reasoning, len(notebook)
    chain = Until(reasoning.close)
    parts: list[str] = []

    def add(text: str) -> bool:
        text = text if any(parts) else text.lstrip()
        parts.append(text)
        if say and text:
            say(text)
        return chain.found

    add(chain.feed(begun))
    asked, limit = limit, 0 if chain.found else _within(notebook, limit)
    yield from _writing(workspace, notebook, options, limit, lambda text: add(chain.feed(text)))
    add(chain.flush())
    count = len(notebook) - start
    finished = chain.found or notebook.stopped == "end"
    room = notebook.stopped != "context" and limit == asked
    if count:
        notebook.pieces[-1] = replace(notebook.pieces[-1], reason=Reason.THOUGHT)
    if reasoning.inside:
        finished |= reasoning.found("".join(parts)) is not None
        answer = yield from _concluding(workspace, notebook, options, parts, add)
        thought, stopped = "".join(parts).strip(), _why(finished, room)
        return Thought(thought, len(notebook) - start, finished, answer, stopped=stopped)
    missing, rest = _missing(reasoning, chain)
    closing, cut = workspace.model.tokenize(missing, special=True), "" if finished else str(count)
    notebook.append(closing, "answer", reason=Reason.THOUGHT_END, detail=cut)
    thought, stopped = "".join(parts).strip(), _why(finished, room)
    return Thought(thought, len(notebook) - start, finished, rest=rest, stopped=stopped)


def _why(whole: bool, room: bool) -> Stopped:
    """Why a chain ended; `room`: the context had room for as many tokens as were asked for."""
    return "end" if whole else "limit" if room else "context"


def _within(notebook: Notebook, limit: int) -> int:
    """As many tokens of the limit as there is room for: none at all would be an answer that nobody thought about."""
    start, size = len(notebook), notebook.size
    if limit and start + ROOM >= size:
        raise EngineError(
            f"the context is too small to think in: the prompt takes {start} of {size} tokens",
            Help.LARGER_CONTEXT(tokens=start + min(limit, THINK) + ROOM),
        )
    return min(limit, size - start - ROOM)


def _concluding(
    workspace: Workspace,
    notebook: Notebook,
    options: SamplerOptions,
    parts: Sequence[str],
    add: Callable[[str], object],
) -> Task[str]:
    """The answer that a chain ends with; one that was cut short is brought to it. Empty if there is none."""
    reasoning = workspace.reasoning
    if reasoning.found("".join(parts)) is None:
        notebook.append(workspace.model.tokenize(reasoning.answer), "answer", reason=Reason.THOUGHT_END)
        add(reasoning.answer)
        yield from _writing(workspace, notebook, options, OUTCOME, lambda text: bool(add(text)) and False)
    found = reasoning.found("".join(parts))
    return found[1].strip() if found else ""


def _missing(reasoning: Reasoning, chain: Until) -> tuple[str, str]:
    """What must be put after a chain for the answer to begin, and what of the answer is there already."""
    if not chain.found:
        return reasoning.closing, ""
    if reasoning.answer.startswith(chain.rest):
        return reasoning.answer[len(chain.rest) :], ""
    return "", chain.rest


def deciding_after(
    workspace: Workspace, notebook: Notebook, choices: Sequence[str], thought: Thought
) -> Task[Decision]:
    """The decision after a chain of thought: at the end of the notebook, or where the chain names its answer.

    The notebook is left as it was. Raise NotesError for choices that are none.
    """
    named = thought.answer.casefold()
    if named not in [choice.casefold() for choice in choices]:
        return (yield from deciding(notebook, choices))
    pieces, tokens = list(notebook.pieces), notebook.tokens
    notebook.truncate(_position_of(workspace, notebook, thought))
    decision = yield from deciding(notebook, choices)
    choice = next(choice for choice in choices if choice.casefold() == named)
    notebook.append(tokens[len(notebook) :])
    yield [notebook]
    notebook.pieces = pieces
    return replace(decision, choice=choice)


def choosing(
    workspace: Workspace, notebook: Notebook, choices: Sequence[str], limit: int, options: SamplerOptions | None = None
) -> Task[Decision]:
    """Decide at the end of a notebook; with a `limit` above 0, after a chain of thought of at most so many tokens."""
    if not limit:
        return (yield from deciding(notebook, choices))
    thought = yield from thinking(workspace, notebook, options or SamplerOptions(), limit)
    return (yield from deciding_after(workspace, notebook, choices, thought))


def _position_of(workspace: Workspace, notebook: Notebook, thought: Thought) -> int:
    """The position of the token that the thought's answer begins with."""
    position, following = len(notebook), b""
    while thought.answer.encode() not in following:
        position -= 1
        following = workspace.model.token_bytes(int(notebook.tokens[position])) + following
    return position


def replying(
    workspace: Workspace,
    notebook: Notebook,
    options: SamplerOptions,
    limit: int,
    *,
    max_think: int = THINK,
    say: Say | None = None,
    say_thought: Say | None = None,
    thought: Thought | None = None,
    stops: Sequence[str] = (),
    chosen: Chosen | None = None,
    grammar: str | None = None,
    calls: Calls | None = None,
) -> Task[Reply]:
    """Write the answer, of at most `limit` tokens; `say` gets its text as it comes.

    `thought`: the chain that precedes it. A model that begins one unasked has at most `max_think` tokens for it.
    `stops`: texts before which the answer ends. `chosen` gets each token of it, with the logits that it was chosen
    from, before `say` gets its text. `grammar`: what the answer is held to, and the chain is not; then it is not
    stripped either. `calls`: it may call tools; one that does is held to no grammar.
    """
    if grammar is not None:
        if thought is None:
            thought = yield from _unasked(workspace, notebook, options, max_think, say_thought)
        elif thought.answer or thought.rest.strip():
            thought = _without_answer(workspace, notebook, thought)
        if calls is not None:
            called = yield from _calling(workspace, notebook, options, limit, calls, say, thought, stops)
            if called is not None:
                return called
        return (yield from _held(workspace, notebook, options, limit, grammar, say, thought, stops, chosen))
    if thought and thought.answer:
        text, stopped = _said_in_chain(workspace, thought.answer, limit, stops)
        if say and text:
            say(text)
        return Reply(text, 0, thought, stopped)
    reasoning, start = workspace.reasoning, len(notebook)
    parts: list[str] = []
    marks = calls.form.marks if calls else ""
    begins, end = Begins("" if thought else reasoning.open), Until(reasoning.end, stops)

    def add(text: str) -> bool:
        text = end.feed(text)
        text = text if any(parts) else text.lstrip()
        parts.append(text)
        if say and text:
            say(text)
        return begins.found or end.found

    add(thought.rest if thought else "")
    yield from _writing(workspace, notebook, options, limit, lambda text: add(begins.feed(text)), chosen, marks=marks)
    if begins.found:
        thought = yield from thinking(
            *(workspace, notebook, options, max_think, say_thought), begun=begins.rest, calls=calls is not None
        )
        thought = replace(thought, tokens=len(notebook) - start)
        rest = {"say": say, "thought": thought, "stops": stops, "chosen": chosen, "calls": calls}
        return (yield from replying(workspace, notebook, options, limit, **rest))  # type: ignore[arg-type]
    add(begins.flush() + end.flush())
    stopped = "end" if end.found else notebook.stopped
    return Reply("".join(parts).strip(), len(notebook) - start, thought, stopped)


def _unasked(
    workspace: Workspace, notebook: Notebook, options: SamplerOptions, limit: int, say: Say | None
) -> Task[Thought | None]:
    """The chain that a model begins before an answer which nobody asked it to think about; None if it does not."""
    marks = workspace.model.tokenize(workspace.reasoning.open.strip(), special=True)
    if not len(marks):
        return None
    (logits,) = yield [notebook]
    if int(logits.argmax()) != marks[0]:
        return None
    start = len(notebook)
    notebook.append(marks, "answer")
    thought = yield from thinking(workspace, notebook, options, limit, say)
    return replace(thought, tokens=len(notebook) - start)


def _said_in_chain(workspace: Workspace, answer: str, limit: int, stops: Sequence[str]) -> tuple[str, Stopped]:
    """As much of an answer that is in the chain as was asked for, and what it stopped at."""
    tokens, end = workspace.model.tokenize(answer), Until("", stops)
    whole = len(tokens) <= limit
    if not whole:
        answer = b"".join(map(workspace.model.token_bytes, tokens[:limit].tolist())).decode(errors="ignore")
    text = end.feed(answer) + end.flush()
    return text, "end" if end.found or whole else "limit"


def _without_answer(workspace: Workspace, notebook: Notebook, thought: Thought) -> Thought:
    """Take back what the model has begun to answer in its chain, or in one token with its closing mark."""
    if thought.answer:
        place, length = _position_of(workspace, notebook, thought), len(notebook)
        notebook.truncate(place)
        text = thought.text.rpartition(thought.answer)[0].rstrip()
        return replace(thought, text=text, answer="", tokens=thought.tokens - (length - place))
    last = workspace.model.token_bytes(int(notebook.tokens[-1]), special=True)
    notebook.truncate(len(notebook) - 1)
    mark = last.removesuffix(thought.rest.encode()).decode(errors="replace")
    notebook.append(workspace.model.tokenize(mark, special=True), "answer", reason=Reason.THOUGHT_END)
    return replace(thought, rest="")


def _calling(
    workspace: Workspace,
    notebook: Notebook,
    options: SamplerOptions,
    limit: int,
    calls: Calls,
    say: Say | None,
    thought: Thought | None,
    stops: Sequence[str],
) -> Task[Reply | None]:
    """Write an answer for as long as it may be calls; None where it is none, and nothing of it is left then. Raise
    UnsupportedError for a model that cannot go back."""
    start, parts, end = len(notebook), [""], Until(workspace.reasoning.end, stops)

    def hear(text: str) -> bool:
        parts.append(end.feed(text))
        return end.found or not calls.may_be("".join(parts))

    yield from _writing(workspace, notebook, options, limit, hear, marks=calls.form.marks)
    parts.append(end.flush())
    answer = "".join(parts)
    stopped = "end" if end.found else notebook.stopped
    if not calls.may_be(answer) or (stopped == "end" and not calls.are(answer)):
        if workspace.model.recurrent and notebook.rows > start:
            raise UnsupportedError("this model cannot take back what was no call: send tools, or a form of the answer")
        notebook.truncate(start)
        return None
    if say and answer:
        say(answer)
    return Reply(answer.strip(), len(notebook) - start, thought, stopped)


def _held(
    workspace: Workspace,
    notebook: Notebook,
    options: SamplerOptions,
    limit: int,
    grammar: str,
    say: Say | None,
    thought: Thought | None,
    stops: Sequence[str],
    chosen: Chosen | None,
) -> Task[Reply]:
    """Write an answer that is held to a grammar."""
    start, parts, end = len(notebook), [""], Until("", stops)

    def hear(text: str) -> bool:
        text = end.feed(text)
        parts.append(text)
        if say and text:
            say(text)
        return end.found

    yield from _writing(workspace, notebook, options, limit, hear, chosen, grammar)
    if held := end.flush():
        parts.append(held)
        if say:
            say(held)
    return Reply("".join(parts), len(notebook) - start, thought, "end" if end.found else notebook.stopped)


def _writing(
    workspace: Workspace,
    notebook: Notebook,
    options: SamplerOptions,
    limit: int,
    hear: Callable[[str], bool],
    chosen: Chosen | None = None,
    grammar: str | None = None,
    marks: str = "",
) -> Task[None]:
    """Write at most `limit` tokens. `hear` gets the text as it comes, in whole characters, and says whether that is
    enough. Of special tokens only marks have a text, `marks` among them."""
    model, reasoning = workspace.model, workspace.reasoning
    shown = (reasoning.open + reasoning.close + reasoning.end + marks).encode()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with Sampler(options, None if grammar is None else Grammar(model, grammar)) as sampler:
        writer = Writer(notebook, sampler, limit)
        while writer.goes_on:
            (logits,) = yield [notebook]
            token = writer.choose(logits)
            if token is not None:
                if chosen:
                    chosen(token, logits)
                special = model.token_bytes(token, special=True)
                if hear(decoder.decode(special if special in shown else model.token_bytes(token))):
                    return
    hear(decoder.decode(b"", final=True))
