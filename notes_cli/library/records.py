"""Converts dataclasses and named tuples to JSON and back, with the types of their members checked."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def to_json(value: Any) -> Any:
    """Return a value as JSON has it. Members of dataclasses that have their default are left out, sets are sorted."""
    if is_dataclass(value):
        parts = {part.name: (getattr(value, part.name), part) for part in fields(value)}
        return {name: to_json(each) for name, (each, part) in parts.items() if each != _default(part)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: to_json(each) for key, each in value.items()}
    if isinstance(value, (tuple, frozenset)):
        return [to_json(each) for each in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


def _default(part: Any) -> Any:
    return part.default_factory() if part.default_factory is not MISSING else part.default


def from_json(kind: Any, value: Any) -> Any:
    """Return the value of this type. A number with a fraction may be whole, a named tuple an object or a list.

    Raises AttributeError, LookupError, TypeError or ValueError for JSON of another type, and RecursionError.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [option for option in args if option is not type(None)]
        if len(options) > 1:  # dataclasses, which the first member tells apart: a text
            firsts = [(option, fields(option)[0]) for option in options]
            options = [option for option, first in firsts if first.name in value and first.type == "str"]
        return from_json(options[0], value)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        if value not in (args or [each.value for each in kind]):
            raise ValueError(value)
        return value if args else kind(value)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = _types(kind)
        if isinstance(value, list) and not is_dataclass(kind):
            value = dict(zip(hints, value, strict=True))
        if not isinstance(value, dict) or not value.keys() <= hints.keys():
            raise TypeError(kind)
        return kind(**{name: from_json(hints[name], each) for name, each in value.items()})
    if origin in (tuple, list, frozenset):
        if not isinstance(value, list):
            raise TypeError(kind)
        if args[0] is int and all(type(each) is int for each in value):  # such as tokens
            return origin(value)
        if origin is tuple and args[-1] is not Ellipsis:
            return tuple(from_json(arg, each) for arg, each in zip(args, value, strict=True))
        return origin(from_json(args[0], each) for each in value)
    if origin is not None:  # a mapping
        return {from_json(args[0], key): from_json(args[1], each) for key, each in value.items()}
    if type(value) is kind or (type(value), kind) == (int, float):
        return value
    raise TypeError(kind)


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
