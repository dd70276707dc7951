"""Finds runs of a prompt's tokens that are also in compiled texts or cached prompts, to reuse their K/V.

That K/V was computed after another left context, so it only approximates that of a prefill. It may also hold a
conclusion from what it was computed after. So a run is placed only where all of that precedes it in the prompt,
unchanged and with nothing in between (`Source.permitted`): a text's K/V is reused from its beginning up to the first
difference. A compiled text, or a block of one, was computed by itself; K/V of a prompt has seen the whole prompt.

A run is found by hashes of windows: a source has one for each WINDOW tokens, and the prompt one from each token on.
Hits are compared token by token, and extended in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows, Segment, Stored, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError
from notes_cli.runtime.compile import MOVES
from notes_cli.runtime.workspace import Workspace

WINDOW = 32
SHORTEST = 2 * WINDOW  # fewest tokens of a run: it then contains a whole window of its source, wherever it begins
CANDIDATES = 8  # places with the same window that are compared
NEARBY = 16  # tokens before a run that are compared first, as most differences are there
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

    def runs(
        self,
        tokens: Tokens,
        spans: Sequence[tuple[int, int]],
        permitted: Callable[[TokenRun], TokenRun] = lambda run: run,
    ) -> list[TokenRun]:
        """Return ascending runs of at least SHORTEST tokens within the `spans` [first, last) of the tokens: from left
        to right, the longest at each place. `permitted` returns the part of a run that may be placed."""
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
                found = [self._extend(tokens, (free, last), first + int(hit), place) for place in places]
                run = max(map(permitted, found), key=len)  # the first of equal ones
                if len(run) >= SHORTEST:
                    runs.append(run)
                    free = run.last
                    number = max(number + 1, int(np.searchsorted(hits, free - first)))
                else:
                    number += 1
        return runs

    def _extend(self, tokens: Tokens, span: tuple[int, int], at: int, place: int) -> TokenRun:
        """Return the run around tokens[at], where the window of this place is, within a span of the tokens."""
        source, start = int(self._numbers[place]), int(self._starts[place])
        ids = self._sources[source]
        before = common_prefix(tokens[span[0] : at][::-1], ids[:start][::-1])
        return TokenRun(at - before, at + common_prefix(tokens[at : span[1]], ids[start:]), source, start - before)


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
    """Tokens whose K/V may be moved into another prompt, and the origins of the moved K/V (prefix_cache.py).

    `seen`: the tokens that the K/V of the last one was computed after, and itself, with their origins; those of the
    source are from `offset` on. `begins`: where in `seen` each text begins that was computed by itself."""

    tokens: Tokens
    origins: Tokens
    holder: Segment | KVSequence
    seen: Tokens
    seen_origins: Tokens
    begins: tuple[int, ...] = (0,)
    offset: int = 0
    used: bool = False

    @classmethod
    def of_compiled(cls, segment: Segment) -> Source:
        """Make a source of a compiled text, without the first token of a prompt, as in `of_prompt`."""
        tokens, decoded = segment.tokens.copy(), np.zeros(len(segment), np.int32)
        if segment.base == 0:
            tokens[:1] = _UNUSABLE
        begins = segment.blocks or (0,)
        return cls(tokens, np.full(len(segment), COMPILED_RUN, np.int32), segment, segment.tokens, decoded, begins)

    @classmethod
    def of_prompt(
        cls, workspace: Workspace, seen: Tokens, origins: Tokens, holder: Segment | KVSequence, offset: int = 0
    ) -> Source:
        """Make a source of a cached prompt `seen` with these origins, or of a block of it from `offset` on. Left out
        are skills, which may be edited in place, K/V that was moved too often for a cache of this type, and the first
        token: an attention sink, whose K/V is of no use elsewhere. Its text begins after the template's opening."""
        moves = MOVES if workspace.context.options.type_k in UNROUNDED else 1
        unusable = (origins > 0) | (origins <= -moves)
        unusable[:1] = True
        tokens = np.where(unusable, _UNUSABLE, seen).astype(np.int32)[offset:]
        moved = np.minimum(origins[offset:], COMPILED_RUN) - 1
        begins = (common_prefix(seen, workspace.left_context),)
        return cls(tokens, moved, holder, seen, np.maximum(origins, 0), begins, offset)

    def permitted(self, model: Model, tokens: Tokens, origins: Tokens, run: TokenRun) -> TokenRun:
        """Return the part of a run whose K/V has seen nothing else than what precedes it in the prompt, from the
        beginning of its text on; empty if there is none. Trailing blanks and empty lines may differ. `origins`: of the
        prompt's tokens; skills and images are the same only with the same origin."""
        start, last = run.start + self.offset, run.start + self.offset + len(run)
        begin = max((begin for begin in self.begins if begin <= start), default=None)
        if begin is None or not self._precedes(model, tokens, origins, run.first, begin, start):
            begin = min((begin for begin in self.begins if start < begin < last), default=last)
            run = replace(run, first=run.first + begin - start, start=run.start + begin - start)
        return run

    def _precedes(self, model: Model, tokens: Tokens, origins: Tokens, first: int, begin: int, start: int) -> bool:
        """Return True if what the source has in [begin, start) is right before token `first` of a prompt."""

        def ours(first: int, last: int) -> bytes:
            return _text(model, self.seen[first:last], self.seen_origins[first:last])

        def theirs(first: int, last: int) -> bytes:
            return _text(model, tokens[max(0, first) : last], origins[max(0, first) : last])

        at = first - (start - begin)
        if (
            at >= 0
            and np.array_equal(tokens[at:first], self.seen[begin:start])
            and np.array_equal(np.maximum(origins[at:first], 0), self.seen_origins[begin:start])
        ):
            return not _within_word(theirs(at - 1, at), ours(begin, start + 1))
        for near in (max(begin, start - NEARBY), begin):
            before, text = theirs(first - 2 * (start - near) - NEARBY, first), _lines(ours(near, start)).lstrip()
            if text:
                if not (before := _lines(before)).endswith(text):
                    return False
                before = before.removesuffix(text)
        return not _within_word(before, ours(begin, start + 1).lstrip())

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
        seen = self.seen[:last], self.seen_origins[:last]
        return Source(tokens, self.origins[first:last], segment, *seen, self.begins, offset=first)

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


def _text(model: Model, tokens: Tokens, origins: Tokens) -> bytes:
    """Return the text of tokens, with the numbers of the origins of skills and images."""
    texts = {token: model.token_bytes(token, special=True) for token in set(tokens.tolist())}
    marked = (b"\0%d\0" % origin if origin > 0 else b"" for origin in origins.tolist())
    return b"".join(mark + texts[token] for mark, token in zip(marked, tokens.tolist(), strict=True))


def _lines(text: bytes) -> bytes:
    """Return the lines of a text, without trailing blanks and empty lines."""
    return b"\n".join(line for line in map(bytes.rstrip, text.split(b"\n")) if line)


def _within_word(before: bytes, text: bytes) -> bool:
    """Return True if a text continues a word or a number."""
    ends = before[-1:], text[:1]
    return all(end.isalnum() or end > b"\x7f" for end in ends)


def find_runs(
    workspace: Workspace,
    sources: Sequence[Source],
    tokens: Tokens,
    origins: Tokens,
    spans: Sequence[tuple[int, int]],
    *,
    dry: bool,
) -> tuple[Tokens, list[PlacedRun]]:
    """Return the origins that the K/V of the tokens will have, those given outside of the runs, and the runs within
    `spans`, ascending. The K/V of those in a sequence is read, because it may be evicted before it is placed; `dry`: it
    is not."""
    placed, found = list[PlacedRun](), origins.copy()

    def permitted(run: TokenRun) -> TokenRun:
        return sources[run.source].permitted(workspace.model, tokens, origins, run)

    for run in TokenIndex([source.tokens for source in sources]).runs(tokens, spans, permitted):
        source, start = sources[run.source], run.start
        if isinstance(source.holder, KVSequence) and not dry:
            try:
                source, start = source.read(workspace, start, start + len(run)), 0
            except (NotesError, MemoryError):  # it is decoded
                continue
        found[run.first : run.last] = source.origins[start : start + len(run)]
        placed.append(PlacedRun(replace(run, start=start), source))
    return found, placed
