"""Choosing the next token from logits, through llama.cpp's own sampler chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from notes_cli.engine.context import Context
from notes_cli.engine.native import llama
from notes_cli.errors import EngineError


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """temperature 0 is greedy; the same seed gives the same text on the same machine and settings."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int = 0


class Sampler:
    """A chain in the order of llama.cpp's command line: penalties, top-k, top-p, min-p, temperature, draw."""

    def __init__(self, options: SamplerOptions) -> None:
        self.options = options
        self._chain: Any = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        parts = []
        if options.repeat_penalty != 1.0:
            parts.append(llama.llama_sampler_init_penalties(64, options.repeat_penalty, 0.0, 0.0))
        if options.temperature <= 0:
            parts.append(llama.llama_sampler_init_greedy())
        else:
            parts += [
                llama.llama_sampler_init_top_k(options.top_k),
                llama.llama_sampler_init_top_p(options.top_p, 1),
                llama.llama_sampler_init_min_p(options.min_p, 1),
                llama.llama_sampler_init_temp(options.temperature),
                llama.llama_sampler_init_dist(options.seed & 0xFFFFFFFF),
            ]
        for part in parts:
            llama.llama_sampler_chain_add(self._chain, part)

    def next(self, context: Context, index: int = -1) -> int:
        """Draw from the logits of the last decode, and remember the token for the penalties."""
        if self._chain is None:
            raise EngineError("this sampler is closed")
        return int(llama.llama_sampler_sample(self._chain, context.handle, index))

    def close(self) -> None:
        if self._chain is not None:
            llama.llama_sampler_free(self._chain)
            self._chain = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
