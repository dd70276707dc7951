"""Whether our engine computes what PyTorch does: logits of random tokens on the exported file, weights in f32.

python -m training.hybrid.parity [--work FOLDER]     the checkpoint in FOLDER, else random weights; exits 1 if not
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from training import tokenizer
from training.hybrid import export, model

BOUND = 1e-9  # normalised mean squared error of the logits
TOKENS = 150


def random_net(vocab: int) -> model.Hybrid:
    """Every weight is something, and no state forgets within a few tokens."""
    torch.manual_seed(0)
    net = model.Hybrid(model.Shape(vocab=vocab))
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight += torch.randn_like(weight) * (0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
            weight -= 3.0 * name.endswith("a_log")
    return net


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where train.py left hybrid.pt")
    given = parser.parse_args()
    made = tokenizer.train()
    net = random_net(-(-made.get_vocab_size() // 32) * 32)
    if given.work:
        found = torch.load(given.work / "hybrid.pt")
        net = model.Hybrid(model.Shape(**found["shape"]))
        net.load_state_dict(found["state"])
    ids = torch.randint(0, net.shape.vocab, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = net(ids)[0].numpy()
    options = ContextOptions(512, 64, 64, 1, type_k="f32", type_v="f32", flash_attention="off")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "parity.gguf"
        export.write(net, made, path, "f32")
        with Model(path) as ours, Context(ours, options) as context:
            rows = []
            for token in ids[0].numpy().astype(np.int32):
                context.append({0: token[None]}, "all")
                rows.append(context.logits(0).copy())
    error = float(((np.array(rows) - wanted) ** 2).mean() / (wanted**2).mean())
    print(f"normalised mean squared error of the logits after {TOKENS} tokens: {error:.1e}")
    return int(not error < BOUND)


if __name__ == "__main__":
    sys.exit(main())
