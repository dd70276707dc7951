"""A start from which look-ups over words of several pieces are learned in minutes. Everything stays trainable.

The stream is the token's own identity (what the slots leave), a flag for pieces that go on with a word, one number that
says "this holds", and slots of 21 numbers:

    C  the piece before, at a piece that goes on with a word: with the own identity, the code of the word so far
    A  B  M  Y  the word code 1, 2, 3 and 5 tokens back. After a word A is the word, whatever its length; at the
                first piece of an outcome B is its topic; at the end of a date A, M, Y are day, month, year
    F  the A of the nearest "is" or ":" before: after a value, its field
    P  the A and F of the nearest "then" (or "If") before: at the first piece of an outcome, its condition
    Q  R  T  the A, M, Y at the end of the line of the same field
    S  the word code 6 and 7 back: where an answer begins, the topic of the question

Layer 4 matches the condition of an outcome with field lines while the text is read, and says where it holds; an erratum
finds the outcome of its value there, and says it louder. Layers 5 and 6 find what is said of a topic (B), in rule lines
and after errata alike, and prefer a little what holds. That is a note, and the start has it: README.md says what is
owed for that. A head that finds nothing looks at the start of a turn, where there is nothing to carry.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Block, Tiny, orthogonal

SIZE = 21
NAMES = ["C", "A", "B", "F", "M", "Y", "P", "Q", "R", "T", "S"]
FAST, SLOW = 12, 11  # rotary pairs for distances, and for matches
NOWHERE = 1.8  # how strongly a head that finds no match looks at the start of a turn instead
HELD, SAID = 0.8, 1.0  # how loudly a head says that a condition holds: in a rule, and in an erratum
HEARD = 0.4  # how strongly answers prefer what is said to hold: about one nat


@torch.no_grad()
def start(
    model: Tiny,
    families: list[list[int]],
    lines: list[list[int]],
    going_on: list[int],
    equals: list[int],
    thens: list[int],
    ifs: list[int],
    ends: list[int],
    turns: list[int],
    stops: list[int],
    dots: list[int],
    seed: int,
    note: bool = True,
) -> None:
    """Set all weights. Without `note`, a control, nothing says "this holds" and nothing listens to it.

    `families`: forms of a word with and without a blank, which share most of their embedding; `lines`: numbers in
    order; `going_on`: pieces without a blank; `equals`, `thens`, `ifs`, `ends`: the tokens "is" and ":", "then", "If",
    and the end of a line; `turns`, `stops`, `dots`: what begins a turn, what ends one, and the full stop.
    """
    s = model.shape
    g = torch.Generator().manual_seed(seed)
    D, pairs, R = s.head, s.head // 2, s.heads // s.kv_heads
    own = s.width - 2 - SIZE * len(NAMES)
    flag, holds = own, s.width - 1
    held, said, heard = (HELD, SAID, HEARD) if note else (0.0, 0.0, 0.0)
    slow = torch.cat([torch.arange(pairs - SLOW, pairs), torch.arange(2 * pairs - SLOW, 2 * pairs)])[:SIZE]

    def rand(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    def slot(name: str) -> slice:
        at = own + 1 + SIZE * NAMES.index(name)
        return slice(at, at + SIZE)

    shrink = orthogonal(SIZE, own, g)
    e = model.embed
    e[:, :own] = 0.5 * rand(s.vocab, own)
    e[:, own:] = 0.02 * rand(s.vocab, s.width - own)
    for family in families:
        shared = 0.5 * rand(own)
        for i in family:
            e[i, :own] = 0.97 * shared + 0.24 * e[i, :own]
    basis = orthogonal(own, own, g)
    for line in lines:  # a common direction, and waves of several lengths
        for n, i in enumerate(line):
            t = torch.tensor(n / (len(line) - 1) * 2 - 1)
            wave = 2.4 * t * basis[0]
            for k in range(3):
                angle = 3.14159 * t * 3**k
                wave += 0.8 * (torch.sin(angle) * basis[1 + 2 * k] + torch.cos(angle) * basis[2 + 2 * k])
            e[i, :own] = 0.5 * e[i, :own] + wave
    code = e[:, :own] @ shrink.T  # of one length
    e[:, :own] += (0.5 * SIZE**0.5 * F.normalize(code, dim=1) - code) @ shrink
    e[:, flag] = -0.5
    e[torch.tensor(going_on), flag] = 0.5
    model.norm.fill_(0.1)

    turn = orthogonal(SIZE, SIZE, g)  # tells the piece before from the piece itself, and a field from a value

    def reader(*parts: tuple[str, Tensor | float]) -> Tensor:
        """Rows that read slots (or "own", "word") from the stream, summed."""
        w = torch.zeros(SIZE, s.width)
        for name, how in parts:
            if name in ("own", "word"):
                w[:, :own] += shrink
            if name == "word":
                w[:, slot("C")] += torch.eye(SIZE)
            if name in NAMES:
                w[:, slot(name)] += how if isinstance(how, Tensor) else how * torch.eye(SIZE)
        return w

    word = reader(("word", 1.0))

    def after(token: int) -> Tensor:
        """What reads about 1 after this token."""
        code = shrink @ e[token, :own]
        read = torch.zeros(s.width)
        read[slot("A")] = 1.5 * code / code.square().sum()  # slots hold a third to a half of what they copy
        return read

    condition = reader(("A", 1.0), ("F", 0.5 * turn))

    def without(tokens: list[int]) -> Tensor:
        """What reads the identity of tokens, and nothing at these."""
        silent = e[tokens, :own]
        read = torch.zeros(own, s.width)
        read[:, :own] = torch.eye(own) - torch.linalg.pinv(silent) @ silent
        return read

    def phase(distance: float) -> Tensor:
        angle = -model.theta[:FAST] * distance
        return torch.cat([angle.cos(), angle.sin()])

    def quiet(lin: Tensor, at: int) -> None:
        lin[at : at + D] *= 0.3

    near = torch.arange(FAST)
    both = torch.cat([near, near + pairs])

    def look_back(
        b: Block,
        kv: int,
        distances: tuple[float, ...],
        read: Tensor,
        into: tuple[str, ...],
        how: Tensor,
        gains: tuple[float, ...] = (0.6, 0.6),
    ) -> None:
        quiet(b.k.weight, kv * D)
        b.k.bias[kv * D : kv * D + FAST] = 7.0
        b.v.weight[kv * D : (kv + 1) * D] = 0
        b.v.weight[kv * D : kv * D + SIZE] = 0.5 * read
        for i, (distance, name, gain) in enumerate(zip(distances, into, gains, strict=False)):
            at = (kv * R + i) * D
            quiet(b.q.weight, at)
            b.q.bias[at + both] = 7.0 * phase(distance)
            b.o.weight[:, at : at + D] = 0
            b.o.weight[slot(name), at : at + SIZE] = gain * how

    def gather(b: Block) -> None:
        """A piece that goes on with a word looks one back, any other token at the start of a turn, which is nothing."""
        look_back(b, 0, (1,), shrink @ without([*ends, *turns]), ("C",), turn)
        b.k.weight[D - 1] = 4 * at_token(turns)
        b.q.bias[both] = 7.0 * phase(1.0) / 2
        b.q.weight[both] = 0
        b.q.weight[both, flag] = 7.0 * phase(1.0) / 2 / 2.0  # the norm makes about 2 of a flag of 0.5
        b.q.weight[D - 1] = 0
        b.q.weight[D - 1, flag] = -12.0 / 2 / 2.0
        b.q.bias[D - 1] = 12.0 / 2

    def nearest(b: Block, kv: int, heads: tuple[int, ...], tokens: list[int]) -> None:
        """Heads that look at the nearest of these tokens."""
        b.k.weight[kv * D : (kv + 1) * D] = 0
        b.k.weight[kv * D + pairs - 1, :own] = 10 * dual(tokens)
        mid = torch.arange(4, 12)
        b.k.bias[kv * D + mid] = 4.0
        for i in heads:
            at = (kv * R + i) * D
            b.q.weight[at : at + D] *= 0.2
            b.q.bias[at + pairs - 1] = 12.0
            b.q.bias[at + mid] = 4.0

    def carry(
        b: Block, kv: int, reads: list[Tensor], heads: tuple[int, ...], into: list[str], gain: float = 0.6
    ) -> None:
        """Values of a group, and where its heads put them ("": nowhere; "own": the identity)."""
        b.v.weight[kv * D : (kv + 1) * D] = 0
        at = 0
        spans = []
        for read in reads:
            n = min(len(read), D - at)
            b.v.weight[kv * D + at : kv * D + at + n] = 0.5 * read[:n]
            spans.append((at, n))
            at += n
        for i in heads:
            first = (kv * R + i) * D
            b.o.weight[:, first : first + D] = 0
            for (at, n), name in zip(spans, into, strict=True):
                place = slice(0, n) if name == "own" else slice(slot(name).start, slot(name).start + n)
                b.o.weight[place, first + at : first + at + n] = gain * torch.eye(n)

    def dual(tokens: list[int]) -> Tensor:
        """What reads 1 at these tokens, and about 0 at others."""
        return torch.linalg.pinv(e[tokens, :own]) @ torch.ones(len(tokens))

    def prefer(b: Block, kv: int, read: Tensor) -> None:
        """Keys of a group at which `read` (over the stream) is more count more, or less if it is negative."""
        b.k.weight[kv * D + D - 1] = 4 * read
        for i in range(R):
            at = (kv * R + i) * D
            b.q.weight[at + D - 1] = 0
            b.q.bias[at + D - 1] = 6.0

    def at_token(tokens: list[int]) -> Tensor:
        read = torch.zeros(s.width)
        read[:own] = dual(tokens)
        return read

    def tell(b: Block, kv: int, read: Tensor, gain: float) -> None:
        """What `read` finds where the group's first head looks goes into the one number that says "this holds"."""
        b.v.weight[kv * D + D - 2] = 0.5 * read
        b.o.weight[holds, kv * R * D + D - 2] = gain

    def match(b: Block, kv: int, key: Tensor, queries: tuple[Tensor, ...], sharp: float = 2.2) -> None:
        b.k.weight[kv * D + slow] = sharp * key
        for i, query in enumerate(queries):
            b.q.weight[(kv * R + i) * D + slow] = sharp * query

    identity = torch.zeros(own, s.width)
    identity[:, :own] = torch.eye(own)

    def answer(b: Block) -> None:
        """The topic of a question, or the word before "is", finds what it is said of; and a word goes on."""
        match(b, 0, reader(("B", 1.0)), (reader(("S", 1.0)), reader(("A", 1.0))), 3.0)
        # where an erratum ends nothing but what it carries is to be read
        carry(b, 0, [without([*stops, *ends, *dots])], (0, 1), ["own"], 0.6)
        louder = torch.zeros(s.width)
        louder[holds] = heard
        prefer(b, 0, louder - at_token(stops) - 0.5 * at_token(turns))
        match(b, 1, reader(("A", 1.0)), (word, word))
        carry(b, 1, [identity], (0, 1), ["own"], 0.35)

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
            gather(b)
        elif layer == 1:
            look_back(b, 0, (1, 2), word, ("A", "B"), torch.eye(SIZE))
            look_back(b, 1, (3, 5), word, ("M", "Y"), torch.eye(SIZE))
        elif layer == 2:
            nearest(b, 0, (0,), equals)
            carry(b, 0, [reader(("A", 1.0))], (0,), ["F"])
            look_back(b, 1, (6, 7), word, ("S", "S"), torch.eye(SIZE), (0.6, 0.2))
        elif layer == 3:
            nearest(b, 0, (0,), [*thens, *ifs])
            carry(b, 0, [condition], (0,), ["P"])
            match(b, 1, reader(("F", 1.0)), (reader(("F", 1.0)), condition))
            prefer(b, 1, at_token(ends) - 0.3 * after(ends[0]))
            carry(b, 1, [reader((name, 1.0)) for name in "AMY"], (0,), ["Q", "R", "T"])
        elif layer == 4:
            match(b, 0, condition, (reader(("P", 1.0)), condition))
            prefer(b, 0, NOWHERE * at_token(turns) - 2.5 * at_token([*thens, *ifs]) - after(equals[0]))
            carry(b, 0, [identity], (1,), ["own"], 0.35)
            b.o.weight[:, :D] = 0  # its first head says whether a condition holds, and nothing else
            tell(b, 0, at_token(ends), held)
            match(b, 1, reader(("P", 1.0)), (condition, condition))
            prefer(b, 1, after(equals[0]) + NOWHERE * at_token(turns))
            carry(b, 1, [reader(("B", 1.0)), identity[: D - 2 - SIZE]], (0,), ["B", "own"], 0.9)
            tell(b, 1, after(equals[0]), said)
        else:
            answer(b)
