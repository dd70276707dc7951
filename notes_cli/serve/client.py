"""Sends one POST to a running server of the same user, and yields the events of the reply.

It uses only the standard library, so that `notes ask --server` starts fast.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from notes_cli.serve.registry import Server

CHAT, EXPLAIN = "/v1/chat/completions", "/v1/notes/explain"
BEGIN = 20.0  # seconds until the first byte of a reply; the server sends a comment after 15
NO_CALLBACKS = 60.0  # seconds without a byte
_UNABLE = {"overloaded_error", "rate_limit_error", "authentication_error", "permission_error", "timeout_error"}

Json = dict[str, Any]


class Declined(Exception):
    """No part of an answer was received. `wrong`: the request is invalid for any server."""

    def __init__(self, why: str, *, wrong: bool = False) -> None:
        super().__init__(why)
        self.wrong = wrong


class Lost(Exception):
    """The stream ended before the answer was complete."""


def post(server: Server, path: str, body: Mapping[str, Any]) -> Generator[Json, None, None]:
    """Yield the events of a stream, or the one object of a JSON reply. Closing the generator cancels the answer. Raises
    Declined before the first event, Lost after it."""
    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=BEGIN)
    started = False
    try:
        for event in _events(_response(connection, server, path, body)):
            if "error" in event:
                raise Lost(event["error"]["message"]) if started else _declined(event)
            yield event
            started = True
    except (OSError, IncompleteRead) as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else "it has ended"
        raise (Lost if started else Declined)(why) from error
    except (HTTPException, ValueError, LookupError, TypeError, RecursionError) as error:
        raise (Lost if started else Declined)("it does not answer as a server of notes does") from error
    finally:
        connection.close()


def _response(connection: HTTPConnection, server: Server, path: str, body: Mapping[str, Any]) -> HTTPResponse:
    connection.connect()
    sock = connection.sock
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.token}"}
    with suppress(BrokenPipeError, ConnectionResetError):  # the server does not read all of a request that is too large
        connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    sock.settimeout(NO_CALLBACKS)
    if response.status != 200:
        raise _declined(json.loads(response.read()))
    return response


def _declined(event: Json) -> Declined:
    error = event["error"]
    unable = error["type"] in _UNABLE or error["code"] in ("no_forms", "too_large", "over_limit")
    return Declined(str(error["message"]), wrong=not unable)


def _events(response: HTTPResponse) -> Iterator[Json]:
    """Yield the events of a stream until [DONE], or the object of a JSON reply. Raises ConnectionError for a stream
    without [DONE]."""
    if response.getheader("Content-Type", "").startswith("application/json"):
        yield json.loads(response.read())
        return
    while line := response.readline():
        if line.strip() == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if not isinstance(event, dict):
                raise ValueError(event)
            yield event
    raise ConnectionError("the stream ends without [DONE]")
