"""A start from which look-ups over words of several pieces are learned in minutes.

    C  the piece before, at a piece that goes on with a word: with the own identity, the code of the word so far. At a
       "then", from layer 3 on: the value of the field that its condition asks for, as the latest line of it has it;
       at the first piece of an outcome: how that field begins; where a thought begins: the topic, then the field
    A  B  the word code 1 and 2 tokens back. After a word A is the word, whatever its length; at the first piece of an
       outcome B is its topic, and at the first piece of a value its field
    F  the A of the nearest "is" or ":" before: after a value, its field. After "If" and "This" it is none
    P  the A and F of the nearest "then" before: at the first piece of an outcome, its condition
    S  the word code 6 and 7 back: where an answer begins, the topic of the question
    stated, corrected, after is, closed   1 right after ":", "now", "is", and after a full stop or a line's end
    month, year   of a date that ends here, 3 and 5 back; its day is in A
    number, ended   1 right after a number, at a "then", a full stop or the end of a line, and not at a "then"
    listed  above 0 where ":" is nearer than "is", below it where "is" is
    told    1 where the line of a field ends
    asked   1 where the field of a condition begins, two after "If"
    else    1 after a "then", -1 after an "otherwise", 0 after an "If"
    outcome 1 at the first piece of an outcome
    V  the date or amount of the latest line of the same field, at a "then"
    L  the date or amount of the nearest limit on the same field
    c  where a limit is, whether V is on its right side; where a value ends, whether it is on the right side of L
    same    where a condition ends, above 0 if its value is that of the field (C), else below
    holds   says "this holds" of an outcome

Layer 3 looks a condition's field up while the text is read, and layer 4 says at its outcome whether it holds. Where a
value ends in an erratum, a thought, or a line of fields below the rules, layer 4 finds the outcome of that value and
carries it there. The layers after it find what is said of a topic (B), in rule lines and after errata alike, prefer
what holds, and of several what is said last. That is a note, and the start has it: README.md says what is owed for
that. A head that finds nothing looks at the start of a turn, where there is nothing to carry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.model import Block, Tiny
from training.tiny.marks import Marks
from training.tiny.wiring import LOUD, PARTS, PUT, SIZE, WORD, Units, Wiring

OF_FIELD = 0.85  # how much of a condition its field is, beside its value
HELD, SAID = 0.8, 1.0  # how loudly a head says that a condition holds: in a rule, and where a value ends
HEARD = 0.3  # how strongly answers prefer what is said to hold: about two nats
LATEST, LATEST_LINE, LATEST_LIMIT = 2.0, 5.0, 1.0  # how much what is said last counts: of a topic, a field, a limit
# How strongly a head looks at tokens that only end the reach of others, beside those it looks for. The start of a turn
# has less in the stream than other tokens, so the norm makes more of it, and a ":" less than an "is".
IF, IF_FIELD, OTHERWISE, TURN, TURN_THEN, COLON, CUE = 0.8, 0.65, 1.07, 0.55, 0.52, 0.87, 0.8
# As measured before any step: what the slot A holds of a number, and what "there" and "else" read.
COPIED, THERE, ELSE = 1.0, 1.1, 0.7
# What a register is copied with, so that it holds as much as is compared with it: of a date, of an amount, and "there".
AGAIN = {"V": (0.87, 0.92, 0.97), "L": (0.845, 0.925, 0.95)}
ASKED = 1.5  # how loudly the parts of what a thought says first are carried
CERTAIN = 0.009  # how loudly a comparison is said
APART, ALLOWED = 0.013, 3.5  # how loudly two words' distance is said, and how far apart the same word may be


@torch.no_grad()
def start(model: Tiny, marks: Marks, seed: int) -> None:
    """Set all weights."""
    wiring = Wiring(model, marks, seed)
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        wiring.begin(block)
        if layer == 0:
            gather(wiring, block)
        elif layer == 1:
            look_around(wiring, block)
        elif layer == 2:
            find_fields(wiring, block)
        elif layer == 3:
            look_up(wiring, block)
        elif layer == 4:
            conclude(wiring, block)
        else:
            answer(wiring, block)
            if layer < 7:
                begin_thought(wiring, block, find=layer == 5)


def gather(w: Wiring, b: Block) -> None:
    """Layer 0. A piece that goes on with a word looks one back, any other token at the start of a turn: at nothing."""
    marks, dim = w.marks, w.last
    both = torch.cat([w.near, w.near + w.pairs])
    w.look_back(b, 0, (1,), w.shrink @ w.without(*marks.ends, *marks.turns), (w.slot("C"),), (w.turn,))
    b.k.weight[dim] = 4 * w.at(*marks.turns)
    b.q.bias[both] = 7.0 * w.phase(1.0) / 2
    b.q.weight[both] = 0
    b.q.weight[both, w.flag] = 7.0 * w.phase(1.0) / 2 / 2.0  # the norm makes about 2 of a flag of 0.5
    b.q.weight[dim] = 0
    b.q.weight[dim, w.flag] = -12.0 / 2 / 2.0
    b.q.bias[dim] = 12.0 / 2


def look_around(w: Wiring, b: Block) -> None:
    """Layer 1: what is 1, 2, 3 and 5 back."""
    marks, vision = w.marks, torch.eye(SIZE)
    w.look_back(b, 0, (1, 2), w.word(), (w.slot("A"), w.slot("B")), (vision, vision))
    told = {"stated": marks.lists, "corrected": marks.now, "closed": [*marks.full, *marks.ends], "after is": marks.says}
    for dim, (name, tokens) in enumerate(told.items(), SIZE):
        w.tell(b, 0, dim, w.at(*tokens), name, 0.8)
    w.tell(b, 1, SIZE + len(told), w.at(*marks.ifs), "asked", 0.8)
    parts = torch.eye(2)[:, None]
    w.look_back(b, 1, (3, 5), w.word()[WORD : WORD + 2], (w.single("month"), w.single("year")), parts)


def find_fields(w: Wiring, b: Block) -> None:
    """Layer 2: whose value this is, whether it is an outcome, and which topic a question has."""
    marks, vision = w.marks, torch.eye(SIZE)
    b.k.weight[: w.head] = 0
    ended = w.at(*marks.lists) + IF_FIELD * w.at(*marks.opens, *marks.ifs) + TURN * w.at(*marks.turns)
    w.nearest(b, 0, 0, w.at(*marks.says) + COLON * ended, w.pairs - 1)
    w.nearest(b, 0, 1, w.at(*marks.thens) + OTHERWISE * w.at(*marks.others) + IF * w.at(*marks.ifs), w.spare[0])
    b.q.bias[w.mid] = 6.0  # a date is long: its field is further away
    b.q.bias[w.head + w.mid] = 10.0  # an "otherwise" is near, and its "then" not much further away
    w.carry(b, 0, [w.of("A")], (0,), [w.slot("F")], PUT)
    b.o.weight[:, w.head : 2 * w.head] = 0
    w.tell(b, 1, SIZE, w.at(*marks.thens) - w.at(*marks.others), "else", PUT)
    w.tell(b, 0, SIZE + 1, w.at(*marks.lists) - w.at(*marks.says), "listed", PUT)
    w.look_back(b, 1, (6, 7), w.word(), (w.slot("S"), w.slot("S")), (vision, vision), (0.6, 0.45))
    units = Units(b)
    ends = w.at(*marks.full, *marks.commas, *marks.ends, *marks.stops)
    count(w, units, w.at(*marks.thens) + ends, "number", 0.0056)
    count(w, units, ends, "ended", 0.0062)
    rekey(w, units, w.only("corrected"))
    for side in (1.0, -1.0):
        # Alike for all, by the difference of two: an outcome that is louder would be found before others.
        for edge, sign in ((18.0, 1.0), (28.0, -1.0)):
            gate = side * 60.0 * w.only("else") - edge * w.only("after is")
            units.add(gate, w.only("after is"), w.single("outcome"), sign * 0.0125)


def count(w: Wiring, units: Units, where: Tensor, name: str, gain: float) -> None:
    """1 where `where` reads 1 and a number has just ended, 0 elsewhere."""
    number = torch.zeros(w.shape.width)
    number[w.number("A", "number")] = 1.0
    for side, less in ((1.0, 0.0), (-1.0, 0.5)):
        units.add(60.0 * (number - less * where), where, w.single(name), side * gain)


def rekey(w: Wiring, units: Units, where: Tensor) -> None:
    """The field (F) in place of what is in B, at a token where `where` reads 1."""
    field, key = w.of("F"), w.of("B")
    for i in range(WORD):
        place = w.slot("B").start + i
        for share, sign in ((1.0, 1.0), (0.5, -2.0), (0.0, 1.0)):  # nothing where a word goes on, whatever `where` is
            gate = 40.0 * share * where
            gate[w.flag] = 50.0
            units.add(gate, 2.2 * field[i] - key[i], slice(place, place + 1), 0.0065 * sign)


def look_up(w: Wiring, b: Block) -> None:
    """Layer 3: a "then" finds the latest line of its field, and a value that ends the nearest limit on its field."""
    marks, group = w.marks, w.group
    b.k.weight[: w.head] = 0
    w.nearest(b, 0, 0, w.at(*marks.thens) + IF * w.at(*marks.ifs) + TURN_THEN * w.at(*marks.turns), w.pairs - 1)
    w.carry(b, 0, [condition(w)], (0,), [w.slot("P")], PUT)
    remember_field(w, b)
    field = w.of("F")
    w.match(b, 1, field, (field, field), 3.0, LATEST_LINE)
    # Where a line ends that says nothing of a field, after a full stop, the field of the line before is still in F.
    w.prefer(b, 1, 4.0 * (w.at(*marks.ends) - w.only("closed")), w.last, (group,))
    w.prefer(b, 1, 3.0 * w.at(*marks.thens), w.spare[0], (group + 1,))
    b.q.bias[(group + 1) * w.head + w.late] = LATEST_LIMIT  # or what follows it drowns a limit that is far
    w.prefer(b, 1, 1.35 * w.at(*marks.turns), w.spare[1])
    w.ask(b, group, w.spare[1], 30.0, -11.0 * w.at(*marks.thens))  # only at a "then" it looks for anything
    here = number_here(w)
    w.carry(b, 1, [here, w.of("A")[:WORD]], (group,), [w.register("V"), w.slot("C", WORD)], 1.0)
    b.o.weight[:, (group + 1) * w.head : (group + 2) * w.head] = 0
    for head, (name, (date, amount, there)) in enumerate(AGAIN.items(), group):
        gains = torch.tensor([date] * 3 + [amount] * 3 + [there])
        b.o.weight[w.register(name), head * w.head : head * w.head + len(PARTS)] = gains.diag()
    V, L = w.kept("V"), w.kept("L")
    turned = torch.tensor([1.0, 1, 1, -1, -1, -1])[:, None]  # before a date, over an amount
    units = Units(b)
    compare(w, units, w.at(*marks.thens), V[6] / THERE, turned * (here[:6] - V[:6]))
    compare(
        w, units, w.at(*marks.full, *marks.commas, *marks.ends, *marks.stops), L[6] / THERE, turned * (L[:6] - here[:6])
    )
    tell_apart(w, units)
    units.add(30.0 * w.only("listed"), w.at(*marks.ends, *marks.stops) - w.only("closed"), w.single("told"), 0.0087)


def remember_field(w: Wiring, b: Block) -> None:
    """At an outcome: how the field of its condition begins, which a thought about its topic has to say first."""
    w.nearest(b, 0, 1, w.only("asked"), w.spare[0])
    w.only_at(b, 1, w.spare[1], w.only("outcome"))
    w.lift(b, 1, SIZE, w.identity()[:WORD], w.slot("C", WORD), PUT)


def condition(w: Wiring) -> Tensor:
    """What reads the value that has just ended and its field."""
    return w.of("A") + w.of("F", OF_FIELD * w.turn)


def number_here(w: Wiring) -> Tensor:
    """What reads the date or amount that ends at the token before, as PARTS."""
    here = torch.zeros(len(PARTS), w.shape.width)
    here[0, w.number("A", "two")] = 1.0
    here[1] = w.only("month")
    here[2] = w.only("year")
    for i, name in enumerate(("hundreds", "tens", "units"), 3):
        here[i, w.number("A", name)] = 1.0
    here[6] = w.at(*w.marks.ends, *w.marks.thens)
    return here


def compare(w: Wiring, units: Units, where: Tensor, there: Tensor, difference: Tensor) -> None:
    """The sign of a difference of two dates or amounts, as c, the larger parts first.

    Nothing but where `where` reads 1, a number has just ended, and `there` reads 1.
    """
    edge = 6.0
    silent = 40.0 * (where - there) + 12.0 * (where - w.only("number"))
    steps = (2 / 22, 2 / 22, 1 / 5, 2 / 9, 2 / 9, 2 / 9)  # between neighbours
    for part, (step, weight) in enumerate(zip(steps, (1, 2.5, 5, 5, 2.5, 1), strict=True)):
        steep = 2 * edge / (step * LOUD * COPIED)
        for sign in (1.0, -1.0):
            for side in (1.0, -1.0):
                gate = sign * steep * difference[part] + side * edge * where - silent
                units.add(gate, where, w.single("c"), sign * side * weight * CERTAIN / edge)


def tell_apart(w: Wiring, units: Units) -> None:
    """At a "then" after a word: how near its condition's value (A) is to that of the field (C), squares added."""
    apart = w.of("A")[:WORD] - w.of("C")[:WORD]
    for difference in apart:
        for sign in (1.0, -1.0):
            units.add(sign * difference, difference, w.single("same"), -sign * APART)
    then = w.at(*w.marks.thens)
    units.add(then, ALLOWED * (then - w.only("number")), w.single("same"), APART)


def conclude(w: Wiring, b: Block) -> None:
    """Layer 4: at an outcome, whether its condition holds; where a value ends, the outcome that it means."""
    marks, group = w.marks, w.group
    w.nearest(b, 0, 1, w.at(*marks.thens), w.spare[0])
    b.v.weight[: w.head] = 0
    b.o.weight[:, : group * w.head] = 0  # this group says whether a condition holds, and nothing else
    w.tell(b, 1, w.last - 2, w.only("c") + w.only("same"), "c here", 1.0)
    # Where a thought begins: which topic was asked about. It is one or two tokens before the "?", or if there is none
    # two before what asks for the thought.
    w.nearest(b, 0, 0, w.at(*marks.asks) + CUE * w.at(*marks.cues), w.spare[1])
    w.only_at(b, 0, w.spare[2], w.at(*marks.thoughts))
    w.lift(b, 0, 0, w.of("A")[:WORD] + w.of("B")[:WORD], w.slot("C", WORD), 0.5 * ASKED)
    word, number = group, group + 1  # of a word, its outcome; of a number, the outcome on the side of its limit
    w.match(b, 1, w.of("P"), (condition(w), w.of("F", 2.4 * w.turn)), 3.3)
    outcomes = 1.8 * w.only("outcome") - 2.0 * w.at(*marks.limits, *marks.now)
    w.prefer(b, 1, outcomes + 1.1 * w.at(*marks.turns), w.last)
    # Where a value has just ended they find something; nowhere else, and not within a date.
    shut, side, limit = w.spare[:3]
    w.prefer(b, 1, w.at(*marks.turns), shut)
    ends = w.at(*marks.full, *marks.commas) + 1.3 * w.only("told")
    w.ask(b, word, shut, 32.0, 12.0 * w.only("ended") - 11.0 * ends)
    w.ask(b, number, shut, 42.0, -32.0 * w.only("ended"))
    b.k.weight[w.head + side] = 6 * w.only("else") / ELSE
    w.ask(b, word, side, 0.0)
    w.ask(b, number, side, 0.0, 30 * w.only("c"))
    b.k.weight[w.head + limit] = 4 * w.only("outcome")
    b.k.weight[w.head + limit, w.number("P", "number")] += 8.0
    w.ask(b, word, limit, 0.0)
    w.ask(b, number, limit, 0.0, 3.5 / THERE * w.kept("L")[6])
    room = w.head - 2 - SIZE
    w.carry(b, 1, [w.of("B"), w.without(*marks.turns)[:room]], (word, number), [w.slot("B"), slice(0, room)], 1.8)
    for head in (word, number):
        w.tell(b, head, w.head - 2, w.only("outcome"), "holds", SAID)
    units, edge = Units(b), 5.0
    for sign, turned in ((1, 1), (1, -1), (-1, -1), (-1, 1)):  # the sign of "c here", turned after an "otherwise"
        gate = sign * 60.0 * w.only("c here") + turned * edge / ELSE * w.only("else")
        units.add(gate, w.only("outcome"), w.single("holds"), turned * sign * HELD * 0.05)


def answer(w: Wiring, b: Block) -> None:
    """The layers after it: a topic, or the word before "is", finds what is said of it; and a word goes on."""
    marks, own = w.marks, slice(0, w.own)
    w.match(b, 0, w.of("B"), (w.of("S"), w.of("A")), 3.0, LATEST)
    # Where an erratum ends nothing but what it carries is to be read.
    marked = w.without(*marks.turns, *marks.stops, *marks.ends, *marks.full, *marks.commas)
    w.carry(b, 0, [marked], (0, 1), [own], PUT)
    no_answer = w.at(*marks.stops, *marks.limits, *marks.now) + 0.5 * w.at(*marks.turns)
    w.prefer(b, 0, HEARD * w.only("holds") - no_answer, w.last)
    # What a field is, its line says, and an erratum louder; conditions only ask for it.
    w.prefer(b, 0, 2.0 * w.only("stated") + 4.0 * w.only("corrected"), w.spare[0])
    w.ask(b, 0, w.spare[0], 2.4)  # but a topic's outcome is wanted more often than a field's value
    # In the middle of a thought what it has just said counts, not what holds in the text.
    w.ask(b, 1, w.last, 0.0)
    b.q.bias[w.head + w.late] = 3 * LATEST
    w.prefer(b, 0, w.at(*marks.turns), w.spare[1], (1,))
    w.ask(b, 1, w.spare[1], 20.0)
    w.match(b, 1, w.of("A"), (w.word(), w.word()), 2.2)
    w.carry(b, 1, [w.identity()], w.heads(1), [own], 0.35)


def begin_thought(w: Wiring, b: Block, find: bool) -> None:
    """Where a thought begins: first find an outcome of its topic, which knows how its field begins; then that field."""
    w.match(b, 1, w.of("B") if find else w.identity()[:WORD], (w.of("C"),) * w.group, 3.0)
    w.prefer(b, 1, 5.0 * w.only("outcome" if find else "asked"), w.last)
    w.only_at(b, w.group, w.spare[0], w.at(*w.marks.thoughts))
    b.o.weight[:, w.group * w.head : (w.group + 1) * w.head] = 0
    if find:
        w.lift(b, w.group, 0, w.of("C")[:WORD], w.slot("C", WORD), 2 * ASKED)
    else:
        w.lift(b, w.group, 0, w.identity(), slice(0, w.own), ASKED)
