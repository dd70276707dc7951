"""Small segments and identities for the library's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from notes_cli.engine.identity import Identity
from notes_cli.engine.segment import FieldSpan, LayerRows, Segment

MakeSegment = Callable[..., Segment]


@pytest.fixture(scope="session")
def identity() -> Identity:
    """Of a model with an adapter-free f16 cache."""
    return Identity("tiny", "qwen2", "Q8_0", "ab" * 32, "c0ffee", "neox base 10000", "f16/f16", "")


@pytest.fixture(scope="session")
def make_segment(identity: Identity) -> MakeSegment:
    """Build a segment of random rows; keywords replace its parts."""

    def make(n: int = 3, layers: int = 1, k: int = 2, v: int = 3, dtype: str = "f2", **parts: object) -> Segment:
        random = np.random.default_rng(n)
        rows = tuple(
            LayerRows(i, random.normal(size=(n, k)).astype(dtype), random.normal(size=(n, v)).astype(dtype))
            for i in range(layers)
        )
        segment = Segment(
            name="returns",
            description="A policy.",
            text="date: 1é",
            tokens=np.arange(n, dtype=np.int32) + 5,
            base=2,
            context=np.array([7, 8], np.int32),
            fields=(FieldSpan("date", "1é", 6, 8, n - 1, n),),
            identity=identity,
            layers=rows,
        )
        return replace(segment, **parts)  # type: ignore[arg-type]

    return make
