"""A sequence: one sequence in a context, an ordered list of pieces with their tokens, positions and K/V.

Pieces are text that is decoded, segments that are spliced in, errata and answers. Decoding is put off until a
splice or logits need it, so that neighbouring pieces share one pass over the weights. Which tokens share a batch
changes the last bits of their rows, so it follows from the tokens and splices alone (`divide`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.context import Context
from notes_cli.engine.decoding import decode
from notes_cli.engine.image_positions import Image, check_no_images, images_of, length, position, removed_images, row
from notes_cli.engine.patches import Patch, align, apply_patches, is_ascending, new_positions, position_map
from notes_cli.engine.pieces import How, Piece, Reason
from notes_cli.engine.sampler import Sampler
from notes_cli.engine.segment import LayerRows, Segment, Tokens, quantized
from notes_cli.engine.seq_pool import Lease
from notes_cli.engine.token_generator import TokenGenerator
from notes_cli.errors import ContextLengthError, EngineError, Help, Progress, UnsupportedError

if TYPE_CHECKING:
    from notes_cli.engine.vision import ImageEmbeddings


Stopped = Literal["end", "length", "context"]  # why an answer ends: by itself, at max_tokens, or with the context


class _Tail(NamedTuple):
    """Rows [start, end) of a sequence that are moved: the positions of the first, and axes where images share them."""

    start: int
    end: int
    at: int
    to: int
    rows: tuple[LayerRows, ...]
    axes: NDArray[np.int32] | None


class KVSequence:
    """One sequence of a context. Rows are counted 0, 1, ..., in the order of the pieces, one for each token; so are
    positions, but for images whose rows share them (places.py).

    Close it, or use it as a context manager, and its sequence is free for others.
    """

    def __init__(self, context: Context, lease: Lease | None = None, *, dry: bool = False) -> None:
        """An empty sequence in a sequence of its own: `lease`, or one that the context has free. `dry`: keep the list
        of pieces but compute nothing, to tell beforehand what would be done."""
        self.context = context
        self.dry = dry
        self.pieces: list[Piece] = []
        self.seconds = {"splice": 0.0, "decode": 0.0}
        self.stopped: Stopped = "end"  # why the last answer ends
        self._lease = None if dry else lease or context.lease()
        self._tokens: list[int] = self._lease.tokens if self._lease else []
        self._images: list[Image] = []
        self._done = 0  # tokens that have rows; the rest is pending, and holds no image
        self._divided = 0  # tokens before this one go into no batch with it and those after it
        self._logits: NDArray[np.float32] | EngineError | None = None  # after the last token, or why there are none
        # Tokens that it may have at most: fewer than the context has where others need room, too, and more where the
        # context is made larger while an answer is written (serve/kv_budget.py). None: those of the context.
        self.token_limit: int | None = None

    @property
    def size(self) -> int:
        """Tokens that it can have at most."""
        return self.context.n_ctx if self.token_limit is None else self.token_limit

    @property
    def seq_id(self) -> int:
        """The number of its sequence. Raise EngineError if that is not its own any more."""
        if self._lease is None:
            raise EngineError("a dry sequence has no place in the cache")
        return self._lease.id

    def close(self) -> None:
        """Give its sequence back; the rows are gone."""
        if self._lease is not None:
            self._lease.close()

    def __enter__(self) -> KVSequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokens(self) -> Tokens:
        return np.array(self._tokens, np.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def intact(self) -> bool:
        """Whether the context still holds the rows of this sequence: it has not been closed, nor its rows changed by
        other code."""
        held = self._lease is not None and self._lease.held
        return held and self.context.length(self.seq_id) == self.length(self._done)

    def position(self, row: int) -> int:
        """The position of a row, or of what comes after the last."""
        return position(self._images, row) if self._images else row

    def length(self, rows: int) -> int:
        """What the context has as the length of its sequence when so many rows are there."""
        return length(self._images, rows) if self._images else rows

    @property
    def images(self) -> Sequence[Image]:
        """The rows of images among its rows."""
        return self._images

    @property
    def rows(self) -> int:
        """How many of its tokens have rows; the rest is pending."""
        return self._done

    def share(self, length: int | None = None, *, dry: bool = False) -> KVSequence:
        """A second sequence that goes on from here, or after the first `length` tokens, whose rows are there. It has
        the same rows in the same cells, until one of the two is rewritten; a `dry` one has none. Raise UnsupportedError
        where sequences cannot share, EngineError for more rows than there are."""
        dry = dry or self.dry
        if length is None:
            self.flush()
            length = len(self)
        elif not 0 <= length <= self._done:
            raise EngineError(f"{length} rows cannot be shared, the sequence has {self._done}")
        at = self.position(length)
        other = KVSequence(self.context, None if dry else self.context.share(self.seq_id, at), dry=dry)
        other._tokens += self._tokens[:length]
        other._images = [image for image in self._images if image.last <= length]
        other._done, other._logits = length, self._logits if length == len(self) else None
        other.pieces = self._cut_pieces(length)
        return other

    def share_rows(self) -> KVSequence:
        """A second sequence with the same tokens, which shares the rows that are there; what is pending each decodes by
        itself. Raise UnsupportedError where sequences cannot share."""
        rows = self.length(self._done)
        other = KVSequence(self.context, self.context.share(self.seq_id, rows) if rows else None, dry=self.dry)
        other._tokens += self._tokens
        other._images, other.pieces = [*self._images], [*self.pieces]
        other._done, other._divided, other._logits = self._done, self._divided, self._logits
        return other

    def _cut_pieces(self, length: int) -> list[Piece]:
        """Those of the first `length` tokens."""
        kept = [piece for piece in self.pieces if piece.position < length]
        return [piece.resized(min(piece.tokens, length - piece.position), piece.rewritten) for piece in kept]

    def append(
        self,
        tokens: Iterable[int],
        kind: str = "text",
        name: str = "",
        how: How = "decoded",
        reason: Reason = Reason.PLAIN,
        detail: str = "",
    ) -> None:
        """Add tokens at the end; `reason` and `detail` as a Piece has them."""
        new = [int(token) for token in tokens]
        if not new:
            return
        self._check_room(len(new))
        self.pieces.append(Piece(kind, name, len(self), len(new), how, reason, detail))
        self._tokens += new
        self._logits = None

    def open_splice(self, segment: Segment, seam: int) -> None:
        """Put the first `seam` tokens of a segment at the end, which are decoded again; `splice` goes on from there.
        The rows of an image are not decoded again: the seam ends before them."""
        seam = min(seam, segment.max_seam)
        self._check_room(len(segment))
        self.append(segment.tokens[:seam], "splice", segment.name, "seam", Reason.OTHER_CONTEXT)

    def splice(self, segment: Segment, *, seam: int = 0, rotate: bool = True, opened: bool = False) -> None:
        """Put a segment at the end: its first `seam` tokens are decoded again, the rows of the rest are placed.

        `opened`: the seam is there already. The caller has compared identities. `rotate=False` is the control, which
        must give wrong rows.
        """
        seam = min(seam, segment.max_seam)
        if not opened:
            self.open_splice(segment, seam)
        rest = len(segment) - seam
        if not rest:
            return
        self.flush()
        at, position = len(self), self.position(len(self))
        started = time.perf_counter()
        if not self.dry:
            try:
                tokens, base = segment.tokens[seam:], segment.base + seam
                axes = None if segment.axes is None else segment.axes[seam:] + segment.base
                where = self.seq_id, position, tokens, segment.layers, base
                self.context.splice(*where, first=seam, rotate=rotate, axes=axes)
            except BaseException:  # an interrupt comes after the call that it waited for: those rows are there
                self.context.truncate(self.seq_id, position)
                raise
        self.seconds["splice"] += time.perf_counter() - started
        moved = position - segment.base - seam
        placed = Piece("splice", segment.name, at, rest, "spliced", Reason.MOVED if moved else Reason.UNMOVED)
        if moved and not rotate:
            placed = replace(placed, reason=Reason.NOT_ROTATED, detail=f"{moved:+d}")
        else:
            placed = replace(placed, moved=moved)
        self.pieces.append(replace(placed, blocks=len(segment.blocks), **_kept(segment)))
        self._images += images_of(segment.media, at - seam, segment.axes)
        self._tokens += [int(token) for token in segment.tokens[seam:]]
        self._done = len(self)
        self._logits = None

    def append_image(
        self,
        seen: ImageEmbeddings,
        kind: str = "image",
        name: str = "",
        reason: Reason = Reason.PLAIN,
        detail: str = "",
    ) -> None:
        """Put an image at the end, looked at just now: the tokens around its rows, and the rows, are decoded."""
        self._check_room(len(seen.tokens))
        self.pieces.append(Piece(kind, name, len(self), len(seen.tokens), "decoded", reason, detail))
        start, begin, done = len(self), self.position(len(self)), 0
        rows = iter(seen.rows)
        try:
            for image in images_of(seen.media, start, seen.axes):
                self._tokens += [int(token) for token in seen.tokens[done : image.first - start]]
                self.flush()
                began = time.perf_counter()
                inside = slice(image.first - start, image.last - start)
                if not self.dry:
                    at = self.position(len(self))
                    axes = None if seen.axes is None else seen.axes[inside] + begin - at
                    self.context.decode_embeddings(self.seq_id, at, next(rows), axes, whole=seen.whole)
                self._images.append(image)
                self._tokens += [int(token) for token in seen.tokens[inside]]
                self._done = len(self)
                self.seconds["decode"] += time.perf_counter() - began
                done = inside.stop
        except BaseException:
            self.truncate(start)
            raise
        self._tokens += [int(token) for token in seen.tokens[done:]]
        self._logits = None

    def open_carry(self, segment: Segment) -> None:
        """Put the first tokens of a segment at the end, which are decoded again; `carry` goes on from there."""
        assert segment.carry is not None
        self.open_splice(segment, segment.carry.seam)

    def carry(self, segment: Segment, *, rotate: bool = True) -> None:
        """Put the rest of a segment at the end, after `open_carry`: the rows of attention are placed, and the state of
        recurrent layers goes on through them; the last tokens that must be decoded there are pending.

        The caller has compared identities. `rotate=False` is the control, which must give wrong rows.
        """
        from notes_cli.engine import recurrent  # few models have recurrent layers

        assert segment.carry is not None
        seam, last = segment.carry.seam, len(segment) - segment.carry.tail
        self.flush()
        at, position, base = len(self), self.position(len(self)), segment.base + seam
        started = time.perf_counter()
        if not self.dry:
            cut = slice(base - segment.first, segment.base + last - segment.first)
            rows = [one if one.part == "state" else one.cut(cut) for one in segment.layers]
            transitions = segment.carry.load()
            where = self.seq_id, position, segment.tokens[seam:last]
            recurrent.carry(self.context, *where, rows, transitions, base if rotate else position)
        self.seconds["splice"] += time.perf_counter() - started
        piece = Piece("splice", segment.name, at, last - seam, "spliced", Reason.CARRIED, **_kept(segment))
        moved = position - base
        if moved and not rotate:
            piece = replace(piece, reason=Reason.NOT_ROTATED, detail=f"{moved:+d}")
        else:
            piece = replace(piece, moved=moved)
        self.pieces.append(piece)
        self._tokens += [int(token) for token in segment.tokens[seam:last]]
        self._done = len(self)
        self._logits = None
        self.append(segment.tokens[last:], "splice", segment.name, "seam", Reason.OTHER_CONTEXT)

    def restore(self, segment: Segment) -> None:
        """Put back a segment whose rows begin at position 0. The sequence holds its left context and nothing more."""
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
        self.seconds["splice"] += time.perf_counter() - started
        with_it = {"how": "spliced", "reason": Reason.RESTORED_CONTEXT, "detail": segment.name}
        self.pieces = [replace(piece, **with_it) for piece in self.pieces]  # type: ignore[arg-type]
        restored = Piece("splice", segment.name, len(self), len(segment), "spliced", Reason.RESTORED)
        self.pieces.append(replace(restored, **_kept(segment)))
        self._images += images_of(segment.media, len(self), segment.axes)
        self._tokens += [int(token) for token in segment.tokens]
        self._done = len(self)
        self._logits = None

    # Decoding. A loop asks a sequence what is pending, decodes it, perhaps with that of others, and tells it.

    @property
    def pending(self) -> Sequence[int]:
        """The tokens that wait to be decoded."""
        return self._tokens[self._done :]

    def divide(self) -> None:
        """End the batch here: later tokens are not decoded with those that are pending now."""
        self._divided = len(self)

    @property
    def batch(self) -> int:
        """How many of the pending tokens may go into the next batch."""
        return len(self.pending) if self._done >= self._divided else self._divided - self._done

    def flush_divided(self, progress: Progress | None = None) -> None:
        """Decode what is pending before the place where it was divided, as `flush` does, and leave the rest pending."""
        total = max(0, self._divided - self._done)
        while self._done < self._divided:
            decode([self], self.context.n_ubatch if progress else None)
            if progress:
                progress(total - max(0, self._divided - self._done), total)

    def advance(self, count: int, logits: NDArray[np.float32] | EngineError | None = None) -> None:
        """The first `count` pending tokens have rows now; `logits` are those after the last of all tokens, or why there
        are none."""
        self._done += count
        self._logits = logits if self._done == len(self) else None

    def resync(self) -> None:
        """A decode has failed or was interrupted: what of it is there counts, the rest is still pending."""
        self._done = min(len(self), self._row(self.context.length(self.seq_id)))
        self._logits = None

    def _row(self, position: int) -> int:
        """The row at a position."""
        return row(self._images, position) if self._images else position

    def preempt(self, length: int) -> None:
        """Give up the rows from position `length` on, so that others have their cells; their tokens are pending
        again. They must have been decoded. Raise EngineError where rows cannot go back."""
        if length < self._done:
            if any(image.last > length for image in self._images):
                raise EngineError("the rows of an image cannot be decoded again as tokens")
            self.context.truncate(self.seq_id, self.position(length))
            self._done, self._logits = length, None

    def check_intact(self) -> None:
        """Raise EngineError unless decoding can go on from the rows that there are."""
        if not self.intact:
            raise EngineError("the sequence of this sequence was closed, or changed by other code: assemble it again")

    def try_logits(self) -> NDArray[np.float32] | None:
        """The logits after the last token if they are there; else see to it that some token is pending whose decoding
        gives them. Raise EngineError where the last token was spliced, or what it gives are not numbers."""
        if isinstance(self._logits, EngineError):
            raise self._logits
        if not self.pending and self._logits is None:
            image = bool(self._images) and self._images[-1].last == len(self)
            if self.dry or not self.pieces or self.pieces[-1].how == "spliced" or image:
                raise EngineError("a spliced row has no logits: append a token after it")
            self._step_back()  # its row is there, its logits are not: after truncate, rewrite or an interrupt
        return None if self.pending else self._logits

    def _step_back(self) -> None:
        """Have the last token decoded once more."""
        self.check_intact()
        self.context.truncate(self.seq_id, self.position(len(self) - 1))
        self._done = len(self) - 1

    def flush(self, progress: Progress | None = None, first: Sequence[int] = ()) -> None:
        """Decode what is pending. If that fails or is interrupted, what has been decoded stays, the rest is pending.

        `progress` is told of each micro-batch; `first`: tokens of the first ones, by which a speed is known early.
        """
        if self.dry:
            self._done = len(self)
            return
        total, sizes = len(self.pending), iter(first)
        while self.pending:
            decode([self], min(next(sizes, self.context.n_ubatch), self.context.n_ubatch) if progress else None)
            if progress:
                progress(total - len(self.pending), total)
        self.check_intact()
        if isinstance(self._logits, EngineError):
            raise self._logits

    def rewrite(self, positions: list[int], tokens: Tokens) -> None:
        """Replace tokens inside the sequence and recompute their rows, and only theirs, in place."""
        self.replace(
            [Patch(position, position + 1, (int(token),)) for position, token in zip(positions, tokens, strict=True)]
        )

    def replace(self, patches: Sequence[Patch], also: Sequence[int] = ()) -> int:
        """Put other tokens in place of some, in one pass; returns how many were decoded.

        Patches ascend. What follows one of another length is moved, its keys rotated. An image gives way as a whole.
        `also`: rows outside of the patches that are recomputed with them.
        """
        self.flush()
        inside = is_ascending([patch.span for patch in patches], len(self))
        if not patches or not inside or any(patch.first == patch.last for patch in patches):
            raise EngineError(f"changes must ascend inside of the sequence, which has {len(self)} tokens")
        check_no_images(self._images, also)
        out = removed_images(self._images, [patch.span for patch in patches])
        self._check_room(sum(patch.grows for patch in patches))
        moves = bool(out) or any(patch.grows for patch in patches)
        tokens, shift, new = apply_patches(self._tokens, patches), position_map(patches), new_positions(patches)
        places = new | set(map(shift, also))
        left = [one for one in self._images if one not in out]
        images = [replace(one, first=shift(one.first), last=shift(one.first) + one.last - one.first) for one in left]
        tails = self._tails(patches, images) if moves else []
        started = time.perf_counter()
        try:
            if moves and not self.dry:
                # Rewriting fills gaps between rows: at position 0 the old one stays until then.
                self._spread(max(patches[0].first, 1 if 0 in new else 0), tails)
            self._done = len(tokens) if self.dry else row(images, self.context.length(self.seq_id))
            ready = sorted(place for place in places if place < self._done)
            if ready and not self.dry:  # the rest is at the end, and is decoded with what comes after it
                where = [position(images, place) for place in ready] if images else ready
                self.context.rewrite(self.seq_id, where, np.array([tokens[place] for place in ready], np.int32))
        except BaseException as error:
            self._done = min(self._done, len(self))
            if moves or not isinstance(error, EngineError):  # an interrupt: who can say before or after?
                self.truncate(patches[0].first)  # what precedes the first patch is right
            raise
        finally:
            self.seconds["decode"] += time.perf_counter() - started
        self._tokens[:] = tokens
        self._images = images
        self._logits = None
        amended = (self._amended(piece, shift, places) for piece in self.pieces)
        self.pieces = [piece for piece in amended if piece.tokens]
        return len(places)

    @staticmethod
    def _amended(piece: Piece, shift: Callable[[int], int], places: Iterable[int]) -> Piece:
        start, end = shift(piece.position), shift(piece.position + piece.tokens)
        again = sum(start <= place < end for place in places)
        return replace(piece, position=start).resized(end - start, piece.rewritten + again)

    def _tails(self, patches: Sequence[Patch], images: Sequence[Image]) -> list[_Tail]:
        """What follows each patch, with the `images` that are left. Raise UnsupportedError if it cannot be moved."""
        parts = [part for part in align(patches, len(self)) if not part.patch and part.before[0] >= patches[0].last]
        found = []
        for part in parts:
            start, end = part.before
            at, to = self.position(start), position(images, part.after[0])
            reason = self.context.can_move(at, to, self.position(end) - at)
            if reason:
                raise UnsupportedError(f"what follows the change cannot be moved: {reason}")
            found.append((start, end, at, to))
        return [] if self.dry else [_Tail(*one, *self.read(*one[:2], self.context.lossless_type)) for one in found]

    def _spread(self, keep: int, tails: Sequence[_Tail]) -> None:
        """Keep the first rows, put what follows each patch where it will be, and leave the rest vacant."""
        self.context.truncate(self.seq_id, self.position(keep))
        for tail in tails:
            tokens = np.array(self._tokens[tail.start : tail.end], np.int32)
            self.context.splice(self.seq_id, tail.to, tokens, tail.rows, tail.at, axes=tail.axes)

    def read(self, start: int, end: int, dtype: str) -> tuple[tuple[LayerRows, ...], NDArray[np.int32] | None]:
        """Rows [start, end), rotated as they are, and their positions on three axes where images share them."""
        at = self.position(start)
        if any(start <= image.first < end and image.grid is not None for image in self._images):
            return self.context.read_axes(self.seq_id, at, end - start, base=at, dtype=dtype)
        return self.context.read(self.seq_id, at, end - start, base=at, dtype=dtype), None

    def truncate(self, length: int) -> None:
        """Go back to the first `length` tokens. Raise EngineError for a cut inside of an image."""
        if not 0 <= length <= len(self):
            raise EngineError(f"cannot go back to {length} tokens, the sequence has {len(self)}")
        self._divided = min(self._divided, length)
        at = self.position(length)
        if length < self._done:
            if not self.dry:
                self.context.truncate(self.seq_id, at)
            self._done = length
        del self._tokens[length:]
        self._images = [image for image in self._images if image.last <= length]
        self.pieces = self._cut_pieces(length)
        self._logits = None

    def logits(self) -> NDArray[np.float32]:
        """Logits after the last token, [n_vocab]. The last token must have been decoded, not spliced."""
        found = self.try_logits()
        while found is None:
            decode([self])
            found = self.try_logits()
        self.check_intact()
        return found

    def lookahead(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each of these tokens if they came next, [len(tokens), n_vocab]; the sequence stays as it is."""
        self.flush()
        self._check_room(len(tokens))
        with self.context.lookahead_sequence(self.seq_id) as seq_id:
            found = []
            for first in range(0, len(tokens), self.context.n_batch):
                part = tokens[first : first + self.context.n_batch]
                self.context.append({seq_id: np.array(part)}, "all")
                found += [self.context.logits(index) for index in range(len(part))]
            return np.array(found, np.float32).reshape(len(found), self.context.model.n_vocab)

    def generate(self, sampler: Sampler, limit: int) -> Iterator[int]:
        """Write an answer of at most `limit` tokens, yielding each as it is chosen; stops before an end token, and
        where the context is full: `stopped` says why. Raise EngineError where there is no room for the first one."""
        writer = TokenGenerator(self, sampler, limit)
        while writer.active:
            token = writer.choose(self.logits())
            if token is not None:
                yield token

    @property
    def decoded(self) -> int:
        """Tokens that were computed: all but the spliced ones, and of these what was recomputed in place."""
        there = ("spliced", "live")
        return len(self) - sum(piece.tokens - piece.rewritten for piece in self.pieces if piece.how in there)

    def count(self, how: How) -> int:
        """Tokens of all pieces that came about this way."""
        return sum(piece.tokens for piece in self.pieces if piece.how == how)

    @property
    def room(self) -> int:
        """How many more tokens there is room for, those that are pending counted as there."""
        if self.dry:
            return self.size - len(self)
        return min(self.size - len(self), self.context.room(self.seq_id) - len(self.pending))

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end of the last piece. Raise EngineError where there is no room for them."""
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


def _kept(segment: Segment) -> dict[str, Any]:
    """What a piece tells of how its rows were kept."""
    return {"kept": segment.kv, "nbytes": segment.nbytes} if any(quantized(segment.kv)) else {}


def _next_size(tokens: int) -> int:
    return -(-(tokens + 256) // 1024) * 1024
