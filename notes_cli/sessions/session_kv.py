"""Keeps the K/V of an open session: its sequence in the context, and the files to restore that from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

import notes_cli
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.positions import Range, axes_of, position
from notes_cli.engine.segment import Media, Segment, Tokens, concatenate_rows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import DamagedError, EngineError, Help, SegmentError, SessionError, UnsupportedError
from notes_cli.library.container import checksum_of, open_segment, write_segment
from notes_cli.runtime.naming import model_argument
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import SessionFolder
from notes_cli.sessions.state import MARKS, Header, Line, State

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
        self._unwritten = False  # its K/V was changed, and the ledger does not have that yet
        self.changes = 0  # writes of the ledger and drops of the sequence: each invalidates a turn in progress
        for operation in ("read", "restore"):
            if reason := workspace.context.supports(operation) or workspace.context.drops:
                raise UnsupportedError(f"a session cannot be kept for {workspace.model.name}: {reason}")
        self._check()

    @property
    def state(self) -> State:
        return self.stored.state

    @property
    def sequence(self) -> KVSequence:
        """The sequence with the ledger's tokens, restored from disk if the context does not have it."""
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
        return len(self.state.tokens) if sequence.tokens.tolist() == self.state.tokens else 0

    @property
    def held(self) -> KVSequence:
        """The sequence with the current turn, which is not in the ledger yet."""
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
        """Yield the sequence for changes that `commit` or `rewrite` then saves. It is dropped on failure, and if the
        changes are not saved."""
        sequence, self._unwritten = self.sequence, True
        try:
            yield sequence
        except BaseException:
            self.drop()
            raise

    def commit(self, line: Line, places: Sequence[Range]) -> None:
        """Save the K/V at these positions of the sequence, then append the line that names the file: if the process is
        killed in between, nothing has happened."""
        with_rows = self._save_rows(line, places, self._sequence)
        self.stored.commit(with_rows, None if self.stored.header else self._header)
        self._mark_written()

    def rewrite(self, line: Line) -> None:
        """Replace the ledger by this line, with all K/V of the sequence."""
        self.stored.rewrite(self._save_rows(line, [(0, len(self.held))], self.held))
        self._mark_written()

    def _mark_written(self) -> None:
        self._unwritten = False
        self.changes += 1

    def undo(self) -> Line:
        """Undo the last line, restoring the exact K/V before it. Raises SessionError if there is none."""
        undone = self.stored.undo()
        self._mark_written()
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
                f"session {name} holds token {unknown}, and {model.name} has a vocabulary of {model.n_vocab}: its "
                f"ledger is damaged, or was not written for this model"
            )
            raise SessionError(message, Help.UNDO(name=name))

    @property
    def _header(self) -> Header:
        context = self.workspace.context
        prefix_only = context.supports("splice") is not None
        model = str(self.workspace.model.path.absolute())
        return Header(self.workspace.identity, context.options.cache, prefix_only, model)

    def _restore(self) -> KVSequence:
        """Return a new sequence with the K/V of the ledger's tokens. Raises SessionError if the files do not match."""
        count = len(self.stored.state.tokens)
        self.workspace.make_room(count)
        self._check()  # a larger context may rotate differently (LongRoPE)
        sequence = self.workspace.sequence()
        try:
            if self._header.prefix_only:
                self._restore_prefix(sequence)
            else:
                opened: dict[str, Segment] = {}
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
            for entry in self.stored.state.entries
            if entry.kind not in MARKS
        ]
        return sequence

    def _restore_prefix(self, sequence: KVSequence) -> None:
        name = self.stored.kept()[-1] if self.stored.state.tokens else ""
        if (self.stored.folder / name).is_file():
            segment = self._open(name)
            if len(segment) != len(self.stored.state.tokens):
                raise self._mismatch()
            self._check_rows(segment.tokens, 0)
            sequence.restore(segment)
        else:  # after two undos: older files are deleted
            sequence.append(self.stored.state.tokens)
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
        runs = _runs(self.stored.state.rows[first:last])
        parts = []
        for name, row, count in runs:
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
        return SessionError(f"the rows in {self.stored.folder} are not those of its ledger")

    def _open(self, name: str) -> Segment:
        """Open a K/V file. Raises SessionError unless its checksum is the one in the ledger."""
        path = self.stored.folder / name
        try:
            if checksum_of(path) != self.stored.state.checksums.get(name):
                message = f"{path} is not the file that the ledger of session {self.stored.name} names"
                raise SessionError(message, Help.UNDO(name=self.stored.name))
            return open_segment(path)
        except SegmentError as error:
            if not isinstance(error, DamagedError) and path.exists():
                raise SessionError(error.what, error.remedy) from error  # unreadable now, but perhaps intact
            raise SessionError(error.what, Help.UNDO(name=self.stored.name)) from error

    def _save_rows(self, line: Line, places: Sequence[Range], sequence: KVSequence | None) -> Line:
        """Save the K/V at these positions, and return the line with the name and checksum of the file."""
        if not places:
            return {**line, "changed": places, "rows": ""}
        assert sequence is not None
        path = self.stored.next_rows
        checksum = write_segment(path, self._read(sequence, places), writer=f"notes {notes_cli.__version__}")
        return {**line, "changed": places, "rows": path.name, "rows_checksum": checksum}

    def _read(self, sequence: KVSequence, places: Sequence[Range]) -> Segment:
        """Return the K/V at these positions as one segment, with keys rotated as in the cache."""
        context, header = sequence.context, self._header
        if header.prefix_only:
            places = [(0, len(sequence))]
        layers = [sequence.read(first, last, context.lossless_type)[0] for first, last in places]
        tokens = np.concatenate([sequence.tokens[first:last] for first, last in places])
        return Segment(
            *(self.stored.name, "rows of a session", "", tokens, places[0][0], np.zeros(0, np.int32), ()),
            *(header.identity, concatenate_rows(layers)),
            prefix_only=header.prefix_only,
        )


def _runs(rows: Sequence[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Group consecutive rows of one file as (file, first row, count)."""
    runs: list[tuple[str, int, int]] = []
    for name, row in rows:
        if runs and runs[-1][0] == name and runs[-1][1] + runs[-1][2] == row:
            runs[-1] = name, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((name, row, 1))
    return runs
