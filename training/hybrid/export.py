"""Write the hybrid as GGUF: architecture `granitehybrid`, q8_0 matrices, f32 for what is small, ChatML template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from torch import Tensor

from training.export import begin, finish, numbers, projections, vocabulary
from training.hybrid.model import Hybrid, Scanned
from training.model import Block
from training.tokenizer import END, PAD, SPECIAL


def tensors(net: Hybrid) -> dict[str, npt.NDArray[np.float32]]:
    """All weights under their GGUF names."""
    s = net.shape
    named: dict[str, Tensor] = {"token_embd.weight": net.embed, "output_norm.weight": net.norm}
    for i, block in enumerate(net.blocks):
        assert isinstance(block, (Block, Scanned))
        at = f"blk.{i}."
        named |= {
            at + "ffn_norm.weight": block.ffn_norm,
            at + "ffn_gate.weight": block.gate.weight,
            at + "ffn_up.weight": block.up.weight,
            at + "ffn_down.weight": block.down.weight,
        }
        if isinstance(block, Scanned):
            named |= {
                at + "attn_norm.weight": block.norm_in,
                at + "ssm_in.weight": block.inward.weight,
                at + "ssm_conv1d.weight": block.conv,
                at + "ssm_conv1d.bias": block.conv_bias,
                at + "ssm_dt.bias": block.dt_bias,
                at + "ssm_a": -block.a_log.exp()[:, None],
                at + "ssm_d": block.d[:, None],
                at + "ssm_norm.weight": block.norm_out[None],
                at + "ssm_out.weight": block.outward.weight,
            }
            continue
        named |= {
            at + "attn_norm.weight": block.attn_norm,
            at + "attn_output.weight": block.o.weight,
            **projections(at, block, s),
        }
    return numbers(named)


def write(net: Hybrid, tokenizer: Tokenizer, path: Path, kind: str = "q8_0") -> None:
    """Write one GGUF file; `kind` is q8_0 or f32."""
    s = net.shape
    about = "A tiny hybrid that reads small policies; for the tests of notes"
    kv_heads = [s.kv_heads if layer == "a" else 0 for layer in s.kinds]  # none: a Mamba-2 layer
    out = begin(path, "granitehybrid", "notes-hybrid", about, s, kv_heads, kind)
    out.add_ssm_conv_kernel(s.reach)
    out.add_ssm_inner_size(s.inner)
    out.add_ssm_state_size(s.states)
    out.add_ssm_time_step_rank(s.parts)
    out.add_ssm_group_count(1)
    vocabulary(out, tokenizer, s.vocab, SPECIAL, END, PAD)
    finish(out, tensors(net), kind)
