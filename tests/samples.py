"""Skills in the plain sentences that the tiny model reads."""

from __future__ import annotations

from pathlib import Path

SAMPLES = Path(__file__).parent / "skills"
