"""Keeps live sequences as a prefix cache, and finds the longest reusable prefix for a new prompt.

K/V is reusable only if all tokens from the start are equal and their K/V was made in the same way: decoded, spliced
from the same segment with the same seam, or reused only where exact. A skill that begins to differ is not reused in
part. A few tokens before the first question are not reused either where decoding starts a batch anyway, so that another
question about the same skill has bit-identical results to a separate run. An exact prompt goes on only after batches of
its own prefill, and evicts other idle sequences. A salt separates tenants.

A recurrent state exists after the last token only. So that a prompt can go on earlier, copies of it are kept while a
prompt is prefilled (KVSequence.states), where others are likely to begin to differ (PrefixStore.states). Batches end
there, in each prefill of the prompt alike.

Evicted prefixes go to host memory (PrefixStore), with which a prompt may go on where it has more of its tokens than any
live sequence. Rows are stored in blocks, a tree of them per salt: prefixes share the blocks of the tokens with which
all of them begin. With recurrent layers a block ends where there is a state. Without room for another block, the least
recently used one is dropped. Rows are read without loss and restored at their positions, so they are the same bits as
before. The states of live sequences count as stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.context import Context, State
from notes_cli.engine.limits import available_memory
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import Identity, LayerRows, Media, Segment, Stored, Tokens, concatenate_rows
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import NotesError, SegmentError
from notes_cli.library.container import open_segment
from notes_cli.library.segment_files import mark_use
from notes_cli.runtime.assemble import APART
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.token_runs import MOVED, PlacedRun, Source, TextIndex
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.prompt import Chunk

BLOCK = 256  # tokens
WORTH = 16  # a restore must save more tokens than this
MOST = 8 << 30  # bytes by default, as for --cache-ram of llama-server
STATE_EVERY = 1024  # tokens between kept states at least; a prompt has at most STATES of these
STATES = 8
MOST_STATES = 16  # of a sequence
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Block:
    """The K/V of some tokens, valid after those of its ancestors only."""

    segment: Segment  # without recurrent layers; of a file its head
    origins: Tokens  # of its tokens (runtime/prefix_cache.py)
    nbytes: int
    siblings: list[Block]  # all that follow the same tokens, itself among them
    state: State | None = None  # of recurrent layers after its last token
    children: list[Block] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def in_file(self) -> bool:
        return bool(self.segment.file_size)

    @property
    def decoded(self) -> bool:
        """True if it has no K/V of another context."""
        return bool((self.origins >= 0).all())

    def common(self, tokens: Tokens, origins: Tokens, *, moved: bool = False) -> int:
        """As `common_length`, for the block."""
        return common_length(self.segment.tokens, self.origins, tokens, origins, moved=moved)


def common_length(cached: Tokens, cached_origins: Tokens, tokens: Tokens, origins: Tokens, *, moved: bool) -> int:
    """Return the number of leading tokens of a prompt that a cached one has, too, with equal origins. `moved`: or with
    those of runs, where the prompt's would be decoded."""
    most = min(len(cached), len(tokens))
    theirs, ours = cached_origins[:most], origins[:most]
    same = (cached[:most] == tokens[:most]) & ((theirs == ours) | (moved & (ours == 0) & (theirs == MOVED)))
    return most if same.all() else int(same.argmin())


class PrefixStore:
    """Blocks of at most `budget` bytes. Use it from the thread of the context."""

    def __init__(self, workspace: Workspace, budget: int) -> None:
        self.budget, self.nbytes, self._workspace = budget, 0, workspace
        self.keeps_states = self.recurrent and budget > 0 and workspace.context.supports("restore") is None
        self.state_size = workspace.context.state_nbytes if self.keeps_states else 0
        self.live_states: dict[int, State] = {}  # of live sequences, by identity
        self.hits = self.restored = 0  # restored prefixes and their tokens
        self._identity: Identity | None = None  # of the context that all rows are from
        self._first: dict[str, list[Block]] = {}  # by salt
        self._blocks: dict[Block, None] = {}  # least recently used first, and each before its ancestors

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def recurrent(self) -> bool:
        return self._workspace.model.recurrent

    @property
    def drops(self) -> str:
        """Why rows before the last ones are missing; empty where the cache keeps all."""
        return self._context.drops

    @property
    def states_kept(self) -> int:
        return len(self.live_states) + sum(block.state is not None for block in self._blocks)

    @property
    def live_bytes(self) -> int:
        return sum(state.nbytes for state in self.live_states.values())

    @property
    def _context(self) -> Context:
        return self._workspace.context

    def find(self, tokens: Tokens, origins: Tokens, salt: str, *, moved: bool = False) -> list[tuple[Block, int]]:
        """Return the blocks with the longest common prefix, and its number of tokens in each of them
        (`common_length`). A recurrent state exists after the last token of its block only."""
        path, blocks = list[tuple[Block, int]](), self._first.get(salt, [])
        if blocks and self._context.identity("") != self._identity:  # grown, it rotates otherwise (LongRoPE)
            self.clear()
            return []
        while blocks:
            found = [(block.common(tokens, origins, moved=moved), block) for block in blocks]
            if self.recurrent:
                found = [(count, block) for count, block in found if count == len(block)]
            count, block = max(found, key=lambda one: (one[0], one[1].decoded, -len(one[1])), default=(0, None))
            if block is None or not count:
                break
            path.append((block, count))
            tokens, origins = tokens[count:], origins[count:]
            blocks = block.children if count == len(block) else []
        return path

    def paths(self, tokens: Tokens, origins: Tokens, salt: str) -> Iterator[tuple[Tokens, Tokens]]:
        """Yield tokens and origins of the blocks that a prompt begins with, and each block that may follow them."""
        path = [block for block, _ in self.find(tokens, origins, salt)]
        for block in path[-1].children if path else self._first.get(salt, []):
            blocks = [*path, block]
            yield (
                np.concatenate([one.segment.tokens for one in blocks]),
                np.concatenate([one.origins for one in blocks]),
            )

    def add_file(self, segment: Segment) -> None:
        """Add the file of a prefix that was decoded, whose K/V is read each time that it is restored."""
        self._identity = self._context.identity("")
        siblings = self._first.setdefault("", [])
        siblings.append(Block(replace(segment, name=""), np.zeros(len(segment), np.int32), 0, siblings))

    def restore(self, sequence: KVSequence, path: list[tuple[Block, int]], length: int) -> None:
        """Append the K/V of these blocks that the sequence lacks, up to `length` tokens. On failure the sequence is
        unchanged."""
        begun, place = len(sequence), 0
        try:
            if self.recurrent:
                self._restore_states(sequence, [block for block, _ in path], length)
            else:
                for block, count in path:
                    first, last = max(len(sequence) - place, 0), min(count, length - place)
                    if first < last:
                        sequence.splice(block.segment.slice(first, last))
                    place += count
        except BaseException as error:
            sequence.truncate(begun)
            if not isinstance(error, (NotesError, MemoryError)):
                raise
            for block, _ in path:
                if block.in_file and block in block.siblings:  # it cannot be read
                    block.siblings.remove(block)
            return
        self._use(block for block, _ in path)
        if not sequence.dry:
            self.hits, self.restored = self.hits + 1, self.restored + len(sequence) - begun

    def _restore_states(self, sequence: KVSequence, blocks: list[Block], length: int) -> None:
        """Restore the first `length` tokens of these blocks, with all their states, in an empty sequence."""
        ends = list(accumulate(map(len, blocks)))
        blocks = blocks[: ends.index(length) + 1]
        segments = [_opened(block.segment) if block.in_file else block.segment for block in blocks]
        attention = iter(concatenate_rows([[one for one in each.layers if one.part != "state"] for each in segments]))
        own = iter([one for one in segments[-1].layers if one.part == "state"])  # of a file
        rows = [
            next(own, None)
            or LayerRows(layer.layer, _zeros(layer.n_embd_k), _zeros(layer.n_embd_v), "state")  # set below
            if layer.part == "state"
            else next(attention)
            for layer in self._context.layers
        ]
        media = [
            replace(image, first=image.first + end - len(segment), last=image.last + end - len(segment))
            for end, segment in zip(ends, segments, strict=False)
            for image in segment.media
        ]
        axes = None
        if media and any(segment.axes is not None for segment in segments):
            axes = np.concatenate([_absolute_axes(segment) for segment in segments])
        tokens = np.concatenate([segment.tokens for segment in segments])
        sequence.splice(replace(segments[0], tokens=tokens, layers=tuple(rows), media=tuple(media), axes=axes))
        states = {end: block.state for end, block in zip(ends, blocks, strict=False)}
        if not sequence.dry and states[length] is None:
            states[length] = self._context.state(sequence.seq_id)
            mark_use(segments[-1].path, length)
        sequence.restore_states({end: state for end, state in states.items() if state is not None})

    def save(self, sequence: KVSequence, tokens: Tokens, origins: Tokens, salt: str) -> None:
        """Store the rows of a sequence with these tokens, as far as they can be read and the budget allows."""
        kept: list[Block] = []
        try:
            if len(tokens) <= WORTH or not sequence.intact or not self.exact:
                return
            identity = self._context.identity("")
            if identity != self._identity:
                self.clear()
                self._identity = identity
            siblings = self._first.setdefault(salt, [])
            states = {**sequence.states, len(tokens): self._context.state(sequence.seq_id)} if self.recurrent else {}
            whole: Segment | None = None  # with recurrent layers no part can be read
            for first, last in self._spans(sequence, len(tokens)):
                span = tokens[first:last], origins[first:last]
                if (block := self._covering(siblings, *span, final=last == len(tokens))) is None:
                    nbytes = lossless_bytes(self._context, last - first) + sum(part.nbytes for part in span)
                    nbytes += states[last].nbytes if states else 0
                    if not self.make_room(nbytes, kept):
                        break
                    if not self.recurrent:
                        segment = self._read(sequence, first, last, span[0])
                    else:
                        whole = whole or self._read(sequence, 0, len(tokens), tokens)
                        segment = _part(whole, first, last, sequence.position(first))
                    block = Block(segment, span[1].copy(), nbytes, siblings, states.get(last))
                    self._add(block)
                kept.append(block)
                siblings = block.children
        except (NotesError, MemoryError):
            pass  # blocks before the failure are complete
        finally:
            self._use(kept)
            self._first = {salt: blocks for salt, blocks in self._first.items() if blocks}

    def states(self, prompt: Prompt) -> tuple[int, ...]:
        """Return after how many tokens of a prompt the recurrent state is kept: before the first question, the last
        answer, the last question and the next answer, and every STATE_EVERY tokens of a text between. They depend on
        the prompt alone, so that a prefill has the same batches whatever is cached."""
        if not self.keeps_states:
            return ()
        ends = list(accumulate(map(len, prompt.tokens)))
        starts, last = [0, *ends[:-1]], prompt.chunks[-1]
        asked = [start for start, chunk in zip(starts, prompt.chunks, strict=True) if chunk.kind == "question"]
        opening = last.runs[-1:] if last.runs and last.runs[-1].special else ()  # of the answer
        after = len(self._workspace.tokenize(Chunk("text", opening)))
        texts = [start for start, chunk in zip(starts, prompt.chunks, strict=True) if chunk.kind != "splice"]
        kept = {*asked[:1], *texts[-2:], ends[-1] - max(1, after)}
        step = max(STATE_EVERY, -(-ends[-1] // STATES))
        for first, end, chunk in zip(starts, ends, prompt.chunks, strict=True):
            if chunk.kind != "splice":  # a skill has batches of its own
                kept |= {*range(first + step, min(end, ends[-1] - step), step)}
        return tuple(sorted(kept - {0}))

    def clear(self) -> None:
        self._first, self._blocks, self.nbytes, self.live_states = {}, {}, 0, {}

    @property
    def exact(self) -> bool:
        """True if rows of this context can be read and restored bit for bit: no window has dropped any, and keys of an
        indexer, which are rounded, are not among them."""
        context = self._context
        readable = context.supports("read") is None and context.supports("restore") is None
        return readable and not context.drops and all(layer.part != "indexer" for layer in context.layers)

    def _spans(self, sequence: KVSequence, count: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens [first, last) of each block. An image is a block of its own; a recurrent state is valid
        after the last token of its block only."""
        if self.recurrent:
            yield from pairwise(sorted({0, *sequence.states, count}))
            return
        images = sequence.images
        cuts = {*range(0, count, BLOCK), count, *(cut for image in images for cut in (image.first, image.last))}
        yield from pairwise(sorted(c for c in cuts if not any(image.first < c < image.last for image in images)))

    def _covering(self, blocks: list[Block], tokens: Tokens, origins: Tokens, *, final: bool) -> Block | None:
        """Return the block with exactly these tokens; for the `final` ones of a prefix, also one with more."""
        longer = final and not self.recurrent
        found = (block for block in blocks if block.common(tokens, origins) == len(tokens))
        return next((block for block in found if longer or len(block) == len(tokens)), None)

    def make_room(self, nbytes: int, kept: list[Block]) -> bool:
        """Drop the least recently used blocks, but none of `kept`, until there is room. Returns False if that is not
        enough."""
        while self.nbytes + self.live_bytes + nbytes > self.budget:
            block = next(iter(self._blocks), None)
            if block is None or block in kept:
                return False
            self._drop(block)
        return True

    def _read(self, sequence: KVSequence, first: int, last: int, tokens: Tokens) -> Segment:
        rows, axes = sequence.read(first, last, self._context.lossless_type)
        assert self._identity is not None
        base = sequence.position(first)
        images = [image for image in sequence.images if first <= image.first < last]
        media = tuple(Media(image.first - first, image.last - first, image.positions, "", 0, 0) for image in images)
        axes = None if axes is None else axes - base
        segment = Segment("", "", "", tokens.copy(), base, NO_TOKENS, (), self._identity, rows)
        return replace(segment, media=media, axes=axes)

    def _add(self, block: Block) -> None:
        """Add a block, in place of shorter ones with the same tokens that nothing follows."""
        if not self.recurrent:
            for other in list(block.siblings):
                span = block.segment.tokens, block.origins
                if not other.children and other.common(*span) == len(other):
                    self._drop(other)
        block.siblings.append(block)
        self._blocks[block] = None
        self.nbytes += block.nbytes

    def _drop(self, block: Block) -> None:
        block.siblings.remove(block)
        del self._blocks[block]
        self.nbytes -= block.nbytes

    def _use(self, path: Iterator[Block] | list[Block]) -> None:
        """Mark blocks as used, each more recently than those after it."""
        for block in reversed(list(path)):
            if block in self._blocks:  # no file
                self._blocks[block] = self._blocks.pop(block)


def _part(whole: Segment, first: int, last: int, base: int) -> Segment:
    """Copy tokens [first, last) of a segment whose axes count from 0, without its recurrent layers."""
    rows = tuple(layer.cut(slice(first, last)) for layer in whole.layers if layer.part != "state")
    rows = tuple(replace(layer, k=layer.k.copy(), v=layer.v.copy()) for layer in rows)
    media = [image for image in whole.media if first <= image.first < last]
    return replace(
        whole,
        tokens=whole.tokens[first:last].copy(),
        base=base,
        layers=rows,
        media=tuple(replace(image, first=image.first - first, last=image.last - first) for image in media),
        axes=None if whole.axes is None else whole.axes[first:last] - base,
    )


def _opened(head: Segment) -> Segment:
    segment = open_segment(head.path)
    if segment.checksum != head.checksum:
        raise SegmentError(f"{head.path} is another file since the start of the server")
    return replace(segment, name="")


def _zeros(columns: int) -> NDArray[np.float32]:
    return np.zeros((1, columns), np.float32)


def _absolute_axes(segment: Segment) -> NDArray[np.int32]:
    """Return the positions of a segment's rows on three axes, [n, 3], from the start of its sequence."""
    axes = np.arange(len(segment), dtype=np.int32)[:, None].repeat(3, 1) if segment.axes is None else segment.axes
    return segment.base + axes


def lossless_bytes(context: Context, count: int) -> int:
    """Return the bytes of so many rows of attention as they are read."""
    size = 2 if context.lossless_type == "f16" else 4
    return sum(size * count * (layer.n_embd_k + layer.n_embd_v) for layer in context.layers if layer.part != "state")


def default_budget() -> int:
    """Return a quarter of the free memory, at most MOST; 0 where it is unknown."""
    return min(MOST, (available_memory() or 0) // 4)


_DECODED, _EXACT = -1, -2  # instead of a seam: origin of a segment's K/V
# How much a request may reuse: "exact": equal prefixes; "compiled": also runs of compiled texts
# (runtime/token_runs.py), "learned": also of learned ones (serve/learned.py).
Reuse = Literal["exact", "compiled", "learned"]
REUSES: tuple[Reuse, ...] = get_args(Reuse)
REMEMBERED = 4096  # numbered origins kept


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A prompt's tokens, and the origin that each one's K/V will have."""

    prompt: Prompt  # rendered
    tokens: Tokens
    origins: Tokens  # 0: decoded; above: the number of the splice's origin; below: of a run, with another left context
    splices: tuple[tuple[int, int], ...]  # [first, last) of each skill with an origin of its own
    skills: tuple[tuple[int, int], ...]  # and of each skill, also those that are decoded, in batches of their own
    prefix_only: int  # tokens up to the end of the last prefix-only skill; 0 without one
    states: tuple[int, ...] = ()  # tokens after which a recurrent state is kept
    reuse: Reuse = "exact"
    compiled: tuple[Segment, ...] = ()  # compiled texts with runs of its tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def takes_runs(self) -> bool:
        return self.reuse != "exact"

    @property
    def texts(self) -> list[tuple[int, int]]:
        """Tokens [first, last) of each text that is decoded, without the prompt's last token, whose logits are
        needed."""
        ends = list(accumulate(map(len, self.prompt.tokens)))
        spans = zip([0, *ends], ends, self.prompt.chunks, strict=False)
        return [(first, min(last, len(self) - 1)) for first, last, chunk in spans if chunk.kind != "splice"]

    def begin(self, length: int) -> int:
        """Return where to continue with a cached prefix of this length: after it, or in a first turn at the start of
        the batch that is decoded separately, if that is at most APART tokens before."""
        talk = self.prompt.conversation
        if talk and any(message.role == "assistant" for message in talk.messages):
            return length
        batch = max((last for _, last in self.skills if last <= length), default=0)
        if self.asked <= length and self.asked - batch > APART:
            batch = self.asked
        return batch if length - batch <= APART else length

    def begin_exactly(self, sequence: KVSequence, length: int) -> int:
        """Return where to continue so that all K/V, that of the first `length` tokens of the sequence included, is bit
        for bit that of a prefill of this prompt alone: where both begin a batch, after the same batches."""
        base, cuts, whole, _ = sequence.batches
        size, asked = sequence.context.n_prefill, self.asked
        ours = {end for span in self.skills for end in span if end <= asked}
        divided = asked - max(ours, default=0) > APART  # it ends a batch there (runtime/assemble.py)
        ours |= {asked, *self.states} if divided else {*self.states}
        theirs = {cut for cut in cuts if not any(start < cut < end for start, end in self.splices)}
        first, length = base, min(length, whole)
        for cut in sorted(cut for cut in ours | theirs if base < cut):
            if cut in ours & theirs and cut <= length:
                first = cut
            else:
                length = min(length, cut)
                break
        while length > first:
            length -= (length - first) % size
            while divided and asked - APART <= length < asked:  # the rest would be decoded with the question
                length -= size
            inside = [start for start, end in self.splices if start < length < end]
            if not inside:
                break
            length = inside[0]
        return length if length >= base else 0

    @property
    def opening(self) -> int:
        """Number of tokens before its first question."""
        asked = (number for number, chunk in enumerate(self.prompt.chunks) if chunk.kind == "question")
        return sum(map(len, self.prompt.tokens[: next(asked, 0)]))

    @property
    def asked(self) -> int:
        """Number of tokens before its last text, the question."""
        return len(self) - len(self.prompt.tokens[-1])

    @property
    def boundary(self) -> int:
        """Number of tokens before the batch that its question is decoded in."""
        return self.begin(self.asked)

    def live(self, length: int) -> list[Piece]:
        """Return pieces for a cached prefix of this length."""
        pieces, place = [], 0
        for chunk, ids in zip(self.prompt.chunks, self.prompt.tokens, strict=True):
            if (count := min(len(ids), length - place)) > 0:
                near = np.count_nonzero(self.origins[place : place + count] < 0)
                detail = str(near) if near else ""
                pieces.append(Piece(chunk.kind, chunk.name, place, count, "live", Reason.LIVE, detail))
            place += count
        return pieces


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """A sequence with a reusable prefix."""

    sequence: KVSequence
    tokens: Tokens  # reusable tokens, with their origins
    origins: Tokens
    salt: str
    layout: Layout | None = None  # of its prompt; its tokens may go on behind it
    idle: bool = False
    coming: bool = False  # its tokens are being prefilled, in a sequence that goes on after them (`fork`)
    used: int = 0  # larger is more recent

    def __len__(self) -> int:
        return len(self.tokens)


class PrefixCache:
    """The reusable sequences of a context, and the store for evicted ones, if any."""

    def __init__(self, store: PrefixStore | None = None) -> None:
        self.entries: list[CachedPrefix] = []
        self.store = store
        self._numbers: dict[object, int] = {}  # the latest used are last
        self._numbering = threading.Lock()  # layouts may be made in several threads
        self._unused = count(1)
        self._clock = count(1)

    def layout(self, prompt: Prompt) -> Layout:
        """Compute the layout of a rendered prompt."""
        by_name = {segment.name: segment for segment in prompt.segments}
        origins = []
        splices, skills, prefix_only, place = list[tuple[int, int]](), list[tuple[int, int]](), 0, 0
        for chunk, ids in zip(prompt.chunks, prompt.tokens, strict=True):
            spliced = prompt.splice and chunk.kind == "splice" and chunk.name not in prompt.decoded
            image = chunk.kind == "splice" and bool(by_name[chunk.name].media)  # its tokens do not identify it
            how = _DECODED if not spliced else _EXACT if prompt.exact else prompt.seam
            edit = None
            if spliced and chunk.name in prompt.changes and prompt.method.edits_rows:
                edit = str(prompt.method), ids.tobytes()
            # Exact: the same tokens as a text are decoded in other batches.
            own = spliced or image or (prompt.exact and chunk.kind == "splice")
            origins.append(np.full(len(ids), self._number(by_name[chunk.name], how, edit) if own else 0, np.int32))
            skills += [(place, place + len(ids))] if chunk.kind == "splice" else []
            if own:
                splices.append((place, place + len(ids)))
                prefix_only = place + len(ids) if by_name[chunk.name].prefix_only else prefix_only
            place += len(ids)
        tokens = np.concatenate(prompt.tokens).astype(np.int32)
        states = self.store.states(prompt) if self.store else ()
        return Layout(prompt, tokens, np.concatenate(origins), tuple(splices), tuple(skills), prefix_only, states)

    def _number(self, segment: Segment, how: int, edit: tuple[str, bytes] | None = None) -> int:
        """Number an origin: equal for segments with the same K/V that are placed alike. `how`: the seam, _DECODED or
        _EXACT. `edit`: method and tokens of its new values."""
        layers = segment.layers
        if isinstance(layers, Stored):
            rows: object = tuple(tensor.checksum for layer in layers.tensors for tensor in (layer.k, layer.v))
        else:  # in memory, from an image that is not stored: the same bytes and encoder give the same K/V
            rows = segment.text, segment.projector, segment.context.tobytes(), segment.blocks
        key = segment.name, segment.base, segment.prefix_only, rows, how, edit
        with self._numbering:
            number = self._numbers.pop(key, None) or next(self._unused)
            self._numbers[key] = number
            if len(self._numbers) > REMEMBERED:  # a dropped origin gets a new number: at worst it is decoded again
                del self._numbers[next(iter(self._numbers))]
        return number

    def find(self, layout: Layout, salt: str) -> tuple[CachedPrefix | None, int, int]:
        """Return the sequence with the longest reusable prefix, its length, and the length once running prefills are
        done, or what `restore` reaches from there if that is about as much. A recurrent state that is stored for a
        longer prefix is restored without one. The last token is always left to decode."""
        best, length, coming = None, 0, 0
        for cached in self.entries:
            if cached.salt != salt or not cached.sequence.intact:
                continue
            ours = layout.tokens[:-1], layout.origins[:-1]
            common = common_length(cached.tokens, cached.origins, *ours, moved=layout.takes_runs)
            if cached.coming:
                coming = max(coming, common if common == len(cached.tokens) else 0)
                continue
            rows, states, due = cached.sequence.rows, None, None
            context = cached.sequence.context
            if context.model.recurrent or context.drops:  # a window may lack rows before the last one
                states = {*cached.sequence.states, *([rows] if rows == len(cached.sequence) else [])}
                due = [at for at in cached.sequence.states_due if at > rows]
            usable = self._usable_length(layout, min(common, rows), states)
            while layout.prompt.exact and usable > (begin := layout.begin_exactly(cached.sequence, usable)):
                usable = begin if states is None else self._usable_length(layout, begin, states)
            if rows < common:
                coming = max(coming, self._usable_length(layout, common, due))
            if usable > length:
                best, length = cached, usable
        _, stored = self._stored(layout, salt)
        if self.store and self.store.recurrent and stored > length + WORTH:
            best, length = None, 0
        return best, length, length if coming <= stored + WORTH else max(coming, length)

    def _stored(self, layout: Layout, salt: str) -> tuple[list[tuple[Block, int]], int]:
        """Return the blocks of the store that a prompt begins with, and how many of their tokens are reusable."""
        if self.store is None or layout.prompt.exact:  # it does not know the batches of its rows
            return [], 0
        most = len(layout) - 1
        path = self.store.find(layout.tokens[:most], layout.origins[:most], salt, moved=layout.takes_runs)
        ends = list(accumulate(count for _, count in path))
        return path, self._usable_length(layout, ends[-1] if ends else 0, ends if self.store.recurrent else None)

    def difference(self, layout: Layout, salt: str) -> int | None:
        """Return the index of the first token in which a prompt of a recurrent model differs from the most similar one
        that is cached, or their tokens in common if a window has dropped rows. None if that has no further tokens, or
        none in common."""
        if self.store is None or not (self.store.recurrent or self.store.drops):
            return None
        cached = [(one.tokens, one.origins) for one in self.entries if one.salt == salt]
        common, more = 0, False
        for tokens, origins in (*cached, *self.store.paths(layout.tokens, layout.origins, salt)):
            length = common_length(tokens, origins, layout.tokens, layout.origins, moved=False)
            if length > common:
                common, more = length, length < len(tokens)
        return common if more and (common < len(layout) or self.store.drops) else None

    def restore(self, sequence: KVSequence, layout: Layout, salt: str) -> int:
        """Append to the sequence the K/V that the store has of its prompt beyond its live prefix. Returns the length of
        the sequence."""
        path, length = self._stored(layout, salt)
        if self.store and length > len(sequence) + WORTH:
            self.store.restore(sequence, path, length)
            sequence.pieces = layout.live(len(sequence))
        return len(sequence)

    def _usable_length(self, layout: Layout, length: int, states: Iterable[int] | None) -> int:
        """Reduce a common length to one at which the prompt can continue. `states`: the lengths at which recurrent
        states exist; None for other models."""
        if states is not None:
            usable = (at for at in states if layout.prefix_only <= at <= length)
            return max((at for at in usable if not any(first < at < last for first, last in layout.splices)), default=0)
        for first, last in layout.splices:
            if first < length < last:
                length = first
        length = layout.begin(length)
        return 0 if length < layout.prefix_only else length

    def plan(
        self, workspace: Workspace, layout: Layout, salt: str, cached: CachedPrefix | None, length: int
    ) -> tuple[Layout, list[PlacedRun]]:
        """Plan a prompt that continues the first `length` tokens of `cached`, or a longer prefix in the store.
        Returns its layout, with the final origins of its K/V, and the runs after that prefix, ascending."""
        path, stored = self._stored(layout, salt)
        begin, origins = length, layout.origins.copy()
        if stored > length + WORTH:
            begin = stored
            origins[:begin] = np.concatenate([block.origins[:count] for block, count in path])[:begin]
        if cached is not None:
            origins[:length] = cached.origins[:length]
        context, runs = workspace.context, list[PlacedRun]()
        cuttable = not (context.model.recurrent or context.drops or context.supports("splice"))
        if layout.takes_runs and cuttable:
            sources = list(map(Source, layout.compiled))
            index = TextIndex(workspace.model, [source.texts for source in sources])
            runs = [PlacedRun(run, sources[run.source]) for run in index.runs(layout.tokens, layout.texts, begin)]
            for placed in runs:
                origins[placed.run.first : placed.run.last] = MOVED
        return replace(layout, origins=origins), runs

    def begin(
        self, cached: CachedPrefix, length: int, layout: Layout, *, dry: bool = False, fork: bool = False
    ) -> KVSequence:
        """Continue after the first `length` tokens of a cached sequence: in that sequence if it is idle and has no more
        tokens, or for an exact prompt (`make_exact`), else in a fork. `dry`: for planning. `fork`: always in a fork,
        whose pieces are those of the cached sequence."""
        cached.used = next(self._clock)
        alone = layout.prompt.exact and len(self.entries) == 1
        if cached.idle and (length == len(cached.sequence) or alone) and not (dry or fork):
            self.entries.remove(cached)
            sequence = cached.sequence
            sequence.truncate(length)
            cached.tokens, cached.origins = cached.tokens[:length], cached.origins[:length]
        else:
            sequence = cached.sequence.share(length, dry=dry)
        if not fork:
            sequence.pieces = layout.live(length)
        sequence.seconds = {"splice": 0.0, "decode": 0.0}
        sequence.token_limit = None
        return sequence

    def make_exact(self, cached: CachedPrefix | None) -> None:
        """Evict all idle sequences but this one, for an exact prompt: attention sums in the order of the cells, so that
        its K/V is bit for bit that of a prefill alone only in the same cells."""
        while self.evict(cached):
            pass

    def undo(self, cached: CachedPrefix | None, sequence: KVSequence) -> None:
        """Revert `begin`."""
        if cached is not None and cached.sequence is sequence:
            self.entries.append(cached)
        else:
            sequence.close()

    def add(self, sequence: KVSequence, layout: Layout, salt: str, length: int | None = None) -> CachedPrefix:
        """Add a sequence in use, whose decoded tokens are reusable already; or, with a `length`, the fork of so many of
        them that `fork` will make."""
        tokens, origins = layout.tokens[:length], layout.origins[:length]
        cached = CachedPrefix(
            sequence, tokens, origins, salt, layout, coming=length is not None, used=next(self._clock)
        )
        self.entries.append(cached)
        return cached

    def fork(self, cached: CachedPrefix) -> None:
        """Fork the sequence, which has all of its tokens now; the fork is idle."""
        cached.sequence = cached.sequence.share(len(cached.tokens))
        cached.coming, cached.idle = False, True

    def set_idle(self, cached: CachedPrefix) -> None:
        """Mark a sequence as idle, with all its decoded tokens; drop it if it is not intact."""
        seq = cached.sequence
        if not seq.intact or not seq.rows:
            self.drop(cached)
            return
        try:
            seq.truncate(seq.rows)
        except Exception:
            self.drop(cached)
            raise
        known = min(len(cached.tokens), len(seq))
        cached.tokens = seq.tokens
        cached.origins = np.concatenate([cached.origins[:known], np.zeros(len(seq) - known, np.int32)])
        cached.idle, cached.used = True, next(self._clock)

    def drop(self, cached: CachedPrefix) -> None:
        if cached in self.entries:
            self.entries.remove(cached)
        cached.sequence.close()

    def idle_prefixes(self) -> Iterator[CachedPrefix]:
        """Yield idle sequences, least recently used first."""
        yield from sorted((cached for cached in self.entries if cached.idle), key=lambda cached: cached.used)

    def evict(self, kept: CachedPrefix | None = None) -> bool:
        """Move the least recently used idle sequence but `kept` to the store. Returns False if there is none."""
        for cached in self.idle_prefixes():
            if cached is kept:
                continue
            try:
                if self.store:
                    self.store.save(cached.sequence, cached.tokens, cached.origins, cached.salt)
            finally:
                self.drop(cached)
            return True
        return False

    def bound_states(self) -> None:
        """Keep the states of live sequences within half the budget of the store, which drops blocks for them: drop
        states of the sequence with the most of them, last the first one, after its system text, and the last one."""
        if self.store is None or not self.store.keeps_states:
            return
        entries = sorted(self.entries, key=lambda cached: (not cached.idle, cached.used))
        while True:
            self.store.live_states = {id(state): state for one in entries for state in one.sequence.states.values()}
            states = max((one.sequence.states for one in entries), key=len, default={})
            if len(states) <= MOST_STATES and self.store.live_bytes <= self.store.budget // 2:
                self.store.make_room(0, [])
                return
            del states[sorted(states)[1 if len(states) > 2 else 0]]

    def evict_beyond(self, number: int) -> None:
        """Evict idle sequences until so many are left."""
        while sum(cached.idle for cached in self.entries) > number:
            self.evict()

    def close(self) -> None:
        for cached in list(self.entries):
            self.drop(cached)
        if self.store:
            self.store.clear()
