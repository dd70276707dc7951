"""Runs the turns of a session: prefills each prompt after the previous turns, generates, and commits to the ledger.

Edits are in edits.py, the sequence in session_kv.py. A global erratum is stored in the library, and corrects every
session that has the skill.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace

from notes_cli.editing.methods import AUTO, ERRATUM, FIELD_ERRATUM, Change, Method, Prepared, amend, change, refusal
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.positions import changed_ranges, images_of
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence, Task
from notes_cli.errors import EngineError, Help, NotesError, Notice, SessionError, UnsupportedError
from notes_cli.library.global_errata import GlobalErrata, GlobalErratum, marks_of, now
from notes_cli.library.info import SegmentInfo
from notes_cli.runtime.answering import OnPrefill, Prefilled, answer_task, explain, max_new_tokens, stream
from notes_cli.runtime.assemble import SegmentPlacer, assemble, record_uses
from notes_cli.runtime.open_skills import SkillRef
from notes_cli.runtime.prompt import DEFAULT_SEAM, Prompt, Result, as_question, changes_of, results_turn
from notes_cli.runtime.request import NO_CALLBACKS, Answer, Callbacks, Request, Stream
from notes_cli.runtime.resolve import Prepared as PreparedAsk
from notes_cli.runtime.resolve import constraint_of, global_errata, open_requested, resolve
from notes_cli.runtime.scheduler import Job, run
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.edits import Compacted, Correction, Edited, Editor, as_lines, check_moves, from_segment
from notes_cli.sessions.folder import SessionFolder, Sessions
from notes_cli.sessions.forget import CUT, Forgetter, Forgotten
from notes_cli.sessions.session_kv import SessionKV
from notes_cli.sessions.state import Line, Memory, Origin, SkillText, State, as_line, unapplied
from notes_cli.text.erratum import (
    Erratum,
    Known,
    Reference,
    describe_wildcards,
    known_fields,
    of_fields,
    read_errata,
    unique_values,
    word,
)
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import listed
from notes_cli.text.messages import user_message
from notes_cli.text.prompt import next_turn
from notes_cli.text.skill import Skill
from notes_cli.text.tools import calls_in, form_of


class Session(AbstractContextManager["Session"]):
    """An open session, whose lock is held. Close it, or use it as a context manager."""

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        """Raise SessionError if the session is of another model, UnsupportedError if K/V of this model cannot be
        saved."""
        self.workspace = workspace
        self.stored = stored
        self._kv = SessionKV(workspace, stored)
        # The turn in progress:
        self._question = ""
        self._system = ""  # in the first turn
        self._skills: list[SkillText] = []
        self._errata: dict[str, str] = {}  # values by field
        self._correction = Correction()  # edits and cuts of the sequence that precede this turn
        self._memory: Memory | None = None  # of which it places a copy
        self._compiled: dict[str, str] = {}  # values in the texts of new skills that got others in place
        self._start = 0  # position where it begins
        self._marks: dict[str, tuple[str, ...]] = {}
        self._read_at = now()  # when global errata were read
        self._since = 0  # `SessionKV.changes` at its start

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
        """The sequence with the ledger's tokens, restored from disk if the context does not have it."""
        return self._kv.sequence

    @property
    def empty(self) -> bool:
        """True before the first turn."""
        return not self.state.live

    def ask(self, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Answer:
        """Run the next turn and commit it. Raises SessionError if a later turn has options of the first."""
        return run(self.workspace, self._job(request, callbacks))

    def stream(self, request: Request, callbacks: Callbacks = NO_CALLBACKS) -> Stream:
        """As `ask`, streaming. The turn is committed when the answer is complete, and not if the stream is closed
        earlier."""
        return (yield from stream(self.workspace, lambda callbacks: self._job(request, callbacks), callbacks))

    def _job(self, request: Request, callbacks: Callbacks) -> Job[Answer]:
        return Job(lambda job: self.answer_task(request, callbacks), own=True)

    def _prepare(
        self, request: Request, callbacks: Callbacks, room: int | None = None
    ) -> tuple[PreparedAsk, KVSequence]:
        """Resolve the next turn and assemble its prompt. `room`: as in `answer_task`."""
        begun = time.perf_counter()
        goes_on = not self.empty
        first_only = request.recompute or request.exact or request.decode or request.place or request.system is not None
        if goes_on and (request.fields or first_only):
            raise SessionError(
                f"session {self.stored.name} has begun: system text, place, recompute, exact and decode belong to its "
                "first turn, and fields are changed by edits"
            )
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
            unapplied={} if request.results else unapplied(self.state, global_errata(self.workspace)),
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
                segments=[segment for segment in draft.segments if segment is not memory],
                memory=memory,
                seam=settings.seam,
                strict=request.strict,
                method=request.method,
            )
            if self._errata:
                in_place = self._correction.skills or self._compiled
                method = None if request.method == AUTO else request.method
                method = method or (FIELD_ERRATUM if in_place else ERRATUM)
                draft = replace(draft, settings=replace(settings, method=method))
        else:
            prompt = draft.prompt
            sequence = assemble(self.workspace, prompt, room=room, counted=True)
            self.begin(prompt, sequence)
        if memory and request.memory is not None:
            self._memory = Memory(memory.name, self._reference(request.memory))
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
        on_prefill: OnPrefill | None = None,
    ) -> Task[Answer]:
        """As `ask`, as a task. `assembled` is called with the sequence that has the prompt, `on_prefill` when that is
        decoded. `room`: tokens of free
        cells needed to start generating, if the caller reserves more later; None: for the whole answer."""
        prepared, sequence = self._prepare(request, callbacks, room)
        turn = self._since
        try:
            assembled(sequence)
            prefilled = Prefilled.of(prepared, sequence)
            result = yield from answer_task(self.workspace, prepared, prefilled, sequence, callbacks, on_prefill)
        except BaseException as error:
            if isinstance(error, EngineError) and turn != self._kv.changes:
                raise self._superseded() from error  # its sequence was closed
            if turn == self._since:  # else another turn is in progress
                self._kv.drop()
            raise
        self.keep(result.unwritten, turn)
        return result

    def begin(self, prompt: Prompt, sequence: KVSequence) -> None:
        """Begin the first turn with its prompt assembled in this sequence."""
        changes = changes_of(self.workspace, prompt) if prompt.method.record.edits_rows else {}
        self._kv.hold(sequence)
        self._question, self._system, self._since = prompt.question, prompt.system or "", self._kv.changes
        errata = [*prompt.method_errata, *prompt.errata]
        names = iter([erratum.key for erratum in errata])
        sequence.pieces = [
            replace(piece, name=next(names)) if piece.kind == "erratum" else piece for piece in sequence.pieces
        ]
        self._skills = [from_segment(segment, changes.get(segment.name), sequence) for segment in prompt.segments]
        self._compiled = _compiled(prompt.segments, changes)
        self._marks = _marks(prompt.segments)
        self._errata, self._correction, self._start = _values_of(errata), Correction(), 0
        self._memory = None

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
        kept, outdated = self._memory_values(memory)
        segments = [*segments, memory] if memory else segments
        skills = {segment.name: segment for segment in segments}
        known = known_fields(*(self._others if memory else self.state.skills), *segments)
        written = {span.name: span.value for span in memory.fields} if memory else {}
        restated = of_fields(  # errata of the memory follow its copy
            {key: value for (_, name, key), value in kept if key in self.state.stated and value != written[name]}
        )
        parsed = [*enumerate(read_errata([*restated, *errata], known))]
        last = {erratum.key: number for number, erratum in parsed if erratum.field}  # overrules others of its field
        latest = [erratum for number, erratum in parsed if last.get(erratum.key, number) == number]
        self._question, self._errata = question, _values_of(latest)
        pending = self._pending(known, wording, outdated)
        pending = {key: text for key, text in pending.items() if key not in self._errata}
        names = iter([*pending, *(erratum.key for erratum in latest)])
        texts = [*pending.values(), *(word(erratum, wording) for erratum in latest)]
        editor = Editor(self._kv)
        in_place = self._errata and (
            editor.edits_in_place if method is None or method == AUTO else method.record.edits_rows
        )
        values = [(known.find(key)[0], value) for key, value in self._errata.items()]
        earlier = [(reference, value) for reference, value in values if reference.skill not in skills]
        had = self.state.known
        stated = [
            had.key(reference.skill, reference.field)
            for reference, _ in values
            if f"{reference.skill}.{reference.field}" in had
        ]
        correction = editor.correction(earlier if in_place else (), [*stated, *outdated], memory=memory is not None)
        placed = [*kept, *(values if in_place else ())]
        changes = self._changes_of(segments, placed)
        if memory and memory.name not in changes and _change(self.workspace, memory, placed):
            raise UnsupportedError(f"the values of the memory {memory.name} cannot be computed in place for this model")
        template = self.workspace.thinking_template if think else self.workspace.template
        chunks = next_turn(template, [user_message(question, skills=list(skills), errata=texts)])
        tokens = [
            skills[chunk.name].tokens if chunk.kind == "splice" else self.workspace.tokenize(chunk) for chunk in chunks
        ]
        count = len(self.state.tokens) + sum(map(len, tokens)) + correction.cells
        count += sum(2 * len(patch.tokens) for changed in changes.values() for patch in changed.patches)
        self.workspace.make_room(count, room, self._kv.loaded)
        for segment in segments:  # again: a larger context may rotate differently (LongRoPE)
            self.workspace.check(segment)
        sequence = self._corrected(correction)
        self._start = len(sequence)
        place = SegmentPlacer(seam, strict=strict or memory is not None, encode_images=self.workspace.encode_images)
        for chunk, ids in zip(chunks, tokens, strict=True):
            if chunk.name in changes:
                amend(sequence, skills[chunk.name], changes[chunk.name], FIELD_ERRATUM, Prepared(), place)
            elif chunk.kind == "splice":
                place(sequence, skills[chunk.name])
            else:
                sequence.append(ids, chunk.kind, next(names) if chunk.kind == "erratum" else chunk.name)
        record_uses(self.workspace, segments, sequence.pieces)
        self._skills = [from_segment(segment, changes.get(segment.name), sequence) for segment in segments]
        self._compiled, self._marks = _compiled(segments, changes), _marks(segments)
        self._memory, self._since = None, self._kv.changes
        return sequence

    def _memory_values(self, memory: Segment | None) -> tuple[list[tuple[Reference, str]], list[str]]:
        """Return the values in this session of the memory's fields, and the keys of fields whose values end because the
        text has others by now."""
        if memory is None:
            return [], []
        state = self.state
        outdated = state.outdated({f"{memory.name}.{span.name}": span.value for span in memory.fields})
        if not self._has_memory(memory.name):
            return [], outdated
        known, fields = state.known, state.fields
        keys = {span.name: known.key(memory.name, span.name) for span in memory.fields}
        kept = {name: key for name, key in keys.items() if key in fields and key not in outdated}
        return [(Reference(memory.name, name, key), fields[key]) for name, key in kept.items()], outdated

    def _changes_of(self, segments: Sequence[Segment], values: Sequence[tuple[Reference, str]]) -> dict[str, Change]:
        """Return the changes in place of new skills, by name; none where that is not possible."""
        changes = {}
        for segment in segments:
            changed = None if segment.media else _change(self.workspace, segment, values)
            if changed and not refusal(self.workspace.context, FIELD_ERRATUM, changes=[changed]):
                changes[segment.name] = changed
        return changes

    def _corrected(self, correction: Correction) -> KVSequence:
        """Return the sequence, with the correction applied where its K/V can be moved."""
        self._correction = correction
        if not correction.patches:
            return self.sequence
        try:
            with self._kv.changing() as sequence:
                sequence.replace(correction.patches)
        except UnsupportedError:  # at these positions
            if correction.memory is not None:  # else errata state the values
                raise
            self._correction = Correction()
            return self.sequence
        return sequence

    def append_results(self, results: Sequence[Result], room: int = 0, think: bool = False) -> KVSequence:
        """Append the next turn with results of the tools that the last answer called. Errata stay pending."""
        self._question, self._skills, self._errata, self._marks = as_question(results), [], {}, {}
        self._correction, self._compiled, self._start = Correction(), {}, len(self.state.tokens)
        self._memory = None
        template = self.workspace.thinking_template if think else self.workspace.template
        chunks = results_turn(self.workspace, template, results)
        tokens = [self.workspace.tokenize(chunk) for chunk in chunks]
        self.workspace.make_room(len(self.state.tokens) + sum(map(len, tokens)), room, self._kv.loaded)
        sequence, names = self.sequence, iter(name for name, _ in results)
        for chunk, ids in zip(chunks, tokens, strict=True):
            sequence.append(ids, chunk.kind, next(names) if chunk.kind == "result" else "")
        self._since = self._kv.changes
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
        pieces = (piece for piece in self.state.entries if piece.turn == self.state.turns)
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

    def _pending(self, known: Known, wording: str | None, outdated: Collection[str]) -> dict[str, str]:
        """Return the pending errata, without those of outdated keys, by field key, in this turn's wording, and with the
        skill's name if another skill has the field by now."""
        pending = {}
        for key, text in self.state.pending.items():
            if key in outdated:
                continue
            value, matches = self.state.values.get(key), self.state.known.find(key)
            if value is None or not matches:  # ledgers are untrusted
                pending[key] = text
                continue
            target = matches[0]
            now = known.key(target.skill, target.field)
            shared = now != target.field
            pending[now] = word(Erratum(target.field, value, "", target.skill if shared else ""), wording)
        return pending

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
        """Commit the turn in progress. `answer`: a chosen answer, still to be appended. `turn`: its `_since`, if
        another may have begun. Raises SessionError if the session was changed since the turn began."""
        turn = self._since if turn is None else turn
        if not turn == self._since == self._kv.changes:
            raise self._superseded()
        sequence, start, patches = self._kv.held, self._start, self._correction.patches
        if answer:
            sequence.append(self.workspace.model.tokenize(answer), "answer", reason=Reason.CHOSEN)
        sequence.flush()
        pieces = [self._piece_line(piece, sequence) for piece in sequence.pieces if piece.position >= start]
        skills = [asdict(skill) for skill in self._skills]
        line: dict[str, object] = {
            "op": "turn",
            "question": self._question,
            "pieces": pieces,
            "skills": skills,
            "errata": self._errata,
            "marks": self._marks,
            "read_at": self._read_at,
        }
        if self._compiled:
            line["first"] = self._compiled
        if self._memory:
            line["memory"] = asdict(self._memory)
        if self._correction.memory is not None:
            line["cut"] = self._correction.memory
        if patches:
            line |= {"patches": as_lines(patches), "amended": [asdict(skill) for skill in self._correction.skills]}
        if self.empty and self._system:
            line["system"] = self._system
        if images := [asdict(image) for image in sequence.images if image.first >= start]:
            line["images"] = images
        changed = changed_ranges(patches, len(self.state.tokens)) if patches else []
        self._kv.commit(line, [*changed, (start, len(sequence))])

    def _piece_line(self, piece: Piece, sequence: KVSequence) -> Line:
        ids = [int(token) for token in sequence.tokens[piece.position : piece.position + piece.tokens]]
        inside = {row - piece.position for image in sequence.images for row in range(image.first, image.last)}
        visible = [token for index, token in enumerate(ids) if index not in inside]
        return {
            "kind": piece.kind,
            "name": piece.name,
            "text": self.workspace.model.text(visible, special=True),
            "position": piece.position,
            "how": piece.how,
            **as_line(Origin.of(piece)),
            "tokens": ids,
        }

    def edit(self, name: str, value: str, method: Method | None = None) -> Edited:
        return Editor(self._kv).edit(name, value, method)

    def edits(
        self, values: Mapping[str, str], method: Method | None = None, callbacks: Callbacks = NO_CALLBACKS
    ) -> Iterator[Edited]:
        """Edit several fields, `*.field` in each skill that has it, yielding each edit when done. Raises NotesError,
        before any edit, if one is not possible, or a field gets two values."""
        for text in describe_wildcards(values, self.state.known):
            callbacks.on_notice(Notice(text))
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
        """Remove turns, reasoning and tool results (forget.py)."""
        return Forgetter(self._kv).forget(names, method, dry=dry)

    def undo(self) -> Line:
        """Undo the last turn, edit, compaction or cut, with the exact K/V. Raises SessionError if there is none."""
        return self._kv.undo()


def _needs_larger_context(error: EngineError) -> bool:
    return error.remedy is not None and error.remedy.help is Help.LARGER_CONTEXT


def _change(workspace: Workspace, segment: Segment, values: Iterable[tuple[Reference, str]]) -> Change | None:
    """Return the change that those of the values that are the segment's make in it; of a field the last one counts."""
    new = {reference.field: value for reference, value in values if reference.skill == segment.name}
    return change(workspace.model, segment, new) if new else None


def _compiled(segments: Iterable[Segment], changes: Mapping[str, Change]) -> dict[str, str]:
    """Return the compiled values of changed fields, by `skill.field`."""
    changed = ((segment.name, span) for segment in segments for span in segment.fields)
    return {
        f"{name}.{span.name}": span.value
        for name, span in changed
        if name in changes and span.name in changes[name].fields
    }


def _marks(segments: Iterable[Segment]) -> dict[str, tuple[str, ...]]:
    return {segment.name: marks_of(segment.source, segment.text) for segment in segments if segment.fields}


def _values_of(errata: Iterable[Erratum]) -> dict[str, str]:
    return {erratum.key: erratum.value for erratum in errata if erratum.field and erratum.value}


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
            if not unapplied(sessions.find(name).state, errata.all()):
                continue
            with sessions.locked(name) as stored, Session(workspace, stored) as session:
                if apply_errata(session, errata):
                    edited.append(name)
        except NotesError as error:
            skipped[name] = error
    return Corrected(tuple(new), tuple(edited), skipped)


def errata_of(skills: Mapping[str, SegmentInfo | Skill], values: Mapping[str, str]) -> list[GlobalErratum]:
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
    missing = unapplied(session.state, errata.all())
    for key, value in missing.items():
        Editor(session._kv, read_at).queue(key, value)
    return len(missing)
