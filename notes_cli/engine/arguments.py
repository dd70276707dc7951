"""What hooks are given: numbers, rows and places in a file as C has them, checked first (notes_ext.h)."""

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
    """The numbers as C has them. Raise EngineError for one that a C int does not hold, and where they are not one after
    the other: a hook is told how many there are by their length."""
    found = np.asarray(values)
    if found.ndim != 1:
        raise EngineError(f"an array of shape {found.shape} was given, expected one line of numbers, each {what}")
    if found.dtype != np.int32:
        for value in (found.min(), found.max()) if found.size else ():
            native.fits(int(value), what)
    return np.ascontiguousarray(found, np.int32)


def check_axes(axes: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Positions on three axes, of so many rows. Raise EngineError for those of more or fewer."""
    if np.shape(axes) != (count, 3):
        raise EngineError(f"positions on three axes of shape {np.shape(axes)} were given, expected {(count, 3)}")
    return axes


def int32_pointer(array: NDArray[np.int32]) -> Any:
    """A pointer into the array."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


def check_layers(given: Sequence[LayerRows | StoredLayer], layers: Sequence[native.Layer], count: int) -> None:
    """Raise EngineError for anything but `count` rows of each of these layers, one of a state: a hook trusts the shapes
    it is told."""
    if len(given) != len(layers):
        raise EngineError(f"rows of {len(given)} layers, the cache has {len(layers)}")
    for rows, layer in zip(given, layers, strict=True):
        count_here = 1 if layer.part == "state" else count
        expected = (count_here, layer.n_embd_k), (count_here, layer.n_embd_v)
        if (rows.layer, rows.part) != (layer.layer, layer.part):
            raise EngineError(f"{rows.part} rows of layer {rows.layer} given, expected {layer.part} of {layer.layer}")
        for one in (rows.k, rows.v):
            if one.dtype not in _ROW_TYPES:
                raise EngineError(f"rows of layer {rows.layer} are {one.dtype}, expected float16, float32 or q8_0")
        found = tuple(
            (one.shape[0], values_per_row(one)) if len(one.shape) == 2 else one.shape for one in (rows.k, rows.v)
        )
        if found != expected:
            raise EngineError(f"rows of layer {rows.layer} are {found[0]} and {found[1]}, expected {expected}")


def empty_rows(layers: Sequence[native.Layer], count: int, dtype: str) -> tuple[LayerRows, ...]:
    """Room for `count` rows of each layer, f32 or f16, and for the state of a recurrent one, always f32."""

    def of(layer: native.Layer) -> LayerRows:
        state = layer.part == "state"
        kind, rows = (np.float32, 1) if state else (np.float32 if dtype == "f32" else np.float16, count)
        k, v = np.empty((rows, layer.n_embd_k), kind), np.empty((rows, layer.n_embd_v), kind)
        return LayerRows(layer.layer, k, v, layer.part)

    return tuple(of(layer) for layer in layers)


def row_pointers(layers: Sequence[LayerRows]) -> tuple[Any, int]:
    """The arguments `rows` and `n_layers`. They point into `layers`, or into copies that live as long."""
    rows = (native.LayerPointers * len(layers))()
    kept: list[Any] = []
    rows.kept = kept  # type: ignore[attr-defined]
    for entry, layer in zip(rows, layers, strict=True):
        k, v = np.ascontiguousarray(layer.k), np.ascontiguousarray(layer.v)
        kept += [k, v]
        entry.type_k, entry.type_v = _ROW_TYPES[k.dtype], _ROW_TYPES[v.dtype]
        entry.k, entry.v = k.ctypes.data, v.ctypes.data
    return rows, len(layers)


def file_layers(layers: Sequence[StoredLayer]) -> Any:
    """The argument `layers` of notes_splice_file."""

    def place(tensor: StoredTensor) -> native.TensorPlace:
        halves = int(tensor.checksum[:16] or "0", 16), int(tensor.checksum[16:] or "0", 16)
        return native.TensorPlace(_ROW_TYPES[tensor.dtype], tensor.offset, tensor.end - tensor.offset, halves)

    found = (native.LayerPlaces * len(layers))()
    for entry, layer in zip(found, layers, strict=True):
        entry.layer, entry.k, entry.v = layer.layer, place(layer.k), place(layer.v)
    return found
