"""Makes the tasks of the decode loop that prefill a prepared prompt and generate its answers."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from notes_cli import output
from notes_cli.engine.loop import Task, one_request_at_a_time, run
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError
from notes_cli.explanations import explanation, plan_as_json, turn_as_json
from notes_cli.runtime.answering import Plan, answer_task
from notes_cli.runtime.assemble import assemble_task, saved_seconds, warn_unspliced
from notes_cli.runtime.prefix_cache import CachedPrefix, Layout
from notes_cli.runtime.request import Answer, Callbacks, Counts, Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.generation import AnswerDone, TextDelta, TokenRecorder, generate_answers
from notes_cli.serve.jobs import Job, JobEvent, PrefillDone
from notes_cli.serve.kv_budget import KVBudget
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.parsing import DRAWN
from notes_cli.serve.prepare import PreparedRequest, ServerState
from notes_cli.serve.questions import PreparedTurn, Question
from notes_cli.serve.refusals import ServerError
from notes_cli.sessions.session import Session

IDLE = 32  # idle prefixes that are kept


@dataclass(slots=True)
class _AnswerTexts:
    """Collects the texts of the answers to a request, by choice, and passes the deltas on."""

    on_event: Callable[[JobEvent], object]
    texts: dict[int, str] = field(default_factory=dict)

    def add(self, delta: TextDelta) -> None:
        if not delta.reasoning:
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
        self.on_event(delta)


class _AnswerEvents:
    """Emits the events of the answer to a question or to a turn of a session."""

    def __init__(self, job: Job, workspace: Workspace, notices: list[str]) -> None:
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
            document = turn_as_json(self._workspace, request, answer, self._job.arrived, session, continued)
            document["notices"] = self._notices
        reasoning = answer.thought.tokens if answer.thought else 0
        rest = self._tokens.take()
        return AnswerDone(0, answer.stopped or "end", answer.tokens + reasoning, reasoning, rest, notes=document)


class AnswerTasks:
    """Makes the tasks that answer requests, for the decode thread."""

    def __init__(self, state: ServerState, budget: KVBudget, metrics: Metrics) -> None:
        self._state, self._budget, self._metrics = state, budget, metrics
        self._workspace, self._prefixes = state.workspace, state.prefixes

    def explain(self, prepared: PreparedRequest | Question) -> dict[str, object]:
        """Return the pieces that a prompt would have now, as JSON, without computing. Raises NotesError."""
        if isinstance(prepared, Question):
            return self._explain_question(prepared)
        layout = prepared.layout
        cached, length, _ = self._prefixes.find(layout, prepared.request.notes.cache_salt)
        live = length if cached else 0
        if cached and live:
            sequence = self._prefixes.begin(cached, live, layout, dry=True)
        else:
            sequence = self._workspace.sequence(dry=True)
        run(self._prefill(layout, sequence))
        counts = replace(Counts.of(sequence), shared=live)
        return explanation(sequence.pieces, asdict(counts), prepared.notices)

    def answer(self, job: Job, prepared: PreparedRequest, prefix: CachedPrefix, live: int, first: int) -> Task[None]:
        """Prefill the prompt in `prefix`, of which `live` tokens are cached, and generate the answers, each with cells
        for its `first` tokens. The first answer's sequence becomes an idle prefix."""
        layout, sequence = prepared.layout, prefix.sequence
        forks: list[KVSequence] = []
        answers, failed, complete = _AnswerTexts(job.on_event), False, 0

        def keep_conversation() -> None:
            if prepared.conversation is not None:
                texts = [*answers.texts.values()] or [""]
                self._state.conversations.keep(prepared.request, prepared.digests, prepared.conversation, texts)

        def on_done(answer: AnswerDone) -> None:
            nonlocal complete
            complete += 1
            if complete == job.sequences:  # before the client gets the end and sends its next turn
                keep_conversation()
            self._emit_done(job, answer)

        try:
            yield from self._prefill(layout, sequence)
            yield [sequence]
            counts = replace(Counts.of(sequence), shared=live)
            gain = saved_seconds(sequence.pieces, layout.prompt.segments)
            self._emit_prefill_done(job, counts, live, sequence.pieces, prepared.notices, gain)
            forks = [sequence.share() for _ in range(job.sequences - 1)]
            reservation = job.reservations[0]
            reservation.fork_cells = reservation.forks = 0
            for fork in forks:
                fork.token_limit = sequence.token_limit
                tokens, reasoning_end = len(layout) + first, reservation.reasoning_end
                job.reservations.append(self._budget.reserve(fork, tokens, reasoning_end=reasoning_end))
            seed = prepared.request.params.sampling.seed
            seed = time.time_ns() & 0xFFFFFFFF if seed == DRAWN else seed
            seqs = [sequence, *forks]
            yield from generate_answers(self._workspace, prepared, seqs, seed, answers.add, on_done)
        except Exception as error:
            failed = True
            self._prefixes.drop(prefix)  # its K/V may be incomplete
            raise client_error(error) from error
        finally:
            for fork in forks:
                fork.close()
            # A stopped answer, too: its client continues from the text that it got.
            if complete < job.sequences and (any(answers.texts.values()) or not failed):
                keep_conversation()
            self._set_idle(prefix)

    def question(self, job: Job, question: Question, cells: int) -> Task[None]:
        """Answer a question in a sequence of its own with `cells` reserved; the sequence is closed at the end."""
        request, notices = question.draft.request, question.notices
        sequence = self._workspace.sequence()
        self._reserve(job, sequence, cells, question.lookahead)
        try:
            yield from self._assemble(question, sequence)
            plan = Plan.of(question.draft, sequence)
            events = _AnswerEvents(job, self._workspace, notices)
            self._emit_assembled(job, plan, events.callbacks)
            answer = yield from one_request_at_a_time(answer_task(self._workspace, request, plan, events.callbacks))
        except Exception as error:
            raise client_error(error) from error
        finally:
            sequence.close()
        self._emit_done(job, events.done(request, answer))

    def _explain_question(self, question: Question) -> dict[str, object]:
        with self._workspace.sequence(dry=True) as sequence:
            run(self._assemble(question, sequence))
            plan = Plan.of(question.draft, sequence)
            return {**plan_as_json(plan), "counts": asdict(plan.counts), "notices": question.notices}

    def _assemble(self, question: Question, sequence: KVSequence) -> Task[KVSequence]:
        dry = sequence.dry
        how = question.draft.how
        return assemble_task(self._workspace, question.prompt, question.parts, **how, dry=dry, begun=sequence)

    def session(self, job: Job, session: Session, turn: PreparedTurn, cells: int) -> Task[None]:
        """Answer the next turn of a session with `cells` reserved; the session is closed at the end."""
        events, continued = _AnswerEvents(job, self._workspace, turn.notices), not session.empty

        def on_assembled(plan: Plan) -> None:
            self._reserve(job, plan.sequence, cells, turn.lookahead)
            self._emit_assembled(job, plan, events.callbacks)

        with job.resources:
            try:
                answer_task = session.answer_task(turn.request, events.callbacks, on_assembled, turn.first_tokens)
                answer = yield from one_request_at_a_time(answer_task)
            except Exception as error:
                raise client_error(error) from error
        # Once the session is closed, as its client may send the next turn at once.
        self._emit_done(job, events.done(turn.request, answer, continued))

    def _reserve(self, job: Job, sequence: KVSequence, cells: int, lookahead: int) -> None:
        job.reservations = [self._budget.reserve(sequence, cells, lookahead, forks=int(lookahead > 0))]

    def _emit_assembled(self, job: Job, plan: Plan, callbacks: Callbacks) -> None:
        warn_unspliced(plan.sequence, callbacks.on_notice)
        live = sum(piece.tokens for piece in plan.sequence.pieces if piece.reason is Reason.RESTORED_SESSION)
        self._emit_prefill_done(job, plan.counts, live, plan.sequence.pieces, (), plan.saved)

    def _emit_prefill_done(
        self,
        job: Job,
        counts: Counts,
        live: int,
        pieces: Sequence[Piece],
        notices: Sequence[str],
        gain: float | None,
    ) -> None:
        """Emit the end of a prefill. `live`: tokens found in the prefix cache; `gain`: seconds saved, if known."""
        seconds, cached = time.perf_counter() - job.arrived, counts.total - counts.decoded
        self._metrics.decoded += counts.decoded
        self._metrics.spliced += cached - live
        self._metrics.live += live
        self._metrics.first_token.add(seconds)
        job.on_event(PrefillDone(counts.total, cached, counts, tuple(pieces), seconds, tuple(notices), gain))

    def _emit_done(self, job: Job, answer: AnswerDone) -> None:
        self._metrics.generated += answer.tokens
        job.on_event(answer)

    def _prefill(self, layout: Layout, sequence: KVSequence) -> Task[None]:
        if layout.prompt.conversation is None:
            sequence.append(layout.tokens[len(sequence) :])
            return
        yield from assemble_task(
            *(self._workspace, layout.prompt, layout.parts),
            seam=layout.seam,
            splice=layout.splice,
            exact=layout.exact,
            dry=sequence.dry,
            begun=sequence,
            counted=True,
        )

    def _set_idle(self, prefix: CachedPrefix) -> None:
        """Make the prefix available to other requests, if its sequence is intact."""
        if prefix not in self._prefixes.entries:
            return
        try:
            self._prefixes.set_idle(prefix)
        except NotesError:
            self._prefixes.drop(prefix)
        while sum(1 for _ in self._prefixes.idle_prefixes()) > IDLE:
            self._prefixes.evict()


def client_error(error: Exception) -> NotesError:
    """Return the error for the client. An unexpected one is logged with its traceback."""
    if isinstance(error, NotesError):
        return error
    output.say("".join(traceback.format_exception(error)))
    return ServerError(f"a fault of the server: {type(error).__name__}")
