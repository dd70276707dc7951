"""Decides for one question whether its new values need an erratum besides their K/V in place (method `auto`).

The decisions by `field` and by `field+erratum` are compared in forks of one sequence. With choices a decision is their
probabilities, without choices the distribution of the first token of the answer in which the two differ. After the
author's diagnostic (19PINE-AI/programmable-kv), which takes the very first token: often a word such as "The".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from notes_cli.editing.methods import FIELD, FIELD_ERRATUM, Method
from notes_cli.engine.decision import decide, log_softmax
from notes_cli.engine.positions import Patch, align
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.errors import EngineError, UnsupportedError
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.prompt import Prompt, parts_of
from notes_cli.runtime.workspace import Workspace

if TYPE_CHECKING:
    from notes_cli.runtime.resolve import ResolvedRequest

MARGIN = 0.2  # in probability
TOKENS = 16  # of an answer that are compared
Probabilities = NDArray[np.float64]  # of choices, or of tokens, [n]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The method for an edit, and the reason."""

    method: Method
    why: str


def compare(field: Probabilities, both: Probabilities, stale: Callable[[], Probabilities]) -> Verdict:
    """Choose by the decisions with the field in place, with the erratum as well, and without an edit; `stale` is called
    if needed."""
    ours, wanted = int(field.argmax()), int(both.argmax())
    if ours == wanted:
        return Verdict(FIELD, "field decides as field+erratum")
    apart = float(both[wanted] - both[ours])
    if apart > MARGIN:
        return Verdict(FIELD_ERRATUM, f"field decides otherwise, by {apart:.2f} in probability")
    moved = float(both[wanted] - both[int(stale().argmax())])
    if moved > MARGIN:
        return Verdict(FIELD_ERRATUM, f"it moves the decision by {moved:.2f} in probability, and field otherwise")
    return Verdict(FIELD, f"field+erratum moves the decision by no more than {MARGIN} in probability")


def choose_per_edit(
    workspace: Workspace, draft: ResolvedRequest, sequence: KVSequence
) -> tuple[KVSequence, ResolvedRequest]:
    """Return the sequence of the method that `compare` chooses, and the request with this method. `sequence`: the
    prompt by `field+erratum`; it is closed if the other one is chosen, or on failure."""
    trial = _Trial(workspace, draft, sequence)
    try:
        verdict = trial.verdict()
    except (UnsupportedError, EngineError) as error:
        verdict = Verdict(FIELD_ERRATUM, f"not compared: {error.what}")
    except BaseException:
        trial.close(None)
        raise
    kept = trial.forks[0] if verdict.method == FIELD else sequence
    tried = trial.decoded - (len(kept) - trial.end)  # the prompt's own tokens are counted with it
    trial.close(kept)
    settings = replace(draft.settings, method=verdict.method, why=f"{verdict.method}: {verdict.why}", tried=tried)
    return kept, replace(draft, settings=settings)


class _Trial:
    """Decisions of one question by several methods, in forks of the sequence with the prompt by `field+erratum`."""

    def __init__(self, workspace: Workspace, draft: ResolvedRequest, sequence: KVSequence) -> None:
        self._workspace, self._draft, self._sequence = workspace, draft, sequence
        self._prompt, self._choices = draft.prompt, draft.request.choices
        self.end = min(piece.position for piece in sequence.pieces if piece.kind == "erratum")
        self.forks: list[KVSequence] = []
        self.decoded = len(sequence) - self.end  # tokens after the skills, in all sequences

    def close(self, kept: KVSequence | None) -> None:
        for sequence in (self._sequence, *self.forks):
            if sequence is not kept:
                sequence.close()

    def verdict(self) -> Verdict:
        values, tail = self._compiled_values(), len(self._sequence) - self.end + TOKENS
        cells = len(self._sequence) + 3 * tail + sum(len(patch.tokens) for patch in values)
        self._workspace.make_room(cells, held=len(self._sequence))
        answer = self._answer() if self._choices is None else []
        both = self._decisions(self._sequence, answer)
        field = self._decisions(self._fork(replace(self._prompt, method=FIELD)), answer)
        pairs = zip(field, both, strict=True)
        place = next((at for at, (one, other) in enumerate(pairs) if one.argmax() != other.argmax()), 0)

        def stale() -> Probabilities:
            return self._decisions(self._fork(replace(self._prompt, fields={}), values), answer)[place]

        return compare(field[place], both[place], stale)

    def _answer(self) -> list[int]:
        """Return the likeliest first tokens of the answer by `field+erratum`."""
        tokens: list[int] = []
        ends = self._workspace.model.end_tokens
        with self._sequence.share() as fork:
            while len(tokens) < TOKENS and (token := int(fork.logits().argmax())) not in ends:
                tokens.append(token)
                fork.append([token], "answer")
        self.decoded += len(tokens)
        return tokens

    def _decisions(self, sequence: KVSequence, answer: Sequence[int]) -> list[Probabilities]:
        """Return the probabilities of the choices; without these, those of each token of the answer and of the next, as
        one may end where the other goes on."""
        if self._choices is not None:
            return [np.array([*decide(sequence, self._choices).probabilities.values()], np.float64)]
        self.decoded += len(answer)
        rows = [sequence.logits(), *(sequence.lookahead(answer) if answer else ())]
        return [np.exp(log_softmax(row)) for row in rows]

    def _fork(self, prompt: Prompt, patches: Sequence[Patch] = ()) -> KVSequence:
        """Return a fork with another prompt, whose skills differ by the patches."""
        fork = self._sequence.share(self.end)
        self.forks.append(fork)
        if patches:
            self.decoded += fork.replace(patches)
        start = len(fork)
        parts = parts_of(self._workspace, prompt)
        run(assemble_task(self._workspace, prompt, parts, begun=fork, **self._draft.how))
        self.decoded += len(fork) - start
        return fork

    def _compiled_values(self) -> list[Patch]:
        """Return the patches of the sequence that put the compiled values back."""
        patches = []
        for name, changed in parts_of(self._workspace, self._prompt).changes.items():
            segment = next(segment for segment in self._prompt.segments if segment.name == name)
            start = min(
                piece.position for piece in self._sequence.pieces if (piece.kind, piece.name) == ("splice", name)
            )
            for part in align(changed.patches, len(segment)):
                if part.patch:
                    old = segment.tokens[slice(*part.before)].tolist()
                    patches.append(Patch(start + part.after[0], start + part.after[1], old))
        return sorted(patches, key=lambda patch: patch.first)
