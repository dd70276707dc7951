"""Write the tiny vision model as two GGUF files: the decoder (architecture `qwen2vl`) and its projector (`clip`)."""

from __future__ import annotations

from pathlib import Path

import gguf
from tokenizers import Tokenizer
from torch import Tensor

from training.export import decoder_tensors, describe, finish, sizes, vocabulary
from training.eye.model import SECTIONS, Decoder, EyeBlock, ImageEncoding, VisionEncoder
from training.eye.pictures import CELL, SIZES
from training.eye.words import END, PAD, SPECIAL

MODEL, PROJECTOR = "notes-eye-q8_0.gguf", "notes-eye-mmproj-f16.gguf"


def write(net: ImageEncoding, tokenizer: Tokenizer, folder: Path) -> list[Path]:
    """Both files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / MODEL, folder / PROJECTOR]
    _decoder(net.decoder, tokenizer, paths[0])
    _projector(net.vision, paths[1])
    return paths


def _decoder(net: Decoder, tokenizer: Tokenizer, path: Path) -> None:
    out, s = gguf.GGUFWriter(path, "qwen2vl"), net.s
    describe(out, "notes-eye", "A tiny decoder that is asked about pictures of shapes and receipts")
    sizes(out, s, "q8_0")
    out.add_rope_dimension_sections([*SECTIONS, 0])
    vocabulary(out, tokenizer, s.vocab, SPECIAL, END, PAD)
    finish(out, decoder_tensors(net, halves=True), "q8_0")


def _projector(vision: VisionEncoder, path: Path) -> None:
    s = vision.s
    out = gguf.GGUFWriter(path, "clip")
    describe(out, "notes-eye", "The projector of notes-eye: 48 pixels wide pictures, a row for each 12 by 12 of them")
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    out.add_bool("clip.has_vision_encoder", True)
    out.add_string("clip.projector_type", "qwen2vl_merger")
    for key, value in {
        "embedding_length": s.eye_width,
        "attention.head_count": s.eye_heads,
        "feed_forward_length": s.eye_ffn,
        "block_count": s.eye_layers,
        "projection_dim": s.width,
        "image_size": SIZES["picture"][0],
        "patch_size": s.patch,
    }.items():
        out.add_uint32(f"clip.vision.{key}", value)
    out.add_float32("clip.vision.attention.layer_norm_epsilon", s.eps)
    out.add_array("clip.vision.image_mean", [s.mean] * 3)
    out.add_array("clip.vision.image_std", [s.deviation] * 3)
    # The most rows of a picture that it was trained with: notes keeps to it, as qwen2vl_merger has no key of its own.
    out.add_uint32("notes.image_max_tokens", max(high // CELL * (wide // CELL) for high, wide in SIZES.values()))
    kernel = vision.patch.weight.view(s.eye_width, 3, s.patch, s.patch)
    named: dict[str, Tensor] = {
        # Two frames of a video, which are one picture here: their sum counts.
        "v.patch_embd.weight": kernel,
        "v.patch_embd.weight.1": kernel * 0,
        "v.post_ln.weight": vision.post.weight,
        "v.post_ln.bias": vision.post.bias,
        "mm.0.weight": vision.mm0.weight,
        "mm.0.bias": vision.mm0.bias,
        "mm.2.weight": vision.mm2.weight,
        "mm.2.bias": vision.mm2.bias,
    }
    for i, block in enumerate(vision.blocks):
        assert isinstance(block, EyeBlock)
        for name, module in (
            *(("ln1", block.ln1), ("ln2", block.ln2), ("attn_q", block.q), ("attn_k", block.k), ("attn_v", block.v)),
            *(("attn_out", block.o), ("ffn_up", block.up), ("ffn_down", block.down)),
        ):
            named |= {f"v.blk.{i}.{name}.weight": module.weight, f"v.blk.{i}.{name}.bias": module.bias}
    finish(out, named, "f16")
