"""The model that shipped first, which looks a field up when it is asked: an ablation, and what some figures are of."""

from __future__ import annotations

from pathlib import Path

REVERSED = Path(__file__).resolve().parents[1] / "training" / "notes-reversed-q8_0.gguf"
REVERSED_NAME = "notes-reversed"  # of itself it says that it is notes-tiny: it shipped as that


def reversed_model() -> Path:
    """Its file."""
    return REVERSED
