"""Make models with random weights in the shape of real ones: as fast, and without a download.

What they say is noise. The vocabulary is bytes (tests/tiny.py), or that of another model, which leaves the output layer
out of the account and makes a prefill a little faster than the real model's.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "build" / "bench" / "qwen3-0.6b-shape.gguf"  # half a gigabyte that all benches share
sys.path.append(str(ROOT / "tests"))
from tiny import write_tokenizer  # type: ignore[import-not-found]  # noqa: E402

Q4_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
SPACE = "\u0120"  # a blank, as GPT-2's byte-level BPE writes it
UNLIKELY = 16  # times smaller than others are the logits of tokens that should not be written
ENDING = 2048 * UNLIKELY  # times larger is the end token's share of the feature that makes it follow a word
# 32 elements, as Q8_0 and Q4_0 store them, and the standard deviation of random values
BLOCK = np.dtype([("scale", np.float16), ("values", np.int8, 32)])
PACKED = np.dtype([("scale", np.float16), ("values", np.int8, 16)])
BLOCKS = {Q8_0: (BLOCK, 73.6), Q4_0: (PACKED, 4.61)}


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes."""

    arch: str = "qwen3"
    layers: int = 28
    width: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head: int = 128
    feed_forward: int = 3072
    kind: gguf.GGMLQuantizationType = Q8_0  # of the matrices, but for the embeddings
    context: int = 40960
    rope_base: float = 1e6


QWEN3_0_6B = Shape()


def random_blocks(
    random: np.random.Generator, rows: int, columns: int, kind: gguf.GGMLQuantizationType = Q8_0
) -> NDArray[np.uint8]:
    """A random matrix: bytes are drawn, not floats quantized. Outputs are as large as inputs are."""
    block, deviation = BLOCKS[kind]
    blocks = np.empty((rows, columns // 32), block)
    blocks["values"] = random.integers(-127, 128, blocks["values"].shape, np.int8)
    blocks["scale"] = 1 / (deviation * np.sqrt(columns))
    return blocks.view(np.uint8).reshape(rows, -1)


def copied_tokenizer(writer: gguf.GGUFWriter, path: Path) -> list[bool]:
    """Return another model's tokenizer and chat template, and its tokens of letters after a blank, which tokenize to
    themselves in any order."""
    fields = {name: one for name, one in gguf.GGUFReader(path).fields.items() if name.startswith("tokenizer.")}
    for name, one in fields.items():
        writer.add_key_value(name, one.contents(), one.types[0], one.types[-1] if len(one.types) > 1 else None)
    tokens, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    normal = [kind == gguf.TokenType.NORMAL for kind in kinds]
    pairs = zip(tokens, normal, strict=True)
    return [one and token[0] == SPACE and token[1:].isascii() and token[1:].isalpha() for token, one in pairs]


def with_words_of(model: Path) -> Path:
    """Return the random model in Qwen3-0.6B's shape with this model's tokenizer."""
    name = f"{MODEL.stem}-words-of-{hashlib.sha256(model.read_bytes()).hexdigest()[:8]}.gguf"
    return random_model(MODEL.with_name(name), tokenizer=model)


def random_model(
    path: Path = MODEL, shape: Shape = QWEN3_0_6B, seed: int = 0, tokenizer: Path | None = None, brief: bool = False
) -> Path:
    """Write the model unless the file exists. `tokenizer`: of this model, instead of bytes. `brief`: answers end after
    a word, as the end token is the likeliest one after any other."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(None, shape.arch)
    writer.add_name(f"random {shape.arch} {shape.layers}x{shape.width}")
    sizes = {"context_length": shape.context, "embedding_length": shape.width, "block_count": shape.layers}
    sizes |= {"feed_forward_length": shape.feed_forward, "head_count": shape.heads, "head_count_kv": shape.kv_heads}
    sizes |= {"key_length": shape.head, "value_length": shape.head, "file_type": 7 if shape.kind == Q8_0 else 2}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    likely = np.array(copied_tokenizer(writer, tokenizer) if tokenizer else [True] * write_tokenizer(writer))

    def matrix(name: str, rows: int, columns: int) -> None:
        found = random_blocks(random, rows, columns, shape.kind)
        if brief and rows == shape.width:  # layers leave the first feature as the last token's embedding has it
            found.view(BLOCK)["values"][0] = 0
        writer.add_tensor(f"{name}.weight", found, raw_dtype=shape.kind)

    def embeddings() -> None:  # also the output layer: they are tied
        found = random_blocks(random, len(likely), shape.width)
        blocks = found.view(BLOCK)
        blocks["scale"][~likely] /= UNLIKELY
        if brief:  # words have the first feature, other tokens its opposite, and the end token most of it
            end = writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value
            blocks["values"][:, 0, 0] = np.where(likely, 127, -127)
            blocks["values"][end, 0] = 127 * (np.arange(32) == 0)
            blocks["scale"][end, 0] *= ENDING
        writer.add_tensor("token_embd.weight", found, raw_dtype=Q8_0)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    embeddings()
    norm("output_norm", shape.width)
    width, forward = shape.width, shape.feed_forward
    matrices = {"attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q)}
    matrices |= {"ffn_gate": (forward, width), "ffn_up": (forward, width), "ffn_down": (width, forward)}
    norms = {"attn_norm": width, "attn_q_norm": shape.head, "attn_k_norm": shape.head, "ffn_norm": width}
    for i in range(shape.layers):
        for name, (rows, columns) in matrices.items():
            matrix(f"blk.{i}.{name}", rows, columns)
        for name, size in norms.items():
            norm(f"blk.{i}.{name}", size)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write the writer's content into the file atomically."""
    temporary = path.with_suffix(".part")
    writer.write_header_to_file(temporary)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(path)
    return path
