"""`notes ask`: answer one question, or a batch of them, in this process or by a running server.

Only the answer is on stdout; for a batch, a line of JSON for each question, in order.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from notes_cli import output
from notes_cli.commands.options import (
    AUTO,
    FILE_OR_PIPE,
    OFF,
    SESSIONS,
    Number,
    answers_of,
    errata_with_skills,
    json_option,
    model_options,
    named,
    open_model,
    open_workspace,
    server_name,
)
from notes_cli.commands.request import (
    QUESTION,
    AnswerPrinter,
    Options,
    of_later_turn,
    options_of,
    parse_question,
    question_options,
    read_constraints,
    request_of,
)
from notes_cli.commands.terminal import Command, converted, option, standard_input
from notes_cli.errors import NotesError, reason
from notes_cli.explanations import answer_as_json, figures_as_json, plan_as_json, turn_as_json
from notes_cli.text.erratum import of_fields
from notes_cli.text.names import human_time

if TYPE_CHECKING:
    from notes_cli.runtime.request import Request


@click.command(cls=Command)
@click.argument("question", nargs=-1, metavar="[QUESTION]")
@option("-p --prompt TEXT", "The question, instead of QUESTION.", once=True, rare=True)
@option("-f --file FILE", "A text that precedes QUESTION.", once=True, type=FILE_OR_PIPE)
@option("--session NAME", "Start a session of that name, or continue it.", once=True, shell_complete=SESSIONS)
@question_options()
@option("--explain", "Dry run: each piece of the prompt, how it would be made, and why.", is_flag=True)
@json_option
@option("--no-stream", "Print the answer when it is complete.", rare=True, is_flag=True)
@option(
    "--gain/--no-gain",
    "End with a line on stderr: what splicing saved.  [default: on a terminal]",
    rare=True,
    default=True,
    show_default=False,
)
@option(
    "--batch FILE",
    "Answer the questions of FILE (-: standard input), one a line, as text or as JSON, with a line of JSON each "
    "(docs/json.md).",
    once=True,
    type=FILE_OR_PIPE,
)
@option("--parallel", "Questions of --batch to answer at a time.  [default: 16]", rare=True, type=Number(1, 64))
@option(
    "--server WHICH",
    "Send the question to a running notes serve of this user, which has the model loaded: auto (if there is one), off, "
    "or an address.",
    type=server_name,
    envvar="NOTES_SERVER",
    default=OFF,
)
@model_options
def command(question: tuple[str, ...], prompt: str | None, file: Path | None, **given: Any) -> None:
    """Ask a question, with skills spliced in and errata appended.

    The prompt is the piped text, then that of --file, then QUESTION; - as FILE or QUESTION is the piped text. Skills
    are placed in the system message of the model's chat template, corrections of their fields after them. Settings that
    are not given come from `defaults` of the model in config.yaml, where `notes verify --save` writes them.

    What is on standard input is part of the question. In a loop that reads lines, give it </dev/null.

    \b
    Examples:
      notes ask "Which carrier delivers?" --splice store-handbook
      notes ask "How long?" --splice store-handbook --erratum "Warranty=1 year"
      notes ask "Who?" --splice store-handbook --field Carrier=Me --method suffix
      notes ask "How much is shipping?" --splice store-handbook --think
      notes ask "Which carrier delivers?" --splice store-handbook --session mine
      notes ask "And how long does it take?" --session mine
      notes ask "What is the fee?" --session mine --memory fees
      echo "Is it closed?" | notes ask --splice store-handbook --choices yes,no
      notes ask "Name a city." -j '{"properties": {"city": {"type": "string"}}}'
      echo "Who is the manager?" > questions.txt
      notes ask --batch questions.txt --splice store-handbook > answers.jsonl
    """
    if len(question) > 1:
        words = " ".join(question)
        raise click.UsageError(f'the question is {len(question)} words without quotes. Write: notes ask "{words[:80]}"')
    batch, parallel = given.pop("batch"), given.pop("parallel")
    if batch is not None:
        if given["server"] not in (AUTO, OFF):
            from notes_cli.commands.ask_server import refusal

            raise refusal(given["server"], "--batch is answered here alone, and shares its cells itself")
        answer_all(batch, parallel, given)
        return
    if parallel is not None and named("parallel"):
        raise click.UsageError("--parallel is for the questions of --batch FILE")
    started = time.perf_counter()
    options = parse_question(question[0] if question else None, prompt, file, given)
    document: Mapping[str, Any] | None = None
    if given["server"] != OFF:
        from notes_cli.commands.ask_server import ask_server

        document = ask_server(options, started, given)
    document = document or _ask_here(options, started, given)
    explain, json_, verbose = given["explain"], given["json_"], given["verbose"]
    if verbose and not explain:
        output.say(_times(document))
    if json_:
        output.as_json(document)
    elif explain:
        _print_plan(document)
    gain = given["gain"] and document["tokens"]["spliced"] and not (json_ or explain or verbose)
    if gain and (named("gain") or (output.terminal() and output.watched())):
        output.aside(_gain(document) + "\n")


def _ask_here(options: Options, started: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Answer in this process. Return tokens and times as in docs/json.md, for --json the whole document, for --explain
    that of the plan."""
    from notes_cli.runtime import answering

    request, name = request_of(options), given["session"]
    printing = AnswerPrinter(options, json=given["json_"], stream=not given["no_stream"])
    with open_workspace(begins=True, **given) as workspace, printing as printer:
        callbacks, goes_on = printer.callbacks(workspace), False
        memory: str | None = None
        if given["explain"]:
            return plan_as_json(answering.explain(workspace, request, callbacks))
        if name is None:
            answer = answering.ask(workspace, request, callbacks)
        else:
            from notes_cli.api import Model

            with Model(workspace).session(name, say=callbacks.on_event) as session:
                goes_on = not session.empty
                if goes_on:
                    request = request_of(of_later_turn(options, name))
                answer, memory = session.ask(request, callbacks=callbacks), session.memory
        if not given["json_"]:
            return figures_as_json(answer, started)
        return turn_as_json(workspace, request, answer, started, name, goes_on, memory)


def _times(document: Mapping[str, Any]) -> str:
    tokens, ms = document["tokens"], document["ms"]
    line = f"{tokens['total']} tokens, {tokens['spliced']} of them spliced, in {ms['prompt']:.0f} ms"
    line += f"; the first of the answer after {ms['first_token']:.0f} ms"
    generation = ms["total"] - ms["load"] - ms["first_token"]
    if tokens["answer"] > 1 and generation > 0:
        line += f", then {1000 * (tokens['answer'] - 1) / generation:.1f} tokens/s"
    return line + _saved(document)


def _gain(document: Mapping[str, Any]) -> str:
    """Return the line of --gain: tokens spliced and decoded, time to the first token (with
    reasoning, to the end of the prompt), and the prefill time saved."""
    tokens, ms = document["tokens"], document["ms"]
    event, wait = ("prompt read", ms["prompt"]) if tokens["reasoning"] else ("first token", ms["first_token"])
    rest = f"spliced, {tokens['decoded']:,} decoded; {event} in {human_time(wait / 1000)}{_saved(document)}"
    return output.fitting(f"{tokens['spliced']:,} tokens {rest}", f"{tokens['spliced']:,} {rest}")


def _saved(document: Mapping[str, Any]) -> str:
    """Return the prefill time saved as the end of a line, "" if unknown."""
    saved = document["ms"]["saved"]
    return f", saved {human_time(saved / 1000)} of prefill" if saved else ""


def _print_plan(document: Mapping[str, Any]) -> None:
    columns = ("position", "tokens", "kind", "name", "how", "why")
    rows = [[str(piece[column]) for column in columns] for piece in document["pieces"]]
    output.table(("position", "tokens", "piece", "name", "how", "why"), rows, right=("position", "tokens"))
    counts = document["tokens"]
    output.result(
        f"{counts['total']} tokens: {counts['spliced']} spliced, {counts['decoded']} decoded "
        f"({counts['seam']} of them at seams, {counts['rewritten']} in place of spliced ones)"
    )
    if document["method_why"]:
        output.result(f"method {document['method_why']}")


LONGEST = 16 << 20  # bytes of a line
_CONSTRAINTS = ("choices", "json_schema", "grammar")
_NO_KEYS = ("images", "results")  # options of a request that a line does not have
_EXCLUDED = {  # parameter -> option that does not go with --batch
    "question": "QUESTION",
    "prompt": "--prompt",
    "file": "--file",
    "session": "--session",
    "results": "--result",
    "explain": "--explain",
}


def answer_all(source: Path, parallel: int | None, given: Mapping[str, Any]) -> None:
    """Answer the questions of a file or of stdin ("-"). Raises NotesError at the end if a line failed."""
    from notes_cli.commands.remedies import print_notice, worded
    from notes_cli.runtime.request import PARALLEL, Callbacks

    started = time.perf_counter()
    for parameter, flag in _EXCLUDED.items():
        if named(parameter):
            raise click.UsageError(f"{flag} does not go with --batch, whose lines hold the questions")
    seed = time.time_ns() & 0xFFFFFFFF if given["seed"] is None else given["seed"]  # the same for all lines
    constraints = {"choices": answers_of(given["choices"]), **read_constraints(given)}  # read files once
    given = {**given, "seed": seed, **constraints, "session": None}
    waiting = deque[_Waiting]()
    with ExitStack() as stack:
        requests = _requests(stack.enter_context(_open(source)), given, waiting)
        model = stack.enter_context(open_model(**given))
        update = stack.enter_context(output.progress("answering", unit="questions", later=True))
        callbacks = Callbacks(print_notice, output.progress)
        done = failed = 0
        for outcome in model.ask_many(requests, parallel=parallel or PARALLEL, callbacks=callbacks):
            line, key, request = waiting.popleft()
            head = {"version": 1, "line": line, "id": key, "question": request and request.question}
            if isinstance(outcome, NotesError):
                failed += 1
                output.as_json({**head, "error": {"message": worded(outcome), "status": 1}}, indent=None)
            else:
                assert request
                answer = {**answer_as_json(outcome, started), "sampling": asdict(request.sampling)}
                output.as_json({**head, **answer}, indent=None)
            done += 1
            update(done, done + len(waiting) + 1)  # how many are to come is not known
    if failed:
        raise NotesError(f"{failed:,} of {done:,} lines failed", "The output says why, line by line")


def _open(source: Path) -> AbstractContextManager[BinaryIO]:
    if str(source) != "-":
        try:
            return source.open("rb")
        except OSError as error:
            raise click.UsageError(f"cannot read {source}: {reason(error)}") from error
    return nullcontext(standard_input())


_Waiting = tuple[int, Any, "Request | None"]  # number, id and request of a line without an answer yet


def _requests(file: BinaryIO, given: Mapping[str, Any], waiting: deque[_Waiting]) -> Iterator[Request | NotesError]:
    """Yield the requests of a file, with an error for an invalid line, and add each line to `waiting` before."""
    number = 0
    while raw := file.readline(LONGEST + 1):
        number += 1
        key = None
        try:
            if len(raw) > LONGEST:
                while not raw.endswith(b"\n") and (raw := file.readline(LONGEST)):
                    pass  # skips the rest of the line
                raise NotesError(f"the line is longer than {LONGEST >> 20} MiB")
            text = _decode(raw, first=number == 1)
            if not text:
                continue
            line = _parse(text)
            key = line.get("id")
            request = _request(line, given)
        except NotesError as error:
            waiting.append((number, key, None))
            yield error
        else:
            waiting.append((number, key, request))
            yield request


def _decode(raw: bytes, *, first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise NotesError(f"the line is not UTF-8 (byte {error.start})") from error


def _parse(text: str) -> dict[str, Any]:
    """Return the keys of a line: JSON if it begins with a string, object or array, else the question itself. Raises
    NotesError for an invalid line."""
    if text[0] not in '"{[':
        return {"question": text}
    try:
        line = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        json.dumps(line, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        mistake = f"the line is not JSON: {error.msg} (column {error.colno})"
        raise NotesError(mistake, f"A question that begins with {text[0]} is written as a JSON string") from error
    except UnicodeEncodeError as error:
        raise NotesError(f"the line holds half a character, {error.object[error.start]!a}") from error
    except (ValueError, RecursionError) as error:
        raise NotesError(f"the line is not JSON: {error}") from error
    line = {"question": line} if isinstance(line, str) else line
    if not isinstance(line, dict):
        raise NotesError("the line is neither a question nor an object", "Write a JSON string, or an object")
    return line


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:64]!r} is there twice")
    return mapping


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


KEYS = ("question", "id", *(name for name in QUESTION if name not in _NO_KEYS))


def _request(line: Mapping[str, Any], given: Mapping[str, Any]) -> Request:
    """Return the request of a line, with defaults from the command line. Raises NotesError if it is invalid."""
    options: dict[str, Any] = {}
    for name, value in line.items():
        key = name.replace("-", "_")
        if key not in KEYS:
            raise NotesError(f"there is no key {name[:64]!r} in a line", f"The keys are {', '.join(KEYS)}")
        if value is None and key != "question":  # as if missing
            continue
        if key in options:
            raise NotesError(f"the key {key!r} is there twice")
        options[key] = value if key == "id" else _value(key, value)
    if "splice" in options and errata_with_skills(click.get_current_context()):
        options.setdefault("errata", ())
    question = (options.pop("question", None) or "").strip()
    if not question:
        raise NotesError("the line has no question", 'Give it one: {"question": "..."}')
    if options.get("method") and not (options.get("fields", given["fields"]) or options.get("errata", given["errata"])):
        raise NotesError("a method is how new values change the cache, and there are none", 'Give it "fields"')
    options.pop("id", None)
    if any(key in options for key in _CONSTRAINTS):  # replaces all constraints of the command line
        options = {**dict.fromkeys(_CONSTRAINTS), **options}
    try:
        return request_of(options_of(question, {**given, **options}))
    except click.UsageError as error:
        raise NotesError(error.format_message()) from error


def _value(key: str, value: Any) -> Any:
    """Convert a JSON value as the option of that name does. Raises NotesError for another type or an invalid value."""
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    option = next(parameter for parameter in click.get_current_context().command.params if parameter.name == key)
    if key == "errata" and isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return of_fields(value)
    if key == "fields":
        if not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
            _refuse(key, value, "an object of strings")
        return tuple(f"{name}={text}" for name, text in value.items())
    if key == "choices":
        return [item.strip() for item in value] if texts else _refuse(key, value, "a list of strings")
    if key == "json_schema":  # a string would be taken for a file or a schema's text
        return value if isinstance(value, (dict, bool)) else _refuse(key, value, "an object, or true")
    if option.multiple:
        also = ", or an object of fields and values" if key == "errata" else ""
        return tuple(value) if texts else _refuse(key, value, f"a list of strings{also}")
    if getattr(option, "is_flag", False):
        return value if isinstance(value, bool) else _refuse(key, value, "true or false")
    if isinstance(option.type, Number):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return converted(option, value, key) if number else _refuse(key, value, "a number")
    if not isinstance(value, str):
        _refuse(key, value, "a string")
    if key == "grammar" and "::=" not in value:
        raise NotesError("grammar must be a grammar, not the name of a file", 'Write rules: root ::= "yes" | "no"')
    return value if key == "question" else converted(option, value, key)


def _refuse(key: str, value: Any, wanted: str) -> Any:
    raise NotesError(f"{key} must be {wanted}, not {json.dumps(value, ensure_ascii=False)[:64]}")
