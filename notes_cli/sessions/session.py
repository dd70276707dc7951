"""Runs the turns of a session: places corrections, follows the changed conversation with the K/V, generates, commits.

Edits and cuts are in edits.py, the sequence in session_kv.py. A global erratum is stored in the library, and
corrects every session that has the skill.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from notes_cli.editing.methods import ERRATUM, FIELD_ERRATUM, Change, Method, amend, change, refusal
from notes_cli.engine.pieces import Reason
from notes_cli.engine.positions import Patch, changed_ranges, images_of, position_map
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence, Task
from notes_cli.errors import EngineError, Help, NotesError, Notice, SessionError, UnsupportedError
from notes_cli.library.global_errata import GlobalErrata, GlobalErratum, marks_of, now
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
    Compacted,
    Edited,
    Editor,
    Forgotten,
    amended,
    can_cut,
    changes_in,
    check_moves,
    edits_in_place,
    forget,
    from_segment,
    has_image,
    with_turns,
)
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.session_kv import SessionKV, follow, render, text_of
from notes_cli.sessions.state import TRACE, Entry, Generated, Memory, SkillText, State, Turn
from notes_cli.text.erratum import describe_wildcards, known_fields, read_errata, unique_values
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import listed
from notes_cli.text.messages import Message, SkillPart, results_of, user_message
from notes_cli.text.skill import Skill
from notes_cli.text.tools import calls_in, form_of


@dataclass(frozen=True, slots=True)
class _Draft:
    """A turn in progress."""

    turn: Turn
    state: State  # after it: skills and corrections, and the turns before it with their errata cut out
    patches: Sequence[Patch] = ()  # of the sequence, for the changes to those turns
    start: int = 0  # position where it begins
    since: int = 0  # `SessionKV.changes` at its start
    in_place: bool = False  # new values are in texts


class Session(AbstractContextManager["Session"]):
    """An open session, whose lock is held. Close it, or use it as a context manager."""

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        """Raise SessionError if the session is of another model, UnsupportedError if K/V of this model cannot be
        saved."""
        self.workspace = workspace
        self.stored = stored
        self._kv = SessionKV(workspace, stored)
        self._draft = _Draft(Turn(()), State())
        self._read_at = now()  # when global errata were read

    def close(self) -> None:
        """Free the sequence. Committed turns are on disk."""
        self._kv.drop()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> State:
        return self.stored.state

    @property
    def sequence(self) -> KVSequence:
        """The sequence with the session's tokens, restored from disk if the context does not have it."""
        return self._kv.sequence

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
        first_only = request.recompute or request.exact or request.decode or request.place or request.system is not None
        if goes_on and (request.fields or first_only):
            raise SessionError(
                f"session {self.stored.name} has begun: system text, place, recompute, exact and decode belong to its "
                "first turn, and fields are changed by edits"
            )
        if request.conversation or request.stops:
            raise SessionError("messages and stops do not go with a session: it has its own, and keeps whole answers")
        if request.results:
            self._check_results(request)
        grammar = constraint_of(self.workspace, request)
        if request.memory is None and self.state.memory and not request.results:
            request = replace(request, memory=self.state.memory.reference)
        segments = self._open(request, callbacks)
        self._check_images(segments)
        memory = None if request.memory is None else segments[len(request.splice)]
        if memory and request.memory is not None:
            self._check_memory(memory)
        had: list[SkillText | Segment] = [*self._others]
        if memory and self._has_memory(memory.name):  # then its global errata are among those not applied yet
            had.append(memory)
            segments = [segment for segment in segments if segment is not memory]
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
            if any(part.key for part in self._draft.turn.errata):
                method = request.method or (FIELD_ERRATUM if self._draft.in_place else ERRATUM)
                draft = replace(draft, settings=replace(settings, method=method))
        else:
            prompt = draft.prompt
            sequence = assemble(self.workspace, prompt, room=room, counted=True)
            self.begin(prompt, sequence)
        if memory and request.memory is not None:
            kept = Memory(memory.name, self._reference(request.memory))
            self._draft = replace(self._draft, state=replace(self._draft.state, memory=kept))
        return draft, sequence

    @property
    def _others(self) -> list[SkillText]:
        """The skills of the session besides its memory."""
        memory = self.state.memory
        return [skill for skill in self.state.skills if memory is None or skill.name != memory.name]

    def _has_memory(self, name: str) -> bool:
        """Return True if the sequence has a copy of the memory, which has this name."""
        memory = self.state.memory
        return memory is not None and memory.name == name and any(skill.name == name for skill in self.state.skills)

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
        if memory.name in {skill.name for skill in self._others}:
            raise SessionError(f"{memory.name} is in session {name} already, and cannot be its memory as well")
        context = self.workspace.context
        why = context.supports("splice") or context.supports("rewrite")
        if why:
            raise UnsupportedError(
                f"{self.workspace.model.name} cannot keep a memory: {why}", "Splice it as a skill, once"
            )
        check_moves(self._kv, f"the memory of session {name} cannot be moved", Help.UNDO(name=name), memory=True)

    def _open(self, request: Request, callbacks: Callbacks) -> list[Segment]:
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
        turn = self._draft.since
        try:
            assembled(sequence)
            result = yield from answer_task(self.workspace, prepared, sequence, callbacks)
        except BaseException as error:
            if isinstance(error, EngineError) and turn != self._kv.changes:
                raise self._superseded() from error  # its sequence was closed
            if turn == self._draft.since:  # else another turn is in progress
                self._kv.drop()
            raise
        self.keep(result.unwritten, turn)
        return result

    def begin(self, prompt: Prompt, sequence: KVSequence) -> None:
        """Begin the first turn with its prompt assembled in this sequence. Raises EngineError if that does not have the
        tokens of the conversation."""
        self._kv.hold(sequence)
        conversation, corrections = prompt.placed
        changes = changes_of(self.workspace, prompt) if prompt.method.edits_rows else {}
        skills = tuple(from_segment(segment, changes.get(segment.name)) for segment in prompt.segments)
        turn = Turn(conversation.messages, reasoning="requested" if prompt.think else "none")
        state = State(skills=skills, corrections=corrections)
        tokens = {segment.name: segment.tokens for segment in prompt.segments}
        tokens |= {name: changed.tokens for name, changed in changes.items()}
        parts = render(self.workspace, turn, tokens, first=True)
        if [token for part in parts for token in part.tokens] != sequence.tokens.tolist():
            raise EngineError("the tokens of the first turn are not those of its conversation")  # never wrong silently
        keys = iter([self._key(state, part.name) for part in parts if part.kind == "erratum"])
        sequence.pieces = [
            replace(piece, name=next(keys)) if piece.kind == "erratum" else piece for piece in sequence.pieces
        ]
        self._draft = _Draft(turn, state, since=self._kv.changes)

    @staticmethod
    def _key(state: State, name: str) -> str:
        return state.key(name) if name else ""

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
        in_place = edits_in_place(self._kv) if method is None else method.edits_rows
        segments = [*segments, memory] if memory else segments
        message = user_message(question, skills=[segment.name for segment in segments])
        turn = Turn((message,), reasoning="requested" if think else "none")
        for moves in (True, False):
            changes, draft = self._corrected(turn, errata, segments, memory, in_place, wording, moves=moves)
            skills = {segment.name: segment.tokens for segment in segments}
            parts = render(self.workspace, draft.turn, skills, first=False)
            temporary = sum(len(patch.tokens) + max(0, patch.grows) for patch in draft.patches)
            temporary += sum(2 * len(patch.tokens) for changed in changes.values() for patch in changed.patches)
            count = len(self.state.tokens) + sum(len(part.tokens) for part in parts) + temporary
            self.workspace.make_room(count, room, self._kv.loaded)
            if not draft.patches:
                sequence = self.sequence
                break
            try:
                with self._kv.changing() as sequence:
                    sequence.replace(draft.patches)
                break
            except UnsupportedError:  # at these positions
                if memory:  # else errata state the values
                    raise
        for segment in segments:  # again: a larger context may rotate differently (LongRoPE)
            self.workspace.check(segment)
        self._draft = replace(draft, start=len(sequence))
        placer = partial(place_segment, self.workspace, seam=seam, strict=strict or memory is not None)
        by_name = {segment.name: segment for segment in segments}
        for part in parts:
            if part.name in changes and part.kind == "splice":
                amend(sequence, by_name[part.name], changes[part.name], FIELD_ERRATUM, placer)
            elif part.kind == "splice":
                placer(sequence, by_name[part.name])
            else:
                sequence.append(part.tokens, part.kind, self._key(draft.state, part.name))
        record_uses(self.workspace, segments, sequence.pieces)
        self._draft = replace(self._draft, since=self._kv.changes)
        return sequence

    def _corrected(
        self,
        turn: Turn,
        errata: Sequence[str],
        segments: Sequence[Segment],
        memory: Segment | None,
        in_place: bool,
        wording: str | None,
        *,
        moves: bool,
    ) -> tuple[dict[str, Change], _Draft]:
        """Place the corrections of the next turn. Return the changes of its own skills, and the turn with the changes
        of those before it. `moves`: earlier K/V may be changed."""
        before = self.state
        state, had = before, self._others if memory else [*before.skills]
        turns = [*state.conversation]
        cut = None  # position of the earlier copy of the memory
        if memory and state.memory:
            old = state.memory.name
            cut = state.span(old)[0] if self._has_memory(old) else None
            turns = [
                replace(each, messages=tuple(_without(message, old) for message in each.messages)) for each in turns
            ]
            compiled = values_in([memory])
            outdated = [
                f"{skill.name}.{span.name}"
                for skill in state.skills
                if skill.name == old
                for span in skill.fields
                if compiled.get(f"{old}.{span.name}") != skill.compiled.get(span.name)
            ]
            state = replace(state, corrections=state.corrections.without(outdated))
        editable = [skill.name for skill in had if moves and not has_image(before, skill.name)]
        editable = [*editable, *(segment.name for segment in segments if not segment.media)] if in_place else []
        editable += [memory.name] if memory else []
        skills: list[SkillText | Segment] = [*had, *segments]
        known = known_fields(*skills)
        parsed = read_errata(errata, known)
        policy = Policy(editable, cuts=moves and can_cut(self._kv), wording=wording)
        answered = Message("assistant")
        flat = [message for each in turns for message in (*each.messages, answered)]
        placed, corrections = place([*flat, *turn.messages], skills, parsed, state.corrections, policy, known)
        after = iter(placed)
        turns = [replace(each, messages=tuple(next(after) for _ in (*each.messages, 0))[:-1]) for each in turns]
        turn = replace(turn, messages=(placed[-1],))

        wanted: dict[str, dict[str, str]] = {}
        for key in corrections.in_place:
            skill, _, name = key.partition(".")
            wanted.setdefault(skill, {})[name] = corrections.values[key]
        changes = {}
        for segment in segments:
            changed = None if segment.media else change(self.workspace.model, segment, wanted.get(segment.name, {}))
            if changed and refusal(self.workspace.context, FIELD_ERRATUM, changes=[changed]):
                if segment is memory:
                    message = f"the values of the memory {memory.name} cannot be computed in place for this model"
                    raise UnsupportedError(message)
            elif changed:
                changes[segment.name] = changed
        names = {skill.name for skill in had}
        earlier = changes_in(self._kv, {name: each for name, each in wanted.items() if name in names}) if moves else {}
        rest = replace(amended(state, earlier, in_place=True), corrections=corrections)
        rest = with_turns(replace(rest, skills=tuple(skill for skill in rest.skills if skill.name in names)), turns)
        patches, rest = follow(self.workspace, before, rest, range(before.turns), earlier)
        traces = _traces(before, rest, patches) if patches else []
        moved = any(patch.grows for patch in patches if cut is None or patch.first < cut)
        rest = replace(
            rest,
            skills=(*rest.skills, *(from_segment(segment, changes.get(segment.name)) for segment in segments)),
            edits_and_cuts=(*rest.edits_and_cuts, *traces),
            moves=rest.moves + moved,
        )
        texts = values_in(rest.skills)
        computed = frozenset(key for key in corrections.in_place if texts.get(key) == corrections.values[key])
        stated = rest.corrections.stated | {part.key for part in turn.errata if part.key}
        rest = replace(rest, corrections=replace(corrections, in_place=computed, stated=stated))
        return changes, _Draft(turn, rest, patches, in_place=bool(earlier or changes))

    def append_results(self, results: Sequence[Result], room: int = 0, think: bool = False) -> KVSequence:
        """Append the next turn with results of the tools that the last answer called. Errata stay pending."""
        messages = tuple(message for message in results_of(results) if message.role == "tool")
        turn = Turn(messages, reasoning="requested" if think else "none")
        parts = render(self.workspace, turn, {}, first=False)
        self.workspace.make_room(
            len(self.state.tokens) + sum(len(part.tokens) for part in parts), room, self._kv.loaded
        )
        sequence = self.sequence
        for part in parts:
            sequence.append(part.tokens, part.kind, part.name)
        self._draft = _Draft(turn, self.state, start=len(self.state.tokens), since=self._kv.changes)
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
            fork._kv.hold(self.sequence.share())
            yield fork

    def _superseded(self) -> SessionError:
        message = f"session {self.stored.name} was continued while this was answered, and the answer is not kept"
        return SessionError(message, "Ask again")

    def keep(self, answer: str = "", turn: int | None = None) -> None:
        """Commit the turn in progress. `answer`: a chosen answer, still to be appended. `turn`: its `_Draft.since`, if
        another may have begun. Raises SessionError if the session was changed since the turn began."""
        draft = self._draft
        turn = draft.since if turn is None else turn
        if not turn == draft.since == self._kv.changes:
            raise self._superseded()
        sequence, before = self._kv.held, self.state
        if answer:
            sequence.append(self.workspace.model.tokenize(answer), "answer", reason=Reason.CHOSEN)
        sequence.flush()
        state = replace(
            draft.state, tokens=sequence.tokens.tolist(), images=tuple(sequence.images), read_at=self._times()
        )
        errata = iter([part.key for part in draft.turn.errata])
        pieces, answers = list[Entry](), list[Generated]()
        for piece in (piece for piece in sequence.pieces if piece.position >= draft.start):
            name = next(errata) if piece.kind == "erratum" else piece.name
            text = text_of(self.workspace, state, piece.position, piece.position + piece.tokens)
            pieces.append(Entry.of(piece, name, text, before.turns + 1))
            if piece.kind == "answer":
                tokens = tuple(state.tokens[piece.position : piece.position + piece.tokens])
                answers.append(Generated(tokens, piece.reason, piece.detail))
        complete = replace(draft.turn, answer=tuple(answers))
        state = replace(
            state, conversation=(*draft.state.conversation, complete), pieces=(*draft.state.pieces, *pieces)
        )
        changed = changed_ranges(draft.patches, len(before.tokens)) if draft.patches else []
        self._kv.commit("turn", complete.question, state, [*changed, (draft.start, len(sequence))])

    def _times(self) -> dict[str, str]:
        """Return for each changed field up to when global errata were read."""
        stated = {part.key: self._read_at for part in self._draft.turn.errata if part.key}
        new = {
            key: self._read_at
            for key in self._draft.state.corrections.values
            if key not in self.state.corrections.values
        }
        return {**self.state.read_at, **new, **stated}

    def edit(self, name: str, value: str, method: Method | None = None) -> Edited:
        return Editor(self._kv).edit(name, value, method)

    def edits(
        self, values: Mapping[str, str], method: Method | None = None, callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[Edited]:
        """Edit several fields, `*.field` in each skill that has it, yielding each edit when done. Raises NotesError,
        before any edit, if one is not possible, or a field gets two values."""
        for text in describe_wildcards(values, self.state.known):
            callbacks.on_event(Notice(text))
        editor = Editor(self._kv)
        new_values = unique_values(
            (key, value) for field, value in values.items() for key in editor.targets(field, value)
        )
        for field, value in new_values.items():
            editor.check(field, value, method)
        for field, value in new_values.items():
            yield self.edit(field, value, method)

    def compact(self) -> Compacted:
        return Editor(self._kv).compact()

    def forget(self, names: Sequence[str], method: str = CUT, *, dry: bool = False) -> Forgotten:
        """Remove turns, reasoning and tool results (edits.py)."""
        return forget(self._kv, names, method, dry=dry)

    def undo(self) -> dict[str, str]:
        """Undo the last turn, edit, compaction or cut, with the exact K/V. Raises SessionError if there is none."""
        return self._kv.undo()


def _needs_larger_context(error: EngineError) -> bool:
    return error.remedy is not None and error.remedy.help is Help.LARGER_CONTEXT


def _without(message: Message, skill: str) -> Message:
    if not any(isinstance(part, SkillPart) and part.name == skill for part in message.parts):
        return message
    parts = tuple(part for part in message.parts if not (isinstance(part, SkillPart) and part.name == skill))
    return replace(message, parts=parts)


def _traces(before: State, after: State, patches: Sequence[Patch]) -> list[Entry]:
    """Return a mark for each erratum, and each copy of the memory, that was cut out of earlier turns."""
    shift, marks = position_map(patches), list[Entry]()
    for number, (old, new) in enumerate(zip(before.conversation, after.conversation, strict=True), 1):
        pieces = [entry for entry in before.turn_pieces(number) if entry.kind == "erratum"]
        left = [*new.errata]
        for part, piece in zip(old.errata, pieces, strict=False):
            if part in left:
                left.remove(part)
            else:
                text = f"an erratum of {before.key(part.key)}"
                marks.append(Entry(TRACE, "", text, shift(piece.position), 0, CUT, number))
        for name in {*old.skills} - {*new.skills}:
            marks.append(Entry(TRACE, "", f"the memory {name}", shift(before.span(name)[0]), 0, CUT, number))
    return marks


@dataclass(frozen=True, slots=True)
class Corrected:
    """The errata that were added, the sessions edited, and the errors of those that could not be."""

    errata: tuple[GlobalErratum, ...]
    edited: tuple[str, ...]
    skipped: Mapping[str, NotesError]


def correct(workspace: Workspace, errata: GlobalErrata, values: Mapping[str, str]) -> Corrected:
    """Run `correcting` to its end."""
    steps = correcting(workspace, errata, values)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            corrected: Corrected = end.value
            return corrected


def correcting(
    workspace: Workspace, errata: GlobalErrata, values: Mapping[str, str]
) -> Generator[None, None, Corrected]:
    """Correct fields of compiled skills globally. `values` by field; `returns.date` if several skills have a date,
    `*.date` for all of them. Yields before each session, so that a server can run other work in between. Raises
    SkillError, before any change, for a field that no skill has."""
    identity, sessions = workspace.identity, Sessions(workspace.paths.sessions)
    infos = [entry.info for entry in workspace.library.entries() if entry.info]
    new = errata.add(errata_of({info.name: info for info in infos if info.identity == identity}, values))
    edited: list[str] = []
    skipped: dict[str, NotesError] = {}
    for name in sessions.names():
        yield
        try:
            if not sessions.find(name).state.unapplied(errata.all()):
                continue
            with sessions.locked(name) as stored, Session(workspace, stored) as session:
                if apply_errata(session, errata):
                    edited.append(name)
        except NotesError as error:
            skipped[name] = error
    return Corrected(tuple(new), tuple(edited), skipped)


def errata_of(skills: Mapping[str, Segment | Skill], values: Mapping[str, str]) -> list[GlobalErratum]:
    """Return errata for new values of fields, as in `correcting`. Raises SkillError for a field that no skill has."""
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


def apply_errata(session: Session, errata: GlobalErrata) -> int:
    """Queue the global errata that a session lacks, also newer ones, for its next question. Returns their number."""
    read_at = now()
    missing = session.state.unapplied(errata.all())
    if missing:
        Editor(session._kv).queue(missing, read_at)
    return len(missing)
