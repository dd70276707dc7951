"""Select parts of a long measurement by name, or by the part of a name up to a slash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def chosen(every: Sequence[Any], only: Sequence[str], what: str, forms: str) -> list[Any]:
    """Return the parts whose `name` (`model/system/rate`) is given or below a given one; by default all. Raises
    SystemExit for an unknown name. `what`: the kind of part; `forms`: of names."""
    for wanted in only:
        if not any(f"{part.name}/".startswith(f"{wanted}/") for part in every):
            raise SystemExit(f"there is no {what} {wanted}: {forms}, as {every[0].name}")
    return [part for part in every if not only or f"{part.name}/".startswith(tuple(f"{wanted}/" for wanted in only))]
