"""Defines the options of a context, and computes the limits: the trained length, and the memory that a context takes.

Both limits are read from the model's header before anything is allocated.
"""

from __future__ import annotations

import ctypes
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from notes_cli.engine import native
from notes_cli.engine.gguf import BLOCKS
from notes_cli.engine.header import read_integers
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.errors import EngineError, Help

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


# Bytes per element of the cache.
ELEMENT = {name: BLOCKS[kind][1] / BLOCKS[kind][0] for name, kind in KV_TYPES.items()}
PAD = 256  # llama.cpp rounds a context up to a multiple of this
# One layer in so many has full attention, the others a window, where the file does not list them.
FULL_OF = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2}
FULL = 4  # for other architectures


# Trained length.


def trained_length(model: Model, options: ContextOptions) -> int | None:
    """Return the context length that the model was trained for, RoPE scaling included; None if unbounded. A file with
    its own scaling names the length after it, or the one before it and the factor; the larger result counts. Scaling
    set by the user starts from the length before any. Recurrent models are unbounded. ALiBi's reach beyond the trained
    length is in no file: such a model is bounded like others."""
    length = model.n_ctx_train
    if length <= 0 or llama.llama_model_is_recurrent(model.handle):
        return None
    if int(llama.llama_model_rope_type(model.handle)) < 0:
        return length
    file_kind, file_scale, file_before = _file_scaling(model)
    kind = options.rope_scaling or file_kind
    scale = 1.0 if kind == "none" else options.rope_freq_scale or file_scale
    before = file_before or length * file_scale
    if kind == "yarn" and options.yarn_orig_ctx:
        before = min(before, options.yarn_orig_ctx)
    after = int(before / scale + 0.5)
    if (kind, scale) == (file_kind, file_scale) and not options.yarn_orig_ctx:
        return max(length, after) if scale < 1 else length
    return after


def _file_scaling(model: Model) -> tuple[str, float, int]:
    """Return the RoPE scaling in the model's file: kind, factor of positions, and length before it, 0 if not given."""
    factor = _number(model, "rope.scaling.factor") or _number(model, "rope.scale_linear")
    kind = model.metadata(f"{model.architecture}.rope.scaling.type") or "linear"
    scale = 1 / factor if factor and kind != "none" else 1.0
    return kind, scale, int(_number(model, "rope.scaling.original_context_length")) if scale < 1 else 0


def has_learned_positions(model: Model) -> bool:
    """True if the model has learned position embeddings, and thus none beyond its trained length."""
    if model.architecture == "mpt":
        return not _number(model, "attention.max_alibi_bias")
    return model.architecture in ("gpt2", "starcoder")


# Memory.


def kv_bytes(model: Model, options: ContextOptions) -> int:
    """Estimate the bytes of a context's K/V, within a few percent. Recurrent state, which does not grow with the
    context, is left out."""
    tokens = context_tokens(model, options)
    window = 0 if options.swa_full else int(llama.llama_model_n_swa(model.handle))
    windowed = min(tokens, padded(window * options.n_sequences + min(options.n_batch, options.n_ubatch, tokens)))
    size_k, size_v = ELEMENT[options.type_k], ELEMENT[options.type_v]
    layers = _layers(model)
    return int(sum((tokens if full or not window else windowed) * (k * size_k + v * size_v) for full, k, v in layers))


def compute_bytes(model: Model, options: ContextOptions) -> int:
    """Estimate the bytes of a context's buffers for computing, roughly."""
    tokens = context_tokens(model, options)
    heads, width = (int(f(model.handle)) for f in (llama.llama_model_n_head, llama.llama_model_n_embd))
    # attention scores; with flash attention only the mask
    scores = tokens * (heads if options.flash_attention == "off" else 1)
    feed = max(_integers(model, "feed_forward_length"), default=0)
    return 4 * min(options.n_batch, options.n_ubatch, tokens) * (model.n_vocab + 4 * width + feed + scores)


def context_bytes(model: Model, options: ContextOptions) -> int:
    """Estimate the bytes of a context."""
    return kv_bytes(model, options) + compute_bytes(model, options)


def context_tokens(model: Model, options: ContextOptions) -> int:
    """Return the tokens for which a context of these options has room."""
    return padded(options.n_ctx or model.n_ctx_train)


def describe_memory(model: Model, options: ContextOptions) -> str:
    """Describe the estimated memory of a context."""
    kv, compute = kv_bytes(model, options), compute_bytes(model, options)
    return f"{format_size(kv + compute)} ({format_size(kv)} of K/V, {format_size(compute)} for computing)"


def check_memory(model: Model, options: ContextOptions) -> None:
    """Raise EngineError where a context would exceed the available memory. K/V on a GPU is not counted."""
    if options.offload_kv and model.offloads:
        return
    free = available_memory()
    if free is None or context_bytes(model, options) <= free:
        return
    smaller = (options.type_k, options.type_v) == ("f16", "f16")
    raise EngineError(
        f"a context of {context_tokens(model, options):,} tokens needs about {describe_memory(model, options)}, and "
        f"{format_size(free)} of memory is available",
        Help.FEWER_TOKENS_OR_SMALLER_TYPE() if smaller else Help.FEWER_TOKENS(),
    )


def available_memory() -> int | None:
    """Return the bytes available without swapping, less the part of this process's buffers that is not resident yet;
    None if unknown."""
    amounts = [amount for amount in (_meminfo(), _control_group()) if amount is not None]
    if amounts:
        return max(0, min(amounts) - sum(size - resident(first, size) for first, size in anonymous_mappings()))
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # total memory: better than nothing
    except (AttributeError, OSError, ValueError):
        return None


class Buffer(NamedTuple):
    """A large piece of this process's memory. A cache takes its pages as it is filled (native/patches/speed)."""

    first: int  # address
    size: int


def resident(first: int, size: int) -> int:
    """Return how many of these bytes of this process are in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    pages = (ctypes.c_ubyte * (size // page))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), pages):
        return size  # unknown: reserve nothing for it
    return bytes(pages).count(1) * page


def anonymous_mappings(least: int = 64 << 20) -> list[Buffer]:
    """Return anonymous mappings of at least so many bytes; none where the system has no /proc. Mappings larger than the
    machine's memory are left out: drivers and sanitizers reserve addresses that they never fill."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    result, most = [], os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in lines:  # "7f00-7f80 rw-p 00000000 00:00 0", and the name of a file if there is one
        addresses, mode, _, _, file, *name = line.split()
        first, last = (int(address, 16) for address in addresses.split("-"))
        if mode == "rw-p" and file == "0" and not name and least <= last - first <= most:
            result.append(Buffer(first, last - first))
    return result


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _control_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory left in a container: its limit minus memory in use that cannot be reclaimed."""
    try:
        limit, used = (int((root / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(statistics["inactive_file"]) + int(statistics["active_file"]))
    except (OSError, ValueError, KeyError):
        return None


def format_size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


# Header.


def _layers(model: Model) -> list[tuple[bool, int, int]]:
    """Return (full attention, elements of a K row, of a V row) for each layer with a cache of its own. Where the file
    does not list the windowed layers, only their number is right."""
    if llama.llama_model_is_recurrent(model.handle):
        return []
    count = int(llama.llama_model_n_layer(model.handle)) - int(_number(model, "attention.shared_kv_layers"))
    heads = max(1, int(llama.llama_model_n_head(model.handle)))
    head = int(llama.llama_model_n_embd(model.handle)) // heads
    k, v = (int(_number(model, f"attention.{part}_length")) or head for part in ("key", "value"))
    k_window, v_window = (
        int(_number(model, f"attention.{part}_length_swa")) or same for part, same in (("key", k), ("value", v))
    )
    if _number(model, "attention.key_length_mla"):
        v = v_window = 0  # V is a part of K
    kv_heads = _integers(model, "attention.head_count_kv") or [heads]
    windows = bool(_number(model, "attention.sliding_window"))
    listed = _integers(model, "attention.sliding_window_pattern") if windows else []  # reading the list scans the file
    pattern = listed or [FULL_OF.get(model.architecture, FULL)]
    # one layer in so many has attention; the others are recurrent
    attends = int(_number(model, "full_attention_interval")) or 1
    result = []
    for layer in range(count):
        rows = kv_heads[layer] if len(kv_heads) > layer else kv_heads[0]
        if (layer + 1) % attends or not rows:
            continue
        per_layer = len(pattern) > max(1, layer)
        full = not windows or (not pattern[layer] if per_layer else (layer + 1) % (pattern[0] or 1) == 0)
        result.append((full, rows * (k if full else k_window), rows * (v if full else v_window)))
    return result


def _number(model: Model, key: str) -> float:
    """Return a number of the header, 0 if it is missing."""
    text = model.metadata(f"{model.architecture}.{key}")
    try:
        return float(text) if text else 0.0
    except ValueError:
        return 0.0


def _integers(model: Model, key: str) -> list[int]:
    """Return a number of the header, or a list with one per layer; [] if it is missing."""
    number = model.metadata(f"{model.architecture}.{key}")
    if number is not None:
        return [int(float(number))] if number.replace(".", "", 1).isdigit() else []
    return read_integers(model.path, f"{model.architecture}.{key}")  # llama.cpp does not return arrays


def padded(tokens: int) -> int:
    """Round up as llama.cpp does."""
    return -(-tokens // PAD) * PAD
