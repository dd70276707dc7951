"""One operation of ggml on the CPU, without a model: arrays become tensors, and a graph of one result is computed.

For tests of kernels, and for timing them. The library is the one that notes runs on, or that in NOTES_LIBRARY. Of a
wheel's CPU backends it is the one that NOTES_CPU names (`libggml-cpu-haswell`).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType

import gguf
import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import native

F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30
Array = NDArray[np.float64]


class InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def libraries(stock: Path | None = None) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """libggml-base and a CPU backend, typed as far as they are used. `stock`: llama.cpp's own, in this folder."""
    found = {path.stem: path for path in (stock or native.LIBRARY_PATH.parent).iterdir()}
    ours = ("libnotes-ggml-base", os.environ.get("NOTES_CPU", "libnotes-ggml-cpu"))
    names = ("libggml-base", "libggml-cpu") if stock else ours
    base, cpu = (ctypes.CDLL(str(found[name])) for name in names)
    pointer, number = ctypes.c_void_p, ctypes.c_float
    base.ggml_init.argtypes, base.ggml_init.restype = [InitParams], pointer
    base.ggml_new_tensor_4d.argtypes = [pointer, ctypes.c_int, *4 * [ctypes.c_int64]]
    base.ggml_permute.argtypes = [pointer, pointer, *4 * [ctypes.c_int]]
    base.ggml_mul_mat.argtypes = [*3 * [pointer]]
    base.ggml_soft_max_ext.argtypes = [*3 * [pointer], *2 * [number]]
    base.ggml_flash_attn_ext.argtypes = [*5 * [pointer], *3 * [number]]
    base.ggml_flash_attn_ext_add_sinks.argtypes = [pointer, pointer]
    base.ggml_flash_attn_ext_add_sinks.restype = None
    base.ggml_get_data.argtypes, base.ggml_free.argtypes = [pointer], [pointer]
    base.ggml_new_graph.argtypes, base.ggml_build_forward_expand.argtypes = [pointer], [pointer, pointer]
    for name in ("new_tensor_4d", "permute", "mul_mat", "soft_max_ext", "flash_attn_ext", "get_data", "new_graph"):
        getattr(base, f"ggml_{name}").restype = pointer
    cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]
    cpu.ggml_cpu_init()
    return base, cpu


def stored(array: Array, kind: int) -> NDArray[np.generic]:
    """Numbers as a tensor of this type has them."""
    return gguf.quants.quantize(np.ascontiguousarray(array, np.float32), gguf.GGMLQuantizationType(kind))


def rounded(array: Array, kind: int) -> Array:
    """Numbers that a tensor of this type holds exactly."""
    return gguf.quants.dequantize(stored(array, kind), gguf.GGMLQuantizationType(kind)).astype(np.float64)


class Operation:
    """Memory for tensors, freed when the `with` ends. Shapes are NumPy's: the last axis lies in a row."""

    def __init__(self, room: int = 64 << 20, stock: Path | None = None) -> None:
        self.base, self.cpu = libraries(stock)
        self.context = self.base.ggml_init(InitParams(room, None, False))

    def __enter__(self) -> Operation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.base.ggml_free(self.context)

    def put(self, array: Array, kind: int, *, permuted: bool = False) -> int:
        """A tensor of four axes; `permuted`: its second and third are the other way round in memory."""
        array = array.transpose(0, 2, 1, 3) if permuted else array
        tensor = self.put_bytes(stored(array, kind), kind, array.shape)
        return int(self.base.ggml_permute(self.context, tensor, 0, 2, 1, 3) if permuted else tensor)

    def put_bytes(self, data: NDArray[np.generic], kind: int, shape: tuple[int, ...]) -> int:
        """A tensor of four axes that has these bytes."""
        data = np.ascontiguousarray(data)
        tensor = self.base.ggml_new_tensor_4d(self.context, kind, *shape[::-1])
        ctypes.memmove(self.base.ggml_get_data(tensor), data.ctypes.data, data.nbytes)
        return int(tensor)

    def compute(self, out: int, shape: tuple[int, ...], threads: int) -> NDArray[np.float32]:
        """The numbers (F32) of a tensor."""
        self.seconds(out, threads)
        data = (ctypes.c_float * int(np.prod(shape))).from_address(self.base.ggml_get_data(out))
        return np.array(data, np.float32).reshape(shape)

    def seconds(self, out: int, threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return the seconds to compute a tensor."""
        graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(graph, out)
        started = clock()
        assert self.cpu.ggml_graph_compute_with_ctx(self.context, graph, threads) == 0
        return clock() - started
