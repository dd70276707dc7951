"""Manages the sequence ids of a context: leases them exclusively and takes them back.

A lease keeps its sequence until it is closed; a second sequence may share the entries without a copy (Context.share).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

from notes_cli.errors import EngineError


class Lease(AbstractContextManager["Lease"]):
    """An exclusive lease of one sequence of a context. Close it, or use it as a context manager."""

    def __init__(self, pool: Pool, seq_id: int, ticket: int) -> None:
        self.tokens: list[int] = []  # of its entries, decoded or pending
        self._pool, self._seq_id, self._ticket = pool, seq_id, ticket

    @property
    def id(self) -> int:
        """The sequence id. Raises EngineError if the lease has ended."""
        if not self.held:
            raise EngineError("this sequence was given back, or its context was cleared: its rows are gone")
        return self._seq_id

    @property
    def held(self) -> bool:
        """True if the lease is valid: not closed, and the context not cleared since."""
        return self._pool.tickets.get(self._seq_id) == self._ticket

    def close(self) -> None:
        """End the lease; the entries are gone."""
        if self.held:
            self._pool.release(self._seq_id)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # May run in any thread while the context computes: only note it, `collect` releases the sequence later.
        self._pool.dropped.append((self._seq_id, self._ticket))


class Pool:
    """The sequences 0 to `size` - 1 of a context and their leases. `empty` drops the entries of a sequence."""

    def __init__(self, size: int, empty: Callable[[int], object]) -> None:
        self.size = size
        self._empty = empty
        self.tickets: dict[int, int] = {}  # sequence id -> number of its lease
        self.dropped: list[tuple[int, int]] = []  # (sequence id, number) of garbage-collected leases
        self._numbers = count()
        self._tokens: dict[int, list[int]] = {}
        self._waits = False  # whether releases are deferred

    @property
    def held(self) -> list[int]:
        """Sequences that are leased."""
        self.collect()
        return sorted(self.tickets)

    @property
    def free(self) -> list[int]:
        """Sequences that are not leased."""
        self.collect()
        return [seq_id for seq_id in range(self.size) if seq_id not in self.tickets]

    def lease(self, seq_id: int) -> Lease:
        """Lease a free sequence."""
        self.tickets[seq_id] = ticket = next(self._numbers)
        lease = Lease(self, seq_id, ticket)
        self._tokens[seq_id] = lease.tokens
        return lease

    def tokens(self, seq_id: int) -> list[int]:
        """Return the tokens of a sequence; empty if it is not leased."""
        return self._tokens.get(seq_id, [])

    @contextmanager
    def deferring_releases(self) -> Iterator[None]:
        """Defer releases during the block, in which K/V is moved: a collected generator may close a lease at any
        time."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            self.collect()

    def release(self, seq_id: int) -> None:
        """End the lease of a sequence and drop its entries."""
        if self._waits:
            self.dropped.append((seq_id, self.tickets[seq_id]))
            return
        del self.tickets[seq_id], self._tokens[seq_id]
        self._empty(seq_id)

    def clear(self) -> None:
        """End all leases. The caller drops the entries."""
        self.tickets.clear()
        self._tokens.clear()

    def collect(self) -> None:
        """Release the sequences of garbage-collected leases."""
        while self.dropped and not self._waits:
            seq_id, ticket = self.dropped.pop()
            if self.tickets.get(seq_id) == ticket:
                self.release(seq_id)
