"""Byte-level BPE of the tiny vision model: every word of its world is one token, every digit, too."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.eye import pictures

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
PAD, _, END, SEE, SEEN, ROW = range(len(SPECIAL))


def train() -> Tokenizer:
    """Train on all sentences of the world, each often enough for its words to be whole."""
    rng = random.Random(3)
    corpus = [*pictures.FILLERS, *(f" {sentence}" for sentence in pictures.FILLERS)]
    corpus += [*pictures.SHAPES, *pictures.COLOURS, *pictures.NUMBERS, "nothing", pictures.VOID]
    corpus += ["system\n", "user\n", "assistant\n", "Correction: the receipt is void.", "the day", "the total"]
    for _ in range(400):
        shown = [pictures.make(rng, rng.choice(["picture", "receipt"]), False) for _ in range(3)]
        for index, (picture, label) in enumerate(zip(shown, pictures.labels(shown), strict=True)):
            corpus += [one.question for one in pictures.questions(picture, label)]
            corpus.append("Correction: " + pictures.erratum(rng, shown, index)[0])
    corpus = ["".join(mark for mark in text if not mark.isdigit()) for text in dict.fromkeys(corpus)] * 50
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=list(SPECIAL),
        show_progress=False,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
