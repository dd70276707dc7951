"""cudaMemcpy from pinned and from pageable memory: the least time that copying rows to a GPU can take."""

from __future__ import annotations

import ctypes
import time

HOST_TO_DEVICE, REPEAT = 1, 5


def memcpy(size: int) -> dict[str, float]:
    """The fastest of several copies of so many bytes to the device in one call; nothing without libcudart or a GPU.
    Raises RuntimeError where CUDA fails."""

    def call(name: str, *arguments: object) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"{name} failed with status {status}")

    def seconds(source: object) -> float:
        started = time.perf_counter()
        call("cudaMemcpy", device, source, ctypes.c_size_t(size), HOST_TO_DEVICE)
        call("cudaDeviceSynchronize")
        return time.perf_counter() - started

    found, device, pinned = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    try:
        cuda = ctypes.CDLL("libcudart.so.13")
    except OSError:  # a dry run
        return {}
    if cuda.cudaGetDeviceCount(ctypes.byref(found)) or not found.value:
        return {}
    call("cudaMalloc", ctypes.byref(device), ctypes.c_size_t(size))
    call("cudaMallocHost", ctypes.byref(pinned), ctypes.c_size_t(size))
    pageable = ctypes.create_string_buffer(b"\1" * size, size)
    ctypes.memset(pinned, 1, size)
    sources = {"memcpy_pinned": pinned, "memcpy_pageable": ctypes.cast(pageable, ctypes.c_void_p)}
    times = {name: min(seconds(source) for _ in range(REPEAT)) for name, source in sources.items()}
    call("cudaFree", device)
    call("cudaFreeHost", pinned)
    return times
