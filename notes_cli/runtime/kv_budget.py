"""Admits requests by KV cells: reserves cells for running requests, evicts idle prefixes, preempts answers.

A request is admitted when there are cells for its prompt and the first tokens of its answer; a longer answer reserves
more as it grows. Idle prefixes are evicted first, least recently used first; then a context without a fixed size grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError
from notes_cli.runtime.prefix_cache import PrefixCache
from notes_cli.runtime.workspace import Workspace

GRANT = 128  # answer tokens that are reserved at a time


@dataclass(slots=True, eq=False)
class Reservation:
    """Cells that are reserved for a sequence."""

    sequence: KVSequence
    tokens: int  # that it may have
    fork_cells: int = 0  # cells for sequences that will be forked from it
    forks: int = 0  # number of these sequences
    reasoning_end: int = 0  # of `tokens`, those for the end of the reasoning
    preempted: bool = False  # its KV entries were dropped, to be decoded again

    @property
    def promised(self) -> int:
        """Cells that are reserved and not used."""
        return max(0, self.tokens - self.sequence.rows) + self.fork_cells

    @property
    def exhausted(self) -> bool:
        """True if another token needs a larger reservation, and may have one."""
        limit = self.sequence.token_limit
        may_grow = limit is None or self.tokens < limit
        return may_grow and len(self.sequence) + self.reasoning_end >= self.tokens


class KVBudget:
    """Accounts for the free and the reserved cells and sequences of a workspace's context."""

    def __init__(self, workspace: Workspace, prefixes: PrefixCache) -> None:
        self._workspace, self._prefixes = workspace, prefixes
        self.reservations: list[Reservation] = []
        self._reserved = 0  # cells for work other than answers (`reserving`)
        self._sequences = 0  # likewise
        self._grows = workspace.grows
        self._failed = False  # to grow, since the last release: each attempt recreates the context

    @property
    def cells(self) -> int:
        return self._workspace.context.cells

    @property
    def promised(self) -> int:
        return self._reserved + sum(reservation.promised for reservation in self.reservations)

    @property
    def free(self) -> int:
        """Sequences that are neither used nor reserved."""
        context = self._workspace.context
        running = {reservation.sequence for reservation in self.reservations}
        cached = {prefix.sequence for prefix in self._prefixes.entries}
        taken = context.n_leased - len(running | cached)  # in `reserving`
        forks = sum(reservation.forks for reservation in self.reservations)
        return context.n_free - max(0, self._sequences - taken) - forks

    @property
    def most(self) -> int:
        """Cells that the context has, or may have after it has grown."""
        longest = self._workspace.longest or self.cells
        return longest if self._grows else min(self.cells, longest)

    def has(self, cells: int, sequences: int) -> bool:
        """Return True if as many cells and sequences are neither used nor reserved."""
        context = self._workspace.context
        return sequences <= self.free and context.used + self.promised + cells <= context.cells

    def ensure_free(self, cells: int, sequences: int = 0, spare: int | None = None) -> bool:
        """Evict idle prefixes, then grow the context, until as much is free; False if that does not suffice now. With
        `spare`, grow first, by so many cells more if possible."""
        if spare is not None and not self.has(cells, sequences) and self.grow(cells, sequences, spare):
            return True
        while not self.has(cells, sequences):
            if not self._prefixes.evict():
                return self.grow(cells, sequences)
        return True

    @contextmanager
    def reserving(self, cells: int) -> Iterator[None]:
        """Reserve cells and a sequence for work other than answers, if they are available now."""
        cells, sequences = (cells, 1) if self.ensure_free(cells, 1) else (0, 0)
        self._reserved += cells
        self._sequences += sequences
        try:
            yield
        finally:
            self._reserved -= cells
            self._sequences -= sequences

    def grow(self, cells: int, sequences: int, spare: int = 0) -> bool:
        """Grow the context until as much is free, and `spare` cells more if possible; False if it cannot."""
        if not self._grows or self._failed:
            return False
        wanted = self.promised + cells
        sequences += self._workspace.context.n_free - self.free
        for tokens in dict.fromkeys((wanted + spare, max(wanted, self.cells // 2), wanted)):
            try:
                self._workspace.reserve(tokens, sequences)
                return True
            except EngineError:  # out of memory, or KV entries would not fit any more
                continue
        self._failed = True
        return False

    def reserve(
        self, sequence: KVSequence, tokens: int, fork_cells: int = 0, forks: int = 0, reasoning_end: int = 0
    ) -> Reservation:
        """Reserve cells that `ensure_free` has found."""
        self.reservations.append(Reservation(sequence, tokens, fork_cells, forks, reasoning_end))
        return self.reservations[-1]

    def release(self, reservations: Iterable[Reservation]) -> None:
        self._failed = False
        for reservation in reservations:
            if reservation in self.reservations:
                self.reservations.remove(reservation)

    def preempt(self, reservations: Iterable[Reservation], length: int) -> None:
        """Drop the KV entries after the first `length`. Raises EngineError if the sequence cannot be truncated."""
        for reservation in reservations:
            reservation.sequence.preempt(length)
            reservation.tokens, reservation.preempted = reservation.sequence.rows, True

    def can_resume(self, reservations: Sequence[Reservation]) -> bool:
        """Return True if these can be resumed once preempted. Answers to one prompt share its cells, but each decodes
        the prompt again for itself."""
        lengths = (len(reservation.sequence) + reservation.reasoning_end + 1 for reservation in reservations)
        return self._grows or sum(lengths) <= self.cells

    def resume(self, reservations: Sequence[Reservation], more: int = GRANT) -> bool:
        """Resume preempted sequences with capacity for `more` tokens each; False if there are too few cells."""
        wanted = [
            min(len(reservation.sequence) + reservation.reasoning_end + more, reservation.sequence.size)
            for reservation in reservations
        ]
        rows = sum(reservation.sequence.rows for reservation in reservations)
        if not self.ensure_free(sum(wanted) - rows):
            return False
        for reservation, tokens in zip(reservations, wanted, strict=True):
            reservation.tokens, reservation.preempted = tokens, False
        return True

    def divide(self, reservations: Sequence[Reservation]) -> None:
        """Divide the free cells among exhausted sequences. Without any, each ends with its pending token, which has a
        cell, and reasoning with the tokens reserved for its end."""
        exhausted = [
            reservation for reservation in reservations if reservation.exhausted and reservation.sequence.pending
        ]
        left = self.cells - self._workspace.context.used - self.promised
        for reservation in exhausted:
            if left >= len(exhausted):
                reservation.tokens += left // len(exhausted)
            else:
                reservation.sequence.token_limit = max(len(reservation.sequence), reservation.tokens)
                reservation.reasoning_end = 0

    def blocked(self) -> list[KVSequence]:
        """Enlarge exhausted reservations; return the sequences without a cell for their next token."""
        blocked = []
        for reservation in self.reservations:
            if reservation.preempted:
                blocked.append(reservation.sequence)
            elif reservation.exhausted and reservation.sequence.pending:
                if self.ensure_free(GRANT):
                    reservation.tokens += GRANT
                else:
                    blocked.append(reservation.sequence)
        return blocked
