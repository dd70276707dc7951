"""Tests of signals while llama.cpp computes: they stop it, rows are as before; if the handler returns, it continues."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference import same

from notes_cli.engine import interrupts, native, process
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sequence import KVSequence

TEXT = list(range(40))
LONG = [number % 200 for number in range(600)]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


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
            lost = SimpleNamespace(object=process._on_log, exc_value=Raised(), exc_type=Raised, **none)
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
        listening = interrupts.Listening()
        with listening:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert ours.recv(64) == bytes([signal.SIGUSR1]) and not listening.silent
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
    listening = interrupts.Listening()
    with listening:
        pass
    assert listening.silent and signal.set_wakeup_fd(-1) == -1
    with listening:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert not listening.silent and received
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
