"""Select parts of a long measurement by name, or by the part of a name up to a slash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Named(Protocol):
    """A part: `model/system/rate` or the like."""

    @property
    def name(self) -> str: ...


Part = TypeVar("Part", bound=Named)


def chosen(every: Sequence[Part], only: Sequence[str], what: str, forms: str) -> list[Part]:
    """Return the parts with a name, or below one; by default all. Raises SystemExit for an unknown name. `what`: the
    kind of part; `forms`: of names."""
    for wanted in only:
        if not any(_below(part.name, wanted) for part in every):
            raise SystemExit(f"there is no {what} {wanted}: {forms}, as {every[0].name}")
    return [part for part in every if not only or any(_below(part.name, wanted) for wanted in only)]


def _below(name: str, wanted: str) -> bool:
    return f"{name}/".startswith(f"{wanted}/")
