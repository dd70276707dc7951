"""`notes ask --server`: the question as a request to a running `notes serve` of the same user (docs/serving.md).

The server has the prompt, the tokens and the sampler of this process. One that would answer otherwise is declined.
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
from notes_cli.commands.options import AUTO, Chosen, choose_model
from notes_cli.commands.request import Call, Options, Voices
from notes_cli.engine.source import parts, stamp
from notes_cli.errors import NotesError, reason
from notes_cli.images import MAX_BYTES
from notes_cli.library.segment_files import segment_files, skill_named
from notes_cli.serve.client import CHAT, EXPLAIN, Declined, Json, Lost, post
from notes_cli.serve.registry import LOCAL, Server, running

HERE = "Leave it to this process: --server off"


def ask_server(call: Call, started: float, given: Mapping[str, Any]) -> Json | None:
    """The document of what a server answers, or would do; None where this process has to, with --server auto. Raise
    NotesError for what the answer fails by, and where the server that was named cannot answer this."""
    named = given["server"] != AUTO
    try:
        server, chosen = _find(call, given)
        return _answered(server, chosen, call, started, given["verbose"])
    except Declined as why:
        if named:
            raise NotesError(str(why)) if why.wrong else refusal(given["server"], str(why)) from why
        if given["verbose"]:
            output.say(f"no server answers this: {why}")
    return None


def refusal(server: str, why: str) -> NotesError:
    """What people are told where a server that they name cannot answer."""
    return NotesError(f"{server} cannot answer this: {why}", HERE)


def folders() -> list[str]:
    """Where what answers depend on is kept."""
    paths = config.paths()
    return [os.path.realpath(folder) for folder in (paths.library, paths.sessions, paths.profiles)]


def _find(call: Call, given: Mapping[str, Any]) -> tuple[Server, Chosen]:
    """A server that would answer as this process does, and the model that is meant. Raise Declined where there is none;
    NotesError, with a server that is named, for a model that there is not."""
    which = given["server"]
    try:
        found = [one for one in running(config.paths().servers) if which == AUTO or _is_at(one, which)]
    except (NotesError, OSError) as error:
        raise Declined(error.what if isinstance(error, NotesError) else reason(error)) from error
    if not found:
        raise Declined("none is running" if which == AUTO else "no notes serve of this user is running there")
    try:
        chosen = choose_model(quiet=call.json, begins=True, **given)
    except (NotesError, click.UsageError) as error:
        if which != AUTO:
            raise
        raise Declined("there is no such model or session") from error  # which this process says as ever
    why = [_difference(one, chosen) for one in found]
    fitting = [one for one, difference in zip(found, why, strict=True) if difference is None]
    if not fitting:
        raise Declined(str(why[0]))
    return fitting[0], chosen


def _is_at(server: Server, url: str) -> bool:
    """Whether a server is the one of an address; those of this machine have several."""
    try:
        here, there = urlsplit(server.url), urlsplit(url)
        return here.port == there.port and there.scheme == "http" and there.hostname in LOCAL
    except ValueError:
        return False


def _goes_on(call: Call) -> bool:
    """Whether the call is another turn of a session that has some."""
    if call.session is None:
        return False
    from notes_cli.sessions.folder import Sessions

    sessions = Sessions(config.paths().sessions)
    return call.session in sessions.names() and bool(sessions.find(call.session).state.live)


# Options that are no keys of `notes` in the API; the others are, by the same names.
_CHAT = {
    "question",
    "results",
    "system",
    "images",
    "think",
    "max_think",
    "max_tokens",
    "sampling",
    "json_schema",
    "grammar",
}


def _body(call: Call, options: Options) -> Json:
    """The request to /v1/chat/completions. Raise Declined for what cannot be sent."""
    if options["results"]:
        raise Declined("--result is answered by this process alone")
    if options["max_tokens"] < 0:
        raise Declined("-n -1 has no limit, and an answer of a server has one")
    named = _skills(options["splice"])
    options = {**options, "splice": [*named.values()], "decode": [named.get(word, word) for word in options["decode"]]}
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
        "stream": not call.explain,
        "max_tokens": options["max_tokens"],
        "max_think": options["max_think"],
        "chat_template_kwargs": {"enable_thinking": options["think"]},
        **options["sampling"],
        **form,
        "notes": {"ask": True, "session": call.session, "explain": True, **others},
    }


def _skills(words: Sequence[str]) -> dict[str, str]:
    """The names of the compiled skills that are meant, by the words of the command line. Raise Declined for a file,
    which the server does not open."""
    known = {name for name, _ in segment_files(config.paths().library)} if words else set()
    found = {}
    for word in words:
        name = skill_named(word, known)
        if name is None:
            raise Declined(f"{word} is no compiled skill")
        found[word] = name
    return found


def _image(word: str) -> Json:
    """A part of a message: the bytes of an image file. Raise Declined for what cannot be sent."""
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


def _difference(server: Server, chosen: Chosen) -> str | None:
    """Why a server would not answer as this process does."""
    try:
        stamps = [_stamp(path) for path in parts(chosen.path)]
    except OSError as error:
        return f"{chosen.path}: {reason(error)}"
    if stamps != server.files:
        return "it has another model"
    if server.folders != folders():
        return "it has another library"
    if chosen.settings != server.context:
        every = {*chosen.settings, *server.context}
        differing = sorted(name for name in every if chosen.settings.get(name) != server.context.get(name))
        return f"its context has other settings ({', '.join(differing)})"
    return None


def _stamp(path: Path) -> list[int]:
    with path.open("rb") as file:
        return list(stamp(file))


def _answered(server: Server, chosen: Chosen, call: Call, started: float, verbose: bool) -> Json:
    """The document of its answer, which is printed as it comes. Raise Declined before anything was printed,
    NotesError."""
    options = call.following if _goes_on(call) else call.options
    if options is None:
        raise call.begun()
    body = _body(call, options)
    before = time.perf_counter() - started
    try:
        with Voices(call) as voices, closing(post(server, EXPLAIN if call.explain else CHAT, body)) as events:
            found: Json = {}
            for number, event in enumerate(events):
                if not number:
                    for text in chosen.told:
                        output.say(text)
                    if verbose:
                        output.say(f"answered by the server on {server.url}")
                if call.explain:
                    found = event
                else:
                    _print(event, voices, options)
                    found = event.get("notes", found)
            if not found:
                raise Lost("it does not answer as a server of notes does")
            if not call.explain:
                _end(found, voices, options)
    except Lost as why:
        kept = f". See what was kept: notes session show {call.session}" if call.session else ""
        raise NotesError(f"the server on {server.url} did not complete the answer: {why}", f"Ask again{kept}") from why
    for notice in found["notices"]:
        output.say(notice)
    return _document(found, server, before, started)


def _print(event: Json, voices: Voices, options: Options) -> None:
    """A chunk of the answer or of the reasoning before it. An answer that was chosen is printed in the end."""
    for choice in event.get("choices", ()):
        delta = choice["delta"]
        if text := delta.get("reasoning_content"):
            voices.thought(text)
        if (text := delta.get("content")) and options["choices"] is None:
            voices.answer(text)


def _end(found: Json, voices: Voices, options: Options) -> None:
    if found["reasoning"] is not None:
        voices.thought_ended(found["reasoning"], found["thought_stopped"], options["think"], None)
    voices.answered(found["answer"], found["stopped"], None)


def _document(found: Json, server: Server, before: float, started: float) -> Json:
    """The document of `notes ask --json`, with the times of this command. `before`: seconds until it was sent."""
    found = {name: value for name, value in found.items() if name not in ("counts", "notices")}
    found["server"] = server.url
    if "ms" in found:
        found["ms"]["load"] = round(found["ms"]["load"] + 1000 * before, 3)
        found["ms"]["total"] = round(1000 * (time.perf_counter() - started), 3)
    return found
