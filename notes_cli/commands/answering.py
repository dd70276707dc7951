"""How `notes ask` comes to its answer: the chain of thought goes to stderr, the answer to stdout, each as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notes_cli import output

if TYPE_CHECKING:
    from notes_cli.commands.request import Request
    from notes_cli.engine.decision import Decision
    from notes_cli.engine.notebook import Notebook, Stopped
    from notes_cli.runtime.thinking import Reply, Thought
    from notes_cli.runtime.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered, and how it was come to."""

    text: str
    tokens: int  # that were written
    at: float  # when the first of them, or the choice, was there (time.perf_counter)
    thought: Thought | None = None
    decision: Decision | None = None
    stopped: Stopped | None = None  # why it ends; None for a choice

    @property
    def unwritten(self) -> str:
        """A choice that stands nowhere in the notebook; empty where the answer does, if only at the end of a chain."""
        at_the_end = self.thought is not None and self.thought.answer.casefold() == self.text.casefold()
        return self.text if self.decision and not at_the_end else ""


class _Voice:
    """Text as it comes: when it began, and whether its line is open. Blanks wait for what comes behind them, so that
    none ends the text."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.first = 0.0
        self._write = write
        self._open = False
        self._held = ""

    def say(self, text: str) -> None:
        self.first = self.first or time.perf_counter()
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self._open = True  # before it is written, which an interrupt may cut short
            self._write(shown)

    def end(self) -> None:
        if self._open:
            self._write("\n")


def answer(workspace: Workspace, notebook: Notebook, request: Request, *, think: bool) -> Answer:
    """Think if asked to, then decide or write. Prints unless the request is for JSON."""
    thought = _think(workspace, notebook, request) if think else None
    if request.choices is None:
        return _write(workspace, notebook, request, thought)
    return _decide(workspace, notebook, request, request.choices, thought)


def _think(workspace: Workspace, notebook: Notebook, request: Request) -> Thought:
    """The chain of thought, shown on stderr, dimmed on a terminal."""
    from notes_cli.runtime.thinking import think

    voice = _Voice(output.aside)
    streams = request.stream and not request.json
    try:
        thought = think(workspace, notebook, request.sampling, request.max_think, voice.say if streams else None)
        if not request.stream and not request.json:
            voice.say(thought.text)
    finally:
        voice.end()
    _tell_cut("reasoning", thought, "--max-think", request.max_think, workspace)
    return thought


def _decide(
    workspace: Workspace, notebook: Notebook, request: Request, choices: Sequence[str], thought: Thought | None
) -> Answer:
    from notes_cli.engine.decision import decide
    from notes_cli.runtime.thinking import decide_after

    decision = decide_after(workspace, notebook, choices, thought) if thought else decide(notebook, choices)
    known = time.perf_counter()
    if not request.json:
        output.data(decision.choice)
    return Answer(decision.choice, 0, known, thought, decision)


def _write(workspace: Workspace, notebook: Notebook, request: Request, thought: Thought | None) -> Answer:
    """The answer in words. Streams whole characters only.

    An interrupt or an error ends the answer: what has been written stands, on a line of its own.
    """
    from notes_cli.runtime.thinking import reply

    streams = request.stream and not request.json
    voice = _Voice(lambda text: output.data(text, end="") if streams else None)
    asked = workspace, notebook, request.sampling, request.limit
    try:
        found = reply(*asked, thinking=request.max_think, say=voice.say, thought=thought)
    except BaseException:
        voice.end()
        raise
    if not request.json:
        output.data("" if streams else found.text)
    if thought is None and found.thought:  # one that nobody had asked for
        _tell_cut("reasoning", found.thought, "--max-think", request.max_think, workspace)
    _tell_cut("answer", found, "-n", request.limit, workspace)
    return Answer(found.text, found.tokens, voice.first or time.perf_counter(), found.thought, stopped=found.stopped)


def _tell_cut(what: str, said: Thought | Reply, option: str, limit: int, workspace: Workspace) -> None:
    """Say that something was cut, and what to do."""
    if said.stopped == "limit" and limit:
        output.say(
            f"the {what} was cut after {limit:,} token{'s'[: limit > 1]}. Let it have more: {option} {2 * limit}"
        )
    elif said.stopped == "context":
        size = workspace.context.n_ctx
        full = f"the {what} was cut: the context of {size:,} tokens is full"
        at_most = workspace.longest is not None and size >= workspace.longest
        told = "the model was trained for no more (--beyond-trained)" if at_most else f"give it more: -c {2 * size}"
        output.say(f"{full}; {told}")
