"""What moving rows again and again does to them: each time their keys are rounded to the cache's type once more.

    python -m bench.drift [--model FILE]

A text follows one token, which becomes two and one again: each time the rows after it move by a position. Shown
is the largest squared error of a row, normalised, against the rows before the first move. The limits on edits in place
(sessions/session.py) and on blocks that are used again (runtime/compiling.py) rest on this.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from notes_cli import config
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.patches import Patch
from notes_cli.engine.segment import LayerRows

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
MOVES = (2, 4, 8, 16, 32, 64, 128)  # even: the text is back where it was
TEXT = "Returns before 2026-06-15 are accepted. Gold members have ten days more, and the shipping is free. " * 2


def worst(found: tuple[LayerRows, ...], before: tuple[LayerRows, ...]) -> float:
    """Of all rows of all layers, K and V."""
    pairs = [
        (a, b) for mine, theirs in zip(found, before, strict=True) for a, b in ((mine.k, theirs.k), (mine.v, theirs.v))
    ]
    return max(float((((a - b) ** 2).sum(1) / ((b**2).sum(1) + 1e-9)).max()) for a, b in pairs)


def measure(model: Model, kind: str) -> list[float]:
    """Errors after each number of MOVES."""
    options = ContextOptions(n_ctx=512, n_threads=1, type_k=kind, type_v=kind)
    with Context(model, options) as context:
        notebook = Notebook(context)
        tokens = model.tokenize(TEXT)
        notebook.append([*tokens[:2], *tokens])
        notebook.flush()

        def rows() -> tuple[LayerRows, ...]:
            return context.read(0, 2, len(tokens), base=2, dtype="f32")

        before, found = rows(), []
        for move in range(1, max(MOVES) + 1):
            last = 2 if move % 2 else 3
            notebook.replace([Patch(1, last, [int(tokens[1])] * (4 - last))])
            if move in MOVES:
                found.append(worst(rows(), before))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF to measure (default: the one that ships)")
    given = parser.parse_args()
    with Model(given.model or config.shipped_model()) as model:
        print("moves", *(f"{move:>8}" for move in MOVES))
        for kind in TYPES:
            print(f"{kind:5}", *(f"{error:8.1e}" for error in measure(model, kind)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
