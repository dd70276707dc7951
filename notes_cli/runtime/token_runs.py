"""Finds runs of a prompt's tokens that are also in compiled texts or cached prompts, to reuse their K/V.

That K/V was computed after another left context, so it only approximates that of a prefill. It may also hold a
conclusion from the tokens that it was computed after. So a text's K/V is reused from the beginning of the text up to
the first token that differs, and not behind it. A compiled text, or a block of one, was computed by itself, after the
template's opening. K/V of a prompt was computed after the whole prompt, which is one text after that opening.

The beginning of a text is found by the hash of a window of tokens, which is compared with those from each token of the
prompt on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows, Segment, Stored, Tokens, concatenate_rows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError
from notes_cli.runtime.compile import MOVES
from notes_cli.runtime.resolve import APART_SEAM, RUN_SEAM
from notes_cli.runtime.workspace import Workspace

SKIPPED = 2  # tokens at the beginning of a text, compared as bytes: the text before it may change how it is tokenized
WINDOW = 32  # tokens after them by which the text is found
SHORTEST = 48  # fewest tokens of a run
COMPILED_RUN = -1  # origin of a run that was placed from a compiled text; each later move subtracts 1
UNROUNDED = ("f32", "f16", "bf16")  # types of keys that lose little when they are moved (docs/LOG.md)
ALIKE = 0.25  # of a run's windows that are before it, too
_UNUSABLE = -1  # instead of a token


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens [first, last) of a prompt that a source has from `start` on."""

    first: int
    last: int
    source: int  # its number
    start: int

    def __len__(self) -> int:
        return max(0, self.last - self.first)

    def after(self, token: int) -> TokenRun:
        """Return the part from a token of the prompt on."""
        skipped = max(0, token - self.first)
        return replace(self, first=self.first + skipped, start=self.start + skipped)

    def before(self, token: int) -> TokenRun:
        """Return the part before a token of the prompt."""
        return replace(self, last=min(self.last, token))


@dataclass(frozen=True, slots=True)
class Texts:
    """Tokens with the places where texts begin that were computed by themselves. `chained`: each after those before it,
    so that its K/V is of use only in prompts that have them, too, with any text between."""

    tokens: Tokens
    begins: Sequence[int] = (0,)
    chained: bool = False


class TextIndex:
    """The beginnings of texts in several sources by their hashes. Earlier sources are preferred."""

    def __init__(self, model: Model, sources: Sequence[Texts]) -> None:
        self._model, self._sources = model, sources
        self._begins: dict[int, list[tuple[int, int]]] = {}  # by hash: source and place
        for number, source in enumerate(sources):
            for begin in source.begins:
                window = source.tokens[begin + SKIPPED : begin + SKIPPED + WINDOW]
                if len(window) == WINDOW:
                    self._begins.setdefault(int(_hashes(window[None])[0]), []).append((number, begin))
        self._hashes = np.array(sorted(self._begins), np.uint64)

    def runs(self, tokens: Tokens, spans: Sequence[tuple[int, int]], begin: int = 0) -> list[TokenRun]:
        """Return ascending runs of at least SHORTEST tokens within the `spans` [first, last) of the tokens, from token
        `begin` on; of runs that overlap, the longest as a whole. A run may go on in the next span."""
        runs: list[TokenRun] = []
        for first, last in spans:
            if runs and runs[-1].last == first:
                source, start = runs[-1].source, runs[-1].start + len(runs[-1])
                count = common_prefix(tokens[first:last], self._sources[source].tokens[start:])
                runs += [TokenRun(first, first + count, source, start)] if count else []
            if last - first < SKIPPED + WINDOW or not len(self._hashes):
                continue
            hashes = _hashes(sliding_window_view(tokens[first:last], WINDOW))
            free = max(first, runs[-1].last if runs else 0)
            found = list[TokenRun]()
            reached: dict[int, TokenRun] = {}  # the last run of a chained source
            for hit in np.flatnonzero(np.isin(hashes, self._hashes)):
                alike = list[TokenRun]()
                for source, place in self._begins[int(hashes[hit])]:
                    run = self._run(tokens, (free, last), first + int(hit), source, place)
                    if self._sources[source].chained:
                        if not self._continues(run, place, reached.get(source)):
                            continue
                        reached[source] = run
                    alike.append(run)
                found += [max(alike, key=len)] if alike else []  # the first of equal ones
            chosen = list[TokenRun]()
            for run in sorted(found, key=len, reverse=True):
                run = run.after(begin)
                for other in chosen:
                    run = run.after(other.last) if other.first <= run.first else run.before(other.first)
                chosen += [run] if len(run) >= SHORTEST else []
            runs += sorted(chosen, key=lambda run: run.first)
        return runs

    def _continues(self, run: TokenRun, begin: int, before: TokenRun | None) -> bool:
        """Return True if all texts of its source before a run are in the prompt before it."""
        done, last = (before.start + len(before), before.last) if before else (0, run.first)
        reached = max(first for first in self._sources[run.source].begins if first <= done)
        return begin == reached and run.first >= last and len(run) > 0

    def _run(self, tokens: Tokens, span: tuple[int, int], at: int, source: int, begin: int) -> TokenRun:
        """Return the run of a text that has tokens[at] after those skipped, within a span of the tokens; an empty one
        if it has another beginning, or that of a longer word."""
        ids, nothing = self._sources[source].tokens, TokenRun(at, at, source, begin)
        if at < span[0]:
            return nothing
        before = common_prefix(tokens[span[0] : at][::-1], ids[begin : begin + SKIPPED][::-1])
        first, start = at - before, begin + SKIPPED - before
        if (ids[begin:start] == _UNUSABLE).any():  # a skill, which cannot be compared
            return nothing
        ours = self._bytes(ids[begin:start]).lstrip()
        theirs = self._bytes(tokens[max(0, first - 2 * SKIPPED) : first])
        beginning = ours or self._bytes(ids[start : start + 1])
        if not theirs.endswith(ours) or _within_word(theirs[: len(theirs) - len(ours)], beginning):
            return nothing
        return TokenRun(first, at + common_prefix(tokens[at : span[1]], ids[begin + SKIPPED :]), source, start)

    def _bytes(self, tokens: Tokens) -> bytes:
        return b"".join(self._model.token_bytes(int(token), special=True) for token in tokens)


def resembles_earlier(tokens: Tokens, run: TokenRun) -> bool:
    """Return True if much of a run is before it, too: it may be another version of a text. Answers about the two need
    the K/V of a version that has seen the other."""
    if run.first < WINDOW:
        return False
    earlier, own = (
        _hashes(sliding_window_view(part, WINDOW)) for part in (tokens[: run.first], tokens[run.first : run.last])
    )
    return bool(np.isin(own, earlier).mean() > ALIKE)


def _within_word(before: bytes, text: bytes) -> bool:
    """Return True if a text continues a word or a number."""
    return all(end.isalnum() or end > b"\x7f" for end in (before[-1:], text[:1]))


def _hashes(windows: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return a hash of each window, [n, WINDOW]."""
    result: NDArray[np.uint64] = (windows.astype(np.uint64) * _FACTORS).sum(1, dtype=np.uint64)
    return result


_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(WINDOW)], np.uint64)


def common_prefix(one: Tokens, two: Tokens) -> int:
    """Return the number of equal leading tokens."""
    count = min(len(one), len(two))
    same = one[:count] == two[:count]
    return count if same.all() else int(same.argmin())


@dataclass(eq=False)
class Source:
    """Texts whose K/V may be moved into another prompt, and the origins of the moved K/V (prefix_cache.py). `holder`: a
    sequence, or segments one after the other."""

    texts: Texts
    origins: Tokens
    holder: Sequence[Segment] | KVSequence
    seam: int = RUN_SEAM
    used: bool = False
    _read: dict[int, Sequence[LayerRows]] = field(default_factory=dict)

    @classmethod
    def of_compiled(cls, segment: Segment) -> Source:
        """Make a source of a compiled text."""
        texts = Texts(segment.tokens, segment.blocks or segment.parts or (0,), chained=bool(segment.parts))
        origins = np.full(len(segment), COMPILED_RUN, np.int32)
        return cls(texts, origins, [segment], APART_SEAM if segment.blocks else RUN_SEAM)

    @classmethod
    def of_prompt(
        cls, workspace: Workspace, tokens: Tokens, origins: Tokens, holder: Sequence[Segment] | KVSequence
    ) -> Source:
        """Make a source of a cached prompt with these origins. Its text begins after the template's opening, and has no
        skills, which may be edited in place, and no K/V that was moved too often for a cache of this type."""
        moves = MOVES if workspace.context.options.type_k in UNROUNDED else 1
        usable = np.where((origins > 0) | (origins <= -moves), _UNUSABLE, tokens).astype(np.int32)
        begin = common_prefix(tokens, workspace.left_context)
        return cls(Texts(usable, (begin,)), np.minimum(origins, COMPILED_RUN) - 1, holder)

    def rows(self, first: int, last: int) -> Sequence[LayerRows]:
        """Return the K/V of tokens [first, last). That of a file is read once, and not kept with the segment. Raises
        NotesError for a damaged file."""
        assert not isinstance(self.holder, KVSequence)
        parts, place = list[Sequence[LayerRows]](), 0
        for number, segment in enumerate(self.holder):
            if place < last and first < place + len(segment):
                if number not in self._read:
                    rows = segment.layers
                    self._read[number] = rows.read() if isinstance(rows, Stored) and rows.file is not None else rows
                cut = slice(max(0, first - place), last - place)
                parts.append([rows.cut(cut) for rows in self._read[number]])
            place += len(segment)
        return parts[0] if len(parts) == 1 else concatenate_rows(parts)

    def read(self, workspace: Workspace, last: int) -> tuple[Source, int]:
        """Read the K/V of a prompt's text up to token `last` of its sequence into memory. Returns it as a source, and
        the number of tokens before the text. Raises NotesError where that fails."""
        assert isinstance(self.holder, KVSequence)
        self.used = True
        first = min(self.texts.begins)
        rows, _ = self.holder.read(first, last, workspace.context.lossless_type)
        tokens, nothing = self.texts.tokens[first:last], np.zeros(0, np.int32)
        segment = Segment("", "", "", tokens, self.base(first), nothing, (), workspace.identity, rows)
        return Source(Texts(tokens), self.origins[first:last], [segment]), first

    @property
    def name(self) -> str:
        return "" if isinstance(self.holder, KVSequence) else self.holder[0].name

    def base(self, start: int) -> int:
        """Return the position that the keys of a token are rotated to."""
        return self.holder.position(start) if isinstance(self.holder, KVSequence) else self.holder[0].base + start


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRun:
    """A run and the source whose K/V is placed for it."""

    run: TokenRun
    source: Source

    def rows(self, first: int) -> Sequence[LayerRows]:
        """Return the K/V of the run from its token `first` on."""
        return self.source.rows(self.run.start + first, self.run.start + len(self.run))

    def refusal(self, workspace: Workspace, position: int) -> str | None:
        """Return why its K/V cannot be placed at this position, if so. The context may have been made anew since it was
        found, and then rotate keys otherwise."""
        if not isinstance(self.source.holder, KVSequence):
            try:
                for segment in self.source.holder:
                    workspace.check(segment)
            except NotesError as error:
                return error.what
        return workspace.context.can_move(self.source.base(self.run.start), position, len(self.run))


def find_runs(
    workspace: Workspace,
    sources: Sequence[Source],
    tokens: Tokens,
    spans: Sequence[tuple[int, int]],
    begin: int,
    *,
    dry: bool,
) -> tuple[Tokens, list[PlacedRun]]:
    """Return the origins that the K/V of the tokens will have, 0 outside of the runs, and the runs within `spans` from
    token `begin` on, ascending. The K/V of those in a sequence is read, because it may be evicted before it is placed;
    `dry`: it is not."""
    origins, placed = np.zeros(len(tokens), np.int32), []
    runs = TextIndex(workspace.model, [source.texts for source in sources]).runs(tokens, spans, begin)
    ready: dict[int, tuple[Source, int]] = {}  # with the tokens left out at the beginning
    for number in dict.fromkeys(run.source for run in runs):
        ready[number] = sources[number], 0
        if isinstance(sources[number].holder, KVSequence) and not dry:
            last = max(run.start + len(run) for run in runs if run.source == number)
            try:
                ready[number] = sources[number].read(workspace, last)
            except (NotesError, MemoryError):  # its runs are decoded
                del ready[number]
    for run in runs:
        if run.source in ready:
            source, skipped = ready[run.source]
            start = run.start - skipped
            origins[run.first : run.last] = source.origins[start : start + len(run)]
            placed.append(PlacedRun(replace(run, start=start), source))
    return origins, placed
