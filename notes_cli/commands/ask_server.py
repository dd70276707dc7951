"""`notes ask --server`: send the question to a running `notes serve` of the same user (docs/serving.md).

Only a server with the same model, library and settings is used, so that prompt, tokens and sampler are the same.
"""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from notes_cli import config, output
from notes_cli.commands.options import AUTO, ModelChoice, choose_model, own_sessions
from notes_cli.commands.request import AnswerPrinter, Options, of_later_turn
from notes_cli.engine.header import parts, stamp
from notes_cli.errors import WARNING, NotesError, reason
from notes_cli.images import MAX_BYTES
from notes_cli.library.segment_files import segment_files, skill_named
from notes_cli.serve.client import CHAT, EXPLAIN, LOCAL, Declined, Json, Lost, Server, post, running

HERE = "Leave it to this process: --server off"


def ask_server(options: Options, started: float, given: Mapping[str, Any]) -> Json | None:
    """Return the JSON document of a server's answer or plan; None if no server can answer and --server is auto. Raises
    NotesError if generation fails, or if a named server cannot answer."""
    named = given["server"] != AUTO
    try:
        server, choice = _find(given)
        return _request_answer(server, choice, options, started, given)
    except Declined as why:
        if named:
            raise NotesError(str(why)) if why.wrong else refusal(given["server"], str(why)) from why
        if given["verbose"]:
            output.say(f"no server answers this: {why}")
    return None


def refusal(server: str, why: str) -> NotesError:
    return NotesError(f"{server} cannot answer this: {why}", HERE)


def folders() -> list[str]:
    """Return the folders whose contents answers depend on."""
    paths = config.paths()
    return [os.path.realpath(folder) for folder in (paths.library, paths.sessions, paths.config)]


def _find(given: Mapping[str, Any]) -> tuple[Server, ModelChoice]:
    """Return a server that would answer as this process does, and the model. Raises Declined if there is none, and with
    a named server NotesError for an unknown model."""
    word = given["server"]
    try:
        servers = [server for server in running(config.paths().servers) if word == AUTO or _has_url(server, word)]
    except (NotesError, OSError) as error:
        raise Declined(error.what if isinstance(error, NotesError) else reason(error)) from error
    if not servers:
        raise Declined("none is running" if word == AUTO else "no notes serve of this user is running there")
    try:
        choice = choose_model(begins=True, **given)
    except (NotesError, click.UsageError) as error:
        if word != AUTO:
            raise
        raise Declined("there is no such model or session") from error  # this process reports the details
    differences = [_difference(server, choice) for server in servers]
    matching = [server for server, difference in zip(servers, differences, strict=True) if difference is None]
    if not matching:
        raise Declined(str(differences[0]))
    return matching[0], choice


def _has_url(server: Server, url: str) -> bool:
    """True if the URL is the server's, by any of the local host names."""
    try:
        here, there = urlsplit(server.url), urlsplit(url)
        return here.port == there.port and there.scheme == "http" and there.hostname in LOCAL
    except ValueError:
        return False


# Options sent as OpenAI's fields; the others are keys of `notes`, by the same names.
_CHAT = {
    *("question", "results", "system", "images", "think", "max_think", "max_tokens"),
    *("sampling", "json_schema", "grammar"),
}


def _body(options: Options, given: Mapping[str, Any]) -> Json:
    """Return the body of the request to /v1/chat/completions. Raises Declined for options that cannot be sent."""
    if options["results"]:
        raise Declined("--result is answered by this process alone")
    if options["max_tokens"] < 0:
        raise Declined("-n -1 has no limit, and an answer of a server has one")
    named = _skills(options["splice"])
    options = {**options, "splice": [*named.values()], "decode": [named.get(word, word) for word in options["decode"]]}
    if memory := options["memory"]:
        options["memory"] = _skills([memory])[memory]
    system = [{"role": "system", "content": options["system"]}] if options["system"] else []
    content = [*map(_image, options["images"]), {"type": "text", "text": options["question"]}]
    form: Json = {}
    if options["json_schema"] is not None:
        form = {"response_format": {"type": "json_schema", "json_schema": {"schema": options["json_schema"]}}}
    if options["grammar"] is not None:
        form["grammar"] = options["grammar"]
    others = {name: value for name, value in options.items() if name not in _CHAT and value is not None}
    return {
        "messages": [*system, {"role": "user", "content": content}],
        "stream": not given["explain"],
        "max_tokens": options["max_tokens"],
        "max_think": options["max_think"],
        "chat_template_kwargs": {"enable_thinking": options["think"]},
        **options["sampling"],
        **form,
        "notes": {"ask": True, "session": given["session"], "explain": True, **others},
    }


def _skills(words: Sequence[str]) -> dict[str, str]:
    """Map words of the command line to names of compiled skills. Raises Declined for files: a server opens none."""
    known = {name for name, _ in segment_files(config.paths().library)} if words else set()
    names = {}
    for word in words:
        name = skill_named(word, known)
        if name is None:
            raise Declined(f"{word} is no compiled skill")
        names[word] = name
    return names


def _image(word: str) -> Json:
    """Return an image file as part of a message. Raises Declined for a file that cannot be sent."""
    path = Path(word).expanduser()
    if not path.is_file() or path.suffix.lower() == ".gguf":
        raise Declined(f"{word} is no file of an image")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Declined(f"{word}: {reason(error)}") from error
    if len(data) > MAX_BYTES:
        raise Declined(f"{word} is larger than {MAX_BYTES >> 20} MiB")
    return {"type": "image_url", "image_url": {"url": f"data:image/*;base64,{b64encode(data).decode()}"}}


def _difference(server: Server, choice: ModelChoice) -> str | None:
    """Return why a server would not answer as this process does, None if it would."""
    try:
        stamps = []
        for path in parts(choice.path):
            with path.open("rb") as file:
                stamps.append(list(stamp(file)))
    except OSError as error:
        return f"{choice.path}: {reason(error)}"
    if stamps != server.files:
        return "it has another model"
    if server.folders != folders():
        return "it has another library"
    if choice.settings != server.context:
        names = {*choice.settings, *server.context}
        differing = sorted(name for name in names if choice.settings.get(name) != server.context.get(name))
        return f"its context has other settings ({', '.join(differing)})"
    return None


def _request_answer(
    server: Server, choice: ModelChoice, options: Options, started: float, given: Mapping[str, Any]
) -> Json:
    """Stream the answer, printing it, and return its JSON document. Raises Declined before anything was printed,
    NotesError for a failed answer."""
    explain, session = given["explain"], given["session"]
    if session is not None:
        sessions = own_sessions()
        if session in sessions.names() and sessions.find(session).state.turns:
            options = of_later_turn(options, session)
    body = _body(options, given)
    printing = AnswerPrinter(options, json=given["json_"], stream=not given["no_stream"])
    before = time.perf_counter() - started
    try:
        with printing as printer, closing(post(server, EXPLAIN if explain else CHAT, body)) as events:
            summary: Json = {}
            for number, event in enumerate(events):
                if not number:
                    for text in choice.notices:
                        output.say(text)
                    if given["verbose"]:
                        output.say(f"answered by the server on {server.url}")
                if explain:
                    summary = event
                    continue
                summary = event.get("notes", summary)
                for delta in (choice["delta"] for choice in event.get("choices", ())):
                    if text := delta.get("reasoning_content"):
                        printer.reasoning(text)
                    if text := delta.get("content"):
                        printer.answer(text)
            if not summary:
                raise Lost("it does not answer as a server of notes does")
            if not explain:
                if summary["reasoning"] is not None:
                    printer.end_reasoning(summary["reasoning"], summary["thought_stopped"], options["think"], None)
                printer.end_answer(summary["answer"], summary["stopped"], None)
    except Lost as why:
        kept = f". See what was kept: notes session show {session}" if session else ""
        raise NotesError(f"the server on {server.url} did not complete the answer: {why}", f"Ask again{kept}") from why
    for notice in summary["notices"]:
        is_warning = notice.startswith(WARNING)
        output.warn(notice.removeprefix(WARNING)) if is_warning else output.say(notice)
    document = {name: value for name, value in summary.items() if name not in ("counts", "notices")}
    document["server"] = server.url
    if "ms" in document:  # with the times of this command
        document["ms"]["load"] = round(document["ms"]["load"] + 1000 * before, 3)
        document["ms"]["total"] = round(1000 * (time.perf_counter() - started), 3)
    return document
