"""A session at work: it begins with a prompt, goes on by turns and edits, and keeps each of them.

Here are the turns; edits are in edits.py, the sequence in kv.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from notes_cli.editing.methods import Method
from notes_cli.engine.image_positions import images_of
from notes_cli.engine.loop import Task
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import EngineError, Help, Notice, SessionError
from notes_cli.library.standing import marks_of, now
from notes_cli.runtime.answering import (
    NO_CALLBACKS,
    Answer,
    Callbacks,
    Plan,
    Request,
    Stream,
    answer,
    answer_task,
    explain,
    max_new_tokens,
    stream,
)
from notes_cli.runtime.assemble import SegmentPlacer, assemble, saved_seconds, spliced_tokens
from notes_cli.runtime.corrections import describe_wildcards, known_fields, unique_values
from notes_cli.runtime.prompt import Prompt, changes_of
from notes_cli.runtime.resolve import constraint_of, global_errata, open_requested, resolve
from notes_cli.runtime.settings import DEFAULT_SEAM
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.edits import Compacted, Edited, Editor, from_segment
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.forget import CUT, Forgetter, Forgotten
from notes_cli.sessions.lines import Line, Origin, as_line
from notes_cli.sessions.session_kv import SessionKV
from notes_cli.sessions.state import SkillText, State, unheard
from notes_cli.sessions.tool_results import Result, as_question, results_turn
from notes_cli.text.erratum import Erratum, read_errata, word
from notes_cli.text.keys import Known, listed
from notes_cli.text.messages import user_message
from notes_cli.text.prompt import next_turn
from notes_cli.text.tools import calls_in, form_of


class Session:
    """A session in a workspace, for as long as its lock is held. Close it, or use it as a context manager.

    Raise SessionError if it is another model's, UnsupportedError for a model whose rows cannot be kept.
    """

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        self.workspace = workspace
        self.stored = stored
        self._kv = SessionKV(workspace, stored)
        self._question = ""  # of the turn at hand, as are its skills and what is said of fields
        self._system = ""  # of the first turn
        self._skills: list[SkillText] = []
        self._said: dict[str, str] = {}
        self._marks: dict[str, tuple[str, ...]] = {}
        self._heard = now()  # when what everybody is told was looked at for it
        self._since = 0  # what `SessionKV.changes` was when it had begun

    def close(self) -> None:
        """Give back what its sequence takes of the context. What was kept is on disk."""
        self._kv.drop()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> State:
        return self.stored.state

    @property
    def sequence(self) -> KVSequence:
        """The sequence as the ledger has it, put back from disk unless it is at hand."""
        return self._kv.sequence

    @property
    def empty(self) -> bool:
        """Whether the next turn is the first one."""
        return not self.state.live

    def ask(self, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Answer:
        """The next turn: ask, answer, and keep both. Raise SessionError where a session that has begun is asked for
        what belongs to its first turn."""
        found = answer(self.workspace, request, self._prepare(request, callbacks), callbacks)
        self.keep(found.unwritten)
        return found

    def stream(self, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Stream:
        """`ask`, step by step. The turn is kept when the answer is complete, and not if this is closed before."""
        plan = self._prepare(request, callbacks)
        turn = self._since
        try:
            found = yield from stream(self.workspace, request, plan, callbacks)
        except BaseException as error:
            if isinstance(error, EngineError) and turn != self._kv.changes:
                raise self._gone_on() from error  # its sequence was closed
            if turn == self._since:  # else a later one is at hand
                self._kv.drop()
            raise
        self.keep(found.unwritten, turn)
        return found

    def _prepare(self, request: Request, callbacks: Callbacks, room: int | None = None) -> Plan:
        """Settle what holds for the next turn, and assemble it. `room`: as of `answer_task`."""
        begun = time.perf_counter()
        goes_on = not self.empty
        made = request.recompute or request.exact or request.decode or request.place or request.system is not None
        if goes_on and (request.fields or made):
            raise SessionError(
                f"session {self.stored.name} has begun: system text, place, recompute, exact and decode belong to its "
                "first turn, and fields are changed by edits"
            )
        if request.results:
            self._check_results(request)
        grammar = constraint_of(self.workspace, request)
        segments = self._open(request, callbacks)
        self._check_images(segments)
        self._heard = now()
        draft = resolve(
            *(self.workspace, request, segments, callbacks),
            had=self.state.skills,
            unheard={} if request.results else unheard(self.state, global_errata(self.workspace)),
            goes_on=goes_on,
            grammar=grammar,
            begun=begun,
        )
        request, settings = draft.request, draft.settings
        room = max_new_tokens(self.workspace, request, settings.think) if room is None else room
        if request.results:
            sequence = self.answered(request.results, room, settings.think)
        elif goes_on:
            sequence = self.follow(
                *(request.question, request.errata, settings.wording, room, settings.think),
                segments=draft.segments,
                seam=settings.seam,
                strict=request.strict,
            )
        else:
            prompt = draft.prompt
            sequence = assemble(self.workspace, prompt, **draft.how, room=room)
            self.begin(prompt, sequence)
        return Plan.of(draft, sequence)

    def _open(self, request: Request, callbacks: Callbacks) -> list[Segment]:
        """The skills of a request. Where one cannot be compiled in so small a context, raise EngineError with a size
        for the whole turn."""
        try:
            return open_requested(self.workspace, request, callbacks)
        except EngineError as error:
            if not _asks_for_more(error):
                raise
            # Errata may be of skills that are there already, and take at most a token a byte and their frame.
            alone = request if self.empty else replace(request, errata=())
            errata = 0 if self.empty else sum(64 + len(text.encode()) for text in request.errata)
            try:
                explain(self.workspace, alone)
            except EngineError as whole:
                if not _asks_for_more(whole):
                    raise
                assert whole.remedy
                size = whole.remedy.values["tokens"] + len(self.state.tokens) + errata
                raise EngineError(whole.what, Help.LARGER_CONTEXT(tokens=-(-size // 256) * 256)) from error
            raise

    def answer_task(
        self,
        request: Request,
        callbacks: Callbacks = NO_CALLBACKS,
        assembled: Callable[[Plan], object] = lambda plan: None,
        room: int | None = None,
    ) -> Task[Answer]:
        """`ask` as a task of a loop; the turn is kept when the answer is whole. `assembled` is told of the prompt.
        `room`: tokens to write that there must be room for at first, where more is made as they are written; None: for
        all of them."""
        try:
            plan = self._prepare(request, callbacks, room)
            assembled(plan)
            found = yield from answer_task(self.workspace, request, plan, callbacks)
            callbacks.on_answer(found)
        except BaseException:
            self._kv.drop()
            raise
        self.keep(found.unwritten)
        return found

    def begin(self, prompt: Prompt, sequence: KVSequence) -> None:
        """The first turn's prompt has been assembled in this sequence."""
        changes = changes_of(self.workspace, prompt) if prompt.method.record.edits_rows else {}
        self._kv.hold(sequence)
        self._question, self._system, self._since = prompt.question, prompt.system or "", self._kv.changes
        errata = [*prompt.method_errata, *prompt.errata]
        names = iter([erratum.key for erratum in errata])
        sequence.pieces = [
            replace(piece, name=next(names)) if piece.kind == "erratum" else piece for piece in sequence.pieces
        ]
        self._skills = [from_segment(segment, changes.get(segment.name), sequence) for segment in prompt.segments]
        self._marks = _marks(prompt.segments)
        self._said = _fields_of(errata)

    def follow(
        self,
        question: str,
        errata: Sequence[str] = (),
        wording: str | None = None,
        room: int = 0,
        think: bool = False,
        *,
        segments: Sequence[Segment] = (),
        seam: int = DEFAULT_SEAM,
        strict: bool = False,
    ) -> KVSequence:
        """Add the next turn, with the errata of edits before those given.

        `think`: it ends where a chain of thought begins. `segments`: skills that come in this turn's user message.
        Raise SessionError for one that the session has already; `strict`: UnsupportedError for one that cannot be
        spliced.
        """
        skills = {segment.name: segment for segment in segments}
        self._check_new(segments)
        known = known_fields(*self.state.skills, *segments)
        given = read_errata(errata, known)
        self._question, self._said = question, _fields_of(given)
        waiting = {key: said for key, said in self._waiting(known, wording).items() if key not in self._said}
        names = iter([*waiting, *(part.key for part in given)])
        said = [*waiting.values(), *(word(part, wording) for part in given)]
        template = self.workspace.thinking_template if think else self.workspace.template
        chunks = next_turn(template, [user_message(question, skills=list(skills), errata=said)])
        tokens = [
            skills[chunk.name].tokens if chunk.kind == "splice" else self.workspace.tokenize(chunk) for chunk in chunks
        ]
        self.workspace.make_room(len(self.state.tokens) + sum(map(len, tokens)), room, self._kv.at_hand)
        for segment in segments:  # again: a larger context may rotate otherwise (LongRoPE)
            self.workspace.check(segment)
        sequence = self.sequence
        place = SegmentPlacer(seam, strict=strict, encode_images=self.workspace.encode_images)
        for chunk, ids in zip(chunks, tokens, strict=True):
            if chunk.kind == "splice":
                place(sequence, skills[chunk.name])
            else:
                sequence.append(ids, chunk.kind, next(names) if chunk.kind == "erratum" else chunk.name)
        for segment in segments:
            gain = saved_seconds(sequence.pieces, [segment])
            self.workspace.used(segment.name, spliced_tokens(sequence.pieces, segment.name), gain)
        self._skills, self._marks = [from_segment(segment, None, sequence) for segment in segments], _marks(segments)
        self._since = self._kv.changes
        return sequence

    def answered(self, results: Sequence[Result], room: int = 0, think: bool = False) -> KVSequence:
        """Add the next turn: what the tools that the last answer called have returned. Errata wait for a question."""
        self._question, self._skills, self._said, self._marks = as_question(results), [], {}, {}
        template = self.workspace.thinking_template if think else self.workspace.template
        chunks = results_turn(self.workspace, template, results)
        tokens = [self.workspace.tokenize(chunk) for chunk in chunks]
        self.workspace.make_room(len(self.state.tokens) + sum(map(len, tokens)), room, self._kv.at_hand)
        sequence, names = self.sequence, iter(name for name, _ in results)
        for chunk, ids in zip(chunks, tokens, strict=True):
            sequence.append(ids, chunk.kind, next(names) if chunk.kind == "result" else "")
        self._since = self._kv.changes
        return sequence

    def _check_images(self, segments: Sequence[Segment]) -> None:
        """Raise SessionError for an image whose rows could not be put back."""
        for one in segments:
            why = self.workspace.context.supports("splice")
            if one.media and why:
                raise SessionError(f"{one.name} is an image, which a session cannot keep for this model: {why}")
            if any(not image.grid[0] for image in images_of(one.media, 0, one.axes) if image.grid is not None):
                raise SessionError(f"{one.name} is an image whose rows are in no grid, which a session cannot keep")

    def _check_results(self, request: Request) -> None:
        """Raise SessionError where the last answer did not call these tools, each once and in this order, or something
        belongs to a question."""
        name, given = self.stored.name, [tool for tool, _ in request.results]
        if request.question or request.splice or request.images or request.errata:
            raise SessionError("a question, skills, images and errata do not go with the results of tools")
        said = "".join(one.text for one in self.state.entries if one.turn == self.state.turns and one.kind == "answer")
        form = form_of(self.workspace.model.chat_template or "")
        for tool in given:
            if tool not in said:
                raise SessionError(f"the last answer of session {name} does not call a tool {tool!r}")
        calls = calls_in(said, form, [{"name": tool} for tool in given]).calls
        if form is not None and [call.name for call in calls] != given:  # else nobody knows how this model calls
            raise SessionError(
                f"the last answer of session {name} does not call {listed(given)} and nothing else: there is a result "
                "for each of its calls, in their order"
            )

    def _waiting(self, known: Known, wording: str | None) -> dict[str, str]:
        """The errata that are still to be said, by the key of their field, worded as this turn has it: whatever held
        when they came, and whose they are, now that other skills may have the field, too."""
        waiting = {}
        for key, said in self.state.pending.items():
            value, found = self.state.values.get(key), self.state.known.find(key)
            if value is None or not found:  # a ledger may be anybody's
                waiting[key] = said
                continue
            now = known.key(found[0].skill, found[0].field)
            shared = now != found[0].field
            waiting[now] = word(Erratum(found[0].field, value, "", found[0].skill if shared else ""), wording)
        return waiting

    def _check_new(self, segments: Sequence[Segment]) -> None:
        seen = {skill.name for skill in self.state.skills}
        for segment in segments:
            if segment.name in seen:
                name = self.stored.name
                raise SessionError(f"{segment.name} is in session {name} already", Help.EDIT_SESSION(name=name))
            seen.add(segment.name)

    @contextmanager
    def fork(self, new: str) -> Iterator[Session]:
        """A second session that goes on from here, between two turns, and is held until the block ends. Nothing is read
        from disk: its sequence has the same rows in the same cells, until one of the two rewrites them, or the context
        has to grow for more sequences than it was opened with.

        Raise SessionError if there is a session of that name; then nothing is changed.
        """
        sessions = Sessions(self.stored.folder.parent)
        with sessions.forked(self.stored, new) as stored, Session(self.workspace, stored) as fork:
            fork._kv.hold(self.sequence.share())
            yield fork

    def _gone_on(self) -> SessionError:
        what = f"session {self.stored.name} was continued while this was answered, and the answer is not kept"
        return SessionError(what, "Ask again")

    def keep(self, answer: str = "", turn: int | None = None) -> None:
        """The turn at hand is complete: write it down. `answer`: one that was chosen, not written. `turn`: the one that
        is meant (`_since`), if there may be another by now.

        Raise SessionError where the session has gone on since it began: what it was asked after is not there any more.
        """
        turn = self._since if turn is None else turn
        if not turn == self._since == self._kv.changes:
            raise self._gone_on()
        sequence, start = self._kv.held, len(self.state.tokens)
        if answer:
            sequence.append(self.workspace.model.tokenize(answer), "answer", reason=Reason.CHOSEN)
        sequence.flush()
        pieces = [self._told(piece, sequence) for piece in sequence.pieces if piece.position >= start]
        skills = [asdict(skill) for skill in self._skills]
        line = {"op": "turn", "question": self._question, "pieces": pieces, "skills": skills, "said": self._said}
        line |= {"marks": self._marks, "heard": self._heard}
        if self.empty and self._system:
            line["system"] = self._system
        if images := [asdict(image) for image in sequence.images if image.first >= start]:
            line["images"] = images
        self._kv.commit(line, [(start, len(sequence))])

    def _told(self, piece: Piece, sequence: KVSequence) -> Line:
        ids = [int(token) for token in sequence.tokens[piece.position : piece.position + piece.tokens]]
        inside = {row - piece.position for image in sequence.images for row in range(image.first, image.last)}
        words = [token for index, token in enumerate(ids) if index not in inside]
        text = b"".join(self.workspace.model.token_bytes(token, special=True) for token in words).decode(
            errors="replace"
        )
        return {
            "kind": piece.kind,
            "name": piece.name,
            "text": text,
            "position": piece.position,
            "how": piece.how,
            **as_line(Origin.of(piece)),
            "tokens": ids,
        }

    # Edits, as edits.py has them.

    def edit(self, name: str, value: str, method: Method | None = None, heard: str | None = None) -> Edited:
        return Editor(self._kv, heard).edit(name, value, method)

    def edits(
        self, values: Mapping[str, str], method: Method | None = None, callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[Edited]:
        """Give several fields other values, `*.field` that of each skill that has it; yield each edit when it is made.

        Raise NotesError, before the first is made, where one of them cannot be, or a field is given two values.
        """
        for told in describe_wildcards(values, self.state.known):
            callbacks.on_notice(Notice(told))
        editor = Editor(self._kv)
        wanted = unique_values((key, value) for field, value in values.items() for key in editor.targets(field, value))
        for field, value in wanted.items():
            editor.check(field, value, method)
        for field, value in wanted.items():
            yield self.edit(field, value, method)

    def compact(self) -> Compacted:
        return Editor(self._kv).compact()

    def forget(self, names: Sequence[str], method: str = CUT, *, dry: bool = False) -> Forgotten:
        """Take out turns, chains of thought and results of tools (forgetting.py)."""
        return Forgetter(self._kv).forget(names, method, dry=dry)

    def undo(self) -> Line:
        """Back to before the last turn, edit, compaction or cut, to the very rows. Raise SessionError where there is
        none."""
        return self._kv.undo()


def _asks_for_more(error: EngineError) -> bool:
    return error.remedy is not None and error.remedy.help is Help.LARGER_CONTEXT


def _marks(segments: Iterable[Segment]) -> dict[str, tuple[str, ...]]:
    return {one.name: marks_of(one.source, one.text) for one in segments if one.fields}


def _fields_of(errata: Iterable[Erratum]) -> dict[str, str]:
    return {part.key: part.value for part in errata if part.field and part.value}
