"""The forward pass of tiny models in float64 NumPy: an independent reference for the engine.

Reads the weights from a model's file, and implements a decoder with its norms, rotations, and causal and window masks.
A sequence is a dict of KV entries by position; an entry stays as computed until it is computed again. No code of notes
or llama.cpp is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
PAIRS_OF_NEIGHBOURS = ("llama", "smollm3")  # the others rotate an element with the one half a head further on


@dataclass(frozen=True)
class Row:
    """A token and its KV entry in all layers: `k`, rotated to its position, and `v`, both [layers, kv_heads, head]."""

    token: int
    k: Array
    v: Array


Rows = dict[int, Row]  # by position


class Forward:
    """A model of tests/tiny.py of the architectures llama, qwen2, qwen3, smollm3 or gemma3, without RoPE scaling."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.arch = str(reader.fields["general.architecture"].contents())
        self.weights = {tensor.name: np.array(tensor.data, np.float64) for tensor in reader.tensors}
        assert self.arch in ("llama", "qwen2", "qwen3", "smollm3", "gemma3"), self.arch
        assert all(tensor.tensor_type == gguf.GGMLQuantizationType.F32 for tensor in reader.tensors)

        def key(name: str, default: Any = None) -> Any:
            field = reader.fields.get(f"{self.arch}.{name}")
            return default if field is None else field.contents()

        self.layers, self.heads = key("block_count"), key("attention.head_count")
        self.head, counts = key("attention.key_length"), key("attention.head_count_kv")
        self.kv_heads = counts[0] if isinstance(counts, list) else counts
        self.epsilon = key("attention.layer_norm_rms_epsilon")
        self.base = key("rope.freq_base")
        self.base_in_window = key("rope.freq_base_swa", self.base)
        self.window = key("attention.sliding_window", 0)  # positions that a token sees in such a layer, with its own
        self.pattern = key("attention.sliding_window_pattern", 1)  # the last layer of so many sees all

    def windowed(self, layer: int) -> bool:
        """True if a layer has a sliding window."""
        return bool(self.window) and layer % self.pattern < self.pattern - 1

    def compute(self, rows: Rows, positions: Sequence[int], tokens: Sequence[int]) -> Array:
        """Compute tokens at ascending positions, put their entries into `rows`, and return logits, [tokens, vocab].
        Each attends to entries at its position and before, to new ones where they exist; other entries do not
        change."""
        w, x = self.weights, self._embedded(tokens)
        # The rows of all layers as they will be. Those of the new tokens are filled in layer by layer.
        every = sorted({*rows, *positions})
        empty = np.zeros((self.layers, self.kv_heads, self.head))
        k = np.stack([empty if place in positions else rows[place].k for place in every])
        v = np.stack([empty if place in positions else rows[place].v for place in every])
        here, at = np.array(positions), np.searchsorted(every, positions)
        ahead = here[:, None] - np.array(every)[None, :]  # how far each row is before each new token
        for i in range(self.layers):
            normed = self._norm(x, f"blk.{i}.attn_norm")
            q, new_k, new_v = (self._heads(normed, i, part) for part in "qkv")
            k[at, i], v[at, i] = self._rotated(new_k, here, i), new_v
            sees = (ahead >= 0) & (ahead < self.window if self.windowed(i) else True)
            x = x + self._post(self._attention(self._rotated(q, here, i), k[:, i], v[:, i], sees, i), i, "attention")
            x = x + self._post(self._feed_forward(self._norm(x, f"blk.{i}.ffn_norm"), i), i, "ffw")
        for place, token, index in zip(positions, tokens, at, strict=True):
            rows[place] = Row(int(token), k[index].copy(), v[index].copy())
        return self._norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T

    def moved(self, row: Row, distance: int) -> Row:
        """Return an entry moved by a number of positions: K rotated, V unchanged."""
        k = np.stack([self._rotated(row.k[i][None], np.array([distance]), i)[0] for i in range(self.layers)])
        return replace(row, k=k)

    def _embedded(self, tokens: Sequence[int]) -> Array:
        x = self.weights["token_embd.weight"][np.asarray(tokens)]
        return x * np.sqrt(x.shape[1]) if self.arch == "gemma3" else x

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon) * self.weights[f"{name}.weight"]

    def _heads(self, x: Array, i: int, part: str) -> Array:
        """Queries, keys or values, [tokens, heads, head], before their rotation."""
        flat = x @ self.weights[f"blk.{i}.attn_{part}.weight"].T + self.weights.get(f"blk.{i}.attn_{part}.bias", 0.0)
        heads, norm = flat.reshape(len(x), -1, self.head), f"blk.{i}.attn_{part}_norm"
        return self._norm(heads, norm) if f"{norm}.weight" in self.weights else heads

    def _rotated(self, heads: Array, positions: NDArray[np.int64], i: int) -> Array:
        if self.arch == "smollm3" and (i + 1) % 4 == 0:
            return heads  # every fourth layer has no positions
        base = self.base_in_window if self.windowed(i) else self.base
        angle = positions[:, None, None] * base ** (-np.arange(0, self.head, 2) / self.head)
        cos, sin = np.cos(angle), np.sin(angle)
        half = self.head // 2
        neighbours = self.arch in PAIRS_OF_NEIGHBOURS
        first, second = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(0, half), slice(half, None))
        out = np.empty_like(heads)
        out[..., first] = heads[..., first] * cos - heads[..., second] * sin
        out[..., second] = heads[..., first] * sin + heads[..., second] * cos
        return out

    def _attention(self, q: Array, k: Array, v: Array, sees: NDArray[np.bool_], i: int) -> Array:
        share = self.heads // self.kv_heads  # query heads that share a head of keys and values
        k, v = k.repeat(share, 1), v.repeat(share, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(self.head)
        scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1) @ self.weights[f"blk.{i}.attn_output.weight"].T

    def _feed_forward(self, x: Array, i: int) -> Array:
        gate, up, down = (self.weights[f"blk.{i}.ffn_{part}.weight"] for part in ("gate", "up", "down"))
        open_ = _gelu(x @ gate.T) if self.arch == "gemma3" else _silu(x @ gate.T)
        return (open_ * (x @ up.T)) @ down.T

    def _post(self, x: Array, i: int, part: str) -> Array:
        return self._norm(x, f"blk.{i}.post_{part}_norm") if self.arch == "gemma3" else x


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _gelu(x: Array) -> Array:
    """ggml's on the CPU: looked up in a table of f16, which is the coarsest step of all that it does."""
    inside = x.astype(np.float16).astype(np.float64)
    curve = 0.5 * inside * (1 + np.tanh(np.sqrt(2 / np.pi) * inside * (1 + 0.044715 * inside**2)))
    return np.where(x <= -10, 0.0, np.where(x >= 10, x, curve.astype(np.float16)))
