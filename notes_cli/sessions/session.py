"""Runs the turns of a session: places corrections, follows the changed conversation with the K/V, generates, commits.

Operations between turns are in edits.py, the sequence in session_kv.py. A global erratum is stored in the library, and
corrects every session that has the skill.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

from notes_cli.editing.methods import ERRATUM, FIELD_ERRATUM, Change, Method, amend, change, refusal, with_quoted
from notes_cli.engine.pieces import Reason
from notes_cli.engine.positions import images_of
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence, Task
from notes_cli.errors import EngineError, Help, NotesError, Notice, Say, SessionError, SkillError, UnsupportedError
from notes_cli.library.container import peek
from notes_cli.library.global_errata import GlobalErrata, GlobalErratum, marks_of, now
from notes_cli.library.store import is_unmodified
from notes_cli.runtime.answering import answer_task, explain, max_new_tokens, stream
from notes_cli.runtime.assemble import assemble, place_segment, record_uses
from notes_cli.runtime.open_skills import SkillRef
from notes_cli.runtime.place import Policy, place, values_in
from notes_cli.runtime.prompt import DEFAULT_SEAM, Prompt, Result, changes_of
from notes_cli.runtime.request import NO_CALLBACKS, Answer, Callbacks, Request, Stream
from notes_cli.runtime.resolve import Prepared, constraint_of, global_errata, open_requested, resolve
from notes_cli.runtime.scheduler import Job, run
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.edits import (
    CUT,
    Removed,
    amended,
    as_segment,
    compact,
    correct,
    cut_errata,
    edits,
    edits_in_place,
    forget,
    from_segment,
    has_image,
)
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.follow import render, text_of
from notes_cli.sessions.session_kv import Planned, SessionKV
from notes_cli.sessions.state import ANSWERED, Entry, Memory, Part, SkillText, State, Turn, messages_of, with_messages
from notes_cli.text.erratum import Known, known_fields, read_errata
from notes_cli.text.fields import any_quoted, clean_value, is_quoted
from notes_cli.text.keys import listed
from notes_cli.text.messages import Message, SkillPart, results_of, user_message
from notes_cli.text.skill import Skill
from notes_cli.text.tools import calls_in, form_of


class Session(SessionKV, AbstractContextManager["Session"]):
    """An open session, whose lock is held. Close it, or use it as a context manager."""

    _read_at = ""  # when global errata were read
    _warned: frozenset[str] = frozenset()  # skills whose file has another text now

    def close(self) -> None:
        """Free the sequence. Committed turns are on disk."""
        self.drop()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def empty(self) -> bool:
        """True before the first turn."""
        return not self.state.turns

    def ask(self, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Answer:
        """Run the next turn and commit it. Raises SessionError if a later turn has options of the first."""
        answer = run(self.workspace, self._job(request, callbacks))
        callbacks.on_event(answer)
        return answer

    def stream(self, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Stream:
        """As `ask`, streaming. The turn is committed when the answer is complete, and not if the stream is closed
        earlier."""
        return (yield from stream(self.workspace, lambda callbacks: self._job(request, callbacks), callbacks))

    def _job(self, request: Request, callbacks: Callbacks) -> Job[Answer]:
        return Job(lambda job: self.answer_task(request, callbacks), own=True)

    def _prepare(self, request: Request, callbacks: Callbacks, room: int | None = None) -> tuple[Prepared, KVSequence]:
        """Resolve the next turn and assemble its prompt. `room`: as in `answer_task`."""
        begun = time.perf_counter()
        goes_on = not self.empty
        if goes_on:
            self._warn_edited(callbacks.on_event)
        first_only = request.recompute or request.exact or request.decode or request.place or request.system is not None
        if goes_on and (request.fields or first_only):
            raise SessionError(
                f"session {self.stored.name} has begun: system text, place, recompute, exact and decode belong to its "
                "first turn, and fields are changed by edits"
            )
        if request.conversation or request.stops or request.tools:
            what = "messages, tools and stops do not go with a session: it has its own, and keeps whole answers"
            raise SessionError(what, "Compile a set of tools and splice it" if request.tools else None)
        if request.results:
            self._check_results(request)
        grammar = constraint_of(self.workspace, request)
        if request.memory is None and self.state.memory and not request.results:
            request = replace(request, memory=self.state.memory.reference)
        segments = self._open_skills(request, callbacks)
        self._check_images(segments)
        memory = None if request.memory is None else segments[len(request.splice)]
        if memory and request.memory is not None:
            self._check_memory(memory)
        skills = self.state.skills
        had: list[SkillText | Segment] = [skill for skill in skills if skill.name != self._memory]
        # Of a memory with a copy global errata are among those not applied yet.
        if memory and memory.name == self._memory and len(had) < len(skills):
            had.append(memory)
            segments = [segment for segment in segments if segment is not memory]
        if goes_on and any_quoted(request.errata):
            errata, _, named = with_quoted(self.workspace.model, request.errata, {}, [*had, *segments])
            request, had = replace(request, errata=errata), named[: len(had)]
            segments = [skill for skill in named[len(had) :] if isinstance(skill, Segment)]
            memory = next((one for one in segments if memory and one.name == memory.name), memory)
            self.name_fields(had)
        self._read_at = now()
        draft = resolve(
            *(self.workspace, request, segments, callbacks),
            had=had,
            unapplied={} if request.results else self.state.unapplied(global_errata(self.workspace)),
            goes_on=goes_on,
            grammar=grammar,
            begun=begun,
        )
        request, settings = draft.request, draft.settings
        placed = (skill for skill in (*had, *draft.prompt.segments) if memory and skill.name == memory.name)
        if any(is_quoted(span.name) for skill in placed for span in skill.fields):
            raise SessionError("a memory is read again at each turn, and only its fields can be corrected")
        room = max_new_tokens(self.workspace, request, settings.think) if room is None else room
        if request.results:
            sequence = self.append_results(request.results, room, settings.think)
        elif goes_on:
            sequence = self.follow(
                *(request.question, request.errata, settings.wording, room, settings.think),
                segments=[segment for segment in draft.prompt.segments if segment is not memory],
                memory=memory,
                seam=settings.seam,
                strict=request.strict,
                method=request.method,
            )
            after = self._in_progress[1]
            if any(part.key for part in after.conversation[-1].errata):
                in_text = any(part.key in after.corrections.in_place for part in after.conversation[-1].errata)
                method = request.method or (FIELD_ERRATUM if in_text else ERRATUM)
                draft = replace(draft, settings=replace(settings, method=method))
        else:
            prompt = draft.prompt
            sequence = assemble(self.workspace, prompt, room=room, counted=True)
            self.begin(prompt, sequence)
        if memory and request.memory is not None:
            patches, after = self._in_progress
            kept = Memory(memory.name, self._reference(request.memory))
            self._turn = patches, replace(after, memory=kept)
        return draft, sequence

    def _warn_edited(self, say: Say) -> None:
        """Warn once of each skill whose file has another text than the session keeps."""
        from notes_cli.runtime.freshness import Stale, text_changed  # few turns need it

        for skill in self.state.skills:
            path = self.workspace.library.path(skill.name, self.workspace.identity)
            if skill.name in {*self._warned, self._memory} or not path.is_file():  # a memory is opened again
                continue
            info = peek(path)
            marks = marks_of(info.source, info.text)
            if set(marks).isdisjoint(skill.marks):  # another skill of that name
                continue
            edited = marks[0] not in skill.marks
            if not (edited or is_unmodified(info.source, info.stamp, path)):
                changed = text_changed(info)
                edited = changed is not None and changed.kind is Stale.TEXT
            if edited:
                self._warned |= {skill.name}
                text = f"session {self.stored.name} keeps the text of {skill.name} as it was before an edit"
                say(Notice(text, Help.EDIT_SESSION(name=self.stored.name), warning=True))

    @property
    def _memory(self) -> str:
        """The name of the memory; empty without one."""
        return self.state.memory.name if self.state.memory else ""

    def _reference(self, memory: SkillRef) -> str:
        """Return the word by which a later turn opens the memory from any folder."""
        if isinstance(memory, Segment):
            return memory.name
        target = self.workspace.library.resolve(os.fspath(memory))
        by_path = target.kind == "text" or target.path is not None
        return os.path.abspath(memory) if by_path else os.fspath(memory)

    def _check_memory(self, memory: Segment) -> None:
        """Raise SessionError for a memory that has an image or is another skill of the session, UnsupportedError for a
        model or sequence that cannot move it."""
        name = self.stored.name
        if memory.media:
            raise SessionError(f"{memory.name} has an image, and a memory is a text")
        if memory.name in {skill.name for skill in self.state.skills} - {self._memory}:
            raise SessionError(f"{memory.name} is in session {name} already, and cannot be its memory as well")
        context = self.workspace.context
        why = context.supports("splice") or context.supports("rewrite")
        if why:
            raise UnsupportedError(
                f"{self.workspace.model.name} cannot keep a memory: {why}", "Splice it as a skill, once"
            )
        if why := self.exhausted(self.state.moves + (self.state.memory is None)):
            raise UnsupportedError(f"the memory of session {name} cannot be moved: {why}", Help.UNDO(name=name))

    def _open_skills(self, request: Request, callbacks: Callbacks) -> list[Segment]:
        """Open the skills of a request. Raises EngineError, with the length of the whole turn, if one does not fit."""
        try:
            return open_requested(self.workspace, request, callbacks)
        except EngineError as error:
            if not _needs_larger_context(error):
                raise
            # Errata of skills already in the session: at most a token per byte, and their template.
            alone = request if self.empty else replace(request, errata=())
            errata = 0 if self.empty else sum(64 + len(text.encode()) for text in request.errata)
            try:
                explain(self.workspace, alone)
            except EngineError as whole:
                if not _needs_larger_context(whole):
                    raise
                assert whole.remedy
                size = whole.remedy.values["tokens"] + len(self.state.tokens) + errata
                raise EngineError(whole.what, Help.LARGER_CONTEXT(tokens=-(-size // 256) * 256)) from error
            raise

    def answer_task(
        self,
        request: Request,
        callbacks: Callbacks = NO_CALLBACKS,
        assembled: Callable[[KVSequence], object] = lambda sequence: None,
        room: int | None = None,
    ) -> Task[Answer]:
        """As `ask`, as a task. `assembled` is called with the sequence that has the prompt. `room`: tokens of free
        cells needed to start generating, if the caller reserves more later; None: for the whole answer."""
        prepared, sequence = self._prepare(request, callbacks, room)
        turn = self._turn
        try:
            assembled(sequence)
            result = yield from answer_task(self.workspace, prepared, sequence, callbacks)
        except BaseException as error:
            if turn is self._turn:
                self.drop()
            elif isinstance(error, EngineError):  # its sequence was closed
                raise self._superseded() from error
            raise
        if turn is not self._turn:
            raise self._superseded()
        self.keep(result.unwritten)
        return result

    def begin(self, prompt: Prompt, sequence: KVSequence) -> None:
        """Begin the first turn with its prompt assembled in this sequence. Raises EngineError if that does not have the
        tokens of the conversation."""
        self.hold(sequence)
        conversation, corrections = prompt.placed
        changes = changes_of(self.workspace, prompt) if prompt.method.edits_rows else {}
        turn = Turn(conversation.messages, reasoning="requested" if prompt.think else "none")
        tokens = {segment.name: segment.tokens for segment in prompt.segments}
        tokens |= {name: changed.tokens for name, changed in changes.items()}
        parts = render(self.workspace, turn, tokens, first=True)
        if [token for part in parts for token in part.tokens] != sequence.tokens.tolist():
            raise EngineError("the tokens of the first turn are not those of its conversation")  # never wrong silently
        self.keep_states(sequence, sequence.pieces)
        skills = tuple(from_segment(segment, changes.get(segment.name)) for segment in prompt.segments)
        self._turn = (), State((turn,), skills, corrections)

    @property
    def _in_progress(self) -> Planned:
        """The turn in progress: the patches of the turns before it, and the state after it, without its tokens. Raises
        SessionError if the session was changed since it began."""
        if self._turn is None:
            raise self._superseded()
        return self._turn

    def follow(
        self,
        question: str,
        errata: Sequence[str] = (),
        wording: str | None = None,
        room: int = 0,
        think: bool = False,
        *,
        segments: Sequence[Segment] = (),
        memory: Segment | None = None,
        seam: int = DEFAULT_SEAM,
        strict: bool = False,
        method: Method | None = None,
    ) -> KVSequence:
        """Append the prompt of the next turn, with pending errata before those given; new values of fields are computed
        in place, too, unless `method` leaves the K/V, and superseded errata are cut out. `think`: end it where
        reasoning begins. `segments`: skills in the user message of this turn. `memory`: is placed after them, with its
        current values and their errata, and its earlier copy is cut out. Raises SessionError for a skill that is in the
        session already; with `strict`, UnsupportedError for one that cannot be spliced, and always for a memory that
        cannot be moved."""
        seen = {skill.name for skill in self.state.skills}
        for segment in segments:
            if segment.name in seen:
                name = self.stored.name
                raise SessionError(f"{segment.name} is in session {name} already", Help.EDIT_SESSION(name=name))
            seen.add(segment.name)
        in_place = edits_in_place(self) if method is None else method.edits_rows
        before = self._without_memory(memory) if memory else self.state
        segments = [*segments, memory] if memory else segments
        own = [segment.name for segment in segments if (in_place and not segment.media) or segment is memory]
        earlier = [skill.name for skill in before.skills if in_place and not has_image(self.state, skill.name)]
        known = known_fields(*before.skills, *segments)
        read = read_errata(errata, known)
        message = user_message(question, skills=[segment.name for segment in segments])
        turn = Turn((message,), reasoning="requested" if think else "none")
        flat = messages_of([*before.conversation, turn])[:-1]
        skills: list[SkillText | Segment] = [*before.skills, *segments]
        # As earlier K/V allows: values in it are computed and errata are cut out, values alone, or neither.
        for edited, cuts in ((earlier, True), (earlier, False), ([], False)):
            policy = Policy([*own, *edited], cuts=cuts, wording=wording)
            messages, corrections = place(flat, skills, read, before.corrections, policy, known)
            *turns, turn = with_messages([*before.conversation, turn], [*messages, ANSWERED])
            wanted = _by_skill({key: corrections.values[key] for key in corrections.in_place})
            changes = self._changes(segments, wanted, memory)
            planned = self._follow_earlier(replace(before, corrections=corrections), turns, wanted, edited, known)
            if (why := self.obstacle(planned)) is None:
                break
        else:
            raise UnsupportedError(f"the memory of session {self.stored.name} cannot be moved: {why}")
        parts = render(self.workspace, turn, {segment.name: segment.tokens for segment in segments}, first=False)
        more = sum(len(part.tokens) for part in parts)
        more += sum(2 * len(patch.tokens) for changed in changes.values() for patch in changed.patches)
        sequence = self.patch(planned, more=more, room=room)
        for segment in segments:  # again: a larger context may rotate differently (LongRoPE)
            self.workspace.check(segment)
        placer = partial(place_segment, self.workspace, seam=seam, strict=strict or memory is not None)
        by_name = {segment.name: segment for segment in segments}
        for part in parts:
            if part.name in changes and part.kind == "splice":
                amend(sequence, by_name[part.name], changes[part.name], FIELD_ERRATUM, placer)
            elif part.kind == "splice":
                placer(sequence, by_name[part.name])
            else:
                sequence.append(part.tokens, part.kind, part.name)
        record_uses(self.workspace, segments, sequence.pieces)
        patches, after = planned
        new = (from_segment(segment, changes.get(segment.name)) for segment in segments)
        after = replace(after, skills=(*after.skills, *new)).with_turns([*turns, turn])
        texts, values = values_in(after.skills), corrections.values
        computed = frozenset(key for key in corrections.in_place if texts.get(key) == values[key])
        self._turn = patches, replace(after, corrections=replace(after.corrections, in_place=computed))
        return sequence

    def _without_memory(self, memory: Segment) -> State:
        """Return the state without the earlier copy of the memory, and without corrections of fields whose value in its
        text is another one by now."""
        state, texts, old = self.state, values_in([memory]), self._memory
        turns = [
            replace(turn, messages=tuple(_without(each, old) for each in turn.messages)) for turn in state.conversation
        ]
        compiled = [
            (name, value) for skill in state.skills if skill.name == old for name, value in skill.compiled.items()
        ]
        outdated = [f"{old}.{name}" for name, value in compiled if texts.get(f"{old}.{name}") != value]
        skills = tuple(skill for skill in state.skills if skill.name != old)
        corrections = state.corrections.without(outdated)
        return replace(state, conversation=tuple(turns), skills=skills, corrections=corrections)

    def _changes(
        self, segments: Sequence[Segment], wanted: Mapping[str, Mapping[str, str]], memory: Segment | None
    ) -> dict[str, Change]:
        """Return the changes that new values make in the skills of a turn. Raises UnsupportedError for a memory whose
        values cannot be computed in place."""
        changes = {}
        for segment in segments:
            changed = None if segment.media else change(self.workspace.model, segment, wanted.get(segment.name, {}))
            if changed and not refusal(self.workspace.context, FIELD_ERRATUM, changes=[changed]):
                changes[segment.name] = changed
            elif changed and segment is memory:
                raise UnsupportedError(f"the values of the memory {memory.name} cannot be computed in place here")
        return changes

    def _follow_earlier(
        self,
        rest: State,
        turns: Sequence[Turn],
        wanted: Mapping[str, Mapping[str, str]],
        edited: Sequence[str],
        known: Known,
    ) -> Planned:
        """Plan the changes of the turns before the next one: to `turns`, and to the values of the `edited` skills."""
        model, before = self.workspace.model, self.state
        found = {name: change(model, as_segment(self, name), wanted[name]) for name in edited if name in wanted}
        changes = {name: changed for name, changed in found.items() if changed}
        rest = amended(rest, changes, in_place=True).with_turns(turns)
        old = {skill.name for skill in before.skills} - {skill.name for skill in rest.skills}
        cut = [f"an erratum of {known.key(*key.split('.', 1))}" for key in cut_errata(before, rest)]
        cut += [f"the memory {name}" for name in old]
        patches, after = self.plan(rest, changes=changes, removed="; ".join(cut))
        if old:  # what follows it moves once, and is not counted
            start = before.span(old.pop())[0]
            after = replace(after, moves=before.moves + any(patch.grows for patch in patches if patch.first < start))
        return patches, after

    def append_results(self, results: Sequence[Result], room: int = 0, think: bool = False) -> KVSequence:
        """Append the next turn with results of the tools that the last answer called. Errata stay pending."""
        messages = tuple(message for message in results_of(results) if message.role == "tool")
        turn = Turn(messages, reasoning="requested" if think else "none")
        parts = render(self.workspace, turn, {}, first=False)
        sequence = self.patch(((), self.state), more=sum(len(part.tokens) for part in parts), room=room)
        for part in parts:
            sequence.append(part.tokens, part.kind, part.name)
        self._turn = (), replace(self.state, conversation=(*self.state.conversation, turn))
        return sequence

    def _check_images(self, segments: Sequence[Segment]) -> None:
        """Raise SessionError for an image whose K/V could not be restored."""
        for segment in segments:
            why = self.workspace.context.supports("splice")
            if segment.media and why:
                raise SessionError(f"{segment.name} is an image, which a session cannot keep for this model: {why}")
            images = images_of(segment.media, 0, segment.axes)
            if any(not image.grid[0] for image in images if image.grid is not None):
                raise SessionError(f"{segment.name} is an image whose rows are in no grid, which a session cannot keep")

    def _check_results(self, request: Request) -> None:
        """Raise SessionError unless the last answer called these tools, each once and in this order, and the request
        has only results."""
        name, tools = self.stored.name, [tool for tool, _ in request.results]
        if request.question or request.splice or request.images or request.errata or request.memory is not None:
            raise SessionError("a question, skills, images, errata and a memory do not go with the results of tools")
        pieces = self.state.turn_pieces(self.state.turns)
        last_answer = "".join(piece.text for piece in pieces if piece.kind == "answer")
        form = form_of(self.workspace.template.tool_source)
        for tool in tools:
            if tool not in last_answer:
                raise SessionError(f"the last answer of session {name} does not call a tool {tool!r}")
        calls = calls_in(last_answer, form, [{"name": tool} for tool in tools]).calls
        if form is not None and [call.name for call in calls] != tools:  # None: unknown format of calls
            raise SessionError(
                f"the last answer of session {name} does not call {listed(tools)} and nothing else: there is a result "
                "for each of its calls, in their order"
            )

    @contextmanager
    def fork(self, new: str) -> Iterator[Session]:
        """Fork the session between two turns; the fork is locked until the block ends. Its sequence shares cells with
        this one until either rewrites them, or the context grows. Raises SessionError, without changing anything, if a
        session of that name exists."""
        sessions = Sessions(self.stored.folder.parent)
        with sessions.forked(self.stored, new) as stored, Session(self.workspace, stored) as fork:
            fork.hold(self.sequence.share())
            yield fork

    def _superseded(self) -> SessionError:
        message = f"session {self.stored.name} was continued while this was answered, and the answer is not kept"
        return SessionError(message, "Ask again")

    def keep(self, answer: str = "") -> None:
        """Commit the turn in progress. `answer`: a chosen answer, still to be appended. Raises SessionError if the
        session was changed since the turn began."""
        patches, state = self._in_progress
        sequence, before, start, turn = self._sequence, self.state, len(state.tokens), state.conversation[-1]
        assert sequence is not None
        if answer:
            sequence.append(self.workspace.model.tokenize(answer), "answer", reason=Reason.CHOSEN)
        sequence.flush()
        stated = {part.key: self._read_at for part in turn.errata if part.key}
        new = {key: self._read_at for key in state.corrections.values if key not in before.corrections.values}
        state = replace(
            state,
            tokens=sequence.tokens.tolist(),
            images=tuple(sequence.images),
            read_at={**before.read_at, **new, **stated},
        )
        errata = iter([part.key for part in turn.errata])
        pieces, answers = list[Entry](), list[Part]()
        for piece in (piece for piece in sequence.pieces if piece.position >= start):
            name, end = next(errata) if piece.kind == "erratum" else piece.name, piece.position + piece.tokens
            pieces.append(Entry.of(piece, name, text_of(self.workspace, state, piece.position, end), state.turns))
            if piece.kind == "answer":
                tokens = tuple(state.tokens[piece.position : end])
                answers.append(Part(tokens, reason=piece.reason, detail=piece.detail))
        complete = replace(turn, answer=tuple(answers))
        state = replace(state, conversation=(*state.conversation[:-1], complete), pieces=(*state.pieces, *pieces))
        self.commit("turn", complete.question, state, [*self.places((patches, state)), (start, len(sequence))])

    def edit(self, name: str, value: str, method: Method | None = None) -> Entry:
        """As `edits`, of one field; returns the last edit."""
        return [*self.edits({name: value}, method)][-1]

    def edits(
        self, values: Mapping[str, str], method: Method | None = None, callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[Entry]:
        if any_quoted(values):
            skills = [skill for skill in self.state.skills if skill.name != self._memory]
            _, values, skills = with_quoted(self.workspace.model, (), values, skills)
            self.name_fields(skills)
        return edits(self, values, method, callbacks.on_event)

    def compact(self) -> Removed:
        return compact(self)

    def forget(self, names: Sequence[str], method: str = CUT, *, dry: bool = False) -> Removed:
        return forget(self, names, method, dry=dry)


def _needs_larger_context(error: EngineError) -> bool:
    return error.remedy is not None and error.remedy.help is Help.LARGER_CONTEXT


def _without(message: Message, skill: str) -> Message:
    kept = tuple(part for part in message.parts if not (isinstance(part, SkillPart) and part.name == skill))
    return message if len(kept) == len(message.parts) else replace(message, parts=kept)


def _by_skill(values: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return values by skill and field."""
    found: dict[str, dict[str, str]] = {}
    for key, value in values.items():
        skill, _, name = key.partition(".")
        found.setdefault(skill, {})[name] = value
    return found


def add_errata(workspace: Workspace, errata: GlobalErrata, values: Mapping[str, str]) -> list[GlobalErratum]:
    """Correct fields of compiled skills globally. `values` by field; `returns.date` if several skills have a date,
    `*.date` for all of them. Raises SkillError, before any change, for a field that no skill has."""
    infos = [entry.info for entry in workspace.library.entries() if entry.info]
    return errata.add(errata_of({info.name: info for info in infos if info.identity == workspace.identity}, values))


def errata_of(skills: Mapping[str, Segment | Skill], values: Mapping[str, str]) -> list[GlobalErratum]:
    """Return errata for new values of fields, as in `add_errata`. Raises SkillError for a field that no skill has."""
    if any(map(is_quoted, values)):
        from notes_cli.text.quotations import name_quoted

        _, values, added = name_quoted((), values, [*skills.values()])
        if added:
            text = f"a text of {next(iter(added))} that is no field is corrected in a session, and not in all"
            raise SkillError(
                text, "Make it a field: write {{name}} in its place, and its value under fields: at the top"
            )
    known = known_fields(*skills.values())
    new: list[GlobalErratum] = []
    for name, value in values.items():
        for target in known.resolve(name, "no compiled skill has"):
            skill = skills[target.skill]
            was = next(span.value for span in skill.fields if span.name == target.field)
            marks = marks_of(skill.source, skill.text)
            cleaned = clean_value(target.key, value)
            new.append(GlobalErratum(target.skill, target.field, was, cleaned, now(), marks))
    return new


def correct_sessions(workspace: Workspace, errata: GlobalErrata) -> Iterator[tuple[str, int | NotesError]]:
    """Give each session the global errata that it lacks. Yields its name with their number, or the error; a server can
    run other work in between."""
    sessions = Sessions(workspace.paths.sessions)
    for name in sessions.names():
        outcome: int | NotesError = 0
        try:
            if sessions.find(name).state.unapplied(errata.all()):
                with sessions.locked(name) as stored, Session(workspace, stored) as session:
                    outcome = apply_errata(session, errata)
        except NotesError as error:
            outcome = error
        yield name, outcome


def apply_errata(session: Session, errata: GlobalErrata) -> int:
    """Queue the global errata that a session lacks, also newer ones, for its next question. Returns their number."""
    read_at = now()
    missing = session.state.unapplied(errata.all())
    if missing:
        correct(session, missing, read_at)
    return len(missing)
