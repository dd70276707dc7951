"""What was measured of how keys rotate, by model, rotation and native library. It knows no contexts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from notes_cli.engine.rotation import RotationCheck
from notes_cli.library.memory import Memory

KEPT = 256


def rotation_checks(path: Path) -> Memory[RotationCheck | None]:
    """Those that are known; None: there was nothing to measure. Whether rows may be moved goes by them."""
    return Memory(path, KEPT, _check_of, lambda check: check and asdict(check))


def _check_of(entry: dict[str, int | float] | None) -> RotationCheck | None:
    if entry is None:
        return None
    check = RotationCheck(**{name: entry[name] for name in ("distance", "layer", "error", "bound")})  # type: ignore[arg-type]
    kinds = [type(value) for value in asdict(check).values()]
    if kinds != [int, int, float, float] or not check.bound < 1:
        raise ValueError(entry)
    return check
