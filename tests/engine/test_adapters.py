"""Tests of adapters: a context that changes the weights of the model's file neither reads nor places rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny import finish

from notes_cli.engine.context import Context
from notes_cli.engine.model import Model
from notes_cli.engine.native import OPERATIONS, llama
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import SegmentError, UnsupportedError
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import Skill

TOKENS = np.arange(20, 40, dtype=np.int32)


def write_lora(path: Path) -> Path:
    """An adapter of rank 2 that changes the keys of the first layer of a tiny llama."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    writer.add_tensor("blk.0.attn_k.weight.lora_a", random.standard_normal((2, 64)).astype(np.float32))
    writer.add_tensor("blk.0.attn_k.weight.lora_b", random.standard_normal((32, 2)).astype(np.float32))
    return finish(writer, path)


def apply_lora(context: Context, path: Path, scale: float = 0.5) -> None:
    adapter = llama.llama_adapter_lora_init(context.model.handle, str(path).encode())
    assert adapter
    adapters = (ctypes.POINTER(ctypes.c_void_p) * 1)(ctypes.cast(adapter, ctypes.POINTER(ctypes.c_void_p)))
    llama.llama_set_adapters_lora(context.handle, adapters, 1, (ctypes.c_float * 1)(scale))


@pytest.fixture
def context(make_model: Callable[..., Path]) -> Iterator[Context]:
    with Model(make_model()) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)) as context:
        yield context


def test_a_lora_is_seen(context: Context, tmp_path: Path) -> None:
    """Operations on rows are refused with the adapter's scale, and work again when it is removed."""
    context.append({0: TOKENS})
    apply_lora(context, write_lora(tmp_path / "lora.gguf"))
    for operation in OPERATIONS:
        assert "a LoRA adapter at scale 0.5" in (context.supports(operation) or "")
    with pytest.raises(UnsupportedError, match="LoRA"):
        context.append({0: TOKENS})
    with pytest.raises(UnsupportedError, match="LoRA"):
        context.rewrite(0, [3], TOKENS[:1])
    apply_lora(context, tmp_path / "lora.gguf", 0.0)
    rows = context.read(0, 0, 8, base=0)
    context.clear()
    context.splice(0, 5, TOKENS[:8], rows, 0)


def test_a_control_vector_is_seen(context: Context) -> None:
    data = np.ones(64 * 2, np.float32)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    assert llama.llama_set_adapter_cvec(context.handle, pointer, data.size, 64, 1, 2) == 0
    assert "a control vector" in (context.supports("splice") or "")
    assert "a control vector" in (context.can_move(0, 5, 8) or "")
    llama.llama_set_adapter_cvec(context.handle, None, 0, 64, 0, 0)
    assert context.supports("splice") is None


def test_no_segment_fits_a_context_with_an_adapter(workspace: Workspace, skill: Skill, tmp_path: Path) -> None:
    """Neither is one compiled there, nor one from before accepted."""
    path = compile_to_library(workspace, skill).path
    segment = workspace.open(path)
    apply_lora(workspace.context, write_lora(tmp_path / "lora.gguf"))
    with pytest.raises((SegmentError, UnsupportedError), match="LoRA"):
        workspace.check(segment)
    with pytest.raises(UnsupportedError, match="LoRA"):
        compile_skill(workspace, skill)
