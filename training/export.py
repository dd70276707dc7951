"""Write the model as GGUF: architecture `llama`, q8_0 matrices, f32 norms and biases, ChatML template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from torch import Tensor

from training.model import Block, Shape, Tiny
from training.tokenizer import END, PAD, SPECIAL

CONTEXT = 4096
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def interleave(x: Tensor, heads: int) -> Tensor:
    """Rows of Q or K from rotary halves to the interleaved pairs that `llama` wants."""
    rest = x.shape[1:]
    return x.view(heads, 2, -1, *rest).transpose(1, 2).reshape(x.shape)


def tensors(net: Tiny) -> dict[str, npt.NDArray[np.float32]]:
    """All weights under their GGUF names."""
    s = net.shape
    named: dict[str, Tensor] = {"token_embd.weight": net.embed, "output_norm.weight": net.norm}
    for i, block in enumerate(net.blocks):
        assert isinstance(block, Block)
        at = f"blk.{i}."
        named |= {
            at + "attn_norm.weight": block.attn_norm,
            at + "ffn_norm.weight": block.ffn_norm,
            at + "attn_output.weight": block.o.weight,
            at + "ffn_gate.weight": block.gate.weight,
            at + "ffn_up.weight": block.up.weight,
            at + "ffn_down.weight": block.down.weight,
            **projections(at, block, s),
        }
    return numbers(named)


def projections(at: str, block: Block, s: Shape) -> dict[str, Tensor]:
    """What V, Q and K of a layer are computed with, under the GGUF names that begin with `at`."""
    named = {at + "attn_v.weight": block.v.weight, at + "attn_v.bias": block.v.bias}
    for name, linear, heads in (("q", block.q, s.heads), ("k", block.k, s.kv_heads)):
        named[f"{at}attn_{name}.weight"] = interleave(linear.weight.detach(), heads)
        named[f"{at}attn_{name}.bias"] = interleave(linear.bias.detach(), heads)
    return named


def numbers(named: dict[str, Tensor]) -> dict[str, npt.NDArray[np.float32]]:
    """Weights as arrays."""
    return {name: value.detach().float().contiguous().numpy() for name, value in named.items()}


def describe(out: gguf.GGUFWriter, name: str, about: str) -> None:
    """Who made which model."""
    out.add_name(name)
    out.add_author("notes")
    out.add_license("MIT")
    out.add_description(about)


def vocabulary(
    out: gguf.GGUFWriter, tokenizer: Tokenizer, size: int, special: Sequence[str], end: int, pad: int
) -> None:
    """The tokens, filled up to `size`, the merges and the chat template. `end` and `pad`: ids of the control tokens."""
    known = tokenizer.get_vocab()
    tokens = sorted(known, key=known.__getitem__)
    types = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    tokens += [f"<|unused_{i}|>" for i in range(size - len(tokens))]
    types += [gguf.TokenType.UNUSED] * (size - len(types))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types(types)
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    out.add_eos_token_id(end)
    out.add_pad_token_id(pad)
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)


def write(net: Tiny, tokenizer: Tokenizer, path: Path, kind: str = "q8_0") -> None:
    """Write one GGUF file; `kind` is q8_0 or f32."""
    s, about = net.shape, "A tiny decoder that reads small policies; ships with notes"
    out = begin(path, "llama", "notes-tiny", about, s, s.kv_heads, kind)
    vocabulary(out, tokenizer, s.vocab, SPECIAL, END, PAD)
    finish(out, tensors(net), kind)


def begin(
    path: Path, architecture: str, name: str, about: str, s: Shape, kv_heads: int | list[int], kind: str
) -> gguf.GGUFWriter:
    """A file with a model's name and sizes; `kv_heads` of every layer, or of each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    out = gguf.GGUFWriter(path, architecture)
    describe(out, name, about)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else gguf.LlamaFileType.ALL_F32)
    out.add_vocab_size(s.vocab)
    out.add_context_length(CONTEXT)
    out.add_embedding_length(s.width)
    out.add_block_count(s.layers)
    out.add_feed_forward_length(s.ffn)
    out.add_head_count(s.heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(s.head)
    out.add_value_length(s.head)
    out.add_rope_dimension_count(s.head)
    out.add_rope_freq_base(s.rope_base)
    out.add_layer_norm_rms_eps(s.eps)
    return out


def finish(out: gguf.GGUFWriter, named: dict[str, npt.NDArray[np.float32]], kind: str) -> None:
    """Write the file; `kind` is q8_0 or f16 (of matrices), or f32."""
    for name, array in named.items():
        if kind == "q8_0" and array.ndim == 2:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            out.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            out.add_tensor(name, array.astype(np.float16) if kind == "f16" and array.ndim > 1 else array)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
