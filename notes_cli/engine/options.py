"""Defines the options of a context, checks them, and converts them to llama.cpp's parameters."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from notes_cli.engine import native
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.errors import EngineError

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
THREAD_WEIGHTS = 16 << 20  # bytes of weights that justify one more thread (docs/LOG.md)
_FLASH = {"auto": -1, "off": 0, "on": 1}
_ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Options of a context. None and 0 leave the default of llama.cpp or the model, as on its command line."""

    n_ctx: int = 4096
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_sequences: int = 1
    unified: bool = False
    swa_full: bool = True
    flash_attention: Literal["auto", "on", "off"] = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    offload_kv: bool = True
    rope_scaling: str | None = None
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_attn_factor: float | None = None

    @property
    def cache(self) -> str:
        """Types of K and V in the cache, "q8_0/f16"."""
        return f"{self.type_k}/{self.type_v}"

    @property
    def compiled(self) -> tuple[str, str]:
        """Types of K and V in segments for such a cache: K/V is quantized once, when it is spliced."""
        k, v = ("f32" if kind == "f32" else "f16" for kind in (self.type_k, self.type_v))
        return k, v


def context_params(model: Model, options: ContextOptions) -> Any:
    """Build llama.cpp's context parameters. Raises EngineError for invalid options."""
    _check(options)
    params = llama.llama_context_default_params()
    # A recurrent sequence cannot be rolled back: a spare one takes lookaheads (KVSequence.lookahead).
    spare = model.recurrent and options.n_sequences == 1
    params.n_seq_max = options.n_sequences + spare
    # llama.cpp reserves one output per sequence and as many as n_ctx before rounding, or a batch, has tokens; it aborts
    # where the latter are fewer (llama_context::output_reserve).
    params.n_ctx = max(options.n_ctx, params.n_seq_max) if options.n_ctx else 0
    params.n_batch = max(options.n_batch, params.n_seq_max)
    params.n_ubatch = min(options.n_ubatch, options.n_batch)
    params.kv_unified = options.unified or spare
    params.n_threads = params.n_threads_batch = options.n_threads or _threads(model)
    params.flash_attn_type = _FLASH[options.flash_attention]
    params.type_k, params.type_v = KV_TYPES[options.type_k], KV_TYPES[options.type_v]
    params.offload_kqv = options.offload_kv
    params.swa_full = options.swa_full
    params.no_perf = True
    if options.rope_scaling is not None:
        params.rope_scaling_type = _ROPE_SCALING[options.rope_scaling]
    params.rope_freq_base = options.rope_freq_base
    params.rope_freq_scale = options.rope_freq_scale
    params.yarn_orig_ctx = options.yarn_orig_ctx
    if options.yarn_attn_factor is not None:
        params.yarn_attn_factor = options.yarn_attn_factor
    return params


def _check(options: ContextOptions) -> None:
    """Raise EngineError for options with which no context can be made: ctypes would truncate numbers, llama.cpp abort
    or compute NaN."""
    wholes = {"n_ctx": 0, "n_batch": 1, "n_ubatch": 0, "n_threads": 0, "n_sequences": 1, "yarn_orig_ctx": 0}
    for name, low in wholes.items():
        value = getattr(options, name)
        high = 256 if name == "n_sequences" else native.INTS[-1]
        if value is not None and not low <= value <= high:
            raise EngineError(f"{name} is {value}: it must be from {low} to {high:,}")
    for name in ("rope_freq_base", "rope_freq_scale", "yarn_attn_factor"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:  # excludes NaN
            raise EngineError(f"{name} is {value}: it must be a number of 0 or more")
    for name, known in (
        *(("type_k", KV_TYPES), ("type_v", KV_TYPES), ("flash_attention", _FLASH)),
        *((("rope_scaling", _ROPE_SCALING),) if options.rope_scaling is not None else ()),
    ):
        if getattr(options, name) not in known:
            raise EngineError(f"{name} is {getattr(options, name)!r}: it must be one of {', '.join(known)}")


def _threads(model: Model) -> int:
    """Choose the number of threads: physical cores, since hyper-threads of a core only slow each other down, and no
    more than the weights keep busy: a tiny model's threads mostly wait for each other."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = usable if usable <= 2 else usable // 2
    return max(1, min(cores, int(llama.llama_model_size(model.handle)) // THREAD_WEIGHTS))
