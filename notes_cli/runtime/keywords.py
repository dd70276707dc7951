"""Keywords: the error for one that a function does not have names the closest that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from inspect import signature
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

R = TypeVar("R")

# Names of other programs that are not like ours.
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
    """The parameters of a function, in the order of its signature."""
    return tuple(name for name in signature(function).parameters if name != "self")


def check_keywords(
    function: Callable[..., object], given: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for a keyword that the function does not have. `elsewhere`: what to write for names that it takes
    in another form."""
    known = keywords(function)
    for word in given:
        if word in known:
            continue
        from difflib import get_close_matches

        forms = {**(elsewhere or {}), **{name: name for name in known}}
        other = OTHERS.get(word, word)
        close = [other] if other in forms else get_close_matches(word, forms, 1)
        advice = f"Did you mean {forms[close[0]]}?" if close else f"Its options: {', '.join(known)}"
        raise TypeError(f"{function.__name__}() has no option {word!r}. {advice}")


def checked(elsewhere: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function, with its keywords checked."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            check_keywords(function, kwargs, elsewhere)
            return function(*args, **kwargs)

        return called

    return decorate
