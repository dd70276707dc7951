"""A segment: tokens with their K/V rows, independent of any context.

Plain data between the rooms: the notebook reads and places it, the library keeps it on disk. Its rows are in memory, or
still in a file of the library's. It knows neither llama.cpp nor what such a file is like.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.identity import Identity
from notes_cli.errors import EngineError, NotesError

Tokens = NDArray[np.int32]
RowArray = NDArray[np.float16] | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerRows:
    """K and V rows of one model layer, one row a token: `k` is [n_tokens, n_embd_k], `v` is [n_tokens, n_embd_v].

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

    def __init__(self, tensors: Sequence[StoredLayer], file: BinaryIO) -> None:
        self.tensors = tuple(tensors)
        self.file: BinaryIO | None = file  # none: the rows have been read
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


class _Referable:
    """May be held weakly, which dataclasses with slots cannot say of themselves before Python 3.11."""

    __slots__ = ("__weakref__",)


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
    pinned: bool = False
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

    @property
    def first(self) -> int:
        """Position of the first row."""
        return 0 if self.pinned else self.base

    def __len__(self) -> int:
        return len(self.tokens)

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
        """What its rows are kept in: f16, which serves a cache of any type but f32."""
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
        if part and ((self.pinned and first) or any(rows.part == "state" for rows in self.layers)):
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
            influence={},
            blocks=(),
            moves=(),
        )
