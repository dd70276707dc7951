"""Work of the decode thread while there is no request: decode again what a reply has guessed, and learn texts.

A reply that reuses the K/V of a compiled or learned text elsewhere is close to that of a prefill. Its prompt is decoded
again while the server is idle, so that the next turn continues from the K/V of a prefill. That comes before learning.
Any request ends the work within an operation of the graph; whole batches are kept.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from notes_cli import output
from notes_cli.engine.interrupts import Stop
from notes_cli.engine.sequence import Task
from notes_cli.errors import EngineError, NotesError
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.prefix_cache import CachedPrefix, Layout
from notes_cli.runtime.scheduler import Job, Scheduler
from notes_cli.serve.learned import LearnedBlocks


class IdleWork:
    """At most one job of the scheduler. `end` may be called in any thread, the rest in the decode thread."""

    def __init__(self, scheduler: Scheduler, learned: LearnedBlocks) -> None:
        self._learned = learned
        self.job: Job[None] | None = None
        self._scheduler = scheduler

    def begin(self) -> bool:
        """Begin a job. Returns False if there is nothing to do, or no room beside the latest prefix."""
        budget, prefixes = self._scheduler.budget, self._scheduler.prefixes
        try:
            latest = max(prefixes.idle_prefixes(), key=lambda prefix: prefix.used, default=None)
            job = self._next_job(budget.most - (len(latest.sequence) if latest else 0))
            while job and not budget.has(job.tokens, 1):
                evicted = prefixes.store is not None and prefixes.evict(latest)
                if not evicted and not budget.grow(job.tokens, 1):
                    budget.release([])  # requests may try again
                    raise EngineError(f"there is no memory for {job.tokens} more tokens")
        except Exception as error:
            self._learned.clear()
            for prefix in prefixes.entries:
                prefix.layout = None
            output.say(f"nothing is learned from the prompts so far: {error}")
            return False
        self.job = job
        if job is not None:
            self._scheduler.submit(job)
        return job is not None

    def end(self) -> None:
        if self.job is not None:
            self.job.cancel()

    @property
    def busy(self) -> bool:
        """True if there is work to do, or a file is being written."""
        return bool(self._scheduler.running or self._next_job(self._scheduler.budget.most) or self._learned.writing)

    def _next_job(self, room: int) -> Job[None] | None:
        return self._exact_job(room) or self._learned.job(room)

    def _exact_job(self, room: int) -> Job[None] | None:
        """Return the job that decodes the latest prefix with K/V of another context again."""
        for prefix in reversed(list(self._scheduler.prefixes.idle_prefixes())):
            if prefix.layout is not None and len(prefix) <= room and (prefix.origins < 0).any():
                layout = replace(prefix.layout, reuse="exact", origins=np.maximum(prefix.layout.origins, 0))
                task, ended = partial(self._decode, prefix, layout), partial(self._decoded, prefix)
                return Job(task, len(prefix), layout=layout, salt=prefix.salt, stop=Stop(), on_end=ended)
        return None

    def _decode(self, guessed: CachedPrefix, layout: Layout, job: Job[None]) -> Task[None]:
        """Decode the tokens of a prefix. A cancelled job keeps the batches that it has decoded, and the next one
        continues after them."""
        sequence, prefixes = job.sequence, self._scheduler.prefixes
        assert sequence is not None and job.prefix is not None
        try:
            yield from assemble_task(self._scheduler.workspace, layout.prompt, begun=sequence, counted=False)
            while sequence.pending:
                yield [sequence]
            sequence.append(guessed.tokens[len(sequence) :])  # the answer, in batches of its own
            while sequence.pending:
                yield [sequence]
            if guessed in prefixes.entries:
                prefixes.drop(guessed)
        finally:
            with suppress(NotesError):  # drops a prefix whose sequence is not intact
                prefixes.set_idle(job.prefix)

    def _decoded(self, guessed: CachedPrefix, job: Job[None]) -> None:
        if isinstance(job.outcome, Exception):
            guessed.layout = None  # it would fail again
            output.say(f"a prompt was not decoded again: {job.outcome}")
