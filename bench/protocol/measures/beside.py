"""What is told beside an agreement: the cosine and KL of the logits at the end of a prompt, and the margin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.experiments.table import Row
from notes_cli.engine.decision import Decision
from notes_cli.measure.compare import cosine, divergence


def beside(found: NDArray[np.float32], wanted: NDArray[np.float32], decision: Decision, of: str = "") -> Row:
    """Columns `of`cosine, `of`kl and `of`margin."""
    return {
        f"{of}cosine": cosine(found, wanted),
        f"{of}kl": divergence(found, wanted),
        f"{of}margin": decision.margin,
    }
