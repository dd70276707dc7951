"""Makes the jobs of the scheduler that prefill a prepared prompt and generate its answers, with events for clients.

A ServerJob is the state of one request in the scheduler, to which its events go.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
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
from notes_cli.runtime.answering import Prefilled, prompt_task
from notes_cli.runtime.assemble import assemble_task, saved_seconds
from notes_cli.runtime.kv_budget import GRANT
from notes_cli.runtime.prefix_cache import Layout
from notes_cli.runtime.request import Answer, Callbacks, Counts, Request
from notes_cli.runtime.scheduler import Job, Scheduler
from notes_cli.runtime.token_runs import PlacedRun
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.generation import AnswerDone, PrefillDone, TextDelta, TokenRecorder, generate_answers
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.parsing import DRAWN, ChatRequest
from notes_cli.serve.prepare import Prepared, PreparedQuestion, PreparedRequest, PreparedTurn, ServerState
from notes_cli.serve.refusals import ServerError
from notes_cli.sessions.session import Session

JobEvent = PrefillDone | TextDelta | AnswerDone | NotesError | None  # None: the request is answered


@dataclass(slots=True, eq=False)
class ServerJob:
    """A request of a client. `on_event` is called in the server's threads and must not block."""

    request: ChatRequest
    on_event: Callable[[JobEvent], object]
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    prepared: Prepared | None = None
    work: Job[None] | None = None  # in the scheduler, once it is prepared
    resources: ExitStack = field(default_factory=ExitStack)  # closed when the job finishes: its session
    finished: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Have generation end at the next step."""
        self.cancelled = True
        if self.work is not None:
            self.work.cancelled = True


class _AnswerEvents:
    """Emits the events of the answer to a question or to a turn of a session."""

    def __init__(self, job: ServerJob, workspace: Workspace, notices: list[str]) -> None:
        self._job, self._workspace, self._notices = job, workspace, notices
        self._tokens = TokenRecorder(workspace.model, job.request.params.likely)
        self.callbacks = Callbacks(
            on_notice=lambda notice: notices.append(str(notice)),
            on_reasoning=self._on_reasoning,
            on_text=lambda text: job.on_event(TextDelta(0, text, tokens=self._tokens.take())),
            on_token=self._tokens.chosen,
        )

    def _on_reasoning(self, text: str) -> None:
        self._job.on_event(TextDelta(0, text, reasoning=True))

    def done(self, request: Request, answer: Answer, continued: bool = False) -> AnswerDone:
        """Return the last event. Its `notes` are the document of `notes ask --json` if the request has `explain`, else
        the probabilities of its choices, if any."""
        notes, session = self._job.request.notes, self._job.request.notes.session
        document: dict[str, object] = {}
        if answer.decision:
            self._job.on_event(TextDelta(0, answer.text))
            document = {"choice": answer.choice, "probabilities": answer.probabilities}
        if notes.explain:
            memory = request.memory.name if session and isinstance(request.memory, Segment) else None
            document = turn_as_json(self._workspace, request, answer, self._job.arrived, session, continued, memory)
            document["notices"] = self._notices
        reasoning = answer.thought.tokens if answer.thought else 0
        rest = self._tokens.take()
        return AnswerDone(0, answer.stopped or "end", answer.tokens + reasoning, reasoning, rest, notes=document)


class AnswerTasks:
    """Makes the jobs that answer requests, for the decode thread."""

    def __init__(self, state: ServerState, scheduler: Scheduler, metrics: Metrics) -> None:
        self._state, self._scheduler, self._metrics = state, scheduler, metrics
        self._workspace, self._prefixes = state.workspace, state.prefixes

    def explain(self, prepared: PreparedRequest | PreparedQuestion) -> dict[str, object]:
        """Return the pieces that a prompt would have now, as JSON, without computing. Raises NotesError."""
        if isinstance(prepared, PreparedQuestion):
            with self._workspace.sequence(dry=True) as sequence:
                run(assemble_task(self._workspace, prepared.question.prompt, dry=True, begun=sequence))
                plan = Prefilled.of(prepared.question, sequence)
            return {**plan_as_json(plan), "counts": asdict(plan.counts), "notices": prepared.notices}
        layout = prepared.layout
        salt = prepared.request.salt
        cached, length, _ = self._prefixes.find(layout, salt)
        layout, runs = self._prefixes.plan(self._workspace, layout, salt, cached, length, dry=True)
        if cached and length:
            sequence = self._prefixes.begin(cached, length, layout, dry=True)
        else:
            sequence = self._workspace.sequence(dry=True)
        live = self._prefixes.restore(sequence, layout, salt)
        run(self._prefill(layout, sequence, [placed for placed in runs if placed.run.first >= live]))
        counts = replace(Counts.of(sequence), shared=live)
        return explanation(sequence.pieces, asdict(counts), prepared.notices)

    def work(self, job: ServerJob) -> Job[None]:
        """Return a prepared request as a job of the scheduler."""
        prepared, longest, salt = job.prepared, self._state.longest, job.request.salt
        if isinstance(prepared, PreparedRequest):
            tokens = len(prepared.layout)
            return Job(
                lambda work: self._answer(job, work, prepared),
                prepared.layout.prompt.cells,
                min(prepared.max_new, GRANT),
                min(1 + (prepared.reasoning_end if prepared.think else 0), prepared.max_new),
                answers=job.request.params.choices,
                reasoning_end=prepared.reasoning_end,
                limit=tokens + prepared.max_new if longest is None else min(tokens + prepared.max_new, longest),
                layout=prepared.layout,
                salt=salt,
                preemptible=True,
                arrived=job.arrived,
            )
        assert prepared is not None
        tokens, first = prepared.tokens, prepared.first_tokens
        first = first if longest is None else max(1, min(first, longest - tokens))
        if isinstance(prepared, PreparedTurn):
            answer: Callable[[Job[None]], Task[None]] = partial(self._session, job, turn=prepared)
            more: dict[str, Any] = {"own": True}
        else:
            answer = partial(self._question, job, asked=prepared)
            more = {"layout": prepared.layout, "salt": salt, "boundary": prepared.boundary}
        return Job(answer, tokens, first, 1, lookahead=prepared.lookahead, arrived=job.arrived, **more)

    def _answer(self, job: ServerJob, work: Job[None], prepared: PreparedRequest) -> Task[None]:
        """Prefill the prompt and generate the answers. The first answer's sequence becomes an idle prefix."""
        self._metrics.queued.observe(time.perf_counter() - job.arrived)
        layout, sequence, prefix = work.layout, work.sequence, work.prefix
        assert layout is not None and sequence is not None and prefix is not None
        forks: list[KVSequence] = []
        texts: dict[int, str] = {}  # by choice
        failed, complete = False, 0

        def keep_conversation() -> None:
            if prepared.conversation is not None:
                answers = [prepared.request.prefill + text for text in texts.values() or [""]]
                self._state.conversations.keep(prepared.request, prepared.digests, prepared.conversation, answers)

        def on_delta(delta: TextDelta) -> None:
            if not delta.reasoning:
                texts[delta.index] = texts.get(delta.index, "") + delta.text
            job.on_event(delta)

        def on_done(answer: AnswerDone) -> None:
            nonlocal complete
            complete += 1
            if complete == work.answers:  # before the client gets the end and sends its next turn
                keep_conversation()
            self._emit_done(job, answer)

        try:
            yield from self._prefill(layout, sequence, work.runs)
            yield from sequence.next_logits()
            counts = replace(Counts.of(sequence), shared=work.live)
            pieces, gain = tuple(sequence.pieces), saved_seconds(sequence.pieces, layout.prompt.segments)
            seconds = time.perf_counter() - job.arrived
            self._emit_prefill_done(job, work.live, PrefillDone(counts, pieces, seconds, prepared.notices, gain))
            forks = [sequence.share() for _ in range(work.answers - 1)]
            reservation = work.reservations[0]
            reservation.fork_cells = reservation.forks = 0
            for fork in forks:
                fork.token_limit = sequence.token_limit
                tokens, reasoning_end = len(layout) + work.first, reservation.reasoning_end
                work.reservations.append(self._scheduler.budget.reserve(fork, tokens, reasoning_end=reasoning_end))
            seed = prepared.request.params.sampling.seed
            seed = time.time_ns() & 0xFFFFFFFF if seed == DRAWN else seed
            seqs = [sequence, *forks]
            yield from generate_answers(self._workspace, prepared, seqs, seed, on_delta, on_done)
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
                    self._prefixes.set_idle(prefix)

    def _question(self, job: ServerJob, work: Job[None], asked: PreparedQuestion) -> Task[None]:
        """Answer a question in a sequence of its own, which keeps what other questions share."""
        self._metrics.queued.observe(time.perf_counter() - job.arrived)
        events = _AnswerEvents(job, self._workspace, asked.notices)
        if asked.layout and work.live and work.sequence is not None:
            work.sequence.pieces = asked.layout.live(work.live)
        answer = yield from prompt_task(
            *(self._workspace, asked.question, work, events.callbacks),
            on_boundary=(lambda: self._scheduler.keep_prefix(work)) if work.prefix else None,
            on_prefill=lambda done: self._on_prefill(job, done, work.live),
        )
        self._emit_done(job, events.done(asked.question.request, answer))

    def _session(self, job: ServerJob, work: Job[None], turn: PreparedTurn) -> Task[None]:
        """Answer the next turn of a session; the session is closed at the end."""
        self._metrics.queued.observe(time.perf_counter() - job.arrived)
        events = _AnswerEvents(job, self._workspace, turn.notices)
        with job.resources:
            session = job.resources.enter_context(Session(self._workspace, turn.stored))
            continued = not session.empty
            answer = yield from session.answer_task(
                *(turn.request, events.callbacks),
                assembled=lambda sequence: self._scheduler.reserve(work, sequence),
                room=turn.first_tokens,
                on_prefill=lambda done: self._on_prefill(job, done),
            )
        # Once the session is closed, as its client may send the next turn at once.
        self._emit_done(job, events.done(turn.request, answer, continued))

    def _on_prefill(self, job: ServerJob, prefilled: Prefilled, live: int = 0) -> None:
        live += sum(piece.tokens for piece in prefilled.pieces if piece.reason is Reason.RESTORED_SESSION)
        seconds = time.perf_counter() - job.arrived
        done = PrefillDone(prefilled.counts, prefilled.pieces, seconds, saved=prefilled.saved)
        self._emit_prefill_done(job, live, done)

    def _emit_prefill_done(self, job: ServerJob, live: int, done: PrefillDone) -> None:
        """Emit the end of a prefill. `live`: tokens found in the prefix cache."""
        self._metrics.decoded += done.counts.decoded
        self._metrics.spliced += done.cached - live
        self._metrics.live += live
        self._metrics.first_token.observe(done.seconds)
        job.on_event(done)

    def _emit_done(self, job: ServerJob, answer: AnswerDone) -> None:
        self._metrics.generated += answer.tokens
        job.on_event(answer)

    def _prefill(self, layout: Layout, sequence: KVSequence, runs: list[PlacedRun]) -> Task[KVSequence]:
        how: dict[str, Any] = {"dry": sequence.dry, "begun": sequence, "counted": True, "runs": runs}
        return assemble_task(self._workspace, layout.prompt, **how)


def client_error(error: Exception) -> NotesError:
    """Return the error for the client. An unexpected one is logged with its traceback."""
    if isinstance(error, NotesError):
        return error
    output.say("".join(traceback.format_exception(error)))
    return ServerError(f"a fault of the server: {type(error).__name__}")
