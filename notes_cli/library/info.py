"""What a segment file says of itself: its metadata, written and read back.

The keys are described in docs/format.md, under `notes.`. It knows neither rows nor checksums.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from notes_cli.engine.identity import Identity
from notes_cli.engine.segment import FieldSpan, Segment, Tokens
from notes_cli.library.gguf import Head
from notes_cli.library.metadata import FormatError

FORMAT = 1  # changes when an older version would read a newer file wrongly
KIND = "segment"
INFLUENCE = "notes.influence"
POSITIONS = (1 << 31) - 1  # of tokens, as llama.cpp counts them


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What a segment file says of itself, without the rows."""

    path: Path
    name: str
    description: str
    text: str
    tokens: Tokens
    context: Tokens
    base: int
    pinned: bool  # the rows of the left context are there, too
    fields: tuple[FieldSpan, ...]
    blocks: tuple[int, ...]  # the first token of each; empty: one block
    moves: tuple[int, ...]  # of each block: how often its rows have been moved since they were computed
    influence: bool  # whether the influence of the fields has been measured
    identity: Identity
    layers: int  # how many layers have rows
    dtype: str  # of the rows: "f16" or "f32"; "" if no layer has any
    states: int  # how many layers have a recurrent state
    nbytes: int  # size of the file
    created: str  # UTC, ISO 8601
    writer: str  # the program that wrote it, with its version
    source: str = ""  # where the text came from: a path, "-" for standard input; "" of a file that does not say
    tools: bool = False  # the text is what a chat template tells of tools
    stamp: tuple[int, ...] = ()  # size and times of that file when its text was read; empty: not known


def metadata(segment: Segment, writer: str, created: str | None) -> dict[str, str | int]:
    """Keys (without `notes.`) and values of a segment's file, its checksums apart."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "format": FORMAT,
        "kind": KIND,
        "name": segment.name,
        "description": segment.description,
        "text": segment.text,
        "fields": json.dumps([asdict(span) for span in segment.fields], ensure_ascii=False),
        "base": segment.base,
        **({"first": 0} if segment.pinned else {}),
        **({"blocks": json.dumps(segment.blocks)} if segment.blocks else {}),
        **({"moves": json.dumps(segment.moves)} if any(segment.moves) else {}),
        **({"source": segment.source} if segment.source else {}),
        **({"tools": 1} if segment.tools else {}),
        **({"source.stamp": json.dumps(segment.stamp)} if segment.stamp else {}),
        "created": created or now,
        "writer": writer,
        **{f"identity.{key}": value for key, value in segment.identity.as_dict().items()},
    }


def read_info(path: Path, head: Head, tokens: Tokens, context: Tokens, nbytes: int) -> SegmentInfo:
    """The info of a file whose head has been checked. Raise FormatError if a key is missing or does not
    fit."""

    def text(key: str) -> str:
        value = head.metadata.get(f"notes.{key}")
        if not isinstance(value, str):
            raise FormatError(f"notes.{key} is missing")
        return value

    base = head.metadata.get("notes.base")
    if not isinstance(base, int):
        raise FormatError("notes.base is missing")
    if base + len(tokens) > POSITIONS:
        raise FormatError(f"notes.base is {base}, which is not the position of a token")
    first = head.metadata.get("notes.first")
    if first is not None and (first != 0 or len(context) != base):
        raise FormatError("notes.first does not fit")
    layers = {name: place for name, place in head.tensors.items() if name.startswith("blk.")}
    states = {name for name in layers if ".state." in name}
    blocks = _blocks(head.metadata.get("notes.blocks"), len(tokens), first is not None)
    types = {f"f{8 * place.dtype.itemsize}" for name, place in layers.items() if name not in states}
    return SegmentInfo(
        path=path,
        name=text("name"),
        description=text("description"),
        text=text("text"),
        tokens=tokens,
        context=context,
        base=base,
        pinned=first is not None,
        fields=_fields(text("fields"), text("text"), len(tokens)),
        blocks=blocks,
        moves=_moves(head.metadata.get("notes.moves"), len(blocks)),
        influence=INFLUENCE in head.tensors,
        identity=Identity(**{part.name: text(f"identity.{part.name}") for part in fields_of(Identity)}),
        layers=len({name.split(".")[1] for name in layers.keys() - states}),
        dtype="mixed" if len(types) > 1 else "".join(types),
        states=len({name.split(".")[1] for name in states}),
        nbytes=nbytes,
        created=text("created"),
        writer=text("writer"),
        source=text("source") if "notes.source" in head.metadata else "",
        tools=bool(head.metadata.get("notes.tools")),
        stamp=_stamp(head.metadata.get("notes.source.stamp")),
    )


def field_names(fields: tuple[FieldSpan, ...]) -> list[str]:
    """Each name once, in the order of the text."""
    return list(dict.fromkeys(span.name for span in fields))


def _fields(encoded: str, text: str, n_tokens: int) -> tuple[FieldSpan, ...]:
    try:
        entries: list[dict[str, Any]] = json.loads(encoded)
        spans = tuple(FieldSpan(**entry) for entry in entries)
        sound = all(_fits(span, text, n_tokens) for span in spans)
    except (TypeError, RecursionError) as error:
        raise FormatError("its fields cannot be read") from error
    if not sound:
        raise FormatError("its fields do not fit its text")
    return spans


def _blocks(encoded: object, n_tokens: int, whole: bool) -> tuple[int, ...]:
    """The first token of each block. Without the key it is one."""
    if encoded is None:
        return ()
    try:
        starts: list[Any] = json.loads(str(encoded))
        ends = [*starts[1:], n_tokens]
        numbers = all(type(start) is int for start in starts)
        sound = numbers and starts[0] == 0 and all(start < end for start, end in zip(starts, ends, strict=True))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise FormatError("its blocks cannot be read") from error
    if whole or not sound:
        raise FormatError("its blocks do not fit its tokens")
    return tuple(starts)


def _moves(encoded: object, blocks: int) -> tuple[int, ...]:
    """How often the rows of each block have been moved: never, without the key."""
    try:
        counts = [0] * blocks if encoded is None else json.loads(str(encoded))
        sound = len(counts) == blocks and all(type(count) is int and count >= 0 for count in counts)
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError("notes.moves cannot be read") from error
    if not sound:
        raise FormatError("notes.moves does not fit its blocks")
    return tuple(counts)


def _stamp(encoded: object) -> tuple[int, ...]:
    """Size, time of change and time of status change, in nanoseconds; nothing without the key."""
    if encoded is None:
        return ()
    try:
        numbers: list[Any] = json.loads(str(encoded))
        sound = len(numbers) == 3 and all(type(number) is int for number in numbers)
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError("notes.source.stamp cannot be read") from error
    if not sound:
        raise FormatError("notes.source.stamp does not hold three numbers")
    return tuple(numbers)


def _fits(span: FieldSpan, text: str, n_tokens: int) -> bool:
    """JSON may hold anything: types are checked too."""
    numbers = (span.start, span.end, span.first, span.last)
    return (
        isinstance(span.name, str)
        and span.name != ""
        and all(type(number) is int for number in numbers)
        and 0 <= span.start < span.end
        and 0 <= span.first < span.last <= n_tokens
        and text[span.start : span.end] == span.value
    )
