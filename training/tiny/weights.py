"""The model of a GGUF file that training/export.py wrote, as PyTorch runs it: f32 of its (dequantized) weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from torch import Tensor

from training.model import Block, Shape, Tiny


class OtherModelError(Exception):
    """The file is not of this architecture; what it has or lacks is said."""


def load(path: Path) -> Tiny:
    """Read a file. Raise OtherModelError for any but a `llama` with Q/K/V biases and tied output."""
    reader = gguf.GGUFReader(path)

    def said(key: str) -> float:
        field = reader.fields.get(f"llama.{key}")
        if field is None:
            raise OtherModelError(f"{path} has no llama.{key}: it is not of training/export.py")
        return float(field.contents())

    named = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }

    def take(name: str) -> Tensor:
        if name not in named:
            raise OtherModelError(f"{path} has no {name}: it is not of training/export.py")
        return named.pop(name)

    embed = take("token_embd.weight")
    shape = Shape(
        vocab=len(embed),
        width=int(said("embedding_length")),
        layers=int(said("block_count")),
        heads=int(said("attention.head_count")),
        kv_heads=int(said("attention.head_count_kv")),
        head=int(said("attention.key_length")),
        ffn=int(said("feed_forward_length")),
        rope_base=said("rope.freq_base"),
        eps=said("attention.layer_norm_rms_epsilon"),
    )
    net = Tiny(shape)
    with torch.no_grad():
        net.embed.copy_(embed)
        net.norm.copy_(take("output_norm.weight"))
        for i, block in enumerate(net.blocks):
            assert isinstance(block, Block)
            at = f"blk.{i}."
            block.attn_norm.copy_(take(at + "attn_norm.weight"))
            block.ffn_norm.copy_(take(at + "ffn_norm.weight"))
            for name, linear in (("attn_output", block.o), ("ffn_gate", block.gate), ("ffn_up", block.up)):
                linear.weight.copy_(take(f"{at}{name}.weight"))
            block.down.weight.copy_(take(at + "ffn_down.weight"))
            block.v.weight.copy_(take(at + "attn_v.weight"))
            block.v.bias.copy_(take(at + "attn_v.bias"))
            for name, linear, heads in (("q", block.q, shape.heads), ("k", block.k, shape.kv_heads)):
                linear.weight.copy_(halves(take(f"{at}attn_{name}.weight"), heads))
                linear.bias.copy_(halves(take(f"{at}attn_{name}.bias"), heads))
    if named:
        raise OtherModelError(f"{path} has {', '.join(sorted(named))}, which training/model.py has not")
    return net


def halves(x: Tensor, heads: int) -> Tensor:
    """Rows of Q or K from the interleaved rotary pairs of `llama` back to halves: what export.interleave undoes."""
    return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
