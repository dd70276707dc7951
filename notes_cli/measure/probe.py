"""Probing: on which rows of a skill does a decision rest?

The skill is compiled with the old value of a field (stale) and with a new one (fresh), and the same question is asked
of rows that are mixed of the two. The score of a mix is the log-probability of the fresh text's decision less that of
the stale text's. Its recovery is where the score lies between those of the two texts: at 0 the model acts on the old
value, at 1 as after a full recompute; it may lie outside.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import numpy as np

from notes_cli.editing.change import Change, change, skill_of
from notes_cli.editing.influence import counterfactual
from notes_cli.editing.methods import Method
from notes_cli.engine.decision import decide
from notes_cli.engine.patches import Patch, align
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, Progress, SkillError, UnsupportedError
from notes_cli.measure.answers import ANSWER
from notes_cli.measure.verify import field_questions
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.compiling import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.fields import clean_value
from notes_cli.text.skill import with_values

WINDOWS = 128  # so many places are probed at most, unless a window is asked for


class AlikeError(NotesError):
    """The two texts decide the same, so there is nothing to locate."""


@dataclass(frozen=True, slots=True)
class Column:
    """Tokens [first, last) of the stale text, and those of the fresh one that take their place."""

    stale: tuple[int, int]
    fresh: tuple[int, int]
    field: bool  # whether they are of the changed value

    @property
    def tokens(self) -> int:
        """Tokens that a recompute of it decodes."""
        return self.fresh[1] - self.fresh[0]


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
    """One question to a skill whose rows are mixed of two compiles: each method assembles a mix and gives its recovery.

    The prompt is assembled once, up to the skill; a mix keeps what it has in common with the one before it.
    """

    def __init__(
        self,
        workspace: Workspace,
        segment: Segment,
        field: str,
        value: str | None = None,
        *,
        question: str | None = None,
        choices: Sequence[str] | None = None,
        system: str | None = None,
        before: Sequence[Segment] = (),
        compiling: Progress | None = None,
    ) -> None:
        """`value`: the new one; one of the same kind is made up if it is None. `before`: other skills, spliced before.

        Without `choices` the two greedy answers are compared; without a question the field is asked for, and its two
        values are the choices. `compiling` is told how many tokens of the fresh text have been prefilled. Raise
        AlikeError if both texts decide the same, SkillError for a field that is not there, UnsupportedError where rows
        cannot be moved.
        """
        self._workspace = workspace
        model = workspace.model
        reason = workspace.context.supports("splice")
        if reason:
            raise UnsupportedError(f"{segment.name} cannot be probed on {model.name}: {reason}")
        self.old, self.new = _values(segment, field, value)
        changed = change(model, segment, {field: self.new})
        if changed is None:
            raise NotesError(f"{field} is {self.old} already: there is nothing to compare", "Give it another value")
        self.change: Change = changed
        self.columns = columns_of(len(segment), changed.patches)
        self.first = next(i for i, column in enumerate(self.columns) if column.field)
        if choices is None and question is None:
            choices = (self.old, self.new)
        self._longest = max([ANSWER, *(len(model.tokenize(" " + choice)) for choice in choices or ())])
        self.question = question or field_questions([_only(segment, field)])[0]
        self.stale, self.fresh = _compiled(workspace, segment, field, self.new, compiling)
        others = [replace(other, fields=()) for other in before]  # of this field it is the probed skill's that changes
        self._prompt = Prompt(self.question, [*others, self.stale], system=system)
        self.notebook = workspace.notebook()
        try:
            self._assemble(self._prompt)
            self.decisions = self._decide(lambda: decide(self.notebook, choices).choice if choices else self._said())
            self.scores = self._score_of(False), self._score_of(True)
            if not self.scores[0] < self.scores[1]:
                raise self._alike(self.decisions[0])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what its notebook takes of the context."""
        self.notebook.close()

    def __enter__(self) -> Mixes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Mixes, by what of them is fresh. Nothing before the field differs.

    def recovery(self, fresh: Sequence[bool]) -> float:
        """Of any mix: for each column, whether its rows are fresh."""
        self._mix(fresh)
        return self._recovered(self._score())

    def field_only(self) -> float:
        """The field's rows fresh, all else stale."""
        return self.recovery([column.field for column in self.columns])

    def after_only(self) -> float:
        """All rows after the field fresh, its own stale."""
        return self.recovery([i > self.first and not column.field for i, column in enumerate(self.columns)])

    def between(self, first: int, last: int) -> float:
        """Columns [first, last) fresh."""
        return self.recovery([first <= i < last for i in range(len(self.columns))])

    def share_from_field(self, share: float) -> float:
        """The first `share` (0 to 1) of all columns from the field on fresh."""
        return self.between(self.first, self.first + round(share * (len(self.columns) - self.first)))

    def share_from_end(self, share: float) -> float:
        """The last `share` (0 to 1) of all columns from the field on fresh."""
        return self.between(len(self.columns) - round(share * (len(self.columns) - self.first)), len(self.columns))

    def by_method(self, name: str) -> float:
        """Of the stale skill, amended by an edit method. Raise UnsupportedError where this model cannot do it."""
        field = self.change.fields[0]
        self._assemble(replace(self._prompt, fields={field: self.new}, method=Method.parse(name)))
        return self._recovered(self._score())

    @property
    def rewrites(self) -> bool:
        """Whether this model can do what `by_method` asks for."""
        return self._workspace.context.supports("rewrite") is None

    def characters(self) -> list[tuple[int, int]]:
        """Characters [start, end) of the stale text that each of its tokens touches, be it with a part of one."""
        text, model = self.stale.text, self._workspace.model
        sizes = [len(model.token_bytes(int(token))) for token in self.stale.tokens]
        ends = list(accumulate((len(char.encode()) for char in text), initial=0))
        blank = sum(sizes) - ends[-1]  # some tokenizers put one before the text
        cuts = [max(0, cut - blank) for cut in accumulate(sizes, initial=0)]
        return [(bisect_right(ends, a) - 1, bisect_left(ends, b)) for a, b in pairwise(cuts)]

    # Assembling.

    def _assemble(self, prompt: Prompt) -> None:
        """Assemble a whole prompt; what precedes and what follows the skill is the same for all mixes."""
        # A mix may be longer than the prompt, and answers follow it while they are scored.
        room = self._longest + sum(max(0, patch.grows) for patch in self.change.patches)
        self.notebook.close()
        self.notebook = assemble(self._workspace, prompt, seam=0, room=room)
        self._mixed: list[bool] = []
        if prompt is self._prompt:
            mine = [piece for piece in self.notebook.pieces if piece.kind == "splice" and piece.name == self.stale.name]
            if mine[0].how != "spliced":
                raise UnsupportedError(f"{self.stale.name} cannot be probed here: {mine[0].detail}")
            self._workspace.check(self.fresh)  # as `assemble` does: a larger context may rotate otherwise
            self._start = mine[0].position
            self._after = self.notebook.tokens[self._start + len(self.stale) :]

    def _mix(self, fresh: Sequence[bool]) -> None:
        """Assemble a mix and the question after it; what it has in common with the mix that is there stays."""
        pairs = zip(self._mixed, fresh, strict=False)
        same = next((i for i, (was, will) in enumerate(pairs) if was != will), len(self._mixed))
        self._mixed = list(fresh[:same])
        self.notebook.truncate(self._start + sum(map(self._width, range(same), fresh)))
        for is_fresh, run in groupby(range(same, len(self.columns)), lambda i: fresh[i]):
            members = [self.columns[i].fresh if is_fresh else self.columns[i].stale for i in run]
            part = (self.fresh if is_fresh else self.stale).slice(members[0][0], members[-1][1])
            if len(part):
                self.notebook.splice(part)
        self._mixed = list(fresh)
        self.notebook.append(self._after, "question")

    def _width(self, index: int, fresh: bool) -> int:
        first, last = self.columns[index].fresh if fresh else self.columns[index].stale
        return last - first

    # Deciding.

    def _recovered(self, score: float) -> float:
        stale, fresh = self.scores
        return (score - stale) / (fresh - stale)

    def _score_of(self, fresh: bool) -> float:
        self._mix([fresh] * len(self.columns))
        return self._score()

    def _score(self) -> float:
        """Log-probability of the fresh decision less that of the stale one, in nats."""
        probabilities = decide(self.notebook, self.decisions).probabilities
        stale, fresh = (math.log(max(probabilities[choice], 1e-300)) for choice in self.decisions)
        return fresh - stale

    def _decide(self, answer: Callable[[], str]) -> tuple[str, str]:
        """What the two texts answer. Raise AlikeError if that is the same."""
        found = []
        for fresh in (False, True):
            self._mix([fresh] * len(self.columns))
            found.append(answer())
        if found[0] == found[1]:
            raise self._alike(found[0])
        return found[0], found[1]

    def _said(self) -> str:
        """The greedy answer."""
        with Sampler(SamplerOptions(temperature=0.0)) as sampler:
            answer = self._workspace.model.text(self.notebook.generate(sampler, ANSWER)).strip()
        if not answer:
            raise NotesError(f"the model has no answer to {self.question!r}", Help.CHOICES())
        return answer

    def _alike(self, choice: str) -> AlikeError:
        field = self.change.fields[0]
        return AlikeError(
            f"asked {self.question!r}, {self.stale.name} decides the same with {field}={self.old} and "
            f"{field}={self.new}: {choice!r}, so there is nothing to locate",
            Help.OTHER_VALUE_OR_QUESTION(),
        )


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring tokens that were probed together: tokens [first, last) and characters [start, end) of the text."""

    first: int
    last: int
    start: int
    end: int
    text: str
    field: bool  # whether they are of the changed value
    tokens: int  # that a recompute of it decodes
    alone: float  # recovery with only this window fresh
    suffix: float  # with everything from it on
    prefix: float  # with everything from the field up to it


@dataclass(frozen=True, slots=True)
class Probe:
    """All probes of one decision. Pairs are of the stale and the fresh text; `windows` begin at the field.

    `places` are the characters [start, end) of the field's value in the stale `text`. `by_field` and `by_suffix` are
    the recoveries of the edit methods of that name: None where rows cannot be rewritten.
    """

    skill: str
    text: str
    field: str
    places: tuple[tuple[int, int], ...]
    values: tuple[str, str]
    question: str
    decisions: tuple[str, str]
    scores: tuple[float, float]
    field_only: float
    after_only: float
    by_field: float | None
    by_suffix: float | None
    window: int
    windows: tuple[Window, ...]

    def __repr__(self) -> str:
        (old, new), (before, after) = self.values, self.decisions
        found = f"field only {self.field_only:.2f}, after it only {self.after_only:.2f}"
        return f"Probe({self.skill!r}, {self.field} {old!r} to {new!r}, {before!r} to {after!r}, {found})"

    @property
    def best(self) -> Window | None:
        """The window after the field that recovers most on its own."""
        after = [window for window in self.windows if not window.field]
        return max(after, key=lambda window: window.alone, default=None)

    @property
    def field_tokens(self) -> int:
        return sum(window.tokens for window in self.windows if window.field)

    @property
    def after_tokens(self) -> int:
        return sum(window.tokens for window in self.windows if not window.field)

    def reach(self, recovery: float) -> int:
        """How many tokens from the field on must be fresh for so much recovery, from 0 to 1."""
        tokens = accumulate(window.tokens for window in self.windows)
        enough = (n for n, window in zip(tokens, self.windows, strict=True) if window.prefix >= recovery)
        return next(enough, self.field_tokens + self.after_tokens)


def probe(mixes: Mixes, window: int | None = None, progress: Progress | None = None) -> Probe:
    """Probe a decision token by token, or in windows of `window` tokens.

    `progress` is told how many mixes have been measured, and of how many.
    """
    count = len(mixes.columns)
    window = window or math.ceil((count - mixes.first) / WINDOWS)
    spans = _windows(mixes.columns, mixes.first, window)
    done, total = 0, 3 * len(spans) + (4 if mixes.rewrites else 2)

    def step(recovery: float) -> float:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)
        return recovery

    suffix = [step(mixes.between(first, count)) for first, _ in reversed(spans)][::-1]
    alone = [step(mixes.between(*span)) for span in spans]
    prefix = [step(mixes.between(mixes.first, last)) for _, last in spans]
    field_only, after_only = step(mixes.field_only()), step(mixes.after_only())
    by_field, by_suffix = (step(mixes.by_method(name)) if mixes.rewrites else None for name in ("field", "suffix"))
    characters, name = mixes.characters(), mixes.change.fields[0]
    windows = []
    for (first, last), *recoveries in zip(spans, alone, suffix, prefix, strict=True):
        members = mixes.columns[first:last]
        tokens = members[0].stale[0], members[-1].stale[1]
        start, end = characters[tokens[0]][0], characters[tokens[1] - 1][1]
        size = sum(column.tokens for column in members)
        text = mixes.stale.text[start:end]
        windows.append(Window(*tokens, start, end, text, members[0].field, size, *recoveries))
    return Probe(
        skill=mixes.stale.name,
        text=mixes.stale.text,
        field=name,
        places=tuple((span.start, span.end) for span in mixes.stale.fields if span.name == name),
        values=(mixes.old, mixes.new),
        question=mixes.question,
        decisions=mixes.decisions,
        scores=mixes.scores,
        field_only=field_only,
        after_only=after_only,
        by_field=by_field,
        by_suffix=by_suffix,
        window=window,
        windows=tuple(windows),
    )


def _windows(columns: Sequence[Column], first: int, size: int) -> list[tuple[int, int]]:
    """Columns [first, last) of each window, from the field on; none holds both of the field and of what is not."""
    spans: list[tuple[int, int]] = []
    for _, run in groupby(range(first, len(columns)), lambda i: columns[i].field):
        members = list(run)
        spans += [(i, min(i + size, members[-1] + 1)) for i in members[::size]]
    return spans


def _values(segment: Segment, field: str, value: str | None) -> tuple[str, str]:
    """The field's value, and the one to compare it with."""
    old = next((span.value for span in segment.fields if span.name == field), None)
    if old is None:
        known = ", ".join(dict.fromkeys(span.name for span in segment.fields)) or "none"
        raise SkillError(f"{segment.name} has no field {field!r}", f"Its fields: {known}")
    return old, counterfactual(old) if value is None else clean_value(field, value)


def _only(segment: Segment, field: str) -> Segment:
    return replace(segment, fields=tuple(span for span in segment.fields if span.name == field))


def _compiled(
    workspace: Workspace, segment: Segment, field: str, value: str, progress: Progress | None
) -> tuple[Segment, Segment]:
    """The text with its own value and with another one, both compiled in one piece after the same left context."""
    skill = skill_of(segment)
    as_is = not segment.blocks and np.array_equal(segment.context, workspace.left_context)
    stale = segment if as_is else compile_skill(workspace, skill)
    return stale, compile_skill(workspace, with_values(skill, {field: value}), progress)
