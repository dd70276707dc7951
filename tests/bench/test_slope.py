"""The slope test: a trend is found where there is one, and not where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from bench.experiments.slope import slope, student


@pytest.mark.parametrize(("freedom", "wanted"), [(1, 12.7062), (2, 4.3027), (10, 2.2281), (26, 2.0555), (1000, 1.9623)])
def test_students_t(freedom: int, wanted: float) -> None:
    """The bounds of 95% are those of the tables."""
    assert student(freedom) == pytest.approx(wanted, abs=2e-4)


def test_a_line_has_its_slope() -> None:
    """A straight line is found exactly, and its interval has no width."""
    found = slope([1 - 0.02 * turn for turn in range(28)])
    assert found == pytest.approx((-0.02, -0.02, -0.02)) and found.falls
    for level in (0.5, 11 / 12, 0.999123):
        assert slope([level] * 28) == (0, 0, 0) and not slope([level] * 28).falls


def test_the_interval_is_as_published() -> None:
    """Least squares of a worked example: 1, 3, 2, 5, 4 has the slope 0.8, give or take 1.1023."""
    found = slope([1, 3, 2, 5, 4])
    assert found.value == pytest.approx(0.8)
    assert found.high - found.value == pytest.approx(found.value - found.low) == pytest.approx(1.1027, abs=2e-3)
    assert not found.falls


def test_noise_is_no_trend_and_a_trend_is_no_noise() -> None:
    """About one in forty intervals of pure noise lies below 0; of a fall of a whole deviation in ten turns, all."""
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(400, 28))
    assert 2 <= sum(slope(row).falls for row in noise) <= 20
    assert all(slope(row - 0.1 * np.arange(28)).high < 0.1 for row in noise)
    assert sum(slope(row - 0.1 * np.arange(28)).falls for row in noise) > 380


def test_two_values_have_no_error() -> None:
    """With two values any slope fits: refused."""
    with pytest.raises(ValueError, match="three values, not 2"):
        slope([1, 2])
