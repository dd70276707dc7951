"""Prefill a prepared prompt and generate its answers, as a task of the loop."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from notes_cli import output
from notes_cli.engine.loop import Task, one_by_one, run
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.errors import NotesError
from notes_cli.explaining import explanation, plan_as_json, turn_as_json
from notes_cli.runtime.asking import Answer, Counts, Listener, Plan, Request, answering
from notes_cli.runtime.assembling import assembling, saved, tell_unspliced
from notes_cli.runtime.prefixes import Layout, Prefix
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

IDLE = 32  # notebooks that are kept beside those that are being answered


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
        self.listener = Listener(
            notice=lambda notice: notices.append(str(notice)),
            thought=self._thought,
            answer=lambda text: job.on_event(TextDelta(0, text, tokens=self._tokens.take())),
            chosen=self._tokens.chosen,
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
        notebook = (
            self._prefixes.begin(kept, live, layout, dry=True) if kept and live else self._workspace.notebook(dry=True)
        )
        run(self._reading(layout, notebook))
        counts = replace(Counts.of(notebook), shared=live)
        return explanation(notebook.pieces, asdict(counts), prepared.notices)

    def answer(self, job: Job, prepared: PreparedRequest, held: Prefix, live: int, first: int) -> Task[None]:
        """Read the prompt, write the answers, and leave the first one's notebook to others."""
        layout, notebook = prepared.layout, held.notebook
        books: list[Notebook] = []
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
            yield from self._reading(layout, notebook)
            yield [notebook]
            counts = replace(Counts.of(notebook), shared=live)
            gain = saved(notebook.pieces, layout.prompt.segments)
            self._tell_begun(job, counts, live, notebook.pieces, prepared.notices, gain)
            books = [notebook.share() for _ in range(job.sequences - 1)]
            job.reservations[0].more = job.reservations[0].others = 0
            for book in books:
                book.bound = notebook.bound
                job.reservations.append(self._budget.reserve(book, len(layout) + first, kept=job.reservations[0].kept))
            seed = prepared.request.params.sampling.seed
            seed = time.time_ns() & 0xFFFFFFFF if seed == DRAWN else seed
            yield from writing(self._workspace, prepared, [notebook, *books], seed, heard.hear, ended)
        except Exception as error:
            failed = True
            self._prefixes.drop(held)  # nobody should go on from what failed
            raise fault(error) from error
        finally:
            for book in books:
                book.close()
            # Also of an answer that was stopped: its client goes on from the text that it has.
            if complete < job.sequences and (any(heard.texts.values()) or not failed):
                keep()
            self._leave(held)

    def question(self, job: Job, question: Question, cells: int) -> Task[None]:
        """A question in a sequence of its own, in cells that were seen to. With its end the sequence is given up."""
        request, notices = question.draft.request, question.notices
        notebook = self._workspace.notebook()
        self._reserve(job, notebook, cells, question.looks)
        try:
            yield from self._assembling(question, notebook)
            plan = Plan.of(question.draft, notebook)
            reply = _Reply(job, self._workspace, notices)
            self._assembled(job, plan, reply.listener)
            found = yield from one_by_one(answering(self._workspace, request, plan, reply.listener))
        except Exception as error:
            raise fault(error) from error
        finally:
            notebook.close()
        self._tell_written(job, reply.written(request, found))

    def _explain_question(self, question: Question) -> dict[str, object]:
        with self._workspace.notebook(dry=True) as notebook:
            run(self._assembling(question, notebook))
            plan = Plan.of(question.draft, notebook)
            return {**plan_as_json(plan), "counts": asdict(plan.counts), "notices": question.notices}

    def _assembling(self, question: Question, notebook: Notebook) -> Task[Notebook]:
        dry = notebook.dry
        how = question.draft.how
        return assembling(self._workspace, question.prompt, question.parts, **how, dry=dry, begun=notebook)

    def session(self, job: Job, session: Session, turn: PreparedTurn, cells: int) -> Task[None]:
        """The next turn of a session, in cells that were reserved. With its end the session is closed."""
        reply, goes_on = _Reply(job, self._workspace, turn.notices), not session.empty

        def assembled(plan: Plan) -> None:
            self._reserve(job, plan.notebook, cells, turn.looks)
            self._assembled(job, plan, reply.listener)

        with job.held:
            try:
                answering = session.answering(turn.request, reply.listener, assembled, turn.room)
                found = yield from one_by_one(answering)
            except Exception as error:
                raise fault(error) from error
        # When it is closed: its client may send the next turn at once.
        self._tell_written(job, reply.written(turn.request, found, goes_on))

    def _reserve(self, job: Job, notebook: Notebook, cells: int, looks: int) -> None:
        job.reservations = [self._budget.reserve(notebook, cells, looks, others=int(looks > 0))]

    def _assembled(self, job: Job, plan: Plan, listener: Listener) -> None:
        tell_unspliced(plan.notebook, listener.notice)
        live = sum(piece.tokens for piece in plan.notebook.pieces if piece.reason is Reason.RESTORED_SESSION)
        self._tell_begun(job, plan.counts, live, plan.notebook.pieces, (), plan.saved)

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

    def _reading(self, layout: Layout, notebook: Notebook) -> Task[None]:
        if layout.prompt.conversation is None:
            notebook.append(layout.tokens[len(notebook) :])
            return
        yield from assembling(
            *(self._workspace, layout.prompt, layout.parts),
            seam=layout.seam,
            splice=layout.splice,
            exact=layout.exact,
            dry=notebook.dry,
            begun=notebook,
            counted=True,
        )

    def _leave(self, held: Prefix) -> None:
        """A notebook that nobody works on any more: others may go on from it, if it is sound."""
        if held not in self._prefixes.kept:
            return
        try:
            self._prefixes.rest(held)
        except NotesError:
            self._prefixes.drop(held)
        while sum(1 for _ in self._prefixes.resting()) > IDLE:
            self._prefixes.evict()


def fault(error: Exception) -> NotesError:
    """What a client is told of an error; one that should not have been is written down for whoever runs the server."""
    if isinstance(error, NotesError):
        return error
    output.say("".join(traceback.format_exception(error)))
    return ServerError(f"a fault of the server: {type(error).__name__}")
