"""The eye (qwen2vl's vision tower and merger) and the decoder (qwen2vl, M-RoPE) as PyTorch; export.py writes them.

The arithmetic is that of llama.cpp: tools/mtmd/models/qwen2vl.cpp and src/models/qwen2vl.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import model
from training.model import Block, rotate

SECTIONS = (4, 6, 6)  # rotary pairs that go by time, row and column


@dataclass(frozen=True)
class Shape(model.Shape):
    """Sizes of both. A head has twice as many numbers as SECTIONS has pairs."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    ffn: int = 384
    rope_base: float = 100.0  # so low that rows at a wrong distance are not found: the slowest pair turns once in 470
    eps: float = 1e-6
    eye_width: int = 96
    eye_layers: int = 3
    eye_heads: int = 3
    eye_ffn: int = 256
    patch: int = 6
    mean: float = 0.5
    deviation: float = 0.5


class EyeBlock(nn.Module):
    """Attention of all patches to all, and an MLP."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.ln1, self.ln2 = nn.LayerNorm(s.eye_width, s.eps), nn.LayerNorm(s.eye_width, s.eps)
        self.q, self.k, self.v, self.o = (nn.Linear(s.eye_width, s.eye_width) for _ in range(4))
        self.up, self.down = nn.Linear(s.eye_width, s.eye_ffn), nn.Linear(s.eye_ffn, s.eye_width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` is (B, patches, width)."""
        B, n, _ = x.shape
        h = self.ln1(x)
        q, k, v = (one(h).view(B, n, self.s.eye_heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.o(seen.transpose(1, 2).reshape(B, n, -1))
        h = self.up(self.ln2(x))
        return x + self.down(h * torch.sigmoid(1.702 * h))


class VisionEncoder(nn.Module):
    """Pixels to rows for the decoder: one for each square of two by two patches."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.patch = nn.Linear(3 * s.patch * s.patch, s.eye_width, bias=False)
        self.blocks = nn.ModuleList(EyeBlock(s) for _ in range(s.eye_layers))
        self.post = nn.LayerNorm(s.eye_width, s.eps)
        self.mm0 = nn.Linear(4 * s.eye_width, 4 * s.eye_width)
        self.mm2 = nn.Linear(4 * s.eye_width, s.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """`pixels` is (B, height, width, 3), 0 to 255; returns (B, rows, width of the decoder)."""
        s, (B, height, width, _) = self.s, pixels.shape
        p, h, w = s.patch, height // s.patch, width // s.patch
        x = (pixels.float() / 255 - s.mean) / s.deviation
        # Patches in squares of two by two, each as a convolution has it: channel, row, column.
        x = x.view(B, h // 2, 2, p, w // 2, 2, p, 3).permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(B, h * w, 3 * p * p)
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        order = torch.arange(h * w).view(h // 2, 2, w // 2, 2).permute(0, 2, 1, 3).reshape(-1)
        pairs = s.eye_width // s.eye_heads // 4
        theta = 10_000.0 ** (-torch.arange(pairs).float() / pairs)
        angle = torch.cat([one.reshape(-1)[order][:, None] * theta for one in (rows, columns)], -1)
        cos, sin = angle.cos(), angle.sin()
        x = self.patch(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.post(x).reshape(B, h * w // 4, 4 * s.eye_width)
        return self.mm2(F.gelu(self.mm0(x), approximate="tanh"))


class Decoder(nn.Module):
    """Tokens and rows of pictures to logits."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed = nn.Parameter(torch.randn(s.vocab, s.width) * 0.5)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.Parameter(torch.full((s.width,), 0.2))  # logits are small at first
        pairs = s.head // 2
        self.register_buffer("theta", s.rope_base ** (-torch.arange(pairs).float() / pairs), persistent=False)
        self.register_buffer("axis", torch.repeat_interleave(torch.arange(3), torch.tensor(SECTIONS)), persistent=False)

    def forward(self, x: Tensor, at: Tensor, sees: Tensor) -> list[Tensor]:
        """The stream after each block, (B, n, width) each, the last one normed. `x`: embeddings, `at`: positions on the
        axes, (B, n, 3)."""
        angle = (at[..., self.axis].float() * self.theta)[:, :, None]
        cos, sin = angle.cos(), angle.sin()
        after = []
        for block in self.blocks:
            x = block(x, cos, sin, sees)
            after.append(x)
        return [*after[:-1], F.rms_norm(x, (self.s.width,), self.norm, self.s.eps)]

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits."""
        return x @ self.embed.T


class ImageEncoding(nn.Module):
    """Both together."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.vision, self.decoder = VisionEncoder(s), Decoder(s)
