"""The patched llama.cpp: find it, load it before llama_cpp does, check that it is ours, and call its hooks.

`llama` is the ctypes binding of llama-cpp-python over our library, `call` the hooks of native/notes_ext.h. Importing
this module loads the library; a missing or foreign one is one EngineError that names the command to run.
"""

from __future__ import annotations

import collections
import ctypes
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import notes_cli
from notes_cli.errors import EngineError, UnsupportedError

ABI_VERSION = 2
_MEND = "Build it with: make setup (in a checkout) or pip install --force-reinstall notes-cli"

OK, E_UNSUPPORTED = 0, -2
OPERATIONS = {"splice": 0, "rewrite": 1, "append": 2, "read": 3, "restore": 4}
OUTPUT_NONE, OUTPUT_LAST, OUTPUT_ALL = 0, 1, 2
PARTS = ("attention", "indexer", "state")


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
        """What the layer keeps: `attention`, `indexer` or `state`."""
        return PARTS[self.kind]


class Rows(ctypes.Structure):
    """struct notes_rows: K and V rows of one layer."""

    _fields_ = [("type", ctypes.c_int32), ("k", ctypes.c_void_p), ("v", ctypes.c_void_p)]


def library_folder() -> Path:
    """The folder of our libllama. An editable install keeps it beside the source tree, so every package path counts."""
    for root in notes_cli.__path__:
        folder = Path(root) / "lib"
        if any(folder.glob("*llama.*")):
            return folder
    raise EngineError(f"the native library of notes is missing. {_MEND}")


def _load() -> tuple[Any, ctypes.CDLL]:
    if "llama_cpp" not in sys.modules:
        os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(library_folder()))
    try:
        package = importlib.import_module("llama_cpp")
        binding = importlib.import_module("llama_cpp.llama_cpp")
    except (OSError, RuntimeError, ImportError) as error:
        raise EngineError(f"llama.cpp does not load: {error}. {_MEND}") from error
    library: ctypes.CDLL = binding._lib
    if not hasattr(library, "notes_abi_version"):
        raise EngineError(
            f"llama_cpp runs on {library._name}, which has no notes hooks (LLAMA_CPP_LIB_PATH, or llama_cpp was "
            "imported before notes). Unset it, import notes first"
        )
    library.notes_upstream.restype = ctypes.c_char_p
    abi, upstream = library.notes_abi_version(), library.notes_upstream().decode()
    if abi != ABI_VERSION:
        raise EngineError(f"the native library has interface {abi}, this notes needs {ABI_VERSION}. {_MEND}")
    if upstream != package.__version__:
        raise EngineError(
            f"the native library is built from llama-cpp-python {upstream}, but {package.__version__} is installed. "
            f"Run: pip install llama-cpp-python=={upstream}"
        )
    return binding, library


llama, _library = _load()
LIBRARY_PATH = Path(_library._name)
UPSTREAM: str = _library.notes_upstream().decode()

_int32_p = ctypes.POINTER(ctypes.c_int32)
_signatures: dict[str, list[Any]] = {
    "notes_supports": [ctypes.c_void_p, ctypes.c_int],
    "notes_layers": [ctypes.c_void_p, ctypes.POINTER(Layer), ctypes.c_int32],
    "notes_frequencies": [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_double), ctypes.c_int32],
    "notes_can_move": [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
    "notes_splice": [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, _int32_p, ctypes.c_int32, _int32_p),
        *(ctypes.POINTER(Rows), ctypes.c_int32, ctypes.c_int32),
    ],
    "notes_read": [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, _int32_p),
        *(ctypes.POINTER(Rows), ctypes.c_int32, ctypes.c_int32),
    ],
    "notes_rewrite": [ctypes.c_void_p, ctypes.c_int32, _int32_p, _int32_p, ctypes.c_int32, ctypes.c_int],
    "notes_append": [ctypes.c_void_p, _int32_p, _int32_p, ctypes.c_int32, _int32_p, ctypes.c_int],
    "notes_truncate": [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32],
    "notes_guard": [ctypes.c_char_p, ctypes.c_char_p],
}
_results: dict[str, Any] = {"notes_supports": ctypes.c_bool, "notes_can_move": ctypes.c_bool, "notes_guard": None}
for _name, _types in _signatures.items():
    _function = getattr(_library, _name, None)
    if _function is None:
        raise EngineError(f"the native library has no {_name}: it is older than this notes. {_MEND}")
    _function.argtypes = _types
    _function.restype = _results.get(_name, ctypes.c_int32)
_library.notes_error.restype = ctypes.c_char_p


def last_error() -> str:
    """The sentence of the hook that failed last in this thread."""
    return str(_library.notes_error().decode(errors="replace"))


INTS = range(-(1 << 31), 1 << 31)  # what a C int holds: ctypes cuts off the rest and says nothing


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
    """Call a hook that returns a status or a count; raise what it says when it fails."""
    result = int(_hook(name, arguments))
    if result == E_UNSUPPORTED:
        raise UnsupportedError(last_error())
    if result < OK:
        raise EngineError(last_error())
    return result


_CRASHED = ". The file is damaged, or llama.cpp has a bug: compare its SHA-256 with the one it was published with"
_guarded: list[str] = []  # what llama.cpp works on, the latest last


def guard(what: str) -> None:
    """From now on, a crash of llama.cpp ends the process with one line about `what` and status 1: a damaged model makes
    it run into assertions and bad memory, from which nothing can go on. Whoever handles such signals keeps them, and
    with NOTES_DEBUG nothing is changed."""
    _guarded.append(what)
    _set_guard()


def unguard(what: str) -> None:
    """`what` is no longer worked on."""
    if what in _guarded:
        _guarded.remove(what)
        _set_guard()


def _set_guard() -> None:
    if not _guarded or os.environ.get("NOTES_DEBUG"):
        _library.notes_guard(None, None)
    else:
        before = f"notes: {_guarded[-1]}: llama.cpp failed on this model"
        _library.notes_guard(before.encode(errors="replace"), _CRASHED.encode())


def supports(context: Any, operation: str) -> str | None:
    """None if the context can do the operation (a key of OPERATIONS), else the reason it cannot."""
    return None if _library.notes_supports(context, OPERATIONS[operation]) else last_error()


def can_move(context: Any, base: int, position: int, count: int) -> str | None:
    """None if `count` rows computed at `base` can be placed at `position`, else the reason they cannot."""
    return None if _hook("notes_can_move", (context, base, position, count)) else last_error()


def devices() -> list[str]:
    """The backends' devices, as "name: description (free of total MiB)"."""
    base = ctypes.CDLL(str(next(LIBRARY_PATH.parent.glob("*ggml-base.*"))))
    base.ggml_backend_dev_name.restype = base.ggml_backend_dev_description.restype = ctypes.c_char_p
    registry = ctypes.CDLL(
        str(next(path for path in LIBRARY_PATH.parent.iterdir() if path.stem in ("libggml", "ggml")))
    )
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


# llama.cpp talks a lot. The last lines are kept for error messages; `show_log` hands all of them on.
log_lines: collections.deque[str] = collections.deque(maxlen=50)
_shown: Callable[[str], object] | None = None
_interrupted = False


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _data: object) -> None:
    global _interrupted
    try:
        line = text.decode(errors="replace")
        if _shown:
            _shown(line)
        if line.strip(" .\n"):
            log_lines.append(line.rstrip())
    except KeyboardInterrupt:  # nothing can be raised through C: see raise_interrupt
        _interrupted = True


llama.llama_log_set(_log, ctypes.c_void_p(0))


def show_log(write: Callable[[str], object] | None) -> None:
    """Hand llama.cpp's log to `write` as it comes, in parts of lines; None: to nobody."""
    global _shown
    _shown = write


def loading(told: Callable[[float], object] | None) -> Any:
    """What llama.cpp calls while it loads a model: `told` gets the part that is there, 0 to 1. An interrupt ends it."""

    @llama.llama_progress_callback  # type: ignore[untyped-decorator]
    def step(part: float, _data: object) -> bool:
        global _interrupted
        try:
            if told:
                told(part)
        except KeyboardInterrupt:
            _interrupted = True
        return not _interrupted

    return step


def raise_interrupt() -> None:
    """Raise the KeyboardInterrupt that came while llama.cpp called us, if one did."""
    global _interrupted
    if _interrupted:
        _interrupted = False
        raise KeyboardInterrupt
