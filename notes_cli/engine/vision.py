"""An eye: the projector (mmproj) of a model that sees. It makes rows for the model's input out of an image.

libmtmd does, whose binding is imported here and when an image is looked at, not before. It is shown bitmaps only, no
text: a marker in somebody's words is words. It knows neither contexts nor files of images.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import native, process
from notes_cli.engine.header import Header, read_header
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import Media, Tokens
from notes_cli.engine.source import Source
from notes_cli.errors import EngineError, ImageError, ModelError
from notes_cli.images import Picture, pixels

IMAGE_ROW = 0  # the token that stands for a row of an image where there must be one; it is never decoded
MAX_TOKENS_KEY = "notes.image_max_tokens"  # key of a projector: the most rows of an image that it was trained with
_MARK = re.compile(r"<\|?[^<>|\s]+\|?>|\[[A-Z_]+\]")
_OTHER = "Name the projector that was published with it"
_PLACED_BY_PROMPT = ("deepseek4v",)  # pads an image by where it is in the prompt: its rows fit nowhere else

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ImageEmbeddings:
    """An image as a model takes it: tokens that mark it, and rows, for which `ROW` is in `tokens`.

    `axes`: time, row and column of each, [n, 3], from 0 on; None where a model has one axis. `rows`: by image of
    `media`, [n, width of the model's input]; none of a plan. `whole`: its rows see each other, so that they must be
    decoded in one micro-batch.
    """

    tokens: Tokens
    media: tuple[Media, ...]
    axes: NDArray[np.int32] | None
    rows: tuple[Rows, ...]
    whole: bool


def text_part(tokens: Tokens) -> ImageEmbeddings:
    """A text, to be joined with images."""
    return ImageEmbeddings(tokens, (), None, (), False)


def join_parts(parts: Sequence[ImageEmbeddings]) -> ImageEmbeddings:
    """Texts and images as one, each after those before it."""
    if len(parts) == 1:
        return parts[0]
    media: list[Media] = []
    axes: list[NDArray[np.int32]] = []
    row = at = 0
    for part in parts:
        count = len(part.tokens)
        media += [replace(one, first=one.first + row, last=one.last + row) for one in part.media]
        axes.append(
            at + (np.repeat(np.arange(count, dtype=np.int32)[:, None], 3, 1) if part.axes is None else part.axes)
        )
        row, at = row + count, at + count + sum(one.positions - one.rows for one in part.media)
    shared = any(part.axes is not None for part in parts)
    return ImageEmbeddings(
        np.concatenate([part.tokens for part in parts]),
        tuple(media),
        np.concatenate(axes).astype(np.int32) if shared else None,
        tuple(rows for part in parts for rows in part.rows),
        any(part.whole for part in parts),
    )


def _load() -> Any:
    """The binding of libmtmd. Raise EngineError where it is missing, or would bring a second libllama."""
    try:
        mtmd = importlib.import_module("notes_cli.lib.mtmd_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise EngineError(f"the library that looks at images does not load: {error}", native.MEND) from error
    both = [library for library in (mtmd._libmtmd, llama._lib) if hasattr(library, "notes_abi_version")]
    places = {ctypes.cast(library.notes_abi_version, ctypes.c_void_p).value for library in both}
    if len(places) != 1 or (len(both) != 2 and sys.platform != "win32"):  # there it does not tell of what it needs
        raise EngineError(f"{mtmd._libmtmd._name} belongs to another llama.cpp than {native.LIBRARY_PATH}", native.MEND)
    mtmd.mtmd_log_set(process.log_callback, ctypes.c_void_p(0))
    return mtmd


class VisionEncoder:
    """A projector that is loaded for a model. Close it before the model, or use it as a context manager."""

    def __init__(
        self,
        model: Model,
        path: Path,
        *,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        threads: int = 1,
    ) -> None:
        """`min_tokens`, `max_tokens`: rows of an image, where the projector leaves that open; roughly, as llama.cpp
        keeps to them. Raise ModelError for what is no projector of images, or not of this model."""
        self._handle: Any = None
        self.model, self.path = model, path
        header = read_header(path)
        self.projector = header.text("clip.projector_type") or header.text("clip.vision.projector_type")
        _check(header, path, self.projector)
        self.limits = (native.fits(min_tokens or 0), native.fits(max_tokens or header.number(MAX_TOKENS_KEY) or 0))
        if llama.llama_vocab_type(model.vocab) == llama.LLAMA_VOCAB_TYPE_NONE:  # llama.cpp aborts
            raise ModelError(f"{model.name} has no tokenizer, and so no words to mark an image by")
        self._mtmd = _load()
        try:
            self.source = Source(path)  # what is loaded and what is hashed are the same bytes
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            self._open(threads)
        except BaseException:
            self.close()
            raise

    def _open(self, threads: int) -> None:
        """Load the file. Raise ModelError where that is no projector of images, or not of this model."""
        name, path = self.source.loadable, self.path
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu = self.model.offloads
        params.print_timings = params.warmup = False
        params.n_threads = threads
        params.image_min_tokens, params.image_max_tokens = (limit or -1 for limit in self.limits)
        process.guard.add(str(path))
        try:
            with process.log.collected() as lines:
                self._handle = self._mtmd.mtmd_init_from_file(os.fsencode(name), self.model.handle, params)
        finally:
            process.guard.remove(str(path))
        process.interrupts.raise_kept()
        if not self._handle:
            raise self._refusal(list(lines))
        if self.source.changed:
            raise ModelError(f"{path} changed while it was being loaded", "Try again when it is complete")
        self._check_seeing()

    def _refusal(self, lines: list[str]) -> ModelError:
        """Why the file was not loaded, by what llama.cpp has logged."""
        failed = next((line.partition("': ")[2] for line in lines if "failed to load model '" in line), "")
        if "image_max_pixels" in failed:
            low, high = self.limits
            asked = f"at least {low} and at most {high}" if low and high else f"at least {low}" if low else str(high)
            what = f"{self.path} makes no image of {asked} rows ({_plain(failed)})"
            return ModelError(what, "Allow other numbers of rows, or leave that to the projector")
        why = next((line for line in lines if "mismatch" in line), "") or failed
        why = why or next((line for line in lines if "error" in line.lower()), "no reason given")
        return ModelError(f"{self.path} is no projector for {self.model.name} ({_plain(why)})", _OTHER)

    def close(self) -> None:
        native.free_once(self, "_handle", lambda handle: self._mtmd.mtmd_free(handle))
        self.source.close()

    def __enter__(self) -> VisionEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def settings(self) -> str:
        """What beside its file decides the rows of an image: the version that reads it, whose limits are code, and
        limits that were set."""
        named = [f"{name}={limit}" for name, limit in zip(("min", "max"), self.limits, strict=True) if limit]
        return " ".join([f"llama-cpp-python {native.UPSTREAM}", *named])

    @cached_property
    def _axes(self) -> bool:
        """Whether the model has rows and columns."""
        return bool(self._mtmd.mtmd_decode_use_mrope(self._handle))

    def _check_seeing(self) -> None:
        if not self._mtmd.mtmd_support_vision(self._handle):
            raise ModelError(f"{self.path} hears and does not see", "Name a projector of images")

    def plan(self, picture: Picture) -> ImageEmbeddings:
        """How many rows an image will take, and where, without looking at it."""
        return self._see(picture, None)

    def encode(self, picture: Picture) -> ImageEmbeddings:
        """Look at an image. Raise ImageError for one that cannot be decoded, or that the model cannot be shown."""
        return self._see(picture, np.ascontiguousarray(pixels(picture)))

    def _see(self, picture: Picture, image: NDArray[np.uint8] | None) -> ImageEmbeddings:
        mtmd = self._mtmd
        shown = f"{picture.source} shown to {self.path}"
        with ExitStack() as held:
            process.guard.add(shown)
            held.callback(process.guard.remove, shown)
            data = None if image is None else image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap = mtmd.mtmd_bitmap_init(picture.width, picture.height, data)
            held.callback(mtmd.mtmd_bitmap_free, bitmap)
            chunks = mtmd.mtmd_input_chunks_init()
            held.callback(mtmd.mtmd_input_chunks_free, chunks)
            part = mtmd.mtmd_input_part(None, bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            with process.log.collected() as lines:
                if mtmd.mtmd_tokenize_from_parts(self._handle, chunks, parts, 1, False):
                    why = _plain(lines[-1]) if lines else "no reason given"
                    raise ImageError(f"{self.path} cannot be shown {picture.source} ({why})")
            found = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
            return self._read(picture, found, image is not None)

    def _read(self, picture: Picture, chunks: list[Any], encode: bool) -> ImageEmbeddings:
        """The parts that libmtmd has made of an image: tokens around it and between its parts, and rows."""
        mtmd, at = self._mtmd, 0
        tokens: list[int] = []
        axes: list[NDArray[np.int32]] = []
        media: list[Media] = []
        rows: list[Rows] = []
        whole = False
        for chunk in chunks:
            count = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                pointer = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(ctypes.c_size_t()))
                tokens += [int(pointer[i]) for i in range(count)]
                axes.append(np.repeat(at + np.arange(count, dtype=np.int32)[:, None], 3, 1))
                at += count
                continue
            positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
            whole = whole or bool(mtmd.mtmd_decode_use_non_causal(self._handle, chunk))
            axes.append(at + self._places(chunk, count))
            one = Media(len(tokens), len(tokens) + count, positions, picture.sha256, picture.width, picture.height)
            media.append(one)
            tokens += [IMAGE_ROW] * count
            at += positions
            if encode:
                rows.append(self._encode(picture, chunk, count))
        self._check_marks(tokens, media)
        placed = np.concatenate(axes).astype(np.int32) if self._axes else None
        if self._axes and media[-1].last == len(tokens):  # what comes next would begin inside of it
            raise ImageError(f"{self.path} marks no end of an image, and {self.model.name} has rows and columns")
        return ImageEmbeddings(np.array(tokens, np.int32), tuple(media), placed, tuple(rows), whole)

    def _places(self, chunk: Any, count: int) -> NDArray[np.int32]:
        """Time, row and column of the rows of an image, [count, 3], from 0 on."""
        mtmd = self._mtmd
        if not self._axes:
            return np.repeat(np.arange(count, dtype=np.int32)[:, None], 3, 1)
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        found = []
        for start in (0, 1000):
            ats = (mtmd.mtmd_decoder_pos * count)()
            mtmd.mtmd_helper_image_get_decoder_pos(image, start, ats)
            found.append(np.array([(at.t, at.y, at.x) for at in ats], np.int64) - start)
        if (found[0] != found[1]).any() or (found[0] < 0).any():
            raise ImageError(
                f"{self.model.name} has places for an image that do not move with it: it cannot be compiled"
            )
        return found[0].astype(np.int32)

    def _encode(self, picture: Picture, chunk: Any, count: int) -> Rows:
        mtmd = self._mtmd
        with process.log.collected() as lines:
            failed = mtmd.mtmd_encode_chunk(self._handle, chunk)
        process.interrupts.raise_kept()
        if failed:
            why = _plain(lines[-1]) if lines else "no reason given"
            raise EngineError(f"{self.path} cannot look at {picture.source} ({why})")
        width = llama.llama_model_n_embd_inp(self.model.handle)
        rows = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._handle), (count, width)).copy()
        if not np.isfinite(rows).all():
            raise EngineError(f"{self.path} computes rows that are not numbers for {picture.source}")
        return np.asarray(rows, np.float32)

    def _check_marks(self, tokens: list[int], media: list[Media]) -> None:
        """Marks that are no token of the vocabulary become letters: so a wrong projector of the right width shows."""
        if not media:
            raise ImageError(f"{self.path} makes nothing of an image")
        inside = {row for one in media for row in range(one.first, one.last)}
        marks = [token for row, token in enumerate(tokens) if row not in inside]
        if self.model.unknown(marks) is not None:
            raise ModelError(f"{self.path} marks an image by what is no token of {self.model.name}", _OTHER)
        text = b"".join(self.model.token_bytes(token, special=True) for token in marks).decode(errors="replace")
        for mark in _MARK.findall(text):
            if len(self.model.tokenize(mark, special=True)) != 1:
                raise ModelError(
                    f"{self.path} marks an image by {mark}, which is no token of {self.model.name}",
                    _OTHER,
                )


def _check(header: Header, path: Path, projector: str) -> None:
    if header.architecture != "clip":
        raise ModelError(f"{path} is no projector (mmproj): its architecture is {header.architecture or 'unknown'}")
    if projector in _PLACED_BY_PROMPT:
        raise ModelError(f"{path}: a {projector} places an image by where the prompt has it, so that it cannot move")


def _plain(line: str) -> str:
    """A line of llama.cpp's log without the name of the function."""
    return re.sub(r"^\w+: ", "", line.strip().splitlines()[0] if line.strip() else line).strip()
