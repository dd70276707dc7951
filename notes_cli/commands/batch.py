"""`notes ask --batch`: read questions as lines of text or JSON, and print a line of JSON for each, in order."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from notes_cli import output
from notes_cli.commands.options import Number, answers_of, errata_with_skills, named, open_model
from notes_cli.commands.remedies import print_notice, worded
from notes_cli.commands.request import options_of, read_constraints, request_of, watch
from notes_cli.commands.terminal import standard_input
from notes_cli.errors import NotesError, reason
from notes_cli.explanations import answer_as_json

if TYPE_CHECKING:
    from notes_cli.runtime.request import Request

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


def answer_all(source: Path, parallel: int | None, given: Mapping[str, Any], names: Collection[str]) -> None:
    """Answer the questions of a file or of stdin ("-"). `names`: parameters that are options of the request. Raises
    NotesError at the end if a line failed."""
    from notes_cli.runtime.request import PARALLEL, Callbacks

    started = time.perf_counter()
    for parameter, option in _EXCLUDED.items():
        if named(parameter):
            raise click.UsageError(f"{option} does not go with --batch, whose lines hold the questions")
    seed = time.time_ns() & 0xFFFFFFFF if given["seed"] is None else given["seed"]  # the same for all lines
    constraints = {"choices": answers_of(given["choices"]), **read_constraints(given)}  # read files once
    given = {**given, "seed": seed, **constraints, "session": None}
    with ExitStack() as stack:
        lines = _Lines(stack.enter_context(_open(source)), given, names)
        model = stack.enter_context(open_model(quiet=given["json_"], **given))
        update = stack.enter_context(output.progress("answering", "questions", later=True))
        callbacks = Callbacks(on_notice=print_notice, progress=watch)
        done = failed = 0
        for outcome in model.ask_many(lines, parallel=parallel or PARALLEL, callbacks=callbacks):
            line, key, request = lines.waiting.popleft()
            head = {"version": 1, "line": line, "id": key}
            if isinstance(outcome, NotesError):
                failed += 1
                output.as_json({**head, "error": {"message": worded(outcome), "status": 1}}, indent=None)
            else:
                assert request
                answer = {**answer_as_json(outcome, started), "sampling": asdict(request.sampling)}
                output.as_json({**head, **answer}, indent=None)
            done += 1
            update(done, done + len(lines.waiting) + (not lines.ended))
    if failed:
        raise NotesError(f"{failed:,} of {done:,} lines failed", "The output says why, line by line")


def _open(source: Path) -> AbstractContextManager[BinaryIO]:
    if str(source) != "-":
        try:
            return source.open("rb")
        except OSError as error:
            raise click.UsageError(f"cannot read {source}: {reason(error)}") from error
    piped = standard_input()
    if piped.isatty():
        output.say("reading from the terminal; end it with Ctrl-D on a line of its own")
    return nullcontext(piped)


class _Lines:
    """Iterates over the requests of a file, with an error for an invalid line. `waiting`: number, id and request of
    lines without an answer yet."""

    def __init__(self, file: BinaryIO, given: Mapping[str, Any], names: Collection[str]) -> None:
        self.waiting: deque[tuple[int, Any, Request | None]] = deque()
        self.ended = False
        self._file, self._given, self._names = file, given, names

    def __iter__(self) -> Iterator[Request | NotesError]:
        number = 0
        while raw := self._file.readline(LONGEST + 1):
            number += 1
            key = None
            try:
                if len(raw) > LONGEST:
                    while not raw.endswith(b"\n") and (raw := self._file.readline(LONGEST)):
                        pass  # skips the rest of the line
                    raise NotesError(f"the line is longer than {LONGEST >> 20} MiB")
                text = _decode(raw, first=number == 1)
                if not text:
                    continue
                line = _parse(text)
                key = line.get("id")
                request = _request(line, self._given, self._names)
            except NotesError as error:
                self.waiting.append((number, key, None))
                yield error
            else:
                self.waiting.append((number, key, request))
                yield request
        self.ended = True


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


def keys_of(names: Collection[str]) -> tuple[str, ...]:
    """Return the keys that a line may have, for these options of a request."""
    return ("question", "id", *(name for name in names if name not in _NO_KEYS))


def _request(line: Mapping[str, Any], given: Mapping[str, Any], names: Collection[str]) -> Request:
    """Return the request of a line, with defaults from the command line. Raises NotesError for an invalid key or
    value."""
    options: dict[str, Any] = {}
    keys = keys_of(names)
    for name, value in line.items():
        key = name.replace("-", "_")
        if key not in keys:
            raise NotesError(f"there is no key {name[:64]!r} in a line", f"The keys are {', '.join(keys)}")
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
        return request_of(options_of(question, {**given, **options}, names))
    except click.UsageError as error:
        raise NotesError(error.format_message()) from error


def _value(key: str, value: Any) -> Any:
    """Convert a JSON value as the option of that name does. Raises NotesError for another type or an invalid value."""
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    option = next(parameter for parameter in click.get_current_context().command.params if parameter.name == key)
    if key == "fields":
        if not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
            _refuse(key, value, "an object of strings")
        return tuple(f"{name}={text}" for name, text in value.items())
    if key == "choices":
        return [item.strip() for item in value] if texts else _refuse(key, value, "a list of strings")
    if key == "json_schema":  # a string would be taken for a file or a schema's text
        return value if isinstance(value, (dict, bool)) else _refuse(key, value, "an object, or true")
    if option.multiple:
        return tuple(value) if texts else _refuse(key, value, "a list of strings")
    if getattr(option, "is_flag", False):
        return value if isinstance(value, bool) else _refuse(key, value, "true or false")
    if isinstance(option.type, Number):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return _convert(option, key, value) if number else _refuse(key, value, "a number")
    if not isinstance(value, str):
        _refuse(key, value, "a string")
    if key == "grammar" and "::=" not in value:
        raise NotesError("grammar must be a grammar, not the name of a file", 'Write rules: root ::= "yes" | "no"')
    return value if key == "question" else _convert(option, key, value)


def _convert(option: click.Parameter, key: str, value: Any) -> Any:
    try:
        return option.type.convert(value, None, None)
    except click.BadParameter as error:
        raise NotesError(f"{key}: {error.message}") from error


def _refuse(key: str, value: Any, wanted: str) -> Any:
    raise NotesError(f"{key} must be {wanted}, not {json.dumps(value, ensure_ascii=False)[:64]}")
