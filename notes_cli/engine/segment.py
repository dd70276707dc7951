"""A segment: tokens with their K/V rows, independent of any context.

Plain data between the rooms: the sequence reads and places it, the library keeps it on disk. Its rows are in memory, or
still in a file of the library's. It knows neither llama.cpp nor what such a file is like.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.identity import Identity
from notes_cli.errors import EngineError, NotesError, SegmentError

Tokens = NDArray[np.int32]
BLOCK = 32  # numbers that a block of Q8_0 has one scale for
Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)])
RowArray = NDArray[np.float16] | NDArray[np.float32]  # or blocks, where a segment's file keeps these
# What rows are kept as, K/V as the types of a cache: as they were computed (f16; f32 in a cache of f32), or quantized.
STORED_TYPES = ("f16", "f16/q8_0", "q8_0")


def quantized(kv: str) -> tuple[bool, bool]:
    """Whether K, and whether V, of attention is kept as q8_0. Raise SegmentError for what is none of KEPT."""
    check_stored_type(kv)
    return kv.split("/")[0] == "q8_0", kv.split("/")[-1] == "q8_0"


def check_stored_type(kv: str) -> None:
    """Raise SegmentError for what is none of KEPT."""
    if kv not in STORED_TYPES:
        raise SegmentError(f"rows cannot be kept as {kv!r}", f"Choose one of {', '.join(STORED_TYPES)}")


def values_per_row(rows: RowArray | StoredTensor) -> int:
    """Numbers of a row."""
    return int(rows.shape[1]) * (BLOCK if rows.dtype == Q8_0 else 1)


def to_float32(rows: RowArray) -> NDArray[np.float32]:
    """Rows of any type in f32, without loss."""
    blocks: Any = rows
    if blocks.dtype == Q8_0:
        blocks = (blocks["values"] * blocks["scale"].astype(np.float32)[..., None]).reshape(len(rows), -1)
    found: NDArray[np.float32] = blocks.astype(np.float32)
    return found


@dataclass(frozen=True, slots=True)
class LayerRows:
    """K and V rows of one model layer, one row a token: `k` is [n_tokens, n_embd_k], `v` is [n_tokens, n_embd_v],
    of numbers or of blocks of Q8_0, of which a row has n_embd / 32.

    `part` tells what they are: of `attention`, of the `indexer` of a sparse one (no V), or the `state` of a recurrent
    layer after the last token: one row each, `k` for its convolution and `v` for its recurrence.
    """

    layer: int
    k: RowArray
    v: RowArray
    part: str = "attention"

    def cut(self, rows: slice) -> LayerRows:
        """Some of the rows; nothing is copied."""
        return replace(self, k=self.k[rows], v=self.v[rows])


@dataclass(frozen=True, slots=True)
class Transition:
    """What the tokens of a segment do to the state S of one recurrent layer: S becomes A S + `b`.

    `a` has the numbers of A: one for each element of the state, or for as many neighbours as go into it; where `head`
    is given, a matrix of so many rows and columns for each head. The convolution does not depend on what was before:
    it becomes `r`. A layer with a convolution alone has neither `a` nor `b`.
    """

    layer: int
    r: NDArray[np.float32]
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    head: int = 0

    @property
    def nbytes(self) -> int:
        return self.r.nbytes + self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True)
class Carry:
    """How the state of recurrent layers goes on through a segment, whatever precedes it.

    Its first `seam` tokens and its last `tail` ones must be decoded where it is placed; the transitions are those of
    the tokens between them.
    """

    seam: int
    tail: int
    nbytes: int  # of all transitions
    load: Callable[[], Sequence[Transition]]  # from where they are kept; may raise what reading the rows may

    @classmethod
    def of(cls, seam: int, tail: int, transitions: Sequence[Transition]) -> Carry:
        """Of transitions in memory."""
        return cls(seam, tail, sum(one.nbytes for one in transitions), lambda: transitions)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Rows in a file: bytes [offset, end), the last ones padding, and the XXH3-128 of them all, in hex."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int
    end: int
    checksum: str


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """What LayerRows is, of rows in a file."""

    layer: int
    k: StoredTensor
    v: StoredTensor
    part: str = "attention"


class Stored(Sequence[LayerRows]):
    """The layers of a segment in an open file, none of whose rows has been checked yet.

    A context places them from there (`tensors`, `file`) and checks them on the way. Who looks at the layers has all of
    them read and checked first, and once; then the file is closed. That may raise what `refused` makes.
    """

    file: BinaryIO | None = None  # none: the rows have been read, or a copy, which it has none for, was not made

    def __init__(self, tensors: Sequence[StoredLayer], file: BinaryIO) -> None:
        self.tensors = tuple(tensors)
        self.file = file
        self._rows: tuple[LayerRows, ...] = ()

    @abstractmethod
    def read(self, file: BinaryIO) -> tuple[LayerRows, ...]:
        """All rows, checked. Raise NotesError for what is damaged, or cannot be read."""

    @abstractmethod
    def refused(self, why: str, *, damaged: bool) -> NotesError:
        """What to raise for rows that a context could not take; `damaged`: they are not what was written."""

    @property
    def rows(self) -> tuple[LayerRows, ...]:
        """All layers, in memory."""
        if self.file is not None:
            self._rows = self.read(self.file)
            self.close()
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        sizes = [np.prod(one.shape) * one.dtype.itemsize for each in self.tensors for one in (each.k, each.v)]
        return int(sum(sizes))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def __del__(self) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, index: int) -> LayerRows: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LayerRows, ...]: ...
    def __getitem__(self, index: int | slice) -> LayerRows | tuple[LayerRows, ...]:
        return self.rows[index]


@dataclass(frozen=True, slots=True)
class FieldSpan:
    """Where a field's value is in a segment: characters [start, end) of the text, tokens [first, last)."""

    name: str
    value: str
    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Media:
    """An image among the rows of a segment: rows [first, last), which are no tokens and are never decoded as such.

    They take `positions` positions, fewer than there are rows where the model has rows and columns (M-RoPE). What
    they show is known by the digest of the file's bytes alone.
    """

    first: int
    last: int
    positions: int
    sha256: str
    width: int  # pixels of the image, as it is seen
    height: int

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The file of an image, to be looked at again, which characters [start, end) of a segment's text stand for."""

    start: int
    end: int
    data: bytes


class _Referable:
    """May be held weakly, which dataclasses with slots cannot say of themselves before Python 3.11."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class Prefill:
    """How long the prefill of a segment took when it was compiled: so many tokens in `seconds`, on `threads`."""

    seconds: float
    tokens: int
    threads: int

    def share(self, tokens: int) -> float:
        """Seconds for so many of its tokens."""
        return self.seconds * tokens / self.tokens


@dataclass(frozen=True, slots=True)
class Segment(_Referable):
    """A compiled skill.

    The K rows are rotated to positions base, base+1, ...: `base` is where the skill was when it was compiled, so a
    splice at position p rotates once, by p - base, and copies bit for bit where the two agree.
    """

    name: str
    description: str
    text: str
    tokens: Tokens
    base: int
    context: Tokens  # the tokens that preceded the skill when it was compiled: its left context
    fields: tuple[FieldSpan, ...]
    identity: Identity
    layers: Sequence[LayerRows]  # a tuple, or Stored
    # Rows that cannot be moved are kept with those of the left context, from position 0 on, and the state of recurrent
    # layers with them: the whole can be put back at the start of a prompt, and nowhere else.
    prefix_only: bool = False
    # With the state, and where that has been captured: how another one goes on through the segment (KVSequence.carry).
    carry: Carry | None = None
    # By field: how much its value changes the rows of each token after it, [n_tokens]; empty if not measured.
    influence: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    # The first token of each block, from 0 on, where parts were compiled independently; empty: all of it is one block.
    blocks: tuple[int, ...] = ()
    # Of each block: how often its rows have been moved, and rounded each time, since they were first placed.
    moves: tuple[int, ...] = ()
    # Where the text came from: the absolute path of a file, "-" for standard input; empty: it is not known.
    source: str = ""
    # Whether the text is what a chat template tells of tools: control tokens in it are such.
    tools: bool = False
    # What of that file does not stay if it changes, as it was when the text was read; empty: it is not known.
    stamp: tuple[int, ...] = ()
    # What its file keeps rows as, one of KEPT. Those of a segment that was not read from there may not be so yet.
    kv: str = "f16"
    # Images among its rows, in order, and what their files hold. `axes`: where rows are not one a position, time,
    # row and column of each, [n_tokens, 3], from 0 on. `projector`: the digest of what made the rows, and its limits.
    media: tuple[Media, ...] = ()
    axes: NDArray[np.int32] | None = None
    projector: str = ""
    pictures: tuple[ImageFile, ...] = ()
    # What compiling it took on this machine; None: not known.
    prefill: Prefill | None = None
    # What computed its rows (Context.backend): another one rounds otherwise. Empty: not known.
    backend: str = ""

    def __repr__(self) -> str:
        names = list(dict.fromkeys(one.name for one in self.fields))
        shown = ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
        return f"Segment({self.name!r}, {len(self)} tokens, fields: {shown or 'none'})"

    @property
    def first(self) -> int:
        """Position of the first row."""
        return 0 if self.prefix_only else self.base

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> int:
        """How many positions its rows take."""
        return len(self) + sum(one.positions - one.rows for one in self.media)

    @property
    def is_image(self) -> bool:
        """Whether it is an image and nothing else."""
        return bool(self.pictures) and (self.pictures[0].start, self.pictures[0].end) == (0, len(self.text))

    @property
    def max_seam(self) -> int:
        """How many of its first tokens may be decoded again: those before an image."""
        return self.media[0].first if self.media else len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V rows."""
        if isinstance(self.layers, Stored):
            return self.layers.nbytes
        return sum(rows.k.nbytes + rows.v.nbytes for rows in self.layers)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Tokens [first, last) of each block; of all where it is one."""
        return list(pairwise((*(self.blocks or (0,)), len(self))))

    @property
    def row_type(self) -> str:
        """What its rows are computed in: f16, which serves a cache of any type but f32."""
        return "f32" if "f32" in self.identity.kv_type else "f16"

    def slice(self, first: int, last: int) -> Segment:
        """Tokens [first, last) with their rows: a segment of its own, whose base has moved along. It is a part of a
        text: text, fields, influence and blocks stay with the whole.

        Rows that cannot be moved stay with those before them (`first` must be 0), and a recurrent state belongs to the
        last token. Raise EngineError for a part that these do not allow, and for one that is not inside.
        """
        if not 0 <= first <= last <= len(self):
            raise EngineError(f"{self.name} has {len(self)} tokens: [{first}, {last}) is not a part of them")
        part = last - first < len(self)
        if part and self.media:
            raise EngineError(f"{self.name} is an image or has one, so that no part can be taken out")
        if part and ((self.prefix_only and first) or any(rows.part == "state" for rows in self.layers)):
            raise EngineError(f"the rows of {self.name} cannot be moved, so no part of them can be taken out")
        left = self.base - self.first  # rows of the left context, which stay before a first part
        rows = slice(left + first if first else 0, left + last)
        layers = self.layers  # all of them stay where they are
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
            influence={},
            blocks=(),
            moves=(),
        )
