"""Tiny random projectors of several kinds, each for models of any width, and pictures to look at."""

from __future__ import annotations

import io
from pathlib import Path

import gguf
import numpy as np
from tiny import finish

KINDS = ("qwen2vl_merger", "qwen3vl_merger", "mlp", "gemma3", "pixtral")


def write_projector(path: Path, kind: str, width: int, *, deepstack: int = 0) -> Path:
    """A projector of that kind for a model whose input has `width` numbers (without those of deepstack layers)."""
    random = np.random.default_rng(KINDS.index(kind))
    eye, layers, patch, image = 16, 2, 2, 8
    hidden = 24  # not the width: else up and down are taken for swapped
    out = gguf.GGUFWriter(path, "clip")
    out.add_bool("clip.has_vision_encoder", True)
    out.add_string("clip.projector_type", kind)
    for key, value in {
        "embedding_length": eye,
        "attention.head_count": 2,
        "feed_forward_length": hidden,
        "block_count": layers,
        "projection_dim": width,
        "image_size": image,  # pixels of a side, for those that take one size
        "patch_size": patch,
        **({"projector.scale_factor": 2} if kind == "gemma3" else {}),
    }.items():
        out.add_uint32(f"clip.vision.{key}", value)
    out.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    out.add_array("clip.vision.image_mean", [0.5] * 3)
    out.add_array("clip.vision.image_std", [0.5] * 3)
    if kind == "qwen3vl_merger":
        out.add_array("clip.vision.is_deepstack_layers", [layer < deepstack for layer in range(layers)])

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        scale = 1 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.1
        out.add_tensor(name, (around + scale * random.standard_normal(shape)).astype(np.float32))

    def add_linear(name: str, *shape: int) -> None:
        add(f"{name}.weight", *shape)
        add(f"{name}.bias", shape[0])

    def add_norm(name: str, size: int, bias: bool = True) -> None:
        add(f"{name}.weight", size, around=1)
        if bias:
            add(f"{name}.bias", size)

    add("v.patch_embd.weight", eye, 3, patch, patch)
    if kind.startswith("qwen"):
        add("v.patch_embd.weight.1", eye, 3, patch, patch)
    if kind in ("qwen3vl_merger", "mlp", "gemma3"):
        add("v.patch_embd.bias", eye)
        add("v.position_embd.weight", (image // patch) ** 2, eye)
    for layer in range(layers):
        at = f"v.blk.{layer}."
        for norm in ("ln1", "ln2"):
            add_norm(f"{at}{norm}", eye, bias=kind != "pixtral")
        linear = {"attn_out": (eye, eye), "ffn_up": (hidden, eye), "ffn_down": (eye, hidden)}
        if kind == "qwen3vl_merger":
            linear["attn_qkv"] = (3 * eye, eye)
        else:
            linear |= {f"attn_{one}": (eye, eye) for one in "qkv"}
        for name, shape in linear.items():
            add_linear(f"{at}{name}", *shape)
        if layer < deepstack:
            add_norm(f"v.deepstack.{layer}.norm", 4 * eye)
            add_linear(f"v.deepstack.{layer}.fc1", 4 * eye, 4 * eye)
            add_linear(f"v.deepstack.{layer}.fc2", width, 4 * eye)
    if kind.startswith("qwen"):
        add_linear("mm.0", 4 * eye, 4 * eye)
        add_linear("mm.2", width, 4 * eye)
    elif kind in ("mlp", "pixtral"):
        add_linear("mm.0" if kind == "mlp" else "mm.1", width, eye)
        add_linear("mm.2", width, width)
    if kind == "gemma3":
        add("mm.input_projection.weight", eye, width)  # transposed
        add("mm.soft_emb_norm.weight", eye, around=1)
    elif kind == "pixtral":
        add("v.token_embd.img_break", width)
    if kind not in ("qwen2vl_merger", "pixtral"):
        add_norm("v.post_ln", eye)
    return finish(out, path)


def image_bytes(width: int, height: int, seed: int = 0, kind: str = "PNG", **settings: object) -> bytes:
    """A picture of noise, as a file."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, kind, **settings)
    return buffer.getvalue()
