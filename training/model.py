"""The tiny decoder (architecture `llama`, Q/K/V biases, tied output), and a start that helps it look up."""

from __future__ import annotations

from collections.abc import Sequence
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


BACK = (1, 2, 5, 7)  # where a rule's topic, value and field are, seen from its outcome
FURTHER = (
    6,
    5,
)  # where the topic of a question is, seen from the answer; where the value in a line of reasoning does
SLOT, SLOTS = 32, 5


@torch.no_grad()
def start(model: Tiny, families: Sequence[Sequence[int]], lines: Sequence[Sequence[int]], seed: int) -> None:
    """A start from which look-ups are learned in minutes (everything stays trainable).

    The stream is the token's own identity (what the slots leave) and five slots of 32 for others.

    * Embeddings: identity in its part, little elsewhere. `families` are spellings of a word ("date", " date")
      and share most of it; `lines` are ordered numbers and get a common direction.
    * Layer 0: heads that look some tokens back (`BACK`; Q and K biases on the fast rotary pairs) and put what
      is there into the slots, through one projection that all heads share. Layer 1: two more (`FURTHER`).
    * Layers 1 and up: heads that match what is here (or in a slot) against a slot of the key (slow rotary
      pairs), and carry back the key's identity, or its slots of value and field.
    """
    s = model.shape
    g = torch.Generator().manual_seed(seed)
    own, D, pairs, R = s.width - SLOTS * SLOT, s.head, s.head // 2, s.heads // s.kv_heads
    fast, slow = 12, 14

    def rand(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    def slot(i: int) -> slice:
        return slice(own + SLOT * i, own + SLOT * (i + 1))

    e = model.embed
    e[:, :own] = 0.5 * rand(s.vocab, own)
    e[:, own:] = 0.05 * rand(s.vocab, s.width - own)
    for family in families:
        shared = 0.5 * rand(own)
        for i in family:
            e[i, :own] = 0.9 * shared + 0.43 * e[i, :own]
    for line in lines:
        u, w1, w2 = orthogonal(3, own, g)
        for n, i in enumerate(line):
            t = torch.tensor(n / (len(line) - 1) * 2 - 1)
            e[i, :own] = 0.7 * e[i, :own] + 2.0 * t * u + torch.sin(3 * t) * w1 + torch.cos(3 * t) * w2
    model.norm.fill_(0.1)
    shrink = orthogonal(SLOT, own, g)  # identity -> slot
    probe = torch.eye(SLOT)[: 2 * slow]  # slot -> the slow pairs
    rows = torch.cat([torch.arange(pairs - slow, pairs), torch.arange(2 * pairs - slow, 2 * pairs)])

    def look_back(b: Block, kv: int, distances: Sequence[int], slots: Sequence[int]) -> None:
        """Heads of group `kv` look at these distances and copy into these slots."""
        b.k.weight[kv * D : (kv + 1) * D] *= 0.3
        b.k.bias[kv * D : kv * D + fast] = 7.0
        b.v.weight[kv * D : (kv + 1) * D] = 0
        b.v.weight[kv * D : kv * D + SLOT, :own] = 0.5 * shrink
        for i, (distance, into) in enumerate(zip(distances, slots, strict=True)):
            at = (kv * R + i) * D
            turn = -model.theta[:fast] * distance  # the key at this distance gets the best score
            b.q.weight[at : at + D] *= 0.3
            b.q.bias[at : at + fast] = 7.0 * turn.cos()
            b.q.bias[at + pairs : at + pairs + fast] = 7.0 * turn.sin()
            b.o.weight[:, at : at + D] = 0
            b.o.weight[slot(into), at : at + SLOT] = 0.6 * torch.eye(SLOT)

    def match(b: Block, kv: int, key: int, queries: Sequence[int], identity: bool = True) -> None:
        """Heads of group `kv` match a slot of the key against slots of the query (-1: what is here).

        They carry the key's identity, or else its slots of value and field.
        """
        b.k.weight[kv * D + rows] = 0
        b.k.weight[kv * D + rows, slot(key)] = 1.9 * probe
        for i, query in enumerate(queries):
            at = (kv * R + i) * D
            b.q.weight[at + rows] = 0
            if query < 0:
                b.q.weight[at + rows, :own] = 1.9 * probe @ shrink
            else:
                b.q.weight[at + rows, slot(query)] = 1.9 * probe
        carried = torch.zeros(D, s.width)
        if identity:
            carried[: min(own, D), :own] = torch.eye(own)[:D]
        else:
            carried[:, slot(2).start : slot(3).stop] = torch.eye(D)
        b.v.weight[kv * D : (kv + 1) * D] = 0.5 * carried
        for i in range(R):
            at = (kv * R + i) * D
            b.o.weight[:, at : at + D] = 0.35 * carried.T

    for layer, b in enumerate(model.blocks):
        assert isinstance(b, Block)
        for lin in (b.q, b.k, b.v):
            lin.weight.copy_(rand(*lin.weight.shape) * 0.3 * s.width**-0.5)
            lin.bias.zero_()
        b.o.weight.copy_(rand(*b.o.weight.shape) * 0.02)
        b.gate.weight.copy_(rand(*b.gate.weight.shape) * s.width**-0.5)
        b.up.weight.copy_(rand(*b.up.weight.shape) * s.width**-0.5)
        b.down.weight.zero_()
        if layer == 0:
            look_back(b, 0, BACK[:2], (0, 1))
            look_back(b, 1, BACK[2:], (2, 3))
        elif layer == 1:
            match(b, 0, 1, (-1, 0))
            look_back(b, 1, FURTHER, (4, 4))
        elif layer % 2 == 0:
            match(b, 0, 1, (-1, 3))
            match(b, 1, 1, (4, 0), identity=False)
        else:
            match(b, 0, 1, (0, 3))
            match(b, 1, 2, (-1, 4))


def size(model: nn.Module) -> int:
    """How many numbers the model has."""
    return sum(p.numel() for p in model.parameters())
