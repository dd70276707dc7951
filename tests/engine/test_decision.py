"""Tests of decisions between answers: they equal log-probabilities computed by hand, and leave the sequence intact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from notes_cli.engine.context import Context
from notes_cli.engine.decision import decide, log_softmax
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError

PROMPT = "May I return this? Answer:"


@pytest.fixture(scope="module")
def context(make_model: Callable[..., Path]) -> Iterator[Context]:
    """One context of a model in which no answer is certain, for all tests here; f32 for comparisons by hand."""
    with (
        Model(make_model("gemma")) as model,
        Context(model, ContextOptions(n_ctx=256, n_threads=1, type_k="f32", type_v="f32")) as made,
    ):
        yield made


def sequence(context: Context, *more: int) -> KVSequence:
    """A fresh sequence with the prompt and the tokens after it."""
    context.clear()
    seq = KVSequence(context)
    seq.append([*context.model.tokenize(PROMPT), *more])
    return seq


def by_hand(context: Context, text: str, ending: bool) -> float:
    """Log-probability of a text after the prompt, one plain append a token; with the end of the answer if asked."""
    total, before = 0.0, []
    for token in map(int, context.model.tokenize(text)):
        total += float(log_softmax(sequence(context, *before).logits())[token])
        before.append(token)
    if ending:
        total += float(log_softmax(sequence(context, *before).logits())[context.model.end_tokens].max())
    return total


@pytest.mark.parametrize(
    ("choices", "ending"),
    [(["accepted", "refused"], False), (["no", "not sure"], True), (["a", "b", "c", "ab"], True), (["é", "日"], False)],
)
def test_probabilities_are_those_of_plain_appends(context: Context, choices: list[str], ending: bool) -> None:
    """Softmax over the summed log-probabilities, the better of with and without a blank; prefixes count their end."""
    scores = np.array([max(by_hand(context, blank + choice, ending) for blank in ("", " ")) for choice in choices])
    expected = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    decision = decide(sequence(context), choices)
    assert list(decision.probabilities) == choices
    np.testing.assert_allclose(list(decision.probabilities.values()), expected, rtol=1e-3)
    assert decision.choice == choices[int(expected.argmax())]
    ranked = np.sort(expected)
    assert decision.margin == pytest.approx(ranked[-1] - ranked[-2], rel=1e-2, abs=1e-4)


def test_the_notebook_is_usable_afterwards(context: Context) -> None:
    with Sampler(SamplerOptions()) as sampler:
        undisturbed = list(sequence(context).generate(sampler, 5))
        seq = sequence(context)
        before, logits = seq.tokens.tolist(), seq.logits()
        first = decide(seq, ["no", "not sure", "maybe not"])
        assert seq.tokens.tolist() == before and context.length(0) == len(before)
        assert (seq.logits() == logits).all()
        again = decide(seq, ["no", "not sure", "maybe not"])
        assert again.probabilities == pytest.approx(first.probabilities)
        assert list(seq.generate(sampler, 5)) == undisturbed


@pytest.mark.parametrize("choices", [[], ["yes"], ["yes", "yes"], ["yes", ""]])
def test_choices_that_leave_nothing_to_decide(context: Context, choices: list[str]) -> None:
    with pytest.raises(NotesError, match="two or more different answers"):
        decide(sequence(context), choices)


def test_a_choice_longer_than_the_context(context: Context) -> None:
    seq = sequence(context)
    with pytest.raises(NotesError, match="too small"):
        decide(seq, ["x" * 500, "y"])
    assert decide(seq, ["x", "y"]).choice in ("x", "y")
