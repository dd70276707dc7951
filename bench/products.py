"""Time the product of a matrix and some columns on the CPU, the cost of tokens decoded together.

    python -m bench.products [--rows 16384] [--width 1024] [--threads 1]

A line for each number of columns (tokens), and for each type of weights milliseconds, the shortest of five, and
billions of multiplications and additions a second. The matrix should be larger than the caches, as a model's are.
`NOTES_LIBRARY=FOLDER` measures the libraries of another build.
"""

from __future__ import annotations

import argparse

import numpy as np

from bench.ggml import F16, F32, Q4_0, Q8_0, Operation

KINDS = {"q8_0": Q8_0, "q4_0": Q4_0, "f16": F16}
COLUMNS = (1, 2, 4, 8, 16, 40, 64, 128, 512)


def shortest(kind: int, rows: int, width: int, columns: int, threads: int) -> float:
    """Seconds."""
    rng = np.random.default_rng(0)
    left = np.tile(rng.normal(size=(64, width)), (-(-rows // 64), 1))[:rows]
    with Operation(8 * rows * width + 16 * columns * (rows + width) + (64 << 20)) as operation:
        weights = operation.put(left[None, None], kind)
        right = operation.put(rng.normal(size=(1, 1, columns, width)), F32)
        out = operation.base.ggml_mul_mat(operation.context, weights, right)
        return min(operation.seconds(out, threads) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    print("columns", *(f"{name:>18}" for name in KINDS))
    for columns in COLUMNS:
        times = [shortest(kind, given.rows, given.width, columns, given.threads) for kind in KINDS.values()]
        work = 2e-9 * given.rows * given.width * columns
        print(f"{columns:7}", *(f"{1000 * t:9.2f} ms {work / t:4.0f} G" for t in times), flush=True)


if __name__ == "__main__":
    main()
