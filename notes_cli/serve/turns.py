"""Turns: a request's prompt read, and the answers to it written, as a task of the loop."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

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
from notes_cli.serve.arranging import Arranged, Desk, arrange
from notes_cli.serve.jobs import Begun, Job, Told, Turn
from notes_cli.serve.parsing import DRAWN, Asked
from notes_cli.serve.refusals import Refused, ServerError
from notes_cli.serve.room import Room
from notes_cli.serve.tally import Tally
from notes_cli.sessions.session import Session

IDLE = 32  # notebooks that are kept beside those that are being answered


@dataclass(slots=True)
class _Answer:
    """The answers to a request, as they are told."""

    tell: Callable[[Told], object]
    texts: dict[int, str] = field(default_factory=dict)  # by the number of the choice

    def hear(self, words: TextDelta) -> None:
        if not words.thought:
            self.texts[words.index] = self.texts.get(words.index, "") + words.text
        self.tell(words)


class Turns:
    """What requests need to be answered, in the thread that has the context."""

    def __init__(self, desk: Desk, room: Room, tally: Tally) -> None:
        self._desk, self._room, self._tally = desk, room, tally
        self._workspace, self._prefixes = desk.workspace, desk.prefixes

    def explain(self, asked: Asked) -> dict[str, object]:
        """What a prompt would be made of now, and how. Nothing is computed. Raise NotesError."""
        if asked.notes.session is not None:
            raise Refused(400, "a turn of a session is not explained before it is asked", param="notes.session")
        arranged = arrange(self._desk, asked, dry=True)
        layout = arranged.layout
        kept, length, _ = self._prefixes.find(layout, asked.notes.cache_salt)
        live = length if kept else 0
        notebook = (
            self._prefixes.begin(kept, live, layout, dry=True) if kept and live else self._workspace.notebook(dry=True)
        )
        run(self._reading(layout, notebook))
        counts = replace(Counts.of(notebook), shared=live)
        return explanation(notebook.pieces, asdict(counts), arranged.notices)

    def answer(self, job: Job, arranged: Arranged, held: Prefix, live: int, first: int) -> Task[None]:
        """Read the prompt, write the answers, and leave the first one's notebook to others."""
        layout, notebook = arranged.layout, held.notebook
        books: list[Notebook] = []
        heard, failed = _Answer(job.tell), False
        try:
            yield from self._reading(layout, notebook)
            yield [notebook]
            counts = replace(Counts.of(notebook), shared=live)
            gain = saved(notebook.pieces, layout.prompt.segments)
            self._tell_begun(job, counts, live, notebook.pieces, arranged.notices, gain)
            books = [notebook.share() for _ in range(job.sequences - 1)]
            job.grants[0].more = job.grants[0].others = 0
            for book in books:
                book.bound = notebook.bound
                job.grants.append(self._room.grant(book, len(layout) + first, kept=job.grants[0].kept))
            seed = arranged.asked.writing.sampling.seed
            seed = time.time_ns() & 0xFFFFFFFF if seed == DRAWN else seed
            ended = partial(self._tell_written, job)
            yield from writing(self._workspace, arranged, [notebook, *books], seed, heard.hear, ended)
        except Exception as error:
            failed = True
            self._prefixes.drop(held)  # nobody should go on from what failed
            raise fault(error) from error
        finally:
            for book in books:
                book.close()
            # Also of an answer that was stopped: its client goes on from what it has heard.
            if arranged.talk and (any(heard.texts.values()) or not failed):
                self._desk.conversations.keep(arranged.asked, arranged.talk, [*heard.texts.values()] or [""])
            self._leave(held)

    def session(self, job: Job, session: Session, turn: Turn) -> Task[None]:
        """The next turn of a session, in cells that were seen to. With its end the session is given up."""

        def assembled(plan: Plan) -> None:
            job.grants = [self._room.grant(plan.notebook, turn.cells)]
            live = sum(piece.tokens for piece in plan.notebook.pieces if piece.reason is Reason.RESTORED_SESSION)
            self._tell_begun(job, plan.counts, live, plan.notebook.pieces, notices, plan.saved)

        def thought(text: str) -> None:
            job.tell(TextDelta(0, text, thought=True))

        notices: list[str] = []
        told = Probabilities(self._workspace.model, job.asked.writing.likely)
        listener = Listener(
            notice=lambda notice: notices.append(str(notice)),
            answer=lambda text: job.tell(TextDelta(0, text, tokens=told.take())),
            chosen=told.chosen,
            thought=thought,
        )
        with job.held:
            try:
                found = yield from session.answering(turn.request, listener, assembled, turn.room)
            except Exception as error:
                raise fault(error) from error
            reasoning = found.thought.tokens if found.thought else 0
            self._tell_written(
                job, Written(0, found.stopped or "end", found.tokens + reasoning, reasoning, told.take())
            )

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
        self._tally.decoded += counts.decoded
        self._tally.spliced += cached - live
        self._tally.live += live
        self._tally.first.add(seconds)
        job.tell(Begun(counts.total, cached, counts, tuple(pieces), seconds, tuple(notices), gain))

    def _tell_written(self, job: Job, written: Written) -> None:
        self._tally.written += written.tokens
        job.tell(written)

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
