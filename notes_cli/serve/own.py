"""What `notes ask` of the server's own user asks, answered as that process would answer it by itself.

It is assembled in a notebook of its own, of the size that it would have there, from the same words: nothing is matched,
and nothing gone on from that another request has left. What is told on the way is what `notes ask` prints.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from notes_cli.engine.decision import variants_of
from notes_cli.engine.loop import Task, one_by_one
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import Segment
from notes_cli.errors import Help, NotesError, Say, reason
from notes_cli.explaining import Room as Cut
from notes_cli.explaining import plan_as_json, turn_as_json
from notes_cli.images import SUFFIXES, looks_like_image
from notes_cli.runtime.asking import ENDLESS, Answer, Listener, Plan, Request, answering, room_for
from notes_cli.runtime.assembling import assembling, cells_meanwhile, tell_unspliced
from notes_cli.runtime.contexts import DEFAULT_CONTEXT
from notes_cli.runtime.opening import no_image, open_skill, tell_edited
from notes_cli.runtime.prompt import Parts, Prompt, parts_of
from notes_cli.runtime.requests import RequestFields, read_request
from notes_cli.runtime.settling import Draft, drafted
from notes_cli.runtime.thinking import Thought
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve import wire
from notes_cli.serve.jobs import Job
from notes_cli.serve.kv_budget import KVBudget, Reservation, turn_of_session
from notes_cli.serve.metrics import Metrics
from notes_cli.serve.prepare import ServerState
from notes_cli.serve.refusals import Refused
from notes_cli.serve.segment_cache import SegmentCache
from notes_cli.serve.turns import fault
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.session import Session
from notes_cli.text.names import name_of
from notes_cli.text.skill import read_image

LONG = 512  # tokens of a prompt of whose reading is told

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Alone:
    """A request without a session, and its prompt, which is to be assembled."""

    draft: Draft
    prompt: Prompt
    parts: Parts


@dataclass(frozen=True, slots=True)
class _Sent:
    """An image of a question: by its name in the library, or with its bytes. No file is opened here."""

    word: str  # as it was typed
    path: str
    data: bytes | None

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> _Sent:
        """Raise LookupError, TypeError or ValueError for what is none."""
        if "name" in told:
            return cls(str(told["name"]), "", None)
        return cls(str(told["word"]), str(told["path"]), b64decode(told["data"], validate=True))

    def segment(self, at: _At, say: Say, *, dry: bool) -> Segment:
        """Compiled now if it is not yet, as `notes ask` by itself would. Raise NotesError."""
        if self.data is None:
            return at.segment_cache.segment(self.word)
        path = Path(self.path)
        if not looks_like_image(self.data) and path.suffix.lower() not in SUFFIXES:
            raise no_image(name_of(path.stem))
        skill = replace(read_image(self.data, self.word, path.stem), source=self.path)
        return open_skill(at.workspace, skill, self.word, say, dry=dry)


@dataclass(frozen=True, slots=True)
class _Needed:
    """What an answer takes of the context."""

    size: int | None  # tokens that its notebook may have (`_size`)
    cells: int  # at most
    looks: int  # cells to look ahead in, for a choice

    @classmethod
    def of(cls, workspace: Workspace, room: KVBudget, request: Request, tokens: int, spare: int) -> _Needed:
        """For a prompt of so many tokens, and `spare` more. Of a context of a given size it is no more than that has:
        what does not fit says so itself."""
        variants = variants_of(workspace.model, request.choices or ()).values()
        looks = max((len(option) for options in variants for option in options), default=0)
        size = _size(workspace, tokens, spare)
        most = max(1, room.cells - looks) if size is None else max(size, tokens)
        return cls(size, most if request.max_tokens == ENDLESS else min(tokens + spare, most), looks)

    def grant(self, room: KVBudget, notebook: Notebook) -> Reservation:
        """One cell more than there will be: with its last token it asks for no further room."""
        return room.reserve(notebook, self.cells + 1, self.looks, others=int(self.looks > 0))


class _At(NamedTuple):
    """Where it is answered."""

    workspace: Workspace
    segment_cache: SegmentCache
    room: KVBudget
    metrics: Metrics
    job: Job


class Own:
    """One call of `notes ask`. `begin` may be called again and again, until there is room for it."""

    def __init__(self, asked: Mapping[str, Any], hear: Callable[[Json], object]) -> None:
        """`asked`: `words` (runtime/requests.py) and those for a session that goes on, `following`; `images`, by name
        or with their bytes; `session` and `explain`. Raise Refused for anything else. `hear` is told, in the
        scheduler's thread."""
        try:
            self.words: RequestFields = asked["words"]
            self._following: RequestFields | None = asked["following"]
            self._session: str | None = asked["session"]
            self._explain: bool = asked["explain"]
            self._sent = [_Sent.read(one) for one in asked.get("images", ())]
            self._images: list[Segment] | None = None
            self.formed = self.words["grammar"] is not None or self.words["json_schema"] is not None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Refused(400, f"these are no words of a question: {error!r}"[:200]) from None
        self._hear, self._waiting = hear, list[Json]()
        self._accepted, self._known = False, False
        self._alone: _Alone | None = None
        self._stored: SessionFolder | None = None
        self._notebook: Notebook | None = None
        self._listener = Listener(
            notice=lambda notice: self._tell({"notice": wire.as_json(notice)}),
            thought=lambda text: self._tell({"thought": text}),
            answer=lambda text: self._tell({"answer": text}),
        )

    def _tell(self, event: Json) -> None:
        """What was told before there was room waits: it may still be told by another process."""
        if self._accepted:
            self._hear(event)
        else:
            self._waiting.append(event)

    def _accept(self) -> None:
        """From here on it is answered here, and nowhere else."""
        if not self._accepted:
            self._accepted = True
            for event in [{"accepted": True}, *self._waiting]:
                self._hear(event)

    def begin(self, state: ServerState, room: KVBudget, metrics: Metrics, job: Job) -> Task[None] | None:
        """The task that answers, in room that was seen to; None where there is none now. Raise NotesError."""
        at = _At(state.workspace, state.segment_cache, room, metrics, job)
        try:
            return self._begin_alone(at) if self._session is None else self._begin_turn(at, self._session)
        except Refused:
            raise
        except Exception as error:
            if self._known:  # what was asked for can be meant: it goes wrong as it is answered
                self._accept()
            raise _told(error, state.workspace) from error

    def _read(self, at: _At, words: RequestFields) -> Request:
        """The request, with skills of the library. Raise Refused for another process's files, NotesError."""
        request = read_request({**words, "images": ()})
        self._known = True
        segments = []
        for word in words["splice"]:
            target = at.workspace.library.resolve(word)
            if target.kind != "name":
                raise Refused(400, f"{word} is no compiled skill, and this server reads no files")
            segments.append(at.segment_cache.segment(target.name))
        if self._images is None:
            self._images = [one.segment(at, self._listener.notice, dry=self._explain) for one in self._sent]
        return replace(request, splice=segments, images=self._images)

    def _tell_edited(self, at: _At, request: Request) -> None:
        for one in request.splice:
            if isinstance(one, Segment):
                tell_edited(at.workspace, one, self._listener.notice)

    # Without a session.

    def _begin_alone(self, at: _At) -> Task[None] | None:
        workspace = at.workspace
        if self._alone is None:
            request = self._read(at, self.words)
            self._tell_edited(at, request)
            draft = drafted(workspace, request, self._listener, dry=self._explain)
            self._alone = _Alone(draft, draft.prompt, parts_of(workspace, draft.prompt))
        one = self._alone
        tokens = one.parts.count + cells_meanwhile(one.prompt, one.parts)
        spare = room_for(workspace, one.draft.request, one.draft.settings.think)
        workspace.check_length(tokens + min(spare, 1))
        needed = _Needed.of(workspace, at.room, one.draft.request, tokens, spare)
        if not at.room.make_room(needed.cells + needed.looks, 2):
            return None
        self._accept()
        return self._answer_alone(at, one, needed)

    def _answer_alone(self, at: _At, one: _Alone, needed: _Needed) -> Task[None]:
        workspace, draft, request = at.workspace, one.draft, one.draft.request
        notebook = workspace.notebook(dry=self._explain)
        notebook.bound = needed.size
        if not self._explain:
            self._hold(at, needed, notebook)
        try:
            yield from assembling(
                *(workspace, one.prompt, one.parts),
                **draft.how,
                dry=self._explain,
                begun=notebook,
            )
            plan = Plan.of(draft, notebook)
            if self._explain:
                self._tell({"document": plan_as_json(plan)})
                return
            self._planned(at, plan)
            listener = self._listening(workspace)
            answer = yield from one_by_one(answering(workspace, request, plan, listener))
            listener.answered(answer)
            self._document(at, request, answer)
        except Exception as error:
            raise _told(error, workspace) from error
        finally:
            notebook.close()

    # A turn of a session.

    def _begin_turn(self, at: _At, name: str) -> Task[None] | None:
        workspace, held = at.workspace, at.job.held  # the session stays open while this waits for room
        try:
            request = self._read(at, self.words)
            if self._stored is None:
                self._stored = held.enter_context(Sessions(workspace.paths.sessions).locked(name, new=True))
            stored = self._stored
            if stored.state.live:
                if self._following is None:
                    self._accept()
                    held.close()
                    self._tell({"begun": True})
                    return _nothing()
                request = self._read(at, self._following)
            told, spare = turn_of_session(workspace, stored.state, request)
            needed = _Needed.of(workspace, at.room, request, told, spare)
            if not at.room.make_room(needed.cells + needed.looks, 2):
                return None
            session = held.enter_context(Session(workspace, stored))
        except BaseException:
            held.close()
            raise
        self._tell_edited(at, request)
        self._accept()
        return self._answer_turn(at, session, request, needed, held)

    def _answer_turn(self, at: _At, session: Session, request: Request, needed: _Needed, held: ExitStack) -> Task[None]:
        workspace, goes_on = at.workspace, not session.empty

        def assembled(plan: Plan) -> None:
            spare = room_for(workspace, request, plan.settings.think)
            plan.notebook.bound = _size(workspace, plan.counts.total, spare)
            self._hold(at, needed, plan.notebook)
            self._planned(at, plan)

        with held:
            try:
                answer = yield from one_by_one(session.answering(request, self._listening(workspace), assembled))
            except Exception as error:
                raise _told(error, workspace) from error
        self._document(at, request, answer, goes_on)  # who hears it may go on with the session

    # What both have.

    def _listening(self, workspace: Workspace) -> Listener:
        def thought_ended(thought: Thought, asked: bool) -> None:
            facts = {"text": thought.text, "stopped": thought.stopped, "asked": asked}
            self._tell({"thought_ended": facts, "room": self._cut(workspace)})

        def answered(answer: Answer) -> None:
            self._tell({"answered": {"text": answer.text, "stopped": answer.stopped}, "room": self._cut(workspace)})

        return replace(self._listener, thought_ended=thought_ended, answered=answered)

    def _cut(self, workspace: Workspace) -> Cut:
        return Cut(self._notebook.size if self._notebook else workspace.context.n_ctx, workspace.longest)

    def _planned(self, at: _At, plan: Plan) -> None:
        """The prompt is assembled, and what of it is pending will be read."""
        counts, self._notebook = plan.counts, plan.notebook
        live = sum(piece.tokens for piece in plan.notebook.pieces if piece.reason is Reason.RESTORED_SESSION)
        at.metrics.decoded += counts.decoded
        at.metrics.live += live
        at.metrics.spliced += counts.total - counts.decoded - live
        tell_unspliced(plan.notebook, self._listener.notice)

    def _hold(self, at: _At, needed: _Needed, notebook: Notebook) -> None:
        """Keep its room, and tell how far reading has come, where that takes long."""
        at.job.reservations = [needed.grant(at.room, notebook)]
        begin = end = 0

        def stepped() -> None:
            nonlocal begin, end
            if notebook.rows >= end:  # at most a micro-batch of it has been read
                begin = max(end, notebook.rows - notebook.context.n_ubatch)
                if len(notebook) - begin < LONG or not notebook.pending:
                    return
                end = len(notebook)
            self._tell({"reading": [notebook.rows - begin, end - begin]})

        at.job.stepped = stepped

    def _document(self, at: _At, request: Request, answer: Answer, goes_on: bool = False) -> None:
        at.metrics.written += answer.tokens
        at.metrics.first.add(answer.begun + answer.load + answer.first_token - at.job.came)
        self._tell({"document": turn_as_json(at.workspace, request, answer, at.job.came, self._session, goes_on)})


def _size(workspace: Workspace, tokens: int, spare: int) -> int | None:
    """Tokens that its notebook may have: as many as in a context of its own. None for those of this context, whose size
    was given."""
    return workspace.size_alone(tokens, spare) if workspace.grows else None


def _nothing() -> Task[None]:
    """A task that has nothing to do."""
    return
    yield


def _told(error: Exception, workspace: Workspace) -> NotesError:
    """An error as the process that asked would meet it."""
    if isinstance(error, OSError):
        return NotesError(f"{error.filename}: {reason(error)}" if error.filename else reason(error))
    if not isinstance(error, NotesError):
        return fault(error)
    if error.remedy and error.remedy.help is Help.COMPILE_AGAIN and workspace.grows:  # for a context of its own size
        values, size = error.remedy.values, workspace.size_alone(0, 0)
        options = {name: value for name, value in values["options"].items() if name != "n_ctx"}
        own = {"n_ctx": size} if size != DEFAULT_CONTEXT else {}
        error.remedy = Help.COMPILE_AGAIN(name=values["name"], model=values["model"], options={**own, **options})
    return error
