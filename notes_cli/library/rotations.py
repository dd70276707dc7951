"""What was measured of how keys rotate, by model, rotation and native library: a small JSON file.

Lost or damaged it costs a measurement, which is made with the next compile. It knows no contexts.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from notes_cli.engine.rotation import RotationCheck
from notes_cli.library import private
from notes_cli.library.atomic import replacing

KEPT = 256  # the latest


def load_checks(memory: Path) -> dict[str, RotationCheck | None]:
    """What is known, by key; only entries of the right shape. None: there was nothing to measure. Raise NotesError for
    what others may have written: whether rows may be moved goes by it."""
    private.check(memory.parent)
    private.check_file(memory)
    try:
        data = json.loads(memory.read_text(encoding="utf-8"))
        return {key: None if entry is None else _check_of(entry) for key, entry in data.items()}
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def keep_check(memory: Path, key: str, check: RotationCheck | None) -> None:
    """Remember one more. Two processes may write at once: the last one wins, and the other measures again some day."""
    known = load_checks(memory)
    known.pop(key, None)
    entries = [*known.items(), (key, check)][-KEPT:]
    data = {name: None if entry is None else asdict(entry) for name, entry in entries}
    with contextlib.suppress(OSError), replacing(memory) as temporary:
        temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _check_of(entry: dict[str, int | float]) -> RotationCheck:
    check = RotationCheck(**{name: entry[name] for name in ("distance", "layer", "error", "bound")})  # type: ignore[arg-type]
    kinds = [type(value) for value in asdict(check).values()]
    if kinds != [int, int, float, float] or not check.bound < 1:
        raise ValueError(entry)
    return check
