"""A start from which look-ups over words of several pieces are learned in minutes. Everything stays trainable.

The stream is the token's own identity (what the slots leave), a flag for pieces that go on with a word, slots of 22
numbers, and some single numbers. A slot holds the code of a word: 16 numbers that tell words apart, 5 that say how much
a number is (of two digits; a year; hundreds, tens, units), and one that says that it is a number.

    C  the piece before, at a piece that goes on with a word: with the own identity, the code of the word so far
    A  B  the word code 1 and 2 tokens back. After a word A is the word, whatever its length; at the first piece of an
       outcome B is its topic, and at the first piece of a corrected value its field
    F  the A of the nearest "is" or ":" before: after a value, its field. At the end of a sentence that says nothing of
       a field ("This replaces the earlier date.") it is none
    P  the A and F of the nearest "then" (or "If") before: at the first piece of an outcome, its condition
    S  the word code 6 and 7 back: where an answer begins, the topic of the question
    month, year   of a date that ends here, 3 and 5 back; its day is in A
    number, ended   1 right after a number, at a "then", a full stop or the end of a line, and at a full stop alone
    else   1 after a "then", -1 after an "otherwise"
    V  the date or amount at the end of the line of the same field
    L  the date or amount of the nearest limit on the same field
    c  where a limit is, whether V is on its right side; where an erratum ends, whether its value is on the right side
       of L
    holds  says "this holds" of an outcome

Layer 4 matches the condition of an outcome with field lines while the text is read, or takes c from its limit, and says
where it holds; an erratum finds the outcome of its value there, and says it louder. Layers 5 and 6 find what is said of
a topic (B), in rule lines and after errata alike, and prefer a little what holds. That is a note, and the start has it:
README.md says what is owed for that. A head that finds nothing looks at the start of a turn, where there is nothing to
carry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Block, Tiny, orthogonal

SIZE = 22
WORD = 16  # of these, those that tell words apart; the others are NUMBERS
NUMBERS = ["two", "year", "hundreds", "tens", "units", "number"]
NAMES = ["C", "A", "B", "F", "P", "S"]
SINGLE = ["month", "year", "number", "ended", "else", "c", "c here", "holds"]
PARTS = ["day", "month", "year", "hundreds", "tens", "units", "there"]  # of V and L
FAST, SLOW = 12, 11  # rotary pairs for distances, and for matches
NOWHERE = 1.35  # how strongly a head that finds no match looks at the start of a turn instead
OF_FIELD = 0.85  # how much of a condition its field is, beside its value
HELD, SAID = 0.8, 1.0  # how loudly a head says that a condition holds: in a rule, and in an erratum
HEARD = 0.15  # how strongly answers prefer what is said to hold: about one nat
LOUD = 2.5  # the length of the largest number's code
# As measured before any step: what the slot A holds of a number, and what "there" and "else" read.
COPIED, THERE, ELSE = 1.0, 1.1, 0.7
AGAIN = {"V": 0.9, "L": 0.83}  # what a register is copied with, so that it holds as much as is compared with it
EVEN = 22.0  # the square of the length of every number's embedding: what is copied of a token depends on its length
COLON = 0.87  # where a ":" is, less is in the stream than where an "is" is, so the norm makes more of it
CERTAIN = 0.01  # how loudly a comparison is said


@dataclass(frozen=True)
class Marks:
    """Token ids that the start knows.

    `families`: forms of a word with and without a blank, which share most of their embedding; `going_on`: pieces
    without a blank. `two`, `years`, `amounts`: ids of numbers by their value.
    """

    families: list[list[int]]
    going_on: list[int]
    two: dict[int, int]
    years: list[tuple[int, int]]
    amounts: list[tuple[int, int]]
    equals: list[int]  # "is" and ":"
    thens: list[int]
    others: list[int]  # "otherwise"
    ifs: list[int]
    ends: list[int]  # of lines
    turns: list[int]  # what begins a turn
    stops: list[int]  # what ends one
    closing: list[int]  # "." and ","
    relations: list[int]  # "before", "over", "now": they follow "is" and are no outcome
    opens: list[int]  # a sentence that says nothing of a field
    dashes: list[int]  # within a date
    common: list[int]  # other tokens that are everywhere

    @property
    def frequent(self) -> list[int]:
        """All of these but words and numbers."""
        parts = (
            self.equals,
            self.thens,
            self.others,
            self.ifs,
            self.ends,
            self.turns,
            self.stops,
            self.closing,
            self.relations,
        )
        return sorted({*self.common, *(token for part in parts for token in part)})


def numbers_of(marks: Marks) -> dict[int, Tensor]:
    """For each token that is a number, NUMBERS of it, from -1 to 1."""
    found: dict[int, Tensor] = {}

    def put(token: int, **parts: float) -> None:
        parts["number"] = 0.5
        found[token] = torch.tensor([parts.get(name, 0.0) for name in NUMBERS])

    for n, token in marks.two.items():
        put(token, two=max(-1.0, min(1.0, (n - 12) / 19)))
    for n, token in marks.years:
        put(token, year=max(-1.0, min(1.0, (n - 2026) / 5)))
    for n, token in marks.amounts:
        digits = [(n // k % 10 - 4.5) / 4.5 for k in (100, 10, 1)]
        put(token, hundreds=digits[0], tens=digits[1], units=digits[2])
    return found


@torch.no_grad()
def start(model: Tiny, marks: Marks, seed: int, note: bool = True) -> None:
    """Set all weights. Without `note`, a control, nothing says "this holds" and nothing listens to it."""
    s = model.shape
    g = torch.Generator().manual_seed(seed)
    D, pairs, R = s.head, s.head // 2, s.heads // s.kv_heads
    own = s.width - 1 - SIZE * len(NAMES) - 2 * len(PARTS) - len(SINGLE)
    flag = own
    held, said, heard = (HELD, SAID, HEARD) if note else (0.0, 0.0, 0.0)
    slow = torch.cat([torch.arange(pairs - SLOW, pairs), torch.arange(2 * pairs - SLOW, 2 * pairs)])
    slow, spare = slow[:WORD], slow[WORD:].tolist()  # what matches leave, for preferences

    def rand(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    def slot(name: str) -> slice:
        at = own + 1 + SIZE * NAMES.index(name)
        return slice(at, at + SIZE)

    def register(name: str) -> slice:
        at = own + 1 + SIZE * len(NAMES) + len(PARTS) * ("V", "L").index(name)
        return slice(at, at + len(PARTS))

    def single(name: str) -> int:
        return s.width - len(SINGLE) + SINGLE.index(name)

    holds = single("holds")
    shrink = orthogonal(SIZE, own, g)
    e = model.embed
    e[:, :own] = 0.5 * rand(s.vocab, own)
    e[:, own:] = 0
    for family in marks.families:
        shared = 0.5 * rand(own)
        for i in family:
            e[i, :own] = 0.97 * shared + 0.24 * e[i, :own]
    code = e[:, :own] @ shrink.T
    new = torch.zeros_like(code)
    new[:, :WORD] = 0.5 * SIZE**0.5 * F.normalize(code[:, :WORD], dim=1)  # of one length
    numbers = numbers_of(marks)
    for i, parts in numbers.items():
        new[i, :WORD] = 0  # nothing is matched by it, and in a condition it would be noise beside the field
        new[i, WORD:] = LOUD * parts
    new[marks.turns] = 0  # nothing to carry
    e[:, :own] += (new - code) @ shrink
    told = sorted(numbers)
    coded = e[told, :own] @ shrink.T @ shrink
    rest = F.normalize(e[told, :own] - coded, dim=1)
    e[told, :own] = coded + rest * (EVEN - coded.square().sum(1, keepdim=True)).sqrt()
    e[:, flag] = -0.5
    e[torch.tensor(marks.going_on), flag] = 0.5
    model.norm.fill_(0.1)

    turn = torch.zeros(SIZE, SIZE)  # tells the piece before from the piece itself, and a field from a value
    turn[:WORD, :WORD] = orthogonal(WORD, WORD, g)

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

    condition = reader(("A", 1.0), ("F", OF_FIELD * turn))

    def without(tokens: list[int]) -> Tensor:
        """What reads the identity of tokens, and nothing at these."""
        silent = e[tokens, :own]
        read = torch.zeros(own, s.width)
        read[:, :own] = torch.eye(own) - torch.linalg.pinv(silent) @ silent
        return read

    def dual(tokens: list[int]) -> Tensor:
        """What reads 1 at these tokens, 0 at other frequent ones, and about 0 at the rest."""
        wanted = torch.tensor([float(token in tokens) for token in marks.frequent])
        return torch.linalg.pinv(e[marks.frequent, :own]) @ wanted

    def at_token(tokens: list[int]) -> Tensor:
        read = torch.zeros(s.width)
        read[:own] = dual(tokens)
        return read

    def only(name: str) -> Tensor:
        """What reads one single number."""
        read = torch.zeros(s.width)
        read[single(name)] = 1.0
        return read

    # The date or amount that ends at the token before, as PARTS.
    here = torch.zeros(len(PARTS), s.width)
    here[0, slot("A").start + WORD] = 1.0
    here[1] = only("month")
    here[2] = only("year")
    here[3:6, slot("A").start + WORD + 2 : slot("A").start + WORD + 5] = torch.eye(3)
    here[6] = at_token(marks.ends) + at_token(marks.thens)

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
        into: tuple[slice | int, ...],
        how: tuple[Tensor, ...],
        gains: tuple[float, ...] = (0.6, 0.6),
    ) -> None:
        """Heads that look so many tokens back, and put what they read there where it belongs, through `how`."""
        quiet(b.k.weight, kv * D)
        b.k.bias[kv * D : kv * D + FAST] = 7.0
        b.v.weight[kv * D : (kv + 1) * D] = 0
        b.v.weight[kv * D : kv * D + len(read)] = 0.5 * read
        for i, (distance, place, gain) in enumerate(zip(distances, into, gains, strict=False)):
            at = (kv * R + i) * D
            quiet(b.q.weight, at)
            b.q.bias[at + both] = 7.0 * phase(distance)
            b.o.weight[:, at : at + D] = 0
            b.o.weight[place, at : at + len(read)] = gain * how[i]

    def gather(b: Block) -> None:
        """A piece that goes on with a word looks one back, any other token at the start of a turn, which is nothing."""
        look_back(b, 0, (1,), shrink @ without([*marks.ends, *marks.turns]), (slot("C"),), (turn,))
        b.k.weight[D - 1] = 4 * at_token(marks.turns)
        b.q.bias[both] = 7.0 * phase(1.0) / 2
        b.q.weight[both] = 0
        b.q.weight[both, flag] = 7.0 * phase(1.0) / 2 / 2.0  # the norm makes about 2 of a flag of 0.5
        b.q.weight[D - 1] = 0
        b.q.weight[D - 1, flag] = -12.0 / 2 / 2.0
        b.q.bias[D - 1] = 12.0 / 2

    mid = torch.arange(5, 18)  # slow enough that no far position looks near again within a text

    def nearest(b: Block, kv: int, head: int, read: Tensor, dim: int = pairs - 1) -> None:
        """A head of the group that looks at the nearest position at which `read` is 1. It uses one dimension of the
        keys, and those of nearness, which heads that share them must not read."""
        b.k.weight[kv * D + mid] = 0
        b.k.bias[kv * D + mid] = 4.0
        b.k.weight[kv * D + dim] = 12 * read
        for i in range(R):
            at = (kv * R + i) * D
            if i == head:
                b.q.weight[at : at + D] *= 0.2
                b.q.weight[at + slow] = 0
                b.q.bias[at + mid] = 4.0
            b.q.weight[at + mid] = 0
            b.q.weight[at + dim] = 0
            b.q.bias[at + dim] = 12.0 * (i == head)

    def carry(
        b: Block, kv: int, reads: list[Tensor], heads: tuple[int, ...], into: list[slice], gain: float = 0.6
    ) -> None:
        """Values of a group, and where its heads put them."""
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
            for (at, n), place in zip(spans, into, strict=True):
                b.o.weight[place.start : place.start + n, first + at : first + at + n] = gain * torch.eye(n)

    def prefer(b: Block, kv: int, read: Tensor, dim: int = D - 1, heads: tuple[int, ...] = (0, 1)) -> None:
        """Keys of a group at which `read` (over the stream) is more count more, or less if it is negative."""
        b.k.weight[kv * D + dim] = 4 * read
        b.k.bias[kv * D + dim] = 0
        for i in range(R):
            at = (kv * R + i) * D
            b.q.weight[at + dim] = 0
            b.q.bias[at + dim] = 6.0 * (i in heads)

    def tell(b: Block, head: int, dim: int, read: Tensor, place: int, gain: float) -> None:
        """What `read` finds where a head looks, by one dimension of its values, goes into one number."""
        b.v.weight[head // R * D + dim] = 0.5 * read
        b.o.weight[place, head * D + dim] = gain

    def match(b: Block, kv: int, key: Tensor, queries: tuple[Tensor, ...], sharp: float = 2.2) -> None:
        b.k.weight[kv * D + slow] = sharp * key[:WORD]
        for i, query in enumerate(queries):
            b.q.weight[(kv * R + i) * D + slow] = sharp * query[:WORD]

    def compare(b: Block, unit: int, where: Tensor, there: Tensor, difference: Tensor) -> int:
        """Hidden units that put the sign of a difference of two dates or amounts into c, the larger parts first.

        They are silent but where `where` reads 1, a number has just ended, and `there` reads 1. Returns the next free
        unit.
        """
        edge = 6.0
        steps = (2 / 19, 2 / 19, 1 / 5, 2 / 9, 2 / 9, 2 / 9)  # between neighbours
        for part, (step, weight) in enumerate(zip(steps, (1, 2, 4, 4, 2, 1), strict=True)):
            steep = 2 * edge / (step * LOUD * COPIED)
            for sign in (1.0, -1.0):
                for side in (1.0, -1.0):
                    gate = sign * steep * difference[part] + side * edge * where
                    b.gate.weight[unit] = gate - 40.0 * (where - there) - 25.0 * (where - only("number"))
                    b.up.weight[unit] = where
                    b.down.weight[single("c"), unit] = sign * side * weight * CERTAIN / edge
                    unit += 1
        return unit

    def count(b: Block, unit: int, where: Tensor, name: str) -> int:
        """Two hidden units that say 1 where `where` reads 1 and a number has just ended, 0 elsewhere."""
        number = torch.zeros(s.width)
        number[slot("A").stop - 1] = 1.0
        for side, less in ((1, 0.0), (-1, 0.5)):
            b.gate.weight[unit] = 60.0 * (number - less * where)
            b.up.weight[unit] = where
            b.down.weight[single(name), unit] = side * 0.0062
            unit += 1
        return unit

    def rekey(b: Block, unit: int, where: Tensor) -> int:
        """Hidden units that put the field (F) into B, in place of what is there, at a token where `where` reads 1."""
        for i in range(WORD):
            b.gate.weight[unit] = 20.0 * where
            b.gate.weight[unit, flag] = 20.0
            b.up.weight[unit, slot("F").start + i] = 1.25
            b.up.weight[unit, slot("B").start + i] = -1.0
            b.down.weight[slot("B").start + i, unit] = 0.0053
            unit += 1
        return unit

    def judge(b: Block) -> None:
        """Hidden units that say "this holds" of an outcome: the sign of c, turned after an "otherwise"."""
        edge = 5.0
        for unit, (sign, side) in enumerate(((1, 1), (1, -1), (-1, -1), (-1, 1))):
            b.gate.weight[unit] = sign * 60.0 * only("c here") + side * edge / ELSE * only("else")
            b.up.weight[unit] = after(marks.equals[0])
            b.down.weight[holds, unit] = side * sign * held * 0.025

    identity = torch.zeros(own, s.width)
    identity[:, :own] = torch.eye(own)
    place = slice(0, own)

    def answer(b: Block) -> None:
        """The topic of a question, or the word before "is", finds what it is said of; and a word goes on."""
        match(b, 0, reader(("B", 1.0)), (reader(("S", 1.0)), reader(("A", 1.0))), 3.0)
        # where an erratum ends nothing but what it carries is to be read
        carry(b, 0, [without([*marks.turns, *marks.stops, *marks.ends, *marks.closing])], (0, 1), [place], 0.6)
        louder = torch.zeros(s.width)
        louder[holds] = heard
        prefer(b, 0, louder - at_token(marks.stops) - 0.5 * at_token(marks.turns))
        prefer(b, 0, 0.15 * after(marks.equals[1]), spare[0], (1,))  # what a field is, its line says
        prefer(b, 0, at_token(marks.turns), spare[1], (1,))
        b.q.bias[D + spare[1]] = 20.0
        match(b, 1, reader(("A", 1.0)), (word, word))
        carry(b, 1, [identity], (0, 1), [place], 0.35)

    for layer, b in enumerate(model.blocks):
        assert isinstance(b, Block)
        for lin in (b.q, b.k, b.v):
            lin.weight.copy_(rand(*lin.weight.shape) * 0.3 * s.width**-0.5)
            lin.bias.zero_()
        b.o.weight.copy_(rand(*b.o.weight.shape) * 0.005)
        b.o.weight[own + 1 + SIZE * len(NAMES) :] = 0
        b.gate.weight.copy_(rand(*b.gate.weight.shape) * s.width**-0.5)
        b.up.weight.copy_(rand(*b.up.weight.shape) * s.width**-0.5)
        b.down.weight.zero_()
        if layer == 0:
            gather(b)
        elif layer == 1:
            look_back(b, 0, (1, 2), word, (slot("A"), slot("B")), (torch.eye(SIZE), torch.eye(SIZE)))
            look_back(
                b,
                1,
                (3, 5),
                word[WORD : WORD + 2],
                (slice(single("month"), single("month") + 1), slice(single("year"), single("year") + 1)),
                (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])),
            )
        elif layer == 2:
            b.k.weight[:D] = 0
            others = at_token([*marks.equals[1:], *marks.opens])
            nearest(b, 0, 0, at_token(marks.equals[:1]) + COLON * others)
            nearest(b, 0, 1, at_token([*marks.thens, *marks.others, *marks.ifs]), spare[0])
            b.q.bias[mid] = 6.0  # a date is long: its field is further away
            carry(b, 0, [reader(("A", 1.0))], (0,), [slot("F")])
            b.o.weight[:, D : 2 * D] = 0
            tell(b, 1, D - 2, at_token(marks.thens) - at_token(marks.others), single("else"), 0.6)
            eye = torch.eye(SIZE)
            look_back(b, 1, (6, 7), word, (slot("S"), slot("S")), (eye, eye), (0.6, 0.2))
            unit = count(b, 0, at_token([*marks.thens, *marks.closing[:1], *marks.ends]), "number")
            unit = count(b, unit, at_token(marks.closing[:1]), "ended")
            rekey(b, unit, after(marks.relations[2]))
        elif layer == 3:
            b.k.weight[:D] = 0
            nearest(b, 0, 0, at_token([*marks.thens, *marks.ifs]))
            carry(b, 0, [condition], (0,), [slot("P")])
            field = reader(("F", 1.0))
            match(b, 1, field, (field, field), 3.0)
            # A line without a number that follows the fields has the last of them for its field, too.
            prefer(b, 1, at_token(marks.ends) + only("number") - after(marks.ends[0]), D - 1, (0,))
            prefer(b, 1, 2.0 * at_token(marks.thens), spare[0], (1,))
            prefer(b, 1, NOWHERE * at_token(marks.turns), spare[1])
            carry(b, 1, [here], (0,), [register("V")], AGAIN["V"])
            first = (R + 1) * D
            b.o.weight[:, first : first + D] = 0
            b.o.weight[register("L"), first : first + len(PARTS)] = AGAIN["L"] * torch.eye(len(PARTS))
            kept = {name: torch.eye(s.width)[register(name)] for name in ("V", "L")}
            turned = torch.tensor([1.0, 1, 1, -1, -1, -1])[:, None]  # before a date, over an amount
            unit = compare(b, 0, at_token(marks.thens), kept["V"][6] / THERE, turned * (here[:6] - kept["V"][:6]))
            compare(b, unit, at_token(marks.closing[:1]), kept["L"][6] / THERE, turned * (kept["L"][:6] - here[:6]))
        elif layer == 4:
            match(b, 0, condition, (reader(("P", 1.0)),), 3.4)
            prefer(
                b,
                0,
                2.5 * at_token(marks.turns)
                + 0.6 * at_token(marks.ends)
                - 2.5 * at_token([*marks.thens, *marks.ifs])
                - after(marks.equals[0]),
                D - 1,
                (0,),
            )
            nearest(b, 0, 1, at_token(marks.thens), spare[0])
            b.v.weight[:D] = 0
            b.o.weight[:, : 2 * D] = 0  # its heads say whether a condition holds, and nothing else
            tell(b, 0, D - 2, at_token(marks.ends), holds, held)
            tell(b, 1, D - 3, only("c"), single("c here"), 1.0)
            match(b, 1, reader(("P", 1.0)), (condition, 2.4 * reader(("F", turn))), 2.7)
            first_piece = 1.5 * after(marks.equals[0])
            prefer(b, 1, first_piece + 1.1 * at_token(marks.turns) - 0.7 * at_token(marks.relations))
            # Where a value has just ended, errata find something; nothing else does. The first head: the outcome of a
            # value. The second: of a number, the outcome on the side of the limit that c says, not within a date.
            prefer(b, 1, at_token(marks.turns), spare[0])
            b.q.bias[R * D + spare[0]] = 32.0
            b.q.weight[R * D + spare[0]] = -13.5 * at_token(marks.closing)
            b.q.bias[(R + 1) * D + spare[0]] = 30.0
            b.q.weight[(R + 1) * D + spare[0]] = -22.0 * only("ended")
            b.k.weight[D + spare[1]] = 6 * only("else") / ELSE
            b.q.weight[(R + 1) * D + spare[1]] = 20 * only("c")
            b.k.weight[D + spare[2]] = 4 * after(marks.equals[0])
            b.k.weight[D + spare[2], slot("P").stop - 1] += 8.0  # its condition is a number
            b.q.weight[(R + 1) * D + spare[2]] = 3.5 / THERE * torch.eye(s.width)[register("L")][6]
            for dim in spare[1:3]:
                b.q.weight[R * D + dim] = 0
            carry(b, 1, [reader(("B", 1.0)), without(marks.turns)[: D - 2 - SIZE]], (0, 1), [slot("B"), place], 1.8)
            for head in (R, R + 1):
                tell(b, head, D - 2, after(marks.equals[0]), holds, said)
            judge(b)
        else:
            answer(b)
