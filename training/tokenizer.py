"""Encodes text with a byte-level BPE tokenizer, and remembers short pieces."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, _, END = range(3)


class Encoder:
    """Encodes one piece at a time, and remembers the short ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab: dict[str, int] = tokenizer.get_vocab()
        self.short = lru_cache(maxsize=200_000)(self.encode)

    def encode(self, piece: str) -> tuple[int, ...]:
        """Token ids of one piece; special tokens are recognised."""
        return tuple(self.tokenizer.encode(piece).ids)
