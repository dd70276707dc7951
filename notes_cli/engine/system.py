"""Reports versions, devices and CPU features of the native library, for bug reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from notes_cli.engine import devices, native


def library() -> Path:
    return native.LIBRARY_PATH


def versions() -> dict[str, str]:
    """Of the interface of the native library, and of the llama-cpp-python that it and its binding are taken from; and
    the groups of patches (native/patches) that it has."""
    return {
        "interface": str(native.ABI_VERSION),
        "built from": native.UPSTREAM,
        "patches": ", ".join(native.PATCHES),
    }


def build() -> str:
    """Return a string that changes with the native library, to invalidate measurements."""
    return f"{native.UPSTREAM} {native.LIBRARY_PATH.stat().st_mtime_ns}"


def features() -> str:
    """Return the CPU and backend features that llama.cpp lists."""
    return str(native.llama.llama_print_system_info().decode().strip(" |"))


def available(servers: Sequence[str] = ()) -> list[str]:
    """Return the devices of the backends and of these RPC servers, as "name: description (free of total MiB)"."""
    return [str(device) for device in (*devices.remote_devices(servers), *devices.local_devices())]
