"""One layer's attention on the CPU: our kernel beside stock llama.cpp with flash attention and without it.

    python -m bench.attention [--tokens 1024 4096] [--queries 1 2 4 8 16] [--heads 16] [--threads 1] [--repeat 5]

In the shape of Qwen3-0.6B, whose 16 heads share K and V in twos; K and V are f16, each query sees all of them, and a
layer's are read once before any is read again, from more memory than caches hold. The three take turns. Shown are
milliseconds of the processor a layer, medians, and the median of the ratios to the better of stock's two in the same
turn. Exits 1 where their results differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench.ggml import F16, F32, Operation
from bench.random_model import QWEN3_0_6B
from bench.serving.stock import stock

GROUPS, WIDTH = QWEN3_0_6B.kv_heads, QWEN3_0_6B.head
AT_LEAST = 128 << 20  # bytes of K and V of all layers
APART = 5e-3  # results may be, whose V are of size 1: without flash attention queries and weights are rounded to f16


class Way:
    """Layers of attention in a library. `spare`: bytes for what a computation of one leaves in the memory."""

    def __init__(
        self, stack: ExitStack, library: Path | None, flash: bool, queries: int, tokens: int, heads: int, spare: int
    ) -> None:
        random = np.random.default_rng(0)
        size = 4 * tokens * GROUPS * WIDTH  # of a layer's K and V
        layers = -(-AT_LEAST // size)
        scores = 0 if flash else 8 * heads * queries * tokens
        room = layers * (size + scores + 8 * heads * queries * WIDTH + spare) + (64 << 20)
        self.operation = stack.enter_context(Operation(room, library))
        put, base, context = self.operation.put, self.operation.base, self.operation.context
        q = put(random.standard_normal((1, heads, queries, WIDTH)), F32, permuted=True)
        k, v = random.standard_normal((2, 1, GROUPS, tokens, WIDTH))
        mask = put(np.zeros((1, 1, queries, tokens)), F16)
        self.out = []
        for _ in range(layers):
            rows = put(k, F16, permuted=True)
            if flash:
                found = base.ggml_flash_attn_ext(context, q, rows, put(v, F16, permuted=True), mask, WIDTH**-0.5, 0, 0)
            else:
                weights = base.ggml_mul_mat(context, rows, q)
                weights = base.ggml_soft_max_ext(context, weights, mask, WIDTH**-0.5, 0)
                found = base.ggml_mul_mat(context, put(v.transpose(0, 1, 3, 2), F16), weights)
            self.out.append(found)
        self.shape = (queries, heads, WIDTH) if flash else (heads, queries, WIDTH)
        self.flash = flash

    def result(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Of a layer: [queries, heads, width]."""
        found = self.operation.compute(self.out[0], self.shape, 1)
        return found if self.flash else found.transpose(1, 0, 2)

    def milliseconds(self, threads: int) -> float:
        """Of a layer, by the processor."""
        took = sum(self.operation.seconds(out, threads, time.process_time) for out in self.out)
        return 1000 * took / len(self.out)


def measure(tokens: int, queries: int, heads: int, threads: int, repeat: int) -> bool:
    """Print a line; whether all three found the same."""
    with ExitStack() as stack:
        spare = (repeat + 1) * (1 + threads) << 20
        way = partial(Way, stack, queries=queries, tokens=tokens, heads=heads, spare=spare)
        theirs = stock().parent
        ways = way(None, True), way(theirs, True), way(theirs, False)
        ours, on, off = (one.result() for one in ways)
        apart = max(float(np.abs(off - one).max()) for one in (ours, on))
        took = [[one.milliseconds(threads) for one in ways] for _ in range(repeat)]
    ratio = median(mine / min(on, off) for mine, on, off in took)
    middles = (median(times) for times in zip(*took, strict=True))
    print(f"{tokens:6}{queries:9}", *(f"{one:8.2f}" for one in middles), f"{ratio:14.2f}", flush=True)
    if apart > APART:
        print(f"results differ by {apart:.4f}", file=sys.stderr)
    return apart <= APART


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--heads", type=int, default=QWEN3_0_6B.heads, help="of queries (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    print("tokens  queries     ours stock on stock off  ours / better")
    rest = given.heads, given.threads, given.repeat
    right = [measure(tokens, queries, *rest) for tokens in given.tokens for queries in given.queries]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
