"""Time decoding after a long spliced skill with flash attention on and off: answers, questions, errata.

    python -m bench.flash [--model FILE] [--tokens 4096] [--threads N]

Rows are random; the model is, too, in the shape of Qwen3-0.6B, unless one is named. Shown is the shortest of three
runs, in milliseconds, by the number of tokens in the batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from bench.random_model import random_model
from bench.speed import make_segment, random_rows
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sequence import KVSequence

BATCHES = (1, 8, 16, 40, 63, 64, 128)


def measure(model: Model, options: ContextOptions, tokens: int) -> list[float]:
    """Milliseconds for each of BATCHES after so many spliced tokens."""
    random = np.random.default_rng(0)
    with Context(model, options) as context:
        ids = random.integers(5, 200, tokens + max(BATCHES)).astype(np.int32)
        sequence = KVSequence(context)
        sequence.append(ids[:1])
        sequence.splice(make_segment(context, ids[:tokens], random_rows(context, tokens)))
        length, found = len(sequence), []
        for count in BATCHES:
            runs = []
            for _ in range(3):
                sequence.append(ids[tokens : tokens + count])
                started = time.perf_counter()
                sequence.flush()
                runs.append(1000 * (time.perf_counter() - started))
                sequence.truncate(length)
            found.append(min(runs))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF to measure (default: a random one, made once)")
    parser.add_argument("--tokens", type=int, default=4096, help="of the skill (default: %(default)s)")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    with Model(given.model or random_model()) as model:
        print("tokens", *(f"{count:>7}" for count in BATCHES))
        for flash in ("on", "off"):
            options = ContextOptions(n_ctx=given.tokens + 512, n_threads=given.threads, flash_attention=flash)
            print(f"{flash:6}", *(f"{run:7.0f}" for run in measure(model, options, given.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
