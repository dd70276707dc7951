"""Two prompts compared: next-token distributions, answers, and which of several skills each question needs."""

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
    """Cosine of two logit vectors, [n_vocab] each: 1 when they point the same way."""
    a, b = found.astype(np.float64), reference.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def divergence(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """KL(reference || found) of the next-token distributions, in nats."""
    p, q = log_softmax(reference), log_softmax(found)
    possible = ~np.isneginf(p)  # what the reference rules out weighs nothing
    kl = float((np.exp(p[possible]) * (p[possible] - q[possible])).sum())
    return kl if kl > 0 or np.isnan(kl) else 0.0


def same_top(found: NDArray[np.float32], reference: NDArray[np.float32]) -> bool:
    """Whether both put the same token first."""
    return int(found.argmax()) == int(reference.argmax())


@cache
def verify_system() -> str:
    """System text that moves skills away from where they were compiled."""
    return str(read_yaml(resource("prompts") / "verify.yaml")["system"])


ANSWER = 24  # tokens of an answer that are compared where no choices are given
FIRST = 8  # of these, the ones that say what is decided
NEAR = 0.1  # nats between two tokens that are about equally likely
TIMES = 3.0  # a gap is within the noise up to so many times of it
CUTS = 128, 32  # tokens of a last batch: many and few are computed by other code


@dataclass(frozen=True, slots=True)
class Answered:
    """A decision: one of the choices, or the text of a greedy answer. `margin`: of the two best choices. Of a text also
    its tokens, the logits before each of them and after the last ([n_vocab] each), and the prompt's tokens; None of a
    prompt with images, which its tokens do not tell."""

    text: str
    margin: float | None = None
    tokens: tuple[int, ...] = ()
    logits: tuple[NDArray[np.float32], ...] = ()
    prompt: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers part: the number of tokens before that, and gap and noise in nats."""

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
        """True if the difference does not count as another decision."""
        return self.near or self.late


def answered(sequence: KVSequence, choices: Sequence[str] | None) -> Answered:
    """The decision at the end of a sequence; a text is added to it."""
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


def parting(found: Answered, wanted: Answered, noise: Callable[[], float]) -> Parting | None:
    """Where a text parts from the recompute's; None for the same one, and for choices. `noise` is called if it does."""
    if found.text == wanted.text or not (found.logits and wanted.logits):
        return None
    same = [a == b for a, b in zip(found.tokens, wanted.tokens, strict=False)]
    at = same.index(False) if False in same else len(same)
    theirs, mine = (int(one.logits[at].argmax()) for one in (wanted, found))
    likely = log_softmax(wanted.logits[at])
    return Parting(at, float(likely[theirs] - likely[mine]), noise())


def noise_of(workspace: Workspace, wanted: Answered) -> float:
    """How far the gap between the two likeliest tokens moves, at most, before any token of a recompute's answer, if its
    prompt is decoded in other batches; in nats."""
    if wanted.prompt is None:
        return 0.0
    many, few = CUTS
    last = many if len(wanted.prompt) % workspace.context.n_ubatch < many // 2 else few
    cut = max(1, len(wanted.prompt) - last)
    with workspace.sequence() as sequence:
        sequence.append(wanted.prompt[:cut])
        sequence.flush()
        sequence.append(wanted.prompt[cut:])
        first = sequence.logits()
        again = [first, *(sequence.lookahead(wanted.tokens) if wanted.tokens else ())]
    return max(_moved(one, other) for one, other in zip(wanted.logits, again, strict=True))


def _moved(logits: NDArray[np.float32], again: NDArray[np.float32]) -> float:
    best, second = np.argsort(logits)[-1:-3:-1]
    return abs(float((logits[best] - logits[second]) - (again[best] - again[second])))


RECOMPUTE = "recompute"  # one prefill of all skills


@dataclass(frozen=True, slots=True)
class Question:
    """A question to several skills. `needs`: those without which one prefill of the others decides otherwise; `same`:
    whether the spliced skills decide as one prefill of all."""

    question: str
    needs: tuple[str, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Mended:
    """A repair that was tried, and of each question whether it decides as one prefill. Nothing is in `same` where
    `refused` says why it is not possible."""

    name: str
    same: tuple[bool, ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Composed:
    """What came of several skills of a user. Repairs are tried where a decision is not that of one prefill."""

    names: tuple[str, ...]
    questions: tuple[Question, ...]
    tried: tuple[Mended, ...] = ()

    def counts(self, several: bool) -> tuple[int, int]:
        """Of the questions that need several skills, or at most one: how many decide as one prefill, and all."""
        asked = [one for one in self.questions if (len(one.needs) > 1) == several]
        return sum(one.same for one in asked), len(asked)

    @property
    def repair(self) -> str:
        """The cheapest way in which all decide as one prefill; empty where nothing must be repaired."""
        if all(one.same for one in self.questions):
            return ""
        return next((one.name for one in self.tried if one.same and all(one.same)), RECOMPUTE)
