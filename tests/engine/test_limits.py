"""Tests of limits of the model and the machine, and of numbers that llama.cpp cannot take: refused before it aborts."""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from reference import LoadZoo, nmse

from notes_cli.commands.remedies import worded
from notes_cli.config import shipped_model
from notes_cli.engine import limits, native
from notes_cli.engine.context import Context
from notes_cli.engine.limits import KV_TYPES, ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.errors import EngineError

from ..conftest import MakeModel

OPTIONS = ContextOptions(n_ctx=1024, n_threads=1)
F16, Q8_0 = KV_TYPES["f16"], KV_TYPES["q8_0"]


def stated(path: Path, length: int, **scaling: Any) -> Path:
    ends = {"kind": "type", "factor": "factor", "before": "original_context_length"}
    keys = {f"llama.rope.scaling.{ends[name]}": value for name, value in scaling.items()}
    source = tiny.write_model(path.with_suffix(".source"), "llama", layers=1)
    return tiny.alter_model(path, source, keys={**keys, "llama.context_length": length})


YARN = {"kind": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("file", "asked", "trained"),
    [
        ({}, {}, 4096),
        ({}, {"rope_scaling": "yarn", "rope_freq_scale": 0.25}, 16384),
        ({}, {"rope_scaling": "linear", "rope_freq_scale": 0.5}, 8192),
        ({}, {"rope_freq_scale": 0.5}, 8192),  # linear, as llama.cpp has it
        ({}, {"rope_scaling": "none", "rope_freq_scale": 0.5}, 4096),
        ({}, {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 2048}, 8192),
        ({}, {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 100_000}, 16384),
        ({}, {"rope_freq_base": 1e6}, 4096),  # another base does not change the length
        ({**YARN, "before": 4096}, {}, 16384),  # the length before scaling
        ({**YARN, "before": 1024}, {}, 4096),  # the length after it
        ({**YARN, "before": 1024}, {"rope_scaling": "none"}, 1024),
        ({**YARN, "before": 1024}, {"rope_freq_scale": 1 / 8}, 8192),
        ({"kind": "linear", "factor": 4.0}, {}, 4096),  # unknown
        ({"kind": "linear", "factor": 4.0}, {"rope_freq_scale": 1 / 8}, 8192),
        ({"kind": "longrope", "before": 1024}, {}, 4096),
    ],
)
def test_the_trained_length(tmp_path: Path, file: dict[str, Any], asked: dict[str, Any], trained: int) -> None:
    """The trained context of the file, extended by the factor of the scaling in effect, and never by more."""
    with Model(stated(tmp_path / "model.gguf", 4096, **file)) as model:
        assert limits.trained_length(model, replace(OPTIONS, **asked)) == trained


def test_what_has_no_positions_has_no_end(make_model: MakeModel) -> None:
    """A recurrent model has none; a hybrid has layers of attention, and a learned position is one of so many."""
    for kind, trained, learned in (("mamba", None, False), ("lfm2", 8192, False), ("gpt2", 8192, True)):
        with Model(make_model(kind)) as model:
            assert (limits.trained_length(model, OPTIONS), limits.has_learned_positions(model)) == (trained, learned)


KINDS = ["llama", "mistral", "qwen3", "gemma3", "lfm2", "mamba", "gpt2", "mistral3", "shipped"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_what_is_allocated(make_model: MakeModel, kind: str) -> None:
    """K/V to the byte, by the shapes of the cache that is made then; with windows that keep less, no more than that."""
    options = replace(OPTIONS, type_k="f16", type_v="f16", flash_attention="on")
    with Model(shipped_model() if kind == "shipped" else make_model(kind, heads=2, kv_heads=2, embd=128)) as model:
        with Context(model, options) as context:
            rows = [layer for layer in context.layers if layer.part != "state"]
        for cache in ("f32", "f16", "q8_0", "q4_0"):
            asked = replace(options, type_k=cache, type_v=cache)
            found = limits.kv_bytes(model, asked)
            each = sum(layer.n_embd_k + layer.n_embd_v for layer in rows) * limits.ELEMENT[cache]
            assert found == 1024 * each and limits.context_tokens(model, asked) == 1024
            assert limits.kv_bytes(model, replace(asked, n_ctx=2000)) == 2 * found  # rounded up, as llama.cpp does
            assert limits.kv_bytes(model, replace(asked, swa_full=False)) <= found
            assert limits.compute_bytes(model, asked) > 512 * 4 * model.n_vocab


def test_no_memory_is_a_line_and_no_attempt(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the bytes needed, the bytes available and a remedy, before llama.cpp allocates. Exactly enough
    passes."""
    with Model(make_model()) as model:
        needed = limits.context_bytes(model, OPTIONS)
        monkeypatch.setattr(limits, "available_memory", lambda: needed)
        Context(model, OPTIONS).close()
        monkeypatch.setattr(limits, "available_memory", lambda: needed - 1)
        with pytest.raises(EngineError) as refused:
            Context(model, OPTIONS)
        line = worded(refused.value)
        assert line.startswith("a context of 1,024 tokens needs about ")
        assert all(part in line for part in (f"{limits.format_size(needed - 1)} of mem", "-c", "-ctk q8_0"))
        with pytest.raises(EngineError) as refused:
            Context(model, replace(OPTIONS, type_k="q8_0", type_v="q8_0"))
        assert "-ctk" not in worded(refused.value)
        monkeypatch.setattr(limits, "available_memory", lambda: None)  # unknown: try
        Context(model, OPTIONS).close()


@pytest.mark.parametrize(
    ("head", "flash"), [(24, "off"), (48, "on"), (80, "auto"), (16, "off"), (32, "off"), (96, "on")]
)
def test_blocks_divide_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: int, flash: Any) -> None:
    """A head that is not a multiple of a block is refused with llama.cpp's message for flash attention. Without it,
    llama.cpp aborts (24), or computes NaN or nonsense. Other sizes compute as with f16."""
    monkeypatch.setitem(tiny.ARCHITECTURES, "heads", {"arch": "llama", "head": head, "base": 10000.0})
    with Model(tiny.write_model(tmp_path / "model.gguf", "heads")) as model:
        for part in "kv" if flash != "off" else "k":  # a quantized V needs flash attention
            options = replace(OPTIONS, flash_attention=flash, **{f"type_{part}": "q8_0"})
            if head % 32:
                words = f"{part.upper()} cache type q8_0 with block size 32 does not divide n_embd_head_{part}={head}"
                with pytest.raises(EngineError, match=words):
                    Context(model, options)
                continue
            found = []
            for each in (options, replace(OPTIONS, flash_attention=flash)):
                with Context(model, each) as context:
                    context.append({0: np.arange(60)})
                    found.append(context.logits())
            assert nmse(*found) < 1e-3


def test_blocks_divide_the_heads_of_every_layer(load_zoo: LoadZoo) -> None:
    """Those of sliding-window layers and of an indexer have sizes of their own. MLA keeps one wide head, and layers
    without rows have none."""
    for name in ("gemma4-dense", "minimax-m3-moe", "deepseek32-moe", "qwen35-dense", "mamba-dense"):
        assert native.refusal("notes_can_keep", load_zoo(name).handle, Q8_0, Q8_0) is None
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in (0, 1, 2, 4):  # those with a window, whose heads had 64
        at = f"blk.{layer}.attn_"
        shapes |= {f"{at}q.weight": (96, 64), f"{at}k.weight": (96, 64), f"{at}v.weight": (96, 64)}
        shapes |= {f"{at}output.weight": (64, 96), f"{at}q_norm.weight": (48,), f"{at}k_norm.weight": (48,)}
    sizes = {"attention.key_length_swa": 48, "attention.value_length_swa": 48, "rope.dimension_count_swa": 48}
    windows = load_zoo("gemma4-dense", sizes, shapes=shapes)
    assert "n_embd_head_k=48" in (native.refusal("notes_can_keep", windows.handle, Q8_0, F16) or "")
    assert "n_embd_head_v=48" in (native.refusal("notes_can_keep", windows.handle, F16, Q8_0) or "")
    shapes = {"q_proj.weight": (96, 256), "k_proj.weight": (48, 256)}
    shapes |= {"indexer.q_norm.weight": (48,), "indexer.k_norm.weight": (48,)}
    indexer = load_zoo("minimax-m3-moe", {"attention.indexer.key_length": 48}, shapes=shapes)
    assert "indexer_head_size=48" in (native.refusal("notes_can_keep", indexer.handle, Q8_0, F16) or "")
    assert native.refusal("notes_can_keep", indexer.handle, F16, F16) is None


def test_what_a_container_has_left(tmp_path: Path) -> None:
    """The limit of the control group less memory that cannot be dropped; unknown without a limit or a readable file."""
    assert limits._control_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 150\nactive_file 50\n")
    assert limits._control_group(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert limits._control_group(tmp_path) is None
    assert (limits.available_memory() or 1) > 0


def test_reserved_addresses_are_no_memory() -> None:
    """As drivers and sanitizers have them: more than there is, never filled, and no cache of ours."""
    libc, size = ctypes.CDLL(None), ctypes.c_size_t(1 << 42)
    libc.mmap.restype = ctypes.c_void_p
    before = limits.available_memory()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    got = libc.mmap(None, size, 3, flags, -1, ctypes.c_size_t(0))
    try:
        assert before is None or (limits.available_memory() or 0) > before / 2
    finally:
        libc.munmap(ctypes.c_void_p(got), size)


@pytest.mark.parametrize(("share", "threads"), [(2.0, 1), (0.3, 3), (0.001, 4)])
def test_no_more_threads_than_the_weights_keep_busy(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, share: float, threads: int
) -> None:
    """A thread for each such share of the weights: one at least, a core each at most. As many as are asked for."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    with Model(make_model("llama")) as model:
        monkeypatch.setattr(limits, "THREAD_WEIGHTS", int(share * llama.llama_model_size(model.handle)))
        with Context(model, ContextOptions(n_ctx=64)) as context:
            assert llama.llama_n_threads(context.handle) == threads
        with Context(model, ContextOptions(n_ctx=64, n_threads=7)) as context:
            assert llama.llama_n_threads(context.handle) == 7


OPTIONS_REFUSED: list[tuple[str, Any]] = [
    *(("n_ctx", -1), ("n_ctx", 2**32 + 512), ("n_batch", 0), ("n_batch", 2**32 + 1), ("n_ubatch", -5)),
    *(("n_threads", -1), ("n_sequences", 0), ("n_sequences", 257), ("yarn_orig_ctx", -7)),
    *(("rope_freq_base", float("nan")), ("rope_freq_base", -5.0), ("rope_freq_scale", float("inf"))),
    *(("yarn_attn_factor", float("nan")), ("type_k", "q9"), ("rope_scaling", "x"), ("flash_attention", "maybe")),
]


def test_options_of_a_context(make_model: MakeModel) -> None:
    with Model(make_model("llama")) as model:
        for name, value in OPTIONS_REFUSED:
            with pytest.raises(EngineError, match=rf"{name} is .?{value}"):
                Context(model, ContextOptions(**{name: value}))


SMALL = [
    {"n_batch": 1},
    {"n_batch": 1, "n_ubatch": 1},
    {"n_batch": 2, "n_ubatch": 1},
    {"n_batch": 3, "n_ubatch": 2, "swa_full": False},
    {"n_ctx": 1},
    {"n_ctx": 2},
    {"n_batch": 1, "n_sequences": 3},
    {"n_batch": 2, "n_sequences": 3, "unified": True},
    {"n_ctx": 1, "n_sequences": 3},
    {"n_batch": 2**31 - 1, "n_ubatch": 2**31 - 1},
]
USE = """
import json, sys
from pathlib import Path
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.sequence import KVSequence
for path in sys.argv[2:]:
    with Model(Path(path)) as model:
        found = []
        for options in json.loads(sys.argv[1]):
            options = {"n_ctx": 512} | options
            with Context(model, ContextOptions(n_threads=1, **options)) as context:
                sequence = KVSequence(context)
                sequence.append(range(10))
                if not model.recurrent or options.get("n_sequences", 1) == 1:
                    assert sequence.lookahead([1, 2, 3]).shape == (3, model.n_vocab)
                sequence.append(range(5))
                found.append(sequence.logits().argmax())
        print(*found)
"""


def test_small_and_huge_batches(make_model: MakeModel) -> None:
    """`-b 1` and the like, with every kind of memory: no abort, and the same answer. A context has an output for each
    of its sequences, the spare one of recurrent models among them."""
    paths = [str(make_model(kind)) for kind in ("llama", "gemma3", "mamba", "lfm2")]
    result = subprocess.run([sys.executable, "-c", USE, json.dumps(SMALL), *paths], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-500:]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [(len(found), len(set(found))) for found in lines] == [(len(SMALL), 1)] * 4
