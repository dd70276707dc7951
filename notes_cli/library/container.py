"""Reads and writes a segment (tokens and K/V of a compiled text) as one GGUF file (docs/format.md).

Files are written atomically, and every byte is covered by a checksum: one of the head (with its own digits as zeros)
and one of each tensor with its padding. The bytes that were checked are the bytes that are used, since they are read
once, into our own memory, or by a splice that checks what it places: other processes may write to the file meanwhile.
Names and folders are store.py's.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from notes_cli.engine.header import MAGIC, Cursor, FormatError, ShortError, read_counts, read_values
from notes_cli.engine.segment import (
    BLOCK,
    Q8_0,
    Carry,
    ImageFile,
    LayerRows,
    RowArray,
    Segment,
    Stored,
    StoredLayer,
    StoredTensor,
    Tokens,
    Transition,
    quantized,
    values_per_row,
)
from notes_cli.errors import DamagedError, Help, NewerError, SegmentError, UnwritableError, reason
from notes_cli.library.info import (
    AXES,
    FORMAT,
    KIND,
    MAX_ENTRIES,
    PICTURES,
    Head,
    SegmentInfo,
    TensorEntry,
    head_of,
    metadata,
    padded,
    places,
    read_head,
    read_info,
)
from notes_cli.library.safe_files import lock_shared, replacing

__all__ = ["SegmentInfo", "checksum_of", "open_segment", "open_stored", "peek", "write_segment"]

NO_DIGEST = "0" * 32
HEAD_SUM = "notes.checksum.head"
LISTS = ("notes.tokens", "notes.context")
FIRST = 1 << 18  # bytes; holds most heads with the lists after them
CHUNK = 8 << 20  # bytes of one read
CHECKSUM = re.compile(r"[0-9a-f]{32}")
CARRY_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.carry\.([rab])")
ROWS_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([kv]|indexer\.[kv]|state\.[rs])")
# Names of K and V tensors by part of a layer.
NAMES = {"attention": ("k", "v"), "indexer": ("indexer.k", "indexer.v"), "state": ("state.r", "state.s")}


def write_segment(path: Path, segment: Segment, *, writer: str = "notes", created: str | None = None) -> str:
    """Write the segment to `path`, atomically, with mode 0600. Return the checksum of its head (`checksum_of`). Raises
    UnwritableError if the disk refuses."""
    tensors = _tensors(small(segment))
    values: dict[str, str | int] = {"general.architecture": "notes"}
    values |= {f"notes.{key}": value for key, value in metadata(segment, writer, created).items()}
    values |= {f"notes.checksum.{name}": _tensor_sum(tensor) for name, tensor in tensors.items()}
    values |= {HEAD_SUM: NO_DIGEST, "general.name": segment.name}
    try:
        with replacing(path) as temporary:
            with temporary.open("wb") as file:
                file.write(head_of(values, tensors))
                for tensor in tensors.values():
                    file.write(tensor.reshape(-1).view(np.uint8).data)
                    file.write(bytes(padded(tensor.nbytes) - tensor.nbytes))
            return _seal(temporary)
    except OSError as error:
        raise UnwritableError(f"cannot write {path}: {reason(error)}. Nothing was changed") from error


def small(segment: Segment) -> Segment:
    """Return the segment with its K/V in the types of its file; quantizing rounds each value once."""
    if not any(quantized(segment.kv)) or not segment.layers:
        return segment

    def quantize_layer(rows: LayerRows) -> LayerRows:
        if rows.part != "attention":
            return rows
        both = zip((rows.k, rows.v), quantized(segment.kv), strict=True)
        label = f"rows of layer {rows.layer} of {segment.name}"
        k, v = (quantize(values, label) if q8_0 else values for values, q8_0 in both)
        return replace(rows, k=k, v=v)

    return replace(segment, layers=tuple(map(quantize_layer, segment.layers)))


def open_segment(path: Path) -> Segment:
    """Read a segment file and check every byte; its K/V are read-only views of the buffer.

    Raises SegmentError if the file is missing, unreadable or of a newer format; DamagedError if it is damaged or not a
    segment.
    """
    segment = open_stored(path)
    assert isinstance(segment.layers, Stored)
    carry = segment.carry and Carry.of(segment.carry.seam, segment.carry.tail, segment.carry.load())
    return replace(segment, layers=segment.layers.rows, carry=carry)


def open_stored(path: Path) -> Segment:
    """Open a segment file whose K/V stay in the file, which is kept open: they are read and checked when a splice or a
    caller needs them, with the errors of open_segment. All else is checked now."""
    with _segment_errors(path), ExitStack() as opened:
        file = opened.enter_context(path.open("rb", buffering=0))
        lock_shared(file)
        data, head = _read(file)
        info = _segment_info(path, data, head)
        if info.states and not info.prefix_only:
            raise FormatError("it holds the state of recurrent layers, but not all rows before it")
        if info.carried and not info.states:
            raise FormatError("it says how a state is carried, and holds none")
        segment = Segment(
            name=info.name,
            description=info.description,
            text=info.text,
            tokens=info.tokens.copy(),
            base=info.base,
            context=info.context.copy(),
            fields=info.fields,
            identity=info.identity,
            layers=_FileRows(
                path, _layers(head, len(info.tokens) + (info.base if info.prefix_only else 0), info.kv), file
            ),
            prefix_only=info.prefix_only,
            carry=_carry(path, file, head, info),
            blocks=info.blocks,
            moves=info.moves,
            source=info.source,
            tools=info.tools,
            stamp=info.stamp,
            kv=info.kv,
            media=info.media,
            axes=_axes(file, head, info),
            projector=info.projector,
            pictures=_pictures(file, head, info),
            prefill=info.prefill,
            backend=info.backend,
            batches=info.batches,
        )
        opened.pop_all()  # _FileRows owns the file
        return segment


def peek(path: Path) -> SegmentInfo:
    """Read a file's metadata; its K/V are neither read nor checked. Errors as in open_segment."""
    with _segment_errors(path), path.open("rb", buffering=0) as file:
        info = _segment_info(path, *_read(file))
        return replace(info, tokens=info.tokens.copy(), context=info.context.copy())  # so that the buffer is freed


def checksum_of(path: Path) -> str:
    """Return the checksum of the file's head, which holds those of all tensors. Errors as in open_segment."""
    with _segment_errors(path), path.open("rb", buffering=0) as file:
        return str(_read(file)[1].metadata[HEAD_SUM])


class _FileRows(Stored):
    """The K/V of a segment file, read when needed."""

    def __init__(self, path: Path, tensors: Sequence[StoredLayer], file: BinaryIO) -> None:
        super().__init__(tensors, file)
        self._path = path

    def read(self, file: BinaryIO) -> tuple[LayerRows, ...]:
        with _segment_errors(self._path):
            tensors = [tensor for layer in self.tensors for tensor in (layer.k, layer.v) if tensor.end]
            if not tensors:
                return ()
            start, end = min(tensor.offset for tensor in tensors), max(tensor.end for tensor in tensors)
            data = _bytes(file, start, end)
            for layer in self.tensors:
                for kind, tensor in zip(NAMES[layer.part], (layer.k, layer.v), strict=True):
                    if tensor.end:
                        chunk = data[tensor.offset - start : tensor.end - start]
                        _check(chunk, tensor.checksum, f"blk.{layer.layer}.{kind}")
            return tuple(
                LayerRows(layer.layer, _rows(data, layer.k, start), _rows(data, layer.v, start), layer.part)
                for layer in self.tensors
            )

    def refused(self, why: str, *, damaged: bool) -> SegmentError:
        return _damaged(self._path, why) if damaged else _unreadable(self._path, why)


class _FileCarry:
    """The state transitions of a segment file, read and checked at the first call."""

    def __init__(
        self, path: Path, tensors: dict[tuple[int, str], StoredTensor], heads: dict[int, int], file: int
    ) -> None:
        self._path, self._tensors, self._heads = path, tensors, heads
        self._file: BinaryIO | None = os.fdopen(os.dup(file), "rb", buffering=0)  # _FileRows closes its own
        self._read: tuple[Transition, ...] = ()

    def __call__(self) -> tuple[Transition, ...]:
        if self._file is not None:
            with _segment_errors(self._path):
                self._read = tuple(
                    self._transition(self._file, layer) for layer in sorted({at for at, _ in self._tensors})
                )
            self.close()
        return self._read

    def _transition(self, file: BinaryIO, layer: int) -> Transition:
        arrays = {}
        for kind in "rab":
            tensor = self._tensors.get((layer, kind))
            if tensor is None:
                arrays[kind] = np.empty(0, np.float32)
                continue
            data = _bytes(file, tensor.offset, tensor.end)
            _check(data, tensor.checksum, f"blk.{layer}.carry.{kind}")
            arrays[kind] = _array(data, tensor, tensor.offset)
        return Transition(layer, arrays["r"], arrays["a"], arrays["b"], self._heads.get(layer, 0))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()


# ---- writing


def _tensors(segment: Segment) -> dict[str, NDArray[Any]]:
    """Return all tensors by name, without empty ones (no left context; no V)."""
    tensors: dict[str, NDArray[Any]] = {
        "notes.tokens": np.ascontiguousarray(segment.tokens, "<i4"),
        "notes.context": np.ascontiguousarray(segment.context, "<i4"),
    }
    for rows in segment.layers:
        state = rows.part == "state"
        count = 1 if state else segment.base - segment.first + len(segment)
        both = quantized(segment.kv) if rows.part == "attention" else (False, False)
        for kind, values, q8_0 in zip(NAMES[rows.part], (rows.k, rows.v), both, strict=True):
            types = (np.float32,) if state else (Q8_0,) if q8_0 else (np.float16, np.float32)
            if values.dtype not in types or values.shape[0] != count:
                raise SegmentError(f"layer {rows.layer} of {segment.name} has {kind} rows that do not fit it")
            tensors[f"blk.{rows.layer}.{kind}"] = np.ascontiguousarray(values)
    if segment.axes is not None:
        tensors[AXES] = np.ascontiguousarray(segment.axes, "<i4")
    if segment.pictures:
        files = places(segment.pictures)[1]
        tensors[PICTURES] = np.frombuffer(files + bytes(-len(files) % 4), "<i4")
    for transition in segment.carry.load() if segment.carry else ():
        for kind, numbers in (("r", transition.r), ("a", transition.a), ("b", transition.b)):
            tensors[f"blk.{transition.layer}.carry.{kind}"] = np.ascontiguousarray(numbers, "<f4")
    return {name: tensor for name, tensor in tensors.items() if tensor.size}


def quantize(values: RowArray, label: str) -> NDArray[Any]:
    """Return rows as Q8_0 blocks; `label` names them in errors."""
    from gguf import GGMLQuantizationType, quants

    if values.dtype == Q8_0:
        return values
    if values_per_row(values) % BLOCK:
        raise SegmentError(f"{label} have {values_per_row(values)} numbers, which are no whole blocks of q8_0")
    if not values.size:
        return np.empty((len(values), 0), Q8_0)
    with np.errstate(all="ignore"):
        blocks: NDArray[Any] = quants.quantize(values.astype(np.float32), GGMLQuantizationType.Q8_0).view(Q8_0)
    if not np.isfinite(blocks["scale"]).all():
        raise SegmentError(f"{label} hold what is no number, or too large for q8_0")
    return blocks


def _tensor_sum(tensor: NDArray[Any]) -> str:
    digest = xxhash.xxh3_128(tensor.reshape(-1).view(np.uint8).data)
    digest.update(bytes(padded(tensor.nbytes) - tensor.nbytes))
    return digest.hexdigest()


def _seal(path: Path) -> str:
    """Write the checksum of the head into the head, and return it; last, because it covers the other checksums."""
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            head = read_head(view)
            digest = _head_sum(view, head)
        file.seek(head.value_offset[HEAD_SUM])
        file.write(digest.encode())
    return digest


# ---- reading


def _read(file: BinaryIO) -> tuple[memoryview, Head]:
    """Return the first bytes of a file, at least up to the end of the lists, and its head, both checked. Each byte is
    read once, as another process may be writing."""
    size = os.fstat(file.fileno()).st_size
    data = _read_on(file, memoryview(b""), min(size, FIRST))
    while True:
        try:
            head = _checked_head(data, size)
            break
        except ShortError:
            if len(data) == size:
                raise
            data = _read_on(file, data, min(size, 16 * len(data)))
    lists = [name for name in LISTS if name in head.tensors]
    end = max([head.size, *(head.tensors[name].end for name in lists)])
    data = (_read_on(file, data, end) if end > len(data) else data).toreadonly()
    for name in lists:
        entry = head.tensors[name]
        _check(data[entry.offset : entry.end], _checksum(head, name), name)
    return data, head


def _bytes(file: BinaryIO, start: int, end: int) -> memoryview:
    """Read bytes [start, end) of a file."""
    file.seek(start)
    return _read_on(file, memoryview(b""), end - start, start).toreadonly()


def _read_on(file: BinaryIO, data: memoryview, size: int, start: int = 0) -> memoryview:
    """Return `size` bytes of the file from byte `start` on, of which `data` has been read already."""
    buffer, at = np.empty(size, np.uint8).data, len(data)
    buffer[:at] = data
    while at < size:
        count = file.readinto(buffer[at : at + CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise FormatError(f"it ends at byte {start + at} of {start + size}: it was cut off while it was read")
        at += count
    return buffer


@contextmanager
def _segment_errors(path: Path) -> Iterator[None]:
    """Convert errors of the block to SegmentError or DamagedError, with the path and a remedy."""
    try:
        yield
    except FileNotFoundError:
        raise SegmentError(f"no such segment: {path}", Help.LIST_SKILLS()) from None
    except OSError as error:
        raise _unreadable(path, reason(error)) from error
    except MemoryError as error:
        raise _unreadable(path, "its rows do not fit into memory") from error
    except _NewerError as error:
        raise NewerError(
            f"{path} has segment format {error}, this version of notes reads {FORMAT}", "Update notes"
        ) from error
    except _OtherKindError as error:
        raise DamagedError(f"{path} is a GGUF file but not a compiled segment", Help.LIST_SKILLS()) from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(f"{path} is damaged or not a segment: {why}", Help.COMPILE_BY_FORCE())


def _unreadable(path: Path, why: str) -> SegmentError:
    return SegmentError(f"cannot read {path}: {why}")


class _NewerError(FormatError):
    """A format that this version does not know."""


class _OtherKindError(FormatError):
    """A sound GGUF file of another kind, such as a model."""


def _checked_head(data: memoryview, size: int) -> Head:
    """Parse the head of a file of that size and verify its checksum."""
    try:
        head = read_head(data, size)
    except FormatError:
        # Other GGUF files and later formats may hold types that the reader does not know: name them in the error.
        later = _format(data)
        if later > FORMAT:
            raise _NewerError(later) from None
        if data[:4] == MAGIC and len(data) > 256 and b"notes." not in bytes(data[:256]):
            raise _OtherKindError from None
        raise
    version = head.metadata.get("notes.format")
    if isinstance(version, int) and version > FORMAT:
        raise _NewerError(version)
    if head.metadata.get(HEAD_SUM) != _head_sum(data, head):
        raise FormatError("the checksum of its head is wrong")
    if version != FORMAT or head.metadata.get("notes.kind") != KIND:
        raise _OtherKindError
    return head


def _format(data: memoryview) -> int:
    """Return the format in a file's metadata, even if its tensors cannot be parsed; 0 without one."""
    try:
        cursor = Cursor(data)
        version = read_values(cursor, read_counts(cursor, MAX_ENTRIES)[2]).get("notes.format")
    except FormatError:
        return 0
    return version.value if version and isinstance(version.value, int) else 0


def _head_sum(data: memoryview, head: Head) -> str:
    """Compute the checksum of everything before the first tensor, with its own digits as zeros."""
    at = head.value_offset.get(HEAD_SUM)
    if at is None or len(str(head.metadata[HEAD_SUM]).encode()) != len(NO_DIGEST):
        raise FormatError("it has no checksum")
    digest = xxhash.xxh3_128(data[:at])
    digest.update(NO_DIGEST.encode())
    digest.update(data[at + len(NO_DIGEST) : head.size])
    return digest.hexdigest()


def _checksum(head: Head, name: str) -> str:
    checksum = head.metadata.get(f"notes.checksum.{name}")
    if not isinstance(checksum, str) or not CHECKSUM.fullmatch(checksum):
        raise FormatError(f"the checksum of {name[:40]!r} is wrong")
    return checksum


def _check(data: memoryview, checksum: str, name: str) -> None:
    if xxhash.xxh3_128(data).hexdigest() != checksum:
        raise FormatError(f"the checksum of {name[:40]!r} is wrong")


def _segment_info(path: Path, data: memoryview, head: Head) -> SegmentInfo:
    tokens, context = (_ints(data, head, name) for name in LISTS)
    if not len(tokens):
        raise FormatError("it has no tokens")
    return read_info(path, head, tokens, context, head.end)


def _ints(data: memoryview, head: Head, name: str) -> Tokens:
    entry = head.tensors.get(name)
    if entry is None:
        return np.empty(0, np.int32)
    if entry.dtype != np.int32 or len(entry.shape) != 1:
        raise FormatError(f"{name} is not a list of token ids")
    ids: Tokens = _array(data, entry)
    if ids.min() < 0:
        raise FormatError(f"{name} holds a negative token id")
    return ids


def _axes(file: BinaryIO, head: Head, info: SegmentInfo) -> NDArray[np.int32] | None:
    """Read time, row and column of each token where images share positions. They must be as a compile makes them: a
    text token has one position, an image's tokens lie within its own, and later tokens follow them."""
    entry = head.tensors.get(AXES)
    shared = sum(image.rows - image.positions for image in info.media)
    if entry is None:
        if shared:
            raise FormatError("its images share positions, and it does not say how")
        return None
    if not info.media or entry.dtype != np.int32 or entry.shape != (len(info.tokens), 3):
        raise FormatError(f"{AXES} does not have three numbers for each row of images and texts")
    axes: NDArray[np.int32] = _checked_array(file, head, AXES).copy()
    at = done = 0
    for image in (*info.media, None):
        count = (image.first if image else len(axes)) - done
        if (axes[done : done + count] != at + np.arange(count)[:, None]).any():
            raise FormatError(f"{AXES} does not fit its tokens")
        at, done = at + count, done + count
        if image:
            inside = axes[image.first : image.last] - at
            if (inside < 0).any() or (inside >= image.positions).any() or (inside[:, 0] != 0).any():
                raise FormatError(f"{AXES} does not fit its images")
            at, done = at + image.positions, image.last
    return axes


def _pictures(file: BinaryIO, head: Head, info: SegmentInfo) -> tuple[ImageFile, ...]:
    """Read the image files, whose digests must be those of the encoded images."""
    entry = head.tensors.get(PICTURES)
    if entry is None:
        if info.pictures:
            raise FormatError(f"it has no {PICTURES}")
        return ()
    end = max((place.byte + place.size for place in info.pictures), default=0)
    if entry.dtype != np.int32 or not 0 <= entry.nbytes - end < 4:
        raise FormatError(f"{PICTURES} is not the bytes of files")
    data = _checked_array(file, head, PICTURES).tobytes()
    files = tuple(ImageFile(at.start, at.end, data[at.byte : at.byte + at.size]) for at in info.pictures)
    digests = {file.data: sha256(file.data).hexdigest() for file in files}
    named = all(info.text.endswith(digests[file.data], file.start, file.end) for file in files)
    if not named or {image.sha256 for image in info.media} != set(digests.values()):
        raise FormatError(f"{PICTURES} does not hold the images that its rows are of")
    return files


def _carry(path: Path, file: BinaryIO, head: Head, info: SegmentInfo) -> Carry | None:
    """Return the transitions of recurrent state, if the file has any; they are read when needed."""
    tensors = {}
    for name, entry in head.tensors.items():
        if match := CARRY_NAME.fullmatch(name):
            if len(entry.shape) != 1 or entry.dtype != np.float32:
                raise FormatError(f"{name} is not a list of f32")
            stored = StoredTensor(entry.dtype, entry.shape, entry.offset, entry.end, _checksum(head, name))
            tensors[int(match[1]), match[2]] = stored
    if not tensors:
        return None
    return Carry(info.seam, info.tail, info.carried, _FileCarry(path, tensors, info.heads, file.fileno()))


def _checked_array(file: BinaryIO, head: Head, name: str) -> NDArray[Any]:
    """Read a tensor and verify its checksum."""
    entry = head.tensors[name]
    data = _bytes(file, entry.offset, entry.end)
    _check(data, _checksum(head, name), name)
    return _array(data, entry, entry.offset)


def _array(data: memoryview, entry: TensorEntry | StoredTensor, start: int = 0) -> NDArray[Any]:
    """Return a read-only view of a tensor in `data`, which begins at byte `start` of the file."""
    return np.frombuffer(data, entry.dtype, prod(entry.shape), entry.offset - start).reshape(entry.shape)


def _rows(data: memoryview, tensor: StoredTensor, start: int) -> NDArray[Any]:
    return _array(data, tensor, start) if tensor.end else np.empty(tensor.shape, tensor.dtype)


def _layers(head: Head, n_rows: int, kv: str) -> list[StoredLayer]:
    """Return the place of each layer's K and V in the file, by layer and part. Without a V tensor, V has no columns."""
    rounded = dict(zip(NAMES["attention"], quantized(kv), strict=True))
    parts = {name: (part, index) for part, names in NAMES.items() for index, name in enumerate(names)}
    tensors: dict[tuple[int, str], list[StoredTensor | None]] = {}
    for name, entry in head.tensors.items():
        checksum = _checksum(head, name)
        if name in (*LISTS, AXES, PICTURES) or CARRY_NAME.fullmatch(name):
            continue
        match = ROWS_NAME.fullmatch(name)
        if match is None:
            raise FormatError(f"it holds a tensor {name[:40]!r} that segments do not have")
        part, index = parts[match[2]]
        if part == "state":
            if len(entry.shape) != 2 or entry.shape[0] != 1 or entry.dtype != np.float32:
                raise FormatError(f"{name} is not one row of f32")
        elif len(entry.shape) != 2 or entry.shape[0] != n_rows:
            raise FormatError(f"{name} does not have one row a token")
        elif (entry.dtype == Q8_0) != rounded.get(match[2], False):
            raise FormatError(f"{name} is not kept as notes.kv says")
        elif entry.dtype != Q8_0 and entry.dtype.kind != "f":
            raise FormatError(f"{name} is neither f16 nor f32")
        tensor = StoredTensor(entry.dtype, entry.shape, entry.offset, entry.end, checksum)
        tensors.setdefault((int(match[1]), part), [None, None])[index] = tensor
    order = list(NAMES)
    layers = []
    for layer, part in sorted(tensors, key=lambda key: (key[0], order.index(key[1]))):
        k, v = tensors[layer, part]
        if k is None and (part != "state" or v is None):
            raise FormatError(f"layer {layer} has no K rows")
        known = k if k is not None else v
        assert known is not None
        none = StoredTensor(known.dtype, (known.shape[0], 0), 0, 0, "")
        layers.append(StoredLayer(layer, k or none, v or none, part))
    return layers
