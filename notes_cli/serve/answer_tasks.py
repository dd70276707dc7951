"""Makes the jobs of the scheduler that prefill a prepared prompt and generate its answers, with events for clients.

A ServerJob is the state of one request in the scheduler, to which its events go.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from notes_cli import output
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence, Task, run
from notes_cli.errors import NotesError
from notes_cli.explanations import explanation, plan_as_json, turn_as_json
from notes_cli.runtime.answering import describe, generate_task, prefill_task, prompt_task
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.request import Answer, Callbacks, Counts, Event, Prefilled, Request, Text
from notes_cli.runtime.scheduler import Job
from notes_cli.serve.parsing import DRAWN, ChatRequest
from notes_cli.serve.prepare import PreparedRequest, ServerState
from notes_cli.serve.refusals import ServerError
from notes_cli.sessions.session import Session

Json = dict[str, Any]
JobEvent = Event | Json | NotesError | None  # Json: for the key `notes` of the reply; None: the request is answered


@dataclass(slots=True, eq=False)
class ServerJob:
    """A request of a client. `on_event` is called in the server's threads and must not block."""

    request: ChatRequest
    on_event: Callable[[JobEvent], object]
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    prepared: PreparedRequest | None = None
    work: Job[None] | None = None  # in the scheduler, once it is prepared
    resources: ExitStack = field(default_factory=ExitStack)  # closed when the job finishes: its session
    finished: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Have generation end at the next step."""
        self.cancelled = True
        if self.work is not None:
            self.work.cancelled = True


def explain(state: ServerState, ready: PreparedRequest) -> dict[str, object]:
    """Return the pieces that a prompt would have now, as JSON, without computing. Raises NotesError."""
    prepared, layout, salt = ready.prepared, ready.layout, ready.chat.salt
    assert prepared is not None
    notices = list(map(str, ready.notices))
    if ready.chat.notes.ask is not None:
        with state.workspace.sequence(dry=True) as sequence:
            run(assemble_task(state.workspace, prepared.prompt, dry=True, begun=sequence))
            plan = describe(prepared, sequence)
        return {**plan_as_json(plan), "counts": asdict(plan.counts), "notices": notices}
    assert layout is not None
    cached, length, _ = state.scheduler.prefixes.find(layout, salt)
    difference = state.scheduler.prefixes.difference(layout, salt)
    layout, runs = state.scheduler.prefixes.plan(state.workspace, layout, salt, cached, length)
    if cached and length:
        sequence = state.scheduler.prefixes.begin(cached, length, layout, dry=True)
    else:
        sequence = state.workspace.sequence(dry=True)
    live = state.scheduler.prefixes.restore(sequence, layout, salt)
    missed = _missed(state, difference, live)
    runs = [placed for placed in runs if placed.run.first >= live]
    run(assemble_task(state.workspace, prepared.prompt, dry=True, begun=sequence, runs=runs))
    counts = replace(Counts.of(sequence), shared=live)
    return explanation(sequence.pieces, asdict(counts), [*notices, *([missed] if missed else [])])


def job_of(state: ServerState, job: ServerJob) -> Job[None]:
    """Return a prepared request as a job of the scheduler."""
    ready, longest = job.prepared, state.longest
    assert ready is not None
    shared: dict[str, Any] = {"layout": ready.layout, "salt": job.request.salt, "arrived": job.arrived}
    if ready.session is None and ready.chat.notes.ask is None:
        tokens = len(ready.layout or ())
        return Job(
            lambda work: _answer(state, job, work, ready),
            ready.tokens,
            ready.first_tokens,
            min(1 + ready.reasoning_end * ready.request.think, ready.max_new),
            answers=job.request.answers,
            reasoning_end=ready.reasoning_end,
            limit=tokens + ready.max_new if longest is None else min(tokens + ready.max_new, longest),
            preemptible=True,
            **shared,
        )
    first = ready.first_tokens
    first = first if longest is None else max(1, min(first, longest - ready.tokens))
    answer = _question if ready.session is None else _turn
    more: dict[str, Any] = {**shared, "boundary": ready.boundary, "own": ready.session is not None}
    return Job(lambda work: answer(state, job, work, ready), ready.tokens, first, 1, lookahead=ready.lookahead, **more)


def _answer(state: ServerState, job: ServerJob, work: Job[None], ready: PreparedRequest) -> Task[None]:
    """Prefill the prompt and generate the answers. The first answer's sequence becomes an idle prefix."""
    state.metrics.queued.observe(time.perf_counter() - job.arrived)
    sequence, prefix, prepared = work.sequence, work.prefix, ready.prepared
    assert sequence is not None and prefix is not None and prepared is not None
    forks: list[KVSequence] = []
    texts: dict[int, str] = {}  # by choice
    failed, complete = False, 0

    def keep_conversation() -> None:
        if ready.conversation is not None:
            answers = [ready.chat.prefill + text for text in texts.values() or [""]]
            state.conversations.keep(ready.chat, ready.digests, ready.conversation, answers)

    def on_event(event: Event) -> None:
        if isinstance(event, Text) and not event.reasoning and event.call is None:
            texts[event.index] = texts.get(event.index, "") + event.text
        _emit(state, job, event, work.live)

    def answer(sequence: KVSequence, index: int, seed: int) -> Task[None]:
        nonlocal complete
        sampling = replace(prepared.request.sampling, seed=(seed + index) & 0xFFFFFFFF)
        own = replace(prepared, request=replace(prepared.request, sampling=sampling))
        done = yield from generate_task(state.workspace, own, prefilled, sequence, callbacks, index)
        complete += 1
        if complete == work.answers:  # before the client gets the end and sends its next turn
            keep_conversation()
        _emit(state, job, done)

    callbacks = Callbacks(on_event)
    try:
        _emit_notices(job, ready)
        yield from assemble_task(
            *(state.workspace, prepared.prompt),
            begun=sequence,
            counted=not prepared.prompt.is_raw,
            runs=work.runs,
            states=work.layout.states if work.layout else (),
        )
        prefilled = yield from prefill_task(state.workspace, prepared, sequence, callbacks, shared=work.live)
        if state.learned and work.layout is not None:
            state.learned.count(work.salt, sequence.pieces)
            state.learned.observe(work.layout, work.salt, work.live)
        forks = [sequence.share() for _ in range(work.answers - 1)]
        reservation = work.reservations[0]
        reservation.fork_cells = reservation.forks = 0
        for fork in forks:
            fork.token_limit = sequence.token_limit
            tokens, reasoning_end = len(prepared.prompt) + work.first, reservation.reasoning_end
            work.reservations.append(state.scheduler.budget.reserve(fork, tokens, reasoning_end=reasoning_end))
        seed = prepared.request.sampling.seed
        seed = time.time_ns() & 0xFFFFFFFF if seed == DRAWN else seed
        yield from _join([answer(each, index, seed) for index, each in enumerate([sequence, *forks])])
    except Exception:
        failed = True
        raise
    finally:
        for fork in forks:
            fork.close()
        # A stopped answer, too: its client continues from the text that it got.
        if complete < work.answers and (any(texts.values()) or not failed):
            keep_conversation()
        if not failed:
            with suppress(NotesError):  # drops a prefix whose sequence is not intact
                state.scheduler.prefixes.set_idle(prefix)


def _question(state: ServerState, job: ServerJob, work: Job[None], ready: PreparedRequest) -> Task[None]:
    """Answer a question in a sequence of its own, which keeps what other questions share."""
    state.metrics.queued.observe(time.perf_counter() - job.arrived)
    prepared = ready.prepared
    assert prepared is not None
    _emit_notices(job, ready)
    if ready.layout and work.live and work.sequence is not None:
        work.sequence.pieces = ready.layout.live(work.live)
    kept = (lambda: state.scheduler.keep_prefix(work)) if work.prefix else None
    callbacks = Callbacks(partial(_emit, state, job, live=work.live))
    answer = yield from prompt_task(state.workspace, prepared, work, callbacks, kept)
    _emit_document(state, job, prepared.request, answer)
    _emit(state, job, answer)


def _turn(state: ServerState, job: ServerJob, work: Job[None], ready: PreparedRequest) -> Task[None]:
    """Answer the next turn of a session; the session is closed at the end."""
    state.metrics.queued.observe(time.perf_counter() - job.arrived)
    assert ready.session is not None
    _emit_notices(job, ready)
    with job.resources:
        session = job.resources.enter_context(Session(state.workspace, ready.session))
        continued = not session.empty
        answer = yield from session.answer_task(
            *(ready.request, Callbacks(partial(_emit, state, job))),
            assembled=lambda sequence: state.scheduler.reserve(work, sequence),
            room=ready.first_tokens,
        )
    _emit_document(state, job, ready.request, answer, continued)
    # Once the session is closed, as its client may send the next turn at once.
    _emit(state, job, answer)


def _emit_notices(job: ServerJob, ready: PreparedRequest) -> None:
    for notice in ready.notices:
        job.on_event(notice)


def _emit_document(
    state: ServerState, job: ServerJob, request: Request, answer: Answer, continued: bool = False
) -> None:
    """Emit the document of `notes ask --json` if the request has `explain`, else the probabilities of its choices,
    if any."""
    notes, document = job.request.notes, Json()
    if answer.decision:
        document = {"choice": answer.choice, "probabilities": answer.probabilities}
    if notes.explain:
        memory = request.memory.name if notes.session and isinstance(request.memory, Segment) else None
        how: dict[str, Any] = {"session": notes.session, "goes_on": continued, "memory": memory}
        document = turn_as_json(state.workspace, request, answer, job.arrived, **how)
    job.on_event(document)


def _emit(state: ServerState, job: ServerJob, event: Event, live: int = 0) -> None:
    """Pass an event on. `live`: tokens found in the prefix cache."""
    if isinstance(event, Prefilled):
        live += sum(piece.tokens for piece in event.pieces if piece.reason is Reason.RESTORED_SESSION)
        missed = _missed(state, job.work.difference if job.work else None, live)
        event = replace(event, seconds=time.perf_counter() - job.arrived, missed=missed)
        state.metrics.decoded += event.counts.decoded
        state.metrics.spliced += event.counts.total - event.counts.decoded - live
        state.metrics.live += live
        state.metrics.first_token.observe(event.seconds)
    elif isinstance(event, Answer):
        state.metrics.generated += event.tokens + event.reasoning
    job.on_event(event)


def _missed(state: ServerState, difference: int | None, live: int) -> str:
    """Describe why a prompt of a recurrent model, or after a window that has dropped rows, does not continue more of a
    cached one. The tokens are not shown: they may be another client's."""
    if difference is None:
        return ""
    if drops := state.workspace.context.drops:
        return f"{difference:,} of its tokens are cached, but {drops}"
    kept = f"the last state before it was kept after {live:,}" if live else "no state was kept before it"
    return f"token {difference + 1:,} differs, {kept}"


def _join(tasks: Sequence[Task[None]]) -> Task[None]:
    """Run several tasks as one. If one fails, all do."""
    awaited: dict[int, Sequence[KVSequence]] = dict.fromkeys(range(len(tasks)), ())
    try:
        while awaited:
            for number in list(awaited):
                try:
                    awaited[number] = next(tasks[number])
                except StopIteration:
                    del awaited[number]
            if awaited:
                yield [sequence for sequences in awaited.values() for sequence in sequences]
    finally:
        for task in tasks:
            task.close()


def client_error(error: Exception) -> NotesError:
    """Return the error for the client. An unexpected one is logged with its traceback."""
    if isinstance(error, NotesError):
        return error
    output.say("".join(traceback.format_exception(error)))
    return ServerError(f"a fault of the server: {type(error).__name__}")
