"""Describes the native library and its compute devices: versions, local devices and those of llama.cpp's RPC servers.

llama.cpp aborts where no RPC server answers, and waits forever for one that is busy with another client: servers are
checked before it connects.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from notes_cli.errors import EngineError

MAX_DEVICES = 16  # devices that llama.cpp accepts (GGML_RPC_MAX_SERVERS)
GPUS = 1, 2  # device kinds: discrete and integrated


class Device(NamedTuple):
    """A compute device of llama.cpp."""

    name: str
    description: str  # the address of a remote one
    free: int  # bytes
    total: int
    kind: int
    handle: int

    def __str__(self) -> str:
        return f"{self.name}: {self.description} ({self.free >> 20} of {self.total >> 20} MiB free)"


def _bound() -> tuple[Any, Any]:
    """Return the backend registry and the library with the device functions, their signatures set."""
    from notes_cli.engine import native  # in functions: to ask a server takes no llama.cpp

    registry = native.ggml
    base = ctypes.CDLL(str(next(native.LIBRARY_PATH.parent.glob("*notes-ggml-base.*"))))
    sizes = ctypes.POINTER(ctypes.c_size_t)
    for library, name, result, arguments in (
        (registry, "ggml_backend_dev_count", ctypes.c_size_t, []),
        (registry, "ggml_backend_dev_get", ctypes.c_void_p, [ctypes.c_size_t]),
        (registry, "ggml_backend_reg_by_name", ctypes.c_void_p, [ctypes.c_char_p]),
        (base, "ggml_backend_reg_dev_count", ctypes.c_size_t, [ctypes.c_void_p]),
        (base, "ggml_backend_reg_dev_get", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
        (base, "ggml_backend_reg_get_proc_address", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
        (base, "ggml_backend_dev_name", ctypes.c_char_p, [ctypes.c_void_p]),
        (base, "ggml_backend_dev_description", ctypes.c_char_p, [ctypes.c_void_p]),
        (base, "ggml_backend_dev_type", ctypes.c_int, [ctypes.c_void_p]),
        (base, "ggml_backend_dev_memory", None, [ctypes.c_void_p, sizes, sizes]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return registry, base


def local_devices() -> list[Device]:
    """Return the devices of this machine."""
    registry, base = _bound()
    return [_device(base, registry.ggml_backend_dev_get(at)) for at in range(registry.ggml_backend_dev_count())]


def remote_devices(addresses: Sequence[str]) -> list[Device]:
    """Return the devices of RPC servers at "host:port". Raises EngineError, with the address, for one that is
    malformed, does not answer, or has another version."""
    if not addresses:
        return []
    registry, base = _bound()
    backend = registry.ggml_backend_reg_by_name(b"RPC")
    add = base.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server") if backend else None
    if not add:
        raise EngineError("the native library has been built without llama.cpp's RPC backend (GGML_RPC)")
    servers: dict[tuple[str, int], str] = {}  # a server with two names counts once: it accepts one client at a time
    for address in dict.fromkeys(addresses):
        servers.setdefault(check_server(address), address)
    devices = []
    for address in servers.values():
        added = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)(address.encode())
        count = base.ggml_backend_reg_dev_count(added) if added else 0
        devices += [_device(base, base.ggml_backend_reg_dev_get(added, at)) for at in range(count)]
    if not 0 < len(devices) <= MAX_DEVICES:
        raise EngineError(f"{len(devices)} devices at {', '.join(addresses)}: llama.cpp takes 1 to {MAX_DEVICES}")
    return devices


def device_handles(addresses: Sequence[str]) -> Any:
    """Return the device list for a model on these servers and local GPUs; None: llama.cpp's choice."""
    if not addresses:
        return None
    remotes = remote_devices(addresses)
    gpus = [device for device in local_devices() if device.kind == GPUS[0]]
    chosen = remotes + (gpus or [device for device in local_devices() if device.kind in GPUS])
    return (ctypes.c_void_p * (len(chosen) + 1))(*(device.handle for device in chosen), None)


def _device(base: Any, handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    name, description = base.ggml_backend_dev_name(handle), base.ggml_backend_dev_description(handle)
    kind = base.ggml_backend_dev_type(handle)
    return Device(name.decode(), description.decode(), free.value, total.value, kind, handle)


# RPC servers.

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


def check_server(server: str) -> tuple[str, int]:
    """Return the IPv4 address and port of a server. Raises EngineError unless it completes llama.cpp's handshake."""
    import socket  # takes 3 ms

    host, port = address(server)
    try:
        # llama.cpp supports IPv4 only
        target = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.create_connection((str(target[0]), port), PATIENCE) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.sendall(struct.pack("<BQ", _HELLO, _CAPABILITIES) + bytes(_CAPABILITIES))
            answer, size = b"", 8 + 4 + _CAPABILITIES
            while len(answer) < size and (part := connection.recv(size - len(answer))):
                answer += part
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


# The native library.


def library() -> Path:
    from notes_cli.engine import native

    return native.LIBRARY_PATH


def versions() -> dict[str, str]:
    """Of the interface of the native library, and of the llama-cpp-python that it and its binding are taken from; and
    the groups of patches (native/patches) that it has."""
    from notes_cli.engine import native

    return {
        "interface": str(native.ABI_VERSION),
        "built from": native.UPSTREAM,
        "patches": ", ".join(native.PATCHES),
    }


def build() -> str:
    """Return a string that changes with the native library, to invalidate measurements."""
    from notes_cli.engine import native

    return f"{native.UPSTREAM} {native.LIBRARY_PATH.stat().st_mtime_ns}"


def features() -> str:
    """Return the CPU and backend features that llama.cpp lists."""
    from notes_cli.engine import native

    return str(native.llama.llama_print_system_info().decode().strip(" |"))


def available(servers: Sequence[str] = ()) -> list[str]:
    """Return the devices of the backends and of these RPC servers, as "name: description (free of total MiB)"."""
    return [str(device) for device in (*remote_devices(servers), *local_devices())]
