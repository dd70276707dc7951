"""Checks servers of llama.cpp's RPC backend (ggml-rpc-server) before llama.cpp connects to them.

llama.cpp aborts where no server answers, and waits forever for one that is busy with another client.
"""

from __future__ import annotations

import re
import struct
import sys
from typing import TYPE_CHECKING

from notes_cli.errors import EngineError

if TYPE_CHECKING:
    import socket

PATIENCE = 10.0  # seconds that a server has to answer
PROTOCOL = 7, 0  # of ggml-rpc.h: the major version must be equal, the minor at most this
_ADDRESS = re.compile(r"([^\s:,/\[\]]+):([0-9]{1,5})")
# Close with a reset: a server that gets to us after we have left would be ended by SIGPIPE.
_RESET = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
_HELLO, _CAPABILITIES = 14, 24  # a command, and the size of its capabilities, all zero: TCP only


def address(server: str) -> tuple[str, int]:
    """Parse "host:port". Raises EngineError for anything else."""
    match = _ADDRESS.fullmatch(server)
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise EngineError(f"{server!r} is no address of an RPC server: a host, or its IPv4 number, a colon and a port")
    return match[1], int(match[2])


def check(server: str) -> tuple[str, int]:
    """Return the IPv4 address and port of a server. Raises EngineError unless it completes llama.cpp's handshake."""
    import socket  # takes 3 ms

    host, port = address(server)
    try:
        target = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][
            4
        ]  # llama.cpp supports IPv4 only
        with socket.create_connection((str(target[0]), port), PATIENCE) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.sendall(struct.pack("<BQ", _HELLO, _CAPABILITIES) + bytes(_CAPABILITIES))
            answer = _receive(connection, 8 + 4 + _CAPABILITIES)
    except TimeoutError as error:
        raise EngineError(
            f"the RPC server {server} does not answer within {PATIENCE:g} seconds. It serves one client at a time: "
            "perhaps it has another one"
        ) from error
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise EngineError(f"the RPC server {server} cannot be reached ({why})") from error
    size, *version = struct.unpack("<Q3B", answer[:11].ljust(11, b"\0"))
    if len(answer) < 12 or size != 4 + _CAPABILITIES:
        raise EngineError(f"what answers at {server} is no RPC server of llama.cpp, or one of a much older version")
    if version[0] != PROTOCOL[0] or version[1] > PROTOCOL[1]:
        theirs, ours = (".".join(map(str, numbers)) for numbers in (version, (*PROTOCOL, 0)))
        raise EngineError(
            f"the RPC server {server} speaks version {theirs} of the protocol, notes {ours}: build the server from the "
            "llama.cpp that notes is built from"
        )
    return str(target[0]), port


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes, or fewer at the end of the stream."""
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data
