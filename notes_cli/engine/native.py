"""Loads the patched llama.cpp with its backends, checks its ABI, calls its hooks, and handles its log and crashes.

`llama` is the ctypes binding of llama-cpp-python over our library, `call` the hooks of native/notes_ext.h. Both are in
notes_cli/lib, which the build makes (native/CMakeLists.txt); a llama_cpp that is installed beside notes is neither used
nor touched. Importing this module loads the library; a missing or foreign one is one EngineError that names the command
to run. Exceptions in callbacks from C, where nothing can be raised, are kept for `raise_kept`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import native
from notes_cli.engine.segment import Q8_0, LayerRows, StoredLayer, values_per_row
from notes_cli.errors import EngineError, UnsupportedError

KEPT = 50  # collected lines of the log at most, the latest
_CRASHED = ". The file is damaged, or llama.cpp has a bug: compare its SHA-256 with the one it was published with"


_kept: tuple[int, BaseException] | None = None  # thread and exception
_log_output: Callable[[str], object] | None = None
_collecting: list[tuple[int, deque[str]]] = []  # threads and the lines of the log that they collect


def _keep(error: BaseException) -> None:
    """Keep an exception that a signal handler raises in a function called from C, where nothing can be raised."""
    global _kept
    _kept = get_ident(), error


def raise_kept() -> None:
    """Raise the exception kept for this thread, if any."""
    global _kept
    if _kept and _kept[0] == get_ident():
        error, _kept = _kept[1], None
        raise error


@contextmanager
def keeping_errors() -> Iterator[None]:
    """Also keep an exception raised before the first line of `_on_log`, which Python would print and drop. An aborted
    computation is logged, so that the signal's handler runs there."""
    before = sys.unraisablehook

    def hook(args: sys.UnraisableHookArgs) -> None:
        if args.object is _on_log and args.exc_value is not None:
            _keep(args.exc_value)
        else:
            before(args)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def set_log_output(write: Callable[[str], object] | None) -> None:
    """Pass llama.cpp's log to `write` as it arrives, in parts of lines; None drops it."""
    global _log_output
    _log_output = write


@contextmanager
def collected_log() -> Iterator[deque[str]]:
    """Collect the last lines logged in this thread during the block, for an error message."""
    global _collecting
    entry: tuple[int, deque[str]] = (get_ident(), deque(maxlen=KEPT))
    _collecting.append(entry)
    try:
        yield entry[1]
    finally:
        _collecting = [item for item in _collecting if item is not entry]


_working: list[str] = []  # latest last


def guard(work: str, on: bool = True) -> None:
    """Until it is turned off, end the process with one line about this work and status 1 when llama.cpp crashes: a
    damaged model makes it run into assertions and bad memory. Existing signal handlers are kept; off with
    NOTES_DEBUG."""
    if on:
        _working.append(work)
    elif work in _working:
        _working.remove(work)
    # The native library gets the beginning and the end of the line; None leaves crashes to the system.
    if not _working or os.environ.get("NOTES_DEBUG"):
        native.call("notes_guard", None, None)
    else:
        line = f"notes: {_working[-1]}: llama.cpp failed on this model"
        native.call("notes_guard", line.encode(errors="replace"), _CRASHED.encode())


def _on_log(_level: int, text: bytes, _data: object) -> None:
    try:
        part = text.decode(errors="replace")  # of a line
        if _log_output:
            _log_output(part)
        if part.strip(" .\n"):
            for thread, lines in _collecting:
                if thread == get_ident():
                    lines.append(part.rstrip())
    except BaseException as error:
        _keep(error)


def loading(on_progress: Callable[[float], object] | None) -> Any:
    """Make llama.cpp's progress callback for loading: `on_progress` is called with the loaded fraction, 0 to 1. An
    interrupt ends the load."""

    @llama.llama_progress_callback  # type: ignore[untyped-decorator]
    def step(part: float, _data: object) -> bool:
        try:
            if on_progress:
                on_progress(part)
        except KeyboardInterrupt as error:
            _keep(error)
        return _kept is None

    return step


ABI_VERSION = 10
# How often a thread of GNU's OpenMP spins at a barrier before it sleeps. By default it is 300,000 times: beside a busy
# process threads then wait for each other's time slices, and an answer takes up to a minute (docs/speed.md).
SPIN = "1000"
MEND = "Build it with: make setup (in a checkout) or pip install --force-reinstall notes-cli"

OK, E_UNSUPPORTED, E_ABORTED, E_DAMAGED, E_READ = 0, -2, -7, -8, -9
OPERATIONS = {"splice": 0, "rewrite": 1, "append": 2, "read": 3, "restore": 4, "carry": 5}
STAGING_ON, STAGING_LINES, STAGING_LATE = 1, 2, 4
OUTPUT_NONE, OUTPUT_LAST, OUTPUT_ALL = 0, 1, 2
PARTS = ("attention", "indexer", "state")


class StoppedError(EngineError):
    """A computation was stopped (engine/interrupts.py); the sequences are as they were before, if they can go back."""


class FileError(EngineError):
    """Rows of a file could not be placed: they are not what was written (`damaged`), or cannot be read now."""

    def __init__(self, what: str, *, damaged: bool) -> None:
        super().__init__(what)
        self.damaged = damaged


class Layer(ctypes.Structure):
    """struct notes_layer: shape, type and rotation of one layer of the memory."""

    _fields_ = [
        ("layer", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("n_embd_k", ctypes.c_int32),
        ("n_embd_v", ctypes.c_int32),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("rope", ctypes.c_int32),
        ("n_rot", ctypes.c_int32),
        ("freq_base", ctypes.c_float),
        ("freq_scale", ctypes.c_float),
        ("magnitude", ctypes.c_float),
    ]

    @property
    def part(self) -> str:
        """Kind of the layer: `attention`, `indexer` or `state`."""
        return PARTS[self.kind]


class LayerPointers(ctypes.Structure):
    """struct notes_rows: K and V rows of one layer."""

    _fields_ = [
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
    ]


class TensorPlace(ctypes.Structure):
    """struct notes_tensor: where a tensor is in a file, and its checksum."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("sum", ctypes.c_uint64 * 2),
    ]


class LayerPlaces(ctypes.Structure):
    """struct notes_stored: K and V rows of one layer in a file."""

    _fields_ = [("layer", ctypes.c_int32), ("k", TensorPlace), ("v", TensorPlace)]


def _load() -> tuple[Any, ctypes.CDLL]:
    if "OMP_WAIT_POLICY" not in os.environ:  # read when the library is loaded
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    try:
        package = importlib.import_module("notes_cli.lib")
        binding = importlib.import_module("notes_cli.lib.llama_cpp")
    except ModuleNotFoundError as error:
        raise EngineError("the native library of notes is missing", MEND) from error
    except (OSError, RuntimeError, AttributeError) as error:  # AttributeError: a library that lacks what is bound
        raise EngineError(f"llama.cpp does not load: {error}", MEND) from error
    library: ctypes.CDLL = binding._lib
    if not hasattr(library, "notes_abi_version"):
        raise EngineError(f"{library._name} has no notes hooks (NOTES_LIBRARY)", "Unset it")
    library.notes_upstream.restype = ctypes.c_char_p
    abi, upstream = library.notes_abi_version(), library.notes_upstream().decode()
    if abi != ABI_VERSION:
        raise EngineError(f"the native library has interface {abi}, this version of notes needs {ABI_VERSION}", MEND)
    if upstream != package.__version__:
        raise EngineError(
            f"the native library is built from llama-cpp-python {upstream}, its binding is of {package.__version__}",
            MEND,
        )
    return binding, library


def _load_backends() -> ctypes.CDLL:
    """ggml, with the backends that are files of their own. A wheel has a CPU backend for each generation of processors:
    ggml asks each whether it runs here, and how well, and takes the best."""
    folder = LIBRARY_PATH.parent
    ggml = ctypes.CDLL(str(next(folder.glob("*notes-ggml.*"))))
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t  # not backends: that of other machines has none by itself
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load_all_from_path.restype = None
    if not ggml.ggml_backend_dev_count():
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    if not ggml.ggml_backend_dev_count():
        raise EngineError(f"none of the CPU backends in {folder} runs on this processor", MEND)
    return ggml


llama, _library = _load()
log_callback = llama.llama_log_callback(_on_log)  # must live as long as the library
llama.llama_log_set(log_callback, ctypes.c_void_p(0))  # before ggml logs each backend
LIBRARY_PATH = Path(_library._name)
UPSTREAM: str = _library.notes_upstream().decode()
ggml = _load_backends()

_int32_p = ctypes.POINTER(ctypes.c_int32)
_signatures: dict[str, list[Any]] = {
    "notes_supports": [ctypes.c_void_p, ctypes.c_int],
    "notes_can_keep": [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32],
    "notes_layers": [ctypes.c_void_p, ctypes.POINTER(Layer), ctypes.c_int32],
    "notes_frequencies": [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_double), ctypes.c_int32],
    "notes_can_move": [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
    "notes_splice": [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, _int32_p, ctypes.c_int32, _int32_p),
        *(ctypes.POINTER(LayerPointers), ctypes.c_int32, ctypes.c_int32),
    ],
    "notes_splice_file": [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, _int32_p, ctypes.c_int32, ctypes.c_int32),
        *(ctypes.POINTER(LayerPlaces), ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
    ],
    "notes_traffic": [ctypes.POINTER(ctypes.c_int64)] * 3,
    "notes_force_staging": [ctypes.c_int32],
    "notes_read": [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, _int32_p),
        *(ctypes.POINTER(LayerPointers), ctypes.c_int32, ctypes.c_int32),
    ],
    "notes_rewrite": [ctypes.c_void_p, ctypes.c_int32, _int32_p, _int32_p, ctypes.c_int32, ctypes.c_int],
    "notes_append": [ctypes.c_void_p, _int32_p, _int32_p, _int32_p, ctypes.c_int32, _int32_p],
    "notes_show": [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_float), ctypes.c_int32, ctypes.c_int32),
        *(_int32_p, ctypes.c_bool),
    ],
    "notes_truncate": [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32],
    "notes_share": [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
    "notes_used": [ctypes.c_void_p],
    "notes_cells": [ctypes.c_void_p, ctypes.c_int32, _int32_p, ctypes.c_int32],
    "notes_watch": [ctypes.c_void_p, ctypes.c_int32],
    "notes_guard": [ctypes.c_char_p, ctypes.c_char_p],
}
_results: dict[str, Any] = {
    "notes_supports": ctypes.c_bool,
    "notes_can_keep": ctypes.c_bool,
    "notes_can_move": ctypes.c_bool,
    "notes_guard": None,
    "notes_traffic": None,
    "notes_force_staging": None,
}
_library.notes_error.restype = ctypes.c_char_p
_library.notes_patches.restype = ctypes.c_char_p
# The groups of native/patches that the library was built with. A build may leave out any but `hooks`.
PATCHES: tuple[str, ...] = tuple(_library.notes_patches().decode().split(","))


def bind(signatures: dict[str, list[Any]], results: dict[str, Any]) -> None:
    """Set the types of hooks: their arguments, and their results where these are no int32. Raise EngineError for a hook
    that the library lacks."""
    for name, types in signatures.items():
        function = getattr(_library, name, None)
        if function is None:
            raise EngineError(f"the native library has no {name}: it is older than this version of notes", MEND)
        function.argtypes = types
        function.restype = results.get(name, ctypes.c_int32)
    _signatures.update(signatures)


bind(_signatures, _results)


def last_error() -> str:
    """The sentence of the hook that failed last in this thread."""
    return str(_library.notes_error().decode(errors="replace"))


INTS = range(-(1 << 31), 1 << 31)  # range of a C int: ctypes truncates silently


def fits(value: int, what: str = "a number for llama.cpp") -> int:
    """The number, if a C int holds it. Raise EngineError otherwise."""
    if value not in INTS:
        raise EngineError(f"{what} is {value}, which is beyond what llama.cpp can count ({INTS[0]:,} to {INTS[-1]:,})")
    return value


def _hook(name: str, arguments: tuple[Any, ...]) -> Any:
    for kind, value in zip(_signatures[name], arguments, strict=True):
        if kind in (ctypes.c_int, ctypes.c_int32):
            fits(value)
    return getattr(_library, name)(*arguments)


def call(name: str, *arguments: Any) -> int:
    """Call a hook that returns a status, a count or nothing (0 then). Raise the error that it reports."""
    result = int(_hook(name, arguments) or 0)
    if result == E_UNSUPPORTED:
        raise UnsupportedError(last_error())
    if result == E_ABORTED:
        raise StoppedError(last_error())
    if result in (E_DAMAGED, E_READ):
        raise FileError(last_error(), damaged=result == E_DAMAGED)
    if result < OK:
        raise EngineError(last_error())
    return result


def free_once(owner: object, name: str, free: Callable[[Any], object]) -> None:
    """Free the handle in an attribute, if there is one. The attribute is cleared first: an interrupt may be raised when
    `free` returns, and a later close must not free the handle again."""
    handle = getattr(owner, name)
    setattr(owner, name, None)
    if handle is not None:
        free(handle)


class Traffic(NamedTuple):
    """Counters of this process: bytes that splices read from files and wrote into caches, and calls that copied rows to
    or from device memory, by splices and reads."""

    read: int
    written: int
    copies: int


def system_info() -> str:
    """Return the version of llama.cpp, and the features of its backends on this machine."""
    return f"{UPSTREAM} {llama.llama_print_system_info().decode()}"


def traffic() -> Traffic:
    counts = [ctypes.c_int64() for _ in range(3)]
    _library.notes_traffic(*map(ctypes.byref, counts))
    return Traffic(*(count.value for count in counts))


@contextmanager
def staged(*, lines: bool, late: bool) -> Iterator[None]:
    """For tests: copy rows in host memory as in device memory. `lines`: of a device that copies strided lines in one
    call; `late`: of one that copies asynchronously, as late as allowed."""
    _library.notes_force_staging(STAGING_ON | STAGING_LINES * lines | STAGING_LATE * late)
    try:
        yield
    finally:
        _library.notes_force_staging(0)


def refusal(name: str, *arguments: Any) -> str | None:
    """Call a hook that returns a bool. None if it is true, else the reason it is not."""
    return None if _hook(name, arguments) else last_error()


# Arguments of hooks: token arrays, K/V rows, ranges of files.

_ROW_TYPES: dict[Any, int] = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, Q8_0: 8}


def int_array(values: Any, what: str) -> NDArray[np.int32]:
    """Convert to a contiguous int32 array. Raises EngineError for values that a C int cannot hold and for more than one
    dimension: hooks take the length for the count."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise EngineError(f"an array of shape {array.shape} was given, expected one line of numbers, each {what}")
    if array.dtype != np.int32:
        for value in (array.min(), array.max()) if array.size else ():
            fits(int(value), what)
    return np.ascontiguousarray(array, np.int32)


def check_axes(axes: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return `axes` [count, 3] (time, row, column of each position). Raises EngineError for another shape."""
    if np.shape(axes) != (count, 3):
        raise EngineError(f"positions on three axes of shape {np.shape(axes)} were given, expected {(count, 3)}")
    return axes


def int32_pointer(array: NDArray[np.int32]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


def check_layers(rows_of_layers: Sequence[LayerRows | StoredLayer], layers: Sequence[Layer], count: int) -> None:
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


def empty_rows(layers: Sequence[Layer], count: int, dtype: str) -> tuple[LayerRows, ...]:
    """Allocate `count` rows for each layer, f32 or f16, and one row for a recurrent state, always f32."""

    def allocate(layer: Layer) -> LayerRows:
        state = layer.part == "state"
        kind, rows = (np.float32, 1) if state else (np.float32 if dtype == "f32" else np.float16, count)
        k, v = np.empty((rows, layer.n_embd_k), kind), np.empty((rows, layer.n_embd_v), kind)
        return LayerRows(layer.layer, k, v, layer.part)

    return tuple(allocate(layer) for layer in layers)


def row_pointers(layers: Sequence[LayerRows]) -> tuple[Any, int]:
    """Build the arguments `rows` and `n_layers`. They point into `layers`, or into copies that live as long."""
    rows = (LayerPointers * len(layers))()
    owners: list[Any] = []
    rows.kept = owners  # type: ignore[attr-defined]
    for entry, layer in zip(rows, layers, strict=True):
        k, v = np.ascontiguousarray(layer.k), np.ascontiguousarray(layer.v)
        owners += [k, v]
        entry.type_k, entry.type_v = _ROW_TYPES[k.dtype], _ROW_TYPES[v.dtype]
        entry.k, entry.v = k.ctypes.data, v.ctypes.data
    return rows, len(layers)


def splice_file(
    layers: Sequence[StoredLayer], compute: Callable[..., object], *target: Any, first: int, base: int, count: int
) -> None:
    """Call notes_splice_file by `compute`, with the places of these layers in the file."""
    entries = (LayerPlaces * len(layers))()
    for entry, layer in zip(entries, layers, strict=True):
        places = []
        for tensor in (layer.k, layer.v):
            halves = int(tensor.checksum[:16] or "0", 16), int(tensor.checksum[16:] or "0", 16)
            places.append(TensorPlace(_ROW_TYPES[tensor.dtype], tensor.offset, tensor.end - tensor.offset, halves))
        entry.layer, (entry.k, entry.v) = layer.layer, places
    compute("notes_splice_file", *target, entries, len(layers), count, first, base)
