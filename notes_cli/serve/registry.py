"""Registers a user's running servers, by one small file each, so that the user's other processes find them.

A server locks its file while it runs, so that a file left by a killed server is recognised even if its port is in use
again. Only the user can read it, as it has the server's token.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

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

PROTOCOL = 3  # of this file, and of the requests that `notes ask` sends (serve/client.py)
LOCAL = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::1": "[::1]", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, with the model and the settings that its answers depend on."""

    url: str  # on this machine
    token: str  # a key for processes of its user
    files: list[list[int]]  # stamps of the model's files (engine/header.py) when it was loaded
    context: dict[str, Any]  # parameters of its contexts
    folders: list[str]  # library, sessions, profiles
    pid: int
    machine: str = field(default_factory=socket.gethostname)
    version: str = __version__
    protocol: int = PROTOCOL


def address(host: str, port: int) -> str | None:
    """Return the URL of a listening server from this machine; None if it does not listen on loopback."""
    from notes_cli.serve.security import is_loopback

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
