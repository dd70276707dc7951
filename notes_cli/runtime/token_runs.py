"""Finds runs of a prompt's tokens that are also in compiled texts, to reuse their K/V.

That K/V was computed after the template's opening alone, so it only approximates that of a prefill. It may also hold a
conclusion from the tokens that it was computed after. So the K/V of a text, or of a block of one, is reused from its
beginning up to the first token that differs, and not behind it.

The beginning of a text is found by the hash of a window of tokens, which is compared with those from each token of the
prompt on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from notes_cli.engine.model import Model
from notes_cli.engine.segment import LayerRows, Segment, Stored, Tokens
from notes_cli.errors import NotesError
from notes_cli.runtime.resolve import APART_SEAM, RUN_SEAM
from notes_cli.runtime.workspace import Workspace

SKIPPED = 2  # tokens at the beginning of a text, compared as bytes: the text before it may change how it is tokenized
WINDOW = 32  # tokens after them by which the text is found
SHORTEST = 48  # fewest tokens of a run
MOVED = -1  # origin of K/V of a run
ALIKE = 0.25  # of a run's windows that are before it, too


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
        `begin` on; of runs that overlap, the longest as a whole."""
        runs: list[TokenRun] = []
        for first, last in spans:
            if last - first < SKIPPED + WINDOW or not len(self._hashes):
                continue
            hashes = _hashes(sliding_window_view(tokens[first:last], WINDOW))
            found = list[TokenRun]()
            reached: dict[int, TokenRun] = {}  # the last run of a chained source
            for hit in np.flatnonzero(np.isin(hashes, self._hashes)):
                alike = list[TokenRun]()
                for source, place in self._begins[int(hashes[hit])]:
                    run = self._run(tokens, (first, last), first + int(hit), source, place)
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
        before = common_prefix(tokens[span[0] : at][::-1], ids[begin : begin + SKIPPED][::-1])
        first, start = at - before, begin + SKIPPED - before
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
    """A compiled text whose K/V may be moved into a prompt."""

    segment: Segment
    _read: Sequence[LayerRows] | None = None  # of a file

    @property
    def texts(self) -> Texts:
        segment = self.segment
        return Texts(segment.tokens, segment.blocks or segment.parts or (0,), chained=bool(segment.parts))

    @property
    def seam(self) -> int:
        """Tokens at the start of a run that are decoded."""
        return APART_SEAM if self.segment.blocks else RUN_SEAM

    def rows(self, first: int, last: int) -> Sequence[LayerRows]:
        """Return the K/V of tokens [first, last). That of a file is read once, and not kept with the segment. Raises
        NotesError for a damaged file."""
        if self._read is None:
            rows = self.segment.layers
            self._read = rows.read() if isinstance(rows, Stored) and rows.file is not None else rows
        return [rows.cut(slice(first, last)) for rows in self._read]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRun:
    """A run and the source whose K/V is placed for it."""

    run: TokenRun
    source: Source

    @property
    def base(self) -> int:
        """The position that the keys of its first token are rotated to."""
        return self.source.segment.base + self.run.start

    def rows(self, first: int) -> Sequence[LayerRows]:
        """Return the K/V of the run from its token `first` on."""
        return self.source.rows(self.run.start + first, self.run.start + len(self.run))

    def refusal(self, workspace: Workspace, position: int) -> str | None:
        """Return why its K/V cannot be placed at this position, if so. The context may have been made anew since it was
        found, and then rotate keys otherwise."""
        try:
            workspace.check(self.source.segment)
        except NotesError as error:
            return error.what
        return workspace.context.can_move(self.base, position, len(self.run))
