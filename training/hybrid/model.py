"""A small hybrid in the shape of Granite 4 (architecture `granitehybrid`): Mamba-2 layers, and a few of attention.

A Mamba-2 layer is computed as what it is, a masked product of all pairs of tokens, so no scan is needed to train it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model import Block, Tiny, View, size
from training.model import Shape as AttentionShape

__all__ = ["Hybrid", "Shape", "size"]


@dataclass(frozen=True)
class Shape(AttentionShape):
    """Sizes of the model; `kinds` has a letter a layer: a for attention, m for Mamba-2."""

    width: int = 160
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    ffn: int = 256
    kinds: str = "ammm"
    states: int = 128  # numbers of the state for each channel
    parts: int = 8  # Mamba-2 heads, each of which forgets at its own rate
    reach: int = 4  # tokens that the convolution sees

    @property
    def inner(self) -> int:
        """Channels of a Mamba-2 layer: the graph of Granite knows no others."""
        return 2 * self.width


def convolve(view: View, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each channel over the tokens that precede it, of a branch also the last ones of its text; `x` is
    (B, P + K * L, C), `weight` (C, reach)."""
    P, K, L, reach = view.P, view.K, view.L, weight.shape[1]
    text, rest = x.split([P, K * L], 1)

    def slide(padded: Tensor, length: int) -> Tensor:
        out = bias
        for i in range(reach):
            out = out + padded[..., i : i + length, :] * weight[:, i]
        return out

    said = slide(F.pad(text, (0, 0, reach - 1, 0)), P)
    if not K:
        return said
    last = view.lens[:, None] + torch.arange(1 - reach, 0)[None]  # B, reach - 1: of each text
    held = text.gather(1, last[..., None].expand(-1, -1, x.shape[2]))
    branch = torch.cat([held[:, None].expand(-1, K, -1, -1), rest.view(len(x), K, L, -1)], 2)
    return torch.cat([said, slide(branch, L).flatten(1, 2)], 1)


def scan(view: View, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """What each token reads of its state; every branch goes on from that of its text. `x` is (B, n, H, D); `dt`
    (B, n, H); `a` (H,), below zero; `b` and `c` (B, n, N). State <- state * exp(dt a) + dt x b, and what is read is
    the state times c."""
    B, _, H, D = x.shape
    P, K, L = view.P, view.K, view.L
    x_p, x_b = x.split([P, K * L], 1)
    dt_p, dt_b = dt.split([P, K * L], 1)
    b_p, b_b = b.split([P, K * L], 1)
    c_p, c_b = c.split([P, K * L], 1)
    dt_p = dt_p * (torch.arange(P)[None] < view.lens[:, None])[..., None]  # padding neither forgets nor adds
    sums = (dt_p * a).cumsum(1)
    text = _pairs(x_p, dt_p, sums, b_p, c_p)
    if not K:
        return text
    left = (sums[:, -1:] - sums).exp() * dt_p  # B, P, H: what is left of each token at the end of its text
    state = torch.einsum("bphd,bpn->bhdn", x_p * left[..., None], b_p)
    dt_b = dt_b.reshape(B * K, L, H)
    sums = (dt_b * a).cumsum(1)
    x_b, b_b, c_b = (y.reshape(B * K, L, *y.shape[2:]) for y in (x_b, b_b, c_b))
    own = _pairs(x_b, dt_b, sums, b_b, c_b).reshape(B, K * L, H, D)
    read = torch.einsum("bhdn,bln->blhd", state, c_b.view(B, K * L, -1))
    return torch.cat([text, own + read * sums.exp().view(B, K * L, H, 1)], 1)


def _pairs(x: Tensor, dt: Tensor, sums: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Each token reads what it and those before it have added; `sums` are of dt a, up to each token."""
    n = x.shape[1]
    over = sums.transpose(1, 2)
    decay = over[..., :, None] - over[..., None, :]  # batch, H, n, n
    later = torch.full((n, n), float("-inf")).triu(1)
    weight = (decay + later).exp() * (c @ b.transpose(1, 2))[:, None]
    return (weight @ (x * dt[..., None]).transpose(1, 2)).transpose(1, 2)


class Scanned(nn.Module):
    """A Mamba-2 layer and a gated MLP."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        mixed = s.inner + 2 * s.states
        self.norm_in = nn.Parameter(torch.ones(s.width))
        self.inward = nn.Linear(s.width, s.inner + mixed + s.parts, bias=False)
        self.conv = nn.Parameter(torch.zeros(mixed, s.reach))
        self.conv_bias = nn.Parameter(torch.zeros(mixed))
        self.dt_bias = nn.Parameter(torch.zeros(s.parts))
        self.a_log = nn.Parameter(torch.zeros(s.parts))
        self.d = nn.Parameter(torch.ones(s.parts))
        self.norm_out = nn.Parameter(torch.ones(s.inner))
        self.outward = nn.Linear(s.inner, s.width, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(s.width))
        self.gate = nn.Linear(s.width, s.ffn, bias=False)
        self.up = nn.Linear(s.width, s.ffn, bias=False)
        self.down = nn.Linear(s.ffn, s.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: View) -> Tensor:
        """`x` is (B, P + K * L, width): the texts, then all branches. Positions do not matter."""
        s = self.s
        h = F.rms_norm(x, (s.width,), self.norm_in, s.eps)
        z, mixed, dt = self.inward(h).split([s.inner, s.inner + 2 * s.states, s.parts], -1)
        value, b, c = F.silu(convolve(view, mixed, self.conv, self.conv_bias)).split([s.inner, s.states, s.states], -1)
        value = value.unflatten(-1, (s.parts, -1))
        y = scan(view, value, F.softplus(dt + self.dt_bias), -self.a_log.exp(), b, c) + value * self.d[:, None]
        y = F.rms_norm(y.flatten(2) * F.silu(z), (s.inner,), self.norm_out, s.eps)
        x = x + self.outward(y)
        h = F.rms_norm(x, (s.width,), self.ffn_norm, s.eps)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Hybrid(Tiny):
    """The decoder of training/model.py with other layers."""

    shape: Shape

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blocks = nn.ModuleList(Block(shape) if kind == "a" else Scanned(shape) for kind in shape.kinds)
