"""Words for every role (field, value, topic, outcome): listed ones, invented ones, and a tenth held out."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from training.policies import is_held_out

LIST = Path(__file__).with_name("words.txt")
_ONSETS = "b br c ch cl d dr f fl g gr h j k l m n p pl pr qu r s sh sl st t th tr v w z"
ONSETS = _ONSETS.split()
VOWELS = ["a", "a", "e", "e", "i", "o", "o", "u", "ai", "ea", "oo", "y"]
CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "nd", "rt", "ck", "st", "x"]


@cache
def known(held: bool) -> tuple[str, ...]:
    """The listed words that training sees, or those that it does not."""
    return tuple(w for w in LIST.read_text(encoding="utf-8").split() if is_held_out(w) == held)


def invent(rng: random.Random, held: bool, most: int = 2) -> str:
    """A word that nobody has written, of one to `most` syllables."""
    while True:
        word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.randint(1, most)))
        if len(word) >= 3 and is_held_out(word) == held:
            return word


def draw(rng: random.Random, held: bool, invented: float) -> str:
    """One word; `invented` is the share of words that are in no list."""
    return invent(rng, held) if rng.random() < invented else rng.choice(known(held))
