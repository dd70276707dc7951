"""Tests of rows that may not be moved: keys that rotate otherwise than assumed, and contexts with an adapter."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import finish
from zoo import zoo_model

import notes_cli.runtime.workspace as work
from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.native import OPERATIONS, llama
from notes_cli.engine.segment import LayerRows
from notes_cli.errors import SegmentError, UnsupportedError
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.recompile import compile_to_library
from notes_cli.runtime.workspace import RotationCheck, Workspace, measure_rotation
from notes_cli.text.skill import Skill

from ..conftest import MakeModel, MakeWorkspace

Read = Callable[..., tuple[LayerRows, ...]]


def measured(path: Path, n_ctx: int = 1024, **options: Any) -> RotationCheck | None:
    with Model(path) as model, Context(model, ContextOptions(n_ctx=n_ctx, n_threads=1, **options)) as context:
        turned = measure_rotation(context, 0)
        assert context.length(0) == 0
        return turned


RIGHT: list[tuple[dict[str, Any], int, int]] = [  # a model, the size of its context, how far it is moved
    # Norms and biases on K, layers without rotation, windows with a base of their own, stretches.
    *(({"kind": kind}, 1024, 512) for kind in ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "phi3")),
    *(({"kind": kind}, 1024, distance) for kind, distance in (("gemma3", 512), ("mistral3", 128))),
    # Scaled, also by a magnitude, and by factors that go by the size of the context (LongRoPE).
    *(({"scaling": kind}, 8192, 4096) for kind in ("yarn", "linear")),
    ({"kind": "phi3"}, 8192, 4096),
    # ALiBi, MLA, M-RoPE, chunks of positions, YaRN in every layer.
    *(({"zoo": f"{name}-dense"}, 1024, 0) for name in ("bloom", "qwen2vl")),
    *(({"zoo": f"{name}-moe"}, 1024, 0) for name in ("deepseek2", "llama4", "gpt-oss")),
]


@pytest.mark.parametrize(("model", "n_ctx", "distance"), RIGHT, ids=str)
def test_what_is_right_is_found_right(make_model: MakeModel, model: dict[str, Any], n_ctx: int, distance: int) -> None:
    # llama.cpp knows "phi3" in a name
    turned = measured(zoo_model(model["zoo"]) if "zoo" in model else make_model(name="tiny", **model), n_ctx)
    assert turned and turned.right and turned.distance == (distance or turned.distance)


def test_small_windows_and_small_contexts(make_model: MakeModel) -> None:
    """Eight tokens fit the window; a context of 16 has room for them, a smaller one is not measured."""
    turned = measured(make_model("gemma3"), swa_full=False)
    assert turned and turned.right
    turned = measured(make_model(), n_ctx=16)
    assert turned and turned.right and turned.distance >= 8
    assert not RotationCheck(512, 0, float("nan"), 1e-5).right


def test_what_is_never_moved_is_not_measured(make_model: MakeModel) -> None:
    assert [measured(make_model(kind)) for kind in ("lfm2", "mamba", "gpt2", "llama-embed")] == [None] * 4


# Possible errors of a rotation, as changes of its angles (by position and frequencies) or of the keys.
WRONG = {
    "base": lambda freq: freq ** np.float64(1.02) - freq,
    "scale": lambda freq: -0.25 * freq,
    "one pair": lambda freq: np.where(np.arange(len(freq)) == len(freq) // 2, freq / 50, 0.0),
}


def wrong(read: Read, what: str, layer_of: int | None = None) -> Read:
    """Read rows with a turn that is not the one that the model makes."""

    def reading(context: Context, seq_id: int, position: int, count: int, *, base: int, dtype: str = "f16") -> Any:
        rows = read(context, seq_id, position, count, base=base, dtype=dtype)
        distance = base - position
        if not distance:
            return rows
        found = []
        for index, (layer, one) in enumerate(zip(context.layers, rows, strict=True)):
            if layer_of is not None and index != layer_of:
                found.append(one)
            elif what == "magnitude":
                found.append(replace(one, k=one.k * np.float32(1.02)))
            else:
                angles = WRONG[what](context.frequencies(index)) * distance
                heads = one.k.reshape(count, -1, layer.n_rot).astype(np.float64)
                even, odd = heads[..., 0::2], heads[..., 1::2]
                turned = np.empty_like(heads)
                turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
                turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
                found.append(replace(one, k=turned.reshape(one.k.shape).astype(np.float32)))
        return tuple(found)

    return reading


@pytest.mark.parametrize(
    ("what", "layer"), [*((what, None) for what in WRONG), ("magnitude", 0), ("base", 2), ("one pair", 0)]
)
def test_a_wrong_turn_is_caught(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, what: str, layer: int | None
) -> None:
    monkeypatch.setattr(Context, "read", wrong(Context.read, what, layer))
    turned = measured(make_model())
    assert turned and not turned.right
    assert layer is None or turned.layer == layer


@pytest.fixture
def turned_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if notes knew another base than the model's graph."""
    monkeypatch.setattr(Context, "read", wrong(Context.read, "base"))


def test_rows_that_turn_wrongly_are_not_moved(turned_wrong: None, workspace: Workspace, skill: Skill) -> None:
    """Rows can be restored but not moved, and the message has the reason and the error."""
    segment = compile_skill(workspace, skill)
    assert segment.prefix_only
    reason = workspace.context.supports("splice")
    assert reason and "do not rotate as notes expects" in reason and "512 positions" in reason and "put back" in reason
    assert workspace.context.can_move(0, 0, 8) is None
    rows = [layer.cut(slice(4)) for layer in segment.layers]
    with pytest.raises(UnsupportedError, match="do not rotate"):
        workspace.context.splice(0, 7, segment.tokens[:4], rows, 0)
    elsewhere = assemble(workspace, Prompt("Why?", [segment], system="Be brief."))
    assert elsewhere.count("spliced") == 0 and any("do not rotate" in piece.detail for piece in elsewhere.pieces)
    back = workspace.sequence()
    back.append(segment.context)
    back.restore(segment)
    assert back.count("spliced")


def test_the_measurement_is_remembered(
    workspace: Workspace, skill: Skill, make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once an identity: not for the next skill, nor the next run; again with another rotation or another library."""
    calls: list[int] = []
    monkeypatch.setattr(work, "measure_rotation", lambda *given: calls.append(1) or measure_rotation(*given))
    compile_to_library(workspace, skill)
    compile_to_library(workspace, skill, force=True)
    assert len(calls) == 1
    again = make_workspace()
    compile_to_library(again, skill, force=True)
    assert len(calls) == 1
    other = make_workspace(scaling="yarn")
    compile_to_library(other, skill)
    assert len(calls) == 2
    monkeypatch.setattr(native, "UPSTREAM", "0.0.0")
    compile_to_library(make_workspace(), skill, force=True)
    assert len(calls) == 3


def test_a_failure_is_remembered_and_holds_for_segments_from_before(
    workspace: Workspace, skill: Skill, make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = compile_skill(workspace, skill)
    (workspace.paths.models / "rotations.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(Context, "read", wrong(Context.read, "scale"))
        compile_skill(make_workspace(), skill)
    later = make_workspace()
    later.check(segment)
    sequence = assemble(later, Prompt("Why?", [segment], system="Be brief."))
    assert sequence.count("spliced") == 0


def test_a_damaged_memory_costs_a_measurement(
    workspace: Workspace, skill: Skill, make_workspace: MakeWorkspace
) -> None:
    workspace.paths.models.mkdir(parents=True)
    memory = workspace.paths.models / "rotations.json"
    for text in ("", "[]", "{", '{"KEY": [1]}', '{"KEY": {"reason": ""}}', "[" * 100_000):
        key = workspace._rotation_key(workspace.identity)
        memory.write_text(text.replace("KEY", key))
        assert not compile_skill(make_workspace(), skill).prefix_only
        assert json.loads(memory.read_text())[key] == "", text


def test_a_quantized_cache_is_measured_where_its_rows_are_computed(make_model: MakeModel, skill: Skill) -> None:
    """In f16: rows are quantized on the way into the cache only."""
    options = ContextOptions(n_ctx=1024, n_threads=1, type_k="q8_0", type_v="q8_0")
    with Workspace(make_model("qwen3"), options) as workspace:
        assert not compile_skill(workspace, skill).prefix_only
        assert workspace.context.unmovable is None and (workspace.paths.models / "rotations.json").is_file()


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
def context(make_model: MakeModel) -> Iterator[Context]:
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
