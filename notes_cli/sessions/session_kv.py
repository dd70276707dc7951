"""Keeps the K/V of an open session: its sequence in the context, and the files to restore that from.

Renders the turns to tokens, and finds the patches by which the sequence follows a changed conversation. A turn is
rendered as it was when it was asked, so that a conversation equals one that grew by turns: the first with the system
message, a later one after the answer before it. Turns that an operation leaves are not rendered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

import notes_cli
from notes_cli.editing.methods import Change
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.positions import Image, Patch, Range, axes_of, position, position_map
from notes_cli.engine.segment import Media, Segment, Tokens, concatenate_rows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import DamagedError, EngineError, Help, SegmentError, SessionError, UnsupportedError
from notes_cli.library.container import checksum_of, open_segment, write_segment
from notes_cli.runtime.naming import model_argument
from notes_cli.runtime.prompt import results_turn
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import SessionFolder
from notes_cli.sessions.state import Entry, Header, Op, State, Turn, packed
from notes_cli.text.messages import Conversation
from notes_cli.text.prompt import build, next_turn

CHUNK = 512  # positions restored at once
FILES = 8  # K/V files that are mapped at once, a file descriptor each


class SessionKV:
    """The sequence of a locked session, in the context or restored from its files."""

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        """Raise SessionError if the session is of another model, UnsupportedError if K/V of this model cannot be
        saved."""
        self.workspace = workspace
        self.stored = stored
        self._sequence: KVSequence | None = None
        self._by_position: list[tuple[str, int]] = []  # file and row of each token, while it is restored
        self._unwritten = False  # its K/V was changed, and that is not saved yet
        self.changes = 0  # snapshots and drops of the sequence: each invalidates a turn in progress
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

    @property
    def held(self) -> KVSequence:
        """The sequence with the current turn, which is not saved yet."""
        assert self._sequence is not None
        return self._sequence

    def hold(self, sequence: KVSequence) -> None:
        """Make this the session's sequence; it ends with the turn that is committed next."""
        if self._sequence is not sequence:
            self.drop()
        self._sequence = sequence

    def drop(self) -> None:
        """Close the sequence; the next use restores it from disk."""
        if self._sequence is not None:
            self._sequence.close()
        self._sequence, self._unwritten = None, False
        self.changes += 1

    @contextmanager
    def changing(self) -> Iterator[KVSequence]:
        """Yield the sequence for changes that `commit` then saves. It is dropped on failure, and if the
        changes are not saved."""
        sequence, self._unwritten = self.sequence, True
        try:
            yield sequence
        except BaseException:
            self.drop()
            raise

    def commit(self, op: Op, what: str, state: State, places: Sequence[Range], *, for_good: bool = False) -> None:
        """Save the K/V at these positions of the sequence, then the snapshot that names the file: if the process is
        killed in between, nothing has happened. `for_good`: nothing before it is kept."""
        files = dict(self.stored.files)
        if places:
            path = self.stored.next_rows
            sequence = self.held
            places = [(0, len(sequence))] if self._header.prefix_only or for_good else places
            checksum = write_segment(path, self._read(sequence, places), writer=f"notes {notes_cli.__version__}")
            state, files = state.with_rows(path.name, places), {**files, path.name: checksum}
        used = {rows.file for rows in state.rows}
        files = {name: checksum for name, checksum in files.items() if name in used}
        self.stored.commit(op, what, state, files, self.stored.header or self._header, for_good=for_good)
        self._unwritten = False
        self.changes += 1

    def undo(self) -> dict[str, str]:
        """Take back the last operation, restoring the exact K/V before it. Raises SessionError if there is none."""
        undone = self.stored.undo()
        self.drop()
        return undone

    def text_bytes(self, first: int, last: int) -> bytes:
        """Return the text of tokens [first, last)."""
        return b"".join(map(self.workspace.model.token_bytes, self.state.tokens[first:last]))

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
        prefix_only = context.supports("splice") is not None
        model = str(self.workspace.model.path.absolute())
        return Header(self.workspace.identity, context.options.cache, prefix_only, model)

    def _restore(self) -> KVSequence:
        """Return a new sequence with the K/V of the session's tokens. Raises SessionError if the files do not match."""
        count = len(self.stored.state.tokens)
        self.workspace.make_room(count)
        self._check()  # a larger context may rotate differently (LongRoPE)
        sequence = self.workspace.sequence()
        try:
            if self._header.prefix_only:
                self._restore_prefix(sequence)
            else:
                opened: dict[str, Segment] = {}
                self._by_position = self.state.by_position
                for first, last in self._chunks(count):
                    sequence.splice(self._chunk(first, last, opened))
        except BaseException:
            sequence.close()
            raise
        how = sequence.pieces[0].how if sequence.pieces else "decoded"
        sequence.pieces = [
            Piece(
                *(entry.kind, entry.name, entry.position, entry.tokens, how),
                *(Reason.RESTORED_SESSION, self.stored.name),
            )
            for entry in self.state.pieces
        ]
        return sequence

    def _restore_prefix(self, sequence: KVSequence) -> None:
        name = self.state.rows[0].file if self.state.rows else ""
        if name and (self.stored.folder / name).is_file():
            segment = self._open(name)
            if len(segment) != len(self.stored.state.tokens):
                raise self._mismatch()
            self._check_rows(segment.tokens, 0)
            sequence.restore(segment)
        else:  # after two undos: older files are deleted
            sequence.append(self.state.tokens)
            sequence.flush()

    def _chunks(self, count: int) -> Iterator[Range]:
        """Yield ranges of positions to restore at once, with images whole."""
        images, first = self.stored.state.images, 0
        while first < count:
            last = min(count, first + CHUNK)
            last = next((image.last for image in images if image.first < last < image.last), last)
            yield first, last
            first = last

    def _chunk(self, first: int, last: int, opened: dict[str, Segment]) -> Segment:
        """Return the K/V of positions [first, last), collected from the files with the latest of each."""
        runs = packed(self._by_position[first:last])
        parts = []
        for name, row, count in ((run.file, run.first, run.count) for run in runs):
            opened[name] = opened.pop(name) if name in opened else self._open(name)
            try:
                part = opened[name].slice(row, row + count)
            except EngineError as error:
                raise self._mismatch() from error
            if len(runs) > FILES:  # a copy in memory, so that the file can be closed
                layers = tuple(replace(rows, k=rows.k.copy(), v=rows.v.copy()) for rows in part.layers)
                part = replace(part, tokens=part.tokens.copy(), context=part.context.copy(), layers=layers)
            parts.append(part)
            if len(opened) > FILES:
                del opened[next(iter(opened))]  # least recently used
        tokens = np.concatenate([part.tokens for part in parts])
        self._check_rows(tokens, first)
        images = self.stored.state.images
        inside = [image for image in images if first <= image.first < last]
        return replace(
            parts[0],
            tokens=tokens,
            base=position(images, first),
            layers=concatenate_rows([part.layers for part in parts]),
            media=tuple(Media(image.first - first, image.last - first, image.positions, "", 0, 0) for image in inside),
            axes=axes_of(images, first, last),
        )

    def _check_rows(self, tokens: Tokens, first: int) -> None:
        if tokens.tolist() != self.stored.state.tokens[first : first + len(tokens)]:
            raise self._mismatch()

    def _mismatch(self) -> SessionError:
        return SessionError(f"the rows in {self.stored.folder} are not those of its tokens")

    def _open(self, name: str) -> Segment:
        """Open a K/V file. Raises SessionError unless its checksum is the one of the snapshot."""
        path = self.stored.folder / name
        try:
            if checksum_of(path) != self.stored.files.get(name):
                message = f"{path} is not the file that session {self.stored.name} names"
                raise SessionError(message, Help.UNDO(name=self.stored.name))
            return open_segment(path)
        except SegmentError as error:
            if not isinstance(error, DamagedError) and path.exists():
                raise SessionError(error.what, error.remedy) from error  # unreadable now, but perhaps intact
            raise SessionError(error.what, Help.UNDO(name=self.stored.name)) from error

    def _read(self, sequence: KVSequence, places: Sequence[Range]) -> Segment:
        """Return the K/V at these positions as one segment, with keys rotated as in the cache."""
        context, header = sequence.context, self._header
        layers = [sequence.read(first, last, context.lossless_type)[0] for first, last in places]
        tokens = np.concatenate([sequence.tokens[first:last] for first, last in places])
        return Segment(
            *(self.stored.name, "rows of a session", "", tokens, places[0][0], np.zeros(0, np.int32), ()),
            *(header.identity, concatenate_rows(layers)),
            prefix_only=header.prefix_only,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a turn with its tokens, as a chunk of a prompt, or a part of an answer."""

    kind: str
    name: str
    tokens: tuple[int, ...]
    reason: Reason = Reason.PLAIN
    detail: str = ""

    @property
    def key(self) -> object:
        """By which parts are compared: a skill's name, as its values may change and images may share tokens; else the
        tokens."""
        return self.name if self.kind == "splice" else self.tokens


def render(workspace: Workspace, turn: Turn, skills: Mapping[str, Tokens], *, first: bool) -> list[Part]:
    """Render a turn. `skills`: the tokens of each that it has. `first`: no turn is before it. Raises ModelError if the
    chat template has no place for a message."""
    template = workspace.template if turn.reasoning == "none" else workspace.thinking_template
    template = template.earlier if turn.reasoning == "removed" else template
    if turn.results:
        chunks = results_turn(workspace, template, turn.results)
    else:
        chunks = build(template, Conversation(turn.messages)) if first else next_turn(template, turn.messages)
    names = {"erratum": (part.key for part in turn.errata), "result": (name for name, _ in turn.results)}
    parts = []
    for number, chunk in enumerate(chunks):
        ids = skills[chunk.name] if chunk.kind == "splice" else workspace.tokenize(chunk)
        if first and number == 0:
            opening = workspace.with_bos(ids[:0] if chunk.kind == "splice" else ids)
            if chunk.kind == "splice" and len(opening):
                parts.append(Part("text", "", tuple(map(int, opening))))
            ids = ids if chunk.kind == "splice" else opening
        name = next(names[chunk.kind], "") if chunk.kind in names else chunk.name
        parts.append(Part(chunk.kind, name, tuple(map(int, ids))))
    return [*parts, *(Part("answer", "", part.tokens, part.reason, part.detail) for part in turn.answer)]


def parts_of(state: State, turns: Iterable[int]) -> list[Part]:
    """Return the parts of some turns, from 0, as they are in the sequence."""
    parts: list[Part] = []
    for entry in (entry for turn in turns for entry in state.turn_pieces(turn + 1)):
        tokens = tuple(state.tokens[entry.position : entry.end])
        if entry.kind == "splice" and parts and (parts[-1].kind, parts[-1].name) == ("splice", entry.name):
            parts[-1] = replace(parts[-1], tokens=(*parts[-1].tokens, *tokens))
        else:
            marks = (entry.reason, entry.detail) if entry.kind == "answer" else ()
            parts.append(Part(entry.kind, entry.name, tokens, *marks))
    return parts


def follow(
    workspace: Workspace, before: State, after: State, kept: Sequence[int], changes: Mapping[str, Change]
) -> tuple[list[Patch], State]:
    """Return the patches of the sequence by which it follows a changed conversation, and the state with tokens, pieces
    and positions after them; its new rows have no file yet. `kept`: for each turn of `after` its number in `before`,
    from 0. `changes`: of skills that have other values. Raises EngineError for a patch within an image."""
    skills = {one.name: np.array(before.tokens[slice(*before.span(one.name))], np.int32) for one in before.skills}
    skills |= {name: changed.tokens for name, changed in changes.items()}
    patches, layout, done = list[Patch](), list[list[Part]](), 0
    for number, (turn, old) in enumerate(zip(after.conversation, kept, strict=True)):
        same = turn == before.conversation[old] and (number == 0) == (old == 0) and not changes.keys() & {*turn.skills}
        parts = parts_of(before, [old]) if same else render(workspace, turn, skills, first=number == 0)
        layout.append(parts)
        patches += _difference(parts_of(before, range(done, old + 1)), parts, _start(before, done), changes)
        done = old + 1
    if _start(before, done) < len(before.tokens):
        patches.append(Patch(_start(before, done), len(before.tokens), ()))
    patches = _applicable(patches, before.tokens, before.images)
    moved = after.patched(patches)
    if moved.tokens != [token for parts in layout for part in parts for token in part.tokens]:
        raise EngineError("the changed tokens of the session are not those of its conversation")  # never wrong silently
    pieces = tuple(_pieces(workspace, before, moved, layout, patches))
    return patches, replace(moved, pieces=pieces)


def _start(state: State, turn: int) -> int:
    return next((entry.position for entry in state.pieces if entry.turn > turn), len(state.tokens))


def _difference(old: Sequence[Part], new: Sequence[Part], start: int, changes: Mapping[str, Change]) -> Iterator[Patch]:
    """Yield the patches between two lists of parts, whose first token is at `start`."""
    at = [start]
    for part in old:
        at.append(at[-1] + len(part.tokens))
    matcher = SequenceMatcher(None, [part.key for part in old], [part.key for part in new], autojunk=False)
    for tag, first, last, new_first, new_last in matcher.get_opcodes():
        if tag != "equal":
            yield from _replaced(old[first:last], new[new_first:new_last], at[first])
            continue
        for part, place in zip(old[first:last], at[first:last], strict=True):
            if part.kind == "splice" and part.name in changes:
                yield from (patch.offset(place) for patch in changes[part.name].patches)


def _replaced(old: Sequence[Part], new: Sequence[Part], start: int) -> Iterator[Patch]:
    """Yield the patch of what differs between two lists of parts without an equal one."""
    a, b = (
        [(part.name if part.kind == "splice" else "", token) for part in parts for token in part.tokens]
        for parts in (old, new)
    )
    size = min(len(a), len(b))
    head = next((place for place in range(size) if a[place] != b[place]), size)
    tail = next((place for place in range(size - head) if a[-1 - place] != b[-1 - place]), size - head)
    if len(a) > head + tail or len(b) > head + tail:
        yield Patch(start + head, start + len(a) - tail, tuple(token for _, token in b[head : len(b) - tail]))


def _applicable(patches: Iterable[Patch], tokens: Sequence[int], images: Sequence[Image]) -> list[Patch]:
    """Merge adjacent patches, and extend one that only inserts by a token beside it: each must replace some."""
    merged: list[Patch] = []
    for patch in patches:
        if patch.first == patch.last and not (merged and merged[-1].last == patch.first):
            inside = any(image.first < patch.first <= image.last for image in images)
            if patch.first and not inside:
                patch = Patch(patch.first - 1, patch.last, (tokens[patch.first - 1], *patch.tokens))
            else:
                patch = Patch(patch.first, patch.last + 1, (*patch.tokens, tokens[patch.last]))
        if merged and merged[-1].last >= patch.first:
            patch = Patch(merged[-1].first, patch.last, (*merged.pop().tokens, *patch.tokens))
        merged.append(patch)
    return merged


def _pieces(
    workspace: Workspace, before: State, after: State, layout: Sequence[Sequence[Part]], patches: Sequence[Patch]
) -> Iterator[Entry]:
    """Yield a piece for each part of each turn, with the origin of its K/V from the pieces that its tokens were in."""
    shift = position_map(patches)
    old = [(shift(entry.position), shift(entry.end), entry) for entry in before.pieces]
    old = [(start, end, entry) for start, end, entry in old if start < end]
    end, number = 0, 0
    for turn, parts in enumerate(layout, 1):
        for part in parts:
            start, end = end, end + len(part.tokens)
            spans: list[tuple[int, int, Entry]] = []
            while number < len(old) and old[number][0] < end:
                first, last, entry = old[number]
                entry = replace(entry, kind=part.kind, name=part.name, turn=turn)
                if "answer" in (part.kind, old[number][2].kind):
                    entry = replace(entry, reason=part.reason, detail=part.detail)
                first, last = max(first, start), min(last, end)
                if spans and made(spans[-1][2]) == made(entry):
                    first, _, entry = spans.pop()
                spans.append((first, last, entry))
                if old[number][1] > end:
                    break
                number += 1
            for first, last, entry in spans:
                if before.tokens[entry.position : entry.end] != after.tokens[first:last]:
                    entry = replace(entry, text=text_of(workspace, after, first, last))
                yield replace(entry, position=first, tokens=last - first)


def made(entry: Entry) -> Entry:
    """Return how the K/V of an entry was made."""
    return replace(entry, position=0, tokens=0, text="")


def text_of(workspace: Workspace, state: State, first: int, last: int) -> str:
    """Return the text of tokens [first, last), without the rows of images."""
    inside = {row for image in state.images for row in range(image.first, image.last)}
    visible = [state.tokens[place] for place in range(first, last) if place not in inside]
    return workspace.model.text(visible, special=True)
