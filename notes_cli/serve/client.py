"""Registers a user's running servers, finds them from other processes, and sends one of them a request.

A server has a small file, and locks it while it runs, so that a file left by a killed server is recognised even if its
port is in use again. Only the user can read it, as it has the server's token. Everything here uses the standard library
alone, so that `notes ask --server` starts fast.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from notes_cli import __version__
from notes_cli.library.safe_files import (
    LOCKS,
    OTHERS,
    check_private,
    is_unused,
    lock_shared,
    make_private,
    remove_unused,
)

PROTOCOL = 3  # of a registered server's file, and of the requests that `notes ask` sends
LOCAL = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::1": "[::1]", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, with the model and the settings that its answers depend on."""

    url: str  # on this machine
    token: str  # a key for processes of its user
    files: list[list[int]]  # stamps of the model's files (engine/header.py) when it was loaded
    context: dict[str, Any]  # parameters of its contexts
    folders: list[str]  # library, sessions, config.yaml
    pid: int
    machine: str = field(default_factory=socket.gethostname)
    version: str = __version__
    protocol: int = PROTOCOL


def address(host: str, port: int) -> str | None:
    """Return the URL of a listening server from this machine; None if it does not listen on loopback."""
    from notes_cli.serve.refusals import is_loopback

    local = LOCAL.get(host, host if is_loopback(host) else None)
    return f"http://{local}:{port}" if local else None


@contextmanager
def registered(folder: Path, server: Server) -> Iterator[None]:
    """Register a server for the duration of a block, except where the system has no file locks. Raises OSError, and
    NotesError for a folder that is not ours."""
    if not LOCKS:
        yield
        return
    make_private(folder)
    check_private(folder)
    path = folder / f"{server.url.rpartition(':')[2]}-{server.pid}.json"  # several addresses may share a port
    temporary = folder / f".{path.name}.tmp"
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w+b") as file:
        lock_shared(file)  # before it gets its name
        file.write(json.dumps(asdict(server)).encode())
        file.flush()
        temporary.replace(path)
        try:
            yield
        finally:
            with suppress(OSError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # not the file of a later server
                    path.unlink()


def running(folder: Path) -> list[Server]:
    """Return the user's servers on this machine, the latest first, and remove files of servers that ended. Raises
    OSError, and NotesError for a folder that is not ours."""
    check_private(folder)
    servers: list[tuple[float, Server]] = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
            status = path.lstat()
            server = _read(path, status)
            if server is None or server.machine != socket.gethostname():
                continue
            if is_unused(path):
                remove_unused(path, sure=True)
            elif (server.version, server.protocol) == (__version__, PROTOCOL):
                servers.append((status.st_mtime, server))
    return [server for _, server in sorted(servers, key=lambda entry: -entry[0])]


def _read(path: Path, status: os.stat_result) -> Server | None:
    """Read a server's file; None if another user owns it, or may read or write it."""
    if not stat.S_ISREG(status.st_mode) or status.st_mode & OTHERS:
        return None
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return None
    data: Mapping[str, Any] = json.loads(path.read_bytes())
    server = Server(**{field.name: data[field.name] for field in fields(Server)})
    return server if str(server.url).startswith("http://") else None


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
    """Yield the events of a stream, or the object of a JSON reply. Raises ConnectionError without [DONE]."""
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
