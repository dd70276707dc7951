"""Tiny GGUF models with random weights, of common architectures, with a byte-level tokenizer.

Their texts are noise, but their K/V cache works as that of a large model, as the engine's tests need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TEMPLATE = (  # ChatML
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
N_CTX = 8192

# Differences of the architectures. head: elements a head, else what the heads share; bias, norm: extra tensors on
# Q and K.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head": 16, "base": 10000.0},
    "mistral": {"arch": "llama", "head": 24, "base": 1000000.0},
    "qwen2": {"head": 16, "bias": True, "base": 1000000.0},
    "qwen3": {"head": 32, "norm": True, "base": 1000000.0},
    "smollm3": {"head": 16, "base": 10000.0, "layers": 4},  # the fourth has no positions
    "gemma": {"head": 32, "base": 10000.0, "tied": True},
    # Q, K, V in one tensor, and rotary factors that change where a context is larger than 4096 (LongRoPE).
    "phi3": {"head": 16, "base": 10000.0, "fused": True, "long": 4096},
    # Layers that see a window of a few positions only, with a base of their own, and one that sees all.
    "gemma3": {"head": 32, "norm": True, "base": 1000000.0, "tied": True, "window": 8},
    # Queries are scaled by the stretch of positions that they are in: rows may move within one only.
    "mistral3": {"head": 16, "base": 1000000.0, "stretch": 256},
    # A hybrid: short convolutions, and one layer of attention between them.
    "lfm2": {"norm": True, "base": 1000000.0, "attention": [1], "output_norm": "token_embd_norm"},
    # Recurrent layers alone.
    "mamba": {"attention": []},
    # A learned vector for every position.
    "gpt2": {"learned": True},
    # Of llama's shape, but not among the architectures whose rotation has been verified: refused.
    "llama-embed": {"head": 16, "base": 10000.0},
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


def write_tokenizer(
    writer: gguf.GGUFWriter, template: str | None = TEMPLATE, bos: bool = False, added: Sequence[str] = ()
) -> int:
    """A byte-level tokenizer without merges, three control tokens and the user-defined ones that are `added`; returns
    the vocabulary's size."""
    tokens = [*byte_tokens(), *SPECIAL, *added]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(SPECIAL)
    kinds += [gguf.TokenType.USER_DEFINED] * len(added)
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
    window: int = 0,
    template: str | None = TEMPLATE,
    bos: bool = False,
    added: Sequence[str] = (),
    quantization: gguf.GGMLQuantizationType | None = None,
    trained: int = N_CTX,
) -> Path:
    """Write a random model of one of ARCHITECTURES. `scaling`: None, "yarn" or "linear", by 4. `window`: instead
    of the architecture's. `trained`: the trained length in its metadata."""
    spec = ARCHITECTURES[kind] | ({"window": window} if window else {})
    arch, head, ff = spec.get("arch", kind), spec.get("head", embd // heads), 2 * embd
    layers = layers or spec.get("layers", 3)
    attention = spec.get("attention", range(layers))  # which layers have it; the others are recurrent
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name or f"tiny {kind}")
    writer.add_context_length(max(trained, 4 * spec.get("long", 0)))
    writer.add_embedding_length(embd)
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(7 if quantization is gguf.GGMLQuantizationType.Q8_0 else 0)
    n_vocab = write_tokenizer(writer, template, bos, added)
    make = _Tensors(writer, np.random.default_rng(seed), quantization)
    if arch == "mamba":
        writer.add_ssm_inner_size(2 * embd)  # llama.cpp knows no other factor
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(4)
    else:
        writer.add_feed_forward_length(ff)
        writer.add_head_count(heads)
        writer.add_head_count_kv([kv_heads if i in attention else 0 for i in range(layers)])
        _attention_keys(writer, spec, head)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(256)

    tied = spec.get("tied", False)
    make.matrix("token_embd.weight", n_vocab, embd, scale=1.0 if tied else 8.0)
    make.norm(spec.get("output_norm", "output_norm"), embd, bias="learned" in spec)
    if not tied:
        make.matrix("output.weight", n_vocab, embd, scale=4.0)
    if "learned" in spec:
        make.matrix("position_embd.weight", trained, embd, scale=8.0)
    if "long" in spec:
        writer.add_tensor("rope_factors_short.weight", np.linspace(1, 2, head // 2, dtype=np.float32))
        writer.add_tensor("rope_factors_long.weight", np.linspace(2, 9, head // 2, dtype=np.float32))
    for i in range(layers):
        if arch == "mamba":
            make.mamba(i, embd)
            continue
        if i in attention:
            make.attention(i, spec, embd, head, heads, kv_heads)
        else:
            make.convolution(i, embd)
        make.feed_forward(i, spec, embd, ff)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write all that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _attention_keys(writer: gguf.GGUFWriter, spec: dict[str, Any], head: int) -> None:
    writer.add_key_length(head)
    writer.add_value_length(head)
    if "learned" in spec:
        writer.add_layer_norm_eps(1e-6)
    else:
        writer.add_rope_dimension_count(head)
        writer.add_rope_freq_base(spec["base"])
    if "long" in spec:
        writer.add_rope_scaling_orig_ctx_len(spec["long"])
    if "window" in spec:
        writer.add_sliding_window(spec["window"])
        writer.add_sliding_window_pattern(2)
        writer.add_rope_freq_base_swa(10000.0)
    if "stretch" in spec:
        writer.add_rope_scaling_orig_ctx_len(spec["stretch"])
        writer.add_attn_temperature_scale(0.1)
    if "attention" in spec:
        writer.add_shortconv_l_cache(3)


class _Tensors:
    """Writes random tensors of the size that keeps activations near 1."""

    def __init__(
        self, writer: gguf.GGUFWriter, random: np.random.Generator, quantization: gguf.GGMLQuantizationType | None
    ) -> None:
        self._writer, self._random, self._quantization = writer, random, quantization

    def matrix(self, name: str, *shape: int, scale: float = 1.0, bias: bool = False) -> None:
        data = (self._random.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32)
        if len(shape) == 2 and self._quantization is not None:
            data = gguf.quants.quantize(data, self._quantization)
            self._writer.add_tensor(name, data, raw_dtype=self._quantization)
        else:
            self._writer.add_tensor(name, data)
        if bias:
            self.matrix(name.replace(".weight", ".bias"), shape[0])

    def norm(self, name: str, size: int, *, bias: bool = False) -> None:
        data = 1 + 0.1 * self._random.standard_normal(size)
        self._writer.add_tensor(f"{name}.weight", data.astype(np.float32))
        if bias:
            self.matrix(f"{name}.bias", size)

    def attention(self, i: int, spec: dict[str, Any], embd: int, head: int, heads: int, kv_heads: int) -> None:
        plain = "learned" in spec  # GPT-2 has a bias everywhere, and its norms, too
        self.norm(f"blk.{i}.attn_norm", embd, bias=plain)
        if "fused" in spec or plain:
            self.matrix(f"blk.{i}.attn_qkv.weight", (heads + 2 * kv_heads) * head, embd, bias=plain)
        else:
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                self.matrix(f"blk.{i}.attn_{part}.weight", count * head, embd)
        self.matrix(f"blk.{i}.attn_output.weight", embd, heads * head, bias=plain)
        if "bias" in spec:
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                self.matrix(f"blk.{i}.attn_{part}.bias", count * head)
        if "norm" in spec:
            self.norm(f"blk.{i}.attn_q_norm", head)
            self.norm(f"blk.{i}.attn_k_norm", head)
        if "window" in spec:
            self.norm(f"blk.{i}.post_attention_norm", embd)
            self.norm(f"blk.{i}.post_ffw_norm", embd)

    def convolution(self, i: int, embd: int) -> None:
        self.norm(f"blk.{i}.attn_norm", embd)
        self.matrix(f"blk.{i}.shortconv.in_proj.weight", 3 * embd, embd)
        self.matrix(f"blk.{i}.shortconv.conv.weight", embd, 3)
        self.matrix(f"blk.{i}.shortconv.out_proj.weight", embd, embd)

    def feed_forward(self, i: int, spec: dict[str, Any], embd: int, ff: int) -> None:
        plain = "learned" in spec
        self.norm(f"blk.{i}.ffn_norm", embd, bias=plain)
        if "fused" in spec:
            self.matrix(f"blk.{i}.ffn_up.weight", 2 * ff, embd)
        else:
            if not plain:
                self.matrix(f"blk.{i}.ffn_gate.weight", ff, embd)
            self.matrix(f"blk.{i}.ffn_up.weight", ff, embd, bias=plain)
        self.matrix(f"blk.{i}.ffn_down.weight", embd, ff, bias=plain)

    def mamba(self, i: int, embd: int) -> None:
        inner, state, rank = 2 * embd, 16, 4
        self.norm(f"blk.{i}.attn_norm", embd)
        self.matrix(f"blk.{i}.ssm_in.weight", 2 * inner, embd)
        self.matrix(f"blk.{i}.ssm_conv1d.weight", inner, 4, bias=True)
        self.matrix(f"blk.{i}.ssm_x.weight", rank + 2 * state, inner)
        self.matrix(f"blk.{i}.ssm_dt.weight", inner, rank, bias=True)
        # How fast each state fades: always below 0, from many tokens to few.
        fade = -np.exp(self._random.uniform(-3, 1, (inner, state)))
        self._writer.add_tensor(f"blk.{i}.ssm_a", fade.astype(np.float32))
        self.matrix(f"blk.{i}.ssm_d", inner)
        self.matrix(f"blk.{i}.ssm_out.weight", embd, inner)


def alter_model(
    path: Path,
    source: Path | gguf.GGUFReader,
    *,
    keys: dict[str, Any] | None = None,
    drop: Sequence[str] = (),
    tensors: dict[str, str] | None = None,
    more: Sequence[str] = (),
    part: tuple[int, int] | None = None,
    begin: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    change: Callable[[Any], list[tuple[str, Any]]] | None = None,
) -> Path:
    """Write a model again: with other `keys`, without those to `drop`, `tensors` by other names, and `more` of them.
    `part`: only that one of so many, which has its share of the tensors; the first has all keys. `begin`: adds keys
    first. `change`: returns the names and numbers to write for a tensor."""
    reader = gguf.GGUFReader(source) if isinstance(source, Path) else source
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    begin(writer)
    number, count = part or (0, 1)
    kinds = {bool: gguf.GGUFValueType.BOOL, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
    for name, value in (values | (keys or {})).items():
        if number or value == [] or (name in drop and name not in (keys or {})):
            continue
        if isinstance(value, list) and name in values:
            writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, reader.fields[name].types[-1])
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            kind = reader.fields[name].types[0] if name in values else kinds.get(type(value), gguf.GGUFValueType.UINT32)
            writer.add_key_value(name, value, kind)
    if part:
        writer.add_key_value("split.no", number, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.count", count, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", len(reader.tensors), gguf.GGUFValueType.INT32)
    for tensor in reader.tensors[number::count]:
        same = [((tensors or {}).get(tensor.name, tensor.name), tensor.data)]
        for name, data in change(tensor) if change else same:
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    for name in more:
        writer.add_tensor(name, np.zeros(32, np.float32))
    return finish(writer, path)
