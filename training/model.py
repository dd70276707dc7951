"""The tiny decoder: architecture `llama`, Q/K/V biases, tied output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab: int
    width: int = 224
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    ffn: int = 384
    rope_base: float = 100_000.0
    eps: float = 1e-5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on (..., head) with the halves as pairs."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.attn_norm = nn.Parameter(torch.ones(s.width))
        self.q = nn.Linear(s.width, s.heads * s.head)
        self.k = nn.Linear(s.width, s.kv_heads * s.head)
        self.v = nn.Linear(s.width, s.kv_heads * s.head)
        self.o = nn.Linear(s.heads * s.head, s.width, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(s.width))
        self.gate = nn.Linear(s.width, s.ffn, bias=False)
        self.up = nn.Linear(s.width, s.ffn, bias=False)
        self.down = nn.Linear(s.ffn, s.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sees: Tensor) -> Tensor:
        """`x` is (B, n, width); `sees` is (B, 1, n, n), True where a token attends to another."""
        s = self.s
        h = F.rms_norm(x, (s.width,), self.attn_norm, s.eps)
        n = x.shape[1]
        q = rotate(self.q(h).view(-1, n, s.heads, s.head), cos, sin).transpose(1, 2)
        k = rotate(self.k(h).view(-1, n, s.kv_heads, s.head), cos, sin).transpose(1, 2)
        v = self.v(h).view(-1, n, s.kv_heads, s.head).transpose(1, 2)
        k, v = (one.repeat_interleave(s.heads // s.kv_heads, 1) for one in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(1, 2).flatten(2))
        h = F.rms_norm(x, (s.width,), self.ffn_norm, s.eps)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Tiny(nn.Module):
    """The decoder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.zeros(shape.vocab, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        pairs = shape.head // 2
        self.register_buffer("theta", shape.rope_base ** (-torch.arange(pairs).float() / pairs), persistent=False)

    def forward(self, ids: Tensor, at: Tensor, sees: Tensor) -> Tensor:
        """The stream after the last block, (B, n, width), of tokens at these positions."""
        angle = at[..., None].float() * self.theta
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        x = F.embedding(ids, self.embed)
        for block in self.blocks:
            x = block(x, cos, sin, sees)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits from the last stream."""
        return F.rms_norm(x, (self.shape.width,), self.norm, self.shape.eps) @ self.embed.T


def orthogonal(rows: int, columns: int, g: torch.Generator) -> Tensor:
    """Random rows of unit length, orthogonal where possible."""
    q, _ = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), generator=g))
    return q if rows >= columns else q.T


def size(model: nn.Module) -> int:
    """How many numbers the model has."""
    return sum(p.numel() for p in model.parameters())
