"""Keeps the K/V of an open session: its sequence in the context, and the files to restore that from.

Every operation is `plan`, `patch` and `commit`: the conversation as it is to be, the sequence that follows it, the
snapshot. K/V after a change is moved, so that it still depends on what was there, or it is decoded again. A recurrent
state can do neither: the files have one at the end of each turn, and before the first skill and question, and what
follows the last of them before a change is decoded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

import notes_cli
from notes_cli.editing.methods import Change
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.positions import Aligned, Patch, Range, align, axes_of, changed_ranges, position, removed_images
from notes_cli.engine.segment import LayerRows, Media, Segment, Tokens, concatenate_rows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import DamagedError, EngineError, Help, SegmentError, SessionError, UnsupportedError
from notes_cli.library.container import write_segment
from notes_cli.runtime.naming import model_argument
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import SessionFolder
from notes_cli.sessions.follow import follow
from notes_cli.sessions.state import ROPE, TRACE, Entry, Header, Op, Rows, SkillText, State
from notes_cli.text.erratum import Fielded

CHUNK = 512  # positions restored at once
FILES = 4  # K/V files that are mapped at once, a file descriptor each
# Changes that may move K/V, by cache type: each rotates the keys, which rounds them to the type once more (error in
# docs/LOG.md). f32 has no limit.
MOVES = {"f16": 64, "bf16": 8, "q8_0": 4}
FEW_MOVES = 2  # for any other type

Planned = tuple[Sequence[Patch], State]  # of the sequence, and the state after them


class SessionKV:
    """The sequence of a locked session, in the context or restored from its files."""

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        """Raise SessionError if the session is of another model, UnsupportedError if K/V of this model cannot be
        saved."""
        self.workspace = workspace
        self.stored = stored
        self._sequence: KVSequence | None = None
        self._unwritten = False  # its K/V was changed, and that is not saved yet
        self._turn: Planned | None = None  # in progress: it begins after the state's tokens
        for operation in ("read", "restore"):
            if reason := workspace.context.supports(operation) or workspace.context.drops:
                raise UnsupportedError(f"a session cannot be kept for {workspace.model.name}: {reason}")
        self._check()

    @property
    def state(self) -> State:
        return self.stored.state

    @property
    def sequence(self) -> KVSequence:
        """The sequence with the session's tokens, restored from disk if the context does not have it."""
        if self._sequence is None or not self.loaded:
            self.drop()
            self._sequence = self._restore()
        return self._sequence

    @property
    def loaded(self) -> int:
        """Number of tokens with K/V in the context; 0 if the sequence must be restored from disk."""
        sequence = self._sequence
        if sequence is None or self._unwritten or not sequence.intact:
            return 0
        return len(sequence) if sequence.tokens.tolist() == self.state.tokens else 0

    def hold(self, sequence: KVSequence) -> None:
        """Make this the session's sequence; it ends with the turn that is committed next."""
        if self._sequence is not sequence:
            self.drop()
        self._sequence = sequence

    def drop(self) -> None:
        """Close the sequence; the next use restores it from disk."""
        if self._sequence is not None:
            self._sequence.close()
        self._sequence, self._unwritten, self._turn = None, False, None

    def name_fields(self, skills: Iterable[Fielded]) -> None:
        """Give the state's skills the fields of these, which have more of them. The next commit keeps them."""
        fields = {skill.name: skill.fields for skill in skills if isinstance(skill, SkillText)}
        state = self.state
        new = [replace(skill, fields=fields.get(skill.name, skill.fields)) for skill in state.skills]
        if new != list(state.skills):
            self.stored.add_fields(tuple(new))

    # Operations.

    def plan(
        self,
        after: State,
        kept: Sequence[int] | None = None,
        changes: Mapping[str, Change] = {},
        *,
        again: bool = False,
        traces: bool = False,
        removed: str = "",
    ) -> Planned:
        """Return the patches by which the sequence follows a changed conversation, and the state after them.

        kept: For each turn of `after` its number before, from 0; by default all.
        changes: Of skills that have other values.
        again: Everything from the first patch on is decoded again, with `traces` also from earlier cuts on, and with
            recurrent layers from the last state before it on. Then the first patch is an empty one, where that begins.
        removed: Describes text that is cut out, on which K/V that is moved still depends.

        Raises EngineError for a patch within an image.
        """
        before = self.state
        patches, after = follow(self.workspace, before, after, range(before.turns) if kept is None else kept, changes)
        starts = [patch.first for patch in patches] + [entry.position for entry in before.traces if traces]
        first = min(starts, default=len(before.tokens))
        if again:
            if self.workspace.model.recurrent:
                first = max((at for at in before.states if at <= first), default=0)
            return [Patch(first, first, ()), *patches], _decoded_again(after, first)
        if removed and dependent(after, patches):
            turn = max((entry.turn for entry in after.pieces if entry.end <= first), default=0)
            trace = Entry(TRACE, "", removed, first, 0, "cut", turn)
            after = replace(after, edits_and_cuts=(*after.edits_and_cuts, trace))
        return patches, replace(after, moves=after.moves + bool(_moved(patches, len(before.tokens))))

    def obstacle(self, planned: Planned, *, again: bool = False) -> str | None:
        """Return why the sequence cannot follow, None if it can."""
        (patches, after), before, context = planned, self.state, self.workspace.context
        if not patches:
            return None
        if again:
            removed = removed_images(before.images, [patch.span for patch in patches])
            if any(image.last > patches[0].first and image not in removed for image in before.images):
                return "an image follows, and its rows are not decoded again as tokens"
            return None
        if any(patch.tokens for patch in patches) and (reason := context.supports("rewrite")):
            return reason
        parts = _moved(patches, len(before.tokens))
        if parts and (reason := context.supports("splice") or self.exhausted(after.moves)):
            return reason
        for part in parts:
            start, end = (position(before.images, row) for row in part.before)
            if reason := context.can_move(start, position(after.images, part.after[0]), end - start):
                return reason
        return None

    def exhausted(self, moves: int) -> str | None:
        """Return why K/V is not moved so often, None if it may be. A memory moves what follows it once more."""
        kind = self.workspace.context.options.type_k
        moves += self.state.memory is not None
        if kind == "f32" or moves <= MOVES.get(kind, FEW_MOVES):
            return None
        what = "rows after a value of another length, or after what was cut"
        return f"{what}, were moved {moves - 1} times, and each time rounds the keys of a {kind} cache"

    def patch(self, planned: Planned, *, again: bool = False, more: int = 0, room: int = 0) -> KVSequence:
        """Return the sequence with these patches, to be committed. It gets room for `more` tokens, and `room` for an
        answer. A failure leaves the session as it is on disk."""
        patches, after = planned
        temporary = 0 if again else sum(len(patch.tokens) + max(0, patch.grows) for patch in patches)
        count = max(len(self.state.tokens), len(after.tokens)) + temporary + more
        self.workspace.make_room(count, room, self.loaded)
        sequence, self._turn = self.sequence, None
        if patches:
            self._unwritten = True
            if again:
                start = patches[0].first
                if self.workspace.model.recurrent:
                    self.drop()
                    sequence = self._sequence = self._restore(start)
                    self._unwritten = True
                sequence.truncate(start)
                sequence.append(after.tokens[start:], reason=Reason.AGAIN)
                self.keep_states(sequence, after.pieces)
            else:
                sequence.replace(patches)
        return sequence

    def places(self, planned: Planned, *, again: bool = False) -> list[Range]:
        """Return the positions, after the patches, whose K/V they change."""
        patches, after = planned
        if again:
            return [(patches[0].first, len(after.tokens))]
        return changed_ranges(patches, len(self.state.tokens)) if patches else []

    def apply(
        self, op: Op, what: str, planned: Planned, *, again: bool = False, more: int = 0, for_good: bool = False
    ) -> None:
        """Patch the sequence, and commit that."""
        places = self.places(planned, again=again)
        if planned[0]:
            self.patch(planned, again=again, more=more).flush()
        self.commit(op, what, planned[1], places, for_good=for_good)

    def commit(self, op: Op, what: str, state: State, places: Sequence[Range], *, for_good: bool = False) -> None:
        """Save the K/V at these positions of the sequence, then the snapshot that names the file: if the process is
        killed in between, nothing has happened. `for_good`: nothing before it is kept."""
        files, sequence = dict(self.stored.files), self._sequence
        if places and sequence:
            path = self.stored.next_rows
            places = [(0, len(sequence))] if for_good else places
            segment = self._read(sequence, places, state.states)
            checksum = write_segment(path, segment, writer=f"notes {notes_cli.__version__}")
            state, files = state.with_rows(path.name, places), {**files, path.name: checksum}
            states = {segment.base + at for at in segment.states}
            state = replace(state, states=tuple(sorted(states.union(state.states))))
            sequence.states.clear()  # the files have them
        used = {rows.file for rows in state.rows}
        files = {name: checksum for name, checksum in files.items() if name in used}
        self.stored.commit(op, what, state, files, self.stored.header or self._header, for_good=for_good)
        self._unwritten, self._turn = False, None

    def undo(self) -> dict[str, str]:
        """Undo the last operation, restoring the exact K/V before it. Raises SessionError if there is none."""
        undone = self.stored.undo()
        self.drop()
        return undone

    # The K/V files.

    def _check(self) -> None:
        """Raise SessionError if the session was begun with another model, RoPE setting or cache type."""
        begun = self.stored.header
        if begun is None:
            return
        differences = begun.identity.differences(self._header.identity, "begun")
        if not differences and begun.cache != self._header.cache:
            differences = [f"begun with a {begun.cache} K/V cache, this context keeps {self._header.cache}"]
        if differences:
            message = f"session {self.stored.name} was {'; '.join(differences)}"
            other = begun.identity.weights != self._header.identity.weights
            if other and begun.model == str(self.workspace.model.path):  # such as the one that ships, after an update
                remedy = (
                    f"{begun.model} is another model since then: begin another session, or put the former one there"
                )
            else:
                remedy = f"Its model: {model_argument(Path(begun.model))}"
            raise SessionError(message, remedy)
        model, name = self.workspace.model, self.stored.name
        unknown = model.unknown(self.stored.state.tokens)
        if unknown is not None:
            message = (
                f"session {name} holds token {unknown}, and {model.name} has a vocabulary of {model.n_vocab}: it is "
                f"damaged, or was not begun with this model"
            )
            raise SessionError(message, Help.UNDO(name=name))

    @property
    def _header(self) -> Header:
        context = self.workspace.context
        model = str(self.workspace.model.path.absolute())
        rope = {name: getattr(context.options, name) for name in ROPE}
        return Header(self.workspace.identity, context.options.cache, model, **rope)

    def _restore(self, length: int | None = None) -> KVSequence:
        """Return a new sequence with the K/V of the session's tokens, or with recurrent layers of the first `length`.
        Raises SessionError if the files do not match."""
        state = self.state
        length = len(state.tokens) if length is None else length
        self.workspace.make_room(length)
        self._check()  # a larger context may rotate differently (LongRoPE)
        sequence = self.workspace.sequence()
        try:
            if self.workspace.model.recurrent:
                if length:
                    sequence.splice(self._prefix(length))
            else:
                opened = lru_cache(FILES)(self._open)
                for first, last, run in self._chunks():
                    sequence.splice(self._chunk(opened(run.file), first, last, run.first))
            if sequence.tokens.tolist() != state.tokens[:length]:
                raise self._mismatch()
        except BaseException:
            sequence.close()
            raise
        how = sequence.pieces[0].how if sequence.pieces else "decoded"
        sequence.pieces = [
            Piece(
                *(entry.kind, entry.name, entry.position, entry.tokens, how),
                *(Reason.RESTORED_SESSION, self.stored.name),
            )
            for entry in state.pieces
        ]
        return sequence

    def _chunks(self) -> Iterator[tuple[int, int, Rows]]:
        """Yield ranges of positions to restore at once, with images whole, and their rows."""
        first = 0
        for run in self.state.rows:
            start, end = first, first + run.count
            while first < end:
                last = min(end, first + CHUNK)
                last = next((one.last for one in self.state.images if one.first < last < one.last), last)
                yield first, last, Rows(run.file, run.first + first - start, last - first)
                first = last

    def _chunk(self, segment: Segment, first: int, last: int, row: int) -> Segment:
        """Return the K/V of positions [first, last), which is in the rows from `row` on."""
        try:
            part = segment.slice(row, row + last - first)
        except EngineError as error:
            raise self._mismatch() from error
        images = self.state.images
        inside = [image for image in images if first <= image.first < last]
        return replace(
            part,
            base=position(images, first),
            media=tuple(Media(image.first - first, image.last - first, image.positions, "", 0, 0) for image in inside),
            axes=axes_of(images, first, last),
        )

    def _prefix(self, length: int) -> Segment:
        """Return the K/V of the first `length` tokens, and the recurrent state after them."""
        parts, tokens, done = list[list[LayerRows]](), list[int](), 0
        for run in self.state.rows:
            if done < length:
                rows = slice(run.first, run.first + min(run.count, length - done))
                segment = self._open(run.file)
                parts.append([layer.cut(rows) for layer in segment.layers if layer.part != "state"])
                tokens += segment.tokens[rows].tolist()
                done = len(tokens)
        attention, states = iter(concatenate_rows(parts)), iter(self._state_after(length))
        layers = [next(states if layer.part == "state" else attention) for layer in self.workspace.context.layers]
        return replace(self._segment(np.array(tokens, np.int32), 0), layers=layers)

    def _state_after(self, length: int) -> list[LayerRows]:
        """Return the recurrent state after so many tokens, from the files."""
        done = 0
        for run in self.state.rows:
            if done < length <= done + run.count and length in self.state.states:
                segment = self._open(run.file)
                if (row := run.first + length - done) in segment.states:
                    rows = slice(at := segment.states.index(row), at + 1)
                    return [layer.cut(rows) for layer in segment.layers if layer.part == "state"]
            done += run.count
        raise self._mismatch()

    def keep_states(self, sequence: KVSequence, pieces: Sequence[Piece | Entry]) -> None:
        """Keep the recurrent state before the first skill, the first question, and each later turn of these pieces."""
        if self.workspace.model.recurrent:
            first = {piece.kind: piece.position for piece in reversed(pieces) if piece.kind in ("splice", "question")}
            turns = [after.position for one, after in pairwise(pieces) if one.kind == "answer" != after.kind]
            sequence.keep_states(at for at in sorted({*first.values(), *turns}) if at)

    def _mismatch(self) -> SessionError:
        return SessionError(f"the rows in {self.stored.folder} are not those of its tokens")

    def _open(self, name: str) -> Segment:
        """Open a K/V file. Raises SessionError unless it is the one that the snapshot names."""
        assert self.stored.snapshot
        try:
            return self.stored.open_rows(name, self.stored.snapshot)
        except SegmentError as error:
            damaged = isinstance(error, DamagedError) or not (self.stored.folder / name).exists()
            remedy = Help.UNDO(name=self.stored.name) if damaged else error.remedy  # else unreadable now, but intact
            raise SessionError(f"session {self.stored.name}: {error.what}", remedy) from error

    def _read(self, sequence: KVSequence, places: Sequence[Range], states: Sequence[int]) -> Segment:
        """Return the K/V at these positions as one segment, with keys rotated as in the cache, and the recurrent states
        there. `states`: those that the files have."""
        context = sequence.context
        tokens = np.concatenate([sequence.tokens[first:last] for first, last in places])
        segment = self._segment(tokens, places[0][0])
        if not self.workspace.model.recurrent:
            layers = [sequence.read(first, last, context.lossless_type)[0] for first, last in places]
            return replace(segment, layers=concatenate_rows(layers))
        ((start, end),) = places
        whole, _ = sequence.read(0, end, context.lossless_type)  # no part can be read
        kept = {at: self._state_after(at) for at in states if at > start}
        kept |= {at: context.state_rows(state) for at, state in sequence.states.items() if at > start}
        kept[end] = [layer for layer in whole if layer.part == "state"]
        after = [kept[at] for at in sorted(kept)]
        rows_of_states = iter(concatenate_rows(after))
        rows = [next(rows_of_states) if layer.part == "state" else layer.cut(slice(start, end)) for layer in whole]
        ends = tuple(at - start for at in sorted(kept))
        return replace(segment, layers=rows, context=sequence.tokens[:start], states=ends)

    def _segment(self, tokens: Tokens, base: int) -> Segment:
        nothing = np.zeros(0, np.int32)
        what = self.stored.name, "rows of a session", "", tokens, base, nothing, ()
        return Segment(*what, self._header.identity, ())


def _moved(patches: Sequence[Patch], length: int) -> list[Aligned]:
    """Return the ranges of a sequence of `length` tokens that the patches move."""
    return [part for part in align(patches, length) if not part.patch and part.before != part.after]


def dependent(after: State, patches: Sequence[Patch]) -> int:
    """Return how many tokens after the first patch were computed with those before it, and are moved."""
    first = min((patch.first for patch in patches), default=len(after.tokens))
    computed = [entry for entry in after.pieces if entry.how != "spliced"]
    following = sum(max(0, entry.end - max(first, entry.position)) for entry in computed)
    return following - sum(len(patch.tokens) for patch in patches)


def _decoded_again(state: State, first: int) -> State:
    """Return the state after everything from `first` on was decoded again: without traces of cuts there."""
    again = {"how": "decoded", "reason": Reason.AGAIN, "detail": "", "moved": 0, "rewritten": 0, "blocks": 0}
    pieces = [
        replace(entry, **again) if entry.position >= first and entry.how != "decoded" else entry  # type: ignore[arg-type]
        for entry in state.pieces
    ]
    marks = [entry for entry in state.edits_and_cuts if entry.kind != TRACE or entry.position < first]
    states = tuple(at for at in state.states if at <= first)
    after = replace(state, pieces=tuple(pieces), edits_and_cuts=tuple(marks), states=states)
    skills = [replace(skill, in_place=False) if after.span(skill.name)[0] >= first else skill for skill in after.skills]
    return replace(after, skills=tuple(skills))
