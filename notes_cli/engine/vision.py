"""Encodes images into embeddings for a model's input with its projector (mmproj), through libmtmd.

libmtmd is loaded only when an image is encoded. It is given bitmaps only, never text, so that a marker in user text
stays text. No contexts and no image files here.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import native
from notes_cli.engine.header import Source, read_header
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import Media, Tokens
from notes_cli.errors import EngineError, ImageError, ModelError
from notes_cli.images import Picture, pixels

IMAGE_ROW = 0  # placeholder token of an image row; never decoded
MAX_TOKENS_KEY = "notes.image_max_tokens"  # key of a projector: the maximum number of rows per image in its training
_MARK = re.compile(r"<\|?[^<>|\s]+\|?>|\[[A-Z_]+\]")
_OTHER = "Name the projector that was published with it"
_PLACED_BY_PROMPT = ("deepseek4v",)  # pads an image depending on its place in the prompt, so its rows cannot move

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ImageEmbeddings:
    """An image, or text, as model input: tokens, with `IMAGE_ROW` in place of each image row, and embeddings. `axes`
    [n, 3]: time, row and column of each token, from 0 on; None with one axis. `rows`: per image of `media`, [n, width
    of the model's input]; empty in a plan. `whole`: attention within an image is not causal, so it must be decoded in
    one micro-batch."""

    tokens: Tokens
    media: tuple[Media, ...]
    axes: NDArray[np.int32] | None
    rows: tuple[Rows, ...]
    whole: bool


def text_part(tokens: Tokens) -> ImageEmbeddings:
    """Wrap the tokens of a text, to be joined with images."""
    return ImageEmbeddings(tokens, (), None, (), False)


def join_parts(parts: Sequence[ImageEmbeddings]) -> ImageEmbeddings:
    """Concatenate texts and images."""
    if len(parts) == 1:
        return parts[0]
    media: list[Media] = []
    axes: list[NDArray[np.int32]] = []
    row = at = 0
    for part in parts:
        count = len(part.tokens)
        media += [replace(image, first=image.first + row, last=image.last + row) for image in part.media]
        axes.append(
            at + (np.repeat(np.arange(count, dtype=np.int32)[:, None], 3, 1) if part.axes is None else part.axes)
        )
        row, at = row + count, at + count + sum(image.positions - image.rows for image in part.media)
    shared = any(part.axes is not None for part in parts)
    return ImageEmbeddings(
        np.concatenate([part.tokens for part in parts]),
        tuple(media),
        np.concatenate(axes).astype(np.int32) if shared else None,
        tuple(rows for part in parts for rows in part.rows),
        any(part.whole for part in parts),
    )


def _load() -> Any:
    """Import the binding of libmtmd. Raises EngineError where it is missing, or would load a second libllama."""
    try:
        mtmd = importlib.import_module("notes_cli.lib.mtmd_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise EngineError(f"the library that looks at images does not load: {error}", native.MEND) from error
    both = [library for library in (mtmd._libmtmd, llama._lib) if hasattr(library, "notes_abi_version")]
    addresses = {ctypes.cast(library.notes_abi_version, ctypes.c_void_p).value for library in both}
    # Windows does not expose the symbols of a dependency
    if len(addresses) != 1 or (len(both) != 2 and sys.platform != "win32"):
        raise EngineError(f"{mtmd._libmtmd._name} belongs to another llama.cpp than {native.LIBRARY_PATH}", native.MEND)
    mtmd.mtmd_log_set(native.log_callback, ctypes.c_void_p(0))
    return mtmd


class VisionEncoder(AbstractContextManager["VisionEncoder"]):
    """A projector loaded for a model. Close it before the model, or use it as a context manager."""

    def __init__(
        self,
        model: Model,
        path: Path,
        *,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        threads: int = 1,
    ) -> None:
        """Load a projector. `min_tokens`, `max_tokens`: rows per image, roughly, where the projector leaves that open.
        Raises ModelError if the file is not an image projector of this model."""
        self._handle: Any = None
        self.model, self.path = model, path
        header = read_header(path)
        self.projector = header.text("clip.projector_type") or header.text("clip.vision.projector_type")
        if header.architecture != "clip":
            raise ModelError(f"{path} is no projector (mmproj): its architecture is {header.architecture or 'unknown'}")
        if self.projector in _PLACED_BY_PROMPT:
            text = f"{path}: a {self.projector} places an image by where the prompt has it, so that it cannot move"
            raise ModelError(text)
        self.limits = (native.fits(min_tokens or 0), native.fits(max_tokens or header.number(MAX_TOKENS_KEY) or 0))
        if llama.llama_vocab_type(model.vocab) == llama.LLAMA_VOCAB_TYPE_NONE:  # llama.cpp would abort
            raise ModelError(f"{model.name} has no tokenizer, and so no words to mark an image by")
        self._mtmd = _load()
        try:
            self.source = Source(path)  # hash the bytes that are loaded
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            self._open(threads)
        except BaseException:
            self.close()
            raise

    def _open(self, threads: int) -> None:
        """Load the file. Raises ModelError if it is not an image projector of this model."""
        name, path = self.source.loadable, self.path
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu = self.model.offloads
        params.print_timings = params.warmup = False
        params.n_threads = threads
        params.image_min_tokens, params.image_max_tokens = (limit or -1 for limit in self.limits)
        native.guard(str(path))
        try:
            with native.collected_log() as lines:
                self._handle = self._mtmd.mtmd_init_from_file(os.fsencode(name), self.model.handle, params)
        finally:
            native.guard(str(path), on=False)
        native.raise_kept()
        if not self._handle:
            raise self._load_error(list(lines))
        if self.source.changed:
            raise ModelError(f"{path} changed while it was being loaded", "Try again when it is complete")
        if not self._mtmd.mtmd_support_vision(self._handle):
            raise ModelError(f"{self.path} hears and does not see", "Name a projector of images")

    def _load_error(self, lines: list[str]) -> ModelError:
        """Make the error for a failed load from llama.cpp's log."""
        failed = next((line.partition("': ")[2] for line in lines if "failed to load model '" in line), "")
        if "image_max_pixels" in failed:
            low, high = self.limits
            limits = f"at least {low} and at most {high}" if low and high else f"at least {low}" if low else str(high)
            text = f"{self.path} makes no image of {limits} rows ({_message(failed)})"
            return ModelError(text, "Allow other numbers of rows, or leave that to the projector")
        why = next((line for line in lines if "mismatch" in line), "") or failed
        why = why or next((line for line in lines if "error" in line.lower()), "no reason given")
        return ModelError(f"{self.path} is no projector for {self.model.name} ({_message(why)})", _OTHER)

    def close(self) -> None:
        native.free_once(self, "_handle", lambda handle: self._mtmd.mtmd_free(handle))
        self.source.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def settings(self) -> str:
        """Everything besides the file that decides the rows of an image: the library's version, whose limits are code,
        and limits that were set."""
        named = [f"{name}={limit}" for name, limit in zip(("min", "max"), self.limits, strict=True) if limit]
        return " ".join([f"llama-cpp-python {native.UPSTREAM}", *named])

    @cached_property
    def _axes(self) -> bool:
        """True if the model uses M-RoPE."""
        return bool(self._mtmd.mtmd_decode_use_mrope(self._handle))

    def plan(self, picture: Picture) -> ImageEmbeddings:
        """Compute the rows and positions of an image without encoding it."""
        return self._tokenize_image(picture, None)

    def encode(self, picture: Picture) -> ImageEmbeddings:
        """Encode an image. Raises ImageError if it cannot be decoded, or this model cannot take it."""
        return self._tokenize_image(picture, np.ascontiguousarray(pixels(picture)))

    def _tokenize_image(self, picture: Picture, image: NDArray[np.uint8] | None) -> ImageEmbeddings:
        mtmd = self._mtmd
        shown = f"{picture.source} shown to {self.path}"
        with ExitStack() as stack:
            native.guard(shown)
            stack.callback(native.guard, shown, on=False)
            data = None if image is None else image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            bitmap = mtmd.mtmd_bitmap_init(picture.width, picture.height, data)
            stack.callback(mtmd.mtmd_bitmap_free, bitmap)
            chunks = mtmd.mtmd_input_chunks_init()
            stack.callback(mtmd.mtmd_input_chunks_free, chunks)
            part = mtmd.mtmd_input_part(None, bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            with native.collected_log() as lines:
                if mtmd.mtmd_tokenize_from_parts(self._handle, chunks, parts, 1, False):
                    why = _message(lines[-1]) if lines else "no reason given"
                    raise ImageError(f"{self.path} cannot be shown {picture.source} ({why})")
            input_chunks = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
            return self._read(picture, input_chunks, image is not None)

    def _read(self, picture: Picture, chunks: list[Any], encode: bool) -> ImageEmbeddings:
        """Convert libmtmd's chunks: tokens around the image and between its parts, and embeddings."""
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
            axes.append(at + self._row_positions(chunk, count))
            image = Media(len(tokens), len(tokens) + count, positions, picture.sha256, picture.width, picture.height)
            media.append(image)
            tokens += [IMAGE_ROW] * count
            at += positions
            if encode:
                rows.append(self._encode(picture, chunk, count))
        self._check_marks(tokens, media)
        placed = np.concatenate(axes).astype(np.int32) if self._axes else None
        if self._axes and media[-1].last == len(tokens):  # the next token's position would be within the image
            raise ImageError(f"{self.path} marks no end of an image, and {self.model.name} has rows and columns")
        return ImageEmbeddings(np.array(tokens, np.int32), tuple(media), placed, tuple(rows), whole)

    def _row_positions(self, chunk: Any, count: int) -> NDArray[np.int32]:
        """Return time, row and column of the rows of an image, [count, 3], from 0 on."""
        mtmd = self._mtmd
        if not self._axes:
            return np.repeat(np.arange(count, dtype=np.int32)[:, None], 3, 1)
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        offsets = []
        for start in (0, 1000):
            ats = (mtmd.mtmd_decoder_pos * count)()
            mtmd.mtmd_helper_image_get_decoder_pos(image, start, ats)
            offsets.append(np.array([(at.t, at.y, at.x) for at in ats], np.int64) - start)
        if (offsets[0] != offsets[1]).any() or (offsets[0] < 0).any():
            raise ImageError(
                f"{self.model.name} has places for an image that do not move with it: it cannot be compiled"
            )
        return offsets[0].astype(np.int32)

    def _encode(self, picture: Picture, chunk: Any, count: int) -> Rows:
        mtmd = self._mtmd
        with native.collected_log() as lines:
            failed = mtmd.mtmd_encode_chunk(self._handle, chunk)
        native.raise_kept()
        if failed:
            why = _message(lines[-1]) if lines else "no reason given"
            raise EngineError(f"{self.path} cannot look at {picture.source} ({why})")
        width = llama.llama_model_n_embd_inp(self.model.handle)
        rows = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._handle), (count, width)).copy()
        if not np.isfinite(rows).all():
            raise EngineError(f"{self.path} computes rows that are not numbers for {picture.source}")
        return np.asarray(rows, np.float32)

    def _check_marks(self, tokens: list[int], media: list[Media]) -> None:
        """Raise if a marker is not a single token of the vocabulary: this detects a wrong projector of the right
        width."""
        if not media:
            raise ImageError(f"{self.path} makes nothing of an image")
        inside = {row for image in media for row in range(image.first, image.last)}
        marks = [token for row, token in enumerate(tokens) if row not in inside]
        if self.model.unknown(marks) is not None:
            raise ModelError(f"{self.path} marks an image by what is no token of {self.model.name}", _OTHER)
        for mark in _MARK.findall(self.model.text(marks, special=True)):
            if len(self.model.tokenize(mark, special=True)) != 1:
                raise ModelError(
                    f"{self.path} marks an image by {mark}, which is no token of {self.model.name}",
                    _OTHER,
                )


def _message(line: str) -> str:
    """Return a line of llama.cpp's log without the name of the function."""
    return re.sub(r"^\w+: ", "", line.strip().splitlines()[0] if line.strip() else line).strip()
