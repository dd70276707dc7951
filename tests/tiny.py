"""Tiny GGUF models with random weights, of the architectures that people run, with a byte-level tokenizer.

Their texts are noise, but their K/V cache is as real as that of a large model, which is what the engine's tests need.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TEMPLATE = (  # ChatML
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# What differs between the architectures. head: elements a head; bias, norm: extra tensors on Q and K.
ARCHITECTURES = {
    "llama": {"head": 16, "bias": False, "norm": False, "base": 10000.0},
    "mistral": {"arch": "llama", "head": 24, "bias": False, "norm": False, "base": 1000000.0},
    "qwen2": {"head": 16, "bias": True, "norm": False, "base": 1000000.0},
    "qwen3": {"head": 32, "bias": False, "norm": True, "base": 1000000.0},
    "smollm3": {"head": 16, "bias": False, "norm": False, "base": 10000.0, "layers": 4},  # the fourth has no positions
    "gemma": {"head": 32, "bias": False, "norm": False, "base": 10000.0},
    # Q, K, V in one tensor, and rotary factors that change where a context is larger than 4096 (LongRoPE).
    "phi3": {"head": 16, "bias": False, "norm": False, "base": 10000.0, "fused": True, "long": 4096},
    # Of llama's shape, but not among the architectures whose rotation has been verified: refused.
    "llama-embed": {"head": 16, "bias": False, "norm": False, "base": 10000.0},
}


def byte_tokens() -> list[str]:
    """The 256 bytes as GPT-2's byte-level BPE writes them."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in visible}
    extra = 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return [table[byte] for byte in range(256)]


def write_tokenizer(writer: gguf.GGUFWriter, template: str | None = TEMPLATE, bos: bool = False) -> int:
    """A byte-level tokenizer without merges and three control tokens; returns the vocabulary's size."""
    tokens = [*byte_tokens(), *SPECIAL]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])  # llama.cpp wants the key; no text here makes use of it
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_add_bos_token(bos)
    if bos:
        writer.add_bos_token_id(256)
    if template:
        writer.add_chat_template(template)
    return len(tokens)


def write_model(
    path: Path,
    kind: str = "llama",
    *,
    seed: int = 0,
    layers: int = 0,
    embd: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    name: str = "",
    scaling: str | None = None,
    factor: float = 4.0,
    template: str | None = TEMPLATE,
    bos: bool = False,
    quantization: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write a random model of one of ARCHITECTURES. `scaling`: None, "yarn" or "linear", by `factor`."""
    spec = ARCHITECTURES[kind]
    arch, head, ff = spec.get("arch", kind), spec["head"], 2 * embd
    layers = layers or spec.get("layers", 3)
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name or f"tiny {kind}")
    writer.add_context_length(2048)
    writer.add_embedding_length(embd)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(spec["base"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(7 if quantization is gguf.GGMLQuantizationType.Q8_0 else 0)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(256)
    if "long" in spec:
        writer.add_rope_scaling_orig_ctx_len(spec["long"])
    n_vocab = write_tokenizer(writer, template, bos)

    def tensor(name: str, *shape: int, scale: float = 1.0) -> None:
        data = (random.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32)
        if len(shape) == 2 and quantization is not None:
            writer.add_tensor(name, gguf.quants.quantize(data, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, data)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(name, (1 + 0.1 * random.standard_normal(size)).astype(np.float32))

    tensor("token_embd.weight", n_vocab, embd, scale=8.0 if arch != "gemma" else 1.0)
    norm("output_norm.weight", embd)
    if arch != "gemma":
        tensor("output.weight", n_vocab, embd, scale=4.0)
    if "long" in spec:
        writer.add_tensor("rope_factors_short.weight", np.linspace(1, 2, head // 2, dtype=np.float32))
        writer.add_tensor("rope_factors_long.weight", np.linspace(2, 9, head // 2, dtype=np.float32))
    for i in range(layers):
        norm(f"blk.{i}.attn_norm.weight", embd)
        if spec.get("fused"):
            tensor(f"blk.{i}.attn_qkv.weight", (heads + 2 * kv_heads) * head, embd)
        else:
            tensor(f"blk.{i}.attn_q.weight", heads * head, embd)
            tensor(f"blk.{i}.attn_k.weight", kv_heads * head, embd)
            tensor(f"blk.{i}.attn_v.weight", kv_heads * head, embd)
        tensor(f"blk.{i}.attn_output.weight", embd, heads * head)
        if spec["bias"]:
            tensor(f"blk.{i}.attn_q.bias", heads * head)
            tensor(f"blk.{i}.attn_k.bias", kv_heads * head)
            tensor(f"blk.{i}.attn_v.bias", kv_heads * head)
        if spec["norm"]:
            norm(f"blk.{i}.attn_q_norm.weight", head)
            norm(f"blk.{i}.attn_k_norm.weight", head)
        norm(f"blk.{i}.ffn_norm.weight", embd)
        if spec.get("fused"):
            tensor(f"blk.{i}.ffn_up.weight", 2 * ff, embd)
        else:
            tensor(f"blk.{i}.ffn_gate.weight", ff, embd)
            tensor(f"blk.{i}.ffn_up.weight", ff, embd)
        tensor(f"blk.{i}.ffn_down.weight", embd, ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
