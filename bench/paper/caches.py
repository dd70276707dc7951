"""K/V caches for the experiments: prefilled, spliced, edited in place, mixed of two prefills."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from notes_cli.engine.positions import Patch, align, apply_patches
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import UnsupportedError
from notes_cli.runtime.generate import decide
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.messages import marker

KEPT = 12  # prefills of texts that several tasks share
OPERATIONS = ("read", "splice", "rewrite")  # of a context, without which K/V cannot be mixed


@dataclass(frozen=True)
class Pair:
    """A decision that one change of a text flips. `old` and `new`: the text in parts, of which those with an odd index
    differ. `choices`: the right answers to the question with the old and with the new text. `label` and `value`: the
    field and its new value, for an erratum."""

    name: str
    before: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    question: str
    choices: tuple[str, str]
    label: str = ""
    value: str = ""


@dataclass(frozen=True)
class Changed:
    """The tokens of a pair's prompts: `old` and `new` between `head` and the question, and the patches from `old` to
    `new`."""

    head: Tokens
    old: Tokens
    new: Tokens
    patches: list[Patch]


class Lab:
    """A model with its context, and the layout of its prompts: a text and a question about it in one user message, or
    (`system`) the text in the system message, as `notes` has it. `erratum` words a correction of (field, value)."""

    def __init__(self, workspace: Workspace, *, system: bool, erratum: Callable[[str, str], str]) -> None:
        """Raises UnsupportedError where the model's K/V cannot be read, moved and rewritten."""
        self.workspace, self.model, self.context = workspace, workspace.model, workspace.context
        self.erratum = erratum
        if self.model.recurrent:
            raise UnsupportedError(f"{self.model.name} keeps a state: its cache cannot be mixed by position")
        self.identity = workspace.identity
        for operation in OPERATIONS:
            if reason := self.context.supports(operation):
                raise UnsupportedError(reason)
        roles = ("system", "user") if system else ("user",)
        marks = [marker(number) for number in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        opening, *between, self.closing = workspace.template.cut(messages, marks)
        self.left = workspace.with_bos(self.model.tokenize(opening, special=True))
        self._between = between[0] if between else ""
        self._prefilled: dict[bytes, Segment] = {}  # by tokens, the latest last

    # Prompts.

    def head(self, before: str) -> Tokens:
        """The tokens before the text, which `before` precedes."""
        return np.concatenate([self.left, self.model.tokenize(before + "\n\n" if before else "")])

    def tail(self, question: str, erratum: str = "") -> Tokens:
        """The tokens after the text: an erratum before the question, or at the end of the system message."""
        correction = f"\n\n{erratum}" if erratum else ""
        first = [(correction, False), (self._between, True)] if self._between else [(f"{correction}\n\n", False)]
        return self.model.tokenize_runs([*first, (question, False), (self.closing, True)])

    def text(self, text: str) -> Tokens:
        return self.model.tokenize(text)

    def changed(self, pair: Pair) -> Changed:
        """Tokenize both texts of a pair, and find where they differ."""
        (old, old_spans), (new, new_spans) = self._spans(pair.old), self._spans(pair.new)
        patches = [Patch(*a, tuple(map(int, new[slice(*b)]))) for a, b in zip(old_spans, new_spans, strict=True)]
        if apply_patches(list(old), patches) != list(new):  # neighbours are tokenized otherwise
            patches = [_difference(list(map(int, old)), list(map(int, new)))]
        return Changed(self.head(pair.before), old, new, patches)

    def _spans(self, parts: Sequence[str]) -> tuple[Tokens, list[tuple[int, int]]]:
        """The tokens of a text, and the range of tokens of each part with an odd index."""
        tokens = self.text("".join(parts))
        ends = np.cumsum([len(self.model.token_bytes(int(token), special=True)) for token in tokens])
        at = int(ends[-1]) - sum(len(part.encode()) for part in parts)  # a blank that the tokenizer puts first
        spans = []
        for number, part in enumerate(parts):
            first, at = at, at + len(part.encode())
            if number % 2:
                spans.append((int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, at)) + 1))
        return tokens, spans

    # Caches.

    def sequence(self, *parts: Tokens) -> KVSequence:
        """A sequence with these tokens, to be decoded. Close it. Raises ContextLengthError for more than the model was
        trained for."""
        sequence = KVSequence(self.context)
        sequence.token_limit = min(sequence.size, self.model.n_ctx_train)
        for part in parts:
            sequence.append(part)
        return sequence

    def prefilled(self, *parts: Tokens) -> KVSequence:
        """The same, decoded: K/V of a prefill that several tasks share is kept. Close it."""
        tokens = np.concatenate(parts)
        key = tokens.tobytes()
        if key not in self._prefilled:
            with self.sequence(tokens) as sequence:
                self._prefilled[key] = self.segment(sequence, 0, len(tokens))
        segment = self._prefilled[key] = self._prefilled.pop(key)
        while len(self._prefilled) > KEPT:
            del self._prefilled[next(iter(self._prefilled))]
        return self.spliced(tokens[:0], segment, boundary=0)

    def segment(self, sequence: KVSequence, first: int, last: int) -> Segment:
        """The K/V of tokens [first, last) of a sequence."""
        sequence.flush()
        layers, _ = sequence.read(first, last, self.context.lossless_type)
        tokens = sequence.tokens
        return Segment("text", "", "", tokens[first:last], first, tokens[:first], (), self.identity, layers)

    def compile(self, tokens: Tokens) -> Segment:
        """The K/V of a text after nothing but the opening of the chat."""
        with self.prefilled(self.left, tokens) as sequence:
            return self.segment(sequence, len(self.left), len(sequence))

    def spliced(self, head: Tokens, segment: Segment, *, boundary: int = 1, rotate: bool = True) -> KVSequence:
        """A sequence with a compiled text after `head`. Close it."""
        sequence = self.sequence(head)
        sequence.splice(segment, seam=boundary, rotate=rotate)
        return sequence

    @contextmanager
    def after(self, sequence: KVSequence, *parts: Tokens) -> Iterator[KVSequence]:
        """The sequence with these tokens appended, which are dropped afterwards."""
        length = len(sequence)
        for part in parts:
            sequence.append(part)
        try:
            yield sequence
        finally:
            sequence.truncate(length)

    def score(self, sequence: KVSequence, choices: Sequence[str]) -> float:
        """Log-probability of the second answer less that of the first, in nats."""
        probabilities = decide(sequence, choices).probabilities
        first, second = (math.log(max(probabilities[choice], 1e-300)) for choice in choices)
        return second - first

    def answer(self, sequence: KVSequence, limit: int) -> str:
        """The greedy answer, of at most so many tokens."""
        with Sampler(SamplerOptions(temperature=0.0)) as sampler:
            return self.model.text(sequence.generate(sampler, limit)).strip()


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


def _difference(old: list[int], new: list[int]) -> Patch:
    """One patch from the first to the last token that differs, of at least one token on either side."""
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)) - 1)
    end = 0
    while end < min(len(old), len(new)) - first - 1 and old[-1 - end] == new[-1 - end]:
        end += 1
    return Patch(first, len(old) - end, tuple(new[first : len(new) - end]))


class Mix:
    """One prompt whose K/V is that of the old text (stale) or of the new one (fresh), column by column. Only its last
    token is decoded after mixing. Use it as a context manager."""

    def __init__(self, lab: Lab, pair: Pair) -> None:
        self.lab, self.pair = lab, pair
        texts = lab.changed(pair)
        tail = lab.tail(pair.question)
        self._last, rest = tail[-1:], tail[:-1]
        patches = [patch.offset(len(texts.head)) for patch in texts.patches]
        with lab.sequence(texts.head, texts.old, rest) as sequence:
            self._stale = lab.segment(sequence, 0, len(sequence))
        with lab.sequence(texts.head, texts.new, rest) as sequence:
            self._fresh = lab.segment(sequence, 0, len(sequence))
        self.columns = columns_of(len(self._stale), patches)
        self.first = next(number for number, column in enumerate(self.columns) if column.field)
        self._placed: list[bool] = []
        self.sequence = lab.sequence()
        self.stale, self.fresh = self.score(lambda _: False), self.score(lambda _: True)

    def close(self) -> None:
        self.sequence.close()

    def __enter__(self) -> Mix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, fresh: Callable[[int], bool]) -> float:
        """The score of a mix; `fresh`: whether the column of this number is."""
        wanted = [fresh(number) for number in range(len(self.columns))]
        same = 0
        while same < len(self._placed) and self._placed[same] == wanted[same]:
            same += 1
        ends = [column.fresh if new else column.stale for column, new in zip(self.columns, wanted, strict=True)]
        self.sequence.truncate(sum(last - first for first, last in ends[:same]))
        for new, run in groupby(range(same, len(wanted)), wanted.__getitem__):
            members = [ends[number] for number in run]
            part = (self._fresh if new else self._stale).slice(members[0][0], members[-1][1])
            if len(part):
                self.sequence.splice(part)
        self._placed = wanted
        with self.lab.after(self.sequence, self._last):
            return self.lab.score(self.sequence, self.pair.choices)

    def recovery(self, fresh: Callable[[int], bool]) -> float:
        """0 where a mix scores as the old text, 1 where it scores as the new one."""
        return (self.score(fresh) - self.stale) / (self.fresh - self.stale)
