"""Turn the options of `notes ask` into a request, and print its answer: text on stdout, reasoning on stderr, streamed.

The request is validated as far as possible without a model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import FIELD_VALUES, SKILLS, Number, answers_of, errata_of_skills, named, without_memory
from notes_cli.commands.terminal import Decorated, piped_text, read_text, row
from notes_cli.errors import NotesError, Notice

if TYPE_CHECKING:
    from notes_cli.engine.sequence import Stopped
    from notes_cli.runtime.request import Callbacks, Event, Request
    from notes_cli.runtime.workspace import Workspace

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
# Options for the first turn of a session only.
_FIRST_TURN = ("fields", "system", "recompute", "decode", "place", "exact")
_SHARE = Number(0, 1, kind=float)
_CONFIGURED = "  [default: config.yaml's for the model, else "
# Options of a question, by the field of Request or of SamplerOptions that each sets.
_QUESTION = {
    "splice": row(
        "--splice NAME",
        "A compiled skill, a segment file, or a text. Repeatable.",
        shell_complete=SKILLS,
        multiple=True,
    ),
    "memory": row(
        "--memory NAME",
        "A skill that is kept just before the question, as a profile of the user. A session remembers it.",
        once=True,
        shell_complete=SKILLS,
    ),
    "images": row(
        "--image FILE",
        "An image, shown with the question (--mmproj). It is compiled, and spliced from then on. Repeatable.",
        type=click.Path(),
        multiple=True,
    ),
    "system": row("-s --system TEXT", "System text before the skills.", once=True),
    "results": row(
        "--result TOOL=TEXT",
        "In a session, in the place of a question: what a tool that the last answer called has returned; TOOL=- reads "
        "standard input. Repeatable, in the order of the calls.",
        rare=True,
        multiple=True,
    ),
    "errata": row(
        "--erratum FIELD=VALUE",
        "A correction: the KV entries of the field are computed again, and a sentence after the skills states it. OLD "
        '=> NEW ("the 27th => the 28th") names any value by its text. Or free text (Note: ...), before the question. '
        "Repeatable; of a field the last one wins.",
        callback=errata_of_skills,
        shell_complete=FIELD_VALUES,
        multiple=True,
    ),
    "fields": row(
        "--field FIELD=VALUE",
        "The same, by the default method of the model or that of --method. Repeatable.",
        shell_complete=FIELD_VALUES,
        multiple=True,
    ),
    "method": row(
        "--method METHOD",
        "How a new value changes the cache: field+erratum, erratum (which leaves all entries), field, suffix, "
        f"recompute, stale.{_CONFIGURED}field+erratum]",
        rare=True,
    ),
}
ANSWER = {
    "max_tokens": row(
        "-n --max-tokens --predict --n-predict",
        "At most so many tokens of answer, -1: until the answer or the context ends.",
        type=Number(1, special=-1),
        default=256,
    ),
    "think": row("--think", "Let the model reason before it answers; its reasoning goes to stderr.", is_flag=True),
    "max_think": row("--max-think", "At most so many tokens of reasoning.", rare=True, type=Number(0), default=512),
    "choices": row("--choices A,B,...", "Decide among these answers.", once=True),
    "json_schema": row(
        "-j --json-schema FILE",
        "Answer with JSON that is valid by this schema: a file, or the schema itself.",
        once=True,
    ),
    "grammar": row(
        "--grammar FILE", "Hold the answer to a grammar (GBNF): a file, or the grammar itself.", once=True, rare=True
    ),
    "temperature": row(
        "--temp --temperature",
        "Temperature, 0: always the likeliest token.",
        type=Number(0, 100, kind=float),
        default=0.0,
    ),
    "top_k": row("--top-k", "Sample from the k likeliest tokens, 0: all.", rare=True, type=Number(0), default=40),
    "top_p": row("--top-p", "Sample from the likeliest, p in all.", rare=True, type=_SHARE, default=0.95),
    "min_p": row("--min-p", "Not below p of the likeliest.", rare=True, type=_SHARE, default=0.05),
    "repeat_penalty": row(
        "--repeat-penalty",
        "Penalty on repeated tokens, 1: none.",
        rare=True,
        type=Number(0, above=True, kind=float),
        default=1.0,
    ),
    "seed": row(
        "--seed", "Seed for --temp above 0.  [default: random, shown in the JSON]", rare=True, type=Number(0, 2**32 - 1)
    ),
}
_SPLICE = {  # all are rare
    "seam": row(
        "--seam",
        "Tokens to recompute at the start of a skill that is preceded by a different context than at compile time."
        f"{_CONFIGURED}1]",
        type=Number(0),
    ),
    "place": row(
        "--place",
        f"Skills in the system message, or right before the question.{_CONFIGURED}early]",
        type=click.Choice(["early", "late"]),
    ),
    "wording": row(
        "--wording FORM", "How errata are worded: a name (prompts/errata.json), or a sentence with {field} and {value}."
    ),
    "strict": row("--strict", "Refuse a skill that cannot be spliced here, instead of decoding it.", is_flag=True),
    "exact": row(
        "--exact",
        "Reuse a skill only where its cache is that of a prefill of the whole prompt, and decode it everywhere else.",
        is_flag=True,
    ),
    "decode": row(
        "--decode NAME",
        "Decode this one of the --splice skills instead, so that it sees the skills before it. Repeatable.",
        shell_complete=SKILLS,
        multiple=True,
    ),
    "recompute": row("--recompute", "Decode the same tokens instead of splicing, to compare.", is_flag=True),
}
QUESTION = {
    **_QUESTION,
    **{name: partial(make, group="Answer") for name, make in ANSWER.items()},
    **{name: partial(make, group="Splice", rare=True) for name, make in _SPLICE.items()},
}


def question_options(*names: str, **changes: Mapping[str, Any]) -> Callable[[Decorated], Decorated]:
    """Return a decorator for these options of a question, by default all. `changes`: what differs there, by name."""

    def decorate(command: Decorated) -> Decorated:
        for name in reversed(names or [*QUESTION]):
            how = {"group": "Options", **changes.get(name, {})} if names else changes.get(name, {})
            command = QUESTION[name](name=name, **how)(command)
        return command

    return decorate


Options = dict[str, Any]  # of a Request, by name, as JSON values


def parse_question(question: str | None, prompt: str | None, file: Path | None, given: Mapping[str, Any]) -> Options:
    """Return the options of the request, from the values of parameters. Raises UsageError and NotesError for invalid
    combinations and values."""
    results = given["results"]
    if results and (question is not None or prompt is not None or file is not None):
        raise click.UsageError("--result takes the place of a question: give one or the other")
    if results and not given["session"]:
        raise click.UsageError("--result goes on with a session: name it with --session")
    text = "" if results else _question(question, prompt, file)
    options = options_of(text, {**given, "choices": answers_of(given["choices"]), "results": _results(results)})
    if named("method") and not options["fields"] and not options["errata"]:
        raise click.UsageError("--method is how a new value changes the cache: give --erratum or --field, too")
    if given["session"] and given["explain"]:
        raise click.UsageError("--explain does not go with --session. See what is in it: notes session show NAME")
    return options


def of_later_turn(options: Options, session: str) -> Options:
    """Return the options for a later turn of a session, without settings of config.yaml that do not apply. Raises
    NotesError if some are for the first turn only."""
    if named(*_FIRST_TURN):
        raise NotesError(
            f"session {session} has begun: --place, --system, --recompute, --exact and --decode belong to its "
            "first turn. A field is edited with: notes edit"
        )
    typed = {name: options[name] if named(name) else () for name in ("splice", "errata")}
    first: Options = {"fields": {}, "method": None, "system": None, "place": None, "recompute": False, "exact": False}
    return {**options, **typed, **first, "decode": ()}


def options_of(question: str, given: Mapping[str, Any]) -> Options:
    """Return the options of a request, from values of parameters with the same names."""
    options = {name: given[name] for name in QUESTION if name not in _SAMPLING}
    if given["memory"]:
        options["splice"] = without_memory(given["splice"], given["memory"])
    seed = time.time_ns() & 0xFFFFFFFF if given["seed"] is None else given["seed"]
    sampling = {**{name: given[name] for name in _SAMPLING}, "seed": seed}
    fields: dict[str, str] = {}
    if given["fields"]:
        from notes_cli.text.fields import parse_values

        fields = parse_values(given["fields"])
    return {"question": question, **options, "fields": fields, "sampling": sampling, **read_constraints(given)}


def request_of(options: Options) -> Request:
    """Return the request with these options. Raises NotesError for an invalid value."""
    from notes_cli.engine.sampler import SamplerOptions
    from notes_cli.runtime.request import UNLIMITED, Request
    from notes_cli.runtime.resolve import parse_method

    method, max_tokens = options["method"], options["max_tokens"]
    parsed = {
        "method": parse_method(method and str(method)),
        "sampling": SamplerOptions(**options["sampling"]),
        "max_tokens": UNLIMITED if max_tokens < 0 else max_tokens,
    }
    return Request(**{**options, **parsed})


def read_constraints(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema and the grammar; an option holds a file or the text itself, a line of a batch JSON."""
    schema, grammar = given["json_schema"], given["grammar"]
    if isinstance(schema, str):
        from notes_cli.text.schema import read_schema

        schema = read_schema(_inline_or_file(schema, "{"))
    return {"json_schema": schema, "grammar": None if grammar is None else _inline_or_file(grammar, "::=")}


def _inline_or_file(value: str, sign: str) -> str:
    return value if sign in value else read_text(Path(value))


def _question(argument: str | None, prompt: str | None, file: Path | None) -> str:
    """Join the piped text, the file's and the argument; "-" for one of these is the piped text. Raises UsageError if
    all are missing."""
    if argument is not None and prompt is not None:
        raise click.UsageError(f"there are two questions, {argument!r} and --prompt. Leave one out")
    argument = prompt if argument is None else argument
    name = None if file is None else str(file)
    requested = "-" in (argument, name)
    piping = requested or (sys.stdin is not None and not sys.stdin.isatty())  # closed if None; reading it is an error
    argument = None if argument == "-" else argument
    text = read_text(file) if file is not None and name != "-" else ""
    if argument is None and not piping and not text:
        raise click.UsageError('there is no question. Write: notes ask "QUESTION", or pipe it in')
    piped = piped_text() if piping else ""
    if piped and argument and name != "-":
        output.say(f"{len(piped):,} characters of standard input precede the question; in a loop use </dev/null")
    question = "\n\n".join(part for part in (piped, text, (argument or "").strip()) if part)
    if not question:
        raise click.UsageError('the question is empty. Write: notes ask "QUESTION", or pipe it in')
    question.encode()  # raises UnicodeEncodeError, a usage error (cli.py), unless the argument is UTF-8
    return question


def _results(words: Sequence[str]) -> list[tuple[str, str]]:
    """Parse TOOL=TEXT into names of tools and their results; TEXT "-" is stdin."""
    results = [(name.strip(), text) for name, _, text in (word.partition("=") for word in words)]
    if not all("=" in word and name for word, (name, _) in zip(words, results, strict=True)):
        raise click.UsageError("write --result TOOL=TEXT, or TOOL=- for what is piped in")
    from_stdin = [text for _, text in results if text == "-"]
    if len(from_stdin) > 1:
        raise click.UsageError("only one result can be standard input")
    piped = piped_text() if from_stdin else ""
    return [(name, piped if text == "-" else text) for name, text in results]


class _StreamedText:
    """Writes text as it is generated, and ends its line. Trailing blanks are held back until more text follows."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write_text = write
        self._open = False
        self._blanks = ""

    def write(self, text: str) -> None:
        text = self._blanks + text
        stripped = text.rstrip()
        self._blanks = text[len(stripped) :]
        if stripped:
            self._open = True  # before writing, which an interrupt may cut short
            self._write_text(stripped)

    def end(self, *, always: bool = False) -> None:
        """End the line, if there is text on it or `always`."""
        if self._open or always:
            self._open = False
            self._write_text("\n")


class AnswerPrinter:
    """Prints reasoning and answer of one `notes ask`, from this process or a server. Use it as a context manager: after
    an interrupt or error, partial text ends with a line break."""

    def __init__(self, options: Options, *, json: bool = False, stream: bool = True) -> None:
        """`json`: the document is printed afterwards. `stream`: print text as it is generated."""
        self._options = options
        self._json = json
        self._streams = stream and not json
        self._reasoning = _StreamedText(output.aside)
        self._answer = _StreamedText(lambda text: output.data(text, end=""))

    def __enter__(self) -> AnswerPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        self._reasoning.end()
        self._answer.end()

    def callbacks(self, workspace: Workspace) -> Callbacks:
        """Return the callbacks for an answer of this process."""
        from notes_cli.runtime.request import Answer, Callbacks, Text

        def on_event(event: Event) -> None:
            if isinstance(event, Notice):
                from notes_cli.commands.remedies import print_notice  # imported for the few answers with notices

                print_notice(event)
            elif isinstance(event, Text) and event.reasoning:
                self.reasoning(event.text)
            elif isinstance(event, Text):
                self.answer(event.text)
            elif isinstance(event, Answer):
                if thought := event.thought:
                    self.end_reasoning(thought.text, thought.stopped, event.settings.think, workspace)
                self.end_answer(event.text, event.stopped, workspace)

        return Callbacks(on_event, output.progress)

    def reasoning(self, text: str) -> None:
        if self._streams and self._options["think"]:  # a model may also reason without a request
            self._reasoning.write(text)

    def end_reasoning(self, text: str, stopped: Stopped, requested: bool, workspace: Workspace | None) -> None:
        """End the reasoning, with its whole text, why it ended, and whether it was requested."""
        if requested and not self._streams and not self._json:
            self._reasoning.write(text)
        self._reasoning.end()
        self._warn_cut("reasoning", stopped, "--max-think", self._options["max_think"], workspace)

    def answer(self, text: str) -> None:
        self._reasoning.end()
        if self._streams:
            self._answer.write(text)

    def end_answer(self, text: str, stopped: Stopped | None, workspace: Workspace | None) -> None:
        """End the answer, with its whole text and why it ended (None for a choice)."""
        if self._streams:
            self._answer.end(always=True)
        elif not self._json:
            output.data(text)
        self._warn_cut("answer", stopped, "-n", self._options["max_tokens"], workspace)

    def _warn_cut(
        self, part: str, stopped: Stopped | None, option: str, limit: int, workspace: Workspace | None
    ) -> None:
        """Print that a part was cut, and how to get more. `workspace`: None for a server's."""
        if stopped == "length" and limit:
            output.say(
                f"the {part} was cut after {limit:,} token{'s'[: limit > 1]}. Let it have more: {option} {2 * limit}"
            )
        elif stopped == "context" and workspace is None:
            output.say(f"the {part} was cut: the context of the server is full; give that more: notes serve -c")
        elif stopped == "context" and workspace:
            size, longest = workspace.context.n_ctx, workspace.longest
            at_most = longest is not None and size >= longest
            wanted = max(self._options["max_tokens"], 0) + self._options["max_think"] * self._options["think"]
            more = f"give it more: -c {size + -(-wanted // 256) * 256 if wanted else 2 * size}"
            advice = "the model was trained for no more (--beyond-trained)" if at_most else more
            output.say(f"the {part} was cut: the context of {size:,} tokens is full; {advice}")
