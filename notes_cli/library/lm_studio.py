"""LM Studio's models: `PUBLISHER/MODEL/*.gguf` in one folder. They may be links to anywhere: its import makes such."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from notes_cli.library.named import Named, Tell, files, listed

STORE = "LM Studio"


def models(root: Path, tell: Tell) -> Iterator[Named]:
    """All models in the folder; what is wrong with one is said in it."""
    for publisher in listed(root, tell):
        for model in listed(root / publisher, tell):
            folder = root / publisher / model
            yield from files(STORE, (f"{publisher}/{model}",), (folder / name for name in listed(folder, tell)))
