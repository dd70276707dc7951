"""A start from which the hybrid learns to look things up within minutes; everything stays trainable.

The stream is a token's own identity (what the slots leave) and a slot for what is at each of four distances before it:
the heads of the attention layer look there. The Mamba-2 layers begin as memories, into which words that may be values
put their identity, under what is two tokens before them (`tier: gold`, `the tier is gold`), unless a rule begins there;
they are asked for by what is six tokens before an answer (`What is the tier?`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from training.hybrid.model import Hybrid, Scanned
from training.model import Block, orthogonal

BACK = (2, 6, 5, 7)  # where a value's field, a question's field and a rule's dash are; and one to learn with
SLOT = 24
FAST = 12  # rotary pairs that tell one token from the next
FORGET = (0.001, 0.1)  # of a state, a token: of the slowest and of the quickest head


@torch.no_grad()
def start(net: Hybrid, families: Sequence[Sequence[int]], values: Sequence[int], dash: int, seed: int) -> None:
    """`families` are spellings of a word ("date", " date"), which share most of their embedding; `values` are the
    tokens that are kept, which have a direction in common; `dash` begins a rule."""
    s = net.shape
    g = torch.Generator().manual_seed(seed)
    own = s.width - len(BACK) * SLOT

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g)

    def slot(i: int) -> slice:
        return slice(own + SLOT * i, own + SLOT * (i + 1))

    net.embed[:, :own] = 0.5 * rand(s.vocab, own)
    net.embed[:, own:] = 0.05 * rand(s.vocab, s.width - own)
    for family in families:
        shared = 0.5 * rand(own)
        for i in family:
            net.embed[i, :own] = 0.9 * shared + 0.43 * net.embed[i, :own]
    basis = orthogonal(own, own, g)
    common, always, shrink = basis[0], basis[1], basis[2 : 2 + SLOT]  # the last: identity -> slot
    net.embed[list(values), :own] += 3.0 * common
    net.embed[:, :own] += 3.0 * always  # what every token has opens the gates
    net.norm.fill_(0.1)
    seen = F.rms_norm(net.embed[:, :own], (own,)) @ shrink.T
    for block in net.blocks:
        assert isinstance(block, (Block, Scanned))
        block.gate.weight.copy_(rand(*block.gate.weight.shape) * s.width**-0.5)
        block.up.weight.copy_(rand(*block.up.weight.shape) * s.width**-0.5)
        block.down.weight.zero_()
        if isinstance(block, Scanned):
            _memory(block, slot(0), slot(1), common, always, g)
            rule = seen[dash] / seen[dash].norm() ** 2  # what a rule asks of a field is not its value
            block.inward.weight[-s.parts :, slot(2)] -= 8.0 * rule
            continue
        for line in (block.q, block.k, block.v):
            line.weight.copy_(rand(*line.weight.shape) * 0.1 * s.width**-0.5)
            line.bias.zero_()
        block.o.weight.copy_(rand(*block.o.weight.shape) * 0.02)
        _look_back(net, block, slot, shrink)


@torch.no_grad()
def _look_back(net: Hybrid, block: Block, slot: Callable[[int], slice], shrink: torch.Tensor) -> None:
    """A head for each distance puts what is there into its slot."""
    s, half = net.shape, net.shape.head // 2
    for group in range(s.kv_heads):
        block.k.bias[group * s.head : group * s.head + FAST] = 7.0
        block.v.weight[group * s.head : group * s.head + SLOT, : shrink.shape[1]] = 0.5 * shrink
    for i, distance in enumerate(BACK):
        at, turn = i * s.head, -net.theta[:FAST] * distance  # the key at this distance gets the best score
        block.q.bias[at : at + FAST] = 7.0 * turn.cos()
        block.q.bias[at + half : at + half + FAST] = 7.0 * turn.sin()
        block.o.weight[slot(i), at : at + SLOT] = 1.0 * torch.eye(SLOT)


@torch.no_grad()
def _memory(
    block: Scanned,
    keys: slice,
    asks: slice,
    common: torch.Tensor,
    always: torch.Tensor,
    g: torch.Generator,
) -> None:
    """A Mamba-2 layer that keeps identities: the slot of keys, and what in the stream asks for such keys, how."""
    s = block.s
    block.inward.weight.copy_(torch.randn(*block.inward.weight.shape, generator=g) * 0.2 * s.width**-0.5)
    own = len(always)
    kept = orthogonal(s.inner, own, g)
    key = slice(2 * s.inner, 2 * s.inner + s.states)
    query = slice(key.stop, key.stop + s.states)
    block.inward.weight[: s.inner, :own] += 0.7 * always
    block.inward.weight[s.inner : 2 * s.inner, :own] += 1.5 * kept
    block.outward.weight.copy_(0.003 * torch.randn(*block.outward.weight.shape, generator=g))
    block.outward.weight[:own] += 1.0 * kept.T
    mix = torch.randn(s.states, SLOT, generator=g) * SLOT**-0.5
    block.inward.weight[key, keys] += 2.0 * mix
    block.inward.weight[query, asks] += 1.5 * mix
    block.conv.copy_(0.1 * torch.randn(*block.conv.shape, generator=g))
    block.conv[:, -1] += 1.0
    block.conv_bias[s.inner :] = -1.0  # of keys and queries: those that differ have little in common
    block.inward.weight[-s.parts :, :own] += 1.2 * common
    block.dt_bias.fill_(-3.0)
    block.d.fill_(0.1)
    slowest, quickest = FORGET
    block.a_log.copy_(torch.linspace(0, 1, s.parts) * torch.log(torch.tensor(quickest / slowest)))
    block.a_log += torch.log(torch.tensor(slowest))
