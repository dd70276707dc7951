"""Sequences: who holds which of a context's, and giving them back.

A context has a number of sequences. Whoever wants to keep rows takes one and has it alone until it is closed; a second
one may go on from the same rows without copying them (Context.share).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from notes_cli.errors import EngineError


class Lease:
    """One sequence of a context, for whoever holds it. Close it, or use it as a context manager."""

    def __init__(self, pool: Pool, number: int, ticket: int) -> None:
        self.tokens: list[int] = []  # of its rows, and of those that are to come
        self._pool, self._number, self._ticket = pool, number, ticket

    @property
    def id(self) -> int:
        """Its number in the context. Raise EngineError if it is no longer held."""
        if not self.held:
            raise EngineError("this sequence was given back, or its context was cleared: its rows are gone")
        return self._number

    @property
    def held(self) -> bool:
        """Whether it is still ours: not closed, and the context not cleared since."""
        return self._pool.is_leased_by(self._number, self._ticket)

    def close(self) -> None:
        """Give it back; its rows are gone."""
        if self.held:
            self._pool.release(self._number)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # In whatever thread this runs, the context may be computing: it takes the sequence back when it is next asked.
        self._pool.note_dropped(self._number, self._ticket)


class Pool:
    """The sequences 0 to `size` - 1 of a context: which are held, and by whom. `empty` forgets the rows of one."""

    def __init__(self, size: int, empty: Callable[[int], object]) -> None:
        self.size = size
        self._empty = empty
        self._tickets = count()
        self._held: dict[int, int] = {}  # ticket of whoever holds it
        self._tokens: dict[int, list[int]] = {}
        self._dropped: list[tuple[int, int]] = []
        self._waits = False  # what is given back is taken back later

    @property
    def held(self) -> list[int]:
        """Sequences that are leased."""
        self.collect()
        return sorted(self._held)

    @property
    def free(self) -> list[int]:
        """Sequences that are not leased."""
        self.collect()
        return [number for number in range(self.size) if number not in self._held]

    def lease(self, number: int) -> Lease:
        """Hold a free sequence."""
        self._held[number] = ticket = next(self._tickets)
        lease = Lease(self, number, ticket)
        self._tokens[number] = lease.tokens
        return lease

    def tokens(self, number: int) -> list[int]:
        """The tokens of a sequence; none where it is not leased."""
        return self._tokens.get(number, [])

    def is_leased_by(self, number: int, ticket: int) -> bool:
        """Whether the sequence is held by this ticket."""
        return self._held.get(number) == ticket

    @contextmanager
    def deferring_releases(self) -> Iterator[None]:
        """Within the block nothing is taken back: rows are on their way, and a collected generator may close a lease
        at any time."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            self.collect()

    def release(self, number: int) -> None:
        """End its lease; its rows are gone."""
        if self._waits:
            self.note_dropped(number, self._held[number])
            return
        del self._held[number], self._tokens[number]
        self._empty(number)

    def note_dropped(self, number: int, ticket: int) -> None:
        """Whoever held it is gone and did not give it back."""
        self._dropped.append((number, ticket))

    def clear(self) -> None:
        """End all leases. The rows are left to the caller."""
        self._held.clear()
        self._tokens.clear()

    def collect(self) -> None:
        """Take back what was dropped."""
        while self._dropped and not self._waits:
            number, ticket = self._dropped.pop()
            if self.is_leased_by(number, ticket):
                self.release(number)
