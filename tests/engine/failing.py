"""Fails each allocation of an operation in turn, each in a process of its own: `failing.py WHAT MODEL SHIM`.

Run by test_failures.py with a malloc that fails on demand. Afterwards the sequence must have its old rows and continue
as before, or be empty; where Python fails after the hook has returned, the operation is complete. Exits 1 otherwise.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import numpy as np

from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.errors import EngineError

random = np.random.default_rng(1)
TEXT = random.integers(0, 128, 200).astype(np.int32)
SKILL = random.integers(0, 128, 48).astype(np.int32)
EACH = 19  # every so-manieth allocation: there are some hundreds


def main(what: str, path: str, shim: str) -> int:
    malloc = ctypes.CDLL(shim)
    malloc.arm.argtypes, malloc.disarm.restype = [ctypes.c_long], ctypes.c_long
    sizes = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "n_threads": 1}
    options = ContextOptions(
        **sizes,
        type_k="f32",
        type_v="f32",
        flash_attention="off",
        swa_full=what != "window",  # type: ignore[arg-type]
    )
    model = Model(Path(path))

    def begun() -> Context:
        context = Context(model, options)
        if what != "restore":
            context.append({0: TEXT})
        return context

    with Context(model, options) as other:
        other.append({0: SKILL})
        rows = other.read(0, 0, len(SKILL), base=0, dtype="f32")
    context = begun()
    length = context.length(0)

    def act(context: Context) -> None:
        if what == "rewrite":
            context.rewrite(0, list(range(90, 110)), TEXT[:20])
        else:
            context.splice(0, length, SKILL, rows, 0)

    def looked_at(context: Context) -> np.ndarray:
        context.append({0: TEXT[:5]})
        return context.logits()

    with begun() as fresh:
        untouched = length, looked_at(fresh)
        fresh.clear()
        empty = 0, looked_at(fresh)
    with begun() as fresh:
        act(fresh)
        done = fresh.length(0), looked_at(fresh)

    failed = 0
    for number in range(1, 100_000, EACH):
        child = os.fork()
        if not child:
            malloc.arm(number)
            try:
                act(context)
                error = None
            except Exception as raised:  # of numpy's, too
                error = raised
            if not malloc.disarm():
                os._exit(3)  # there are no more
            if not error:
                os._exit(0)
            ends = [untouched, empty, *([] if isinstance(error, EngineError) else [done])]
            now, found = context.length(0), looked_at(context)
            sound = any(now == count and np.abs(found - logits).max() < 1e-3 for count, logits in ends)
            sound = sound and context.used in (0, now + 5)
            if not sound:
                os.write(1, f"allocation {number}: {now} of {length} rows, {context.used} cells\n".encode())
            os._exit(0 if sound else 1)
        status = os.waitpid(child, 0)[1]
        if status == 3 << 8:
            break
        if status:
            print(f"allocation {number} ends with status {status}")
            return 1
        failed += 1
    print(f"{failed} failed, of {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
