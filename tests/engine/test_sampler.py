"""Tests of sampling: the argmax without llama.cpp's sampler chain is the token that the chain takes."""

from __future__ import annotations

import numpy as np

from notes_cli.engine.sampler import Sampler, SamplerOptions


def test_the_likeliest_is_what_the_chain_takes() -> None:
    """Also where several are as likely. A penalty that changes nothing has the chain asked."""
    random = np.random.default_rng(0)
    with Sampler(SamplerOptions()) as plain, Sampler(SamplerOptions(repeat_penalty=1.0 + 1e-12)) as chain:
        for _ in range(50):
            logits = random.integers(0, 40, 200).astype(np.float32)
            assert plain.next(logits) == chain.next(logits)


def test_a_penalty_turns_away_from_what_was_said() -> None:
    """The second time the other one is taken; without the penalty it is not."""
    logits = np.zeros(100, np.float32)
    logits[[7, 8]] = 2.0, 1.9
    for penalty, second in ((1.2, 8), (1.0, 7)):
        with Sampler(SamplerOptions(repeat_penalty=penalty)) as sampler:
            assert [sampler.next(logits), sampler.next(logits)] == [7, second]
