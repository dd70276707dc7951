"""The servers of one user that run: a small file each, by which other processes of that user find them.

A file is held (a lock of the system) for as long as its server runs, so that one which was left by a server that was
killed is known, whoever listens on its port by then. It is readable for its user alone: it has the server's token.
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
    """A server that runs, and what its answers depend on."""

    url: str  # on this machine
    token: str  # lets processes of its user in
    files: list[list[int]]  # stamps of the model's (engine/source.py), as they were when it was loaded
    context: dict[str, Any]  # how contexts are made
    folders: list[str]  # library, sessions, profiles
    pid: int
    machine: str = field(default_factory=socket.gethostname)
    version: str = __version__
    protocol: int = PROTOCOL


def address(host: str, port: int) -> str | None:
    """Where a server that listens there is found from this machine itself; None where that may not be."""
    near = LOCAL.get(host, host if _is_loopback(host) else None)
    return f"http://{near}:{port}" if near else None


def _is_loopback(host: str) -> bool:
    """Whether it is one of IPv4's loopback addresses, 127.0.0.0/8."""
    try:
        return socket.inet_pton(socket.AF_INET, host)[0] == 127
    except OSError:
        return False


@contextmanager
def registered(folder: Path, server: Server) -> Iterator[None]:
    """Have others find a server until the block is left. Raise OSError, NotesError for a folder that is not ours.

    Where the system has no locks nobody could tell that it still runs, and it is not found.
    """
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
        lock_shared(file)  # before it is found
        file.write(json.dumps(asdict(server)).encode())
        file.flush()
        temporary.replace(path)
        try:
            yield
        finally:
            with suppress(OSError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # not that of a later one
                    path.unlink()


def running(folder: Path) -> list[Server]:
    """The servers of this user that run on this machine, the latest first. What others left is removed. Raise
    NotesError for a folder that is not ours, OSError."""
    check_private(folder)
    found: list[tuple[float, Server]] = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
            status = path.lstat()
            server = _read(path, status)
            if server is None or server.machine != socket.gethostname():
                continue
            if is_unused(path):
                remove_unused(path, sure=True)
            elif (server.version, server.protocol) == (__version__, PROTOCOL):
                found.append((status.st_mtime, server))
    return [server for _, server in sorted(found, key=lambda one: -one[0])]


def _read(path: Path, status: os.stat_result) -> Server | None:
    """None for a file that is another user's, or that others may read or write."""
    if not stat.S_ISREG(status.st_mode) or status.st_mode & OTHERS:
        return None
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return None
    data: Mapping[str, Any] = json.loads(path.read_bytes())
    server = Server(**{one.name: data[one.name] for one in fields(Server)})
    return server if str(server.url).startswith("http://") else None
