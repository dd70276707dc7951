"""Comparisons of equal, different and invalid logits."""

from __future__ import annotations

import numpy as np
import pytest

from notes_cli.measure.verify import cosine, divergence, same_top

A = np.array([1, 2, 3], np.float32)
B = np.array([3, 2, 1], np.float32)


def test_equal_logits_are_as_near_as_can_be() -> None:
    """Cosine 1, no divergence, the same top."""
    assert cosine(A, A) == pytest.approx(1)
    assert divergence(A, A) == 0
    assert same_top(A, A)


def test_divergence_by_hand() -> None:
    """KL(reference || found) of two small distributions, in nats; it is not symmetric."""
    p, q = np.exp(B) / np.exp(B).sum(), np.exp(A) / np.exp(A).sum()
    assert divergence(A, B) == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-6)
    assert not same_top(A, B)


def test_divergence_of_numbers_that_are_none_is_not_zero() -> None:
    """NaN gives NaN, and must never look like a perfect match."""
    assert np.isnan(divergence(np.full(3, np.nan, np.float32), A))


def test_divergence_with_tokens_ruled_out_on_both_sides() -> None:
    """Tokens of probability 0 in the reference add nothing."""
    a, b = np.append(A, np.float32(-np.inf)), np.append(B, np.float32(-np.inf))
    assert divergence(a, b) == pytest.approx(divergence(A, B))
