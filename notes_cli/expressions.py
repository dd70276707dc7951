"""Regular expressions that are compiled at their first use: `expression` for the modules that an answer loads.

They load forty, of which an answer uses half, and Python takes a tenth of a millisecond for each.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Expression:
    """Has what a compiled expression has, from the moment when any of it is asked for."""

    def __init__(self, written: str, flags: int) -> None:
        self._written, self._flags = written, flags

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(self._written, self._flags)
        methods = ("fullmatch", "match", "search", "sub", "split", "findall", "finditer")
        vars(self).update({method: getattr(compiled, method) for method in methods})  # from now on without this detour
        return getattr(compiled, name)


def expression(written: str, flags: int = 0) -> re.Pattern[str]:
    """As `re.compile`. What is wrong with it is raised at the first use."""
    made: Any = _Expression(written, flags)
    return made  # type: ignore[no-any-return]
