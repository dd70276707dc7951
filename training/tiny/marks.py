"""Which tokens mean what to the start: marks of sentences and turns, pieces that go on with a word, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.tiny import tokenizer
from training.tokenizer import Encoder

NUMBERS = ["two", "year", "hundreds", "tens", "units", "number"]  # what is said of a token that is a number


def families(vocabulary: Mapping[str, int]) -> list[list[int]]:
    """Ids of a word's forms with and without a blank before it, in the order of the words: a tokenizer has none."""
    words = ((text[1:], i) for text, i in sorted(vocabulary.items()) if text[0] == tokenizer.BLANK)
    return [[i, vocabulary[word]] for word, i in words if word in vocabulary]


@dataclass(frozen=True)
class Marks:
    """Token ids that the start knows.

    `families`: forms of a word with and without a blank, which share their embedding but for the blank; `going_on`:
    pieces without a blank. `two`, `years`, `amounts`: ids of numbers by their value.
    """

    families: list[list[int]]
    going_on: list[int]
    two: dict[int, int]
    years: list[tuple[int, int]]
    amounts: list[tuple[int, int]]
    says: list[int]  # "is"
    lists: list[int]  # ":"
    thens: list[int]
    others: list[int]  # "otherwise"
    ifs: list[int]
    opens: list[int]  # a sentence that says nothing of a field: "This"
    ends: list[int]  # of lines
    turns: list[int]  # what begins a turn
    stops: list[int]  # what ends one
    full: list[int]  # "."
    commas: list[int]
    now: list[int]
    limits: list[int]  # "before", "over": with "now", what follows "is" and is no outcome
    asks: list[int]  # "?"
    cues: list[int]  # what asks for a thought
    thoughts: list[int]  # what a thought begins with: "The"
    blank: list[bool]  # of every token, whether a blank comes before it

    @classmethod
    def of(cls, encoder: Encoder) -> Marks:
        """Those of a tokenizer of `tokenizer.make`."""
        vocabulary = dict(sorted(encoder.vocab.items()))
        blank = tokenizer.BLANK
        leads = ("", blank)
        tokens = dict.fromkeys(range(-(-len(vocabulary) // 32) * 32), "") | {i: t for t, i in vocabulary.items()}

        def known(*words: str) -> list[int]:
            return [vocabulary[word] for word in words]

        return cls(
            families=families(vocabulary),
            going_on=[i for t, i in vocabulary.items() if t.isalpha() and t.islower() and t.isascii()],
            two={n: vocabulary[f"{n:02d}"] for n in range(100)},
            years=[(n, vocabulary[lead + str(n)]) for n in range(2020, 2036) for lead in leads],
            amounts=[
                (n, vocabulary[lead + str(n)]) for n in range(1000) for lead in leads if lead or not 10 <= n < 100
            ],
            says=known(blank + "is"),
            lists=known(":"),
            thens=known(blank + "then"),
            others=known(blank + "otherwise"),
            ifs=known("If", blank + "If"),
            opens=known("This", blank + "This"),
            ends=known("\u010a"),
            turns=known("<|im_start|>"),
            stops=known("<|im_end|>"),
            full=known("."),
            commas=known(","),
            now=known(blank + "now"),
            limits=known(blank + "before", blank + "over"),
            asks=known("?"),
            cues=known(blank + "Think", blank + "Explain", blank + "Give"),
            thoughts=known("The"),
            blank=[token.startswith(blank) for _, token in sorted(tokens.items())],
        )

    @property
    def frequent(self) -> list[int]:
        """All of these but words and numbers: each has a direction of its own."""
        parts = (self.says, self.lists, self.thens, self.others, self.ifs, self.opens, self.ends, self.turns)
        parts += (self.stops, self.full, self.commas, self.now, self.limits, self.asks, self.cues, self.thoughts)
        return sorted({token for part in parts for token in part})

    def numbers(self) -> dict[int, Tensor]:
        """For each token that is a number, NUMBERS of it, from -1 to 1."""
        found: dict[int, Tensor] = {}

        def put(token: int, **parts: float) -> None:
            parts["number"] = 0.5
            found[token] = torch.tensor([parts.get(name, 0.0) for name in NUMBERS])

        for n, token in self.two.items():
            put(token, two=max(-1.0, min(1.0, (n - 9) / 22)))
        for n, token in self.years:
            put(token, year=max(-1.0, min(1.0, (n - 2026) / 5)))
        for n, token in self.amounts:
            digits = [(n // k % 10 - 4.5) / 4.5 for k in (100, 10, 1)]
            put(token, hundreds=digits[0], tens=digits[1], units=digits[2])
        return found
