"""What measures, as a digest: rows of the same model, commit and words are the same only where it is."""

from __future__ import annotations

from bench.experiments.keeping import ROOT, digest

FOLDERS = ("bench/experiments", "bench/protocol/measures", "notes_cli", "prompts")
FILES = (
    *("bench/protocol/lives.py", "bench/protocol/texts.py", "bench/protocol/seeds.py"),
    *("training/world.py", "training/model.py"),
)
# Of training/tiny: what trains goes on changing.
TINY = ("world.py", "words.py", "words.txt", "measure.py", "heads.py", "weights.py")


def sources() -> str:
    """The digest of all that measures."""
    return digest(ROOT / name for name in (*FOLDERS, *FILES, *(f"training/tiny/{name}" for name in TINY)))
