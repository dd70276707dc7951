"""`notes ask --batch`: questions as lines of text or JSON, and for each a line with its answer, in the same order."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from notes_cli import output
from notes_cli.commands.ask import REQUEST
from notes_cli.commands.options import Number, answers_of, named, open_model
from notes_cli.commands.remedies import tell, worded
from notes_cli.commands.request import held_to, options_of, request_of, watch
from notes_cli.commands.terminal import standard_input
from notes_cli.errors import NotesError, reason
from notes_cli.explaining import answer_as_json

if TYPE_CHECKING:
    from notes_cli.runtime.request import Answer, Request

LONGEST = 16 << 20  # bytes of a line
_HELD = ("choices", "json_schema", "grammar")
KEYS = ("question", "id", *(name for name in REQUEST if name not in ("images", "results")))
_ALONE = {
    "question": "QUESTION",
    "prompt": "--prompt",
    "file": "--file",
    "session": "--session",
    "results": "--result",
    "explain": "--explain",
}


def answer_all(source: Path, parallel: int | None, given: Mapping[str, Any]) -> None:
    """Answer the questions of a file, or of standard input. Raise NotesError in the end where a line has failed."""
    from notes_cli.runtime.request import PARALLEL, Callbacks

    started = time.perf_counter()
    for parameter, word in _ALONE.items():
        if named(parameter):
            raise click.UsageError(f"{word} does not go with --batch, whose lines hold the questions")
    seed = time.time_ns() & 0xFFFFFFFF if given["seed"] is None else given["seed"]  # one for all lines
    held = {"choices": answers_of(given["choices"]), **held_to(given)}  # read once
    given = {**given, "seed": seed, **held, "session": None}
    with ExitStack() as stack:
        lines = _Lines(stack.enter_context(_opened(source)), given)
        model = stack.enter_context(open_model(quiet=given["json_"], **given))
        update = stack.enter_context(output.progress("answering", "questions", later=True))
        callbacks = Callbacks(on_notice=tell, progress=watch)
        done = failed = 0
        for outcome in model.ask_many(lines, parallel=parallel or PARALLEL, callbacks=callbacks):
            line, key, request = lines.waiting.popleft()
            head = {"version": 1, "line": line, "id": key}
            if isinstance(outcome, NotesError):
                failed += 1
                output.json_line({**head, "error": {"message": worded(outcome), "status": 1}})
            else:
                assert request
                output.json_line({**head, **_as_json(outcome, request, started)})
            done += 1
            update(done, done + len(lines.waiting) + (not lines.ended))
    if failed:
        raise NotesError(f"{failed:,} of {done:,} lines failed", "The output says why, line by line")


def _as_json(answer: Answer, request: Request, started: float) -> dict[str, Any]:
    return {**answer_as_json(answer, started), "sampling": asdict(request.sampling)}


@contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    if str(source) != "-":
        try:
            file = source.open("rb")
        except OSError as error:
            raise click.UsageError(f"cannot read {source}: {reason(error)}") from error
        with file:
            yield file
        return
    piped = standard_input()
    if piped.isatty():
        output.say("reading from the terminal; end it with Ctrl-D on a line of its own")
    yield piped


class _Lines:
    """The requests of a file, read as they are asked for; an error in place of one that is none. `waiting` are those
    without an answer yet: number, id and request."""

    def __init__(self, file: BinaryIO, given: Mapping[str, Any]) -> None:
        self.waiting: deque[tuple[int, Any, Request | None]] = deque()
        self.ended = False
        self._file, self._given = file, given

    def __iter__(self) -> Iterator[Request | NotesError]:
        number = 0
        while raw := self._file.readline(LONGEST + 1):
            number += 1
            key, found = None, None
            try:
                if len(raw) > LONGEST:
                    self._skip()
                    raise NotesError(f"the line is longer than {LONGEST >> 20} MiB")
                text = _decoded(raw, first=number == 1)
                if not text:
                    continue
                line = _parsed(text)
                key = line.get("id")
                found = _request(line, self._given)
            except NotesError as error:
                self.waiting.append((number, key, None))
                yield error
            else:
                self.waiting.append((number, key, found))
                yield found
        self.ended = True

    def _skip(self) -> None:
        """Go to the end of a line."""
        while (part := self._file.readline(LONGEST)) and not part.endswith(b"\n"):
            pass


def _decoded(raw: bytes, *, first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise NotesError(f"the line is not UTF-8 (byte {error.start})") from error


def _parsed(text: str) -> dict[str, Any]:
    """The keys of a line, which is JSON if it begins as a string, an object or an array does, else a question as it is.
    Raise NotesError for what is no line of a batch."""
    if text[0] not in '"{[':
        return {"question": text}
    try:
        line = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        json.dumps(line, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        what = f"the line is not JSON: {error.msg} (column {error.colno})"
        raise NotesError(what, f"A question that begins with {text[0]} is written as a JSON string") from error
    except UnicodeEncodeError as error:
        raise NotesError(f"the line holds half a character, {error.object[error.start]!a}") from error
    except (ValueError, RecursionError) as error:
        raise NotesError(f"the line is not JSON: {error}") from error
    line = {"question": line} if isinstance(line, str) else line
    if not isinstance(line, dict):
        raise NotesError("the line is neither a question nor an object", "Write a JSON string, or an object")
    return line


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:64]!r} is there twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _request(line: Mapping[str, Any], given: Mapping[str, Any]) -> Request:
    """What a line asks for; what it leaves open is as the command line says. Raise NotesError."""
    own: dict[str, Any] = {}
    for given_key, value in line.items():
        key = given_key.replace("-", "_")
        if key not in KEYS:
            raise NotesError(f"there is no key {given_key[:64]!r} in a line", f"The keys are {', '.join(KEYS)}")
        if value is None and key != "question":  # as if it were not there
            continue
        if key in own:
            raise NotesError(f"the key {key!r} is there twice")
        own[key] = value if key == "id" else _value(key, value)
    question = (own.pop("question", None) or "").strip()
    if not question:
        raise NotesError("the line has no question", 'Give it one: {"question": "..."}')
    if own.get("method") and not (own.get("fields", given["fields"]) or own.get("errata", given["errata"])):
        raise NotesError("a method is how new values change the cache, and there are none", 'Give it "fields"')
    own.pop("id", None)
    if any(key in own for key in _HELD):  # what the line is held to is its own
        own = {**dict.fromkeys(_HELD), **own}
    try:
        return request_of(options_of(question, {**given, **own}, REQUEST))
    except click.UsageError as error:
        raise NotesError(error.format_message()) from error


def _value(key: str, value: Any) -> Any:
    """A value as the option of that name would have it. Raise NotesError for another type, or out of its bounds."""
    texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
    option = next(one for one in click.get_current_context().command.params if one.name == key)
    if key == "fields":
        right = isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
        if not right:
            _wrong(key, value, "an object of strings")
        return tuple(f"{name}={one}" for name, one in value.items())
    if key == "choices":
        return [one.strip() for one in value] if texts else _wrong(key, value, "a list of strings")
    if key == "json_schema":  # a text would be read as that of a file, or of a schema
        return value if isinstance(value, (dict, bool)) else _wrong(key, value, "an object, or true")
    if option.multiple:
        return tuple(value) if texts else _wrong(key, value, "a list of strings")
    if getattr(option, "is_flag", False):
        return value if isinstance(value, bool) else _wrong(key, value, "true or false")
    if isinstance(option.type, Number):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return _converted(option, key, value) if number else _wrong(key, value, "a number")
    if not isinstance(value, str):
        _wrong(key, value, "a string")
    if key == "grammar" and "::=" not in value:
        raise NotesError("grammar must be a grammar, not the name of a file", 'Write rules: root ::= "yes" | "no"')
    return value if key == "question" else _converted(option, key, value)


def _converted(option: click.Parameter, key: str, value: Any) -> Any:
    """A value as the option that the key is named after takes it."""
    try:
        return option.type.convert(value, None, None)
    except click.BadParameter as error:
        raise NotesError(f"{key}: {error.message}") from error


def _wrong(key: str, value: Any, wanted: str) -> Any:
    raise NotesError(f"{key} must be {wanted}, not {json.dumps(value, ensure_ascii=False)[:64]}")
