"""Prefill a prepared prompt and generate its answers, as a task of the loop."""

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
from notes_cli.runtime.answering import Answer, Callbacks, Counts, Plan, Request, answer_task
from notes_cli.runtime.assemble import assemble_task, saved_seconds, warn_unspliced
from notes_cli.runtime.prefix_cache import CachedPrefix, Layout
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.answering import Probabilities, TextDelta, Written, writing
from notes_cli.serve.jobs import Begun, Job, JobEvent
from notes_cli.serve.kv_budget import KVBudget
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.parsing import DRAWN
from notes_cli.serve.prepare import PreparedRequest, ServerState
from notes_cli.serve.questions import PreparedTurn, Question
from notes_cli.serve.refusals import ServerError
from notes_cli.sessions.session import Session

IDLE = 32  # sequences that are kept beside those that are being answered


@dataclass(slots=True)
class _Answer:
    """The texts of the answers to a request, so far."""

    tell: Callable[[JobEvent], object]
    texts: dict[int, str] = field(default_factory=dict)  # by the number of the choice

    def hear(self, words: TextDelta) -> None:
        if not words.thought:
            self.texts[words.index] = self.texts.get(words.index, "") + words.text
        self.tell(words)


class _Reply:
    """The answer to a question or to a turn of a session, as it comes."""

    def __init__(self, job: Job, workspace: Workspace, notices: list[str]) -> None:
        self._job, self._workspace, self._notices = job, workspace, notices
        self._tokens = Probabilities(workspace.model, job.request.params.likely)
        self.callbacks = Callbacks(
            on_notice=lambda notice: notices.append(str(notice)),
            on_reasoning=self._thought,
            on_text=lambda text: job.on_event(TextDelta(0, text, tokens=self._tokens.take())),
            on_token=self._tokens.chosen,
        )

    def _thought(self, text: str) -> None:
        self._job.on_event(TextDelta(0, text, thought=True))

    def written(self, request: Request, answer: Answer, goes_on: bool = False) -> Written:
        """The end of it, with the key `notes` of the reply: the document of `notes ask --json` where the request has
        `explain`, the probabilities of choices in any case."""
        notes, session = self._job.request.notes, self._job.request.notes.session
        told: dict[str, object] = {}
        if answer.decision:
            self._job.on_event(TextDelta(0, answer.text))
            told = {"choice": answer.choice, "probabilities": answer.probabilities}
        if notes.explain:
            told = turn_as_json(self._workspace, request, answer, self._job.came, session, goes_on)
            told["notices"] = self._notices
        reasoning = answer.thought.tokens if answer.thought else 0
        rest = self._tokens.take()
        return Written(0, answer.stopped or "end", answer.tokens + reasoning, reasoning, rest, notes=told)


class Turns:
    """Tasks that answer requests, for the decode thread."""

    def __init__(self, state: ServerState, room: KVBudget, metrics: Metrics) -> None:
        self._state, self._budget, self._metrics = state, room, metrics
        self._workspace, self._prefixes = state.workspace, state.prefixes

    def explain(self, prepared: PreparedRequest | Question) -> dict[str, object]:
        """The pieces of a prompt and how each would come about now. Nothing is computed. Raise NotesError."""
        if isinstance(prepared, Question):
            return self._explain_question(prepared)
        layout = prepared.layout
        kept, length, _ = self._prefixes.find(layout, prepared.request.notes.cache_salt)
        live = length if kept else 0
        sequence = (
            self._prefixes.begin(kept, live, layout, dry=True) if kept and live else self._workspace.sequence(dry=True)
        )
        run(self._reading(layout, sequence))
        counts = replace(Counts.of(sequence), shared=live)
        return explanation(sequence.pieces, asdict(counts), prepared.notices)

    def answer(self, job: Job, prepared: PreparedRequest, held: CachedPrefix, live: int, first: int) -> Task[None]:
        """Read the prompt, write the answers, and leave the first one's sequence to others."""
        layout, sequence = prepared.layout, held.sequence
        seqs: list[KVSequence] = []
        heard, failed, complete = _Answer(job.on_event), False, 0

        def keep() -> None:
            if prepared.talk is not None:
                answers = [*heard.texts.values()] or [""]
                self._state.conversations.keep(prepared.request, prepared.keys, prepared.talk, answers)

        def ended(written: Written) -> None:
            nonlocal complete
            complete += 1
            if complete == job.sequences:  # before the client knows of the end, and sends its next turn
                keep()
            self._tell_written(job, written)

        try:
            yield from self._reading(layout, sequence)
            yield [sequence]
            counts = replace(Counts.of(sequence), shared=live)
            gain = saved_seconds(sequence.pieces, layout.prompt.segments)
            self._tell_begun(job, counts, live, sequence.pieces, prepared.notices, gain)
            seqs = [sequence.share() for _ in range(job.sequences - 1)]
            job.reservations[0].more = job.reservations[0].others = 0
            for seq in seqs:
                seq.token_limit = sequence.token_limit
                job.reservations.append(self._budget.reserve(seq, len(layout) + first, kept=job.reservations[0].kept))
            seed = prepared.request.params.sampling.seed
            seed = time.time_ns() & 0xFFFFFFFF if seed == DRAWN else seed
            yield from writing(self._workspace, prepared, [sequence, *seqs], seed, heard.hear, ended)
        except Exception as error:
            failed = True
            self._prefixes.drop(held)  # nobody should go on from what failed
            raise fault(error) from error
        finally:
            for seq in seqs:
                seq.close()
            # Also of an answer that was stopped: its client goes on from the text that it has.
            if complete < job.sequences and (any(heard.texts.values()) or not failed):
                keep()
            self._leave(held)

    def question(self, job: Job, question: Question, cells: int) -> Task[None]:
        """A question in a sequence of its own, in cells that were seen to. With its end the sequence is given up."""
        request, notices = question.draft.request, question.notices
        sequence = self._workspace.sequence()
        self._reserve(job, sequence, cells, question.lookahead)
        try:
            yield from self._assembling(question, sequence)
            plan = Plan.of(question.draft, sequence)
            reply = _Reply(job, self._workspace, notices)
            self._assembled(job, plan, reply.callbacks)
            found = yield from one_request_at_a_time(answer_task(self._workspace, request, plan, reply.callbacks))
        except Exception as error:
            raise fault(error) from error
        finally:
            sequence.close()
        self._tell_written(job, reply.written(request, found))

    def _explain_question(self, question: Question) -> dict[str, object]:
        with self._workspace.sequence(dry=True) as sequence:
            run(self._assembling(question, sequence))
            plan = Plan.of(question.draft, sequence)
            return {**plan_as_json(plan), "counts": asdict(plan.counts), "notices": question.notices}

    def _assembling(self, question: Question, sequence: KVSequence) -> Task[KVSequence]:
        dry = sequence.dry
        how = question.draft.how
        return assemble_task(self._workspace, question.prompt, question.parts, **how, dry=dry, begun=sequence)

    def session(self, job: Job, session: Session, turn: PreparedTurn, cells: int) -> Task[None]:
        """The next turn of a session, in cells that were reserved. With its end the session is closed."""
        reply, goes_on = _Reply(job, self._workspace, turn.notices), not session.empty

        def assembled(plan: Plan) -> None:
            self._reserve(job, plan.sequence, cells, turn.lookahead)
            self._assembled(job, plan, reply.callbacks)

        with job.held:
            try:
                answer_task = session.answer_task(turn.request, reply.callbacks, assembled, turn.room)
                found = yield from one_request_at_a_time(answer_task)
            except Exception as error:
                raise fault(error) from error
        # When it is closed: its client may send the next turn at once.
        self._tell_written(job, reply.written(turn.request, found, goes_on))

    def _reserve(self, job: Job, sequence: KVSequence, cells: int, lookahead: int) -> None:
        job.reservations = [self._budget.reserve(sequence, cells, lookahead, others=int(lookahead > 0))]

    def _assembled(self, job: Job, plan: Plan, callbacks: Callbacks) -> None:
        warn_unspliced(plan.sequence, callbacks.on_notice)
        live = sum(piece.tokens for piece in plan.sequence.pieces if piece.reason is Reason.RESTORED_SESSION)
        self._tell_begun(job, plan.counts, live, plan.sequence.pieces, (), plan.saved)

    def _tell_begun(
        self,
        job: Job,
        counts: Counts,
        live: int,
        pieces: Sequence[Piece],
        notices: Sequence[str],
        gain: float | None,
    ) -> None:
        """The prompt is there: say what it was made of. `live`: tokens whose rows were there already; `gain`: seconds
        of prefill that were saved, if they are known."""
        seconds, cached = time.perf_counter() - job.came, counts.total - counts.decoded
        self._metrics.decoded += counts.decoded
        self._metrics.spliced += cached - live
        self._metrics.live += live
        self._metrics.first.add(seconds)
        job.on_event(Begun(counts.total, cached, counts, tuple(pieces), seconds, tuple(notices), gain))

    def _tell_written(self, job: Job, written: Written) -> None:
        self._metrics.written += written.tokens
        job.on_event(written)

    def _reading(self, layout: Layout, sequence: KVSequence) -> Task[None]:
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

    def _leave(self, held: CachedPrefix) -> None:
        """A sequence that nobody works on any more: others may go on from it, if it is sound."""
        if held not in self._prefixes.entries:
            return
        try:
            self._prefixes.set_idle(held)
        except NotesError:
            self._prefixes.drop(held)
        while sum(1 for _ in self._prefixes.idle_prefixes()) > IDLE:
            self._prefixes.evict()


def fault(error: Exception) -> NotesError:
    """What a client is told of an error; one that should not have been is written down for whoever runs the server."""
    if isinstance(error, NotesError):
        return error
    output.say("".join(traceback.format_exception(error)))
    return ServerError(f"a fault of the server: {type(error).__name__}")
