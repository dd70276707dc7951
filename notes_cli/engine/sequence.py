"""Holds one sequence of a context: its pieces and tokens, the operations that change its K/V, and its decoding.

Pieces are decoded text, spliced segments, errata and answers. Decoding is deferred until a splice or logits need it, so
that neighbouring pieces share a batch. Which tokens share a batch changes the last bits of their K/V, so it depends on
the tokens and skills alone (`divide`), and a skill is decoded in the batches in which it is compiled (`append_skill`).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.context import Context, Lease, Output, State
from notes_cli.engine.pieces import How, Piece, Reason
from notes_cli.engine.positions import (
    Image,
    Patch,
    align,
    apply_patches,
    check_no_images,
    images_of,
    is_ascending,
    length,
    new_positions,
    position,
    position_map,
    removed_images,
    row,
)
from notes_cli.engine.sampler import Sampler
from notes_cli.engine.segment import LayerRows, MicroBatches, Segment, Tokens, micro_batches, quantized
from notes_cli.errors import ContextLengthError, EngineError, Help, NotesError, Progress, UnsupportedError

if TYPE_CHECKING:
    from notes_cli.engine.vision import ImageEmbeddings

T = TypeVar("T")
Logits = NDArray[np.float32]
Task = Generator[Sequence["KVSequence"], None, T]  # yields the sequences whose pending tokens it needs decoded
Stopped = Literal["end", "length", "context"]  # why generation ended: an end token, max_tokens, or a full context
FIRST = (32, 96)  # tokens of a long skill's first batches, so that progress shows before a whole micro-batch is done


class _Tail(NamedTuple):
    """Rows [start, end) to move from position `at` to `to`; `axes` where images share positions."""

    start: int
    end: int
    at: int
    to: int
    rows: tuple[LayerRows, ...]
    axes: NDArray[np.int32] | None


class Batches(NamedTuple):
    """Rows that a prefill of the same tokens alone has bit for bit, since it decodes them in the same batches."""

    base: int = 0  # end of the last placed segment, where batches begin
    cuts: tuple[int, ...] = ()  # after it, where a batch was ended to begin the next there (`divide`)
    whole: int = 0  # end of the whole micro-batches from the last of these
    end: int = 0  # end of the batch after these


class KVSequence(AbstractContextManager["KVSequence"]):
    """One sequence of a context. Rows count tokens from 0 in the order of the pieces; positions equal rows except after
    images under M-RoPE (positions.py). Closing it, or leaving it as a context manager, frees its sequence."""

    def __init__(self, context: Context, lease: Lease | None = None, *, dry: bool = False) -> None:
        """Create an empty sequence with this lease, or a new one. `dry`: keep the list of pieces without computing, to
        plan a prompt."""
        self.context = context
        self.dry = dry
        self.pieces: list[Piece] = []
        self.seconds = {"splice": 0.0, "decode": 0.0}
        self.stopped: Stopped = "end"  # why the last generation ended
        self._lease = None if dry else lease or context.lease()
        self._tokens: list[int] = self._lease.tokens if self._lease else []
        self._images: list[Image] = []
        self._done = 0  # tokens that have rows; the rest is pending, and holds no image
        self.batches = Batches()
        self.flushed: list[int] = []  # tokens of each batch that `flush` decoded
        self._divisions: list[int] = []  # tokens before each go into no batch with it and those after it
        self.states: dict[int, State] = {}  # recurrent states after so many tokens, to which it can be truncated
        self.states_due: set[int] = set()  # likewise, once these tokens are decoded
        self._logits: Logits | EngineError | None = None  # after the last token, or why there are none
        self.every: list[Logits] | None = None  # logits after each token that is decoded, if they are kept
        # Tokens that it may have at most: fewer than the context has where others need room, too, and more where the
        # context is made larger while an answer is written (runtime/kv_budget.py). None: those of the context.
        self.token_limit: int | None = None

    @property
    def size(self) -> int:
        """Tokens that it can have at most."""
        return self.context.n_ctx if self.token_limit is None else self.token_limit

    @property
    def seq_id(self) -> int:
        """The sequence id. Raises EngineError if the lease has ended."""
        if self._lease is None:
            raise EngineError("a dry sequence has no place in the cache")
        return self._lease.id

    def close(self) -> None:
        """End the lease; the K/V is gone."""
        if self._lease is not None:
            self._lease.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokens(self) -> Tokens:
        return np.array(self._tokens, np.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def intact(self) -> bool:
        """True if the context still holds this sequence's K/V, unchanged by other code."""
        leased = self._lease is not None and self._lease.held
        return leased and self.context.length(self.seq_id) == self.length(self._done)

    def position(self, row: int) -> int:
        """Return the position of a row, or of the next one after the last."""
        return position(self._images, row) if self._images else row

    def length(self, rows: int) -> int:
        """Return llama.cpp's length of the sequence with so many rows."""
        return length(self._images, rows) if self._images else rows

    @property
    def images(self) -> Sequence[Image]:
        """Images among its rows."""
        return self._images

    @property
    def rows(self) -> int:
        """Number of tokens that have K/V; the rest is pending."""
        return self._done

    def _cut_batches(self, length: int) -> None:
        """Keep the batches of the first `length` rows."""
        base, cuts, whole, end = self.batches
        if length < base:
            self.batches = Batches()
        elif length < end:
            cuts = tuple(cut for cut in cuts if cut <= length)
            first = cuts[-1] if cuts else base
            whole = first + (min(length, whole) - first) // self.context.n_prefill * self.context.n_prefill
            self.batches = Batches(base, cuts, whole, whole)

    def share(self, length: int | None = None, *, dry: bool = False) -> KVSequence:
        """Fork the sequence after `length` tokens (default: all, decoded first), sharing cells until one of the two is
        rewritten; a `dry` fork has no K/V. With recurrent layers: all of them, or as many as there is a state of
        (`states`). Raises UnsupportedError where sequences cannot share, EngineError for more rows than are
        decoded."""
        dry = dry or self.dry
        if length is None:
            self.flush()
            length = len(self)
        elif not 0 <= length <= self._done:
            raise EngineError(f"{length} rows cannot be shared, the sequence has {self._done}")
        at, state = self.position(length), self.states.get(length) if length < self._done else None
        fork = KVSequence(self.context, None if dry else self.context.share(self.seq_id, at, state), dry=dry)
        fork.states = {rows: state for rows, state in self.states.items() if rows <= length}
        fork._tokens += self._tokens[:length]
        fork._images = [image for image in self._images if image.last <= length]
        fork._done, fork._logits = length, self._logits if length == len(self) else None
        fork.pieces = self._cut_pieces(length)
        fork.batches = self.batches
        fork._cut_batches(length)
        fork.flushed += self.flushed
        return fork

    def _cut_pieces(self, length: int) -> list[Piece]:
        """Return the pieces of the first `length` tokens."""
        pieces = [piece for piece in self.pieces if piece.position < length]
        return [piece.resized(min(piece.tokens, length - piece.position), piece.rewritten) for piece in pieces]

    def append(
        self,
        tokens: Iterable[int],
        kind: str = "text",
        name: str = "",
        how: How = "decoded",
        reason: Reason = Reason.PLAIN,
        detail: str = "",
    ) -> None:
        """Append tokens as a piece with this reason and detail."""
        new = [int(token) for token in tokens]
        if not new:
            return
        self._check_room(len(new))
        self.pieces.append(Piece(kind, name, len(self), len(new), how, reason, detail))
        self._tokens += new
        self._logits = None

    def append_skill(
        self,
        tokens: Iterable[int],
        kind: str = "splice",
        name: str = "",
        reason: Reason = Reason.PLAIN,
        detail: str = "",
        *,
        present: int = 0,
    ) -> None:
        """Append the tokens of a skill, after the first `present` of them, to be decoded in the batches in which it is
        compiled: their K/V is then bit for bit that of the compiled skill, if what precedes it is. Some products round
        otherwise for a few tokens (K-quants on the CPU)."""
        start = len(self) - present
        self.divide()
        self.append(tokens, kind, name, reason=reason, detail=detail)
        for end in skill_divisions(len(self) - start, self.context.n_ubatch):
            self.divide(start + end)

    def splice(self, segment: Segment, *, seam: int = 0, rotate: bool = True) -> None:
        """As `splice_task`, not as a task."""
        run(self.splice_task(segment, seam=seam, rotate=rotate))

    def splice_task(self, segment: Segment, *, seam: int = 0, rotate: bool = True) -> Task[None]:
        """Append a segment: decode its first `seam` tokens again, up to an image at most, and place the K/V of the
        rest. The caller has compared identities. `rotate=False` is the control, with wrong K/V by design."""
        seam = min(seam, segment.max_seam)
        self._check_room(len(segment))
        self.append(segment.tokens[:seam], "splice", segment.name, "seam", Reason.OTHER_CONTEXT)
        if seam == len(segment):
            return
        while self.pending and not self.dry:
            yield [self]
        self.flush()
        at, position = len(self), self.position(len(self))
        started = time.perf_counter()
        axes = None if segment.axes is None else segment.axes[seam:] + segment.base
        self._place(segment.tokens[seam:], segment.layers, segment.base + seam, first=seam, rotate=rotate, axes=axes)
        moved = position - segment.base - seam
        self._add_spliced(
            segment, segment.tokens[seam:], started, Reason.MOVED if moved else Reason.UNMOVED, moved, rotate
        )
        self.pieces[-1] = replace(self.pieces[-1], blocks=len(segment.blocks))
        self._images += images_of(segment.media, at - seam, segment.axes)

    def place(
        self, tokens: Tokens, rows: Sequence[LayerRows], base: int, kind: str, name: str, detail: str = ""
    ) -> None:
        """Append tokens as a piece whose K/V was computed at position `base` after another left context. `detail`: the
        skill that it is from. The caller has compared identities."""
        self._check_room(len(tokens))
        self.flush()
        started, moved = time.perf_counter(), self.position(len(self)) - base
        self._place(tokens, rows, base)
        self.pieces.append(Piece(kind, name, len(self), len(tokens), "spliced", Reason.NEAR, detail, moved))
        self.seconds["splice"] += time.perf_counter() - started
        self._tokens += [int(token) for token in tokens]
        self._done, self._logits = len(self), None

    def _place(self, tokens: Tokens, rows: Sequence[LayerRows], base: int, **how: Any) -> None:
        """Place K/V at the end. On failure the sequence is unchanged."""
        position = self.position(len(self))
        if self.dry:
            return
        try:
            self.context.splice(self.seq_id, position, tokens, rows, base, **how)
        except BaseException:  # an interrupt is raised after the call, with the entries in place
            self.context.truncate(self.seq_id, position)
            raise

    def _add_spliced(
        self, segment: Segment, tokens: Tokens, started: float, reason: Reason, moved: int = 0, rotate: bool = True
    ) -> None:
        """Record that the K/V of these tokens of a segment was placed at the end, `moved` positions from where it was
        compiled."""
        self.seconds["splice"] += time.perf_counter() - started
        detail = ""
        if moved and not rotate:
            reason, detail, moved = Reason.NOT_ROTATED, f"{moved:+d}", 0
        piece = Piece("splice", segment.name, len(self), len(tokens), "spliced", reason, detail, moved)
        if any(quantized(segment.kv)):
            piece = replace(piece, kept=segment.kv, nbytes=segment.nbytes)
        self.pieces.append(piece)
        self._tokens += [int(token) for token in tokens]
        if segment.name and self._done == self.batches.end:  # a skill, not rows of an evicted prefix
            self.batches = Batches(len(self), (), len(self), len(self))
        self._done = len(self)
        self._logits = None

    def append_image(
        self,
        embeddings: ImageEmbeddings,
        kind: str = "image",
        name: str = "",
        reason: Reason = Reason.PLAIN,
        detail: str = "",
    ) -> None:
        """Append an encoded image: decode its embeddings and the tokens around them."""
        self._check_room(len(embeddings.tokens))
        self.pieces.append(Piece(kind, name, len(self), len(embeddings.tokens), "decoded", reason, detail))
        start, base, done = len(self), self.position(len(self)), 0
        rows = iter(embeddings.rows)
        try:
            for image in images_of(embeddings.media, start, embeddings.axes):
                self._tokens += [int(token) for token in embeddings.tokens[done : image.first - start]]
                self.flush()
                began = time.perf_counter()
                inside = slice(image.first - start, image.last - start)
                if not self.dry:
                    at = self.position(len(self))
                    axes = None if embeddings.axes is None else embeddings.axes[inside] + base - at
                    self.context.decode_embeddings(self.seq_id, at, next(rows), axes, whole=embeddings.whole)
                self._images.append(image)
                self._tokens += [int(token) for token in embeddings.tokens[inside]]
                self._done = len(self)
                self.seconds["decode"] += time.perf_counter() - began
                done = inside.stop
        except BaseException:
            self.truncate(start)
            raise
        self._tokens += [int(token) for token in embeddings.tokens[done:]]
        self._logits = None

    def carry_task(self, segment: Segment, *, rotate: bool = True) -> Task[None]:
        """Append a segment: decode its first tokens again, place the rows of attention, and carry the state of
        recurrent layers through them; the last tokens that must be decoded there are pending.

        The caller has compared identities. `rotate=False` is the control, which must give wrong rows.
        """
        from notes_cli.engine import recurrent  # few models have recurrent layers

        assert segment.carry is not None
        seam, last = segment.carry.seam, len(segment) - segment.carry.tail
        self._check_room(len(segment))
        self.append(segment.tokens[:seam], "splice", segment.name, "seam", Reason.OTHER_CONTEXT)
        while self.pending and not self.dry:
            yield [self]
        self.flush()
        position, base = self.position(len(self)), segment.base + seam
        started = time.perf_counter()
        if not self.dry:
            cut = slice(base - segment.first, segment.base + last - segment.first)
            rows = [layer if layer.part == "state" else layer.cut(cut) for layer in segment.layers]
            transitions = segment.carry.load()
            where = self.seq_id, position, segment.tokens[seam:last]
            recurrent.carry(self.context, *where, rows, transitions, base if rotate else position)
        self._add_spliced(segment, segment.tokens[seam:last], started, Reason.CARRIED, position - base, rotate)
        self.append(segment.tokens[last:], "splice", segment.name, "seam", Reason.OTHER_CONTEXT)

    def restore(self, segment: Segment) -> None:
        """Restore a segment whose K/V begins at position 0. Raises EngineError unless the sequence is exactly its left
        context, not decoded yet."""
        if self._done or not (self.dry or self.intact) or not np.array_equal(self.tokens, segment.context):
            raise EngineError(f"{segment.name} can only be restored at the start of a sequence, after its left context")
        self._check_room(len(segment))
        started = time.perf_counter()
        if not self.dry:
            tokens, axes = np.concatenate([segment.context, segment.tokens]), segment.axes
            if axes is not None:
                before = np.repeat(np.arange(segment.base, dtype=np.int32)[:, None], 3, 1)
                axes = np.concatenate([before, axes + segment.base])
            try:
                self.context.splice(self.seq_id, 0, tokens, segment.layers, 0, axes=axes)
            except BaseException:  # as in splice
                self.context.truncate(self.seq_id, 0)
                raise
        changes = {"how": "spliced", "reason": Reason.RESTORED_CONTEXT, "detail": segment.name}
        self.pieces = [replace(piece, **changes) for piece in self.pieces]  # type: ignore[arg-type]
        self._images += images_of(segment.media, len(self), segment.axes)
        self._add_spliced(segment, segment.tokens, started, Reason.RESTORED)

    # Decoding. A loop takes the pending tokens, decodes them, possibly with those of others, and calls `advance`.

    @property
    def pending(self) -> Sequence[int]:
        """Tokens that are not decoded yet."""
        return self._tokens[self._done :]

    def divide(self, at: int | None = None) -> None:
        """End a batch after the first `at` tokens, by default after all: later ones are not decoded together
        with these."""
        at = len(self) if at is None else at
        if at > self._done and at not in self._divisions:
            insort(self._divisions, at)

    def keep_states(self, after: Iterable[int]) -> None:
        """Keep the recurrent state (`states`) after so many of its present tokens, where batches end for that."""
        for at in after:
            if self._done < at <= len(self):
                self.divide(at)
                self.states_due.add(at)
            elif at == self._done and at not in self.states and not self.dry:
                self._keep_state()

    def _keep_state(self) -> None:
        with suppress(EngineError, MemoryError):  # without it more is decoded again
            self.states[self._done] = self.context.state(self.seq_id)

    def restore_states(self, states: Mapping[int, State]) -> None:
        """Set the recurrent states after so many tokens, and go on from that after all of them."""
        self.states = dict(states)
        if not self.dry:
            self.context.set_state(self.seq_id, self.position(len(self)), states[len(self)])

    @property
    def batch(self) -> int:
        """Number of pending tokens that may go into the next batch."""
        end = next((at for at in self._divisions if at > self._done), len(self))
        return end - self._done

    @property
    def undivided(self) -> int:
        """Number of pending tokens after the last division."""
        return len(self) - max([self._done, *self._divisions[-1:]])

    @property
    def divided(self) -> bool:
        """True if all tokens before the last division are decoded."""
        return not self._divisions or self._done >= self._divisions[-1]

    def advance(self, count: int, outputs: range, *, alone: bool) -> None:
        """Record that the first `count` pending tokens are decoded. `outputs`: indices of their logits in the batch;
        `alone`: it has tokens of no other sequence."""
        end = self._done + count
        if alone and self._done == self.batches.whole:
            self.batches = self.batches._replace(whole=end - count % self.context.n_prefill, end=end)
            if end in self._divisions:
                self.batches = self.batches._replace(cuts=(*self.batches.cuts, end), whole=end)
        self._done = end
        if end in self.states_due:
            self.states_due.remove(end)
            self._keep_state()
        try:
            logits = [self.context.logits(index) for index in outputs]
        except EngineError as error:
            self._logits = error
            return
        self._logits = logits[-1] if logits and not self.pending else None
        if self.every is not None:
            self.every += logits

    def resync(self) -> None:
        """Resynchronise after a failed or interrupted decode: decoded tokens count, the rest stays pending."""
        length = self.context.length(self.seq_id)
        self._done = min(len(self), row(self._images, length) if self._images else length)
        self._logits = None

    def preempt(self, length: int) -> None:
        """Preempt: drop the K/V from position `length` on to free its cells; the tokens are pending again. Raises
        EngineError where the sequence cannot be rolled back."""
        if length < self._done:
            if any(image.last > length for image in self._images):
                raise EngineError("the rows of an image cannot be decoded again as tokens")
            self._go_back(min((rows for rows in self.states if rows >= length), default=length))

    def check_intact(self) -> None:
        """Raise EngineError unless decoding can continue from the present K/V."""
        if not self.intact:
            raise EngineError("the sequence of this sequence was closed, or changed by other code: assemble it again")

    def try_logits(self) -> Logits | None:
        """Return the logits after the last token, or None if decoding the pending tokens will give them. Raises
        EngineError where the last token was spliced, or its logits are NaN."""
        if isinstance(self._logits, EngineError):
            raise self._logits
        if not self.pending and self._logits is None:
            image = bool(self._images) and self._images[-1].last == len(self)
            if self.dry or not self.pieces or self.pieces[-1].how == "spliced" or image:
                raise EngineError("a spliced row has no logits: append a token after it")
            # decoded, but without logits, after truncate, rewrite or an interrupt: the last token is pending again
            self.check_intact()
            self.context.truncate(self.seq_id, self.position(len(self) - 1))
            self._done = len(self) - 1
            self._cut_batches(self._done)
        return None if self.pending else self._logits

    def flush(self, progress: Progress | None = None) -> None:
        """Decode all pending tokens. After a failure or an interrupt, decoded tokens stay and the rest is pending.
        `progress` is called per micro-batch."""
        if self.dry:
            self._done = len(self)
            return
        total = len(self.pending)
        while self.pending:
            left = len(self.pending)
            decode([self], self.context.n_ubatch if progress else None)
            self.flushed.append(left - len(self.pending))
            if progress:
                progress(total - len(self.pending), total)
        self.check_intact()
        if isinstance(self._logits, EngineError):
            raise self._logits

    def rewrite(self, positions: list[int], tokens: Tokens) -> None:
        """Replace single tokens and recompute their K/V in place."""
        self.replace(
            [Patch(position, position + 1, (int(token),)) for position, token in zip(positions, tokens, strict=True)]
        )

    def replace(self, patches: Sequence[Patch], also: Sequence[int] = ()) -> int:
        """Replace token ranges in one pass; returns the number of tokens decoded. Patches ascend. Everything after a
        patch of another length is moved, its keys rotated. An image is removed as a whole. `also`: rows outside the
        patches to recompute, too."""
        self.flush()
        valid = is_ascending([patch.span for patch in patches], len(self))
        if not patches or not valid or any(patch.first == patch.last for patch in patches):
            raise EngineError(f"changes must ascend inside of the sequence, which has {len(self)} tokens")
        check_no_images(self._images, also)
        removed = removed_images(self._images, [patch.span for patch in patches])
        self._check_room(sum(patch.grows for patch in patches))
        moves = bool(removed) or any(patch.grows for patch in patches)
        tokens, shift, new = apply_patches(self._tokens, patches), position_map(patches), new_positions(patches)
        recomputed = new | set(map(shift, also))
        remaining = [image for image in self._images if image not in removed]
        images = [
            replace(image, first=shift(image.first), last=shift(image.first) + image.last - image.first)
            for image in remaining
        ]
        tails = self._tails(patches, images) if moves else []
        started = time.perf_counter()
        try:
            if moves and not self.dry:
                # Rewriting fills gaps between entries, so at position 0 the old entry stays until then.
                self.context.truncate(self.seq_id, self.position(max(patches[0].first, 1 if 0 in new else 0)))
                for tail in tails:
                    moved = np.array(self._tokens[tail.start : tail.end], np.int32)
                    self.context.splice(self.seq_id, tail.to, moved, tail.rows, tail.at, axes=tail.axes)
            length = len(tokens) if self.dry else self.context.length(self.seq_id)
            self._done = row(images, length) if images and not self.dry else length
            ready = sorted(row_index for row_index in recomputed if row_index < self._done)
            if ready and not self.dry:  # the rest is at the end and stays pending
                at = [position(images, row_index) for row_index in ready] if images else ready
                self.context.rewrite(self.seq_id, at, np.array([tokens[row_index] for row_index in ready], np.int32))
        except BaseException as error:
            self._done = min(self._done, len(self))
            if moves or not isinstance(error, EngineError):  # after an interrupt the state is unknown
                self.truncate(patches[0].first)  # everything before the first patch is valid
            raise
        finally:
            self.seconds["decode"] += time.perf_counter() - started
        self._tokens[:] = tokens
        self._images = images
        self._logits, self._divisions, self.batches, self.states = None, [], Batches(), {}
        pieces, self.pieces = self.pieces, []
        for piece in pieces:
            start, end = shift(piece.position), shift(piece.position + piece.tokens)
            if start < end:
                count = sum(start <= row_index < end for row_index in recomputed)
                self.pieces.append(replace(piece, position=start).resized(end - start, piece.rewritten + count))
        return len(recomputed)

    def _tails(self, patches: Sequence[Patch], images: Sequence[Image]) -> list[_Tail]:
        """Return the moved ranges after the patches. Raises UnsupportedError if one cannot be moved."""
        parts = [part for part in align(patches, len(self)) if not part.patch and part.before[0] >= patches[0].last]
        moves = []
        for part in parts:
            start, end = part.before
            at, to = self.position(start), position(images, part.after[0])
            if reason := self.context.can_move(at, to, self.position(end) - at):
                raise UnsupportedError(f"what follows the change cannot be moved: {reason}")
            moves.append((start, end, at, to))
        return [] if self.dry else [_Tail(*move, *self.read(*move[:2], self.context.lossless_type)) for move in moves]

    def read(self, start: int, end: int, dtype: str) -> tuple[tuple[LayerRows, ...], NDArray[np.int32] | None]:
        """Read the K/V of rows [start, end) without rotating it, and positions on three axes if images share them."""
        at = self.position(start)
        if any(start <= image.first < end and image.grid is not None for image in self._images):
            return self.context.read_axes(self.seq_id, at, end - start, base=at, dtype=dtype)
        return self.context.read(self.seq_id, at, end - start, base=at, dtype=dtype), None

    def truncate(self, length: int) -> None:
        """Drop all but the first `length` tokens. Raises EngineError for a cut within an image."""
        if not 0 <= length <= len(self):
            raise EngineError(f"cannot go back to {length} tokens, the sequence has {len(self)}")
        self._divisions = [at for at in self._divisions if at <= length]
        if length < self._done:
            self._go_back(length)
        del self._tokens[length:]
        self._images = [image for image in self._images if image.last <= length]
        self.pieces = self._cut_pieces(length)
        self._logits = None

    def _go_back(self, length: int) -> None:
        """Drop the K/V of all but the first `length` tokens. Raises EngineError where that is not possible."""
        at, state = self.position(length), self.states.get(length)
        if state is not None and not self.dry:
            self.context.set_state(self.seq_id, at, state)
        elif not self.dry:
            self.context.truncate(self.seq_id, at)
        self._done, self._logits = length, None
        self.states = {rows: state for rows, state in self.states.items() if rows <= length}
        self._cut_batches(length)

    def next_logits(self) -> Task[Logits]:
        """Decode the pending tokens and return the logits after the last token, [n_vocab]. Raises EngineError if that
        was spliced."""
        while (logits := self.try_logits()) is None:
            yield [self]
        return logits

    def logits(self) -> Logits:
        """As `next_logits`, not as a task."""
        result = run(self.next_logits())
        self.check_intact()
        return result

    def lookahead(self, tokens: Sequence[int]) -> Logits:
        """As `lookahead_task`, not as a task."""
        self.flush()
        return run(self.lookahead_task(tokens))

    def lookahead_task(self, tokens: Sequence[int]) -> Task[Logits]:
        """Return the logits after each of these tokens as a continuation, [len(tokens), n_vocab], leaving the sequence,
        which has no pending tokens, unchanged."""
        with self._branch() as branch:
            branch.append(tokens)
            while branch.pending:
                yield [branch]
                branch.try_logits()  # raises for NaN
            return np.array(branch.every, np.float32).reshape(len(tokens), self.context.model.n_vocab)

    @contextmanager
    def _branch(self) -> Iterator[KVSequence]:
        """Yield a sequence that continues this one and keeps all logits. This one is as before afterwards."""
        if self.context.model.recurrent:  # a state cannot be rolled back
            with self.share() as branch:
                branch.every = []
                yield branch
            return
        branch, length = copy(self), len(self)
        branch.pieces, branch.every = [], []
        try:
            with self.context.rolling_back(self.seq_id):
                yield branch
        finally:
            del self._tokens[length:]  # shared with the branch

    def generate(self, sampler: Sampler, limit: int) -> Iterator[int]:
        """Generate at most `limit` tokens, yielding each; stops before an end token or at a full context, see
        `stopped`. Raises EngineError without space for the first token."""
        generator = TokenGenerator(self, sampler, limit)
        while generator.active:
            token = generator.choose(self.logits())
            if token is not None:
                yield token

    @property
    def decoded(self) -> int:
        """Number of tokens computed: all but the spliced ones, plus those recomputed in place."""
        reused = ("spliced", "live")
        return len(self) - sum(piece.tokens - piece.rewritten for piece in self.pieces if piece.how in reused)

    def count(self, how: How) -> int:
        """Return the number of tokens of all pieces with this `how`."""
        return sum(piece.tokens for piece in self.pieces if piece.how == how)

    @property
    def room(self) -> int:
        """Number of tokens that can still be appended; pending ones are counted as present."""
        if self.dry:
            return self.size - len(self)
        return min(self.size - len(self), self.context.room(self.seq_id) - len(self.pending))

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the last piece. Raises EngineError without space for them."""
        new = [int(token) for token in tokens]
        self._check_room(len(new))
        self._tokens += new
        self._logits = None
        last = self.pieces[-1]
        self.pieces[-1] = last.resized(last.tokens + len(new), last.rewritten)

    def _check_room(self, count: int) -> None:
        if count <= self.room:
            return
        size, total = self.size, len(self) + count
        if total > size:
            raise ContextLengthError(
                f"the context is too small: {total} tokens do not fit {size}",
                Help.LARGER_CONTEXT(tokens=_next_size(total)),
                tokens=total,
                longest=size,
            )
        raise EngineError(
            f"the context is full: {self.room} of its {self.context.cells} cells are free, {count} are needed",
            Help.LARGER_CONTEXT(tokens=_next_size(self.context.cells + count - self.room)),
        )


def skill_divisions(count: int, size: int) -> list[int]:
    """Return after how many tokens of a skill of `count` a batch ends that need not, in micro-batches of `size`."""
    return [*(accumulate(FIRST) if count > max(size, 2 * sum(FIRST)) else ()), count]


def skill_batches(before: int, count: int, size: int, threads: int) -> tuple[MicroBatches, ...]:
    """Return how a prefill computes a skill of `count` tokens, and as many tokens `before` it."""
    divisions = [0, *skill_divisions(count, size)]
    return micro_batches([before, *(end - start for start, end in pairwise(divisions))], size, threads)


def _next_size(tokens: int) -> int:
    return -(-(tokens + 256) // 1024) * 1024


def run(task: Task[T]) -> T:
    """Run one task to its end and return its result. Errors are raised in the task at its yield, and end it."""
    try:
        sequences = next(task)
        while True:
            try:
                decode(sequences)
            except NotesError as error:
                throw(task, error)
            sequences = next(task)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        task.close()


def throw(task: Task[T], error: NotesError) -> None:
    """Raise an error in a task at its yield. Raises StopIteration, or the error that the task raises for it."""
    task.throw(error)
    raise EngineError("a task went on after an error")


def decode(sequences: Sequence[KVSequence], limit: int | None = None) -> None:
    """Decode pending tokens of all sequences in one batch of at most `limit` tokens. A sequence whose tokens are all
    decoded has its logits afterwards. NaN logits are an error of one sequence, which raises it when its logits are
    requested. After an interrupt or a failure each sequence keeps its decoded tokens; the rest stays pending."""
    context = sequences[0].context
    for sequence in sequences:
        sequence.check_intact()
    if not any(sequence.pending for sequence in sequences):
        return
    size = min(context.stride, limit or context.stride)
    shares = fair_shares([sequence.batch for sequence in sequences], size)
    parts = [(sequence, count) for sequence, count in zip(sequences, shares, strict=True) if count]
    outputs: dict[int, Output] = {}
    for sequence, count in parts:
        complete = count == len(sequence.pending)
        outputs[sequence.seq_id] = "all" if sequence.every is not None else "last" if complete else "none"
    started, late = time.perf_counter(), None
    try:
        context.append({seq.seq_id: np.array(seq.pending[:count], np.int32) for seq, count in parts}, outputs)
    except BaseException as error:
        if any(context.length(seq.seq_id) != seq.length(seq.rows + count) for seq, count in parts):
            for sequence in sequences:
                sequence.resync()
            raise
        late = error  # an interrupt raised after the call had completed
    finally:
        for sequence in sequences:
            sequence.seconds["decode"] += time.perf_counter() - started
    numbers = [{"none": 0, "last": 1, "all": count}[outputs[sequence.seq_id]] for sequence, count in parts]
    index = -sum(numbers)
    for (sequence, count), number in zip(parts, numbers, strict=True):
        sequence.advance(count, range(index, index + number), alone=len(parts) == 1)
        index += number
    try:
        if late is not None:
            raise late
    finally:
        del late  # the traceback refers to this frame: nothing would be freed before a full collection


def fair_shares(wanted: Sequence[int], size: int) -> list[int]:
    """Return shares of a total of at most `size`: small requests in full, large ones equally."""
    left, shares = size, [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for done, index in enumerate(order):
        shares[index] = min(wanted[index], left // (len(order) - done))
        left -= shares[index]
    return shares


class TokenGenerator:
    """Generates at most `limit` tokens at the end of a sequence. The caller computes the logits and calls `choose`
    while `active` is true."""

    def __init__(self, sequence: KVSequence, sampler: Sampler, limit: int) -> None:
        self.sequence, self.sampler, self.limit = sequence, sampler, limit
        self.count = 0  # tokens generated
        self.active = limit > 0
        sequence.stopped = "length"

    def choose(self, logits: Logits) -> int | None:
        """Sample the next token and append it; None if generation ends, see `sequence.stopped`. Raises EngineError
        without space for the first token."""
        seq, ends = self.sequence, self.sequence.context.model.ends
        if self.count == self.limit:  # would the next token be an end token?
            self.active = False
            if ends(self.sampler.likeliest(logits)):
                seq.stopped = "end"
            return None
        token = self.sampler.next(logits)
        if ends(token):
            self.active, seq.stopped = False, "end"
            return None
        if not self.count:
            seq.append([token], "answer")
        else:
            try:
                seq.extend([token])
            except EngineError:
                self.active, seq.stopped = False, "context"
                return None
        self.count += 1
        return token
