"""Tests of products of a Q8_0 matrix on the CPU (native/patches/speed) against NumPy's float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from .ggml import F32, Q8_0, Array, Operation, libraries

BLOCK = 32  # numbers that share a scale


def matrix(rng: np.random.Generator, rows: int, width: int) -> tuple[NDArray[np.uint8], Array]:
    """Q8_0 blocks with all values of a byte, -128 included, and their dequantized values."""
    numbers = rng.integers(-128, 128, (rows, width // BLOCK, BLOCK), np.int8)
    numbers[rng.random(numbers.shape) < 0.1] = -128
    scales = rng.normal(size=(rows, width // BLOCK, 1)).astype(np.float16)
    data = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], -1)
    return data, (numbers * scales.astype(np.float64)).reshape(rows, width)


def columns(rng: np.random.Generator, count: int, width: int) -> Array:
    """Numbers that Q8_0, to which ggml rounds columns, holds exactly: multiples of a power of two, up to 127 of it."""
    numbers = rng.integers(-127, 128, (count, width // BLOCK, BLOCK)).astype(np.float64)
    numbers[..., 0] = 127
    return (numbers * 2.0 ** rng.integers(-9, 0, (count, width // BLOCK, 1))).reshape(count, width)


def product(data: NDArray[np.uint8], shape: tuple[int, int], right: Array, threads: int) -> NDArray[np.float32]:
    with Operation() as operation:
        left = operation.put_bytes(data, Q8_0, (1, 1, *shape))
        out = operation.base.ggml_mul_mat(operation.context, left, operation.put(right[None, None], F32))
        return operation.compute(out, (len(right), shape[0]), threads)


@pytest.mark.parametrize(("rows", "threads"), [(1, 2), (15, 1), (16, 3), (17, 2), (48, 16), (100, 1), (100, 3)])
def test_any_number_of_rows_and_columns(rows: int, threads: int) -> None:
    rng = np.random.default_rng(rows)
    for width in (32, 96, 1056):
        data, left = matrix(rng, rows, width)
        for count in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 127, 128, 129):
            right = columns(rng, count, width)
            expected, size = right @ left.T, np.abs(right) @ np.abs(left).T
            found = product(data, (rows, width), right, threads)
            assert (np.abs(found - expected) <= 1e-6 * size).all(), (width, count)


@pytest.mark.patches("speed")
def test_a_column_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    rows, width = 50, 1056
    data, left = matrix(rng, rows, width)
    right = columns(rng, 140, width)
    whole = product(data, (rows, width), right, 1)
    size = np.abs(right) @ np.abs(left).T
    # other processors have other kernels, whose sums go by who is next to whom
    bound = 0.0 if libraries()[1].ggml_cpu_has_avx512_vnni() else 1e-6
    for first, last, threads in ((0, 2, 1), (5, 12, 2), (60, 100, 7), (0, 139, 16), (138, 140, 3)):
        some = product(data, (rows, width), right[first:last], threads)
        assert (np.abs(some - whole[first:last]) <= bound * size[first:last]).all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_scale_that_is_no_number_spoils_its_row_alone(number: float) -> None:
    rng = np.random.default_rng(1)
    data, _ = matrix(rng, 40, 128)
    right = columns(rng, 9, 128)
    whole = product(data, (40, 128), right, 2)
    data[35, 2, :2] = np.array([number], np.float16).view(np.uint8)
    spoiled = product(data, (40, 128), right, 2)
    others = np.arange(40) != 35
    assert not np.isfinite(spoiled[:, 35]).any()
    assert (spoiled[:, others] == whole[:, others]).all()
