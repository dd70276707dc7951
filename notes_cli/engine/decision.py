"""Scores given answers by their log-probabilities and returns the one that the model prefers.

Each answer is scored whole, with and without a leading blank, and the better score counts: which of the two a model
writes is a habit of its tokenizer. The scores are then normalised over the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.model import Model
from notes_cli.engine.sequence import KVSequence, Logits, Task, run
from notes_cli.errors import NotesError


@dataclass(frozen=True, slots=True)
class Decision:
    """The preferred answer, and the probability of each answer among those given."""

    choice: str
    probabilities: dict[str, float]

    @property
    def margin(self) -> float:
        """Difference between the highest and the second probability."""
        ranked = sorted(self.probabilities.values(), reverse=True)
        return ranked[0] - ranked[1]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def decide(sequence: KVSequence, choices: Sequence[str]) -> Decision:
    """Score each choice as the answer at the end of the sequence, which is left unchanged."""
    return run(decide_task(sequence, choices))


def decide_task(sequence: KVSequence, choices: Sequence[str]) -> Task[Decision]:
    """As `decide`, as a task (engine/sequence.py)."""
    check_choices(choices)
    model = sequence.context.model
    variants = variants_of(model, choices)
    every = dict.fromkeys(chain.from_iterable(variants.values()))
    # "no" against "not sure": the shorter answer is complete only if generation ends there.
    ending = any(a != b and b[: len(a)] == a for a in every for b in every)
    first = log_softmax((yield from sequence.next_logits()))
    following: dict[tuple[int, ...], Iterable[Logits]] = {}
    for tokens in every:
        prefix = tokens if ending else tokens[:-1]
        following[tokens] = (yield from sequence.lookahead_task(prefix)) if prefix else ()
    ends = model.end_tokens if ending else []
    scores = {
        choice: max(_score(tokens, first, following[tokens], ends) for tokens in options)
        for choice, options in variants.items()
    }
    weights = np.exp(np.array(list(scores.values())) - max(scores.values()))
    probabilities = dict(zip(scores, (float(w) for w in weights / weights.sum()), strict=True))
    return Decision(max(probabilities, key=lambda choice: probabilities[choice]), probabilities)


def variants_of(model: Model, choices: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """Tokenize each choice without and with a leading blank."""
    return {choice: [tuple(map(int, model.tokenize(text))) for text in (choice, " " + choice)] for choice in choices}


def check_choices(choices: Sequence[str]) -> None:
    if len(choices) < 2 or len(set(choices)) < len(choices) or not all(choices):
        raise NotesError(f"choices must be two or more different answers, got {','.join(choices)!r}")


def _score(
    tokens: Sequence[int], first: NDArray[np.float64], ahead: Iterable[NDArray[np.float32]], ends: Sequence[int]
) -> float:
    """Return the log-probability of the tokens: the first by `first`, the others by `ahead`, the logits after each of
    them; with `ends`, times the probability that one of these end tokens follows."""
    rows = [log_softmax(row) for row in ahead]
    total = float(first[tokens[0]]) + sum(float(row[token]) for row, token in zip(rows, tokens[1:], strict=False))
    return total + float(rows[-1][ends].max()) if ends else total
