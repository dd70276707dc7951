"""`notes ask --server`: answered by a `notes serve` of the same user, which has the model at hand.

What is printed is what this process would print. Where no server can answer the same, this process does.
"""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from notes_cli import config, output
from notes_cli.commands.options import AUTO, Chosen, choose_model
from notes_cli.commands.remedies import tell
from notes_cli.commands.request import Call, Voices, watch
from notes_cli.engine.source import parts, stamp
from notes_cli.errors import NotesError, reason
from notes_cli.explaining import Room
from notes_cli.images import MAX_BYTES
from notes_cli.library.segment_files import segment_files, skill_named
from notes_cli.serve import wire
from notes_cli.serve.client import Declined, Lost, ask
from notes_cli.serve.registry import LOCAL, Server, running

if TYPE_CHECKING:
    from notes_cli.runtime.requests import RequestFields

HERE = "Leave it to this process: --server off"


def ask_server(call: Call, started: float, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The document of what a server answers, or would do; None where this process has to, with --server auto. Raise
    NotesError for what the answer fails by, and where the server that was named cannot answer this."""
    named = given["server"] != AUTO
    try:
        server, chosen = _find(call, given)
        return _answered(server, chosen, call, started, given)
    except Declined as why:
        if named:
            raise refusal(given["server"], str(why)) from why
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


def _named(words: RequestFields | None) -> RequestFields | None:
    """The same, with skills of the library by their names. Raise Declined for a file: what is read
    here is not there."""
    if words is not None and words["results"]:
        raise Declined("it does not take results of tools")
    if words is None or not words["splice"]:
        return words
    known = {name for name, _ in segment_files(config.paths().library)}
    found = {}
    for word in words["splice"]:
        name = skill_named(word, known)
        if name is None:
            raise Declined(f"{word} is no compiled skill")
        found[word] = name
    decode = [found.get(word, word) for word in words["decode"]]  # told apart by the same names
    return {**words, "splice": [found[word] for word in words["splice"]], "decode": decode}


def _sent(words: RequestFields) -> list[dict[str, str]]:
    """The images of a question: those of the library by their names, others with their bytes. Raise Declined for what
    cannot be sent."""
    if not words["images"]:
        return []
    known = {name for name, _ in segment_files(config.paths().library)}
    found = []
    for word in words["images"]:
        name = skill_named(word, known)
        path = Path(os.path.abspath(os.path.expanduser(word)))
        if name is not None:
            found.append({"name": name})
            continue
        if not path.is_file() or path.suffix.lower() == ".gguf":
            raise Declined(f"{word} is no file of an image")
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise Declined(f"{word}: {reason(error)}") from error
        if len(data) > MAX_BYTES:
            raise Declined(f"{word} is larger than {MAX_BYTES >> 20} MiB")
        found.append({"word": word, "path": str(path), "data": b64encode(data).decode()})
    return found


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


def _answered(server: Server, chosen: Chosen, call: Call, started: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """What it answers. Raise Declined before anything was said, NotesError."""
    images = _sent(call.words)
    words, following = _named({**call.words, "images": ()}), _named(call.following and {**call.following, "images": ()})
    asked: dict[str, Any] = {"words": words, "following": following, "session": call.session, "explain": call.explain}
    asked |= {"images": images} if images else {}
    before = time.perf_counter() - started
    with Voices(call) as voices, ExitStack() as stack, closing(ask(server, asked)) as events:  # type: ignore[type-var]
        update = None
        try:
            for event in events:
                room = Room(*event["room"]) if "room" in event else Room(0, None)
                if "accepted" in event:
                    for text in chosen.told:
                        output.say(text)
                    if given["verbose"]:
                        output.say(f"answered by the server on {server.url}")
                elif "notice" in event:
                    tell(wire.notice(event["notice"], chosen.path))
                elif "reading" in event:
                    done, of = event["reading"]
                    update = update or stack.enter_context(watch("reading the prompt", of, hidden=call.json))
                    update(done, of)
                elif "thought" in event:
                    voices.thought(event["thought"])
                elif "thought_ended" in event:
                    voices.thought_ended(**event["thought_ended"], room=room)
                elif "answer" in event:
                    voices.answer(event["answer"])
                elif "answered" in event:
                    voices.answered(**event["answered"], room=room)
                elif "error" in event:
                    raise wire.error(event["error"], chosen.path)
                elif "begun" in event:
                    raise call.begun()
                elif "document" in event:
                    return _document(event["document"], server, before, started)
        except Lost as why:
            kept = f". See what was kept: notes session show {call.session}" if call.session else ""
            raise NotesError(
                f"the server on {server.url} did not complete the answer: {why}", f"Ask again{kept}"
            ) from why
    raise AssertionError("a server's last word is one of these")


def _document(found: dict[str, Any], server: Server, before: float, started: float) -> dict[str, Any]:
    """The document with where it comes from, and the times of this command. `before`: seconds until it was sent."""
    found["server"] = server.url
    if "ms" in found:
        found["ms"]["load"] = round(found["ms"]["load"] + 1000 * before, 3)
        found["ms"]["total"] = round(1000 * (time.perf_counter() - started), 3)
    return found
