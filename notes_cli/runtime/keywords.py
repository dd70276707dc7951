"""Raises TypeError for unknown keyword arguments, and suggests the closest known one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

R = TypeVar("R")

# Names in other programs that are not similar to ours.
OTHERS = {
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n_gpu": "n_gpu_layers",
    "response_format": "json_schema",
    "skill": "splice",
    "skills": "splice",
    "temp": "temperature",
}


@cache
def keywords(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the parameters of a function in the order of its signature."""
    return tuple(name for name in signature(function).parameters if name != "self")


def check_keywords(
    function: Callable[..., object], keywords_: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for an unknown keyword. `elsewhere`: replacements for names that the function takes in another
    form."""
    known = keywords(function)
    for word in keywords_:
        if word in known:
            continue
        from difflib import get_close_matches

        forms = {**(elsewhere or {}), **{name: name for name in known}}
        own_name = OTHERS.get(word, word)
        close = [own_name] if own_name in forms else get_close_matches(word, forms, 1)
        advice = f"Did you mean {forms[close[0]]}?" if close else f"Its options: {', '.join(known)}"
        raise TypeError(f"{function.__name__}() has no option {word!r}. {advice}")


def checked(elsewhere: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that its keywords are checked."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            check_keywords(function, kwargs, elsewhere)
            return function(*args, **kwargs)

        return wrapper

    return decorate
