"""An open session: its sequence, in memory or restored from disk, and the files that its rows are written into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

import notes_cli
from notes_cli.engine.image_positions import axes_of, position
from notes_cli.engine.patches import Range
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import LayerRows, Media, Segment, Tokens
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import DamagedError, EngineError, Help, SegmentError, SessionError, UnsupportedError
from notes_cli.library.container import checksum_of, open_segment, write_segment
from notes_cli.runtime.naming import model_argument
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import SessionFolder
from notes_cli.sessions.ledger import Header
from notes_cli.sessions.lines import Line
from notes_cli.sessions.state import MARKS, State

CHUNK = 512  # positions that are put back at once
FILES = 8  # files of rows that are held open, each a descriptor while anything of it is in use


class RowFiles:
    """The rows of one session, for as long as its lock is held."""

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        self._workspace = workspace
        self._stored = stored

    def check(self) -> None:
        """Raise SessionError if the session is of another model, rotation or cache than the context at hand."""
        begun = self._stored.header
        if begun is None:
            return
        differences = begun.identity.differences(self._header.identity, "begun")
        if not differences and begun.cache != self._header.cache:
            differences = [f"begun with a {begun.cache} K/V cache, this context keeps {self._header.cache}"]
        if differences:
            what = f"session {self._stored.name} was {'; '.join(differences)}"
            other = begun.identity.weights != self._header.identity.weights
            if other and begun.model == str(self._workspace.model.path):  # such as the one that ships, after an update
                remedy = (
                    f"{begun.model} is another model since then: begin another session, or put the former one there"
                )
            else:
                remedy = f"Its model: {model_argument(Path(begun.model))}"
            raise SessionError(what, remedy)
        model, name = self._workspace.model, self._stored.name
        unknown = model.unknown(self._stored.state.tokens)
        if unknown is not None:
            what = (
                f"session {name} holds token {unknown}, and {model.name} has a vocabulary of {model.n_vocab}: its "
                f"ledger is damaged, or was not written for this model"
            )
            raise SessionError(what, Help.UNDO(name=name))

    @property
    def _header(self) -> Header:
        context = self._workspace.context
        prefix_only = context.supports("splice") is not None
        model = str(self._workspace.model.path.absolute())
        return Header(self._workspace.identity, context.options.cache, prefix_only, model)

    def restored(self) -> KVSequence:
        """The sequence as the ledger has it. Raise SessionError for rows that are not its."""
        count = len(self._stored.state.tokens)
        self._workspace.make_room(count)
        self.check()  # a larger context may rotate otherwise (LongRoPE)
        sequence = self._workspace.sequence()
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
                *(Reason.RESTORED_SESSION, self._stored.name),
            )
            for entry in self._stored.state.entries
            if entry.kind not in MARKS
        ]
        return sequence

    def _restore_prefix(self, sequence: KVSequence) -> None:
        name = self._stored.kept()[-1] if self._stored.state.tokens else ""
        if (self._stored.folder / name).is_file():
            segment = self._open(name)
            if len(segment) != len(self._stored.state.tokens):
                raise self._mixed()
            self._check_rows(segment.tokens, 0)
            sequence.restore(segment)
        else:  # two undos back: they are not kept
            sequence.append(self._stored.state.tokens)
            sequence.flush()

    def _chunks(self, count: int) -> Iterator[Range]:
        """Where to cut what is put back: not inside of an image."""
        first = 0
        while first < count:
            last = min(count, first + CHUNK)
            last = next((one.last for one in self._stored.state.images if one.first < last < one.last), last)
            yield first, last
            first = last

    def _chunk(self, first: int, last: int, opened: dict[str, Segment]) -> Segment:
        """Rows of the positions [first, last), gathered from the files that have the latest of each."""
        runs = _runs(self._stored.state.rows[first:last])
        parts = []
        for name, row, count in runs:
            opened[name] = opened.pop(name) if name in opened else self._open(name)
            part = self._part(opened[name], row, count)
            parts.append(part if len(runs) <= FILES else _copied(part))
            if len(opened) > FILES:
                del opened[next(iter(opened))]  # the one that was wanted longest ago
        tokens = np.concatenate([part.tokens for part in parts])
        self._check_rows(tokens, first)
        images = self._stored.state.images
        media = [one for one in images if first <= one.first < last]
        return replace(
            parts[0],
            tokens=tokens,
            base=position(images, first),
            layers=_joined([part.layers for part in parts]),
            media=tuple(Media(one.first - first, one.last - first, one.positions, "", 0, 0) for one in media),
            axes=axes_of(images, first, last),
        )

    def _part(self, segment: Segment, row: int, count: int) -> Segment:
        """Some rows of a file."""
        try:
            return segment.slice(row, row + count)
        except EngineError as error:
            raise self._mixed() from error

    def _check_rows(self, tokens: Tokens, first: int) -> None:
        if tokens.tolist() != self._stored.state.tokens[first : first + len(tokens)]:
            raise self._mixed()

    def _mixed(self) -> SessionError:
        return SessionError(f"the rows in {self._stored.folder} are not those of its ledger")

    def _open(self, name: str) -> Segment:
        """The rows of a file, which must be the one that its line has named."""
        path = self._stored.folder / name
        try:
            if checksum_of(path) != self._stored.state.checksums.get(name):
                what = f"{path} is not the file that the ledger of session {self._stored.name} names"
                raise SessionError(what, Help.UNDO(name=self._stored.name))
            return open_segment(path)
        except SegmentError as error:
            if not isinstance(error, DamagedError) and path.exists():
                raise SessionError(error.what, error.remedy) from error  # it cannot be read now, and may be sound
            raise SessionError(error.what, Help.UNDO(name=self._stored.name)) from error

    def commit(self, line: Line, places: Sequence[Range], sequence: KVSequence | None) -> None:
        """Write down a line, and the rows of these positions of the sequence.

        Rows first, then the line that names them: if the process is killed in between, it has not happened.
        """
        written = self._written(line, places, sequence)
        self._stored.commit(written, None if self._stored.header else self._header)

    def rewrite(self, line: Line, sequence: KVSequence) -> None:
        """Write down all rows of the sequence, and a line that takes the place of all others: no file of theirs is
        needed any more."""
        places = [(0, len(sequence))]
        self._stored.rewrite(self._written(line, places, sequence))

    def _written(self, line: Line, places: Sequence[Range], sequence: KVSequence | None) -> Line:
        """The line, with the file in which these rows now are."""
        if not places:
            return {**line, "changed": places, "rows": ""}
        assert sequence is not None
        path = self._stored.next_rows
        checksum = write_segment(path, self._read(sequence, places), writer=f"notes {notes_cli.__version__}")
        return {**line, "changed": places, "rows": path.name, "rows_checksum": checksum}

    def _read(self, sequence: KVSequence, places: Sequence[Range]) -> Segment:
        """The rows of these positions, one after the other, each rotated as it is."""
        context, header = sequence.context, self._header
        if header.prefix_only:
            places = [(0, len(sequence))]
        read = [sequence.read(first, last, context.lossless_type)[0] for first, last in places]
        tokens = np.concatenate([sequence.tokens[first:last] for first, last in places])
        return Segment(
            *(self._stored.name, "rows of a session", "", tokens, places[0][0], np.zeros(0, np.int32), ()),
            *(header.identity, _joined(read)),
            prefix_only=header.prefix_only,
        )


def _copied(segment: Segment) -> Segment:
    """The same, without a hold on its file."""
    layers = tuple(replace(rows, k=rows.k.copy(), v=rows.v.copy()) for rows in segment.layers)
    return replace(segment, tokens=segment.tokens.copy(), context=segment.context.copy(), layers=layers)


def _joined(parts: Sequence[Sequence[LayerRows]]) -> tuple[LayerRows, ...]:
    """The same layers of several stretches as one stretch."""
    return tuple(
        replace(rows[0], k=np.concatenate([part.k for part in rows]), v=np.concatenate([part.v for part in rows]))
        for rows in zip(*parts, strict=True)
    )


def _runs(rows: Sequence[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Neighbours of one file as (file, first row, how many)."""
    found: list[tuple[str, int, int]] = []
    for name, row in rows:
        if found and found[-1][0] == name and found[-1][1] + found[-1][2] == row:
            found[-1] = name, found[-1][1], found[-1][2] + 1
        else:
            found.append((name, row, 1))
    return found


class SessionKV:
    """A session in a workspace, for as long as its lock is held.

    Raise SessionError if it is another model's, UnsupportedError for a model whose rows cannot be kept.
    """

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        self.workspace = workspace
        self.stored = stored
        self._rows = RowFiles(workspace, stored)
        self._sequence: KVSequence | None = None
        self._unwritten = False  # its rows were changed, and that is not in the ledger
        self.changes = 0  # how often the ledger was written or the sequence dropped: what began before is over
        for operation in ("read", "restore"):
            reason = workspace.context.supports(operation)
            if reason:
                raise UnsupportedError(f"a session cannot be kept for {workspace.model.name}: {reason}")
        self._rows.check()

    @property
    def state(self) -> State:
        return self.stored.state

    @property
    def sequence(self) -> KVSequence:
        """The sequence as the ledger has it, put back from disk unless it is at hand."""
        if self._sequence is None or not self.at_hand:
            self.drop()
            self._sequence = self._rows.restored()
        return self._sequence

    @property
    def at_hand(self) -> int:
        """How many tokens of the sequence have rows in the context; 0 where it would be put back from disk."""
        found = self._sequence
        if found is None or self._unwritten or not found.intact:
            return 0
        return len(self.state.tokens) if found.tokens.tolist() == self.state.tokens else 0

    @property
    def held(self) -> KVSequence:
        """The sequence with the turn at hand, which is not in the ledger yet."""
        assert self._sequence is not None
        return self._sequence

    def hold(self, sequence: KVSequence) -> None:
        """From now on this is the session's sequence: it ends with what is about to be written down."""
        if self._sequence is not sequence:
            self.drop()
        self._sequence = sequence

    def drop(self) -> None:
        """Close the sequence: it is put back from disk when it is wanted again."""
        if self._sequence is not None:
            self._sequence.close()
        self._sequence, self._unwritten = None, False
        self.changes += 1

    @contextmanager
    def changing(self) -> Iterator[KVSequence]:
        """The sequence, for changes that are written down next (`commit`, `rewrite`), whole or not at all: what a
        failure leaves is dropped, and so is what was not written down."""
        sequence, self._unwritten = self.sequence, True
        try:
            yield sequence
        except BaseException:
            self.drop()
            raise

    def commit(self, line: Line, places: Sequence[Range]) -> None:
        """Write down a line, and the rows of these positions of the sequence as it is now."""
        self._rows.commit(line, places, self._sequence)
        self._wrote()

    def rewrite(self, line: Line) -> None:
        """Write down all rows of the sequence, and this line in the place of all others."""
        self._rows.rewrite(line, self.held)
        self._wrote()

    def _wrote(self) -> None:
        self._unwritten = False
        self.changes += 1

    def undo(self) -> Line:
        """Take back the last line, to the very rows. Raise SessionError if there is none."""
        undone = self.stored.undo()
        self._wrote()
        self.drop()
        return undone

    def spelt(self, first: int, last: int) -> bytes:
        """The text of tokens [first, last)."""
        return b"".join(map(self.workspace.model.token_bytes, self.state.tokens[first:last]))
