"""Choosing the next token from logits, through llama.cpp's own sampler chain."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine import native
from notes_cli.engine.native import llama
from notes_cli.errors import EngineError

# struct llama_token_data
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """temperature 0 is greedy; the same seed gives the same text on the same machine and settings."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @property
    def penalizes(self) -> bool:
        """Whether what was written changes what is likely."""
        return self.repeat_penalty != 1.0 or bool(self.frequency_penalty) or bool(self.presence_penalty)


class Sampler:
    """A chain in the order of llama.cpp's command line: penalties, top-k, top-p, min-p, temperature, draw."""

    def __init__(self, options: SamplerOptions) -> None:
        self.options = options
        native.fits(options.top_k, "top_k")
        self._chain: Any = None
        self._closed = False

    def _made(self, n_vocab: int) -> Any:
        """The chain, for a vocabulary of this size."""
        options = self.options
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        parts = []
        if options.penalizes:
            penalties = options.repeat_penalty, options.frequency_penalty, options.presence_penalty
            parts.append(llama.llama_sampler_init_penalties(n_vocab, 64, *penalties))
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
            llama.llama_sampler_chain_add(chain, part)
        return chain

    def next(self, logits: NDArray[np.float32]) -> int:
        """Draw a token from its logits, [n_vocab], and remember it for the penalties."""
        if self._closed:
            raise EngineError("this sampler is closed")
        if self.options.temperature <= 0 and not self.options.penalizes:
            return int(logits.argmax())  # what the chain would choose
        self._chain = self._chain or self._made(len(logits))
        candidates = np.zeros(len(logits), _CANDIDATE)
        candidates["id"], candidates["logit"] = np.arange(len(logits)), logits
        data = candidates.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data, len(logits), -1, False)
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama.llama_sampler_accept(self._chain, token)
        return token

    def close(self) -> None:
        if self._chain is not None:
            llama.llama_sampler_free(self._chain)
        self._chain, self._closed = None, True

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
