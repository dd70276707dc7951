"""Finds runs of a prompt's tokens that are also in compiled texts or cached prompts, to reuse their K/V.

That K/V was computed after another left context, so it only approximates that of a prefill. A run is found by
hashes of windows: a source has one for each WINDOW tokens, and the prompt one from each token on. Hits are compared
token by token, and extended in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from notes_cli.engine.segment import LayerRows, Segment, Stored, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError
from notes_cli.runtime.compile import MOVES
from notes_cli.runtime.workspace import Workspace

WINDOW = 32
SHORTEST = 2 * WINDOW  # fewest tokens of a run: it then contains a whole window of its source, wherever it begins
CANDIDATES = 8  # places with the same window that are compared
NEARBY = 8  # tokens before a field by which its place is recognised in a prompt
COMPILED_RUN = -1  # origin of a run that was placed from a compiled text; each later move subtracts 1
UNROUNDED = ("f32", "f16", "bf16")  # types of keys that lose little when they are moved (docs/LOG.md)
_UNUSABLE = -1  # instead of a token


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens [first, last) of a prompt that a source has from `start` on."""

    first: int
    last: int
    source: int  # its number
    start: int

    def __len__(self) -> int:
        return self.last - self.first


class TokenIndex:
    """The windows of several sources' tokens by their hashes. Earlier sources are preferred."""

    def __init__(self, sources: Sequence[Tokens]) -> None:
        self._sources = sources
        windows = [tokens[: len(tokens) // WINDOW * WINDOW].reshape(-1, WINDOW) for tokens in sources]
        hashes = np.concatenate([np.zeros(0, np.uint64), *map(_hashes, windows)])
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._numbers = np.repeat(np.arange(len(sources)), [len(each) for each in windows])[order]
        starts = [np.zeros(0, int), *(np.arange(len(each)) * WINDOW for each in windows)]
        self._starts = np.concatenate(starts)[order]

    def runs(self, tokens: Tokens, spans: Sequence[tuple[int, int]]) -> list[TokenRun]:
        """Return ascending runs of at least SHORTEST tokens within the `spans` [first, last) of the tokens: from left
        to right, the longest at each place."""
        runs: list[TokenRun] = []
        for first, last in spans:
            if last - first < SHORTEST or not len(self._hashes):
                continue
            hashes = _hashes(sliding_window_view(tokens[first:last], WINDOW))
            begins = np.searchsorted(self._hashes, hashes)
            ends = np.searchsorted(self._hashes, hashes, "right")
            hits = np.flatnonzero(ends > begins)
            number, free = 0, first
            while number < len(hits):
                hit = hits[number]
                places = range(begins[hit], min(ends[hit], begins[hit] + CANDIDATES))
                found = [self._extend(tokens[free:last], first + int(hit) - free, place) for place in places]
                run = max(found, key=len)  # the first of equal ones
                run = replace(run, first=run.first + free, last=run.last + free)
                if len(run) >= SHORTEST:
                    runs.append(run)
                    free = run.last
                # a window that begins in a run that is too short would find it again
                after = run.last if len(run) >= SHORTEST else run.last - WINDOW + 1
                number = max(number + 1, int(np.searchsorted(hits, after - first)))
        return runs

    def _extend(self, tokens: Tokens, at: int, place: int) -> TokenRun:
        """Return the run around tokens[at], where the window of this place is."""
        source, start = int(self._numbers[place]), int(self._starts[place])
        ids = self._sources[source]
        before = common_prefix(tokens[:at][::-1], ids[:start][::-1])
        return TokenRun(at - before, at + common_prefix(tokens[at:], ids[start:]), source, start - before)


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
    """Tokens whose K/V may be moved into another prompt, and the origins of the moved K/V (prefix_cache.py)."""

    tokens: Tokens
    origins: Tokens
    holder: Segment | KVSequence
    used: bool = False

    @classmethod
    def of_compiled(cls, segment: Segment) -> Source:
        """Make a source of a compiled text, without the first token of a prompt, as in `of_prompt`."""
        tokens = segment.tokens.copy()
        if segment.base == 0:
            tokens[:1] = _UNUSABLE
        return cls(tokens, np.full(len(segment), COMPILED_RUN, np.int32), segment)

    @classmethod
    def of_prompt(cls, tokens: Tokens, origins: Tokens, holder: Segment | KVSequence, type_k: str) -> Source:
        """Make a source of a cached prompt, or of a block of it, with these origins. Left out are skills, which may be
        edited in place, K/V that was moved too often for a cache of this type, and the first token: an attention sink,
        whose K/V is of no use elsewhere."""
        origins, tokens = origins[: len(tokens)], tokens.copy()
        tokens[(origins > 0) | (origins <= -(MOVES if type_k in UNROUNDED else 1))] = _UNUSABLE
        if isinstance(holder, KVSequence) or holder.base == 0:
            tokens[:1] = _UNUSABLE
        return cls(tokens, np.minimum(origins, COMPILED_RUN) - 1, holder)

    @cached_property
    def layers(self) -> Sequence[LayerRows]:
        """The K/V of all tokens; that of a file is read once, and not kept with the segment."""
        assert isinstance(self.holder, Segment)
        layers = self.holder.layers
        return layers.read(layers.file) if isinstance(layers, Stored) and layers.file is not None else layers

    def read(self, workspace: Workspace, first: int, last: int) -> Source:
        """Read the K/V of tokens [first, last) of a sequence into memory. Raises NotesError where that fails."""
        assert isinstance(self.holder, KVSequence)
        self.used = True
        rows, _ = self.holder.read(first, last, workspace.context.lossless_type)
        tokens, base = self.tokens[first:last], self.base(first)
        nothing = np.zeros(0, np.int32)
        segment = Segment("", "", "", tokens, base, nothing, (), workspace.identity, rows)
        return Source(tokens, self.origins[first:last], segment)

    @property
    def name(self) -> str:
        return self.holder.name if isinstance(self.holder, Segment) else ""

    def base(self, start: int) -> int:
        """Return the position that the keys of a token are rotated to."""
        return self.holder.base + start if isinstance(self.holder, Segment) else self.holder.position(start)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRun:
    """A run and the source whose K/V is placed for it."""

    run: TokenRun
    source: Source

    def rows(self, first: int) -> list[LayerRows]:
        """Return the K/V of the run from its token `first` on."""
        return [rows.cut(slice(self.run.start + first, self.run.start + len(self.run))) for rows in self.source.layers]

    def refusal(self, workspace: Workspace, position: int) -> str | None:
        """Return why its K/V cannot be placed at this position, if so. The context may have been made anew since it was
        found, and then rotate keys otherwise."""
        if isinstance(self.source.holder, Segment):
            try:
                workspace.check(self.source.holder)
            except NotesError as error:
                return error.what
        return workspace.context.can_move(self.source.base(self.run.start), position, len(self.run))


def _is_current(run: TokenRun, source: Source, tokens: Tokens) -> bool:
    """Return False if the prompt has another value for a field that its source has before the run: the run's K/V
    contains what the model concluded from the old value."""
    holder = source.holder
    if not isinstance(holder, Segment):
        return True
    before = [field for field in holder.fields if field.first < run.start]
    return all(_contains(tokens, holder.tokens[max(0, field.first - NEARBY) : field.last + 1]) for field in before)


def _contains(tokens: Tokens, part: Tokens) -> bool:
    """Return True if these tokens are somewhere in a prompt."""
    windows = sliding_window_view(tokens, len(part)) if len(part) <= len(tokens) else tokens[:0, None]
    return bool((windows == part).all(1).any())


def find_runs(
    workspace: Workspace, sources: Sequence[Source], tokens: Tokens, spans: Sequence[tuple[int, int]], *, dry: bool
) -> tuple[Tokens, list[PlacedRun]]:
    """Return the origins that the K/V of the tokens will have, 0 outside of the runs, and the runs within `spans`,
    ascending. Those after a field that has another value in the prompt are left out. The K/V of those in a sequence is
    read, because it may be evicted before it is placed; `dry`: it is not."""
    origins, placed = np.zeros(len(tokens), np.int32), []
    for run in TokenIndex([source.tokens for source in sources]).runs(tokens, spans):
        source, start = sources[run.source], run.start
        if not _is_current(run, source, tokens):
            continue
        if isinstance(source.holder, KVSequence) and not dry:
            try:
                source, start = source.read(workspace, start, start + len(run)), 0
            except (NotesError, MemoryError):  # it is decoded
                continue
        origins[run.first : run.last] = source.origins[start : start + len(run)]
        placed.append(PlacedRun(replace(run, start=start), source))
    return origins, placed
