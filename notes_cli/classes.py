"""Dataclasses with slots that cost little to define: `dataclass` for the modules that an answer loads.

Python writes and compiles six methods for each frozen dataclass, a third of a millisecond, and an answer needs some
seventy classes, of which it makes instances of half. Here a class gets an `__init__` of its own when it is first asked
for, and shares the rest with all others. To users they are dataclasses: `fields`, `replace`, `asdict`, `copy`,
`pickle`, `match`, `inspect` and type checkers find what they look for.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, fields
from dataclasses import dataclass as _dataclass
from operator import attrgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass
    from typing import Any, NoReturn
else:

    def dataclass(*, slots: bool, frozen: bool = False, eq: bool = True) -> Callable[[type], type]:
        """As `dataclasses.dataclass` with slots. Raise TypeError for what is not made here."""
        if not slots:
            raise TypeError("a dataclass without slots is for dataclasses.dataclass to make")
        return lambda cls: _defined(cls, frozen, eq)


class _Made:
    """The default of a parameter whose value is made for each instance."""

    def __repr__(self) -> str:
        return "<factory>"


_MADE = _Made()


def _defined(cls: type, frozen: bool, eq: bool) -> Any:
    cls.__doc__ = cls.__doc__ or cls.__name__  # else its signature is written there, which takes a parser
    made: Any = _dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    methods: dict[str, Any] = {"__init__": _Init(made, frozen), "__repr__": _repr}
    if frozen:
        methods |= {"__setattr__": _refuse, "__delattr__": _refuse_deletion}
        methods |= {"__getstate__": _state, "__setstate__": _restore}
    if eq:
        methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
        made.__compared__ = _getter([field.name for field in fields(made) if field.compare])
    for name, method in methods.items():
        if cls.__dict__.get(name) is None:  # else the class has a better one
            setattr(made, name, method)
    return made


class _Init:
    """The `__init__` of a class, which is written and takes this one's place when it is first asked for."""

    def __init__(self, cls: Any, frozen: bool) -> None:
        for field in fields(cls):
            if not field.init or field.kw_only or field.hash is not None:
                raise TypeError(f"{field.name} is a field for dataclasses.dataclass to make")
        self._of, self._frozen = cls, frozen

    def __get__(self, one: Any, of: Any = None) -> Callable[..., None]:
        written = _init(self._of, self._frozen)
        self._of.__init__ = written
        return written.__get__(one, of)  # type: ignore[no-any-return]


def _init(cls: Any, frozen: bool) -> Callable[..., None]:
    """The class's `__init__`, with a parameter for each field."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_MADE": _MADE}
    parameters, body = ["self"], []
    for field in fields(cls):
        name = value = parameter = field.name
        if field.default is not MISSING:
            parameter = f"{name}=_default_{name}"
            known[f"_default_{name}"] = field.default
        elif field.default_factory is not MISSING:
            parameter = f"{name}=_MADE"
            value = f"_make_{name}() if {name} is _MADE else {name}"
            known[f"_make_{name}"] = field.default_factory
        parameters.append(parameter)
        body.append(f" _set(self, {name!r}, {value})" if frozen else f" self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append(" self.__post_init__()")
    exec("\n".join([f"def __init__({', '.join(parameters)}):", *(body or [" pass"])]), known)
    made: Callable[..., None] = known["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__module__ = cls.__module__
    made.__annotations__ = {**{field.name: field.type for field in fields(cls)}, "return": None}
    return made


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The values of these, in their order."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda one: tuple(getattr(one, name) for name in names)


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> bool:
    if other.__class__ is not self.__class__:
        return NotImplemented  # type: ignore[no-any-return]
    compared: Callable[[Any], tuple[Any, ...]] = self.__class__.__compared__
    same: bool = compared(self) == compared(other)
    return same


def _hash(self: Any) -> int:
    return hash(self.__class__.__compared__(self))


def _refuse(self: Any, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
