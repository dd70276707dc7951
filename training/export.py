"""Write the model as GGUF: architecture `llama`, q8_0 matrices, f32 norms and biases, ChatML template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer
from torch import Tensor, nn

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


def decoder_tensors(net: nn.Module, halves: bool) -> dict[str, Tensor]:
    """The weights of a decoder under their GGUF names. `halves`: the architecture rotates halves, not pairs."""
    named: dict[str, Tensor] = {"token_embd.weight": net.embed, "output_norm.weight": net.norm}
    for i, block in enumerate(net.blocks):
        assert isinstance(block, Block)
        at, s = f"blk.{i}.", block.s
        named |= {at + "attn_norm.weight": block.attn_norm, at + "ffn_norm.weight": block.ffn_norm}
        parts = {"attn_output": block.o, "ffn_gate": block.gate, "ffn_up": block.up, "ffn_down": block.down}
        named |= {f"{at}{name}.weight": linear.weight for name, linear in parts.items()}
        for name, linear, heads in (("v", block.v, 0), ("q", block.q, s.heads), ("k", block.k, s.kv_heads)):
            for kind, value in (("weight", linear.weight.detach()), ("bias", linear.bias.detach())):
                named[f"{at}attn_{name}.{kind}"] = interleave(value, heads) if heads and not halves else value
    return named


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


def sizes(out: gguf.GGUFWriter, s: Shape, kind: str) -> None:
    """Sizes of a decoder, and the type of its matrices."""
    out.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else gguf.LlamaFileType.ALL_F32)
    parts = {"vocab_size": s.vocab, "context_length": CONTEXT, "embedding_length": s.width, "block_count": s.layers}
    parts |= {"feed_forward_length": s.ffn, "head_count": s.heads, "head_count_kv": s.kv_heads}
    for name, value in parts.items():
        getattr(out, f"add_{name}")(value)
    out.add_rope_freq_base(s.rope_base)
    out.add_layer_norm_rms_eps(s.eps)


def write(net: Tiny, tokenizer: Tokenizer, path: Path, kind: str = "q8_0") -> None:
    """Write one GGUF file; `kind` is q8_0 or f32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    out, s = gguf.GGUFWriter(path, "llama"), net.shape
    describe(out, "notes-tiny", "A tiny decoder that reads small policies; ships with notes")
    sizes(out, s, kind)
    out.add_key_length(s.head)
    out.add_value_length(s.head)
    out.add_rope_dimension_count(s.head)
    vocabulary(out, tokenizer, s.vocab, SPECIAL, END, PAD)
    finish(out, decoder_tensors(net, halves=False), kind)


def finish(out: gguf.GGUFWriter, named: dict[str, Tensor], kind: str) -> None:
    """Write the file; `kind` is q8_0 or f16 (of matrices), or f32."""
    for name, value in named.items():
        array = value.detach().float().contiguous().numpy()
        if kind == "q8_0" and array.ndim == 2:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            out.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            out.add_tensor(name, array.astype(np.float16) if kind == "f16" and array.ndim > 1 else array)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
