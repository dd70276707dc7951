"""Whether what precedes a splice, decoded in one pass with what follows, gives what decoding it first gives.

    python -m bench.one_pass [NAME ...]     models of llama.cpp's zoo (build/zoo/models), else all of them

Rows and logits, in f16 without flash attention and with it, and in f32. Prints what is beyond the bounds (normalised
mean squared errors of 1e-5, of f32 1e-6), and how many were within. Contexts that decode it first anyway are left out,
and so are models with fewer tokens than are asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from bench.zoo_model import nmse
from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError

MODELS = Path(__file__).resolve().parents[1] / "build" / "zoo" / "models"
KINDS = {("f16", "off"): 1e-5, ("f16", "on"): 1e-5, ("f32", "off"): 1e-6}
random = np.random.default_rng(1)
LEFT, SKILL, ASKED = (random.integers(0, 128, count).astype(np.int32) for count in (5, 24, 6))


def errors(model: Model, kv: str, flash: str) -> tuple[float, float] | None:
    """Of the logits, and the worst of any layer's rows; None where nothing waits."""
    sizes = {"n_ctx": 256, "n_threads": 1, "n_batch": 64, "n_ubatch": 64}
    options = ContextOptions(**sizes, type_k=kv, type_v=kv, flash_attention=flash)  # type: ignore[arg-type]
    with Context(model, options) as context:
        if not context.completes:
            return None
        context.append({0: np.concatenate([LEFT, SKILL])})
        rows = context.read(0, len(LEFT), len(SKILL), base=len(LEFT), dtype=kv)
        segment = Segment("s", "", "", SKILL, len(LEFT), LEFT, (), context.identity("w"), rows)
        found = []
        for later in (False, True):
            context.clear()
            with Notebook(context) as notebook:
                notebook.append([*LEFT[::-1], 3])
                notebook.splice(segment, seam=1, later=later)
                notebook.append(ASKED)
                logits = notebook.logits()
                layers = context.read(notebook.sequence, 0, len(notebook), base=0, dtype="f32")
                found.append((logits, layers))
        (first, before), (one, after) = found
        pairs = [pair for a, b in zip(after, before, strict=True) for pair in ((a.k, b.k), (a.v, b.v)) if pair[1].size]
        return nmse(one, first), max(nmse(a, b) for a, b in pairs)


def main() -> int:
    within, beyond = 0, 0
    for path in [MODELS / f"{name}.gguf" for name in sys.argv[1:]] or sorted(MODELS.glob("*.gguf")):
        try:
            with Model(path, gpu_layers=0) as model:
                for (kv, flash), bound in KINDS.items() if model.n_vocab >= 128 else ():
                    found = errors(model, kv, flash)
                    if found and max(found) > bound:
                        beyond += 1
                        print(f"{path.stem}, {kv}, flash attention {flash}: logits {found[0]:.1e}, rows {found[1]:.1e}")
                    within += bool(found and max(found) <= bound)
        except NotesError as error:
            print(f"{path.stem} is left out: {error}")
    print(f"{within} within the bounds, {beyond} beyond")
    return int(beyond > 0)


if __name__ == "__main__":
    sys.exit(main())
