"""Answers many questions together, in the order of the requests.

Prompts that begin alike share that prefix by the prefix cache, which ends where `notes ask` begins a batch: so a
question that is decoded alone has exactly the logits of `notes ask`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from notes_cli.engine.sequence import Task
from notes_cli.errors import EngineError, NotesError, Notice, reason
from notes_cli.runtime.answering import Question, prepare, tokens_of_longest
from notes_cli.runtime.request import NO_CALLBACKS, PARALLEL, UNLIMITED, Answer, Callbacks, Request
from notes_cli.runtime.scheduler import Job, Scheduler
from notes_cli.runtime.workspace import Workspace

AT_MOST = 64
IDLE = 4  # prefixes kept
SPARE = 2  # sequences to begin a request with, beside those that run
WAITING = 16  # answers per concurrent request that may wait for an earlier one


def ask_many(
    workspace: Workspace,
    requests: Iterable[Request | NotesError],
    parallel: int = PARALLEL,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Iterator[tuple[int, Answer | NotesError]]:
    """Answer many questions, at most `parallel` of them at a time, and fewer where a context of a given size has no
    room for them. Yield the number of each, counted from 0, and its answer or its error, in the order of the requests,
    which are read as they are needed. An error among them is that request's own.

    `callbacks` get notices about all of them, each once, and the progress of compiles; no texts. An answer without a
    limit has as much room as there must be for it (Request.room).
    """
    if not 1 <= parallel <= AT_MOST:
        raise NotesError(f"{parallel!r} questions at once are not possible", f"Take from 1 to {AT_MOST}")
    done: dict[int, Answer | NotesError] = {}
    yielded = read = 0
    source = iter(requests)
    with Scheduler(workspace, parallel, idle=IDLE, grow_first=True) as scheduler:
        with suppress(EngineError):  # then fewer run at a time
            workspace.reserve(0, parallel + SPARE)
        batch = _Batch(workspace, scheduler, callbacks)
        while True:
            while len(scheduler.waiting) + len(scheduler.running) < parallel and read - yielded < WAITING * parallel:
                if (request := next(source, None)) is None:
                    break
                batch.submit(request, done, read)
                read += 1
            if scheduler.waiting or scheduler.running:
                scheduler.step()
            elif yielded == read:
                return
            while yielded in done:
                yielded += 1
                yield yielded - 1, done.pop(yielded - 1)


class _Batch:
    """Prepares requests and submits them."""

    def __init__(self, workspace: Workspace, scheduler: Scheduler, callbacks: Callbacks) -> None:
        self._workspace, self._scheduler = workspace, scheduler
        self._begun = time.perf_counter()  # waiting for earlier requests counts as loading
        self._notices: set[str] = set()
        self._notice_to = callbacks.on_notice
        self._callbacks = replace(NO_CALLBACKS, on_notice=self._notice, progress=callbacks.progress)

    def _notice(self, notice: Notice) -> None:
        if str(notice) not in self._notices:
            self._notices.add(str(notice))
            self._notice_to(notice)

    def submit(self, request: Request | NotesError, done: dict[int, Answer | NotesError], number: int) -> None:
        """Submit a request; its outcome goes to `done`."""

        def end(outcome: Answer | Exception | None) -> None:
            if isinstance(outcome, OSError):
                where = f"{outcome.filename}: " if outcome.filename else ""
                outcome = NotesError(f"{where}{reason(outcome)}")
            if isinstance(outcome, (Answer, NotesError)):
                done[number] = outcome
            elif outcome is not None:
                raise outcome

        try:
            if isinstance(request, NotesError):
                raise request
            job = self._job(prepare(self._workspace, request, self._callbacks))
        except (NotesError, OSError) as error:
            end(error)
        else:
            job.on_end = lambda job: end(job.outcome)
            self._scheduler.submit(job)

    def _job(self, question: Question) -> Job[Answer]:
        question = replace(question, draft=replace(question.draft, begun=self._begun))
        workspace, scheduler, how = self._workspace, self._scheduler, question.draft.how
        request = question.draft.request
        layout = scheduler.prefixes.layout(
            question.prompt, question.parts, how["seam"], splice=how["splice"], exact=how["exact"]
        )
        boundary = layout.boundary

        def task(job: Job[Answer]) -> Task[Answer]:
            kept = (lambda: scheduler.keep_prefix(job)) if job.prefix else None
            return question.task(workspace, job, callbacks, kept)

        callbacks = replace(self._callbacks, progress=NO_CALLBACKS.progress)
        lookahead = tokens_of_longest(workspace, request.choices)
        max_new = question.max_new - (request.room if request.choices is not None else 0)
        workspace.check_length(question.tokens + 1)
        return Job(
            task,
            question.tokens,
            max_new,
            lookahead=lookahead,
            limit=min(question.tokens + max_new + lookahead, workspace.longest or UNLIMITED),
            layout=layout if boundary else None,
            boundary=boundary,
        )
