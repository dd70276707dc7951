"""Rows of two compiles in one prompt: does a decision rest on the rows of a field, or on those after it?

A skill is compiled with the old value of a field (stale) and with a new one (fresh), and the same question is asked of
rows that are mixed of the two. The score of a mix is the log-probability of the fresh text's decision less that of the
stale text's; its recovery is 0 where the model acts on the old value, 1 as after a full recompute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from notes_cli.editing.change import change
from notes_cli.engine.decision import decide
from notes_cli.engine.positions import Patch, align
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.measure.verify import ANSWER
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.fields import Field
from notes_cli.text.skill import Skill

T = TypeVar("T")


class AlikeError(Exception):
    """The two texts decide the same, so there is nothing to locate."""


@dataclass(frozen=True, slots=True)
class Column:
    """Tokens [first, last) of the stale text, and those of the fresh one that take their place."""

    stale: tuple[int, int]
    fresh: tuple[int, int]
    field: bool  # of the changed value


def columns_of(tokens: int, patches: Sequence[Patch]) -> list[Column]:
    """The columns of a text of so many tokens: one a token, but one in all for a value of another token length."""
    columns: list[Column] = []
    for part in align(patches, tokens):
        if part.patch and part.patch.grows:
            columns.append(Column(part.before, part.after, True))
        else:
            pairs = zip(range(*part.before), range(*part.after), strict=True)
            columns += [Column((i, i + 1), (j, j + 1), part.patch is not None) for i, j in pairs]
    return columns


class Mixes:
    """One question to a skill whose rows are mixed of two compiles. Use it as a context manager."""

    def __init__(
        self,
        workspace: Workspace,
        segment: Segment,
        field: str,
        value: str,
        *,
        question: str,
        choices: Sequence[str] | None = None,
    ) -> None:
        """Without `choices` the greedy answers are compared. Raise AlikeError if both texts decide the same."""
        self._workspace = workspace
        changed = change(workspace.model, segment, {field: value})
        assert changed is not None, f"{field} is {value} already"
        self.columns = columns_of(len(segment), changed.patches)
        self.first = next(i for i, column in enumerate(self.columns) if column.field)
        self.stale = segment
        fields = tuple(Field(span.name, span.value, span.start, span.end) for span in changed.spans)
        self.fresh = compile_skill(workspace, Skill(segment.name, segment.description, changed.text, fields, ""))
        longest = max([ANSWER, *(len(workspace.model.tokenize(" " + choice)) for choice in choices or ())])
        grown = sum(max(0, patch.grows) for patch in changed.patches)
        self.sequence = assemble(workspace, Prompt(question, [segment]), seam=0, room=longest + grown)
        mine = next(piece for piece in self.sequence.pieces if piece.kind == "splice")
        self._start = mine.position
        self._after = self.sequence.tokens[self._start + len(segment) :]
        try:
            self.decisions = tuple(
                self._of(fresh, lambda: decide(self.sequence, choices).choice if choices else self._answer())
                for fresh in (False, True)
            )
            if self.decisions[0] == self.decisions[1]:
                raise AlikeError(f"asked {question!r}, both texts decide {self.decisions[0]!r}")
            self.scores = tuple(self._of(fresh, self._score) for fresh in (False, True))
            if not self.scores[0] < self.scores[1]:
                raise AlikeError(f"asked {question!r}, the new value makes {self.decisions[1]!r} no likelier")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the KV cells of its sequence."""
        self.sequence.close()

    def __enter__(self) -> Mixes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def recovery(self, fresh: Sequence[bool]) -> float:
        """The recovery of a mix; `fresh`: for each column, whether its rows are of the fresh text."""
        self._mix(fresh)
        stale, whole = self.scores
        return (self._score() - stale) / (whole - stale)

    def field_only(self) -> float:
        """The recovery with the field's rows fresh, all else stale."""
        return self.recovery([column.field for column in self.columns])

    def after_only(self) -> float:
        """The recovery with all rows after the field fresh, its own stale."""
        return self.recovery([i > self.first and not column.field for i, column in enumerate(self.columns)])

    def _mix(self, fresh: Sequence[bool]) -> None:
        """Splice a mix, and append the question."""
        self.sequence.truncate(self._start)
        for is_fresh, run in groupby(range(len(self.columns)), lambda i: fresh[i]):
            members = [self.columns[i].fresh if is_fresh else self.columns[i].stale for i in run]
            part = (self.fresh if is_fresh else self.stale).slice(members[0][0], members[-1][1])
            if len(part):
                self.sequence.splice(part)
        self.sequence.append(self._after, "question")

    def _of(self, fresh: bool, work: Callable[[], T]) -> T:
        self._mix([fresh] * len(self.columns))
        return work()

    def _score(self) -> float:
        """Log-probability of the fresh decision less that of the stale one, in nats."""
        probabilities = decide(self.sequence, list(self.decisions)).probabilities
        stale, fresh = (math.log(max(probabilities[choice], 1e-300)) for choice in self.decisions)
        return fresh - stale

    def _answer(self) -> str:
        with Sampler(SamplerOptions(temperature=0.0)) as sampler:
            return self._workspace.model.text(self.sequence.generate(sampler, ANSWER)).strip()
