"""Byte-level BPE whose words are spelled alike with and without a blank before them.

Merges are learned on words without blanks; each piece that can begin a word then also has a form with the blank
before it. " zorvel" is " zor" + "vel" and "zorvel" is "zor" + "vel", so an outcome can be copied from the middle of
a line to the start of an answer. Numbers from 0 to 999, two digits and years are one token each.
"""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training import policies
from training.tiny import words
from training.tokenizer import SPECIAL

BLANK = "\u0120"  # how byte-level BPE writes a blank
PIECES = 900
_WHOLE = (
    "If then the is The otherwise before over not now this This earlier given above out of date has changed to use "
    "as Correction Update Please note instead Erratum what written So That What Which applies about Tell me And Is "
    "or May Can return it exchange Do get refund support discount access an invoice pay deposit How does delivery "
    "work shipping approval warranty Think first Explain Give reason cannot tell from Noted assistant user system "
    "You are helpful Answer yes no and replaces one From on Change was policy at rules"
)
WHOLE = _WHOLE.split()


def pools() -> list[str]:
    """The words of training/policies.py, which the sample skills use."""
    found = [v for values in (*policies.WORD_FIELDS.values(), *policies.TOPICS.values()) for v in values]
    return [*found, *policies.WORD_FIELDS, *policies.DATE_FIELDS, *policies.AMOUNT_FIELDS, *policies.TOPICS]


def make() -> Tokenizer:
    """The tokenizer: learned pieces, whole function words and numbers, then the blanks."""
    rng = random.Random("tokenizer 7")
    corpus = [w for w in words.known(False) for _ in range(4)]
    corpus += [words.invent(rng, False) for _ in range(12000)]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=len(SPECIAL) + 256 + PIECES,
            special_tokens=list(SPECIAL),
            show_progress=False,
            initial_alphabet=alphabet,
        ),
    )
    numbers = [f"{n:02d}" for n in range(100)] + [str(n) for n in (*range(1000), *range(2020, 2036))]
    merges = [tuple(m) for m in json.loads(learned.to_str())["model"]["merges"]]
    for word in [*numbers, *WHOLE, *pools()]:
        merges += joins(merges, word)
    known = [*alphabet, *("".join(m) for m in merges)]
    starts = [p for p in dict.fromkeys(known) if re.fullmatch(r"[A-Za-z]+|[0-9]+", p)]
    merges += [(BLANK, p) for p in starts]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys([*SPECIAL, *alphabet, *("".join(m) for m in merges)]))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return made


def joins(merges: list[tuple[str, str]], word: str) -> list[tuple[str, str]]:
    """The merges that are still missing for a word to be one token."""
    ranks = {m: i for i, m in reversed(list(enumerate(merges)))}
    parts = list(word)
    while len(parts) > 1:
        found = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    missing = []
    while len(parts) > 1:
        missing.append((parts[0], parts[1]))
        parts[:2] = [parts[0] + parts[1]]
    return missing
