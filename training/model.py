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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: View) -> Tensor:
        """`x` is (B, P + K * L, width): the texts, then all branches."""
        s = self.s
        h = F.rms_norm(x, (s.width,), self.attn_norm, s.eps)
        n = x.shape[1]
        q = rotate(self.q(h).view(-1, n, s.heads, s.head), cos, sin)
        k = rotate(self.k(h).view(-1, n, s.kv_heads, s.head), cos, sin)
        v = self.v(h).view(-1, n, s.kv_heads, s.head)
        x = x + self.o(view.attend(q, k, v))
        h = F.rms_norm(x, (s.width,), self.ffn_norm, s.eps)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Softmax(torch.autograd.Function):
    """Softmax over the last dimension; its backward pass is much faster on a CPU than the stock one."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        a = x.softmax(-1)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:  # type: ignore[override]
        (a,) = ctx.saved_tensors  # type: ignore[attr-defined]
        t = a * g
        return torch.addcmul(t, a, t.sum(-1, keepdim=True), value=-1.0)


class View:
    """Who sees whom: a text sees itself causally, a branch sees its text and itself, never another branch."""

    def __init__(self, prefix_len: Tensor, width: int, branches: int, length: int) -> None:
        self.P, self.K, self.L, self.lens = width, branches, length, prefix_len
        inf = float("-inf")
        device = prefix_len.device
        self.hidden = torch.zeros(len(prefix_len), 1, 1, width, device=device)
        behind = torch.arange(width, device=device)[None, None, None] >= prefix_len[:, None, None, None]
        self.hidden.masked_fill_(behind, inf)
        self.later = torch.full((length, length), inf, device=device).triu(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (B, P + K * L, heads, head)."""
        B, _, H, D = q.shape
        G = k.shape[2]
        R = H // G
        P, K, L = self.P, self.K, self.L
        qp, qb = q.split([P, K * L], 1)
        kp, ko = k.split([P, K * L], 1)
        vp, vo = v.split([P, K * L], 1)
        kp, vp = kp.transpose(1, 2), vp.transpose(1, 2)
        top = F.scaled_dot_product_attention(
            qp.transpose(1, 2), kp.repeat_interleave(R, 1), vp.repeat_interleave(R, 1), is_causal=True
        )
        top = top.transpose(1, 2).reshape(B, P, H * D)
        if not K:
            return top
        scale = D**-0.5
        qb = (qb * scale).view(B, K, L, G, R, D)
        ko, vo = ko.view(B, K, L, G, D), vo.view(B, K, L, G, D)
        flat = qb.permute(0, 3, 4, 1, 2, 5).reshape(B, G, R * K * L, D)
        s1 = flat @ kp.transpose(-1, -2) + self.hidden
        s2 = qb.permute(0, 1, 3, 4, 2, 5).reshape(B * K, G, R * L, D) @ ko.reshape(B * K, L, G, D).permute(0, 2, 3, 1)
        s2 = s2.view(B, K, G, R, L, L) + self.later
        s2 = s2.permute(0, 2, 3, 1, 4, 5).reshape(B, G, R * K * L, L)
        a1, a2 = Softmax.apply(torch.cat([s1, s2], -1)).split([P, L], -1)
        out = a1 @ vp
        a2 = a2.reshape(B, G, R, K, L, L).permute(0, 3, 1, 2, 4, 5).reshape(B * K, G, R * L, L)
        own = (a2 @ vo.reshape(B * K, L, G, D).transpose(1, 2)).view(B, K, G, R, L, D).permute(0, 2, 3, 1, 4, 5)
        out = (out.view(B, G, R, K, L, D) + own).permute(0, 3, 4, 1, 2, 5).reshape(B, K * L, H * D)
        return torch.cat([top, out], 1)


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

    def hidden(self, ids: Tensor, at: Tensor, view: View) -> list[Tensor]:
        """The stream after every block, (B, n, width) each."""
        angle = at[..., None].float() * self.theta
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        x = F.embedding(ids, self.embed)
        out = []
        for block in self.blocks:
            x = block(x, cos, sin, view)
            out.append(x)
        return out

    def logits(self, x: Tensor) -> Tensor:
        """Next-token logits from the last stream."""
        return F.rms_norm(x, (self.shape.width,), self.norm, self.shape.eps) @ self.embed.T

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of plain sequences (B, n)."""
        at = torch.arange(ids.shape[1]).expand_as(ids)
        view = View(torch.full((ids.shape[0],), ids.shape[1]), ids.shape[1], 0, 0)
        return self.logits(self.hidden(ids, at, view)[-1])


def orthogonal(rows: int, columns: int, g: torch.Generator) -> Tensor:
    """Random rows of unit length, orthogonal where possible."""
    q, _ = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), generator=g))
    return q if rows >= columns else q.T


def size(model: nn.Module) -> int:
    """How many numbers the model has."""
    return sum(p.numel() for p in model.parameters())
