"""A llama.cpp context: K/V rows of one or more sequences, and the hooks that place, replace, add and read them.

It speaks of sequences, positions and rows; what stands in them is the notebook's business.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import native
from notes_cli.engine.identity import Identity
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.engine.segment import LayerRows, Tokens
from notes_cli.errors import EngineError

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
_KV_NAMES = {number: name for name, number in KV_TYPES.items()}
_FLASH = {"auto": -1, "off": 0, "on": 1}
_ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}
_ROPE_NAMES = {-1: "none", 0: "norm", 2: "neox"}
_ROW_TYPES: dict[Any, int] = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}

Output = Literal["none", "last", "all"]
_OUTPUT = {"none": native.OUTPUT_NONE, "last": native.OUTPUT_LAST, "all": native.OUTPUT_ALL}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context is made. None and 0 leave llama.cpp's or the model's own value, as its command line does."""

    n_ctx: int = 4096
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_sequences: int = 1
    unified: bool = False
    flash_attention: Literal["auto", "on", "off"] = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    offload_kv: bool = True
    rope_scaling: str | None = None
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0


class Context:
    """One llama_context. Use it from one thread at a time; close it before its model."""

    def __init__(self, model: Model, options: ContextOptions | None = None) -> None:
        self._handle: Any = None
        self.decodes = 0  # how often logits have been replaced: who remembers this number knows whether they are his
        self.model = model
        self.options = options = options or ContextOptions()
        params = llama.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_batch = options.n_batch
        params.n_ubatch = min(options.n_ubatch, options.n_batch)
        params.n_seq_max = options.n_sequences
        params.kv_unified = options.unified
        params.n_threads = params.n_threads_batch = options.n_threads or _physical_cores()
        params.flash_attn_type = _FLASH[options.flash_attention]
        params.type_k, params.type_v = KV_TYPES[options.type_k], KV_TYPES[options.type_v]
        params.offload_kqv = options.offload_kv
        params.swa_full = True
        params.no_perf = True
        if options.rope_scaling is not None:
            params.rope_scaling_type = _ROPE_SCALING[options.rope_scaling]
        params.rope_freq_base = options.rope_freq_base
        params.rope_freq_scale = options.rope_freq_scale
        params.yarn_orig_ctx = options.yarn_orig_ctx
        native.log_lines.clear()
        self._handle = llama.llama_init_from_model(model.handle, params)
        if not self._handle:
            reason = native.log_lines[-1].strip() if native.log_lines else "no reason given"
            raise EngineError(f"llama.cpp cannot make a context of {options.n_ctx} tokens for {model.name} ({reason})")
        self.n_ctx = int(llama.llama_n_ctx_seq(self._handle))

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise EngineError("this context is closed")
        return self._handle

    @property
    def _memory(self) -> Any:
        return llama.llama_get_memory(self.handle)

    def close(self) -> None:
        if self._handle is not None:
            llama.llama_free(self._handle)
            self._handle = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def supports(self, operation: str) -> str | None:
        """None if this context can `splice`, `rewrite`, `append` or `read`, else the reason it cannot."""
        return native.supports(self.handle, operation)

    @cached_property
    def layers(self) -> list[native.Layer]:
        """Shape and rotation of each layer of the cache. Raise UnsupportedError where its rows cannot be read."""
        count = native.call("notes_layers", self.handle, None, 0)
        layers = (native.Layer * count)()
        native.call("notes_layers", self.handle, layers, count)
        return list(layers)

    def frequencies(self, index: int) -> NDArray[np.float64]:
        """Radians a position of each rotary pair of the index-th cache layer, all scaling in effect."""
        count = native.call("notes_frequencies", self.handle, index, None, 0)
        out = np.zeros(count)
        native.call("notes_frequencies", self.handle, index, out.ctypes.data_as(ctypes.POINTER(ctypes.c_double)), count)
        return out

    @cached_property
    def _rotation(self) -> str:
        """Digest of how every layer rotates. It does not change while the context lives, and is asked for often."""
        digest = hashlib.sha256()
        for index, layer in enumerate(self.layers):
            digest.update(f"{layer.layer} {layer.rope} {layer.n_rot} {layer.magnitude:.6f}\n".encode())
            digest.update(self.frequencies(index).astype(np.float32).tobytes())
        return digest.hexdigest()

    def identity(self, weights: str) -> Identity:
        """What a segment must have been compiled with to fit here. `weights`: sha256 of the model's file."""
        first = self.layers[0]
        return Identity(
            model=self.model.name,
            architecture=self.model.architecture,
            quantization=self.model.quantization,
            weights=weights,
            rope=self._rotation,
            rope_text=f"{_ROPE_NAMES.get(first.rope, first.rope)} base {first.freq_base:g} scale {first.freq_scale:g}",
            kv_type=f"{_KV_NAMES[first.type_k]}/{_KV_NAMES[first.type_v]}",
            adapters="",
        )

    # Rows. `sequence` is a sequence id; positions count from 0.

    def length(self, sequence: int) -> int:
        """Number of positions up to the last row of the sequence."""
        return int(llama.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def append(self, tokens: dict[int, Tokens], output: Output = "last") -> None:
        """Decode tokens after the last row of each sequence, all in one batch."""
        sequences = np.array(list(tokens), np.int32)
        counts = np.array([len(part) for part in tokens.values()], np.int32)
        flat = np.concatenate(list(tokens.values())).astype(np.int32)
        self.decodes += 1
        native.call(
            *("notes_append", self.handle, _int32(sequences), _int32(counts), len(sequences), _int32(flat)),
            _OUTPUT[output],
        )

    def rewrite(self, sequence: int, positions: Sequence[int], tokens: Tokens, output: Output = "none") -> None:
        """Decode tokens at positions that already hold rows, ascending, scattered or not, in their place."""
        where, what = (np.ascontiguousarray(part, np.int32) for part in (positions, tokens))
        if len(where) != len(what):
            raise EngineError(f"{len(where)} positions but {len(what)} tokens to rewrite")
        self.decodes += 1
        native.call("notes_rewrite", self.handle, sequence, _int32(where), _int32(what), len(where), _OUTPUT[output])

    def splice(
        self,
        sequence: int,
        position: int,
        tokens: Tokens,
        layers: Sequence[LayerRows],
        base: int,
        *,
        rotate: bool = True,
    ) -> None:
        """Place rows at [position, position + len(tokens)), K turned by position - base.

        `rotate=False` leaves K as it is: the control that must go wrong, for measuring what the rotation does.
        """
        self._check_layers(layers, len(tokens))
        rows = (native.Rows * len(layers))()
        keep = []  # the arrays must outlive the call
        for entry, layer in zip(rows, layers, strict=True):
            k, v = np.ascontiguousarray(layer.k), np.ascontiguousarray(layer.v)
            keep += [k, v]
            entry.type, entry.k, entry.v = _ROW_TYPES[k.dtype], k.ctypes.data, v.ctypes.data
        what = np.ascontiguousarray(tokens, np.int32)
        native.call(
            *("notes_splice", self.handle, sequence, position, _int32(what), len(what)),
            *(rows, len(layers), base if rotate else position),
        )

    def read(self, sequence: int, position: int, count: int, *, base: int, dtype: str = "f16") -> tuple[LayerRows, ...]:
        """Rows of [position, position + count), the first one's K turned to position `base`."""
        kind = np.dtype(np.float32 if dtype == "f32" else np.float16)
        layers = tuple(
            LayerRows(layer.layer, np.empty((count, layer.n_embd_k), kind), np.empty((count, layer.n_embd_v), kind))
            for layer in self.layers
        )
        rows = (native.Rows * len(layers))()
        for entry, part in zip(rows, layers, strict=True):
            entry.type, entry.k, entry.v = _ROW_TYPES[kind], part.k.ctypes.data, part.v.ctypes.data
        native.call("notes_read", self.handle, sequence, position, count, rows, len(layers), base)
        return layers

    def truncate(self, sequence: int, length: int) -> None:
        """Drop the rows of the sequence from position `length` on."""
        if not llama.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise EngineError(f"this model's memory cannot go back to position {length} (recurrent state)")

    def clear(self) -> None:
        llama.llama_memory_clear(self._memory, False)

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """Logits of an output of the last append or rewrite, [n_vocab], a copy."""
        pointer = llama.llama_get_logits_ith(self.handle, index)
        if not pointer:
            raise EngineError(f"there are no logits for output {index}")
        logits = np.array(np.ctypeslib.as_array(pointer, (self.model.n_vocab,)), np.float32)
        if np.isnan(logits).any():
            raise EngineError(f"{self.model.name} computes logits that are not numbers: its file or its K/V is damaged")
        return logits

    def _check_layers(self, layers: Sequence[LayerRows], count: int) -> None:
        """The hook trusts the shapes it is told; this is where they are known."""
        if len(layers) != len(self.layers):
            raise EngineError(f"rows of {len(layers)} layers, the cache has {len(self.layers)}")
        for rows, layer in zip(layers, self.layers, strict=True):
            expected = (count, layer.n_embd_k), (count, layer.n_embd_v)
            if (rows.k.shape, rows.v.shape) != expected or rows.k.dtype != rows.v.dtype:
                raise EngineError(
                    f"rows of layer {rows.layer} are {rows.k.shape} and {rows.v.shape}, expected {expected}"
                )
            if rows.k.dtype not in _ROW_TYPES:
                raise EngineError(f"rows of layer {rows.layer} are {rows.k.dtype}, expected float16 or float32")


def _int32(array: NDArray[np.int32]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


def _physical_cores() -> int:
    """Threads to use: two hyper-threads of a core only get in each other's way."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable if usable <= 2 else usable // 2)
