"""How `notes ask` shows its answer: the chain of thought goes to stderr, the answer to stdout, each as it comes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from notes_cli import output
from notes_cli.explaining import Room

if TYPE_CHECKING:
    from notes_cli.commands.request import Call
    from notes_cli.engine.notebook import Stopped
    from notes_cli.errors import Notice, Progress
    from notes_cli.runtime.asking import Answer, Listener
    from notes_cli.runtime.thinking import Thought
    from notes_cli.runtime.workspace import Workspace

LONG = 512  # tokens of a prompt whose reading is shown


def watch(
    label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False, hidden: bool = False
) -> AbstractContextManager[Progress]:
    """Show how far something has come, as runtime/opening.py asks for it (Watch)."""
    short = tokens is not None and tokens < LONG
    return output.progress(label, unit, hidden=short or hidden, later=later)


def _tell(notice: Notice) -> None:
    from notes_cli.commands.remedies import tell  # with all that may help: to most answers there is nothing to say

    tell(notice)


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
    """What one call of `notes ask` prints while it is answered, by this process or by a server. Use it as a context
    manager: an interrupt or an error ends the answer, and what has been written stays, on a line of its own."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._streams = call.stream and not call.json
        self._thought = _Voice(output.aside)
        self._answer = _Voice(lambda text: output.data(text, end=""))

    def __enter__(self) -> Voices:
        return self

    def __exit__(self, *_: object) -> None:
        self._thought.end()
        self._answer.end()

    def listener(self, workspace: Workspace) -> Listener:
        """For an answer that comes from this workspace."""
        from notes_cli.runtime.asking import Listener

        def thought_ended(thought: Thought, asked: bool) -> None:
            self.thought_ended(thought.text, thought.stopped, asked, Room.of(workspace))

        def answered(answer: Answer) -> None:
            self.answered(answer.text, answer.stopped, Room.of(workspace))

        return Listener(
            notice=_tell,
            watch=partial(watch, hidden=self._call.json),
            thought=self.thought if self._streams else None,
            thought_ended=thought_ended,
            answer=self.answer if self._streams else None,
            answered=answered,
        )

    def thought(self, text: str) -> None:
        """A part of the chain of thought."""
        if self._streams:
            self._thought.say(text)

    def thought_ended(self, text: str, stopped: Stopped, asked: bool, room: Room | None) -> None:
        """The chain is complete: its text, why it ended, and whether it was asked for."""
        if asked and not self._call.stream and not self._call.json:
            self._thought.say(text)
        self._thought.end()
        self._tell_cut("reasoning", stopped, "--max-think", self._call.options["max_think"], room)

    def answer(self, text: str) -> None:
        """A part of the answer."""
        self._thought.end()
        if self._streams:
            self._answer.say(text)

    def answered(self, text: str, stopped: Stopped | None, room: Room | None) -> None:
        """The answer is complete, and why it ended: None for one that was chosen."""
        if stopped is None or not self._streams:
            if not self._call.json:
                output.data(text)
        else:
            self._answer = _Voice(lambda text: None)
            output.data("")
        self._tell_cut("answer", stopped, "-n", self._call.options["max_tokens"], room)

    def _tell_cut(self, what: str, stopped: Stopped | None, option: str, limit: int, room: Room | None) -> None:
        """Say that something was cut, and what to do. `room`: None for the context of a server."""
        if stopped == "length" and limit:
            output.say(
                f"the {what} was cut after {limit:,} token{'s'[: limit > 1]}. Let it have more: {option} {2 * limit}"
            )
        elif stopped == "context" and room is None:
            output.say(f"the {what} was cut: the context of the server is full; give that more: notes serve -c")
        elif stopped == "context" and room:
            at_most = room.longest is not None and room.size >= room.longest
            options = self._call.options
            wanted = max(options["max_tokens"], 0) + options["max_think"] * options["think"]
            more = f"give it more: -c {room.size + -(-wanted // 256) * 256 if wanted else 2 * room.size}"
            told = "the model was trained for no more (--beyond-trained)" if at_most else more
            output.say(f"the {what} was cut: the context of {room.size:,} tokens is full; {told}")
