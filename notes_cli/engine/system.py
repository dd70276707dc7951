"""What notes runs on: the native library and its versions, devices, CPU features. For bug reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from notes_cli.engine import devices, native


def library() -> Path:
    """The file of the native library."""
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
    """Changes whenever the native library does: what was measured of it holds no longer."""
    return f"{native.UPSTREAM} {native.LIBRARY_PATH.stat().st_mtime_ns}"


def features() -> str:
    """Of the CPU and the backends, as llama.cpp lists them."""
    return str(native.llama.llama_print_system_info().decode().strip(" |"))


def available(servers: Sequence[str] = ()) -> list[str]:
    """The backends' devices, also those of these RPC servers, as "name: description (free of total MiB)"."""
    return [str(device) for device in (*devices.remote_devices(servers), *devices.local_devices())]
