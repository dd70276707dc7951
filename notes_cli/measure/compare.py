"""Compares two prompts on one model: next-token distributions, greedy answers, and decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from notes_cli.config import resource
from notes_cli.documents import read_yaml
from notes_cli.engine.decision import decide, log_softmax
from notes_cli.engine.segment import Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.runtime.workspace import Workspace


def cosine(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Return the cosine similarity of two logit vectors, [n_vocab] each."""
    a, b = found.astype(np.float64), reference.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def divergence(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Return KL(reference || found) of the next-token distributions, in nats."""
    p, q = log_softmax(reference), log_softmax(found)
    possible = ~np.isneginf(p)  # tokens of probability 0 contribute nothing
    kl = float((np.exp(p[possible]) * (p[possible] - q[possible])).sum())
    return kl if kl > 0 or np.isnan(kl) else 0.0


def same_top(found: NDArray[np.float32], reference: NDArray[np.float32]) -> bool:
    """Return True if both have the same most likely token."""
    return int(found.argmax()) == int(reference.argmax())


@cache
def verify_system() -> str:
    """Return a system text that moves skills away from the position where they were compiled."""
    return str(read_yaml(resource("prompts") / "verify.yaml")["system"])


ANSWER = 24  # tokens of an answer that are compared without choices
FIRST = 8  # of these, the first ones, which contain the decision
NEAR = 0.1  # nats between two tokens that count as equally likely
TIMES = 3.0  # a gap of up to this multiple of the noise counts as noise
CUTS = 128, 32  # tokens in a last batch: llama.cpp uses different kernels for large and small batches


@dataclass(frozen=True, slots=True)
class Answered:
    """A decision: one of the choices, or a greedy answer. `margin`: between the two best choices. A greedy answer also
    has its tokens, the logits before each and after the last ([n_vocab] each), and the prompt's tokens; None with
    images."""

    text: str
    margin: float | None = None
    tokens: tuple[int, ...] = ()
    logits: tuple[NDArray[np.float32], ...] = ()
    prompt: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two answers: the number of equal tokens before it, and gap and noise in nats."""

    at: int
    gap: float
    noise: float

    @property
    def near(self) -> bool:
        """True if the gap is within rounding."""
        return self.gap <= max(NEAR, TIMES * self.noise)

    @property
    def late(self) -> bool:
        """True if the first tokens of both are the same."""
        return self.at >= FIRST

    @property
    def same(self) -> bool:
        """True if the difference does not count as a different decision."""
        return self.near or self.late


def answered(sequence: KVSequence, choices: Sequence[str] | None) -> Answered:
    """Return the decision at the end of a sequence. Appends a greedy answer without choices."""
    if choices:
        decision = decide(sequence, choices)
        return Answered(decision.choice, decision.margin)
    model = sequence.context.model
    prompt = None if sequence.images else sequence.tokens
    tokens: list[int] = []
    logits = [sequence.logits()]
    while len(tokens) < ANSWER and sequence.room and not model.ends(token := int(logits[-1].argmax())):
        tokens.append(token)
        sequence.append([token], "answer")
        logits.append(sequence.logits())
    return Answered(model.text(tokens).strip(), None, tuple(tokens), tuple(logits), prompt)


def parting(answer: Answered, reference: Answered, noise: Callable[[], float]) -> Parting | None:
    """Return where an answer differs from the recompute's; None for equal ones and for choices. Calls `noise` only
    then."""
    if answer.text == reference.text or not (answer.logits and reference.logits):
        return None
    same = [a == b for a, b in zip(answer.tokens, reference.tokens, strict=False)]
    at = same.index(False) if False in same else len(same)
    expected, actual = (int(answer.logits[at].argmax()) for answer in (reference, answer))
    log_probs = log_softmax(reference.logits[at])
    return Parting(at, float(log_probs[expected] - log_probs[actual]), noise())


def noise_of(workspace: Workspace, reference: Answered) -> float:
    """Return by how many nats, at most, the gap between the two most likely tokens changes in a recompute's answer if
    its prompt is decoded in different batches."""
    if reference.prompt is None:
        return 0.0
    many, few = CUTS
    last = many if len(reference.prompt) % workspace.context.n_ubatch < many // 2 else few
    cut = max(1, len(reference.prompt) - last)
    with workspace.sequence() as sequence:
        sequence.append(reference.prompt[:cut])
        sequence.flush()
        sequence.append(reference.prompt[cut:])
        first = sequence.logits()
        again = [first, *(sequence.lookahead(reference.tokens) if reference.tokens else ())]
    return max(_gap_change(before, after) for before, after in zip(reference.logits, again, strict=True))


def _gap_change(logits: NDArray[np.float32], again: NDArray[np.float32]) -> float:
    best, second = np.argsort(logits)[-1:-3:-1]
    return abs(float((logits[best] - logits[second]) - (again[best] - again[second])))


RECOMPUTE = "recompute"  # one prefill of all skills


@dataclass(frozen=True, slots=True)
class Question:
    """A question to several skills. `needs`: skills whose removal changes the decision of a prefill. `same`: the
    spliced skills decide as one prefill of all."""

    question: str
    needs: tuple[str, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Mended:
    """A repair that was tried. `same`, by question: it decides as one prefill. Empty if the repair is not possible, for
    the reason in `refused`."""

    name: str
    same: tuple[bool, ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Composed:
    """The result of verifying several skills together. Repairs are tried if a decision differs from one prefill's."""

    names: tuple[str, ...]
    questions: tuple[Question, ...]
    tried: tuple[Mended, ...] = ()

    def counts(self, several: bool) -> tuple[int, int]:
        """Return how many questions decide as one prefill, and their number, among those that need several skills, or
        at most one."""
        questions = [question for question in self.questions if (len(question.needs) > 1) == several]
        return sum(question.same for question in questions), len(questions)

    @property
    def repair(self) -> str:
        """The cheapest repair with which all questions decide as one prefill; empty if none is needed."""
        if all(question.same for question in self.questions):
            return ""
        return next((repair.name for repair in self.tried if repair.same and all(repair.same)), RECOMPUTE)
