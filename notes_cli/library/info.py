"""Writes and parses the metadata of a segment file: the keys `notes.` of docs/format.md, without K/V and checksums."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from notes_cli.engine.gguf_file import FormatError
from notes_cli.engine.segment import (
    BLOCK,
    Q8_0,
    STORED_TYPES,
    Carry,
    FieldSpan,
    Identity,
    ImageFile,
    Media,
    Prefill,
    Segment,
    Tokens,
    quantized,
)
from notes_cli.library.gguf import Head, TensorEntry

FORMAT = 2  # of files that need it, the newest that is read
PLAIN = 1  # of files without quantized rows, images and carried state
KIND = "segment"
INFLUENCE = "notes.influence"
AXES, PICTURES = "notes.axes", "notes.pictures"  # tensors of files with images
POSITIONS = (1 << 31) - 1  # limit of llama.cpp's positions


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
    influence: bool  # the influence of the fields has been measured
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


def metadata(segment: Segment, writer: str, created: str | None) -> dict[str, str | int]:
    """Return keys (without `notes.`) and values of a segment's file, without checksums."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "format": FORMAT if any(quantized(segment.kv)) or segment.media or segment.carry else PLAIN,
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
        **({"prefill": json.dumps(asdict(segment.prefill))} if segment.prefill else {}),
        **({"backend": segment.backend} if segment.backend else {}),
        "created": created or now,
        "writer": writer,
        **{f"identity.{key}": value for key, value in segment.identity.as_dict().items()},
    }


def _carry(carry: Carry) -> dict[str, str | int]:
    heads = {str(transition.layer): transition.head for transition in carry.load() if transition.head}
    return {"carry.seam": carry.seam, "carry.tail": carry.tail, "carry.heads": json.dumps(heads)}


def read_info(path: Path, head: Head, tokens: Tokens, context: Tokens, nbytes: int) -> SegmentInfo:
    """Parse the metadata of a checked head. Raises FormatError if a key is missing or does not fit."""

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
    carries = [layers.pop(name) for name in list(layers) if ".carry." in name]
    seam, tail, heads = _margins(head, len(tokens)) if carries else (0, 0, {})
    states = {name for name in layers if ".state." in name}
    blocks = _blocks(head.metadata.get("notes.blocks"), len(tokens), first is not None)
    kv = str(head.metadata.get("notes.kv", "f16"))
    if kv not in STORED_TYPES:
        raise FormatError(f"notes.kv is {kv[:40]!r}, which is not known")
    return SegmentInfo(
        path=path,
        name=text("name"),
        description=text("description"),
        text=text("text"),
        tokens=tokens,
        context=context,
        base=base,
        prefix_only=first is not None,
        fields=_fields(text("fields"), text("text"), len(tokens)),
        blocks=blocks,
        moves=_moves(head.metadata.get("notes.moves"), len(blocks)),
        influence=INFLUENCE in head.tensors,
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
        source=text("source") if "notes.source" in head.metadata else "",
        tools=bool(head.metadata.get("notes.tools")),
        stamp=_stamp(head.metadata.get("notes.source.stamp")),
        kv=kv,
        rows=sum(place.nbytes for place in layers.values()),
        computed=_computed(layers.values(), np.dtype("<f4" if "f32" in text("identity.kv_type") else "<f2")),
        media=_media(head.metadata.get("notes.media"), len(tokens)),
        projector=text("projector") if "notes.projector" in head.metadata else "",
        pictures=_places(head.metadata.get("notes.pictures.places"), text("text")),
        prefill=_prefill(head.metadata.get("notes.prefill")),
        backend=text("backend") if "notes.backend" in head.metadata else "",
    )


def _computed(tensors: Iterable[TensorEntry], dtype: np.dtype[Any]) -> int:
    """Return the bytes of K/V before quantization, in that type."""
    return sum(
        place.nbytes // Q8_0.itemsize * BLOCK * dtype.itemsize if place.dtype == Q8_0 else place.nbytes
        for place in tensors
    )


def _dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Return the types of K and V as text."""
    named = {name: "q8_0" if place.dtype == Q8_0 else f"f{8 * place.dtype.itemsize}" for name, place in tensors.items()}
    plain = {name: kind for name, kind in named.items() if ".indexer." not in name}
    own = [{kind for name, kind in plain.items() if name.endswith(end)} for end in (".k", ".v")]
    if any(len(kinds) > 1 for kinds in own):
        return "mixed"
    return "/".join(dict.fromkeys(kind for kinds in own for kind in kinds))


def _margins(head: Head, n_tokens: int) -> tuple[int, int, dict[int, int]]:
    """Return the tokens to decode at both ends if state is carried, and the sizes of heads by layer."""
    seam, tail = (head.metadata.get(f"notes.carry.{key}") for key in ("seam", "tail"))
    if not isinstance(seam, int) or not isinstance(tail, int) or seam + tail >= n_tokens:
        raise FormatError("notes.carry does not fit its tokens")
    try:
        heads = {int(layer): size for layer, size in json.loads(str(head.metadata.get("notes.carry.heads"))).items()}
        sound = all(type(size) is int and 0 < size < POSITIONS for size in heads.values())
    except (AttributeError, ValueError, RecursionError) as error:
        raise FormatError("notes.carry.heads cannot be read") from error
    if not sound:
        raise FormatError("notes.carry.heads does not hold the sizes of heads")
    return seam, tail, heads


def field_names(fields: tuple[FieldSpan, ...]) -> list[str]:
    """Return the distinct names in the order of the text."""
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
    """Return the first token of each block; empty without the key: one block."""
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
    """Return the times that each block's K/V has been moved; zeros without the key."""
    try:
        counts = [0] * blocks if encoded is None else json.loads(str(encoded))
        sound = len(counts) == blocks and all(type(count) is int and count >= 0 for count in counts)
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError("notes.moves cannot be read") from error
    if not sound:
        raise FormatError("notes.moves does not fit its blocks")
    return tuple(counts)


def _media(encoded: object, n_tokens: int) -> tuple[Media, ...]:
    """Return the encoded images, in order; empty without the key."""
    if encoded is None:
        return ()
    try:
        entries: list[dict[str, Any]] = json.loads(str(encoded))
        images = tuple(Media(**entry) for entry in entries)
        sound = all(
            all(type(number) is int for number in (image.first, image.last, image.positions, image.width, image.height))
            and 0 <= image.first < image.last <= n_tokens
            and 0 < image.positions <= image.rows
            and re.fullmatch(r"[0-9a-f]{64}", image.sha256)
            for image in images
        )
        sound = sound and bool(images) and all(image.last <= after.first for image, after in pairwise(images))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError("its images cannot be read") from error
    if not sound:
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


def _places(encoded: object, text: str) -> tuple[Place, ...]:
    """Return the places of images in the text, in order, and in the bytes of files; empty without the key."""
    if encoded is None:
        return ()
    try:
        result = tuple(Place(*entry) for entry in json.loads(str(encoded)))
        numbers = all(type(number) is int and number >= 0 for place in result for number in place)
        sound = numbers and all(place.start < place.end <= len(text) and place.size for place in result)
        sound = sound and bool(result) and all(place.end <= after.start for place, after in pairwise(result))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError("notes.pictures.places cannot be read") from error
    if not sound:
        raise FormatError("notes.pictures.places does not fit its text")
    return result


def _prefill(encoded: object) -> Prefill | None:
    """Return the cost of compiling; None without the key."""
    if encoded is None:
        return None
    try:
        prefill = Prefill(**json.loads(str(encoded)))
        sound = all(type(number) is int and 0 < number < POSITIONS for number in (prefill.tokens, prefill.threads))
        sound = sound and type(prefill.seconds) in (int, float) and 0 <= prefill.seconds < 1e9
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError("notes.prefill cannot be read") from error
    if not sound:
        raise FormatError("notes.prefill does not hold seconds, tokens and threads")
    return prefill


def _stamp(encoded: object) -> tuple[int, ...]:
    """Return size, mtime and ctime in nanoseconds, and a fourth number if these are unreliable; empty without the
    key."""
    if encoded is None:
        return ()
    try:
        numbers: list[Any] = json.loads(str(encoded))
        sound = len(numbers) in (3, 4) and all(type(number) is int for number in numbers)
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError("notes.source.stamp cannot be read") from error
    if not sound:
        raise FormatError("notes.source.stamp holds neither three numbers nor four")
    return tuple(numbers)


def _fits(span: FieldSpan, text: str, n_tokens: int) -> bool:
    """Check a span, types included, since JSON may hold anything."""
    numbers = (span.start, span.end, span.first, span.last)
    return (
        isinstance(span.name, str)
        and span.name != ""
        and all(type(number) is int for number in numbers)
        and 0 <= span.start < span.end
        and 0 <= span.first < span.last <= n_tokens
        and text[span.start : span.end] == span.value
    )
