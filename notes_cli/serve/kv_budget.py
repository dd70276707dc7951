"""Admission by KV cells: reserve them for running requests, evict idle prefixes, preempt answers.

A prompt is prefilled only when there are cells for all of it and for the beginning of its answer. A longer answer gets
more as it goes on. Idle prefixes are evicted for that, the least recently used first; a context whose size was not
given is made larger, for running requests alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError
from notes_cli.runtime.answering import max_new_tokens
from notes_cli.runtime.prefix_cache import PrefixCache
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.state import State

GRANT = 128  # tokens of an answer that there is room for at a time
TURN = 2048  # tokens of an answer that there is room for when a turn of a session begins: it cannot be set aside
SPARE = 128  # tokens of a template's own words, in a turn of a session, and to spare
SENTENCE = 32  # tokens that a correction takes, beside its own words


def turn_of_session(workspace: Workspace, state: State, request: Request) -> tuple[int, int]:
    """Tokens that a session has with its next prompt, and those that are written after it, each at most."""
    words = (request.question, request.system or "", *request.errata, *request.fields.values())
    told = len(state.tokens) + SPARE + sum(len(workspace.model.tokenize(text)) for text in words)
    told += SENTENCE * (len(request.errata) + len(request.fields) + len(state.pending))
    told += sum(len(one) for one in (*request.splice, *request.images) if isinstance(one, Segment))
    return told, max_new_tokens(workspace, request, request.think)


@dataclass(slots=True, eq=False)
class Reservation:
    """Cells that are reserved for a sequence: tokens that it may have at the moment."""

    sequence: KVSequence
    tokens: int
    more: int = 0  # cells for sequences that will go on from it
    others: int = 0  # these sequences: a sequence each
    kept: int = 0  # of the tokens, for the end of a chain of thought
    preempted: bool = False  # its rows were dropped, to be decoded again

    @property
    def promised(self) -> int:
        """Cells that are reserved and not used yet."""
        return max(0, self.tokens - self.sequence.rows) + self.more

    @property
    def used_up(self) -> bool:
        """Whether what is pending is as much as it may take: another token needs a new reservation."""
        return len(self.sequence) + self.kept >= self.tokens


class KVBudget:
    """Cells and sequences of a workspace's context that are free or reserved."""

    def __init__(self, workspace: Workspace, prefixes: PrefixCache) -> None:
        self._workspace, self._prefixes = workspace, prefixes
        self.reservations: list[Reservation] = []
        self._reserved = 0
        self._sequences = 0  # reserved, too
        self._grows = workspace.grows

    @property
    def cells(self) -> int:
        return self._workspace.context.cells

    @property
    def promised(self) -> int:
        return self._reserved + sum(reservation.promised for reservation in self.reservations)

    @property
    def free(self) -> int:
        """Sequences that are free beside those that are reserved."""
        context = self._workspace.context
        ours = {one.sequence for one in self.reservations} | {one.sequence for one in self._prefixes.entries}
        taken = context.n_leased - len(ours)  # by what has reserved some
        return (
            context.n_free
            - max(0, self._sequences - taken)
            - sum(reservation.others for reservation in self.reservations)
        )

    def has(self, cells: int, sequences: int) -> bool:
        """Whether so much is free beside what is reserved."""
        context = self._workspace.context
        return sequences <= self.free and context.used + self.promised + cells <= context.cells

    def make_room(self, cells: int, sequences: int = 0) -> bool:
        """Evict idle prefixes until so much is free, else grow the context; False where that does not suffice now."""
        while not self.has(cells, sequences):
            if not self._prefixes.evict():
                return self._grow(cells, sequences)
        return True

    @contextmanager
    def reserving(self, cells: int, sequences: int = 1) -> Iterator[None]:
        """Reserve so much for work that is no answer, if it can be had now."""
        cells, sequences = (cells, sequences) if self.make_room(cells, sequences) else (0, 0)
        self._reserved += cells
        self._sequences += sequences
        try:
            yield
        finally:
            self._reserved -= cells
            self._sequences -= sequences

    def can_allocate(self, cells: int) -> bool:
        """Whether the context can have so many cells, with no other request running."""
        return self._grows or cells <= self.cells

    def _grow(self, cells: int, sequences: int) -> bool:
        if not self._grows:
            return False
        wanted = self.promised + cells
        sequences += self._workspace.context.n_free - self.free
        for tokens in (max(wanted, self.cells // 2), wanted):
            try:
                self._workspace.reserve(tokens, sequences)
                return True
            except EngineError:  # the memory does not suffice, or rows would not fit any more
                continue
        return False

    def reserve(self, sequence: KVSequence, tokens: int, more: int = 0, others: int = 0, kept: int = 0) -> Reservation:
        """Reserve room that `make_room` has found."""
        self.reservations.append(Reservation(sequence, tokens, more, others, kept))
        return self.reservations[-1]

    def end(self, reservations: Iterable[Reservation]) -> None:
        for reservation in reservations:
            if reservation in self.reservations:
                self.reservations.remove(reservation)

    def preempt(self, reservations: Iterable[Reservation], length: int) -> None:
        """Give the rows after the first `length` up for others. Raise EngineError where they cannot go back."""
        for reservation in reservations:
            reservation.sequence.preempt(length)
            reservation.tokens, reservation.preempted = reservation.sequence.rows, True

    def can_resume(self, reservations: Sequence[Reservation]) -> bool:
        """Whether those could go on that are preempted. Answers to one prompt have its rows in the same cells, and are
        read again each with its own."""
        return self.can_allocate(sum(len(reservation.sequence) + reservation.kept + 1 for reservation in reservations))

    def resume(self, reservations: Sequence[Reservation], more: int = GRANT) -> bool:
        """Let those go on that were preempted, if there is room for them and so many tokens more."""
        wanted = [
            min(len(reservation.sequence) + reservation.kept + more, reservation.sequence.size)
            for reservation in reservations
        ]
        rows = sum(reservation.sequence.rows for reservation in reservations)
        if not self.make_room(sum(wanted) - rows):
            return False
        for reservation, tokens in zip(reservations, wanted, strict=True):
            reservation.tokens, reservation.preempted = tokens, False
        return True

    def divide(self, reservations: Sequence[Reservation]) -> None:
        """Give what is left to those that are used up. With nothing left each ends with the token that waits, for
        which there is a cell, and a chain of thought with what is kept for its end."""
        waiting = [reservation for reservation in reservations if reservation.used_up and reservation.sequence.pending]
        left = self.cells - self._workspace.context.used - self.promised
        for reservation in waiting:
            if left >= len(waiting):
                reservation.tokens += left // len(waiting)
            else:
                reservation.sequence.token_limit, reservation.kept = (
                    max(len(reservation.sequence), reservation.tokens),
                    0,
                )

    def held(self) -> list[KVSequence]:
        """Sequences that have to wait, as there is no room for another token of theirs; the others have it."""
        found = []
        for reservation in self.reservations:
            if reservation.preempted:
                found.append(reservation.sequence)
            elif reservation.used_up and reservation.sequence.pending:
                if self.make_room(GRANT):
                    reservation.tokens += GRANT
                else:
                    found.append(reservation.sequence)
        return found
