"""Checks and converts the ctypes arguments of the hooks in notes_ext.h: token arrays, K/V rows, ranges of files."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import native
from notes_cli.engine.segment import Q8_0, LayerRows, StoredLayer, StoredTensor, values_per_row
from notes_cli.errors import EngineError

_ROW_TYPES: dict[Any, int] = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, Q8_0: 8}


def int_array(values: Any, what: str) -> NDArray[np.int32]:
    """Convert to a contiguous int32 array. Raises EngineError for values that a C int cannot hold and for more than one
    dimension: hooks take the length for the count."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise EngineError(f"an array of shape {array.shape} was given, expected one line of numbers, each {what}")
    if array.dtype != np.int32:
        for value in (array.min(), array.max()) if array.size else ():
            native.fits(int(value), what)
    return np.ascontiguousarray(array, np.int32)


def check_axes(axes: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return `axes` [count, 3] (time, row, column of each position). Raises EngineError for another shape."""
    if np.shape(axes) != (count, 3):
        raise EngineError(f"positions on three axes of shape {np.shape(axes)} were given, expected {(count, 3)}")
    return axes


def int32_pointer(array: NDArray[np.int32]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


def check_layers(rows_of_layers: Sequence[LayerRows | StoredLayer], layers: Sequence[native.Layer], count: int) -> None:
    """Raise EngineError unless there are `count` rows of each of these layers (one row of a recurrent state): hooks
    trust the shapes that they are given."""
    if len(rows_of_layers) != len(layers):
        raise EngineError(f"rows of {len(rows_of_layers)} layers, the cache has {len(layers)}")
    for rows, layer in zip(rows_of_layers, layers, strict=True):
        count_here = 1 if layer.part == "state" else count
        expected = (count_here, layer.n_embd_k), (count_here, layer.n_embd_v)
        if (rows.layer, rows.part) != (layer.layer, layer.part):
            raise EngineError(f"{rows.part} rows of layer {rows.layer} given, expected {layer.part} of {layer.layer}")
        for tensor in (rows.k, rows.v):
            if tensor.dtype not in _ROW_TYPES:
                raise EngineError(f"rows of layer {rows.layer} are {tensor.dtype}, expected float16, float32 or q8_0")
        shapes = tuple(
            (tensor.shape[0], values_per_row(tensor)) if len(tensor.shape) == 2 else tensor.shape
            for tensor in (rows.k, rows.v)
        )
        if shapes != expected:
            raise EngineError(f"rows of layer {rows.layer} are {shapes[0]} and {shapes[1]}, expected {expected}")


def empty_rows(layers: Sequence[native.Layer], count: int, dtype: str) -> tuple[LayerRows, ...]:
    """Allocate `count` rows for each layer, f32 or f16, and one row for a recurrent state, always f32."""

    def allocate(layer: native.Layer) -> LayerRows:
        state = layer.part == "state"
        kind, rows = (np.float32, 1) if state else (np.float32 if dtype == "f32" else np.float16, count)
        k, v = np.empty((rows, layer.n_embd_k), kind), np.empty((rows, layer.n_embd_v), kind)
        return LayerRows(layer.layer, k, v, layer.part)

    return tuple(allocate(layer) for layer in layers)


def row_pointers(layers: Sequence[LayerRows]) -> tuple[Any, int]:
    """Build the arguments `rows` and `n_layers`. They point into `layers`, or into copies that live as long."""
    rows = (native.LayerPointers * len(layers))()
    owners: list[Any] = []
    rows.kept = owners  # type: ignore[attr-defined]
    for entry, layer in zip(rows, layers, strict=True):
        k, v = np.ascontiguousarray(layer.k), np.ascontiguousarray(layer.v)
        owners += [k, v]
        entry.type_k, entry.type_v = _ROW_TYPES[k.dtype], _ROW_TYPES[v.dtype]
        entry.k, entry.v = k.ctypes.data, v.ctypes.data
    return rows, len(layers)


def file_layers(layers: Sequence[StoredLayer]) -> Any:
    """Build the argument `layers` of notes_splice_file."""

    def file_range(tensor: StoredTensor) -> native.TensorPlace:
        halves = int(tensor.checksum[:16] or "0", 16), int(tensor.checksum[16:] or "0", 16)
        return native.TensorPlace(_ROW_TYPES[tensor.dtype], tensor.offset, tensor.end - tensor.offset, halves)

    entries = (native.LayerPlaces * len(layers))()
    for entry, layer in zip(entries, layers, strict=True):
        entry.layer, entry.k, entry.v = layer.layer, file_range(layer.k), file_range(layer.v)
    return entries
