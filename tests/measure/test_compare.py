"""Measures of nearness, against values one can work out."""

from __future__ import annotations

import numpy as np
import pytest

from notes_cli.measure.compare import cosine, divergence, same_top

A = np.array([1.0, 2.0, 3.0], np.float32)


def test_cosine() -> None:
    """1 in the same direction whatever the length, -1 in the opposite one, 0 at a right angle."""
    assert cosine(A, 2 * A) == pytest.approx(1)
    assert cosine(A, -A) == pytest.approx(-1)
    assert cosine(np.array([1, 0], np.float32), np.array([0, 3], np.float32)) == 0


def test_divergence() -> None:
    """0 for logits that differ by a constant; KL(reference || found) by hand otherwise; not symmetric."""
    assert divergence(A, A + 5) == pytest.approx(0, abs=1e-9)
    p, q = np.array([0.9, 0.1]), np.array([0.5, 0.5])
    found = divergence(np.log(q).astype(np.float32), np.log(p).astype(np.float32))
    assert found == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-5)
    assert found != pytest.approx(divergence(np.log(p).astype(np.float32), np.log(q).astype(np.float32)))


def test_same_top() -> None:
    """The place of the maximum counts, not its height."""
    assert same_top(A, np.array([0, 0, 9], np.float32))
    assert not same_top(A, np.array([9, 0, 0], np.float32))
