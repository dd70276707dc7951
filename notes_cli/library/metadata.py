"""Converts between a segment and the keys `notes.` of its file (docs/format.md), which must fit its tokens.

Converts dataclasses and named tuples to JSON and back, too, here and for the snapshots of sessions.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, is_dataclass
from dataclasses import fields as fields_of
from datetime import datetime, timezone
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from notes_cli.engine.gguf import FormatError
from notes_cli.engine.segment import (
    STORED_TYPES,
    FieldSpan,
    Identity,
    ImageFile,
    Media,
    MicroBatches,
    Prefill,
    Segment,
    Tokens,
    quantized,
)

FORMAT = 1
KIND = "segment"
OPTIONAL = {"kv": "f16", "source": "", "projector": "", "backend": ""}  # texts that may be left out, and their values
POSITIONS = (1 << 31) - 1  # limit of llama.cpp's positions
T = TypeVar("T")


class Place(NamedTuple):
    """An image's characters [start, end) in the text, and its file: `size` bytes of notes.pictures from `byte` on."""

    start: int
    end: int
    byte: int
    size: int


def metadata(segment: Segment, writer: str, created: str | None) -> dict[str, str | int]:
    """Return keys (without `notes.`) and values of a segment's file, without checksums."""
    carry, prefill = segment.carry, segment.prefill
    heads = {str(part.layer): part.head for part in (carry.load() if carry else ()) if part.head}
    values: dict[str, Any] = {
        "format": FORMAT,
        "kind": KIND,
        "name": segment.name,
        "description": segment.description,
        "text": segment.text,
        "fields": json.dumps([asdict(span) for span in segment.fields], ensure_ascii=False),
        "base": segment.base,
        "first": 0 if segment.prefix_only else None,
        "carry.seam": carry.seam if carry else None,
        "carry.tail": carry.tail if carry else None,
        "carry.heads": json.dumps(heads) if carry else None,
        "blocks": segment.blocks,
        "parts": segment.parts,
        "states": segment.states,
        "moves": segment.moves if any(segment.moves) else (),
        "source": segment.source or None,
        "tools": 1 if segment.tools else None,
        "kv": segment.kv if any(quantized(segment.kv)) else None,
        "source.stamp": segment.stamp,
        "media": [asdict(image) for image in segment.media],
        "projector": segment.projector or None,
        "pictures.places": places(segment.pictures)[0],
        "prefill": prefill._asdict() if prefill else (),
        "backend": segment.backend or None,
        "batches": segment.batches,
        "created": created or datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "writer": writer,
        **{f"identity.{key}": value for key, value in segment.identity.as_dict().items()},
    }
    present = {key: value for key, value in values.items() if value is not None and value not in ((), [])}
    return {key: value if isinstance(value, str | int) else json.dumps(value) for key, value in present.items()}


def places(pictures: Iterable[ImageFile]) -> tuple[list[Place], bytes]:
    """Return the place of each image, and the bytes of the distinct files."""
    offsets: dict[bytes, int] = {}
    result = []
    for picture in pictures:
        byte = offsets.setdefault(picture.data, sum(map(len, offsets)))
        result.append(Place(picture.start, picture.end, byte, len(picture.data)))
    return result, b"".join(offsets)


Keys = Mapping[str, str | int]  # of a file, without `notes.`; functions that read them raise FormatError


def text_of(keys: Keys, key: str, default: str | None = None) -> str:
    value = keys.get(key, default)
    if not isinstance(value, str):
        raise FormatError(f"notes.{key} is missing")
    return value


def number_of(keys: Keys, key: str) -> int | None:
    value = keys.get(key)
    if isinstance(value, str):
        raise FormatError(f"notes.{key} does not fit")
    return value


def _json_of(keys: Keys, key: str, read: Callable[[Any], T], default: T) -> T:
    """Return a value that is JSON, converted by `read`, which may fail for JSON of another shape."""
    if key not in keys:
        return default
    try:
        return read(json.loads(str(keys[key])))
    except FormatError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"notes.{key} cannot be read") from error


def _list_of(keys: Keys, key: str, kind: type[T]) -> tuple[T, ...]:
    """Return a list of numbers or records; empty without the key."""
    return _json_of(keys, key, partial(from_json, tuple[kind, ...]), ())  # type: ignore[valid-type]


def segment_of(keys: Keys, tokens: Tokens, context: Tokens) -> Segment:
    """Return the segment, without what its tensors hold."""
    n, base, first = len(tokens), number_of(keys, "base"), number_of(keys, "first")
    _check(n > 0, "it has no tokens")
    _check(base is not None, "notes.base is missing")
    assert base is not None
    _check(base + n <= POSITIONS, f"notes.base is {base}, which is not the position of a token")
    _check(first is None or (first == 0 and len(context) == base), "notes.first does not fit")
    texts = {key: text_of(keys, key) for key in ("name", "description", "text", "created", "writer")}
    texts |= {key: text_of(keys, key, default) for key, default in OPTIONAL.items()}
    _check(texts["kv"] in STORED_TYPES, f"notes.kv is {texts['kv'][:40]!r}, which is not known")
    text_of(keys, "fields")
    fields, media = _list_of(keys, "fields", FieldSpan), _list_of(keys, "media", Media)
    _check(all(_fits(span, texts["text"], n) for span in fields), "its fields do not fit its text")
    blocks = _list_of(keys, "blocks", int)
    batches = tuple([MicroBatches(*numbers) for numbers in _list_of(keys, "batches", tuple[int, int, int])])
    if "blocks" in keys:
        right = blocks[:1] == (0,) and all(one < other for one, other in pairwise((*blocks, n)))
        _check(first is None and right, "its blocks do not fit its tokens")
    parts = _list_of(keys, "parts", int)
    if "parts" in keys:
        right = parts[:1] == (0,) and all(one < other for one, other in pairwise((*parts, n)))
        _check(first is None and right and not blocks, "its parts do not fit its tokens")
    if "states" in keys:
        states = (0, *_list_of(keys, "states", int))
        right = first is None and len(context) == base and states[-1] == n
        _check(right and all(one < other for one, other in pairwise(states)), "its states do not fit its tokens")
    moves = _list_of(keys, "moves", int) if "moves" in keys else (0,) * len(blocks)
    _check(len(moves) == len(blocks) and min(moves, default=0) >= 0, "notes.moves does not fit its blocks")
    if "media" in keys:
        right = bool(media) and all(image.last <= after.first for image, after in pairwise(media))
        _check(right and all(_shows(image, n) for image in media), "its images do not fit its tokens")
    if "batches" in keys:
        right = all(min(batch) > 0 and max(batch) < POSITIONS for batch in batches)
        right = right and sum(batch.rows for batch in batches) == len(context) + n
        _check(right, "notes.batches does not fit its tokens")
    stamp = _list_of(keys, "source.stamp", int)
    _check(len(stamp) in (0, 3, 4), "notes.source.stamp holds neither three numbers nor four")
    prefill = _json_of(keys, "prefill", partial(from_json, Prefill), None)
    if prefill is not None:
        right = all(0 < number < POSITIONS for number in (prefill.tokens, prefill.threads))
        right = right and 0 <= prefill.seconds < 1e9
        _check(right, "notes.prefill does not hold seconds, tokens and threads")
    identity = Identity(**{part.name: text_of(keys, f"identity.{part.name}") for part in fields_of(Identity)})
    values: dict[str, Any] = {**texts, "fields": fields, "media": media, "blocks": blocks, "parts": parts}
    values |= {"states": _list_of(keys, "states", int), "moves": moves, "batches": batches, "stamp": stamp}
    values |= {"prefill": prefill, "prefix_only": first is not None, "layers": ()}
    tools = bool(number_of(keys, "tools"))
    return Segment(tokens=tokens, base=base, context=context, identity=identity, tools=tools, **values)


def heads_of(keys: Keys) -> dict[int, int]:
    """Return the rows of the matrix of each head, by layer whose transition is a matrix."""
    sizes = _json_of(keys, "carry.heads", partial(from_json, Mapping[str, int]), None)
    _check(sizes is not None and all(map(str.isdecimal, sizes)), "notes.carry does not fit its tokens")
    assert sizes is not None
    right = all(0 < size < POSITIONS for size in sizes.values())
    _check(right, "notes.carry.heads does not hold the sizes of heads")
    return {int(layer): size for layer, size in sizes.items()}


def places_of(keys: Keys, text: str) -> tuple[Place, ...]:
    """Return the places of the images."""
    found = _list_of(keys, "pictures.places", Place)
    right = all(0 <= one.start < one.end <= len(text) and one.byte >= 0 and one.size > 0 for one in found)
    right = right and all(one.end <= after.start for one, after in pairwise(found))
    _check(right, "notes.pictures.places does not fit its text")
    return found


def _fits(span: FieldSpan, text: str, n_tokens: int) -> bool:
    right = 0 <= span.start < span.end and 0 <= span.first < span.last <= n_tokens
    return right and span.name != "" and text[span.start : span.end] == span.value


def _shows(image: Media, n_tokens: int) -> bool:
    right = 0 <= image.first < image.last <= n_tokens and 0 < image.positions <= image.rows
    return right and re.fullmatch(r"[0-9a-f]{64}", image.sha256) is not None


def _check(right: bool, problem: str) -> None:
    if not right:
        raise FormatError(problem)


# JSON of records.


def to_json(value: Any) -> Any:
    """Return a value as JSON has it. Members of dataclasses that have their default are left out, sets are sorted."""
    if is_dataclass(value):
        parts = {part.name: (getattr(value, part.name), part) for part in fields_of(value)}
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
            firsts = [(option, fields_of(option)[0]) for option in options]
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
        if origin is tuple and args[-1] is not Ellipsis:
            return tuple(from_json(arg, each) for arg, each in zip(args, value, strict=True))
        if args[0] is int and all(type(each) is int for each in value):  # such as tokens
            return origin(value)
        return origin(from_json(args[0], each) for each in value)
    if origin is not None:  # a mapping
        return {from_json(args[0], key): from_json(args[1], each) for key, each in value.items()}
    if type(value) is kind or (type(value), kind) == (int, float):
        return value
    raise TypeError(kind)


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
