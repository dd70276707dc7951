"""A question and an answer after a long spliced skill, against the same on a hot cache and in stock llama.cpp.

    python -m bench.after [--tokens 4096 16384] [--repeat 5] [--threads N]

Three processes with the same random model in the shape of Qwen3-0.6B, the same cells and the same batch take turns:
ours, and stock llama.cpp of the same sdist with flash attention on and off. Rows are random. Ours are spliced from a
file before each question (which is not counted); the question is asked again on the rows that are there (hot). Stock
gets its rows once, by its own state functions. Ratios are medians of those of each turn, in seconds of the clock and,
where other work is on the machine, of the processor. Memory is what is resident after all of it. Exits 1 beyond a
bar.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from bench.random_model import QWEN3_0_6B, random_model

QUESTION, ANSWER, BEFORE = 16, 8, 100
BARS = {"after a splice / hot": 1.10, "/ stock": 1.05, "memory / stock, on": 1.10, "a token / stock": 1.0}
WAYS = ("ours", "on", "off")
F16 = 1  # ggml's number
Took = tuple[float, float]  # seconds of the clock and of the processor


class Ours:
    """What is asked of ours."""

    def __init__(self, model: Path, tokens: int, threads: int) -> None:
        from bench.speed import make_segment, random_rows
        from notes_cli.engine.context import Context
        from notes_cli.engine.model import Model
        from notes_cli.engine.notebook import Notebook
        from notes_cli.engine.options import ContextOptions
        from notes_cli.library.container import open_stored, write_segment

        options = ContextOptions(n_ctx=_cells(tokens), n_threads=threads)
        self.context = Context(Model(model, gpu_layers=0), options)
        self.notebook = Notebook(self.context)
        self.notebook.append(np.arange(BEFORE))
        self.notebook.flush()
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "skill.notes"
        write_segment(path, make_segment(self.context, np.zeros(tokens, np.int32), random_rows(self.context, tokens)))
        self.open = lambda: open_stored(path)
        self.splice()

    def splice(self) -> None:
        self.notebook.truncate(BEFORE)
        self.notebook.splice(self.open())

    def decode(self, count: int) -> None:
        self.notebook.append(np.arange(count))
        self.notebook.logits()

    def forget(self, count: int) -> None:
        self.notebook.truncate(len(self.notebook) - count)


class Stock:
    """The same of llama.cpp, by its own interface."""

    def __init__(self, model: Path, tokens: int, threads: int, flash: bool) -> None:
        import llama_cpp.llama_cpp as llama  # type: ignore[import-not-found]

        llama.llama_backend_init()
        self.llama = llama
        loaded = llama.llama_model_load_from_file(str(model).encode(), llama.llama_model_default_params())
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_seq_max = _cells(tokens), 1
        options.n_batch, options.n_ubatch = 2048, 512
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = int(flash)
        self.context = llama.llama_init_from_model(loaded, options)
        self.memory = llama.llama_get_memory(self.context)
        self.length = 0
        self.decode(BEFORE)
        own = np.zeros(llama.llama_state_seq_get_size(self.context, 0), np.uint8)
        llama.llama_state_seq_get_data(self.context, own.ctypes.data_as(_bytes()), len(own), 0)
        mark = own[:8].tobytes()  # a magic number, and the sequence
        mine = _state(mark, BEFORE, transposed=not flash)
        if len(mine) != len(own) or (mine[: 16 + 12 * BEFORE] != own[: 16 + 12 * BEFORE]).any():
            raise SystemExit("llama.cpp's state has another form than the one that is written here")
        rows = _state(mark, BEFORE + tokens, transposed=not flash)
        if llama.llama_state_seq_set_data(self.context, rows.ctypes.data_as(_bytes()), len(rows), 0) != len(rows):
            raise SystemExit("llama.cpp refuses the rows")
        self.length = BEFORE + tokens

    def splice(self) -> None:
        """It has none."""

    def decode(self, count: int) -> None:
        batch = self.llama.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for index in range(count):
            batch.token[index], batch.pos[index] = index, self.length + index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, index == count - 1
        if self.llama.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp cannot decode")
        self.llama.llama_get_logits_ith(self.context, -1)
        self.llama.llama_batch_free(batch)
        self.length += count

    def forget(self, count: int) -> None:
        self.length -= count
        self.llama.llama_memory_seq_rm(self.memory, 0, self.length, -1)


def _bytes() -> Any:
    import ctypes

    return ctypes.POINTER(ctypes.c_uint8)


def _cells(tokens: int) -> int:
    return -(-(BEFORE + tokens + QUESTION + ANSWER) // 256) * 256


def _state(mark: bytes, count: int, *, transposed: bool) -> Any:
    """Rows of so many positions in the form of llama_state_seq_get_data, for Qwen3-0.6B."""
    random, width = np.random.default_rng(0), QWEN3_0_6B.kv_heads * QWEN3_0_6B.head
    rows = random.standard_normal(count * width, np.float32).astype(np.float16).tobytes()
    layers = QWEN3_0_6B.layers
    cells = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(count))
    k = struct.pack("<iQ", F16, 2 * width) + rows
    v = struct.pack("<iII", F16, 2, width) + rows if transposed else k
    head = mark + struct.pack("<II", 1, count) + cells + struct.pack("<II", transposed, layers)
    return np.frombuffer(head + layers * k + layers * v, np.uint8)


def serve(way: str, tokens: int, threads: int) -> None:
    """Do what stdin says, a line each, and say how long it took."""
    model = random_model()
    one = Ours(model, tokens, threads) if way == "ours" else Stock(model, tokens, threads, way == "on")
    one.decode(QUESTION)  # buffers are there
    one.forget(QUESTION)

    def write() -> None:
        for _ in range(ANSWER):
            one.decode(1)

    work: dict[str, tuple[Callable[[], object], int]] = {
        "splice": (one.splice, 0),
        "ask": (lambda: one.decode(QUESTION), QUESTION),
        "write": (write, ANSWER),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "memory":
            found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
            print(json.dumps((int(found[1]) << 10 if found else 0, 0.0)), flush=True)
            continue
        do, count = work[line.strip()]
        clock, processor = time.perf_counter(), time.process_time()
        do()
        took = time.perf_counter() - clock, time.process_time() - processor
        if count:
            one.forget(count)
        print(json.dumps(took), flush=True)


@contextmanager
def started(way: str, tokens: int, threads: int) -> Iterator[Callable[[str], Took]]:
    """A process of one way, and what tells it to do something."""
    environment = dict(os.environ)
    if way != "ours":
        from bench.serving.stock import binding, stock

        environment["LLAMA_CPP_LIB_PATH"] = str(stock().parent)
        environment["PYTHONPATH"] = os.pathsep.join([str(binding()), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "bench.after", "--way", way, "--tokens", str(tokens), "--threads", str(threads)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin and process.stdout
        stdin, stdout = process.stdin, process.stdout

        def tell(what: str) -> Took:
            stdin.write(f"{what}\n")
            stdin.flush()
            line = stdout.readline()
            if not line:
                raise SystemExit(f"{way} has ended: run it by hand: {' '.join(command)}")
            clock, processor = json.loads(line)
            return clock, processor

        if stdout.readline().strip() != "ready":
            raise SystemExit(f"{way} does not start: run it by hand: {' '.join(command)}")
        yield tell
        stdin.close()


def measure(tokens: int, repeat: int, threads: int) -> bool:
    """Print what was found; whether all of it is within the bars, by the processor."""
    asked: dict[str, list[Took]] = {way: [] for way in (*WAYS, "hot")}
    written: dict[str, list[Took]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        tell = {way: stack.enter_context(started(way, tokens, threads)) for way in WAYS}
        for _ in range(repeat):
            for way in WAYS:
                tell[way]("splice")
                asked[way].append(tell[way]("ask"))
            asked["hot"].append(tell["ours"]("ask"))
            for way in WAYS:
                written[way].append(tell[way]("write"))
        memory = {way: tell[way]("memory")[0] for way in WAYS}
    print(f"{tokens} tokens, {threads} threads, medians of {repeat}: ms of the clock (of the processor)")
    for what, found, count in (
        (f"question of {QUESTION} tokens", asked, 1),
        ("a token of the answer", written, ANSWER),
    ):
        told = ", ".join(f"{way} {_ms(times, 0, count)} ({_ms(times, 1, count)})" for way, times in found.items())
        print(f"  {what}: {told}")
    print("  resident: " + ", ".join(f"{way} {size / 1e6:.0f} MB" for way, size in memory.items()))
    middles = [{way: _middle(times) for way, times in found.items()} for found in (asked, written)]
    better = [min(("on", "off"), key=found.__getitem__) for found in middles]
    ratios = {
        "after a splice / hot": _ratio(asked["ours"], asked["hot"]),
        "/ stock": _ratio(asked["ours"], asked[better[0]]),
        "a token / stock": _ratio(written["ours"], written[better[1]]),
        "memory / stock, on": (memory["ours"] / memory["on"],) * 2,
    }
    for name, (clock, processor) in ratios.items():
        print(f"  {name}: {clock:.2f}, of the processor {processor:.2f} (bar {BARS[name]})")
    return all(processor <= BARS[name] for name, (_, processor) in ratios.items())


def _ms(times: list[Took], which: Literal[0, 1], count: int) -> str:
    return f"{1000 * median(one[which] for one in times) / count:.0f}"


def _middle(times: list[Took]) -> float:
    return median(processor for _, processor in times)


def _ratio(mine: list[Took], its: list[Took]) -> Took:
    clock, processor = (median(a[i] / b[i] for a, b in zip(mine, its, strict=True)) for i in (0, 1))
    return clock, processor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        serve(given.way, given.tokens[0], given.threads)
        return 0
    found = [measure(tokens, given.repeat, given.threads) for tokens in given.tokens]
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
