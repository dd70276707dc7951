"""The devices that layers can be on: those of this machine, and those of others, by llama.cpp's RPC backend."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from notes_cli.engine import native, rpc
from notes_cli.errors import EngineError

MAX_DEVICES = 16  # devices that llama.cpp takes (GGML_RPC_MAX_SERVERS)
_GPUS = 1, 2  # kinds of devices: with memory of its own, with this machine's


@dataclass(frozen=True, slots=True)
class Device:
    """What llama.cpp computes on."""

    name: str
    description: str  # of another machine's: its address
    free: int  # bytes
    total: int
    kind: int
    handle: int

    def __str__(self) -> str:
        return f"{self.name}: {self.description} ({self.free >> 20} of {self.total >> 20} MiB free)"


def _bound() -> tuple[Any, Any]:
    """The registry of the backends, and what asks a device."""
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
    """Those of this machine."""
    registry, base = _bound()
    return [_device(base, registry.ggml_backend_dev_get(at)) for at in range(registry.ggml_backend_dev_count())]


def remote_devices(addresses: Sequence[str]) -> list[Device]:
    """Those of other machines, by the addresses of their servers, "host:port".

    Raise EngineError, naming the server, for one that is no address, does not answer, or speaks another version.
    """
    if not addresses:
        return []
    registry, base = _bound()
    backend = registry.ggml_backend_reg_by_name(b"RPC")
    add = base.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server") if backend else None
    if not add:
        raise EngineError("the native library has been built without llama.cpp's RPC backend (GGML_RPC)")
    there: dict[tuple[str, int], str] = {}  # one with two names is one: it takes one client at a time
    for one in dict.fromkeys(addresses):
        there.setdefault(rpc.check(one), one)
    found = []
    for one in there.values():
        added = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)(one.encode())
        count = base.ggml_backend_reg_dev_count(added) if added else 0
        found += [_device(base, base.ggml_backend_reg_dev_get(added, at)) for at in range(count)]
    if not 0 < len(found) <= MAX_DEVICES:
        raise EngineError(f"{len(found)} devices at {', '.join(addresses)}: llama.cpp takes 1 to {MAX_DEVICES}")
    return found


def offloading() -> bool:
    """Whether this machine has devices with memory of their own, to which all layers go that fit."""
    return any(device.kind in _GPUS for device in local_devices())


def device_handles(addresses: Sequence[str]) -> Any:
    """What llama.cpp wants for a model on these servers and on the GPUs of this machine; None: its own choice."""
    if not addresses:
        return None
    others = remote_devices(addresses)
    gpus = [device for device in local_devices() if device.kind == _GPUS[0]]
    chosen = others + (gpus or [device for device in local_devices() if device.kind in _GPUS])
    return (ctypes.c_void_p * (len(chosen) + 1))(*(device.handle for device in chosen), None)


def _device(base: Any, handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    name, description = base.ggml_backend_dev_name(handle), base.ggml_backend_dev_description(handle)
    kind = base.ggml_backend_dev_type(handle)
    return Device(name.decode(), description.decode(), free.value, total.value, kind, handle)
