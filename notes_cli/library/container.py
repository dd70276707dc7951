"""Reads and writes a segment (tokens and K/V of a compiled text) as one GGUF file (docs/format.md).

Files are written atomically, and every byte is covered by a checksum: one of the head (with its own digits as zeros)
and one of each tensor with its padding. The bytes that were checked are the bytes that are used, since they are read
once, into our own memory, or by a splice that checks what it places: other processes may write to the file meanwhile.
Names and folders are store.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from notes_cli.engine.gguf import (
    STRING,
    UINT32,
    UINT64,
    Cursor,
    FormatError,
    Head,
    head_bytes,
    open_file,
    padded,
    read_head,
)
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
    Transition,
    quantized,
    values_per_row,
)
from notes_cli.errors import DamagedError, Help, NewerError, SegmentError, UnwritableError, reason
from notes_cli.library.metadata import (
    FORMAT,
    KIND,
    Keys,
    Place,
    heads_of,
    metadata,
    number_of,
    places,
    places_of,
    segment_of,
)
from notes_cli.library.safe_files import lock_shared, replacing

DTYPES: Mapping[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 8: Q8_0, 26: np.dtype("<i4")}
NO_DIGEST = "0" * 32
HEAD_SUM = "notes.checksum.head"
LISTS = ("notes.tokens", "notes.context")
AXES, PICTURES = "notes.axes", "notes.pictures"
CHUNK = 8 << 20  # bytes of one read
CHECKSUM = re.compile(r"[0-9a-f]{32}")
ROWS_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([kv]|indexer\.[kv]|state\.[rs]|carry\.[rab])")
# Names of K and V tensors by part of a layer.
NAMES = {"attention": ("k", "v"), "indexer": ("indexer.k", "indexer.v"), "state": ("state.r", "state.s")}


def write_segment(path: Path, segment: Segment, *, writer: str = "notes", created: str | None = None) -> str:
    """Write the segment to `path`, atomically, with mode 0600. Return the checksum of its head. Raises UnwritableError
    if the disk refuses."""
    tensors = _arrays(small(segment))
    values: dict[str, str | int] = {"general.architecture": "notes"}
    values |= {f"notes.{key}": value for key, value in metadata(segment, writer, created).items()}
    values |= {f"notes.checksum.{name}": _checksum(tensor) for name, tensor in tensors.items()}
    values |= {HEAD_SUM: NO_DIGEST, "general.name": segment.name}
    shapes = [_shape(name, tensor) for name, tensor in tensors.items()]
    values[HEAD_SUM] = xxhash.xxh3_128(head_bytes(values, shapes)).hexdigest()
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(head_bytes(values, shapes))
            for tensor in tensors.values():
                file.write(tensor.reshape(-1).view(np.uint8).data)
                file.write(bytes(padded(tensor.nbytes) - tensor.nbytes))
    except OSError as error:
        raise UnwritableError(f"cannot write {path}: {reason(error)}. Nothing was changed") from error
    return str(values[HEAD_SUM])


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
    """Read a segment file and check every byte.

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
    with _segment_errors(path):
        file = _SegmentFile(path)
        lock_shared(file._open)
        return _read(path, file)


def peek(path: Path) -> Segment:
    """Read a file without its K/V, which are neither checked nor there later, and without the bytes of its images.
    Errors as in open_segment."""
    with _segment_errors(path), closing(_SegmentFile(path)) as file:
        return _read(path, file, whole=False)


def checksum_of(path: Path) -> str:
    """Return the checksum of the file's head, which holds those of all tensors. Errors as in open_segment."""
    return peek(path).checksum


class _SegmentFile(Stored):
    """An open segment file, closed when nothing refers to it any more; its K/V is read when needed."""

    def __init__(self, path: Path) -> None:
        self._path, self._open = path, open_file(path)
        self.carries = False  # the file has transitions, which are read later
        super().__init__((), self._open)

    def array(self, name: str, place: StoredTensor) -> NDArray[Any]:
        """Read a tensor and verify its checksum; an absent one has no columns."""
        data = np.empty(place.end - place.offset, np.uint8)
        buffer, at = data.data, 0
        self._open.seek(place.offset)
        while at < len(data):
            count = self._open.readinto(buffer[at : at + CHUNK])  # type: ignore[attr-defined]  # unbuffered: it has it
            if not count:
                raise FormatError(f"it ends within {name}: it was cut off while it was read")
            at += count
        return _tensor(name, place, data) if len(data) else np.empty(place.shape, place.dtype)

    def read(self) -> tuple[LayerRows, ...]:
        result = []
        with _segment_errors(self._path):
            for layer in self.tensors:
                k, v = (f"blk.{layer.layer}.{name}" for name in NAMES[layer.part])
                result.append(LayerRows(layer.layer, self.array(k, layer.k), self.array(v, layer.v), layer.part))
        return tuple(result)

    def release(self) -> None:
        if not self.carries:
            self.close()

    def refused(self, why: str, *, damaged: bool) -> SegmentError:
        return _damaged(self._path, why) if damaged else _unreadable(self._path, why)

    def close(self) -> None:
        self._open.close()

    def __del__(self) -> None:
        if hasattr(self, "_open"):  # it could be opened
            self.close()


# ---- writing


def _arrays(segment: Segment) -> dict[str, NDArray[Any]]:
    """Return all tensors by name, without empty ones (no left context; no V)."""
    tensors: dict[str, NDArray[Any]] = {
        "notes.tokens": np.ascontiguousarray(segment.tokens, "<i4"),
        "notes.context": np.ascontiguousarray(segment.context, "<i4"),
    }
    for rows in segment.layers:
        state = rows.part == "state"
        count = len(segment.states) or 1 if state else segment.base - segment.first + len(segment)
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


def _checksum(tensor: NDArray[Any]) -> str:
    digest = xxhash.xxh3_128(tensor.reshape(-1).view(np.uint8).data)
    digest.update(bytes(padded(tensor.nbytes) - tensor.nbytes))
    return digest.hexdigest()


def _shape(name: str, tensor: NDArray[Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor as head_bytes takes it."""
    kind = next(kind for kind, dtype in DTYPES.items() if dtype == tensor.dtype)
    *rows, columns = tensor.shape
    return name, (columns * BLOCK if kind == 8 else columns, *reversed(rows)), kind, tensor.nbytes


# ---- reading


def _read(path: Path, file: _SegmentFile, whole: bool = True) -> Segment:
    """Read and check a file, but for its K/V; `whole`: with the bytes of its images."""
    cursor = Cursor(file._open)
    head = read_head(cursor)
    values = _values(head)
    cursor.at = 0
    if values.get(HEAD_SUM) != _head_sum(cursor.take(head.size), head, values):
        raise FormatError("the checksum of its head is wrong")
    tensors = _tensors(head, values, cursor.size)
    lists = []
    for name in LISTS:
        ids = np.empty(0, np.int32)
        if (place := tensors.pop(name, None)) is not None:
            cursor.at = place.offset
            ids = _tensor(name, place, np.frombuffer(cursor.take(place.end - place.offset), np.uint8)).copy()
            if ids.dtype != np.int32 or ids.ndim != 1 or ids.min() < 0:
                raise FormatError(f"{name} is not a list of token ids, or holds a negative token id")
        lists.append(ids)
    keys = {key.removeprefix("notes."): value for key, value in values.items() if key.startswith("notes.")}
    segment = segment_of(keys, *lists)

    axes, pictures = tensors.pop(AXES, None), tensors.pop(PICTURES, None)
    found = places_of(keys, segment.text)
    if pictures is not None and found and not whole:
        images = tuple(ImageFile(one.start, one.end, b"") for one in found)
    else:
        images = _pictures(None if pictures is None else file.array(PICTURES, pictures), found, segment)
    layers, carried = _layers(tensors, segment)
    file.tensors, file.carries = tuple(layers), bool(carried)
    return replace(
        segment,
        layers=file,
        pictures=images,
        axes=_axes(None if axes is None else file.array(AXES, axes), segment),
        carry=_carry(path, file, carried, keys, segment) if carried else None,
        path=path,
        file_size=cursor.size,
        checksum=str(values[HEAD_SUM]),
    )


def _values(head: Head) -> dict[str, str | int]:
    """Return the values of a segment's head; raise _NewerError or _OtherKindError for other files."""
    values = head.values
    version = values.get("notes.format")
    if isinstance(version, int) and version > FORMAT:
        raise _NewerError(version)
    if values.get("general.architecture") != "notes":
        raise _OtherKindError
    for key, kind in head.kinds.items():
        if kind not in (STRING, UINT32, UINT64):
            raise FormatError(f"{key[:40]!r} is of type {kind}, which segments do not have")
    if (version, values.get("notes.kind")) != (FORMAT, KIND):
        raise _OtherKindError
    return values  # type: ignore[return-value]


def _head_sum(data: bytes, head: Head, values: Mapping[str, str | int]) -> str:
    """Compute the checksum of everything before the first tensor, with its own digits as zeros."""
    if not CHECKSUM.fullmatch(str(values.get(HEAD_SUM))):
        raise FormatError("it has no checksum")
    at = head.offsets[HEAD_SUM] + 8
    return str(xxhash.xxh3_128(data[:at] + NO_DIGEST.encode() + data[at + len(NO_DIGEST) :]).hexdigest())


def _tensors(head: Head, values: Mapping[str, str | int], size: int) -> dict[str, StoredTensor]:
    """Return the places of all tensors in a file of `size` bytes, which must follow each other to its end."""
    tensors, at = {}, head.size
    for name, (dims, kind, offset) in head.tensors.items():
        if kind not in DTYPES or not dims:
            raise FormatError(f"it holds a tensor of {len(dims)} dimensions and type {kind}, as segments do not")
        *rows, columns = dims[::-1]
        if DTYPES[kind] == Q8_0:
            if columns % BLOCK:
                raise FormatError(f"it holds rows of {columns} numbers, which are no whole blocks")
            columns //= BLOCK
        nbytes = prod(rows) * columns * DTYPES[kind].itemsize
        if head.size + offset != at or nbytes == 0:
            raise FormatError("its tensors do not follow each other")
        checksum = values.get(f"notes.checksum.{name}")
        if not isinstance(checksum, str) or not CHECKSUM.fullmatch(checksum):
            raise FormatError(f"the checksum of {name[:40]!r} is wrong")
        tensors[name] = StoredTensor(DTYPES[kind], (*rows, columns), at, padded(at + nbytes), checksum)
        at = padded(at + nbytes)
    if at != size:
        raise FormatError(f"it has {size} bytes, and its head describes {at}")
    return tensors


def _tensor(name: str, place: StoredTensor, data: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the tensor of these bytes, its padding included, which are checked."""
    _check(data, place.checksum, name)
    data.setflags(write=False)
    return data[: place.nbytes].view(place.dtype).reshape(place.shape)


def _check(data: NDArray[np.uint8], checksum: str, name: str) -> None:
    if xxhash.xxh3_128(data.data).hexdigest() != checksum:
        raise FormatError(f"the checksum of {name[:40]!r} is wrong")


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
    except FormatError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(f"{path} is damaged or not a segment: {why}", Help.COMPILE_BY_FORCE())


def _unreadable(path: Path, why: str) -> SegmentError:
    return SegmentError(f"cannot read {path}: {why}")


class _NewerError(FormatError):
    """A format that this version does not know."""


class _OtherKindError(FormatError):
    """A sound GGUF file of another kind, such as a model."""


def _axes(axes: NDArray[Any] | None, segment: Segment) -> NDArray[np.int32] | None:
    """Check time, row and column of each token where images share positions. They must be as a compile makes them: a
    text token has one position, an image's tokens lie within its own, and later tokens follow them."""
    if axes is None:
        if segment.positions != len(segment):
            raise FormatError("its images share positions, and it does not say how")
        return None
    if not segment.media or axes.dtype != np.int32 or axes.shape != (len(segment), 3):
        raise FormatError(f"{AXES} does not have three numbers for each row of images and texts")
    at = done = 0
    for image in (*segment.media, None):
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


def _pictures(content: NDArray[Any] | None, found: Sequence[Place], segment: Segment) -> tuple[ImageFile, ...]:
    """Return the image files, whose digests must be those of the encoded images."""
    if content is None:
        if found:
            raise FormatError(f"it has no {PICTURES}")
        return ()
    if (
        content.dtype != np.int32
        or not 0 <= content.nbytes - max((one.byte + one.size for one in found), default=0) < 4
    ):
        raise FormatError(f"{PICTURES} is not the bytes of files")
    data = content.tobytes()
    files = tuple(ImageFile(one.start, one.end, data[one.byte : one.byte + one.size]) for one in found)
    digests = {file.data: sha256(file.data).hexdigest() for file in files}
    named = all(segment.text.endswith(digests[file.data], file.start, file.end) for file in files)
    if not named or {image.sha256 for image in segment.media} != set(digests.values()):
        raise FormatError(f"{PICTURES} does not hold the images that its rows are of")
    return files


def _layers(
    tensors: Mapping[str, StoredTensor], segment: Segment
) -> tuple[list[StoredLayer], dict[int, dict[str, StoredTensor]]]:
    """Return the place of each layer's K and V in the file, by layer and part; and of its transition, by layer. Without
    a V tensor, V has no columns."""
    rounded = dict(zip(NAMES["attention"], quantized(segment.kv), strict=True))
    parts = {name: (part, index) for part, names in NAMES.items() for index, name in enumerate(names)}
    n_rows = len(segment) + (segment.base if segment.prefix_only else 0)
    found: dict[tuple[int, int], list[StoredTensor | None]] = {}
    carried: dict[int, dict[str, StoredTensor]] = {}
    for name, place in tensors.items():
        match = ROWS_NAME.fullmatch(name)
        if match is None:
            raise FormatError(f"it holds a tensor {name[:40]!r} that segments do not have")
        layer, kind, (rows, *columns) = int(match[1]), match[2], place.shape
        if kind.startswith("carry."):
            if columns or place.dtype != np.float32:
                raise FormatError(f"{name} is not a list of f32")
            carried.setdefault(layer, {})[kind[-1]] = place
            continue
        part, index = parts[kind]
        if part == "state":
            if len(columns) != 1 or rows != (len(segment.states) or 1) or place.dtype != np.float32:
                raise FormatError(f"{name} does not have one row of f32 a state")
        elif len(columns) != 1 or rows != n_rows:
            raise FormatError(f"{name} does not have one row a token")
        elif (place.dtype == Q8_0) != rounded.get(kind, False):
            raise FormatError(f"{name} is not kept as notes.kv says")
        elif place.dtype != Q8_0 and place.dtype.kind != "f":
            raise FormatError(f"{name} is neither f16 nor f32")
        found.setdefault((layer, list(NAMES).index(part)), [None, None])[index] = place
    layers = []
    for (layer, number), (k, v) in sorted(found.items(), key=lambda item: item[0]):
        part, known = list(NAMES)[number], k or v
        assert known is not None
        if k is None and part != "state":
            raise FormatError(f"layer {layer} has no K rows")
        none = StoredTensor(known.dtype, (known.shape[0], 0), 0, 0, "")
        layers.append(StoredLayer(layer, k or none, v or none, part))
    states = any(layer.part == "state" for layer in layers)
    if states and not (segment.prefix_only or segment.states):
        raise FormatError("it holds the state of recurrent layers, but not all rows before it")
    if carried and not states:
        raise FormatError("it says how a state is carried, and holds none")
    return layers, carried


def _carry(
    path: Path, file: _SegmentFile, carried: Mapping[int, Mapping[str, StoredTensor]], keys: Keys, segment: Segment
) -> Carry:
    """Return the transitions of recurrent state, which are read and checked at the first use."""
    seam, tail, heads = number_of(keys, "carry.seam"), number_of(keys, "carry.tail"), heads_of(keys)
    if seam is None or tail is None or seam + tail >= len(segment):
        raise FormatError("notes.carry does not fit its tokens")

    @cache
    def load() -> tuple[Transition, ...]:
        none = StoredTensor(np.dtype("<f4"), (0,), 0, 0, "")
        with _segment_errors(path):
            arrays = {
                layer: [file.array(f"blk.{layer}.carry.{kind}", places.get(kind, none)) for kind in "rab"]
                for layer, places in sorted(carried.items())
            }
        return tuple(Transition(layer, r, a, b, heads.get(layer, 0)) for layer, (r, a, b) in arrays.items())

    return Carry(seam, tail, sum(place.nbytes for places in carried.values() for place in places.values()), load)
