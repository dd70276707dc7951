"""A client of a running server of the same user: one POST, and the events of the reply.

It uses the standard library alone, so that `notes ask --server` imports little.
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
BEGIN = 20.0  # seconds until the first byte of a reply, of which the server sends some after 15
NO_CALLBACKS = 60.0  # seconds without a byte
_UNABLE = {"overloaded_error", "rate_limit_error", "authentication_error", "permission_error", "timeout_error"}

Json = dict[str, Any]


class Declined(Exception):
    """The server does not answer this request, and nothing of an answer has come: why. `wrong`: the request cannot be
    answered by anybody."""

    def __init__(self, why: str, *, wrong: bool = False) -> None:
        super().__init__(why)
        self.wrong = wrong


class Lost(Exception):
    """The answer ends before it is complete: why."""


def post(server: Server, path: str, body: Mapping[str, Any]) -> Generator[Json, None, None]:
    """Yield the events of a reply, or a reply that is no stream. Closing this ends the answer. Raise Declined before
    the first, Lost after it."""
    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=BEGIN)
    begun = False
    try:
        for event in _events(_response(connection, server, path, body)):
            if "error" in event:
                raise Lost(event["error"]["message"]) if begun else _declined(event)
            yield event
            begun = True
    except (OSError, IncompleteRead) as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else "it has ended"
        raise (Lost if begun else Declined)(why) from error
    except (HTTPException, ValueError, LookupError, TypeError, RecursionError) as error:
        raise (Lost if begun else Declined)("it does not answer as a server of notes does") from error
    finally:
        connection.close()


def _response(connection: HTTPConnection, server: Server, path: str, body: Mapping[str, Any]) -> HTTPResponse:
    connection.connect()
    sock = connection.sock
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.token}"}
    with suppress(BrokenPipeError, ConnectionResetError):  # of a request that is too large, it reads only a part
        connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    sock.settimeout(NO_CALLBACKS)
    if response.status != 200:
        raise _declined(json.loads(response.read()))
    return response


def _declined(event: Json) -> Declined:
    """An error of OpenAI's API."""
    error = event["error"]
    unable = error["type"] in _UNABLE or error["code"] in ("no_forms", "too_large", "over_limit")
    return Declined(str(error["message"]), wrong=not unable)


def _events(response: HTTPResponse) -> Iterator[Json]:
    """The events of a stream until [DONE], or the one object of a reply in JSON. Raise ConnectionError where the stream
    ends before."""
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
