"""Defines Segment: a compiled skill's tokens with their K/V, independent of any context.

Plain data between folders: KVSequence reads and places it, the library stores it. Its K/V is in memory or in a file of
the library, whose format is not known here.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from notes_cli.errors import EngineError, NotesError, SegmentError

Tokens = NDArray[np.int32]
BLOCK = 32  # values per scale in a block of Q8_0
Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)])
RowArray = NDArray[np.float16] | NDArray[np.float32]  # or an array of Q8_0 blocks
# Stored types of K/V, as in a cache: as computed (f16; f32 for an f32 cache), or quantized.
STORED_TYPES = ("f16", "f16/q8_0", "q8_0")


def quantized(kv: str) -> tuple[bool, bool]:
    """Return whether K and whether V of attention is stored as q8_0. Raises SegmentError for another type."""
    if kv not in STORED_TYPES:
        raise SegmentError(f"rows cannot be kept as {kv!r}", f"Choose one of {', '.join(STORED_TYPES)}")
    return kv.split("/")[0] == "q8_0", kv.split("/")[-1] == "q8_0"


def values_per_row(rows: RowArray | StoredTensor) -> int:
    """Return the values per row."""
    return int(rows.shape[1]) * (BLOCK if rows.dtype == Q8_0 else 1)


def to_float32(rows: RowArray) -> NDArray[np.float32]:
    """Convert rows of any type to f32, without loss."""
    blocks: Any = rows
    if blocks.dtype == Q8_0:
        numbers = blocks["values"] * blocks["scale"].astype(np.float32)[..., None]
        blocks = numbers.reshape(len(rows), values_per_row(rows))  # also of no rows
    result: NDArray[np.float32] = blocks.astype(np.float32)
    return result


@dataclass(frozen=True, slots=True)
class LayerRows:
    """K and V rows of one model layer, one row per token: `k` [n_tokens, n_embd_k], `v` [n_tokens, n_embd_v], as
    numbers or as Q8_0 blocks, n_embd / 32 per row. `part`: `attention`, `indexer` of sparse attention (no V), or
    `state` of a recurrent layer after the last token, or after others (`Segment.states`): one row each, `k` for its
    convolution and `v` for its recurrence."""

    layer: int
    k: RowArray
    v: RowArray
    part: str = "attention"

    def cut(self, rows: slice) -> LayerRows:
        """Return a slice of the rows, without copying."""
        return replace(self, k=self.k[rows], v=self.v[rows])


def concatenate_rows(parts: Sequence[Sequence[LayerRows]]) -> tuple[LayerRows, ...]:
    """Concatenate the rows of consecutive tokens, layer by layer."""
    return tuple(
        replace(rows[0], k=np.concatenate([part.k for part in rows]), v=np.concatenate([part.v for part in rows]))
        for rows in zip(*parts, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Transition:
    """Effect of a segment's tokens on the state S of one recurrent layer: S becomes A S + `b`. `a` has the values of A:
    diagonal, one per element of the state or per run of neighbours; or, with `head`, a head x head matrix per head. The
    convolution state does not depend on the past: it becomes `r`. A layer with only a convolution has no `a` and
    `b`."""

    layer: int
    r: NDArray[np.float32]
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    head: int = 0

    @property
    def nbytes(self) -> int:
        return self.r.nbytes + self.a.nbytes + self.b.nbytes


class Carry(NamedTuple):
    """Carries recurrent state through a segment with any left context (the definition for the whole code): attention
    K/V is spliced, and each recurrent layer's state is advanced by the segment's Transition instead of by decoding. The
    first `seam` and the last `tail` tokens must be decoded in place; the transitions cover those between them."""

    seam: int
    tail: int
    nbytes: int  # of all transitions
    load: Callable[[], Sequence[Transition]]  # reads the transitions; raises as reading K/V does

    @classmethod
    def of(cls, seam: int, tail: int, transitions: Sequence[Transition]) -> Carry:
        """Make a Carry from transitions in memory."""
        return cls(seam, tail, sum(transition.nbytes for transition in transitions), lambda: transitions)


class StoredTensor(NamedTuple):
    """Location of rows in a file: bytes [offset, end) with padding at the end, and their XXH3-128 in hex."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int
    end: int
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes without the padding."""
        return prod(self.shape) * self.dtype.itemsize


class StoredLayer(NamedTuple):
    """LayerRows in a file."""

    layer: int
    k: StoredTensor
    v: StoredTensor
    part: str = "attention"


class Stored(Sequence[LayerRows]):
    """The layers of a segment in an open file, not checked yet. A context places them from the file (`tensors`, `file`)
    and checks them on the way. Accessing the layers reads and checks all of them once, and lets go of the file; that
    may raise the error made by `refused`."""

    file: BinaryIO | None  # None after reading

    def __init__(self, tensors: Sequence[StoredLayer], file: BinaryIO) -> None:
        self.tensors = tuple(tensors)
        self.file = file
        self._rows: tuple[LayerRows, ...] = ()

    @abstractmethod
    def read(self) -> tuple[LayerRows, ...]:
        """Read and check all rows. Raises NotesError for a damaged or unreadable file."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the file, whose rows are in memory."""

    @abstractmethod
    def refused(self, why: str, *, damaged: bool) -> NotesError:
        """Make the error for rows that a context could not take; `damaged`: the content has changed."""

    @property
    def rows(self) -> tuple[LayerRows, ...]:
        """All layers, in memory."""
        if self.file is not None:
            self._rows, self.file = self.read(), None
            self.release()
        return self._rows

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, index: int) -> LayerRows: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LayerRows, ...]: ...
    def __getitem__(self, index: int | slice) -> LayerRows | tuple[LayerRows, ...]:
        return self.rows[index]


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a model in a context. All fields are strings, stored and compared as printed. Fields for display only
    are not compared: a renamed file is still the same model."""

    model: str = field(compare=False)  # general.name of the GGUF, else its file name
    architecture: str
    quantization: str = field(compare=False)  # e.g. "Q8_0"
    weights: str  # sha256 of the whole GGUF file: weights and tokenizer
    rope: str  # digest of the effective rotation: per layer its kind, frequencies and magnitude
    rope_text: str = field(compare=False)  # for display, e.g. "neox base 10000 scale 1"
    kv_type: str  # data types of K and V in the cache, e.g. "f16/f16"
    adapters: str  # digest of the adapters in use, "" without any

    @property
    def key(self) -> str:
        """Short digest of the compared fields; used in the file name of a segment."""
        compared = (field_.name for field_ in fields(self) if field_.compare)
        parts = "\n".join(f"{name}={getattr(self, name)}" for name in compared)
        return hashlib.sha256(parts.encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> Identity:
        """Build from a dict. Raises KeyError for a missing field."""
        return cls(**{field_.name: str(data[field_.name]) for field_ in fields(cls)})

    def differences(self, other: Identity, done: str = "compiled") -> list[str]:
        """Describe how `other` (the context at hand) differs, most important first. `done`: a participle for how this
        identity was used."""
        texts = []
        if self.architecture != other.architecture:
            texts.append(f"{done} for architecture {self.architecture}, this model is {other.architecture}")
        elif self.weights != other.weights:
            if self.model == other.model and self.quantization != other.quantization:
                texts.append(f"{done} with {self.model} {self.quantization}, this model is {other.quantization}")
            else:
                texts.append(
                    f"{done} with {self.model} {self.quantization} ({self.weights[:12]}), "
                    f"this model is {other.model} {other.quantization} ({other.weights[:12]})"
                )
        elif self.rope != other.rope:
            ours, theirs = self.rope_text, other.rope_text
            if ours == theirs:  # e.g. the factors of LongRoPE, which depend on the size of the context
                ours, theirs = f"{ours} ({self.rope[:12]})", f"{theirs} ({other.rope[:12]})"
            texts.append(f"{done} with RoPE {ours}, this context uses {theirs}")
        if self.kv_type != other.kv_type:
            texts.append(f"{done} from a {self.kv_type} K/V cache, this context keeps {other.kv_type}")
        if self.adapters != other.adapters:
            ours, theirs = (digest[:12] or "none" for digest in (self.adapters, other.adapters))
            texts.append(f"{done} with adapters (LoRA): {ours}, this context uses {theirs}")
        return texts


@dataclass(frozen=True, slots=True)
class FieldSpan:
    """Location of a field's value in a segment: characters [start, end) of the text, tokens [first, last)."""

    name: str
    value: str
    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Media:
    """An image in a segment: rows [first, last), which are embeddings, not tokens. They take `positions` positions,
    fewer than rows under M-RoPE. `sha256` is the digest of the image file."""

    first: int
    last: int
    positions: int
    sha256: str
    width: int  # pixels
    height: int

    @property
    def rows(self) -> int:
        return self.last - self.first


class ImageFile(NamedTuple):
    """Bytes of an image file, to encode it again, for characters [start, end) of a segment's text."""

    start: int
    end: int
    data: bytes


class _Referable:
    """Allows weak references to dataclasses with slots (weakref_slot= needs Python 3.11)."""

    __slots__ = ("__weakref__",)


class Prefill(NamedTuple):
    """Duration of the prefill when a segment was compiled."""

    seconds: float
    tokens: int
    threads: int

    def share(self, tokens: int) -> float:
        """Return the seconds for so many of its tokens."""
        return self.seconds * tokens / self.tokens


class MicroBatches(NamedTuple):
    """Consecutive rows that were computed in micro-batches of `size` tokens, by `threads` threads: both change how the
    values are rounded. If `size` does not divide `rows`, only the first rows of the last micro-batch were kept."""

    rows: int
    size: int
    threads: int


def micro_batches(counts: Iterable[int], size: int, threads: int) -> tuple[MicroBatches, ...]:
    """Return how llama.cpp computes consecutive batches of so many tokens, in micro-batches of at most `size`."""
    result: list[MicroBatches] = []
    for count in counts:
        for rows in (count - count % size, count % size):
            last = result[-1] if result else MicroBatches(0, 0, threads)
            if rows and last.size == min(rows, size):
                result[-1] = last._replace(rows=last.rows + rows)
            elif rows:
                result.append(MicroBatches(rows, min(rows, size), threads))
    return tuple(result)


def cut_batches(batches: Sequence[MicroBatches], first: int, last: int) -> tuple[MicroBatches, ...]:
    """Return how rows [first, last) were computed; empty if `first` is within a micro-batch, or if that is unknown."""
    result, at = [], 0
    for batch in batches:
        start, end = max(first, at), min(last, at + batch.rows)
        if start < end:
            if (start - at) % batch.size:
                return ()
            result.append(batch._replace(rows=end - start))
        at += batch.rows
    return tuple(result) if at >= last else ()


@dataclass(frozen=True, slots=True)
class Segment(_Referable):
    """A compiled skill. K is rotated to positions base, base+1, ...: `base` is the skill's position when it was
    compiled, so a splice at position p rotates once, by p - base, and copies bit for bit where they agree."""

    name: str
    description: str
    text: str
    tokens: Tokens
    base: int
    context: Tokens  # tokens before the skill when it was compiled: its left context
    fields: tuple[FieldSpan, ...]
    identity: Identity
    layers: Sequence[LayerRows]  # a tuple, or Stored; not to be read of a file that was only peeked at
    # K/V that cannot be moved is stored from position 0 on, with the left context and the recurrent state: it can only
    # be restored at the start of a prompt.
    prefix_only: bool = False
    # With recurrent state, if it was captured: carries the state of another context through the segment.
    carry: Carry | None = None
    # First token of each block that was compiled independently, from 0 on; empty: a single block.
    blocks: tuple[int, ...] = ()
    # First token of each part, between which a prompt may have other text (runtime/token_runs.py); empty: one part.
    parts: tuple[int, ...] = ()
    # Of rows of a session with recurrent layers: after how many tokens, ascending, each row of a `state` was read. Its
    # left context is then all that precedes it. Empty: after all, as of a skill.
    states: tuple[int, ...] = ()
    # Per block: how often its K/V was moved, and thereby rounded, since it was placed first.
    moves: tuple[int, ...] = ()
    # Source of the text: absolute path of a file, "-" for standard input, empty if unknown.
    source: str = ""
    # True if the text is a tool section of a chat template, in which control tokens are parsed.
    tools: bool = False
    # File attributes of the source when it was read, which change with its content; empty if unknown.
    stamp: tuple[int, ...] = ()
    # Stored K/V types, one of KEPT; a segment in memory may not be quantized yet.
    kv: str = "f16"
    # Images among its rows, in order, and their files. `axes`: time, row and column of each row, [n_tokens, 3], from 0
    # on, where positions are shared. `projector`: digest of the vision encoder and its limits.
    media: tuple[Media, ...] = ()
    axes: NDArray[np.int32] | None = None
    projector: str = ""
    pictures: tuple[ImageFile, ...] = ()
    # Measured when it was compiled on this machine; None if unknown.
    prefill: Prefill | None = None
    # Context.backend that computed the K/V: another one rounds otherwise. Empty if unknown.
    backend: str = ""
    # How the rows of the left context and of the tokens were computed; empty if unknown, or with an image.
    # Of a slice: the tokens only.
    batches: tuple[MicroBatches, ...] = ()
    # Its file, if it was read from one: path, bytes, checksum of the head, time (UTC, ISO 8601), program and version.
    path: Path = Path()
    file_size: int = 0
    checksum: str = ""
    created: str = ""
    writer: str = ""

    def __repr__(self) -> str:
        names = self.field_names
        shown = ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
        return f"Segment({self.name!r}, {len(self)} tokens, fields: {shown or 'none'})"

    @property
    def field_names(self) -> list[str]:
        """The distinct names in the order of the text."""
        return list(dict.fromkeys(span.name for span in self.fields))

    @property
    def first(self) -> int:
        """Position of the first row."""
        return 0 if self.prefix_only else self.base

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> int:
        """Number of positions that its rows take."""
        return len(self) + sum(image.positions - image.rows for image in self.media)

    @property
    def is_image(self) -> bool:
        """True if it consists of a single image."""
        return bool(self.pictures) and (self.pictures[0].start, self.pictures[0].end) == (0, len(self.text))

    @property
    def max_seam(self) -> int:
        """Number of leading tokens that may be decoded again: those before an image."""
        return self.media[0].first if self.media else len(self)

    @property
    def shapes(self) -> Sequence[LayerRows | StoredLayer]:
        """The layers with types and shapes of K and V, which are not read from the file for that."""
        return self.layers.tensors if isinstance(self.layers, Stored) else self.layers

    @property
    def nbytes(self) -> int:
        """Bytes of all K/V."""
        return sum(rows.k.nbytes + rows.v.nbytes for rows in self.shapes)

    @property
    def computed_nbytes(self) -> int:
        """Bytes of all K/V before any of it was quantized."""
        of_block = BLOCK * (4 if self.row_type == "f32" else 2)
        parts = [part for rows in self.shapes for part in (rows.k, rows.v)]
        return sum(p.nbytes // Q8_0.itemsize * of_block if p.dtype == Q8_0 else p.nbytes for p in parts)

    @property
    def stored_types(self) -> str:
        """Types of K and V of attention as text, "f16" or "f16/q8_0"."""
        parts = [part for rows in self.shapes if rows.part == "attention" for part in (rows.k, rows.v) if part.nbytes]
        names = ("q8_0" if part.dtype == Q8_0 else f"f{8 * part.dtype.itemsize}" for part in parts)
        return "/".join(dict.fromkeys(names))

    @property
    def has_state(self) -> bool:
        """True if it holds the state of recurrent layers."""
        return any(rows.part == "state" for rows in self.shapes)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Tokens [first, last) of each block."""
        return list(pairwise((*(self.blocks or (0,)), len(self))))

    @property
    def row_type(self) -> str:
        """Type in which its K/V is computed: f16 for a cache of any type but f32."""
        return "f32" if "f32" in self.identity.kv_type else "f16"

    def slice(self, first: int, last: int) -> Segment:
        """Return tokens [first, last) and their K/V as a segment. Text, fields and blocks are dropped.
        Raises EngineError for a part outside the segment, for a part not starting at 0 of K/V that cannot be moved, and
        for any part of a segment with a recurrent state or an image."""
        if not 0 <= first <= last <= len(self):
            raise EngineError(f"{self.name} has {len(self)} tokens: [{first}, {last}) is not a part of them")
        part = last - first < len(self)
        if part and self.media:
            raise EngineError(f"{self.name} is an image or has one, so that no part can be taken out")
        if part and ((self.prefix_only and first) or self.has_state):
            raise EngineError(f"the rows of {self.name} cannot be moved, so no part of them can be taken out")
        left = self.base - self.first  # rows of the left context, kept before a first part
        rows = slice(left + first if first else 0, left + last)
        layers = self.layers  # the whole: not read from the file
        if part:
            layers = tuple(layer if layer.part == "state" else layer.cut(rows) for layer in layers)
        return replace(
            self,
            text="",
            tokens=self.tokens[first:last],
            base=self.base + first,
            context=np.concatenate([self.context, self.tokens[:first]]),
            fields=(),
            layers=layers,
            carry=None if part else self.carry,
            blocks=(),
            moves=(),
            batches=cut_batches(self.batches, len(self.context) + first, len(self.context) + last),
        )
