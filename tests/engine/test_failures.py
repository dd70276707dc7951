"""Tests of computations that are stopped or fail half way, and leave no wrong row, and of crashes: one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference import LoadZoo, nmse, open_context, same, stopping

from notes_cli.engine import interrupts, native
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, ModelError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

random = np.random.default_rng(3)
TEXTS = [random.integers(0, 128, 30).astype(np.int32) for _ in range(3)]
QUESTION = random.integers(0, 128, 8).astype(np.int32)


@pytest.mark.parametrize("name", ["granitehybrid-dense", "qwen35-dense", "mamba-dense"])
def test_no_sequence_goes_on_from_the_state_of_another(load_zoo: LoadZoo, name: str) -> None:
    """To decode 0 and 2 together llama.cpp moves the state of 1, and does not if that is stopped: each is as it was, or
    empty."""
    model = load_zoo(name)
    with open_context(model, n_sequences=3, unified=True) as ctx, open_context(model) as fresh:
        for seq_id, text in enumerate(TEXTS):
            ctx.append({seq_id: text})
        with stopping(ctx), pytest.raises(EngineError, match="stopped"):
            ctx.append({0: QUESTION, 2: QUESTION})
        for seq_id, text in enumerate(TEXTS):
            fresh.clear()
            if ctx.length(seq_id):
                assert ctx.length(seq_id) == len(text)
                fresh.append({0: text})
            ctx.append({seq_id: QUESTION})
            fresh.append({0: QUESTION})
            assert nmse(ctx.logits(), fresh.logits()) < 1e-9


def picture(model: Model, rows: int) -> np.ndarray:
    return random.standard_normal((rows, llama.llama_model_n_embd_inp(model.handle))).astype(np.float32)


@pytest.mark.parametrize("name", ["llama-dense", "granitehybrid-dense"])
def test_an_image_without_room_says_so(load_zoo: LoadZoo, name: str) -> None:
    """After some of its rows: they are gone, with the whole sequence where it cannot go back."""
    model = load_zoo(name)
    with open_context(model, n_sequences=2, unified=True) as ctx:
        ctx.append({0: TEXTS[0], 1: np.tile(TEXTS[1], 7)})
        with pytest.raises(EngineError, match="free cells"):
            ctx.decode_embeddings(0, 30, picture(model, 400))
        assert ctx.length(0) == (0 if model.recurrent else 30)
        assert ctx.used == ctx.length(0) + 210


def test_a_model_closes_its_contexts(load_zoo: LoadZoo) -> None:
    """Without its weights they would read memory that is gone; closing them once more does nothing."""
    model = load_zoo("llama-dense")
    ctx, other = open_context(model), open_context(model)
    lease = ctx.lease()
    ctx.append({lease.id: TEXTS[0]})
    other.close()
    model.close()
    for call in (lambda: ctx.append({0: QUESTION}), lambda: ctx.length(0), ctx.lease, ctx.logits):
        with pytest.raises(EngineError, match="this context is closed"):
            call()
    lease.close()
    ctx.close()
    with pytest.raises(ModelError, match="closed"):
        model.tokenize("text")


@pytest.mark.parametrize("flash", ["on", "off"])
def test_numbers_that_are_none_do_not_stay(load_zoo: LoadZoo, flash: str) -> None:
    """Rows of NaN whose sequence is gone: the next one to be leased computes as ever."""
    model = load_zoo("llama-dense")
    with open_context(model, n_sequences=2, unified=True, flash_attention=flash) as ctx:
        with ctx.lease() as bad:
            ctx.decode_embeddings(bad.id, 0, np.full_like(picture(model, 100), np.nan))
            with pytest.raises(EngineError, match="not numbers"):
                ctx.append({bad.id: QUESTION})
                ctx.logits()
        with ctx.lease() as good:
            ctx.append({good.id: QUESTION})
            assert np.isfinite(ctx.logits()).all()
        ctx.decode_embeddings(0, 0, np.full_like(picture(model, 100), np.nan))
        ctx.clear()
        ctx.append({0: QUESTION})
        assert np.isfinite(ctx.logits()).all()


SHIM = """
#include <stdatomic.h>
#include <stddef.h>
extern void * __libc_malloc(size_t);
static atomic_long left;
static atomic_long failed;
void arm(long n) { failed = 0; left = n; }
long disarm(void) { left = 0; return failed; }
void * malloc(size_t n) {
    if (left > 0 && atomic_fetch_sub(&left, 1) == 1) {
        failed++;
        return NULL;
    }
    return __libc_malloc(n);
}
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="replaces malloc of glibc")
@pytest.mark.parametrize("what", ["rewrite", "splice", "window", "restore"])
def test_memory_that_runs_out(load_zoo: LoadZoo, tmp_path: Path, what: str) -> None:
    """Whichever allocation of a rewrite or a splice fails: the sequence has its rows, or none (failing.py)."""
    name = {"window": "gemma3-dense", "restore": "granitehybrid-dense"}.get(what, "llama-dense")
    with load_zoo(name) as model:
        path = model.path
    library = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, "-x", "c", "-"], input=SHIM, text=True, check=True)
    script = [sys.executable, str(Path(__file__).with_name("failing.py")), what, str(path), str(library)]
    env = {"LD_PRELOAD": str(library), "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    env["NOTES_LIBRARY"] = str(native.LIBRARY_PATH.parent)
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " failed, " in done.stdout


MakeModel = Callable[..., Path]
# Crashes.

# In one process after a model is loaded, each crash in a child; prints the status and the output of each.
PROGRAM = """
import ctypes, json, os, sys
from pathlib import Path
from notes_cli.engine import native
from notes_cli.engine.model import Model
model = Model(Path(sys.argv[1]))
library = ctypes.CDLL(str(next(native.LIBRARY_PATH.parent.glob("*ggml-base.*"))))
found = []
for code in json.loads(sys.argv[2]):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 1), os.dup2(writing, 2), os.close(writing)
        exec(code)
        os._exit(99)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        text = pipe.read()
    found.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text))
print(json.dumps(found))
"""
SEGFAULT, BAD_ACCESS = "ctypes.string_at(0)", "(a bad memory access)"
ABORT = "ctypes.CDLL(None).abort()"
CRASHES = {
    r"library.ggml_abort(b'/b.cpp', 7, b'GGML_ASSERT(%s) failed', b'a < b')": "(b.cpp:7: GGML_ASSERT(a",
    r"library.ggml_abort(b'/a/b.cpp', 7, b'\x1b[2J\n\xc2\x9b')": "(b.cpp:7: ?[2J??)",
    "library.ggml_abort(b'/b.cpp', 7, ('規' * 600).encode())": "規)",
    ABORT: "(it aborted)",
    SEGFAULT: BAD_ACCESS,
    "import signal; signal.raise_signal(signal.SIGFPE)": "(a division by zero)",
    "f = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: f()); sys.setrecursionlimit(10**8); f()": BAD_ACCESS,
    f"import threading, time; threading.Thread(target=lambda: {SEGFAULT}).start(); time.sleep(60)": BAD_ACCESS,
}


def crash(model: Path, *codes: str, **environment: str) -> list[tuple[int, str]]:
    command = [sys.executable, "-c", PROGRAM, str(model), json.dumps(codes)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_crash_is_one_line(make_model: MakeModel) -> None:
    """The line has the model, the reason and a remedy, without terminal escapes."""
    for (code, says), (status, text) in zip(CRASHES.items(), crash(make_model(), *CRASHES), strict=True):
        assert status == 1, code
        assert text.startswith(f"notes: {make_model()}: llama.cpp failed on this model ("), code
        assert says in text and text.count("\n") == 1 and text.endswith("published with\n"), text
        assert "\x1b" not in text


def test_signals_that_are_not_ours(make_model: MakeModel) -> None:
    """No handlers are installed for debugging, without a model, or over existing ones; later ones stay."""
    fault = f"import faulthandler; faulthandler.enable(); model.close(); {SEGFAULT}"
    found = crash(make_model(), f"model.close(); {ABORT}", fault)
    found += crash(make_model(), ABORT, NOTES_DEBUG="1")
    found += crash(make_model(), ABORT, PYTHONFAULTHANDLER="1")
    assert [status for status, _ in found] == [-6, -11, -6, -6]
    assert "Fatal Python error: Segmentation fault" in found[1][1]
    assert not any("llama.cpp failed" in text for _, text in found)


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


# Signals while llama.cpp computes: they stop it, rows are as before; if the handler returns, it continues.

TEXT = list(range(40))
LONG = [number % 200 for number in range(600)]


@pytest.fixture
def seq(make_model: Callable[..., Path]) -> Iterator[KVSequence]:
    with (
        Model(make_model()) as model,
        Context(model, ContextOptions(n_ctx=2048, n_threads=1)) as context,
        KVSequence(context) as seq,
    ):
        seq.append(TEXT)
        seq.flush()
        yield seq


class Raised(Exception):
    """Raised by a signal handler."""


def raising(*_: Any) -> None:
    raise Raised


@pytest.fixture
def received(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Handle SIGUSR1 without raising, or by this parameter; returns the received signals."""
    came: list[int] = []
    handler = getattr(request, "param", lambda number, _: came.append(number))
    before = signal.signal(signal.SIGUSR1, handler)
    yield came
    signal.signal(signal.SIGUSR1, before)


def in_the_middle(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> list[str]:
    """Deliver signals while hooks compute: the process signals itself directly before a hook is called, with no line of
    Python between. Returns the called hooks."""
    calls: list[str] = []
    hook = native._hook

    def signalled(name: str, arguments: tuple[Any, ...]) -> Any:
        if name not in ("notes_append", "notes_rewrite"):
            return hook(name, arguments)
        calls.append(name)
        if len(calls) > times:
            return hook(name, arguments)
        # A signal writes a byte while C runs; its handler runs in Python, first in the log callback.
        os.write(interrupts._pipe[1], bytes([signal.SIGUSR1]))  # type: ignore[index]
        sent = threading.Thread(target=signal.pthread_kill, args=(threading.main_thread().ident, signal.SIGUSR1))
        sent.start()
        try:
            return hook(name, arguments)
        finally:
            sent.join()

    monkeypatch.setattr(native, "_hook", signalled)
    return calls


def goes_on(seq: KVSequence) -> None:
    """To the logits of one that was never stopped."""
    seq.append([1])
    found = seq.logits()
    tokens, context = seq.tokens, seq.context
    seq.close()
    with KVSequence(context) as alone:
        alone.append(tokens)
        wanted = alone.logits()
    assert np.allclose(found, wanted, atol=2e-2 * np.abs(wanted).max())


@pytest.mark.parametrize("received", [raising], indirect=True)
def test_a_handler_that_raises_stops_it(seq: KVSequence, received: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are as before the call, pending tokens stay pending, and it continues to the same logits."""
    before = seq.context.read(seq.seq_id, 0, len(TEXT), base=0)
    seq.append(LONG)
    with monkeypatch.context() as patch:
        in_the_middle(patch)
        with pytest.raises(Raised):
            seq.flush()
    assert seq.context.length(seq.seq_id) in (len(TEXT), len(seq)) and seq.intact
    after = seq.context.read(seq.seq_id, 0, len(TEXT), base=0)
    assert same(before, after)
    goes_on(seq)


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_handler_that_does_not_raise(
    seq: KVSequence, received: list[int], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The call is repeated. A timer faster than a batch is ignored after some signals, and the batch completes."""
    seq.append(LONG)
    with monkeypatch.context() as patch:
        calls = in_the_middle(patch, times)
        seq.flush()
    assert received and 1 <= len(calls) <= 4 and seq.context.length(seq.seq_id) == len(seq) == 640
    goes_on(seq)


def test_what_a_handler_raises_in_a_callback_is_not_lost(seq: KVSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped computation is logged, and a handler runs there first, where Python can raise nothing."""
    hook, none = native._hook, {"err_msg": None, "exc_traceback": None}

    def stopped(name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "notes_append":
            lost = SimpleNamespace(object=native._on_log, exc_value=Raised(), exc_type=Raised, **none)
            sys.unraisablehook(lost)
            raise native.StoppedError("stopped")
        return hook(name, arguments)

    seq.append(LONG)
    with monkeypatch.context() as patch, pytest.raises(Raised):
        patch.setattr(native, "_hook", stopped)
        seq.flush()
    assert seq.intact
    goes_on(seq)


def test_in_another_thread(seq: KVSequence, received: list[int]) -> None:
    """Computing in another thread after the main thread, and vice versa, leaves the main thread's signals alone."""
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            seq.append(LONG[:50])
            pool.submit(seq.flush).result()
            seq.append(LONG[:50])
            seq.flush()
    assert signal.set_wakeup_fd(-1) == -1
    goes_on(seq)


def test_somebody_elses_wakeup_is_left_alone(
    seq: KVSequence, received: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's descriptor is in place during the call and afterwards, gets the signals, and nothing is stopped."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        with interrupts.listening() as arrived:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert ours.recv(64) == bytes([signal.SIGUSR1]) and not arrived
        seq.append(LONG)
        seq.flush()
    finally:
        assert signal.set_wakeup_fd(before) == theirs.fileno()
        ours.close()
        theirs.close()
    goes_on(seq)


def test_what_is_left_of_an_interrupt_stops_nothing(seq: KVSequence, received: list[int]) -> None:
    """After an unread byte, or a descriptor that was left set, the next call works as usual."""
    assert interrupts._pipe is not None
    os.write(interrupts._pipe[1], b"x" * 200)
    signal.set_wakeup_fd(interrupts._pipe[1], warn_on_full_buffer=False)
    with interrupts.listening() as arrived:
        pass
    assert arrived == [b""] and signal.set_wakeup_fd(-1) == -1
    with interrupts.listening() as arrived:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert arrived == [bytes([signal.SIGUSR1])] and received
    goes_on(seq)


def test_in_a_child(seq: KVSequence) -> None:
    assert interrupts._pipe is not None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(BlockingIOError):
                os.read(interrupts._pipe[0], 1)
            os.write(interrupts._pipe[1], b"c")
            seq.append(LONG[:50])
            seq.flush()
            status = 0 if seq.context.length(seq.seq_id) == 90 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(BlockingIOError):
        os.read(interrupts._pipe[0], 1)
    goes_on(seq)


@pytest.mark.parametrize(("kind", "options"), [("lfm2", {}), ("mamba", {}), ("gemma3", {"swa_full": False})])
def test_what_cannot_go_back_is_not_stopped(make_model: Callable[..., Path], kind: str, options: Any) -> None:
    """With recurrent state, or a cache that drops rows outside a window, calls are short instead."""
    settings = ContextOptions(n_ctx=2048, n_threads=1, **options)
    interrupts.descriptor()
    assert interrupts._pipe is not None
    with Model(make_model(kind)) as model, Context(model, settings) as context, KVSequence(context) as seq:
        os.write(interrupts._pipe[1], b"x")
        seq.append(LONG)
        seq.flush()
        assert context.length(seq.seq_id) == 600 and context.stride == 128
        assert os.read(interrupts._pipe[0], 64) == b"x"
