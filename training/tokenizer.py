"""Byte-level BPE of the tiny model: trained on generated text, every word of the world is one token."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training import world

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = range(3)


def world_words() -> list[str]:
    """Words that must be single tokens, in every spelling in which the world uses them."""
    plain = [v for values in world.WORD_FIELDS.values() for v in values]
    plain += [o for outcomes in world.TOPICS.values() for o in outcomes]
    plain += [*world.WORD_FIELDS, *world.DATE_FIELDS, *world.AMOUNT_FIELDS, "yes", "no"]
    plain += [str(n) for n in range(2024, 2029)] + [str(10 * n) for n in range(1, 100)]
    words = [form for w in plain for form in (w, " " + w)]
    words += [" " + t for t in world.TOPICS] + [t.capitalize() for t in world.TOPICS]
    words += [" Returns", "Returns", " Refunds", "Refunds"] + [f"{n:02d}" for n in range(1, 32)]
    words += [
        "If",
        "When",
        " then",
        " otherwise",
        " before",
        " over",
        " not",
        " is",
        " the",
        " now",
        "Correction",
        "Update",
    ]
    return list(dict.fromkeys(words))


def train(seed: int = 7, texts: int = 1500) -> Tokenizer:
    """Train on texts of the world; the words of `world_words` come first because they are repeated most."""
    rng = random.Random(f"tokenizer {seed}")
    corpus: list[str] = []
    for _ in range(texts):
        corpus += [d.skill.text for d in world.make_drafts(rng, replace(world.FULL, far=False), loose=True)]
        corpus += [p.format(org=world.make_org(rng, False)) for p in world.PREAMBLES]
    common = [
        *world.FILLERS,
        *world.PLAIN,
        *world.RECALL,
        *world.wordings().values(),
        *world.EXTRA_WORDINGS,
        *world.OLD_WORDINGS,
        *(q for forms in world.VERBS.values() for q in forms),
        *world.REASON_CUES,
        "Noted.",
        "system\n",
        "user\n",
        "assistant\n",
        "What decides the topic?",
        "That is not before",
        "So the",
    ]
    corpus += common * 400
    for word in world_words():
        corpus += [word] * 6000
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1600,
        special_tokens=list(SPECIAL),
        show_progress=False,
        min_frequency=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    broken = [w for w in world_words() if len(tokenizer.encode(w).ids) != 1]
    if broken:
        raise ValueError(f"not single tokens: {broken}")
    return tokenizer


class Encoder:
    """Encodes one piece at a time, and remembers the short ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab: dict[str, int] = tokenizer.get_vocab()
        self.short = lru_cache(maxsize=200_000)(self.encode)

    def encode(self, piece: str) -> tuple[int, ...]:
        """Token ids of one piece; special tokens are recognised."""
        return tuple(self.tokenizer.encode(piece).ids)

    def word(self, word: str) -> int:
        """The id of a word that is one token."""
        ids = self.short(word)
        if len(ids) != 1:
            raise ValueError(f"{word!r} is {len(ids)} tokens")
        return ids[0]


def load(path: Path) -> Encoder:
    """Read a tokenizer saved as JSON."""
    return Encoder(Tokenizer.from_file(str(path)))
