"""The parts of the stream, what reads them, and heads and hidden units that are set by hand.

The stream is the token's own identity, a flag for pieces that go on with a word, slots of 22 numbers, two registers
and single numbers. A slot holds the code of a word: 16 numbers that tell words apart, and NUMBERS. Heads use the fast
rotary pairs for distances, the slow ones for matches, and those between for "the nearest" and "the latest"; they share
the keys and values of their group, so a group's heads agree on what is compared and differ in what they ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Block, Tiny, orthogonal
from training.tiny.marks import NUMBERS, Marks

WORD = 16
SIZE = WORD + len(NUMBERS)
SLOTS = ("C", "A", "B", "F", "P", "S")
PARTS = ("day", "month", "year", "hundreds", "tens", "units", "there")  # of a register
REGISTERS = ("V", "L")
SINGLE = (
    *("stated", "corrected", "closed", "asked", "listed", "told", "same", "after is", "outcome"),
    *("month", "year", "number", "ended", "else", "c", "c here", "holds"),
)
LOUD = 2.5  # the length of the largest number's code
EVEN = 22.0  # the square of the length of every number's embedding: what is copied of a token depends on its length
CODE, REST = 2.35, 3.6  # lengths of a word's embedding: in its code, and without it
BLANK = 0.15  # of the latter, how much says that a blank comes before
FAST, SLOW = 12, 10
READ, PUT = 0.5, 0.6  # gains of values, and of what heads write: a slot holds a third to a half of what it copies


class Wiring:
    """A model whose weights are set by hand, part by part. `begin` has to come first."""

    def __init__(self, model: Tiny, marks: Marks, seed: int) -> None:
        s = self.shape = model.shape
        self.model, self.marks = model, marks
        self.random = torch.Generator().manual_seed(seed)
        self.head, self.pairs, self.group = s.head, s.head // 2, s.heads // s.kv_heads
        self.own = s.width - 1 - SIZE * len(SLOTS) - len(PARTS) * len(REGISTERS) - len(SINGLE)
        self.flag = self.own
        half = torch.arange(self.pairs - SLOW, self.pairs)
        slow = torch.cat([half, half + self.pairs])
        self.slow = slow[:WORD]
        self.spare: list[int] = slow[WORD:].tolist()  # dimensions that matches leave, for preferences
        self.last = s.head - 1  # one more
        self.near = torch.arange(FAST)
        self.mid = torch.arange(5, 18)  # slow enough that no far position looks near again within a text
        self.late = torch.arange(13, 21)  # so slow that they tell a text from the one before it
        self._embed()
        self.turn = torch.zeros(SIZE, SIZE)  # tells the piece before from the piece itself, and a field from a value
        self.turn[:WORD, :WORD] = orthogonal(WORD, WORD, self.random)

    def rand(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random)

    # Where things are in the stream.

    def slot(self, name: str, size: int = SIZE) -> slice:
        at = self.own + 1 + SIZE * SLOTS.index(name)
        return slice(at, at + size)

    def register(self, name: str) -> slice:
        at = self.own + 1 + SIZE * len(SLOTS) + len(PARTS) * REGISTERS.index(name)
        return slice(at, at + len(PARTS))

    def single(self, name: str) -> slice:
        at = self.shape.width - len(SINGLE) + SINGLE.index(name)
        return slice(at, at + 1)

    def number(self, slot: str, name: str) -> int:
        """Where a slot says so much of a number."""
        return self.slot(slot).start + WORD + NUMBERS.index(name)

    # The embeddings.

    def _embed(self) -> None:
        """Words share with their other form; numbers say how much they are; what is everywhere stays apart."""
        e, own, marks = self.model.embed, self.own, self.marks
        e[:, :own] = self.rand(len(e), own)
        e[:, own:] = 0
        for family in marks.families:
            e[family, :own] = self.rand(own)
        # What a word is copied by comes first, as a head may have no room for all: its code, the rest of it, and
        # whether a blank comes before, so that an outcome can be said with or without. Then how much a number is.
        # Frequent tokens have directions of their own, in which others have nothing: each is read exactly.
        axes = torch.eye(own)
        sizes = (WORD, own - WORD - 1 - len(NUMBERS) - len(marks.frequent), 1, len(NUMBERS), len(marks.frequent))
        codes, others, blank, amounts, self.apart = axes.split(sizes)
        self.shrink = torch.cat([codes, amounts])
        code = torch.zeros(len(e), SIZE)
        code[:, :WORD] = CODE * F.normalize(e[:, :WORD], dim=1)
        for i, parts in marks.numbers().items():
            code[i, :WORD] = 0  # nothing is matched by it, and in a condition it would be noise beside the field
            code[i, WORD:] = LOUD * parts
        code[marks.turns] = 0  # nothing to carry
        rest = F.normalize(e[:, :own] @ others.T @ others, dim=1)
        rest[marks.frequent] = self.apart
        rest += BLANK * blank * torch.where(torch.tensor(marks.blank), 1.0, -1.0)[:, None]
        numbers = list(marks.numbers())
        length = torch.full((len(e), 1), REST)
        length[numbers] = (EVEN - code[numbers].square().sum(1, keepdim=True)).sqrt()
        e[:, :own] = code @ self.shrink + length * rest
        e[:, self.flag] = -0.5
        e[torch.tensor(marks.going_on), self.flag] = 0.5
        self.model.norm.fill_(0.1)

    # What reads the stream: rows over its width.

    def at(self, *tokens: int) -> Tensor:
        """What reads 1 at these tokens, 0 at other frequent ones, and about 0 at the rest."""
        read = torch.zeros(self.shape.width)
        wanted = torch.tensor([float(token in tokens) for token in self.marks.frequent])
        read[: self.own] = wanted @ self.apart / REST
        return read

    def only(self, name: str) -> Tensor:
        """What reads one single number."""
        read = torch.zeros(self.shape.width)
        read[self.single(name)] = 1.0
        return read

    def of(self, slot: str, how: Tensor | float = 1.0) -> Tensor:
        """What reads a slot, perhaps through `how`."""
        read = torch.zeros(SIZE, self.shape.width)
        read[:, self.slot(slot)] = how if isinstance(how, Tensor) else how * torch.eye(SIZE)
        return read

    def word(self) -> Tensor:
        """What reads the code of the word so far."""
        read = self.of("C")
        read[:, : self.own] += self.shrink
        return read

    def kept(self, register: str) -> Tensor:
        """What reads the parts of a register."""
        return torch.eye(self.shape.width)[self.register(register)]

    def identity(self) -> Tensor:
        """What reads which token it is."""
        return torch.eye(self.shape.width)[: self.own]

    def without(self, *tokens: int) -> Tensor:
        """What reads which token it is, and nothing at these."""
        silent = self.model.embed[list(tokens), : self.own]
        read = self.identity()
        read[:, : self.own] -= torch.linalg.pinv(silent) @ silent
        return read

    # Heads.

    def begin(self, b: Block) -> None:
        """Small random queries, keys, values; hidden units that say nothing yet; no noise where numbers are said."""
        width = self.shape.width
        for lin in (b.q, b.k, b.v):
            lin.weight.copy_(self.rand(*lin.weight.shape) * 0.3 * width**-0.5)
            lin.bias.zero_()
        b.o.weight.copy_(self.rand(*b.o.weight.shape) * 0.005)
        b.o.weight[self.own + 1 + SIZE * len(SLOTS) :] = 0
        b.gate.weight.copy_(self.rand(*b.gate.weight.shape) * width**-0.5)
        b.up.weight.copy_(self.rand(*b.up.weight.shape) * width**-0.5)
        b.down.weight.zero_()

    def heads(self, kv: int) -> range:
        """The heads of a group."""
        return range(kv * self.group, (kv + 1) * self.group)

    def phase(self, distance: float) -> Tensor:
        """What a query has in the fast pairs to look so far back."""
        angle = -self.model.theta[:FAST] * distance
        return torch.cat([angle.cos(), angle.sin()])

    def look_back(
        self,
        b: Block,
        kv: int,
        distances: Sequence[float],
        read: Tensor,
        into: Sequence[slice],
        how: Sequence[Tensor],
        gains: Sequence[float] = (PUT, PUT),
    ) -> None:
        """Heads that look so many tokens back, and put what they read there where it belongs, through `how`."""
        D, both = self.head, torch.cat([self.near, self.near + self.pairs])
        b.k.weight[kv * D : (kv + 1) * D] *= 0.3
        b.k.bias[kv * D + self.near] = 7.0
        b.v.weight[kv * D : (kv + 1) * D] = 0
        b.v.weight[kv * D : kv * D + len(read)] = READ * read
        for head, distance, place, through, gain in zip(self.heads(kv), distances, into, how, gains, strict=False):
            at = head * D
            b.q.weight[at : at + D] *= 0.3
            b.q.bias[at + both] = 7.0 * self.phase(distance)
            b.o.weight[:, at : at + D] = 0
            b.o.weight[place, at : at + len(read)] = gain * through

    def nearest(self, b: Block, kv: int, head: int, read: Tensor, dim: int) -> None:
        """A head that looks at the nearest position at which `read` is 1, or what of it weighs more.

        It uses one dimension of the keys, and those of nearness, which heads that share them do not read.
        """
        D = self.head
        b.k.weight[kv * D + self.mid] = 0
        b.k.bias[kv * D + self.mid] = 4.0
        b.k.weight[kv * D + dim] = 12 * read
        for i in self.heads(kv):
            at = i * D
            if i == head:
                b.q.weight[at : at + D] *= 0.2
                b.q.weight[at + self.slow] = 0
                b.q.bias[at + self.mid] = 4.0
            b.q.weight[at + self.mid] = 0
            b.q.weight[at + dim] = 0
            b.q.bias[at + dim] = 12.0 * (i == head)

    def match(
        self, b: Block, kv: int, key: Tensor, queries: Sequence[Tensor], sharp: float, latest: float = 0.0
    ) -> None:
        """Heads of a group find what has the key; with `latest`, of several the one that is said last."""
        D = self.head
        b.k.weight[kv * D + self.slow] = sharp * key[:WORD]
        b.k.bias[kv * D + self.late] = latest
        for head, query in zip(self.heads(kv), queries, strict=True):
            b.q.weight[head * D + self.slow] = sharp * query[:WORD]
            b.q.bias[head * D + self.late] = latest

    def prefer(self, b: Block, kv: int, read: Tensor, dim: int, heads: Sequence[int] | None = None) -> None:
        """Keys of a group at which `read` is more count more for these heads (all, if None), or less if negative."""
        D = self.head
        b.k.weight[kv * D + dim] = 4 * read
        b.k.bias[kv * D + dim] = 0
        for head in self.heads(kv):
            self.ask(b, head, dim, 6.0 if heads is None or head in heads else 0.0)

    def ask(self, b: Block, head: int, dim: int, always: float, also: Tensor | float = 0.0) -> None:
        """How much a head's query has of one dimension: `always`, and what `also` reads."""
        b.q.weight[head * self.head + dim] = also
        b.q.bias[head * self.head + dim] = always

    def only_at(self, b: Block, head: int, dim: int, where: Tensor) -> None:
        """A head looks for anything only where `where` reads 1; elsewhere at the start of a turn, at nothing."""
        self.prefer(b, head // self.group, 1.35 * self.at(*self.marks.turns), dim, ())
        self.ask(b, head, dim, 30.0, -11.0 * where)

    def lift(self, b: Block, head: int, dim: int, read: Tensor, into: slice, gain: float) -> None:
        """What `read` finds where a head looks goes into the stream, by the dimensions of values from `dim` on."""
        at, n = head // self.group * self.head + dim, len(read)
        b.v.weight[at : at + n] = READ * read
        b.o.weight[into, head * self.head + dim : head * self.head + dim + n] = gain * torch.eye(n)

    def carry(
        self, b: Block, kv: int, reads: Sequence[Tensor], heads: Sequence[int], into: Sequence[slice], gain: float
    ) -> None:
        """Values of a group, and where its heads put them; what has no room in a head is left."""
        D = self.head
        b.v.weight[kv * D : (kv + 1) * D] = 0
        at = 0
        spans = []
        for read in reads:
            n = min(len(read), D - at)
            b.v.weight[kv * D + at : kv * D + at + n] = READ * read[:n]
            spans.append((at, n))
            at += n
        for head in heads:
            first = head * D
            b.o.weight[:, first : first + D] = 0
            for (at, n), place in zip(spans, into, strict=True):
                b.o.weight[place.start : place.start + n, first + at : first + at + n] = gain * torch.eye(n)

    def tell(self, b: Block, head: int, dim: int, read: Tensor, name: str, gain: float) -> None:
        """What `read` finds where a head looks, by one dimension of its values, goes into one number."""
        b.v.weight[head // self.group * self.head + dim] = READ * read
        b.o.weight[self.single(name), head * self.head + dim] = gain


class Units:
    """Hidden units of a block, taken one after the other: silu of what `gate` reads, times what `up` reads."""

    def __init__(self, block: Block) -> None:
        self.block, self.taken = block, 0

    def add(self, gate: Tensor, up: Tensor, into: slice, gain: float) -> None:
        """One more, which writes into one number of the stream."""
        b, unit = self.block, self.taken
        b.gate.weight[unit], b.up.weight[unit] = gate, up
        b.down.weight[into, unit] = gain
        self.taken += 1
