"""Writes and parses the head of a segment file: GGUF's values and tensors, and the keys `notes.` of docs/format.md.

Written without the package gguf, which takes 40 ms to load, because each turn of a session writes a file. Reading is
stricter than for models: other types, gaps and bytes after the last tensor raise FormatError.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.header import (
    MAGIC,
    STRING,
    UINT32,
    UINT64,
    Cursor,
    FormatError,
    ShortError,
    Tensor,
    read_counts,
    read_tensors,
    read_values,
)
from notes_cli.engine.segment import (
    BLOCK,
    Q8_0,
    STORED_TYPES,
    Carry,
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

VERSION = 3
ALIGNMENT = 32  # of every tensor, GGUF's default
DTYPES: Mapping[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 8: Q8_0, 26: np.dtype("<i4")}
# A segment has a few tensors a layer and a checksum for each: far above any model, and quick to read.
MAX_ENTRIES = 1 << 14


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor at bytes [offset, offset + nbytes) of the file, padded with zeros up to `end`."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]  # NumPy's order; counts blocks where the type is quantized
    offset: int
    nbytes: int
    end: int


@dataclass(frozen=True, slots=True)
class Head:
    """A parsed GGUF file without the tensors' bytes."""

    metadata: dict[str, str | int]
    value_offset: dict[str, int]  # offset in the file of each string value's bytes
    tensors: dict[str, TensorEntry]
    size: int  # bytes before the first tensor, padding included
    end: int  # bytes of the file


def read_head(data: memoryview, size: int | None = None) -> Head:
    """Parse the head of a GGUF file of `size` bytes from its first bytes. Raises ShortError if these are too few, and
    FormatError, also where tensors have gaps between them or do not end with the file."""
    cursor = Cursor(data)
    version, n_tensors, n_keys = read_counts(cursor, MAX_ENTRIES)
    if version != VERSION:
        raise FormatError(f"GGUF version {version}, not {VERSION}")
    metadata: dict[str, str | int] = {}
    value_offset: dict[str, int] = {}
    for key, (kind, value, offset) in read_values(cursor, n_keys).items():
        if isinstance(value, str):
            value_offset[key] = offset
        elif kind not in (UINT32, UINT64):
            raise FormatError(f"it holds a value of type {kind}, which segments do not have")
        metadata[key] = value  # type: ignore[assignment]
    infos = read_tensors(cursor, n_tensors)
    start = padded(cursor.at)
    tensors = _placed(infos, start)
    end = max((entry.end for entry in tensors.values()), default=start)
    size = len(data) if size is None else size
    if end != size:
        raise FormatError(f"it has {size} bytes, and its header describes {end}")
    if start > len(data):
        raise ShortError("it ends too early")
    return Head(metadata, value_offset, tensors, start, end)


def head_of(metadata: Mapping[str, str | int], tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the head of a file with these values (ints have 32 bits) and tensors (of DTYPES), padded to the alignment.
    The tensors follow in this order, each padded likewise."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if isinstance(value, int):
            parts += [_string(key), struct.pack("<II", UINT32, value)]
        else:
            parts += [_string(key), struct.pack("<I", STRING), _string(value)]
    offset = 0
    for name, tensor in tensors.items():
        kind = next(kind for kind, dtype in DTYPES.items() if dtype == tensor.dtype)
        *rows, columns = tensor.shape
        shape = columns * BLOCK if tensor.dtype == Q8_0 else columns, *reversed(rows)
        parts += [_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)]
        offset += padded(tensor.nbytes)
    head = b"".join(parts)
    return head.ljust(padded(len(head)), b"\0")


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def padded(size: int) -> int:
    """Round up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _placed(tensors: Mapping[str, Tensor], start: int) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    expected = 0
    for name, (dims, kind, offset) in tensors.items():
        if not dims:
            raise FormatError("it holds a tensor of 0 dimensions")
        if kind not in DTYPES:
            raise FormatError(f"it holds a tensor of type {kind}, which segments do not have")
        shape = dims[::-1]
        if DTYPES[kind] == Q8_0:
            if shape[-1] % BLOCK:
                raise FormatError(f"it holds rows of {shape[-1]} numbers, which are no whole blocks")
            shape = (*shape[:-1], shape[-1] // BLOCK)
        nbytes = prod(shape) * DTYPES[kind].itemsize
        if offset != expected or nbytes == 0:
            raise FormatError("its tensors do not follow each other")
        expected = padded(offset + nbytes)
        entries[name] = TensorEntry(DTYPES[kind], shape, start + offset, nbytes, start + expected)
    return entries


FORMAT = 1
KIND = "segment"
AXES, PICTURES = "notes.axes", "notes.pictures"  # tensors of files with images
POSITIONS = (1 << 31) - 1  # limit of llama.cpp's positions
T = TypeVar("T")


class Place(NamedTuple):
    """An image's characters [start, end) in the text, and its file: `size` bytes from `byte` on."""

    start: int
    end: int
    byte: int
    size: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """Metadata of a segment file."""

    path: Path
    name: str
    description: str
    text: str
    tokens: Tokens
    context: Tokens
    base: int
    prefix_only: bool  # with the K/V of the left context
    fields: tuple[FieldSpan, ...]
    blocks: tuple[int, ...]  # first token of each block; empty: one block
    moves: tuple[int, ...]  # times that each block's K/V has been moved since it was computed
    identity: Identity
    layers: int  # number of layers with K/V
    dtype: str  # of K/V: "f16", "f32" or "q8_0", "f16/q8_0" where K and V differ; "" without K/V
    states: int  # number of layers with a recurrent state
    carried: int  # bytes of the transitions of recurrent state; 0: it cannot be carried through the segment
    seam: int  # first and last tokens, which are decoded in place if state is carried
    tail: int
    heads: dict[int, int]  # by layer whose transition is a matrix for each head: the rows of that matrix
    nbytes: int  # size of the file
    created: str  # UTC, ISO 8601
    writer: str  # program and version
    source: str = ""  # path of the text, "-": standard input, "": not recorded
    tools: bool = False  # the text is a chat template's description of tools
    stamp: tuple[int, ...] = ()  # size and times of the source when it was read; empty: not known
    kv: str = "f16"  # stored type of K/V (engine/segment.py)
    rows: int = 0  # bytes of K/V
    computed: int = 0  # bytes of K/V in the type in which it was computed
    media: tuple[Media, ...] = ()  # encoded images
    projector: str = ""  # their vision encoder
    pictures: tuple[Place, ...] = ()  # image files in this file
    prefill: Prefill | None = None  # cost of compiling
    backend: str = ""  # that computed the K/V; empty: not known
    batches: tuple[MicroBatches, ...] = ()  # in which it was computed; empty: not known


def metadata(segment: Segment, writer: str, created: str | None) -> dict[str, str | int]:
    """Return keys (without `notes.`) and values of a segment's file, without checksums."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "format": FORMAT,
        "kind": KIND,
        "name": segment.name,
        "description": segment.description,
        "text": segment.text,
        "fields": json.dumps([asdict(span) for span in segment.fields], ensure_ascii=False),
        "base": segment.base,
        **({"first": 0} if segment.prefix_only else {}),
        **(_carry(segment.carry) if segment.carry else {}),
        **({"blocks": json.dumps(segment.blocks)} if segment.blocks else {}),
        **({"moves": json.dumps(segment.moves)} if any(segment.moves) else {}),
        **({"source": segment.source} if segment.source else {}),
        **({"tools": 1} if segment.tools else {}),
        **({"kv": segment.kv} if any(quantized(segment.kv)) else {}),
        **({"source.stamp": json.dumps(segment.stamp)} if segment.stamp else {}),
        **({"media": json.dumps([asdict(image) for image in segment.media])} if segment.media else {}),
        **({"projector": segment.projector} if segment.projector else {}),
        **({"pictures.places": json.dumps(places(segment.pictures)[0])} if segment.pictures else {}),
        **({"prefill": json.dumps(segment.prefill._asdict())} if segment.prefill else {}),
        **({"backend": segment.backend} if segment.backend else {}),
        **({"batches": json.dumps(segment.batches)} if segment.batches else {}),
        "created": created or now,
        "writer": writer,
        **{f"identity.{key}": value for key, value in segment.identity.as_dict().items()},
    }


def _carry(carry: Carry) -> dict[str, str | int]:
    heads = {str(transition.layer): transition.head for transition in carry.load() if transition.head}
    return {"carry.seam": carry.seam, "carry.tail": carry.tail, "carry.heads": json.dumps(heads)}


def read_info(path: Path, head: Head, tokens: Tokens, context: Tokens, nbytes: int) -> SegmentInfo:
    """Parse the metadata of a checked head. Raises FormatError if a key is missing or does not fit."""
    metadata = head.metadata

    def text(key: str, default: str | None = None) -> str:
        value = metadata.get(f"notes.{key}", default)
        if not isinstance(value, str):
            raise FormatError(f"notes.{key} is missing")
        return value

    def parsed(key: str, read: Callable[[Any], T], default: T) -> T:
        """Return a value that is JSON, converted by `read`, which may fail for JSON of another shape."""
        encoded = metadata.get(f"notes.{key}")
        if encoded is None:
            return default
        try:
            return read(json.loads(str(encoded)))
        except FormatError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"notes.{key} cannot be read") from error

    base, first = metadata.get("notes.base"), metadata.get("notes.first")
    if not isinstance(base, int):
        raise FormatError("notes.base is missing")
    if base + len(tokens) > POSITIONS:
        raise FormatError(f"notes.base is {base}, which is not the position of a token")
    if first is not None and (first != 0 or len(context) != base):
        raise FormatError("notes.first does not fit")
    layers = {name: place for name, place in head.tensors.items() if name.startswith("blk.")}
    carries = [layers.pop(name) for name in list(layers) if ".carry." in name]
    seam, tail = (metadata.get(f"notes.carry.{key}") if carries else 0 for key in ("seam", "tail"))
    heads = parsed("carry.heads", _heads, None) if carries else {}
    if not isinstance(seam, int) or not isinstance(tail, int) or seam + tail >= len(tokens) or heads is None:
        raise FormatError("notes.carry does not fit its tokens")
    states = {name for name in layers if ".state." in name}
    plain = 4 if "f32" in text("identity.kv_type") else 2  # bytes of a number before quantization
    blocks: tuple[int, ...] = parsed("blocks", partial(_blocks, n_tokens=len(tokens), whole=first is not None), ())
    kv = text("kv", "f16")
    if kv not in STORED_TYPES:
        raise FormatError(f"notes.kv is {kv[:40]!r}, which is not known")
    text("fields")
    return SegmentInfo(
        path=path,
        name=text("name"),
        description=text("description"),
        text=text("text"),
        tokens=tokens,
        context=context,
        base=base,
        prefix_only=first is not None,
        fields=parsed("fields", partial(_fields, text=text("text"), n_tokens=len(tokens)), ()),
        blocks=blocks,
        moves=parsed("moves", partial(_moves, blocks=len(blocks)), (0,) * len(blocks)),
        identity=Identity(**{part.name: text(f"identity.{part.name}") for part in fields_of(Identity)}),
        layers=len({name.split(".")[1] for name in layers.keys() - states}),
        dtype=_dtype({name: place for name, place in layers.items() if name not in states}),
        states=len({name.split(".")[1] for name in states}),
        carried=sum(place.nbytes for place in carries),
        seam=seam,
        tail=tail,
        heads=heads,
        nbytes=nbytes,
        created=text("created"),
        writer=text("writer"),
        source=text("source", ""),
        tools=bool(metadata.get("notes.tools")),
        stamp=parsed("source.stamp", _stamp, ()),
        kv=kv,
        rows=sum(place.nbytes for place in layers.values()),
        computed=sum(
            place.nbytes // Q8_0.itemsize * BLOCK * plain if place.dtype == Q8_0 else place.nbytes
            for place in layers.values()
        ),
        media=parsed("media", partial(_media, n_tokens=len(tokens)), ()),
        projector=text("projector", ""),
        pictures=parsed("pictures.places", partial(_places, text=text("text")), ()),
        prefill=parsed("prefill", _prefill, None),
        backend=text("backend", ""),
        batches=parsed("batches", partial(_batches, rows=len(context) + len(tokens)), ()),
    )


def _dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the types of K and V as text."""
    named = {name: "q8_0" if place.dtype == Q8_0 else f"f{8 * place.dtype.itemsize}" for name, place in tensors.items()}
    plain = {name: kind for name, kind in named.items() if ".indexer." not in name}
    own = [{kind for name, kind in plain.items() if name.endswith(end)} for end in (".k", ".v")]
    if any(len(kinds) > 1 for kinds in own):
        return "mixed"
    return "/".join(dict.fromkeys(kind for kinds in own for kind in kinds))


def _heads(data: Any) -> dict[int, int]:
    heads = {int(layer): size for layer, size in data.items()}
    if not all(type(size) is int and 0 < size < POSITIONS for size in heads.values()):
        raise FormatError("notes.carry.heads does not hold the sizes of heads")
    return heads


def _fields(data: Any, text: str, n_tokens: int) -> tuple[FieldSpan, ...]:
    spans = tuple(FieldSpan(**entry) for entry in data)
    sound = all(
        all(type(number) is int for number in (span.start, span.end, span.first, span.last))
        and isinstance(span.name, str)
        and span.name != ""
        and 0 <= span.start < span.end
        and 0 <= span.first < span.last <= n_tokens
        and text[span.start : span.end] == span.value
        for span in spans
    )
    if not sound:
        raise FormatError("its fields do not fit its text")
    return spans


def _blocks(data: Any, n_tokens: int, whole: bool) -> tuple[int, ...]:
    ascending = all(type(start) is int and start < end for start, end in pairwise([*data, n_tokens]))
    if whole or not ascending or data[0] != 0:
        raise FormatError("its blocks do not fit its tokens")
    return tuple(data)


def _moves(data: Any, blocks: int) -> tuple[int, ...]:
    if len(data) != blocks or not all(type(count) is int and count >= 0 for count in data):
        raise FormatError("notes.moves does not fit its blocks")
    return tuple(data)


def _media(data: Any, n_tokens: int) -> tuple[Media, ...]:
    images = tuple(Media(**entry) for entry in data)
    sound = all(
        all(type(number) is int for number in (image.first, image.last, image.positions, image.width, image.height))
        and 0 <= image.first < image.last <= n_tokens
        and 0 < image.positions <= image.rows
        and re.fullmatch(r"[0-9a-f]{64}", image.sha256)
        for image in images
    )
    if not (sound and images and all(image.last <= after.first for image, after in pairwise(images))):
        raise FormatError("its images do not fit its tokens")
    return images


def places(pictures: Iterable[ImageFile]) -> tuple[list[Place], bytes]:
    """Return the place of each image, and the bytes of the distinct files."""
    offsets: dict[bytes, int] = {}
    result = []
    for picture in pictures:
        byte = offsets.setdefault(picture.data, sum(map(len, offsets)))
        result.append(Place(picture.start, picture.end, byte, len(picture.data)))
    return result, b"".join(offsets)


def _places(data: Any, text: str) -> tuple[Place, ...]:
    result = tuple(Place(*entry) for entry in data)
    numbers = all(type(number) is int and number >= 0 for place in result for number in place)
    sound = numbers and all(place.start < place.end <= len(text) and place.size for place in result)
    if not (sound and result and all(place.end <= after.start for place, after in pairwise(result))):
        raise FormatError("notes.pictures.places does not fit its text")
    return result


def _prefill(data: Any) -> Prefill:
    prefill = Prefill(**data)
    sound = all(type(number) is int and 0 < number < POSITIONS for number in (prefill.tokens, prefill.threads))
    if not (sound and type(prefill.seconds) in (int, float) and 0 <= prefill.seconds < 1e9):
        raise FormatError("notes.prefill does not hold seconds, tokens and threads")
    return prefill


def _batches(data: Any, rows: int) -> tuple[MicroBatches, ...]:
    batches = tuple(MicroBatches(*entry) for entry in data)
    sound = all(type(number) is int and 0 < number < POSITIONS for batch in batches for number in batch)
    if not (sound and sum(batch.rows for batch in batches) == rows):
        raise FormatError("notes.batches does not fit its tokens")
    return batches


def _stamp(data: Any) -> tuple[int, ...]:
    if len(data) not in (3, 4) or not all(type(number) is int for number in data):
        raise FormatError("notes.source.stamp holds neither three numbers nor four")
    return tuple(data)
