"""What notes runs on: the native library and its versions, devices, CPU features. For bug reports."""

from __future__ import annotations

import ctypes
from pathlib import Path

from notes_cli.engine import native


def library() -> Path:
    """The file of the native library."""
    return native.LIBRARY_PATH


def versions() -> dict[str, str]:
    """Of the interface of the native library, and of the llama-cpp-python that it and its binding are taken from."""
    return {"interface": str(native.ABI_VERSION), "built from": native.UPSTREAM}


def build() -> str:
    """Changes whenever the native library does: what was measured of it holds no longer."""
    return f"{native.UPSTREAM} {native.LIBRARY_PATH.stat().st_mtime_ns}"


def features() -> str:
    """Of the CPU and the backends, as llama.cpp lists them."""
    return str(native.llama.llama_print_system_info().decode().strip(" |"))


def devices() -> list[str]:
    """The backends' devices, as "name: description (free of total MiB)"."""
    base = ctypes.CDLL(str(next(native.LIBRARY_PATH.parent.glob("*ggml-base.*"))))
    base.ggml_backend_dev_name.restype = base.ggml_backend_dev_description.restype = ctypes.c_char_p
    registry = native.ggml
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.argtypes, registry.ggml_backend_dev_get.restype = [ctypes.c_size_t], ctypes.c_void_p
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    found = []
    for index in range(registry.ggml_backend_dev_count()):
        device = ctypes.c_void_p(registry.ggml_backend_dev_get(index))
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name, description = (
            f(device).decode() for f in (base.ggml_backend_dev_name, base.ggml_backend_dev_description)
        )
        found.append(f"{name}: {description} ({free.value >> 20} of {total.value >> 20} MiB free)")
    return found
