"""The request that the command line of `notes ask` makes, and how its answer is shown.

The request is checked as far as that goes without a model. The chain of thought goes to stderr, the answer to stdout,
each as it comes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import answers_of, named
from notes_cli.commands.terminal import piped_text, text_in
from notes_cli.errors import NotesError
from notes_cli.explaining import Room
from notes_cli.text.fields import parse_values

if TYPE_CHECKING:
    from notes_cli.engine.sequence import Stopped
    from notes_cli.errors import Notice, Progress
    from notes_cli.runtime.generate import ReasoningTrace
    from notes_cli.runtime.request import Answer, Callbacks, Request
    from notes_cli.runtime.workspace import Workspace

# What only the first turn of a session can say.
_OPENING = ("fields", "system", "recompute", "decode", "place", "exact")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")

Options = dict[str, Any]  # of a Request, by its names, as plain values that JSON can hold


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `notes ask`: what is asked, and how the answer is to be shown."""

    options: Options
    typed: Sequence[str]  # of the skills to splice those of the command line: no setting of config.yaml
    said: Sequence[str]  # of the errata likewise
    opens: bool  # names what a session that has begun cannot take
    session: str | None
    explain: bool
    json: bool
    stream: bool
    verbose: bool = False

    @property
    def following(self) -> Options | None:
        """What is asked in a session that has begun: a setting of config.yaml is for where it fits. None for what only
        a session's first turn can have."""
        if self.opens:
            return None
        later = {**self.options, "splice": self.typed, "errata": self.said, "fields": {}, "method": None}
        return {**later, "system": None, "place": None, "recompute": False, "decode": (), "exact": False}

    def begun(self) -> NotesError:
        """That the session goes on, and can take none of what only its first turn can have."""
        return NotesError(
            f"session {self.session} has begun: --place, --system, --recompute, --exact and --decode belong to its "
            "first turn. A field is edited with: notes edit"
        )


def read_call(
    question: str | None, prompt: str | None, file: Path | None, given: Mapping[str, Any], names: Collection[str]
) -> Call:
    """The call in the values of the options, by parameter. `names`: the parameters that are options of the request.
    Raise UsageError and NotesError for one that is none."""
    results = given["results"]
    if results and (question is not None or prompt is not None or file is not None):
        raise click.UsageError("--result takes the place of a question: give one or the other")
    if results and not given["session"]:
        raise click.UsageError("--result goes on with a session: name it with --session")
    asked = "" if results else _question(question, prompt, file)
    given = {**given, "choices": answers_of(given["choices"]), "results": _results(results)}
    options = options_of(asked, given, names)
    if _typed("method") and not options["fields"] and not options["errata"]:
        raise click.UsageError("--method is how a new value changes the cache: give --erratum or --field, too")
    if given["session"] and given["explain"]:
        raise click.UsageError("--explain does not go with --session. See what is in it: notes session show NAME")
    return Call(
        options,
        typed=given["splice"] if _typed("splice") else (),
        said=given["errata"] if _typed("errata") else (),
        opens=_typed(*_OPENING),
        session=given["session"],
        explain=given["explain"],
        json=given["json_"],
        stream=not given["no_stream"],
        verbose=bool(given["verbose"]),
    )


def options_of(question: str, given: Mapping[str, Any], names: Collection[str]) -> Options:
    """The options of a request for a question, by the values of the parameters, which have the same names."""
    found = {name: given[name] for name in names if name not in _SAMPLING}
    seed = time.time_ns() & 0xFFFFFFFF if given["seed"] is None else given["seed"]
    sampling = {**{name: given[name] for name in _SAMPLING}, "seed": seed}
    return {
        "question": question,
        **found,
        "fields": parse_values(given["fields"]),
        "sampling": sampling,
        **held_to(given),
    }


def request_of(options: Options) -> Request:
    """The request with these options. Raise NotesError for a value that cannot be meant."""
    from notes_cli.engine.sampler import SamplerOptions
    from notes_cli.runtime.request import UNLIMITED, Request
    from notes_cli.runtime.settings import parse_method

    method, most = options["method"], options["max_tokens"]
    read = {
        "method": parse_method(method and str(method)),
        "sampling": SamplerOptions(**options["sampling"]),
        "max_tokens": UNLIMITED if most < 0 else most,
    }
    return Request(**{**options, **read})


def held_to(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer is held to, read: each option has a file or the text itself, a line of a batch has JSON."""
    schema, grammar = given["json_schema"], given["grammar"]
    if isinstance(schema, str):
        from notes_cli.text.schema import read_schema

        schema = read_schema(_text_of(schema, "{"))
    return {
        "json_schema": schema,
        "grammar": None if grammar is None else _text_of(grammar, "::="),
    }


def _text_of(given: str, sign: str) -> str:
    """What the option holds itself, if it has this sign, else the text of the file that it names."""
    return given if sign in given else text_in(Path(given))


def _typed(*names: str) -> bool:
    """Whether one of these parameters is on the command line: a setting of config.yaml is for where it fits."""
    return any(map(named, names))


def _question(argument: str | None, prompt: str | None, file: Path | None) -> str:
    """Piped text, then that of the file, then the argument; "-" as one of these is the piped text. Raise UsageError if
    there is none of them."""
    if argument is not None and prompt is not None:
        raise click.UsageError(f"there are two questions, {argument!r} and --prompt. Leave one out")
    argument = prompt if argument is None else argument
    named = None if file is None else str(file)
    piping = _piping(wanted="-" in (argument, named))
    argument = None if argument == "-" else argument
    read = text_in(file) if file is not None and named != "-" else ""
    if argument is None and not piping and not read:
        raise click.UsageError('there is no question. Write: notes ask "QUESTION", or pipe it in')
    piped = piped_text() if piping else ""
    if piped and argument and named != "-":
        output.say(f"{len(piped):,} characters of standard input precede the question; in a loop use </dev/null")
    asked = "\n\n".join(part for part in (piped, read, (argument or "").strip()) if part)
    if not asked:
        raise click.UsageError('the question is empty. Write: notes ask "QUESTION", or pipe it in')
    asked.encode()  # an argument that is not UTF-8 is wrong usage: UnicodeEncodeError (see cli.py)
    return asked


def _piping(*, wanted: bool) -> bool:
    """Whether standard input is a part of the question: a pipe always is, a terminal where it is `wanted`."""
    if sys.stdin is None:  # a script has closed it, which is said where it is wanted
        return wanted
    if wanted and sys.stdin.isatty():
        output.say("reading from the terminal; end it with Ctrl-D on a line of its own")
    return wanted or not sys.stdin.isatty()


def _results(given: Sequence[str]) -> list[tuple[str, str]]:
    """The name of each tool, and what it has returned."""
    found = [(name.strip(), text) for name, _, text in (one.partition("=") for one in given)]
    if not all("=" in one and name for one, (name, _) in zip(given, found, strict=True)):
        raise click.UsageError("write --result TOOL=TEXT, or TOOL=- for what is piped in")
    piped = [text for _, text in found if text == "-"]
    if len(piped) > 1:
        raise click.UsageError("only one result can be standard input")
    words = piped_text() if piped else ""
    return [(name, words if text == "-" else text) for name, text in found]


LONG = 512  # tokens of a prompt whose reading is shown


def watch(
    label: str, tokens: int | None = None, *, unit: str = "tokens", later: bool = False, hidden: bool = False
) -> AbstractContextManager[Progress]:
    """Show how far something has come, as runtime/open_skills.py asks for it (Watch)."""
    short = tokens is not None and tokens < LONG
    return output.progress(label, unit, hidden=short or hidden, later=later)


def _tell_of(notice: Notice) -> None:
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

    def callbacks(self, workspace: Workspace) -> Callbacks:
        """For an answer that comes from this workspace."""
        from notes_cli.runtime.request import Callbacks

        def thought_ended(thought: ReasoningTrace, asked: bool) -> None:
            self.thought_ended(thought.text, thought.stopped, asked, Room.of(workspace))

        def answered(answer: Answer) -> None:
            self.answered(answer.text, answer.stopped, Room.of(workspace))

        return Callbacks(
            on_notice=_tell_of,
            progress=partial(watch, hidden=self._call.json),
            on_reasoning=self.thought if self._streams else None,
            on_reasoning_end=thought_ended,
            on_text=self.answer if self._streams else None,
            on_answer=answered,
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
