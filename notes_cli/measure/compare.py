"""Two sets of logits compared: how near is one next-token distribution to another?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.decision import log_softmax


def cosine(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Cosine of two logit vectors, [n_vocab] each: 1 when they point the same way."""
    a, b = found.astype(np.float64), reference.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def divergence(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """KL(reference || found) of the next-token distributions, in nats."""
    p, q = log_softmax(reference), log_softmax(found)
    possible = ~np.isneginf(p)  # what the reference rules out weighs nothing
    kl = float((np.exp(p[possible]) * (p[possible] - q[possible])).sum())
    return kl if kl > 0 or np.isnan(kl) else 0.0


def same_top(found: NDArray[np.float32], reference: NDArray[np.float32]) -> bool:
    """Whether both put the same token first."""
    return int(found.argmax()) == int(reference.argmax())
