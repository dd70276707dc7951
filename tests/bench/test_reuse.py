"""Tests bench/reuse on a small prompt and a tiny model: after each change few tokens are decoded."""

from __future__ import annotations

from itertools import cycle

from bench.reuse.__main__ import CHANGES, Agent, counts
from bench.reuse.quality import paragraphs

from ..conftest import MakeModel


def test_decoded_tokens_after_a_change(make_model: MakeModel) -> None:
    """With equal prefixes alone nearly all, with runs a few seams; compiled texts are found in the first request."""
    model, agent = make_model(trained=16384), Agent.of(cycle(paragraphs()), 1500, 3, 300)
    found = {
        reuse: {change: (decoded, total) for change, decoded, total in counts(*how, compiled=compiled, n_ctx=16384)}
        for reuse, compiled in (("exact", False), ("near", False), ("compiled", True))
        for how in [(model, agent, reuse)]
    }
    first, total = found["near"]["first request"]
    assert first == found["exact"]["first request"][0] == total > 4 * found["compiled"]["first request"][0]
    for change in [*CHANGES][1:]:
        assert max(found["near"][change][0], found["compiled"][change][0]) < 400
    for change in ("a date line above", "a word changed"):
        assert found["exact"][change][0] > total / 3
