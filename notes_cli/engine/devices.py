"""Lists the compute devices for model layers: local ones and remote ones of llama.cpp's RPC backend."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from notes_cli.engine import native, rpc
from notes_cli.errors import EngineError

MAX_DEVICES = 16  # devices that llama.cpp accepts (GGML_RPC_MAX_SERVERS)
_GPUS = 1, 2  # device kinds: discrete and integrated


@dataclass(frozen=True, slots=True)
class Device:
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
        servers.setdefault(rpc.check(address), address)
    devices = []
    for address in servers.values():
        added = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)(address.encode())
        count = base.ggml_backend_reg_dev_count(added) if added else 0
        devices += [_device(base, base.ggml_backend_reg_dev_get(added, at)) for at in range(count)]
    if not 0 < len(devices) <= MAX_DEVICES:
        raise EngineError(f"{len(devices)} devices at {', '.join(addresses)}: llama.cpp takes 1 to {MAX_DEVICES}")
    return devices


def offloading() -> bool:
    """True if this machine has a GPU, to which all layers go that fit."""
    return any(device.kind in _GPUS for device in local_devices())


def device_handles(addresses: Sequence[str]) -> Any:
    """Return the device list for a model on these servers and local GPUs; None: llama.cpp's choice."""
    if not addresses:
        return None
    remotes = remote_devices(addresses)
    gpus = [device for device in local_devices() if device.kind == _GPUS[0]]
    chosen = remotes + (gpus or [device for device in local_devices() if device.kind in _GPUS])
    return (ctypes.c_void_p * (len(chosen) + 1))(*(device.handle for device in chosen), None)


def _device(base: Any, handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    name, description = base.ggml_backend_dev_name(handle), base.ggml_backend_dev_description(handle)
    kind = base.ggml_backend_dev_type(handle)
    return Device(name.decode(), description.decode(), free.value, total.value, kind, handle)
