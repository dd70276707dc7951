"""Asking a server of the same user, as `notes ask` does: a connection, and the events that come of it.

The standard library's client alone: what is to be quick must load little.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from notes_cli.serve.registry import ASK, Server

BEGIN = 10.0  # seconds until it has taken the request: one that was stopped (Ctrl-Z) is connected to all the same
SILENT = 60.0  # seconds without a word, of which the server sends some every 15


class Declined(Exception):
    """The server does not answer this, and has begun nothing: why."""


class Lost(Exception):
    """The server has gone, or says nothing any more, after it had begun."""


def ask(server: Server, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what it tells, the first of which is `accepted`, or an `error` of what was asked. Closing this ends the
    answer. Raise Declined before the first, Lost after it."""
    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=BEGIN)
    begun = False
    try:
        for told in _events(_response(connection, server, asked)):
            if "declined" in told:
                raise Lost(told["declined"]) if begun else Declined(told["declined"])
            yield told
            begun = True
            if told.keys() & {"document", "begun", "error"}:
                return
        raise ConnectionError
    except (OSError, IncompleteRead) as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else "it has ended"
        raise (Lost if begun else Declined)(why) from error
    except (HTTPException, ValueError, LookupError, TypeError, RecursionError) as error:
        raise (Lost if begun else Declined)("it does not answer as a server of notes does") from error
    finally:
        connection.close()


def _response(connection: HTTPConnection, server: Server, asked: Mapping[str, Any]) -> HTTPResponse:
    connection.connect()
    sock = connection.sock
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.token}"}
    with suppress(BrokenPipeError, ConnectionResetError):  # of a request that is too large, it answers half of it
        connection.request("POST", ASK, json.dumps(asked), headers)
    response = connection.getresponse()
    sock.settimeout(SILENT)
    if response.status != 200:
        raise Declined(str(json.loads(response.read())["error"]["message"]))
    return response


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: "):
            told = json.loads(line[6:])
            if not isinstance(told, dict):
                raise ValueError(told)
            yield told
