"""Tests of crashes of llama.cpp: the user gets one line and exit status 1."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from notes_cli.engine.model import Model
from notes_cli.errors import ModelError

MakeModel = Callable[..., Path]
CODE = """
import ctypes, sys
from pathlib import Path
from notes_cli.engine import native
from notes_cli.engine.model import Model
model = Model(Path(sys.argv[1]))
library = ctypes.CDLL(str(next(native.LIBRARY_PATH.parent.glob("*ggml-base.*"))))
{}
"""
SEGFAULT, BAD_ACCESS = "ctypes.string_at(0)", "(a bad memory access)"
CRASHES = {
    "an assertion": (
        r"library.ggml_abort(b'/b.cpp', 7, b'GGML_ASSERT(%s) failed', b'a < b')",
        "(b.cpp:7: GGML_ASSERT(a",
    ),
    "an escape": (r"library.ggml_abort(b'/a/b.cpp', 7, b'\x1b[2J\n\xc2\x9b')", "(b.cpp:7: ?[2J??)"),
    "a long reason": ("library.ggml_abort(b'/b.cpp', 7, ('規' * 600).encode())", "規)"),
    "abort": ("ctypes.CDLL(None).abort()", "(it aborted)"),
    "a null pointer": (SEGFAULT, BAD_ACCESS),
    "a division by zero": ("import signal; signal.raise_signal(signal.SIGFPE)", "(a division by zero)"),
    "an endless recursion": (
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: f()); sys.setrecursionlimit(10**8); f()",
        BAD_ACCESS,
    ),
    "another thread": (f"import threading; threading.Thread(target=lambda: {SEGFAULT}).start()", BAD_ACCESS),
}


def crash(model: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE.format(code), str(model)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.parametrize("how", CRASHES)
def test_a_crash_is_one_line(make_model: MakeModel, how: str) -> None:
    """The line has the model, the reason and a remedy, without terminal escapes."""
    code, says = CRASHES[how]
    done = crash(make_model(), code)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"notes: {make_model()}: llama.cpp failed on this model (")
    assert says in done.stderr and done.stderr.count("\n") == 1 and done.stderr.endswith("published with\n")
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("before", "environment"), [("", {"NOTES_DEBUG": "1"}), ("model.close()", {}), ("", {"PYTHONFAULTHANDLER": "1"})]
)
def test_signals_that_are_not_ours(make_model: MakeModel, before: str, environment: dict[str, str]) -> None:
    """No handlers are installed for debugging, without a model, or over existing ones."""
    done = crash(make_model(), f"{before}\nctypes.CDLL(None).abort()", **environment)
    assert done.returncode == -6 and "llama.cpp failed" not in done.stderr


def test_a_greedy_tokenizer_that_would_never_end(make_model: MakeModel, tmp_path: Path) -> None:
    """llama.cpp's tokenizer of RWKV turns round for ever, and takes all memory, at a byte that only begins tokens."""
    data = make_model().read_bytes()
    old, new = (struct.pack("<Q", len(name)) + name for name in (b"gpt2", b"rwkv"))
    assert data.count(old) == 1
    path = tmp_path / "rwkv.gguf"
    path.write_bytes(data.replace(old, new))
    try:
        model = Model(path)
    except ModelError as error:
        assert "tokenizer is damaged" in str(error)
    else:  # every byte is a token there: it ends
        assert len(model.tokenize("a b")) > 0
        model.close()


def test_a_rotation_that_would_never_end(make_model: MakeModel, tmp_path: Path) -> None:
    """ggml's loop over the dimensions that RoPE leaves as they are never ends if it rotates none."""
    data = make_model("lfm2").read_bytes()
    key = b"lfm2.rope.dimension_count" + struct.pack("<I", 4)  # an uint32 follows
    at = data.index(key) + len(key)
    path = tmp_path / "lfm2.gguf"
    path.write_bytes(data[:at] + struct.pack("<I", 0) + data[at + 4 :])
    with pytest.raises(ModelError, match=r"rope\.dimension_count is 0"):
        Model(path)


def test_what_llama_cpp_refuses_is_one_line(make_model: MakeModel, tmp_path: Path) -> None:
    """A file that ends too early, an unknown architecture, more tensors than exist."""
    data = make_model().read_bytes()
    for number, bad in enumerate((data[: len(data) // 2], data[:24], data.replace(b"llama.block", b"llama.bolck"))):
        path = tmp_path / f"bad-{number}.gguf"
        path.write_bytes(bad)
        with pytest.raises(ModelError, match=r"llama\.cpp cannot load this model") as caught:
            Model(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value) and "/proc/" not in str(caught.value)


def test_what_others_have_installed_since_stays(make_model: MakeModel) -> None:
    done = crash(make_model(), f"import faulthandler; faulthandler.enable(); model.close(); {SEGFAULT}")
    assert done.returncode == -11 and "Fatal Python error: Segmentation fault" in done.stderr
