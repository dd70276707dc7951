"""cudaMemcpy from pinned and from pageable memory: the least time that copying rows to a GPU can take."""

from __future__ import annotations

import ctypes
import time

HOST_TO_DEVICE = 1


class Copies:
    """Buffers of `size` bytes on both sides. Raise OSError without libcudart or a GPU, RuntimeError where
    CUDA fails."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cuda = ctypes.CDLL("libcudart.so.13")
        found = ctypes.c_int()
        if self.cuda.cudaGetDeviceCount(ctypes.byref(found)) or not found.value:
            raise OSError("no CUDA device")
        self.device, self.pinned = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(self.device), ctypes.c_size_t(size))
        self._call("cudaMallocHost", ctypes.byref(self.pinned), ctypes.c_size_t(size))
        self.pageable = ctypes.create_string_buffer(b"\1" * size, size)
        ctypes.memset(self.pinned, 1, size)

    def seconds(self, *, pinned: bool, repeat: int = 5) -> float:
        """The fastest of several copies of all bytes in one call."""
        source = self.pinned if pinned else ctypes.cast(self.pageable, ctypes.c_void_p)
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            self._call("cudaMemcpy", self.device, source, ctypes.c_size_t(self.size), HOST_TO_DEVICE)
            self._call("cudaDeviceSynchronize")
            times.append(time.perf_counter() - start)
        return min(times)

    def close(self) -> None:
        self._call("cudaFree", self.device)
        self._call("cudaFreeHost", self.pinned)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")
