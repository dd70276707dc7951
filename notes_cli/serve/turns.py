"""Prefill a prepared prompt and generate its answers, as a task of the loop."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from notes_cli import output
from notes_cli.engine.loop import Task, run
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.errors import NotesError
from notes_cli.explaining import explanation
from notes_cli.runtime.asking import Counts, Listener, Plan
from notes_cli.runtime.assembling import assembling, saved
from notes_cli.runtime.prefixes import Layout, Prefix
from notes_cli.serve.answering import Probabilities, TextDelta, Written, writing
from notes_cli.serve.jobs import Begun, Job, JobEvent
from notes_cli.serve.kv_budget import KVBudget
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.parsing import DRAWN
from notes_cli.serve.prepare import PreparedRequest, PreparedTurn, ServerState
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


class Turns:
    """Tasks that answer requests, for the decode thread."""

    def __init__(self, state: ServerState, room: KVBudget, metrics: Metrics) -> None:
        self._state, self._budget, self._metrics = state, room, metrics
        self._workspace, self._prefixes = state.workspace, state.prefixes

    def explain(self, prepared: PreparedRequest) -> dict[str, object]:
        """The pieces of a prompt and how each would come about now. Nothing is computed. Raise NotesError."""
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

    def session(self, job: Job, session: Session, turn: PreparedTurn, cells: int) -> Task[None]:
        """The next turn of a session, in cells that were reserved. With its end the session is closed."""

        def assembled(plan: Plan) -> None:
            # One cell more than there will be: with its last token it asks for no further room.
            job.reservations = [self._budget.reserve(plan.notebook, cells + 1)]
            live = sum(piece.tokens for piece in plan.notebook.pieces if piece.reason is Reason.RESTORED_SESSION)
            self._tell_begun(job, plan.counts, live, plan.notebook.pieces, notices, plan.saved)

        def thought(text: str) -> None:
            job.on_event(TextDelta(0, text, thought=True))

        notices: list[str] = []
        told = Probabilities(self._workspace.model, job.request.params.likely)
        listener = Listener(
            notice=lambda notice: notices.append(str(notice)),
            answer=lambda text: job.on_event(TextDelta(0, text, tokens=told.take())),
            chosen=told.chosen,
            thought=thought,
        )
        with job.held:
            try:
                found = yield from session.answering(turn.request, listener, assembled)
            except Exception as error:
                raise fault(error) from error
        # When it is closed: its client may send the next turn at once.
        reasoning = found.thought.tokens if found.thought else 0
        self._tell_written(job, Written(0, found.stopped or "end", found.tokens + reasoning, reasoning, told.take()))

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
