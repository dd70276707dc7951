"""How `notes ask` shows its answer: the chain of thought goes to stderr, the answer to stdout, each as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from notes_cli import output
from notes_cli.commands.remedies import tell

if TYPE_CHECKING:
    from notes_cli.commands.request import Call
    from notes_cli.engine.notebook import Stopped
    from notes_cli.errors import Progress
    from notes_cli.runtime.asking import Answer, Listener
    from notes_cli.runtime.thinking import Thought
    from notes_cli.runtime.workspace import Workspace

LONG = 512  # tokens of a prompt whose reading is shown


def watch(
    label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False, hidden: bool = False
) -> AbstractContextManager[Progress]:
    """Show how far something has come, as runtime/assembling.py asks for it (Watch)."""
    short = tokens is not None and tokens < LONG
    return output.progress(label, unit, hidden=short or hidden, later=later)


class _Voice:
    """Text as it comes, and whether its line is open. Blanks wait for what follows them, so that none ends the text."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._open = False
        self._held = ""

    def say(self, text: str) -> None:
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self._open = True  # before it is written, which an interrupt may cut short
            self._write(shown)

    def end(self) -> None:
        if self._open:
            self._open = False
            self._write("\n")


class Voices:
    """What one call of `notes ask` prints while it is answered. Use it as a context manager: an interrupt or an error
    ends the answer, and what has been written stays, on a line of its own."""

    def __init__(self, call: Call, workspace: Workspace) -> None:
        self._call, self._workspace = call, workspace
        self._streams = call.stream and not call.json
        self._thought = _Voice(output.aside)
        self._answer = _Voice(lambda text: output.data(text, end=""))

    def __enter__(self) -> Listener:
        from notes_cli.runtime.asking import Listener

        return Listener(
            notice=tell,
            watch=partial(watch, hidden=self._call.json),
            thought=self._thought.say if self._streams else None,
            thought_ended=self._thought_ended,
            answer=self._answer.say if self._streams else None,
            answered=self._answered,
        )

    def __exit__(self, *_: object) -> None:
        self._thought.end()
        self._answer.end()

    def _thought_ended(self, thought: Thought, asked: bool) -> None:
        if asked and not self._call.stream and not self._call.json:
            self._thought.say(thought.text)
        self._thought.end()
        self._tell_cut("reasoning", thought.stopped, "--max-think", self._call.request.max_think)

    def _answered(self, answer: Answer) -> None:
        if answer.decision or not self._streams:
            if not self._call.json:
                output.data(answer.text)
        else:
            self._answer = _Voice(lambda text: None)
            output.data("")
        if not answer.decision:
            self._tell_cut("answer", answer.stopped, "-n", self._call.request.limit)
        if self._call.verbose:
            output.say(_times(answer, time.perf_counter()))

    def _tell_cut(self, what: str, stopped: Stopped | None, option: str, limit: int) -> None:
        """Say that something was cut, and what to do."""
        if stopped == "limit" and limit:
            output.say(
                f"the {what} was cut after {limit:,} token{'s'[: limit > 1]}. Let it have more: {option} {2 * limit}"
            )
        elif stopped == "context":
            size, longest = self._workspace.context.n_ctx, self._workspace.longest
            at_most = longest is not None and size >= longest
            told = "the model was trained for no more (--beyond-trained)" if at_most else f"give it more: -c {2 * size}"
            output.say(f"the {what} was cut: the context of {size:,} tokens is full; {told}")


def _times(answer: Answer, now: float) -> str:
    """What the answer took, in a line, as docs/json.md has it in keys."""
    counts, written = answer.counts, now - answer.opened - answer.first_token
    told = f"{counts.total} tokens, {counts.spliced} of them spliced, in {1000 * answer.prompt:.0f} ms"
    told += f"; the first of the answer after {1000 * answer.first_token:.0f} ms"
    if answer.tokens > 1 and written > 0:
        told += f", then {(answer.tokens - 1) / written:.1f} tokens/s"
    return told


def as_json(answer: Answer, started: float, goes_on: bool = False) -> dict[str, Any]:
    """The part of docs/json.md that every answer has. `started`: when the command was (time.perf_counter)."""
    from dataclasses import asdict

    from notes_cli.explaining import as_json as piece_as_json

    thought, decision = answer.thought, answer.decision
    times = {
        "load": answer.opened - started,
        "splice": answer.splice,
        "prompt": answer.prompt,
        "first_token": answer.first_token,
        "total": time.perf_counter() - started,
    }
    return {
        "answer": answer.text,
        "reasoning": thought.text if thought else None,
        "thought_whole": thought.finished if thought else None,
        "thought_stopped": thought.stopped if thought else None,
        "stopped": answer.stopped,
        "choice": decision.choice if decision else None,
        "probabilities": decision.probabilities if decision else None,
        "tokens": {
            **asdict(answer.counts),
            "reasoning": thought.tokens if thought else 0,
            "answer": answer.tokens,
        },
        "ms": {name: round(1000 * seconds, 3) for name, seconds in times.items()},
        **settings_as_json(answer.settings, goes_on),
        "pieces": [piece_as_json(piece) for piece in answer.pieces],
    }


def settings_as_json(settings: Any, goes_on: bool = False) -> dict[str, Any]:
    """What held for a request. In a session that goes on, where skills are placed was settled long ago."""
    return {
        "method": str(settings.method) if settings.method else None,
        "method_why": settings.why,
        "place": None if goes_on else settings.place,
        "seam": settings.seam,
        "wording": settings.wording,
    }
