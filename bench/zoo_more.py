"""Make tiny random models of the decoders that llama.cpp's test-llama-archs leaves out of the zoo.

    python -m bench.zoo_more DIR

One function an architecture says what is in the file: metadata without the architecture's prefix, and the shapes of
the tensors as llama.cpp's load_arch_tensors writes them, the row's length first. What these graphs do of their own is
in them: layers unlike each other in window, base, head size and rotated dimensions, layers that borrow the K/V of
others, factors that are not 1. Left out: plm, DeepSeek-OCR and Chameleon, whose graphs abort in ordinary contexts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY, WIDTH, FEED, LAYERS, HEAD = 128, 64, 96, 4, 64
RWKV = 2 * HEAD  # the width of those that have heads of 64 (with 32, llama.cpp writes beyond its memory)

Metadata = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def blocks(layers: int, block: Shapes | Callable[[int], Shapes]) -> Shapes:
    """The tensors of all layers; `block`: of one, or of each by its number."""
    parts = [block(i) if callable(block) else block for i in range(layers)]
    return {f"blk.{i}.{name}": shape for i, part in enumerate(parts) for name, shape in part.items()}


def each(shape: tuple[int, ...], *names: str) -> Shapes:
    """Tensors of one shape."""
    return dict.fromkeys(names, shape)


def norms(size: int, *names: str) -> Shapes:
    """Norms with their biases."""
    return {f"{name}{end}": (size,) for name in names for end in ("", ".bias")}


def ends() -> Shapes:
    return {"token_embd": (WIDTH, VOCABULARY), "output_norm": (WIDTH,)}


def heads(count: int | list[int], kv: int | list[int], size: int = HEAD) -> Metadata:
    """Heads of queries and of K/V, and their size; of all layers, or by layer."""
    lengths = {"attention.key_length": size, "attention.value_length": size}
    return {"attention.head_count": count, "attention.head_count_kv": kv, **lengths}


def windows(pattern: list[int], base: float) -> Metadata:
    """Layers with a window of 16, where the pattern is 1, and the RoPE base of all and of these."""
    metadata: Metadata = {"attention.sliding_window": 16, "attention.sliding_window_pattern": pattern}
    return metadata | {"rope.freq_base": base, "rope.freq_base_swa": 1e4}


def attention(q: int, k: int) -> Shapes:
    """Projections to q elements of queries, k of keys and as many of values."""
    shapes = {"attn_norm": (WIDTH,), "attn_q": (WIDTH, q), "attn_k": (WIDTH, k), "attn_v": (WIDTH, k)}
    return {**shapes, "attn_output": (q, WIDTH)}


def head_norms(size: int) -> Shapes:
    return each((size,), "attn_q_norm", "attn_k_norm")


def feed_forward(gate: bool = True) -> Shapes:
    shapes = {"ffn_norm": (WIDTH,), "ffn_up": (WIDTH, FEED), "ffn_down": (FEED, WIDTH)}
    return shapes | ({"ffn_gate": (WIDTH, FEED)} if gate else {})


def per_layer_embeddings(layers: int, size: int) -> Shapes:
    """The embeddings that each layer of Gemma 3n and 4 has of its own."""
    shapes = {"per_layer_token_embd": (size * layers, VOCABULARY), "per_layer_model_proj": (WIDTH, size * layers)}
    return shapes | {"per_layer_proj_norm": (size,)}


def gemma_block(embedding: int) -> Shapes:
    """The tensors of Gemma 3n and 4 in each layer in addition to attention and feed-forward."""
    shapes = each((WIDTH,), "post_attention_norm", "post_ffw_norm")
    return shapes | {"inp_gate": (WIDTH, embedding), "proj": (embedding, WIDTH), "post_norm": (WIDTH,)}


def gemma4() -> tuple[Metadata, Shapes]:
    """Layers of two head sizes; the last two use the K/V of the two before. Full ones have V = K and factors."""
    window, kv_heads, embedding = [1, 1, 1, 0, 1, 0], [2, 2, 2, 1, 2, 1], 16
    layers, shared = len(window), 2

    def block(i: int) -> Shapes:
        head = HEAD if window[i] else 2 * HEAD
        shapes = attention(2 * head, kv_heads[i] * head) | head_norms(head) | feed_forward() | gemma_block(embedding)
        shapes["layer_output_scale"] = (1,)
        borrowed = i >= layers - shared
        absent = {"attn_k", "attn_v", "attn_k_norm"} if borrowed else set() if window[i] else {"attn_v"}
        return {name: shape for name, shape in shapes.items() if name not in absent}

    metadata = {"block_count": layers, **heads(2, kv_heads, 2 * HEAD), **windows(window, 1e6)}
    metadata |= {"attention.key_length_swa": HEAD, "attention.value_length_swa": HEAD, "final_logit_softcapping": 30.0}
    metadata |= {"attention.shared_kv_layers": shared, "embedding_length_per_layer_input": embedding}
    metadata |= {"rope.dimension_count": 2 * HEAD, "rope.dimension_count_swa": HEAD}
    return metadata, ends() | {"rope_freqs": (HEAD,)} | per_layer_embeddings(layers, embedding) | blocks(layers, block)


def gemma3n() -> tuple[Metadata, Shapes]:
    """As fixed in llama.cpp, only the first 20 layers have K/V, and sizes of AltUp and Laurel are constant. Each layer
    rotates as many dimensions as the first, which has a window, whatever the file's metadata are."""
    layers, streams, rank, embedding = 22, 4, 64, 256
    metadata = {"block_count": layers, **heads(2, 1), **windows([1, 0] * (layers // 2), 1e6)}
    block = gemma_block(embedding) | attention(2 * HEAD, HEAD) | head_norms(HEAD) | feed_forward()
    block |= {"altup_correct_coef": (streams, streams), "altup_correct_scale": (WIDTH,)}
    block |= {"altup_predict_coef": (streams, streams * streams), "altup_router": (WIDTH, streams)}
    block |= {"altup_router_norm": (WIDTH,), "laurel_l": (WIDTH, rank), "laurel_r": (rank, WIDTH)}
    projections = each((WIDTH, WIDTH, streams - 1), "altup_proj", "altup_unembd_proj")
    shapes = ends() | projections | per_layer_embeddings(layers, embedding)
    metadata["rope.dimension_count_swa"] = HEAD // 2
    return metadata, shapes | blocks(layers, block | {"laurel_post_norm": (WIDTH,)})


def apertus() -> tuple[Metadata, Shapes]:
    """xIELU without a gate, and factors in every layer."""
    xielu = {"alpha_n": 0.8, "alpha_p": 0.8, "beta": 0.5, "eps": 1e-6}
    metadata = heads(2, 1) | {"rope.freq_base": 5e5}
    metadata |= {f"xielu.{name}": [value] * LAYERS for name, value in xielu.items()}
    block = attention(2 * HEAD, HEAD) | head_norms(HEAD) | feed_forward(gate=False)
    shapes = ends() | {"output": (WIDTH, VOCABULARY), "rope_freqs": (HEAD // 2,)}
    return metadata, shapes | blocks(LAYERS, block)


def step35() -> tuple[Metadata, Shapes]:
    """Full layers rotate half as many dimensions as the others, with factors that windowed layers do not use."""
    window, counts, kv_heads = [0, 1, 1, 0], [2, 4, 4, 2], [1, 2, 2, 1]

    def block(i: int) -> Shapes:
        shapes = attention(counts[i] * HEAD, kv_heads[i] * HEAD) | head_norms(HEAD) | feed_forward()
        return shapes | {"attn_gate": (WIDTH, counts[i])}

    metadata = {"expert_feed_forward_length": FEED, **heads(counts, kv_heads), **windows(window, 5e6)}
    shapes = ends() | {"output": (WIDTH, VOCABULARY), "rope_freqs": (HEAD // 2,)}
    return metadata | {"rope.dimension_count": HEAD}, shapes | blocks(LAYERS, block)


def bitnet() -> tuple[Metadata, Shapes]:
    """Norms inside attention and feed-forward; here half of each head is rotated."""
    metadata = {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
    block = attention(WIDTH, WIDTH // 2) | feed_forward() | {"attn_sub_norm": (WIDTH,), "ffn_sub_norm": (FEED,)}
    return metadata, ends() | blocks(LAYERS, block)


def graniteswitch() -> tuple[Metadata, Shapes]:
    """A token switches to the adapter after it; a row of a layer beyond the last remembers that, and has no position.

    With so few tokens most texts have the one that switches.
    """
    vocabulary, rank, kv = 16, 4, WIDTH // 2
    metadata = {"vocab_size": vocabulary, "attention.head_count": 2, "attention.head_count_kv": 1, "logit_scale": 4.0}
    metadata |= {"adapters.count": 1, "adapters.lora_rank": rank}
    metadata |= {"adapters.token_ids_activate": [14], "adapters.token_ids_substitute": [3]}
    block = {
        "attn_norm": (WIDTH,),
        "attn_qkv": (WIDTH, WIDTH + 2 * kv),
        "attn_output": (WIDTH, WIDTH),
        **feed_forward(),
    }
    adapted = attention(WIDTH, kv) | {"ffn_gate": (WIDTH, FEED), "ffn_up": (WIDTH, FEED), "ffn_down": (FEED, WIDTH)}
    for name, shape in adapted.items():
        if name != "attn_norm":
            block |= {f"{name}.lora_a": (shape[0], rank, 2), f"{name}.lora_b": (rank, shape[1], 2)}
    return metadata, ends() | {"token_embd": (WIDTH, vocabulary)} | blocks(LAYERS, block)


def rwkv6(layers: int = LAYERS) -> tuple[Metadata, Shapes]:
    """A decay for each row of a head's matrix, and the token before mixed into attention and feed-forward."""
    block = norms(RWKV, "attn_norm", "attn_norm_2") | _time_mix() | {"time_mix_first": (HEAD, RWKV // HEAD)}
    block |= norms(RWKV, "time_mix_ln") | each((RWKV, 1, 1), "channel_mix_lerp_k", "channel_mix_lerp_r")
    block |= {"channel_mix_key": (RWKV, FEED), "channel_mix_value": (FEED, RWKV)}
    block["channel_mix_receptance"] = (RWKV, RWKV)
    return _mixed(layers) | {"attention.layer_norm_epsilon": 1e-5}, _rwkv_ends() | blocks(layers, block)


def rwkv6qwen2(layers: int = LAYERS) -> tuple[Metadata, Shapes]:
    """Gated linear attention, with the feed-forward of Qwen 2."""
    metadata = _mixed(layers) | {"attention.head_count": RWKV // HEAD, "attention.head_count_kv": RWKV // HEAD}
    block = {"attn_norm": (RWKV,)} | _time_mix() | _qwen_feed_forward()
    return metadata | {"token_shift_count": 1}, _qwen_ends() | blocks(layers, block)


def rwkv7(layers: int = LAYERS) -> tuple[Metadata, Shapes]:
    """The transition is a matrix per head: a decay, and the removal of one direction."""
    block = norms(RWKV, "attn_norm", "attn_norm_2") | _time_mix_7() | norms(RWKV, "time_mix_ln")
    block |= {"channel_mix_lerp_k": (RWKV, 1, 1), "channel_mix_key": (RWKV, FEED), "channel_mix_value": (FEED, RWKV)}
    return _rank_7(layers) | {"attention.layer_norm_epsilon": 1e-5}, _rwkv_ends() | blocks(layers, block)


def arwkv7(layers: int = LAYERS) -> tuple[Metadata, Shapes]:
    """The same recurrence, with the feed-forward of Qwen 2."""
    block = {"attn_norm": (RWKV,)} | _time_mix_7() | _qwen_feed_forward()
    return _rank_7(layers) | {"token_shift_count": 1}, _qwen_ends() | blocks(layers, block)


def _rwkv(layers: int) -> Metadata:
    return {"block_count": layers, "embedding_length": RWKV, "wkv.head_size": HEAD}


def _mixed(layers: int) -> Metadata:
    return _rwkv(layers) | {"time_mix_extra_dim": 8, "time_decay_extra_dim": 16}


def _rwkv_ends() -> Shapes:
    return each((RWKV, VOCABULARY), "token_embd", "output") | norms(RWKV, "token_embd_norm", "output_norm")


def _qwen_ends() -> Shapes:
    return {"token_embd": (RWKV, VOCABULARY), "output_norm": (RWKV,), "output": (RWKV, VOCABULARY)}


def _time_mix() -> Shapes:
    shapes: Shapes = {"time_mix_w1": (RWKV, 40), "time_mix_w2": (8, RWKV, 5), "time_mix_lerp_x": (RWKV, 1, 1)}
    shapes |= {"time_mix_lerp_fused": (RWKV, 1, 1, 5), "time_mix_decay": (RWKV,)}
    shapes |= {"time_mix_decay_w1": (RWKV, 16), "time_mix_decay_w2": (16, RWKV)}
    return shapes | {f"time_mix_{name}": (RWKV, RWKV) for name in ("key", "value", "receptance", "gate", "output")}


def _rank_7(layers: int) -> Metadata:
    ranks = {"decay": 8, "iclr": 8, "value_residual_mix": 8, "gate": 16}
    return _rwkv(layers) | {f"attention.{name}_lora_rank": rank for name, rank in ranks.items()}


def _time_mix_7() -> Shapes:
    shapes: Shapes = {"time_mix_lerp_fused": (RWKV, 1, 1, 6), "time_mix_g1": (RWKV, 16), "time_mix_g2": (16, RWKV)}
    for name in "wav":
        shapes |= {f"time_mix_{name}0": (RWKV,), f"time_mix_{name}1": (RWKV, 8), f"time_mix_{name}2": (8, RWKV)}
    shapes |= each((RWKV,), "time_mix_k_k", "time_mix_k_a", "time_mix_r_k")
    return shapes | {f"time_mix_{name}": (RWKV, RWKV) for name in ("key", "value", "receptance", "output")}


def _qwen_feed_forward() -> Shapes:
    return {"ffn_norm": (RWKV,), "ffn_gate": (RWKV, FEED), "ffn_up": (RWKV, FEED), "ffn_down": (FEED, RWKV)}


# Recurrent alone: nothing of them can be spliced, only carried (tests/engine/test_carry.py).
RECURRENT = {one.__name__: one for one in (rwkv6, rwkv6qwen2, rwkv7, arwkv7)}
ARCHITECTURES = {one.__name__: one for one in (gemma4, gemma3n, apertus, step35, bitnet, graniteswitch)}


def weights(arch: str, name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Such that every layer's output is about as large as its input, and attention looks at some tokens more."""
    if name == "rope_freqs":  # as in Gemma 4, the last pairs hardly rotate
        return np.where(np.arange(shape[0]) < 0.75 * shape[0], random.uniform(1, 8, shape), 1e30)
    if name.endswith(("time_mix_decay", "time_mix_w0")):
        return random.uniform(-6, -4, shape)  # decays that last hundreds of tokens
    if name.endswith("bias"):
        return random.normal(0, 0.1, shape)
    if "norm" in name or len(shape) == 1:
        large = 2.0
        if arch.startswith("gemma") and name.endswith(("q_norm", "k_norm")):
            large *= shape[0] ** -0.25  # Gemma does not divide scores by the root of the head's size: its weights do
        elif "post" in name:
            large = 0.5  # or many layers blow a rounding up
        return random.uniform(large / 2, large, shape[::-1])
    return random.normal(0, shape[0] ** -0.5, shape[::-1])


def write(path: Path, arch: str, metadata: Metadata, shapes: Shapes) -> None:
    defaults = {"vocab_size": VOCABULARY, "context_length": 256, "embedding_length": WIDTH, "block_count": LAYERS}
    defaults |= {"feed_forward_length": FEED, "attention.layer_norm_rms_epsilon": 1e-5}
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("none")
    for key, value in (defaults | metadata).items():
        key = key if key.startswith("xielu.") else f"{arch}.{key}"
        kind = gguf.GGUFValueType[kinds[type(value[0] if isinstance(value, list) else value)]]
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(key, value, kind)
    for name, shape in shapes.items():
        full = name if ".lora_" in name or name.endswith(".bias") else f"{name}.weight"
        writer.add_tensor(full, weights(arch, name, shape, random).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for arch, make in (ARCHITECTURES | RECURRENT).items():
        write(folder / f"{arch}-dense.gguf", arch, *make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
